"""A linear regression, the job that tests of wrong user code start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import trainwright as tw

ROWS = 40


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - targets) ** 2


def job(folder: Path, **fields: Any) -> tw.Job:
    data = {"x": np.ones((ROWS, 3), np.float32), "y": np.ones(ROWS, np.float32)}
    given: dict[str, Any] = {
        "name": "wrong", "model": lambda: nn.Linear(3, 1), "loss": squared, "train": tw.datasets.table(data),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "inputs": "x", "targets": "y",
        "batch_size": 10, "workers": 2, "storage": str(folder / "runs"), "preflight": False,
    }  # fmt: skip
    return tw.Job(**{**given, **fields})
