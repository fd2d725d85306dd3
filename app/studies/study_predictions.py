"""Throughput beyond the measured numbers of workers, predicted by the cost model from the measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from operator import itemgetter

from trainwright.core.cluster import Cluster
from trainwright.core.errors import PlanError
from trainwright.core.plan import Plan
from trainwright.planning.job_preparation import prepare, profile_of
from trainwright.ray_cluster.discovery import connect, discover
from trainwright.reporting.html.run_charts import Band
from trainwright.reporting.plan_view import plan_from
from trainwright.strategies.cost_model.estimator import Measurement, calibrate, estimate
from trainwright.studies.study_trials import StudyTrial


def predict_scaling(trials: Sequence[StudyTrial], cluster: Cluster) -> dict[str, list[Band]]:
    """Predict the throughput of curves by workers on a larger cluster, from twice the most measured workers on.

    Args:
        trials: with their histories; the model's efficiencies are fitted to their median steps, or, with parameter
            servers, to their throughput.
        cluster: need not exist.

    Returns:
        By curve, samples/s for numbers of workers: the plan with the most workers, with more data ranks. Nine of ten
        steps are expected in the interval.
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
    found: dict[str, list[Band]] = {}
    for label in dict.fromkeys(trial.label for trial, _ in plans):
        most, widest = max(((trial.x, plan) for trial, plan in plans if trial.label == label), key=itemgetter(0))
        for plan in takewhile(lambda plan: plan.mesh.size + plan.servers <= slots, _doubled(widest)):
            step = estimate(
                profile, cluster, plan, batch_size=job.batch_size, precision=job.training.precision, calibration=known
            )
            rates = [job.batch_size / seconds for seconds in (step.step_s, step.high_s, step.low_s)]
            found.setdefault(label, []).append(Band(most * plan.mesh.data // widest.mesh.data, *rates))
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
