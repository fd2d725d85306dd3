"""How workers hold a model that predicts: each all of it, or together what is too large for one."""

from __future__ import annotations

from dataclasses import replace

from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, PlanError
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan
from trainwright.datasets.index import Index
from trainwright.inference.inference_model import Subject
from trainwright.inference.trained_plan import plan_on, replica_of, trained_plan
from trainwright.planning.cluster_growth import enough
from trainwright.planning.planner import choose, usable
from trainwright.planning.profile_model import profile_job
from trainwright.strategies.search.plan_request import place


def layout(
    subject: Subject, index: Index, parts: int, cluster: Cluster, workers: int | None = None
) -> tuple[Plan, int]:
    """The plan of each worker of a pool, and how many there are; or one that several run the model in together, and 0.

    Together they run what a run trained in a layout that divides the model, what `plan=` of a model without a run
    divides, and what no worker can hold whole, as the planner divides it.

    Args:
        subject: what predicts.
        index: of its data set.
        parts: to be computed, of which each worker of a pool has one at a time.
        cluster: where.
        workers: of a pool, where it is asked for.

    Raises:
        ResourceError, PlanError, UserCodeError, JobError: as `plan_pool`.
    """
    cluster = enough(cluster, subject.job, workers or 1)
    job, divided = subject.job, None if workers else _divided(subject, index, cluster)
    if divided is not None and not _torn(subject, divided):
        return plan_on(cluster, divided, job), 0
    try:
        return plan_pool(subject, index, parts, cluster, workers)
    except PlanError as error:
        divided = divided or (None if workers else _chosen(subject, index, cluster))
        if divided is None:
            raise
        if not _torn(subject, divided):
            return divided, 0
        problem = f"{subject.undivided}, which the layout {divided.name} has on no worker whole"
        raise JobError(
            [f"{problem}, and the whole model fits on none: {error.what} ({error.where})"], where=job.name
        ) from error


def plan_pool(subject: Subject, index: Index, parts: int, cluster: Cluster, workers: int | None) -> tuple[Plan, int]:
    """The plan of each worker, and how many there are: one for each accelerator or CPU slot, or as asked.

    Raises:
        ResourceError: more is asked for than the cluster has.
        PlanError, UserCodeError, JobError: the model cannot be run.
    """
    job = subject.job
    room = usable(cluster, job.replace(workers=workers) if workers else job)
    size = min(workers or room.slots, parts)
    alone = job.alone(model=subject.outline)
    plan = choose(_asked(alone, index), cluster, alone).chosen
    return replace(plan, placement=place(room, size)), size


def _asked(job: Job, index: Index) -> ModelProfile:
    """The model as it is when it is asked and not trained."""
    return replace(profile_job(job, job.train, index), trains=False)


def _torn(subject: Subject, plan: Plan) -> bool:
    """Whether what is asked for cannot be had in this layout."""
    return bool(subject.undivided) and max(plan.mesh.tensor, plan.mesh.pipeline) > 1


def _divided(subject: Subject, index: Index, cluster: Cluster) -> Plan | None:
    """The layout of the run, or the one that is pinned, where several workers hold the model together."""
    pinned = subject.job.plan if subject.weights is None else None
    found = trained_plan(subject.job) if subject.weights else _chosen(subject, index, cluster) if pinned else None
    return found if found is not None and replica_of(found).workers > 1 else None


def _chosen(subject: Subject, index: Index, cluster: Cluster) -> Plan | None:
    """What the planner has the whole cluster do with the model; None where nothing fits, or none divides it."""
    job = subject.job.replace(model=subject.outline)
    try:
        plan = choose(_asked(job, index), cluster, job).chosen
    except PlanError:
        if subject.weights is None and job.plan:
            raise
        return None
    return plan if replica_of(plan).workers > 1 else None
