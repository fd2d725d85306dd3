"""Search of temperature and alpha for a student of 16 units and three teachers, with 6,000 labels of Fashion-MNIST.

    trainwright distill examples/distill_fashion_mnist.py

Of the 60,000 training images, 6,000 have labels here: 5,000 for training, and 1,000 for the choice of temperature and
alpha (the share of the labels in the loss). The teachers are trained first, on the 5,000. The student learns from
teacher outputs for all images except the 1,000, and from the labels. The student alone has the same images and as many
steps, and learns from the labels only. The best setting and the student alone are compared once on the 10,000 test
images, with three seeds each.
"""

from __future__ import annotations

import functools

import numpy as np
import sample_data
import torch
from torch import nn
from torch.nn import functional

import trainwright as tw

LABELS, VALIDATION, UNITS = 6_000, 1_000, 16
UNKNOWN = -1  # stands for a missing label
data = sample_data.fashion_mnist("data/fashion-mnist")
images = tw.datasets.parquet(data.train)


def labelled(columns):
    """Select the rows with labels for training."""
    return columns["id"] < LABELS - VALIDATION


def validating(columns):
    """Select the rows on which settings are compared."""
    return (columns["id"] >= LABELS - VALIDATION) & (columns["id"] < LABELS)


def learned(columns):
    """Select the rows for the student: all except the validation rows, with or without a label."""
    return ~validating(columns)


def hide(columns):
    """Replace the labels of rows outside the labelled ones by UNKNOWN."""
    return {**columns, "label": np.where(labelled(columns), columns["label"], UNKNOWN)}


class Scale(nn.Module):
    """Convert bytes to floats around zero, so that images are sent as bytes."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(n, 28, 28) uint8 to (n, 1, 28, 28) float."""
        return (image.unsqueeze(1).float() - 73.0) / 90.0


def build_wide(channels: int, units: int) -> nn.Module:
    """Two convolutions and two linear layers; about 0.2 M parameters."""
    return nn.Sequential(
        Scale(),
        nn.Conv2d(1, channels, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, channels), nn.ReLU(),
        nn.Conv2d(channels, 32, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(32 * 7 * 7, units), nn.ReLU(),
        nn.Linear(units, 10),
    )  # fmt: skip


def build_flat(units: int) -> nn.Module:
    """Two linear layers; with 16 units 12,730 parameters."""
    return nn.Sequential(Scale(), nn.Flatten(), nn.Linear(784, units), nn.ReLU(), nn.Linear(units, 10))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One loss per image; 0 without a label."""
    return functional.cross_entropy(logits, labels, ignore_index=UNKNOWN, reduction="none")


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One 0 or 1 per image."""
    return logits.argmax(1) == labels


def adam(rate: float, decay: float, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam at the peak rate of the schedule."""
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)


def job(name: str, model, *, rate: float, decay: float, **fields) -> tw.Job:
    """Return a job with the options that teachers and student share."""
    return tw.Job(
        name=name,
        model=model,
        loss=cross_entropy,
        optimizer=functools.partial(adam, rate, decay),
        schedule=tw.schedules.one_cycle,
        evaluate=tw.datasets.parquet(data.test),
        inputs="image",
        targets="label",
        metrics={"accuracy": accuracy},
        storage="runs",
        **fields,
    )


TEACHERS = {
    "wide": functools.partial(build_wide, 16, 128),
    "wider": functools.partial(build_wide, 24, 96),
    "flat": functools.partial(build_flat, 256),
}
LEARN = {"train": images.filter_batches(labelled), "batch_size": 64, "epochs": 15, "evaluate_epochs": 15}
teachers = tuple(
    tw.Teacher(name=name, job=job(f"teacher-{name}", build, rate=3e-3, decay=2e-2, seed=number, **LEARN), train=True)
    for number, (name, build) in enumerate(TEACHERS.items())
)
student = job(
    "student",
    functools.partial(build_flat, UNITS),
    rate=3e-3,
    decay=2e-2,
    train=images.filter_batches(learned).map_batches(hide),
    batch_size=128,
    epochs=6,
    evaluate_epochs=2,
)
search = tw.Search(
    distillation=tw.Distillation(student=student, teachers=teachers),
    temperatures=(1.0, 2.0, 4.0),
    alphas=(0.0, 0.1),
    seeds=3,
    validation=images.filter_batches(validating),
)
