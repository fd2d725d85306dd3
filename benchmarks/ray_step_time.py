"""Step time in whole runs: trainwright's fit against Ray Train's TorchTrainer, turn by turn on one Ray cluster."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from figures import Figure, compare
from machine import ray_cluster, settle
from peers import Settings, ray_train
from problem import BATCH_SIZE, ROWS, WORKERS, job

import trainwright as tw

EPOCH_STEPS = ROWS // BATCH_SIZE
WARM = 50
NOTE = (
    f"The same model, batch and data as `step_time`, each as a whole run with {WORKERS} workers on a Ray cluster that "
    "is up: `trainwright.fit(job)` and `TorchTrainer(...).fit()` in turn, with no checkpoint but trainwright's last. "
    f"The median of the seconds of each step, the first {WARM} left out: trainwright's from `run.history`, Ray Train's "
    "from a clock around the step in the training function. Ray's workers run with niceness 0."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    rounds, epochs = (1, 1) if smoke else (6, 4)
    ours, theirs = [], []
    with ray_cluster():
        for number in range(rounds):
            ours.append(1e3 * _ours(folder / f"ours-{number}", epochs))
            settle()
            theirs.append(1e3 * _theirs(folder / f"theirs-{number}", epochs))
            settle()
    return [compare("ray_step_time", "median step, against TorchTrainer", "ms", ours, theirs)]


def _ours(folder: Path, epochs: int) -> float:
    run = tw.fit(job(folder, epochs=epochs))
    return float((BATCH_SIZE / run.history["samples_per_s"][WARM:]).median())


def _theirs(folder: Path, epochs: int) -> float:
    folder.mkdir()
    settings = Settings(steps=epochs * EPOCH_STEPS, rows=ROWS, workers=WORKERS)
    return median(ray_train.timed_fit(folder, settings)[WARM:])
