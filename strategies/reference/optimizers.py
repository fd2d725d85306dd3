"""Optimizers as settings with pure updates of named arrays. Nothing is written in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainwright.strategies.reference.model import Array

Arrays = Mapping[str, Array]


class Optimizer(Protocol):
    """What the reference engines ask of an optimizer. Slots are its state, by names of its own."""

    @property
    def learning_rate(self) -> float:
        """The rate before the job's schedule."""

    def initial(self, parameters: Arrays) -> dict[str, Array]:
        """Slots before the first update."""

    def update(
        self, parameters: Arrays, gradients: Arrays, slots: Arrays, rate: float
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """New parameters and new slots; `rate` is the learning rate of this update."""


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent with heavy-ball momentum (Polyak 1964): m = momentum * m + g, p = p - rate * m."""

    learning_rate: float = 0.1
    momentum: float = 0.0

    def initial(self, parameters: Arrays) -> dict[str, Array]:
        """One `momentum/<parameter>` each, zero."""
        return {f"momentum/{name}": np.zeros_like(value) for name, value in parameters.items()}

    def update(
        self, parameters: Arrays, gradients: Arrays, slots: Arrays, rate: float
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """One step down the gradients."""
        moving = {name: self.momentum * slots[f"momentum/{name}"] + gradients[name] for name in parameters}
        moved = {name: value - rate * moving[name] for name, value in parameters.items()}
        return moved, {f"momentum/{name}": value for name, value in moving.items()}


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with bias correction (Kingma and Ba 2015, algorithm 1)."""

    learning_rate: float = 1e-3
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8

    def initial(self, parameters: Arrays) -> dict[str, Array]:
        """`count` of updates, and `first/<parameter>` and `second/<parameter>` each, zero."""
        moments = {
            f"{moment}/{name}": np.zeros_like(value)
            for moment in ("first", "second")
            for name, value in parameters.items()
        }
        return {"count": np.zeros(()), **moments}

    def update(
        self, parameters: Arrays, gradients: Arrays, slots: Arrays, rate: float
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """One step with moments corrected for their start at zero."""
        count = slots["count"] + 1.0
        changed: dict[str, Array] = {"count": np.asarray(count)}
        moved: dict[str, Array] = {}
        for name, value in parameters.items():
            gradient = gradients[name]
            first = self.beta_1 * slots[f"first/{name}"] + (1.0 - self.beta_1) * gradient
            second = self.beta_2 * slots[f"second/{name}"] + (1.0 - self.beta_2) * gradient * gradient
            corrected = first / (1.0 - self.beta_1**count)
            scale = np.sqrt(second / (1.0 - self.beta_2**count)) + self.epsilon
            moved[name] = value - rate * corrected / scale
            changed[f"first/{name}"], changed[f"second/{name}"] = first, second
        return moved, changed
