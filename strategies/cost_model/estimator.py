"""Predict a plan's step: seconds by term with an interval, and memory by stage. Calibrate by measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainwright.core.cluster import Cluster
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Estimate, Plan
from trainwright.strategies.cost_model.machine_model import (
    DEFAULT,
    EFFICIENCY_NAMES,
    MEASUREMENT_NOISE,
    Calibration,
    MachineModel,
    Vector,
    efficiencies,
    prior_deviations,
    shape_covariance,
)
from trainwright.strategies.cost_model.memory_estimate import stage_memory
from trainwright.strategies.cost_model.step_time import convergence_factors, step_terms
from trainwright.strategies.cost_model.step_work import StepWork, compute_step_work

_INTERVAL_DEVIATIONS = 1.645  # standard deviations to either side: nine of ten steps


def estimate(
    profile: ModelProfile,
    cluster: Cluster,
    plan: Plan,
    *,
    batch_size: int,
    precision: str,
    calibration: Calibration | None = None,
) -> Estimate:
    """Predict the step of a plan on a cluster that need not exist.

    Args:
        profile: of the model, such as `trainwright.transformer_profile(...)`.
        cluster: such as `trainwright.Cluster.parse("4x8xH100-80GB")`.
        plan: such as `trainwright.Plan.parse("dp=8,tp=2,pp=2,micro_batch=4")`; its mesh need not fill the cluster.
        batch_size: global, in samples.
        precision: `fp32`, `tf32`, `fp16` or `bf16`.
        calibration: from `trainwright.calibrate`; without one the efficiencies are assumed.

    Returns:
        Seconds by term, which add up to `step_s`; nine of ten steps are expected between `low_s` and `high_s`.

    Raises:
        PlanError: the plan cannot be carried out by this cluster, or with this model and batch.
        ResourceError: nothing is known of an accelerator.
    """
    known = calibration or DEFAULT
    machine = MachineModel.of(cluster, plan.mesh.size)
    work = compute_step_work(profile, machine, plan, batch_size=batch_size, precision=precision)
    memory = stage_memory(profile, plan, batch_size=batch_size, precision=precision, apart=machine.device.apart)
    found = point_estimate(work, memory, known)
    slopes = _slopes([work], np.array(known.logs))[0]
    _, unexplained = known.residual(work.shape, work.kind)
    if work.kind not in known.kinds:
        unexplained += work.machine.device.unsure**2
    deviation = math.sqrt(float(slopes @ np.array(known.covariance) @ slopes) + unexplained)
    factor = math.exp(_INTERVAL_DEVIATIONS * deviation)
    return replace(found, low_s=found.step_s / factor, high_s=found.step_s * factor)


def point_estimate(work: StepWork, stage_memory_bytes: tuple[int, ...], calibration: Calibration) -> Estimate:
    """Return the estimate of a step without an interval: both of its ends are the expected time."""
    terms = expected_terms(work, calibration)
    step_s = sum(terms.values())
    return Estimate(
        step_s=step_s, low_s=step_s, high_s=step_s, terms=terms, stage_memory_bytes=stage_memory_bytes,
        device_memory_bytes=work.machine.device.memory_bytes, factors=convergence_factors(work),
    )  # fmt: skip


def expected_terms(work: StepWork, calibration: Calibration) -> dict[str, float]:
    """Return the expected seconds of a step by term."""
    residual, _ = calibration.residual(work.shape, work.kind)
    return {name: seconds * math.exp(residual) for name, seconds in step_terms(work, calibration.efficiencies).items()}


# --- Efficiencies from measured steps ---------------------------------------------------------------------------------


_ROUNDS, _ENOUGH = 40, 1e-4
_STUDENT_T_FREEDOM = 3.0  # degrees of freedom of Student's distribution: one wrong measurement must not bend the others
_SLOPE_STEP = 1e-4


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
    """Return the most probable efficiencies, given measured steps and what is known of machines in general.

    Least squares of logarithms by Gauss and Newton with Levenberg's damping, the defaults as a prior; so any number of
    measurements will do, and none gives the defaults.

    Raises:
        ValueError: a measured time is not above 0.
        PlanError: one of the plans is not possible.
    """
    if any(one.step_s <= 0 for one in measurements):
        raise ValueError("every measurement must have step_s > 0")
    if not measurements:
        return Calibration()
    works = [
        compute_step_work(
            one.profile,
            MachineModel.of(one.cluster, one.plan.mesh.size),
            one.plan,
            batch_size=one.batch_size,
            precision=one.precision,
        )
        for one in measurements
    ]
    measured = np.log([one.step_s for one in measurements])
    shapes, kinds = np.array([work.shape for work in works]), [work.kind for work in works]
    inverse = np.linalg.inv(shape_covariance(shapes, kinds, shapes, kinds) + MEASUREMENT_NOISE**2 * np.eye(len(works)))
    whitened = np.linalg.cholesky(inverse).T  # errors of shapes that are alike are alike: they count as few
    prior = prior_deviations(max(work.machine.device.unsure for work in works))
    logs, slopes = _fit_efficiencies(works, measured, whitened, prior)
    return Calibration(
        logs=tuple(logs),
        covariance=tuple(map(tuple, np.linalg.inv(slopes.T @ slopes + np.diag(prior**-2)))),
        shapes=tuple(work.shape for work in works),
        kinds=tuple(kinds),
        residuals=tuple(inverse @ (measured - _predicted(works, logs))),
        inverse=tuple(map(tuple, inverse)),
        measurements=len(works),
    )


def _fit_efficiencies(
    works: Sequence[StepWork], measured: Vector, whitened: Vector, prior: Vector
) -> tuple[Vector, Vector]:
    """Return the logarithms of the efficiencies, and the slopes of the whitened predictions there."""
    logs, damping = np.zeros(len(EFFICIENCY_NAMES)), 1e-2
    missed = whitened @ (_predicted(works, logs) - measured)
    slopes = whitened @ _slopes(works, logs)
    for _ in range(_ROUNDS):
        weights = (_STUDENT_T_FREEDOM + 1) / (_STUDENT_T_FREEDOM + missed**2)
        curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(prior**-2)
        downhill = slopes.T @ (weights * missed) + logs / prior**2
        tried = logs - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
        then = whitened @ (_predicted(works, tried) - measured)
        gain = _robust_loss(missed, logs / prior) - _robust_loss(then, tried / prior)
        if gain < 0:
            damping *= 4
            continue
        logs, missed, damping = tried, then, damping / 3
        slopes = whitened @ _slopes(works, logs)
        if gain < _ENOUGH * _robust_loss(then, tried / prior):
            break
    return logs, slopes


def _robust_loss(missed: Vector, moved: Vector) -> float:
    """Return twice the negative logarithm of the probability, up to a constant."""
    return float((_STUDENT_T_FREEDOM + 1) * np.log1p(missed**2 / _STUDENT_T_FREEDOM).sum() + moved @ moved)


def _predicted(works: Sequence[StepWork], logs: Vector) -> Vector:
    rates = efficiencies(logs)
    return np.log([sum(step_terms(work, rates).values()) for work in works])


def _slopes(works: Sequence[StepWork], logs: Vector) -> Vector:
    here = _predicted(works, logs)
    columns = [
        (_predicted(works, logs + _SLOPE_STEP * row) - here) / _SLOPE_STEP for row in np.eye(len(EFFICIENCY_NAMES))
    ]
    return np.stack(columns, axis=1)
