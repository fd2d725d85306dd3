"""What it takes to load a checkpoint into a built model and its optimizer, beside torch.load of the same state."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from figures import Figure, compare
from local_ranks import choose_plan, one_node_cluster
from problem import CLASSES, FEATURES, data, job
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
    "model; memory is the growth of its peak (ru_maxrss) after that. trainwright reads safetensors files in portions, "
    "computes their SHA-256 and copies into the tensors that are there; the peer is `torch.load(weights_only=True)` of "
    "one file and `load_state_dict` of model and optimizer, without a checksum."
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Seconds and growth of the peak of memory in bytes."""

    seconds: float
    grown_bytes: int


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    """The figures of this benchmark."""
    width, pairs = (SMOKE_WIDTH, 1) if smoke else (WIDTH, PAIRS)
    ref = _alone(_written, folder, width)
    ours, peers = [], []
    for _ in range(pairs):
        ours.append(_alone(_loaded, folder, width, ref))
        peers.append(_alone(_torch_loaded, folder, width))
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


def _alone(work: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


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


def _loaded(folder: Path, width: int, ref: CheckpointRef) -> Loaded:
    engine = _built(folder, width)

    def load() -> None:
        store = open_store(str(folder))
        engine.load(CheckpointReader(store, RUN, ref, read_manifest(store, RUN, ref)))

    return _measured(load)


def _torch_loaded(folder: Path, width: int) -> Loaded:
    engine: Any = _built(folder, width)
    replica = engine.replica

    def load() -> None:
        state = torch.load(folder / FILE, weights_only=True)
        replica.model.load_state_dict(state["model"])
        replica.optimizer.load_state_dict(state["optimizer"])

    return _measured(load)


def _measured(load: Callable[[], None]) -> Loaded:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    load()
    seconds = time.perf_counter() - begun
    return Loaded(seconds=seconds, grown_bytes=1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
