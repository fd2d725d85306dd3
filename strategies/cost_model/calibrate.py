"""Efficiencies from measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainwright.core.cluster import Cluster
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan
from trainwright.strategies.cost_model.calibration import (
    NAMES,
    NOISE,
    Calibration,
    Vector,
    alike,
    efficiencies,
    spreads,
)
from trainwright.strategies.cost_model.machine import Machine
from trainwright.strategies.cost_model.step_time import terms
from trainwright.strategies.cost_model.step_work import Work, work_of

ROUNDS, ENOUGH = 40, 1e-4
_TAILS = 3.0  # degrees of freedom of Student's distribution: a step that went wrong must not bend the others
_STEP = 1e-4


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A step that was measured.

    Attributes:
        profile, cluster, plan, batch_size, precision: as for `estimate`.
        step_s: seconds of one step, such as the median of several.
    """

    profile: ModelProfile
    cluster: Cluster
    plan: Plan
    batch_size: int
    precision: str
    step_s: float


def calibrate(measurements: Sequence[Measurement]) -> Calibration:
    """The most probable efficiencies given what was measured and what is known of machines in general.

    Least squares of logarithms by Gauss and Newton with Levenberg's damping, the defaults as a prior; so any number of
    measurements will do, and none gives the defaults.

    Raises:
        ValueError: a measurement took no time.
        PlanError: one of its plans cannot be.
    """
    if any(one.step_s <= 0 for one in measurements):
        raise ValueError("every measurement must have step_s > 0")
    if not measurements:
        return Calibration()
    works = [
        work_of(
            one.profile,
            Machine.of(one.cluster, one.plan.mesh.size),
            one.plan,
            batch_size=one.batch_size,
            precision=one.precision,
        )
        for one in measurements
    ]
    measured = np.log([one.step_s for one in measurements])
    shapes, kinds = np.array([work.shape for work in works]), [work.kind for work in works]
    inverse = np.linalg.inv(alike(shapes, kinds, shapes, kinds) + NOISE**2 * np.eye(len(works)))
    whitened = np.linalg.cholesky(inverse).T  # errors of shapes that are alike are alike: they count as few
    prior = spreads(max(work.machine.device.unsure for work in works))
    logs, slopes = _fitted(works, measured, whitened, prior)
    return Calibration(
        logs=tuple(logs),
        covariance=tuple(map(tuple, np.linalg.inv(slopes.T @ slopes + np.diag(prior**-2)))),
        shapes=tuple(work.shape for work in works),
        kinds=tuple(kinds),
        residuals=tuple(inverse @ (measured - _predicted(works, logs))),
        inverse=tuple(map(tuple, inverse)),
        measurements=len(works),
    )


def _fitted(works: Sequence[Work], measured: Vector, whitened: Vector, prior: Vector) -> tuple[Vector, Vector]:
    """Logarithms of the efficiencies, and the slopes of the whitened predictions there."""
    logs, damping = np.zeros(len(NAMES)), 1e-2
    missed = whitened @ (_predicted(works, logs) - measured)
    slopes = whitened @ _slopes(works, logs)
    for _ in range(ROUNDS):
        weights = (_TAILS + 1) / (_TAILS + missed**2)
        curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(prior**-2)
        downhill = slopes.T @ (weights * missed) + logs / prior**2
        tried = logs - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
        then = whitened @ (_predicted(works, tried) - measured)
        gain = _cost(missed, logs / prior) - _cost(then, tried / prior)
        if gain < 0:
            damping *= 4
            continue
        logs, missed, damping = tried, then, damping / 3
        slopes = whitened @ _slopes(works, logs)
        if gain < ENOUGH * _cost(then, tried / prior):
            break
    return logs, slopes


def _cost(missed: Vector, moved: Vector) -> float:
    """Twice the negative logarithm of the probability, but for a constant."""
    return float((_TAILS + 1) * np.log1p(missed**2 / _TAILS).sum() + moved @ moved)


def _predicted(works: Sequence[Work], logs: Vector) -> Vector:
    rates = efficiencies(logs)
    return np.log([sum(terms(work, rates).values()) for work in works])


def _slopes(works: Sequence[Work], logs: Vector) -> Vector:
    here = _predicted(works, logs)
    columns = [(_predicted(works, logs + _STEP * row) - here) / _STEP for row in np.eye(len(NAMES))]
    return np.stack(columns, axis=1)
