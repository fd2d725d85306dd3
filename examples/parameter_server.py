"""Asynchronous training with a parameter server: two spirals, a small network, some seconds.

    trainwright fit examples/parameter_server.py
    trainwright fit examples/parameter_server.py --set form=sync    # the gradients of one device
    trainwright fit examples/parameter_server.py --set form=local   # DiLoCo: eight local steps, then an outer step

Kill a worker during the run (`trainwright logs parameter-server-async` shows its pid): the other one continues.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw

# An update of `async` is of one worker's part, at the whole rate: a rate that suits `sync` is divided by the workers.
FORMS: dict[str, tuple[float, dict[str, Any]]] = {
    "sync": (1e-2, {"consistency": "sync"}),
    "ssp": (1e-2, {"consistency": "ssp(3)", "wire": "fp16"}),
    "async": (5e-3, {"consistency": "async"}),
    "local": (1e-2, {"local_steps": 8, "outer": "nesterov(0.7,0.9)"}),
}


def spirals(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return points on two arms."""
    rng = np.random.default_rng(seed)
    turn, arm = rng.uniform(0.3, 2.5, rows), rng.integers(0, 2, rows)
    angle = 2 * np.pi * turn / 1.6 + np.pi * arm
    point = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) + rng.normal(0, 0.05, (rows, 2))
    return {"point": point.astype(np.float32), "arm": arm}


def build_model() -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def cross_entropy(logits: torch.Tensor, arm: torch.Tensor) -> torch.Tensor:
    """One loss per point."""
    return functional.cross_entropy(logits, arm, reduction="none")


def accuracy(logits: torch.Tensor, arm: torch.Tensor) -> torch.Tensor:
    """One 0 or 1 per point."""
    return logits.argmax(1) == arm


def job(form: Literal["sync", "ssp", "async", "local"] = "async") -> tw.Job:
    """Return the job in one of the forms; only the last two lines differ from a job with synchronous workers."""
    rate, apart = FORMS[form]
    return tw.Job(
        name=f"parameter-server-{form}",
        model=build_model,
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate),
        train=tw.datasets.table(spirals(4000, 0)),
        evaluate=tw.datasets.table(spirals(1000, 1)),
        inputs="point",
        targets="arm",
        batch_size=128,
        epochs=10,
        evaluate_epochs=5,
        metrics={"accuracy": accuracy},
        workers=2,
        storage="runs",
        strategy="local_sgd" if form == "local" else "parameter_server",
        **apart,
    )
