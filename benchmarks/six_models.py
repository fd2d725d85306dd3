"""Six models that ask for different plans on two workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from problem import CLASSES, FEATURES, build_deep, build_model
from torch import nn

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its global batch, and the memory of each worker."""

    build: Callable[[], nn.Module]
    batch_size: int
    memory_bytes: int = 4096 * MIB


class Lookup(nn.Module):
    """Rows of a large table for 16 of the features."""

    ROWS, WIDTH, TAKEN = 100_000, 64, 16

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.ROWS, self.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, features) -> (batch, 16 * width)."""
        rows = (x[:, : self.TAKEN] * 1e4).long().remainder(self.ROWS)
        return self.table(rows).flatten(1)


class Picture(nn.Module):
    """The features as a square of one channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 256) -> (batch, 1, 16, 16)."""
        return x.unflatten(1, (1, 16, 16))


def fat_embedding() -> nn.Module:
    """6.4 million parameters in a table, 0.3 million behind it."""
    width = Lookup.WIDTH * Lookup.TAKEN
    return nn.Sequential(Lookup(), nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def fat_tail() -> nn.Module:
    """Two small layers, and 12 million parameters behind them."""
    return nn.Sequential(
        nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8192), nn.ReLU(),
        nn.Linear(8192, 1000), nn.ReLU(), nn.Linear(1000, CLASSES),
    )  # fmt: skip


def convolutions() -> nn.Module:
    """Much to compute, few parameters."""
    body = [layer for _ in range(3) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
    return nn.Sequential(
        Picture(), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), *body, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)
    )


def large() -> nn.Module:
    """14 million parameters, which with AdamW's state take 214 MiB."""
    hidden = [layer for _ in range(6) for layer in (nn.ReLU(), nn.Linear(1536, 1536))]
    return nn.Sequential(nn.Linear(FEATURES, 1536), *hidden, nn.ReLU(), nn.Linear(1536, CLASSES))


MODELS: Mapping[str, Case] = {
    "three layers": Case(build=build_model, batch_size=64),
    "eight layers": Case(build=build_deep, batch_size=256),
    "convolutions": Case(build=convolutions, batch_size=64),
    "fat embedding": Case(build=fat_embedding, batch_size=32),
    "fat tail": Case(build=fat_tail, batch_size=16),
    "too large for a worker": Case(build=large, batch_size=128, memory_bytes=220 * MIB),
}
