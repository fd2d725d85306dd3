"""Trained jobs for tests of predictions, faults at one row, and the check of what was written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

import trainwright as tw
from tests.support.torch_engines import Net, adam, feed, loss, one_device
from trainwright.core.data import Batch
from trainwright.core.engine import checkpoint_path
from trainwright.driver import messages as m
from trainwright.runtime.takeover import DriverWatchdog
from trainwright.storage.checkpoints import CheckpointWriter
from trainwright.storage.object_store import open_store
from trainwright.storage.run_store import RunStore

ROWS, RANGE = 230, 23
Row = dict[str, Any]


def table(rows: int = ROWS) -> dict[str, np.ndarray]:
    return {"id": np.arange(rows) + 1000, "x": np.random.default_rng(2).normal(size=(rows, 4)).astype(np.float32)}


@dataclass(frozen=True)
class Strike:
    """A transform that does something to its process at one row: once, where `mark` is a file's path, or always."""

    what: str
    mark: str = ""
    at: int = 100

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        if row["id"] == 1000 + self.at and self._due():
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "orphan":
                DriverWatchdog().end()
            if self.what == "hang":
                threading.Event().wait()
            raise LookupError("struck")
        return row

    def _due(self) -> bool:
        if not self.mark:
            return True
        try:
            Path(self.mark).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def job(folder: Path, **fields: Any) -> tw.Job:
    given = {
        "name": "served", "model": Net, "optimizer": adam, "loss": loss, "inputs": "x", "targets": "y",
        "train": tw.datasets.table({**table(), "y": np.zeros(ROWS, np.int64)}), "batch_size": 8,
        "storage": str(folder / "runs"),
    }  # fmt: skip
    return tw.Job(**{**given, **fields})


def train(job: tw.Job, steps: int, batch: Callable[[int], Batch]) -> nn.Module:
    """Train here for some steps and commit a checkpoint; the model with its weights."""
    engine = one_device(job.model_spec(steps))
    for step in range(steps):
        engine.train_step(feed(batch(step), step=step))
    store = open_store(job.storage)
    run_store = RunStore(
        store, job.name, job={}, keep=3, fresh=False, note=print,
        begin=lambda token: None, tell=lambda: None,
    )  # fmt: skip
    path, named = checkpoint_path(steps, run_store.acquire()), run_store.chain()
    parent = named[-1].path if named else ""
    writer = CheckpointWriter(store, job.name, path)
    engine.save(engine.snapshot(), writer)
    run_store.commit(m.CommitCheckpoint(step=steps, path=path, files=writer.entries, parent=parent))
    run_store.release(m.ReleaseLease(outcome="stopped", step=steps))
    model: nn.Module = engine.replica.model
    return model.eval()


def columns_of(step: int) -> Batch:
    data = table()
    return Batch(columns={"x": data["x"][:8] + step, "y": np.arange(8) % 3}, weights=np.ones(8), samples=np.arange(8))


def read(folder: Path | str) -> pa.Table:
    """All parts in the order of their names."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(Path(folder).glob("part-*.parquet"))])


def check(folder: Path | str, expected: np.ndarray) -> None:
    """Every sample once, in order, with the plain loop's output."""
    found = read(folder)
    assert found["sample"].to_pylist() == list(range(len(expected)))
    outputs = found["output"].combine_chunks().to_numpy_ndarray()
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-6)
