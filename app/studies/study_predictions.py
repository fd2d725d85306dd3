"""Throughput beyond the measured numbers of workers, predicted by the cost model from the measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import itemgetter

from trainwright.core.cluster import Cluster
from trainwright.core.errors import PlanError
from trainwright.core.plan import Plan
from trainwright.planning.job_preparation import prepare, profile_of
from trainwright.ray_cluster.discovery import connect, discover
from trainwright.reporting.plan_view import plan_from
from trainwright.strategies.cost_model.estimator import Measurement, calibrate, estimate
from trainwright.studies.study_trials import StudyTrial


@dataclass(frozen=True, kw_only=True)
class PredictedThroughput:
    """Predicted throughput of a curve.

    Attributes:
        label: the curve.
        x: number of workers.
        mean, low, high: samples/s; nine of ten steps are expected between the last two.
    """

    label: str
    x: int
    mean: float
    low: float
    high: float


def predict_scaling(trials: Sequence[StudyTrial], cluster: Cluster) -> list[PredictedThroughput]:
    """Predict the throughput of curves by workers on a larger cluster, from twice the most measured workers on.

    Args:
        trials: with their histories; the model's efficiencies are fitted to their median steps, or, with parameter
            servers, to their throughput.
        cluster: need not exist.

    Returns:
        Predictions of the plan with the most workers of each curve, with more data ranks.
    """
    job = trials[0].job
    profile = profile_of(prepare(job, resume=True))
    connect()
    here = discover()
    ran = [trial for trial in trials if trial.history and trial.history.samples_per_s > 0]  # others failed before that
    plans = [(trial, plan) for trial in ran if trial.history and (plan := plan_from(trial.history.summary.start.plan))]
    known = calibrate([
        Measurement(
            profile=profile, cluster=here, plan=plan, batch_size=job.batch_size, precision=job.training.precision,
            step_s=job.batch_size / trial.history.samples_per_s if plan.servers else trial.history.median_step_s,
        )
        for trial, plan in plans if trial.history
    ])  # fmt: skip
    slots = cluster.accelerators or int(cluster.cpus)
    found: list[PredictedThroughput] = []
    for label in dict.fromkeys(trial.label for trial, _ in plans):
        most, widest = max(((trial.x, plan) for trial, plan in plans if trial.label == label), key=itemgetter(0))
        for plan in takewhile(lambda plan: plan.mesh.size + plan.servers <= slots, _doubled(widest)):
            step = estimate(
                profile, cluster, plan, batch_size=job.batch_size, precision=job.training.precision, calibration=known
            )
            rates = [job.batch_size / seconds for seconds in (step.step_s, step.high_s, step.low_s)]
            x = most * plan.mesh.data // widest.mesh.data
            found.append(PredictedThroughput(label=label, x=x, mean=rates[0], low=rates[1], high=rates[2]))
    return found


def check_larger(cluster: Cluster, workers: int, batch_size: int) -> None:
    """Check that a cluster has room for twice the workers, and the batch a sample for each. Raises PlanError."""
    slots = cluster.accelerators or int(cluster.cpus)
    if slots < 2 * workers:
        raise PlanError(
            f"{slots} workers are not twice the number that is measured, {workers}", where="--predict",
            remedy="give a larger cluster, such as 16x1xCPU@10Gb",
        )  # fmt: skip
    if batch_size < 2 * workers:
        raise PlanError(
            f"batch_size={batch_size} has no sample for each of {2 * workers} workers", where="--predict",
            remedy="set a larger batch_size, or leave --predict out",
        )  # fmt: skip


def _doubled(plan: Plan) -> list[Plan]:
    """Return the plan with 2, 4, 8 ... times as many data ranks, as far as each has a sample of the batch."""
    plans = []
    while (data := 2 * plan.mesh.data) * plan.mesh.shard <= plan.batch_size:
        plan = replace(plan, mesh=replace(plan.mesh, data=data))
        plans.append(plan)
    return plans
