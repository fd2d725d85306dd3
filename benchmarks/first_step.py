"""Time from the call of fit() to the first completed step, with a Ray cluster running."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from figures import Figure, compare
from machine import ray_cluster, settle
from peers import ray_train
from problem import BATCH_SIZE, WORKERS, job
from stamps import read_stamps, stamping

import trainwright as tw

STEPS = 10
NOTE = (
    "Seconds from the call of `trainwright.fit(job)` and of `TorchTrainer(...).fit()` to the end of the first "
    f"`optimizer.step()` of any rank, as a hook of the optimizer stamps it; the job of `step_time` with {WORKERS} "
    f"workers and {STEPS} steps, on a Ray cluster that is up, turn by turn, each time in new worker processes and "
    "a new folder. The calling process has imported both libraries before; the first pair is not counted."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    """The figures of this benchmark."""
    pairs, uncounted = (1, 0) if smoke else (8, 1)
    ours, theirs = [], []
    with ray_cluster():
        for number in range(pairs + uncounted):
            turns = [(train_ours, ours), (_theirs, theirs)]
            for fit, seconds in turns if number % 2 == 0 else turns[::-1]:
                seconds.append(_first_step(fit, folder / f"{fit.__name__}-{number}"))
                settle()
    what = "fit() to the first step, against TorchTrainer"
    return [compare("first_step", what, "s", ours[uncounted:], theirs[uncounted:], target=0.5)]


def _first_step(fit: Callable[[Path], None], folder: Path) -> float:
    folder.mkdir()
    begun = time.time()
    fit(folder)
    return read_stamps(folder)[0].time_s - begun


def train_ours(folder: Path) -> None:
    """Train the job of this benchmark with trainwright; the first step leaves a stamp in the folder."""
    tw.fit(job(folder / "runs", rows=STEPS * BATCH_SIZE, optimizer=stamping(folder)))


def _theirs(folder: Path) -> None:
    ray_train.fit(folder, ray_train.Settings(steps=STEPS, rows=STEPS * BATCH_SIZE, stamps=str(folder)))
