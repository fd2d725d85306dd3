"""The main job: a small convolutional network on Fashion-MNIST, 60,000 real images.

    trainwright fit examples/fashion_mnist.py

On a machine without accelerators it trains with two workers, otherwise with one for each accelerator.
"""

from __future__ import annotations

import sample_data
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw

data = sample_data.fashion_mnist("data/fashion-mnist")


class Scale(nn.Module):
    """Convert bytes to floats around zero, so that images are sent as bytes."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(n, 28, 28) uint8 to (n, 1, 28, 28) float."""
        return (image.unsqueeze(1).float() - 73.0) / 90.0


def build_model() -> nn.Module:
    """Two convolutions with group normalisation and two linear layers; 0.2 M parameters."""
    return nn.Sequential(
        Scale(),
        nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(32 * 7 * 7, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One loss per image."""
    return functional.cross_entropy(logits, labels, reduction="none")


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One 0 or 1 per image."""
    return logits.argmax(1) == labels


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam at the peak rate of the schedule."""
    return torch.optim.AdamW(parameters, lr=5e-3, weight_decay=2e-2)


job = tw.Job(
    name="fashion-mnist",
    model=build_model,
    loss=cross_entropy,
    optimizer=adam,
    schedule=tw.schedules.one_cycle,
    train=tw.datasets.parquet(data.train),
    evaluate=tw.datasets.parquet(data.test),
    inputs="image",
    targets="label",
    batch_size=256,
    epochs=5,
    metrics={"accuracy": accuracy},
    storage="runs",
)
