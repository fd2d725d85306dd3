"""A plan's step before it is run: seconds by term with an interval, and memory by stage."""

from __future__ import annotations

import math

import numpy as np

from trainwright.core.cluster import Cluster
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Estimate, Plan
from trainwright.strategies.cost_model.calibration import DEFAULT, NAMES, Calibration, Vector, efficiencies
from trainwright.strategies.cost_model.machine import Machine
from trainwright.strategies.cost_model.memory import stage_memory
from trainwright.strategies.cost_model.staleness_cost import factors
from trainwright.strategies.cost_model.step_time import terms
from trainwright.strategies.cost_model.step_work import Work, work_of

SURE = 1.645  # standard deviations to either side: nine of ten steps
_STEP = 1e-3  # of a logarithm, for slopes


def estimate(
    profile: ModelProfile,
    cluster: Cluster,
    plan: Plan,
    *,
    batch_size: int,
    precision: str,
    calibration: Calibration | None = None,
) -> Estimate:
    """The step of a plan on a cluster, which need not be there.

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
    machine = Machine.of(cluster, plan.mesh.size)
    work = work_of(profile, machine, plan, batch_size=batch_size, precision=precision)
    found = expected(work, known)
    step_s = sum(found.values())
    slopes = np.array([_log_step(work, known, name) for name in NAMES]) - math.log(_raw(work, np.array(known.logs)))
    slopes /= _STEP
    _, unexplained = known.residual(work.shape, work.kind)
    if work.kind not in known.kinds:
        unexplained += work.machine.device.unsure**2
    deviation = math.sqrt(float(slopes @ np.array(known.covariance) @ slopes) + unexplained)
    return Estimate(
        step_s=step_s,
        low_s=step_s * math.exp(-SURE * deviation),
        high_s=step_s * math.exp(SURE * deviation),
        terms=found,
        stage_memory_bytes=stage_memory(
            profile, plan, batch_size=batch_size, precision=precision, apart=machine.device.apart
        ),
        device_memory_bytes=work.machine.device.memory_bytes,
        factors=factors(work),
    )


def expected(work: Work, calibration: Calibration) -> dict[str, float]:
    """Seconds by term."""
    residual, _ = calibration.residual(work.shape, work.kind)
    return {name: seconds * math.exp(residual) for name, seconds in terms(work, calibration.efficiencies).items()}


def _log_step(work: Work, calibration: Calibration, name: str) -> float:
    logs = np.array(calibration.logs)
    logs[NAMES.index(name)] += _STEP
    return math.log(_raw(work, logs))


def _raw(work: Work, logs: Vector) -> float:
    """Seconds of a step with these efficiencies, without residual."""
    return sum(terms(work, efficiencies(logs)).values())
