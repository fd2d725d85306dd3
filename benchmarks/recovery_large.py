"""SIGKILL of one of two workers that train 100 million parameters with Adam: a replica's state has to travel."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from bandwidth import BROADCAST_BYTES, broadcast_bytes_per_s
from contestants import STEPS, Contest
from figures import Figure, compare
from kills import Schedule
from machine import ray_cluster
from problem import CLASSES, FEATURES
from stamps import stamping
from torch import nn

WIDTH, LAYERS, BATCH_SIZE, KILLS = 2048, 24, 16, 7
LIMIT_S, TIMES = 0.6, 1.5
PARAMETERS = (FEATURES + 1) * WIDTH + LAYERS * (WIDTH + 1) * WIDTH + (WIDTH + 1) * CLASSES
STATE_BYTES = 3 * 4 * PARAMETERS
WHAT = "SIGKILL to next completed step, one spare"
NOTE = (
    f"A multilayer perceptron of {PARAMETERS / 1e6:.0f} million float32 parameters and fused AdamW, so "
    f"{STATE_BYTES / 1e9:.2f} GB of state, 2 workers, gloo, global batch {BATCH_SIZE}, one spare, no pause, no "
    f"checkpoint; {KILLS} kills of rank 1, each when the spare is ready; stamps and `next completed step` as in "
    f"`recovery`, so the time includes that of one step. The limit is {LIMIT_S:g} s + {TIMES:g} x state bytes / "
    f"bandwidth. The bandwidth is that of a broadcast of {BROADCAST_BYTES / 2**20:.0f} MiB between two processes over "
    "gloo, with nothing else running, the median of five right before the run."
)


def measure(folder: Path, *, quick: bool) -> list[Figure]:
    """The figures of this benchmark."""
    broadcast_s = STATE_BYTES / broadcast_bytes_per_s(folder)
    schedule = Schedule(kills=1 if quick else KILLS, every=2, offset=0, pause_s=0.0, settled=2)
    own = folder / "ours"
    fields = {"model": build_large, "batch_size": BATCH_SIZE, "checkpoint_steps": STEPS}
    with ray_cluster():
        contest = Contest(workers=2, schedule=schedule)
        found = contest.ours(own, spares=1, optimizer=stamping(own, fused=True), **fields)
    ours = [item.next_step_s for item in found]
    beyond = [item.next_step_s - item.step_s for item in found]
    limit, alone = [LIMIT_S + TIMES * broadcast_s] * len(ours), [broadcast_s] * len(ours)
    replayed = [float(item.replayed) for item in found]
    return [
        compare("recovery_large", f"{WHAT}, against the limit", "s", ours, limit, target=1, tails=True),
        compare("recovery_large", "the same, less one step of before", "s", beyond, limit, tails=True),
        compare("recovery_large", f"{WHAT}, against a broadcast of the state alone", "s", ours, alone),
        compare("recovery_large", "steps done again", "steps", replayed, [0.0] * len(replayed), ratio=False),
    ]


def build_large() -> nn.Module:
    """Linear layers of one width."""
    hidden = chain.from_iterable((nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, CLASSES))
