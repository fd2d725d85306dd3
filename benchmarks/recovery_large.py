"""SIGKILL of one of two workers that train 100 million parameters with Adam: a replica's state has to travel."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path

from bandwidth import BROADCAST_BYTES, broadcast_bytes_per_s
from figures import Figure, compare
from kills import Schedule
from machine import ray_cluster
from problem import CLASSES, FEATURES
from recovery_runs import STEPS, RecoveryRuns
from stamps import stamping
from torch import nn

WIDTH, LAYERS, BATCH_SIZE, KILLS = 2048, 24, 16, 7
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
    """The figures of this benchmark."""
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


def build_large(width: int, layers: int) -> nn.Module:
    """Linear layers of one width."""
    hidden = chain.from_iterable((nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))
