"""Runs that were trained in several layouts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trainwright as tw
from tests.support.prediction_jobs import job, train
from tests.support.torch_engines import accuracy, double
from trainwright.core.data import Batch
from trainwright.core.events import RunStarted
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store

ROWS = 53  # which neither batches nor ranks divide
TORCH = "trainwright.strategies.torch"
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"engine": f"{TORCH}.engines.fsdp:Sharded", "mesh": Mesh(shard=2), "zero": 3},
    "pipeline": {
        "engine": f"{TORCH}.engines.pipeline:Pipeline", "mesh": Mesh(pipeline=2), "cuts": ("second",),
        "schedule": "1f1b",
        "accumulation": 2,
    },
    "tensor": {"engine": f"{TORCH}.engines.tensor_parallel:TensorParallel", "mesh": Mesh(tensor=2)},
}  # fmt: skip


def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(4)
    return {"id": np.arange(ROWS) + 1000, "x": random.normal(size=(ROWS, 4)), "y": random.integers(0, 3, ROWS)}


def trained(
    folder: Path, layout: str, columns: dict[str, np.ndarray] | None = None, **fields: Any
) -> tuple[tw.Job, torch.nn.Module]:
    """A job with a checkpoint whose run tells that it was trained in a layout, and its model."""
    columns = columns or rows()
    data = tw.datasets.table(columns)
    fields = {"model": double, "train": data, "evaluate": data, "metrics": {"accuracy": accuracy}, **fields}
    chosen = job(folder, **fields)
    held = {name: column[:8] for name, column in columns.items()}
    model = train(chosen, 2, lambda step: Batch(columns=held, weights=np.ones(8), samples=np.arange(8)))
    plan = Plan(strategy=layout, batch_size=8, placement=WorkerResources(cpus=1), **LAYOUTS[layout])
    with EventLog(open_store(chosen.storage), chosen.name) as journal:
        journal.open(1)
        journal.write(RunStarted(run=chosen.name, token=1, plan=asdict(plan)))
    return chosen, model
