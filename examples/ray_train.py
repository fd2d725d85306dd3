"""A job inside Ray Train: `tw.fit` in a TorchTrainer's train function, on the workers that Ray Train started.

    python examples/ray_train.py

Scaling, dashboard and results are those of Ray Train. Data order, recovery and the run log are those of the job.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn import functional

import trainwright as tw

ROWS, WIDTH, CLASSES = 4096, 16, 4
HERE = Path.cwd()  # Ray Train's workers have other folders


def rows() -> dict[str, np.ndarray]:
    """Return rows whose class is the index of the largest of their first four numbers."""
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": x[:, :CLASSES].argmax(1)}


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One loss per row."""
    return functional.cross_entropy(logits, labels, reduction="none")


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One 0 or 1 per row."""
    return logits.argmax(1) == labels


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


job = tw.Job(
    name="ray-train",
    model=build_model,
    loss=cross_entropy,
    optimizer=adam,
    train=tw.datasets.table(rows()),
    evaluate=tw.datasets.table(rows()),
    inputs="x",
    targets="y",
    batch_size=128,
    epochs=5,
    metrics={"accuracy": accuracy},
    storage=str(HERE / "runs"),
)


def train() -> None:
    """Train function that each worker of Ray Train calls."""
    run = tw.fit(job)
    print(f"{run.state}: {run.metrics}")


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(HERE / "runs" / "ray"), failure_config=FailureConfig(max_failures=2)),
    )
    result = trainer.fit()
    print(result.metrics)
    print(result.checkpoint)
