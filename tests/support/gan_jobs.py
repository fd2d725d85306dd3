"""A small generative adversarial network, whose step has two optimizers in turn."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainwright as tw


class Gan(nn.Module):
    """A generator and a discriminator, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1)).double()


def real(scores: Tensor, label: float) -> Tensor:
    flat = scores.squeeze(1)
    return functional.binary_cross_entropy_with_logits(flat, torch.full_like(flat, label), reduction="none")


def step(model: Any, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    fake = model.generator(batch["z"])
    score = model.discriminator(fake.detach())
    tw.log("score", score.squeeze(1))
    yield "discriminator", real(model.discriminator(batch["x"]), 1.0) + real(score, 0.0)
    yield "generator", real(model.discriminator(fake), 1.0)


OPTIMIZERS = {
    "generator": partial(torch.optim.Adam, lr=0.02, betas=(0.5, 0.999)),
    "discriminator": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
