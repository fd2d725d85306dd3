"""Small data sets in memory for the programs, in torch's default type, drawn with seeds of their own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

Trained = tuple[list[float], list[dict[str, float]]]
"""What a plain loop returns: the loss of each step, and the metrics of each evaluation."""


def images(rows: int, channels: int = 1, size: int = 12, classes: int = 10, seed: int = 0) -> TensorDataset:
    """Return pairs of an image (channels, size, size) and its class: a pattern of the class, and noise."""
    patterns = torch.randn(classes, channels, size, size, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=generator)
    noise = torch.randn(rows, channels, size, size, generator=generator)
    return TensorDataset(patterns[labels] + 0.5 * noise, labels)


def tokens(rows: int, length: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Return sequences (rows, length) of tokens from 1 to `vocabulary` - 1, each mostly the successor of the last."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(vocabulary - 1, (rows, 1), generator=generator)
    jumps = torch.randint(vocabulary - 1, (rows, length), generator=generator)
    often = torch.rand(rows, length, generator=generator) < 0.8
    return 1 + (first + torch.where(often, 1, jumps).cumsum(1)) % (vocabulary - 1)


def lengths(rows: int, low: int, high: int, seed: int = 0) -> list[int]:
    """Return lengths from `low` to `high`."""
    return torch.randint(low, high + 1, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
