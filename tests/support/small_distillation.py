"""A distillation that is small enough to run in the process of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainwright as tw
from tests.support import torch_jobs
from trainwright.distillation.distillation_spec import Distillation


def wide() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(torch_jobs.WIDTH, 512), nn.Tanh(), nn.Linear(512, torch_jobs.CLASSES)
    ).requires_grad_(False)


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(torch_jobs.WIDTH, 4), nn.Tanh(), nn.Linear(4, torch_jobs.CLASSES))


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def distillation(folder: Path, **fields: Any) -> Distillation:
    train = fields.pop("train", tw.datasets.table(torch_jobs.data()))
    student = tw.Job(
        name="student", model=narrow, loss=losses, optimizer=sgd, train=train, inputs="x", targets="y",
        batch_size=32, epochs=fields.pop("epochs", 3), storage=str(folder),
    )  # fmt: skip
    own = {"student": student, "teachers": (tw.Teacher(name="big", model=wide, inputs="x"),)}
    return Distillation(**{**own, **fields})


def torch_hard(outputs: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")


TWO = ("y", "teacher.big")
