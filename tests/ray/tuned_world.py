"""A search of four learning rates, whose last trial stands still where a file says so; see test_tune.py.

One trial at a time, so that the order of evaluations, and what is stopped early, is known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray import tune
from torch import nn

import trainwright as tw
from tests.support import torch_jobs
from tests.support.processes import wait_for
from trainwright.tuning.tuner import TuneResult

RATES = GOOD, TINY, BROKEN, BEST = 0.1, 1e-6, float("inf"), 1.0
NAMES = tuple(f"tuned-{number}" for number in range(len(RATES)))
HELD_STEP = 10  # of the second epoch
DATA = torch_jobs.data()


class Classifier(nn.Module):
    """Counts its steps, and stands still in one of them while a file is there."""

    def __init__(self, hold: str) -> None:
        super().__init__()
        self.body = nn.Linear(torch_jobs.WIDTH, torch_jobs.CLASSES)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.hold = hold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not x.is_meta:
            if int(self.steps) == HELD_STEP and Path(self.hold).is_file():
                Path(self.hold).with_suffix(".reached").touch()
                wait_for(lambda: not Path(self.hold).exists())
            self.steps += 1
        return self.body(x)


@dataclass(frozen=True)
class Build:
    """() -> a model."""

    hold: str

    def __call__(self) -> nn.Module:
        return Classifier(self.hold)


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def job(folder: str, lr: float) -> tw.Job:
    """42 steps, with an evaluation and a checkpoint after each 7."""
    data = tw.datasets.table(DATA)
    return tw.Job(
        name="tuned", model=Build(f"{folder}/hold" if lr == BEST else ""), loss=torch_jobs.cross_entropy,
        optimizer=partial(sgd, lr=lr), inputs="x", targets="y", train=data, evaluate=data, batch_size=32, epochs=6,
        seed=3, storage=f"{folder}/runs", hang_deadline_s=60.0,
    )  # fmt: skip


def search(folder: str) -> TuneResult:
    """Search in this process."""
    return tw.tune(partial(job, folder), {"lr": tune.grid_search(list(RATES))}, concurrent=1)


def drive(address: str, folder: str) -> None:
    """A search as the target of a process."""
    os.environ["RAY_ADDRESS"] = address
    search(folder)
