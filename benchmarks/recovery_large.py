"""SIGKILL of one of two workers that train 100 million parameters with Adam: a replica's state has to travel."""

from __future__ import annotations

import time
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from figures import Figure, compare
from kills import Schedule
from machine import ray_cluster
from peers.gloo_parameter_server import join
from problem import CLASSES, FEATURES, THREADS
from processes import start_processes
from recovery_runs import STEPS, RecoveryRuns
from stamps import stamping
from torch import distributed, nn

WIDTH, LAYERS, BATCH_SIZE, KILLS = 2048, 24, 16, 7
BROADCAST_BYTES, BROADCASTS = 256 * 2**20, 5
LIMIT_S, TIMES = 0.6, 1.5


def state_bytes(width: int, layers: int) -> int:
    """Bytes of the parameters of `build_large` and of AdamW's two moments."""
    return 3 * 4 * ((FEATURES + 1) * width + layers * (width + 1) * width + (width + 1) * CLASSES)


STATE_BYTES = state_bytes(WIDTH, LAYERS)
WHAT = "SIGKILL to next completed step, one spare"
NOTE = (
    f"A multilayer perceptron of {STATE_BYTES / 12e6:.0f} million float32 parameters and fused AdamW, so "
    f"{STATE_BYTES / 1e9:.2f} GB of state, 2 workers, gloo, global batch {BATCH_SIZE}, one spare, no pause, no "
    f"checkpoint; {KILLS} kills of rank 1, each when the spare is ready; stamps and `next completed step` as in "
    f"`recovery`, so the time includes that of one step. The limit is {LIMIT_S:g} s + {TIMES:g} x state bytes / "
    f"bandwidth. The bandwidth is that of a broadcast of {BROADCAST_BYTES / 2**20:.0f} MiB between two processes over "
    "gloo, with nothing else running, the median of five right before the run."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    width, layers, kills, sent_bytes = (64, 2, 1, 2**20) if smoke else (WIDTH, LAYERS, KILLS, BROADCAST_BYTES)
    broadcast_s = state_bytes(width, layers) / broadcast_bytes_per_s(folder, sent_bytes)
    schedule = Schedule(kills=kills, every=2, offset=0, pause_s=0.0, settled=2)
    own = folder / "ours"
    fields = {
        "model": partial(build_large, width, layers),
        "batch_size": BATCH_SIZE,
        "checkpoint_steps": STEPS,
        "strategy": "data_parallel",
    }
    with ray_cluster():
        runs = RecoveryRuns(workers=2, schedule=schedule)
        found = runs.run_trainwright(own, spares=1, optimizer=stamping(own, fused=True), **fields)
    ours = [item.next_step_s for item in found]
    beyond = [max(0.0, item.next_step_s - item.step_s) for item in found]
    limit, alone = [LIMIT_S + TIMES * broadcast_s] * len(ours), [broadcast_s] * len(ours)
    replayed = [float(item.replayed) for item in found]
    none = [0.0] * len(replayed)
    return [
        compare("recovery_large", f"{WHAT}, against the limit", "s", ours, limit, target=1, tails=True),
        compare("recovery_large", "the same, less one step of before", "s", beyond, limit, tails=True, count=True),
        compare("recovery_large", f"{WHAT}, against a broadcast of the state alone", "s", ours, alone),
        compare("recovery_large", "steps done again", "steps", replayed, none, ratio=False, count=True),
    ]


def broadcast_bytes_per_s(folder: Path, size_bytes: int) -> float:
    """Return the bytes a second of a broadcast of float32 over gloo, as the receiver saw it: the median of five."""
    ranks = (partial(_broadcast, f"{folder}/rendezvous", size_bytes, rank) for rank in range(2))
    with start_processes(*ranks) as pipes:
        _, received_s = [pipe.recv() for pipe in pipes]
    return size_bytes / median(received_s)


def _broadcast(rendezvous: str, size_bytes: int, rank: int, pipe: Connection) -> None:
    torch.set_num_threads(THREADS)
    join(rank, 2, rendezvous)
    tensor, seconds = torch.ones(size_bytes // 4), []
    for _ in range(BROADCASTS + 1):
        distributed.barrier()
        begun = time.perf_counter()
        distributed.broadcast(tensor, 0)
        seconds.append(time.perf_counter() - begun)
    pipe.send(seconds[1:])  # the first one pays for the memory
    distributed.destroy_process_group()


def build_large(width: int, layers: int) -> nn.Module:
    """Linear layers of one width."""
    hidden = chain.from_iterable((nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))
