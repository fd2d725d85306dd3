"""Teachers and students of torch, as jobs for a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import trainwright as tw
from tests.support import torch_jobs

TEACHER_EPOCHS, EPOCHS = 4, 2


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(torch_jobs.WIDTH, 48), nn.Tanh(), nn.Linear(48, torch_jobs.CLASSES))


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(torch_jobs.WIDTH, 4), nn.Tanh(), nn.Linear(4, torch_jobs.CLASSES))


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def job(folder: Path, name: str, model: Any, **fields: Any) -> tw.Job:
    data = tw.datasets.table(torch_jobs.data())
    own = {
        "model": model, "loss": cross_entropy, "optimizer": adam, "inputs": "x", "targets": "y", "train": data,
        "evaluate": data, "metrics": {"accuracy": accuracy}, "batch_size": 32, "epochs": EPOCHS, "workers": 2,
        "strategy": "data_parallel", "storage": str(folder), "spares": 0, "seed": 5,
    }  # fmt: skip
    return tw.Job(name=name, **{**own, **fields})
