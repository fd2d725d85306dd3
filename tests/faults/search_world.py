"""A search of three settings whose runs stand still where they are told to; see test_search.py.

The teacher runs in the student's step and is wrong, so that it is known how settings do: the less of it, the better.
One run at a time, so that an unbroken search comes to the same decisions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainwright as tw
from tests.faults.distilling_world import Marks, cross_entropy
from tests.support import torch_jobs

NAME, SEED, HELD = "faulty-search", 3, 14  # a step of the second epoch
GOOD, BAD, FAIR = [f"t1-alpha{alpha}-seed{SEED}" for alpha in ("0.9", "0", "0.8")]
ALONE = f"alone-seed{SEED}"


@dataclass(frozen=True)
class Script:
    """The runs that stand still, each once, at the step HELD."""

    marks: Marks
    held: tuple[str, ...]

    def reached(self) -> None:
        """A run has reached it: one of those that have begun by now, and the others have passed it already."""
        for run in self.held:
            if Path(self.marks.folder, "runs", NAME, run).exists() and not self.marks.held(run):
                self.marks.path(f"pid-{run}").write_text(str(os.getpid()))
                self.marks.hold(run)


class Student(nn.Module):
    """Counts its steps."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(torch_jobs.WIDTH, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, torch_jobs.CLASSES)
        )
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.script = script

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not x.is_meta:
            if int(self.steps) == HELD:
                self.script.reached()
            self.steps += 1
        return self.body(x)


@dataclass(frozen=True)
class Build:
    """() -> a student."""

    script: Script

    def __call__(self) -> nn.Module:
        return Student(self.script)


def teacher() -> nn.Module:
    """Sure of the class after the right one."""
    model = nn.Linear(torch_jobs.WIDTH, torch_jobs.CLASSES)
    with torch.no_grad():
        model.bias.zero_()
        model.weight.zero_()
        classes = torch.arange(torch_jobs.CLASSES)
        model.weight[classes, classes.roll(1)] = 5.0
    return model


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-2)


def search(folder: Path, *held: str) -> tw.Search:
    """30 steps a run, with an evaluation and a checkpoint after each 10. Marks lie beside the runs.

    Args:
        held: runs that stand still.
    """
    student = tw.Job(
        name="faulty", model=Build(Script(Marks(str(folder.parent)), held)), loss=cross_entropy, optimizer=adam,
        inputs="x", targets="y", train=tw.datasets.table(torch_jobs.data()),
        evaluate=tw.datasets.table(torch_jobs.data()),
        metrics={"accuracy": accuracy}, batch_size=16, epochs=3, seed=SEED, storage=str(folder), hang_deadline_s=60.0,
        preflight=False,
    )  # fmt: skip
    big = tw.Teacher(name="big", model=teacher, inputs="x")
    return tw.Search(
        distillation=tw.Distillation(student=student, teachers=(big,), way="inline"), temperatures=(1.0,),
        alphas=(0.9, 0.0, 0.8), seeds=1, validation=0.25, concurrent=1,
    )  # fmt: skip


def drive(address: str, folder: str, held: tuple[str, ...]) -> None:
    """A driver, as the target of a process."""
    os.environ["RAY_ADDRESS"] = address
    tw.search(search(Path(folder), *held))
