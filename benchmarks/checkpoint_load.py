"""What it takes to load a checkpoint into a built model and its optimizer, beside torch.load of the same state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from figures import Figure, compare
from local_ranks import choose_plan, one_node_cluster
from problem import CLASSES, FEATURES, data, job
from processes import Cost, measured, run_alone
from torch import nn

from trainwright.core.data import Batch, Feed
from trainwright.core.engine import CheckpointManifest, CheckpointRef, Engine, checkpoint_path
from trainwright.core.frameworks import keep_freed_memory
from trainwright.storage.checkpoints import CheckpointReader, CheckpointWriter, read_manifest, write_manifest
from trainwright.storage.object_store import open_store
from trainwright.strategies import single_rank_engine

WIDTH, SMOKE_WIDTH, PAIRS, ROWS = 504_000, 504, 5, 4
GIB, MIB, RUN, FILE = 2**30, 2**20, "loaded", "state.pt"
MOST_S_PER_GIB = 1.0
NOTE = (
    "A model of 134 million parameters in 32 bits with AdamW, 1.5 GiB of state, on one core; a folder on the local "
    "disk, whose files the system has in memory. Each measurement is in a process of its own, which has built the "
    "model; memory is the growth of its peak after that. trainwright reads safetensors files in portions, "
    "computes their SHA-256 and copies into the tensors that are there; the peer is `torch.load(weights_only=True)` of "
    "one file and `load_state_dict` of model and optimizer, without a checksum."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    width, pairs = (SMOKE_WIDTH, 1) if smoke else (WIDTH, PAIRS)
    ref = run_alone(partial(_written, folder, width))
    ours, peers = [], []
    for _ in range(pairs):
        ours.append(run_alone(partial(_loaded, folder, width, ref)))
        peers.append(run_alone(partial(_torch_loaded, folder, width)))
    state_gib = 3 * 4 * sum(parameter.numel() for parameter in _wide(width, device="meta").parameters()) / GIB
    speeds = [[one.seconds / state_gib for one in found] for found in (ours, peers)]
    grown = [median(one.grown_bytes / MIB for one in found) for found in (ours, peers)]
    what = "verify and load, beside what a GiB may take"
    return [
        compare("checkpoint_load", "verify and load, against torch.load, which verifies nothing", "s/GiB", *speeds),
        compare("checkpoint_load", what, "s/GiB", speeds[0], [MOST_S_PER_GIB] * pairs, target=1.0),
        Figure(benchmark="checkpoint_load", what="memory beside the state, against torch.load", unit="MiB",
               ours=grown[0], peer=grown[1], pairs=pairs, count=True),
    ]  # fmt: skip


def _wide(width: int, device: str = "cpu") -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width, device=device), nn.ReLU(), nn.Linear(width, CLASSES, device=device))


def _built(folder: Path, width: int) -> Engine:
    """An engine of one device whose optimizer has its state."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    wanted = job(folder, model=partial(_wide, width), workers=1, batch_size=ROWS, rows=ROWS)
    plan = choose_plan(wanted, one_node_cluster(1, memory_bytes=2**34)).chosen
    columns = data(ROWS)
    batch = Batch(columns=columns, weights=np.ones(ROWS), samples=np.arange(ROWS))
    engine = single_rank_engine(wanted.model_spec(1, lambda: batch), plan)
    engine.train_step(Feed(step=0, parts=((batch,),), data_ranks=range(1), total=1, rows=ROWS))
    return engine


def _written(folder: Path, width: int) -> CheckpointRef:
    """Write both forms of a state."""
    engine: Any = _built(folder, width)
    store, path = open_store(str(folder)), checkpoint_path(1, 1)
    writer = CheckpointWriter(store, RUN, path)
    engine.save(engine.snapshot(), writer)
    manifest = CheckpointManifest(step=1, files=writer.entries)
    replica = engine.replica
    state = {"model": replica.model.state_dict(), "optimizer": replica.optimizer.state_dict()}
    torch.save(state, folder / FILE)
    return CheckpointRef(step=1, path=path, manifest_sha256=write_manifest(store, RUN, path, manifest))


def _loaded(folder: Path, width: int, ref: CheckpointRef) -> Cost:
    engine = _built(folder, width)

    def load() -> None:
        store = open_store(str(folder))
        engine.load(CheckpointReader(store, RUN, ref, read_manifest(store, RUN, ref)))

    return measured(load)


def _torch_loaded(folder: Path, width: int) -> Cost:
    engine: Any = _built(folder, width)
    replica = engine.replica

    def load() -> None:
        state = torch.load(folder / FILE, weights_only=True)
        replica.model.load_state_dict(state["model"])
        replica.optimizer.load_state_dict(state["optimizer"])

    return measured(load)
