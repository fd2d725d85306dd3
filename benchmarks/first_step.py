"""Time from the call of fit() to the first completed step, with a Ray cluster running."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from figures import Figure, compare
from machine import ray_cluster, settle
from peers import Settings, ray_train
from problem import BATCH_SIZE, WORKERS, job
from processes import SMOKE_ROUNDS, Rounds, run_interleaved
from stamps import read_stamps, stamping

import trainwright as tw

STEPS, FORK_SERVER = 10, "TRAINWRIGHT_FORK_SERVER"
NOTE = (
    "Seconds from the call of `trainwright.fit(job)` and of `TorchTrainer(...).fit()` to the end of the first "
    f"`optimizer.step()` of any rank, as a hook of the optimizer stamps it; the job of `step_time` with {WORKERS} "
    f"workers and {STEPS} steps, on a Ray cluster that is up, turn by turn, each time in new worker processes and "
    "a new folder. The calling process has imported both libraries before; the first turns are not counted. `a later "
    "run` forks its workers from the fork server that the first run has left on the node; `a first run` finds none, "
    "and leaves none (`TRAINWRIGHT_FORK_SERVER=off`)."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    rounds = SMOKE_ROUNDS if smoke else Rounds(counted=8)
    fits = {"later": train_later, "first": train_first, "theirs": _theirs}
    with ray_cluster():
        seconds = run_interleaved({name: partial(_first_step, fit, folder) for name, fit in fits.items()}, rounds)
    what = "fit() to the first step, {}, against TorchTrainer"
    return [
        compare("first_step", what.format("a later run"), "s", seconds["later"], seconds["theirs"], target=0.15),
        compare("first_step", what.format("a first run"), "s", seconds["first"], seconds["theirs"], target=0.5),
    ]


def _first_step(fit: Callable[[Path], None], folder: Path) -> float:
    place = Path(tempfile.mkdtemp(dir=folder))
    begun = time.time()
    fit(place)
    seconds = read_stamps(place)[0].time_s - begun
    settle()
    return seconds


def train_later(folder: Path) -> None:
    """Train the job of this benchmark with trainwright; the first step leaves a stamp in the folder."""
    tw.fit(job(folder / "runs", rows=STEPS * BATCH_SIZE, optimizer=stamping(folder)))


def train_first(folder: Path) -> None:
    """The same, as if it were the first run on its nodes."""
    os.environ[FORK_SERVER] = "off"
    try:
        train_later(folder)
    finally:
        del os.environ[FORK_SERVER]


def _theirs(folder: Path) -> None:
    ray_train.fit(folder, Settings(steps=STEPS, rows=STEPS * BATCH_SIZE, workers=WORKERS, stamps=str(folder)))
