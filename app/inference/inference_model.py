"""Who predicts: a run with a checkpoint, or any other model with weights, bound to the data set that it is to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, PlanError, nearest
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.first_row import transformed_fields
from trainwright.inference.inference_plan import fit_plan, single_replica, trained_plan
from trainwright.inference.prediction_files import SAMPLE
from trainwright.inference.prediction_worker import CheckpointWeights
from trainwright.inference.trained_model import find_checkpoint
from trainwright.planning.job_description import describe, select_fields
from trainwright.planning.planner import choose, grow_to_slots, usable_cluster
from trainwright.planning.profiler import profile_job
from trainwright.strategies.search.plan_request import placement_for

_FACTS = ("train", "model", "inputs", "pad", "collate", "precision", "seed", "schedule")


@dataclass(frozen=True, kw_only=True)
class InferenceModel:
    """What predicts.

    Attributes:
        job: reads the data set as its `train`, and needs neither targets nor a loss.
        weights: of the run's checkpoint; None where model() brings them.
        sha256: of the checkpoint's manifest, or of the weights.
        outline: () -> the model with whatever weights, to plan by and to be compared.
        lone: the job for one process whose model() brings the checkpoint's weights too; None where the engine does.
        undivided: why no layout that divides layers or cuts between them can run it; empty where they can.
    """

    job: Job
    weights: CheckpointWeights | None
    sha256: str
    outline: Callable[[], Any]
    lone: Job | None = None
    undivided: str = ""

    @property
    def step(self) -> int:
        """Of the checkpoint; 0 where there is none."""
        return self.weights.checkpoint.step if self.weights else 0

    def facts(self, index: Index) -> dict[str, str]:
        """What says what is computed, in words."""
        return select_fields(describe(self.job.replace(model=self.outline), train=index), _FACTS)

    def check(self, index: Index, keep: tuple[str, ...]) -> None:
        """Raise JobError for a column that is not in the data."""
        fields = transformed_fields(self.job.train, index)
        problems = [
            f"{what}={name!r} is no column of the data: {nearest(name, fields)}"
            for what, names in (("inputs", self.job.input_columns), ("keep", keep))
            for name in names
            if name not in fields
        ]
        if SAMPLE in keep:
            problems.append(f"keep={SAMPLE!r}: the row number has that name; rename the data's column")
        if problems:
            raise JobError(problems)


def trained_inference_model(job: Job, data: Dataset, step: int | None = None) -> InferenceModel:
    """A run's newest whole checkpoint, or the one at `step`. Raises JobError, CheckpointError."""
    served = inference_job(job, data)
    runs, checkpoint = find_checkpoint(job, step)
    weights = CheckpointWeights(runs=runs, run=job.name, checkpoint=checkpoint)
    return InferenceModel(job=served, weights=weights, sha256=checkpoint.manifest_sha256, outline=job.model)


def inference_job(job: Job, data: Dataset) -> Job:
    """The job without what only training needs, so that the data may lack it too. Raises JobError."""
    if not job.inputs:
        raise JobError(["inputs= is missing: name the columns given to the model to predict with it"])
    needed = job.collation.sources(job.arguments)
    return job.replace(
        train=data,
        evaluate=None,
        step=None,
        loss=no_loss,
        metrics={},
        targets=(),
        schedule=None,
        pad={name: pad for name, pad in job.pad.items() if name in needed},
        workers=None,
        accumulation=1,
        inexact=("batch_norm",),  # its statistics are not taken from batches here
    )


def no_loss(outputs: Any, targets: Any) -> Any:
    """Of what is not trained."""
    raise AssertionError("nothing is trained")


# --- How workers hold a model that predicts ---------------------------------------------------------------------------


def inference_layout(
    subject: InferenceModel, index: Index, parts: int, cluster: Cluster, workers: int | None = None
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
        ResourceError, PlanError, UserCodeError, JobError: as `_plan_pool`.
    """
    cluster = grow_to_slots(cluster, subject.job, workers or 1)
    job, divided = subject.job, None if workers else _divided(subject, index, cluster)
    if divided is not None and not _torn(subject, divided):
        return fit_plan(cluster, divided, job), 0
    try:
        return _plan_pool(subject, index, parts, cluster, workers)
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


def _plan_pool(
    subject: InferenceModel, index: Index, parts: int, cluster: Cluster, workers: int | None
) -> tuple[Plan, int]:
    """The plan of each worker, and how many there are: one for each accelerator or CPU slot, or as asked.

    Raises:
        ResourceError: more is asked for than the cluster has.
        PlanError, UserCodeError, JobError: the model cannot be run.
    """
    job = subject.job
    room = usable_cluster(cluster, job.replace(workers=workers) if workers else job)
    size = min(workers or room.slots, parts)
    alone = job.alone(model=subject.outline)
    plan = choose(_asked(alone, index), cluster, alone).chosen
    return replace(plan, placement=placement_for(room, size)), size


def _asked(job: Job, index: Index) -> ModelProfile:
    """The model as it is when it is asked and not trained."""
    return replace(profile_job(job, job.train, index), trains=False)


def _torn(subject: InferenceModel, plan: Plan) -> bool:
    """Whether what is asked for cannot be had in this layout."""
    return bool(subject.undivided) and max(plan.mesh.tensor, plan.mesh.pipeline) > 1


def _divided(subject: InferenceModel, index: Index, cluster: Cluster) -> Plan | None:
    """The layout of the run, or the one that is pinned, where several workers hold the model together."""
    pinned = subject.job.plan if subject.weights is None else None
    found = trained_plan(subject.job) if subject.weights else _chosen(subject, index, cluster) if pinned else None
    return found if found is not None and single_replica(found).workers > 1 else None


def _chosen(subject: InferenceModel, index: Index, cluster: Cluster) -> Plan | None:
    """What the planner has the whole cluster do with the model; None where nothing fits, or none divides it."""
    job = subject.job.replace(model=subject.outline)
    try:
        plan = choose(_asked(job, index), cluster, job).chosen
    except PlanError:
        if subject.weights is None and job.plan:
            raise
        return None
    return plan if single_replica(plan).workers > 1 else None
