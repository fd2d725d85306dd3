"""A small problem that the simulated workers learn, by plain gradient descent and the servers' outer method.

The noisy quadratic (Zhang et al., NeurIPS 2019): the loss is a sum of h * x^2 / 2 with curvatures h from 1 down, and a
gradient's noise has the curvatures as its covariance, divided by the samples. It has what decides between forms of
consistency, namely how large a learning rate stale updates bear and how noise averages out, and nothing else of a real
model. All learning rates are tried at once, as rows of one array, and what is pushed is computed when it is applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.staleness import Unit
from trainwright.simulator.scenario import Scenario

Array = npt.NDArray[np.float64]
SIZE = 24  # numbers that are learnt
RATES = tuple(2.0**power for power in range(0, -8, -1))  # of an update of a whole step
_NOISE = 0.3  # of a batch of 512 samples at curvature 1: a standard deviation
_POOL = 65_521  # gradients' noises, of which each unit has its own; prime
_STRIDE = 40_503  # from one unit's to the next


class Computed(NamedTuple):
    """A unit, and the parameters that it was computed on: (rates, SIZE)."""

    unit: Unit
    x: Array


class Held(NamedTuple):
    """What all servers together hold: parameters and the outer method's speed, each (rates, SIZE)."""

    x: Array
    speed: Array


class Learner:
    """What the servers hold, and what units come to; nothing is written in place, so that workers may hold it too.

    Args:
        scenario: that is simulated.

    Attributes:
        held: starts at 1 everywhere.
        rates: learning rates, one a row.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        rule = scenario.consistency
        of_unit = 1.0 if rule.waits or rule.scaled or scenario.local_steps > 1 else 1.0 / scenario.workers
        self.rates = tuple(rate * of_unit for rate in RATES)
        self._rates = np.array(self.rates)[:, None]
        self._curvature = 1.0 / np.arange(1.0, SIZE + 1)
        scale = _NOISE * np.sqrt(self._curvature * 512.0 * scenario.workers / scenario.batch_size)
        self._noise = np.random.default_rng(scenario.seed).standard_normal((_POOL, SIZE)) * scale
        self.held = Held(np.ones((len(RATES), SIZE)), np.zeros((len(RATES), SIZE)))

    @property
    def losses(self) -> Array:
        """Without noise, by learning rate."""
        found: Array = 0.5 * (self.held.x * self.held.x) @ self._curvature
        return found

    def apply(self, pushes: Sequence[Computed], *, staleness: int = 0) -> None:
        """One update by the mean of what these come to; all are of as many samples and steps."""
        x, speed = self.held
        factor = 1.0 / max(1, staleness) if self._scenario.consistency.scaled else 1.0
        if self._scenario.local_steps == 1:
            self.held = Held(x - factor * self._rates * self._gradient(pushes), speed)
            return
        outer, went = self._scenario.outer, self._went(pushes)
        speed = outer.momentum * speed + went
        self.held = Held(x + outer.rate * (went + outer.momentum * speed), speed)

    def _gradient(self, pushes: Sequence[Computed]) -> Array:
        """The mean; many were computed on the same parameters."""
        if len(pushes) == 1:
            unit, x = pushes[0]
            alone: Array = self._curvature * x + self._noise[self._place(unit.step, unit.share)]
            return alone
        noise = self._noise[[self._place(unit.step, unit.share) for unit, _ in pushes]].mean(axis=0)
        each = {id(x): x for _, x in pushes}
        counts = Counter(id(x) for _, x in pushes)
        mean = sum(count / len(pushes) * each[key] for key, count in counts.items())
        found: Array = self._curvature * mean + noise
        return found

    def _went(self, pushes: Sequence[Computed]) -> Array:
        """How far local steps went, on average."""
        begun = np.stack([x for _, x in pushes])
        here = begun
        for step in range(pushes[0].unit.steps):
            places = [self._place(unit.step + step, unit.share) for unit, _ in pushes]
            here = here - self._rates * (self._curvature * here + self._noise[places][:, None, :])
        found: Array = (here - begun).mean(axis=0)
        return found

    def _place(self, step: int, share: int) -> int:
        """Of the noise of a share of a step, whoever computes it."""
        return (step * self._scenario.workers + share) * _STRIDE % _POOL
