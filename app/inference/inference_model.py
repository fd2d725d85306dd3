"""A model for inference, of a run or not, bound to a data set; and how workers hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainwright.core.cluster import Cluster
from trainwright.core.data import Batch, Columns, Feed, FeedAssignment
from trainwright.core.engine import CheckpointChoice
from trainwright.core.errors import JobError, PlanError, ResourceError, nearest
from trainwright.core.initial_weights import WeightSource
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Mesh, Plan
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import Dataset, transformed_fields
from trainwright.inference.prediction_worker import SAMPLE, CheckpointWeights
from trainwright.planning.job_description import describe, select_fields
from trainwright.planning.planner import choose, grow_to_slots, pinned_kind, usable_cluster
from trainwright.planning.profiler import profile_job
from trainwright.ray_cluster.discovery import connect, discover
from trainwright.reporting.plan_view import plan_from
from trainwright.storage.checkpoints import find_checkpoint
from trainwright.storage.event_files import read_run_summary
from trainwright.storage.object_store import open_store
from trainwright.storage.weight_files import base_weights
from trainwright.strategies import STRATEGIES
from trainwright.strategies.distillation.multi_student import model_backend
from trainwright.strategies.search.plan_request import placement_for, worker_capacity

_FACTS = ("train", "model", "inputs", "pad", "collate", "precision", "seed", "schedule")


@dataclass(frozen=True, kw_only=True)
class InferenceModel:
    """A model for inference with its data set."""

    job: Job  # reads the data set as its `train`, and needs neither targets nor a loss
    weights: CheckpointWeights | None  # of the run's checkpoint; None where model() brings them
    sha256: str  # of the checkpoint's manifest, or of the weights
    architecture: Callable[[], Any]  # () -> the model with any weights, for planning and comparison
    # job whose model() loads the checkpoint's weights itself; None where the engine loads them
    single_process_job: Job | None = None
    whole_model_reason: str = ""  # why no layout that divides the layers can run it; empty where such layouts can
    # files of the parameters that the checkpoint does not hold; None where it holds all
    base: WeightSource | None = None

    @property
    def step(self) -> int:
        """Step of the checkpoint; 0 where there is none."""
        return self.weights.checkpoint.step if self.weights else 0

    def facts(self, index: Index) -> dict[str, str]:
        """Return the facts that determine the outputs, in words."""
        return select_fields(describe(self.job.replace(model=self.architecture), train=index), _FACTS)

    def content_hash(self, index: Index, keep: tuple[str, ...] = ()) -> str:
        """Return a hash of what a few rows hold in the columns that are read. Raises DataError."""
        data: Dataset = self.job.train
        columns = self.job.columns
        return data.sampled_hash(index, None if columns is None else dict.fromkeys((*columns, *keep)))

    def check(self, index: Index, keep: tuple[str, ...]) -> None:
        """Raise JobError for a column that is not in the data."""
        fields = transformed_fields(self.job.train, index)
        problems = [
            f"{what}={name!r} is not a column of the data: {nearest(name, fields)}"
            for what, names in (("inputs", self.job.input_columns), ("keep", keep))
            for name in names
            if name not in fields
        ]
        if SAMPLE in keep:
            problems.append(f"keep={SAMPLE!r}: the row number has that name; rename the data's column")
        if problems:
            raise JobError(problems)


def trained_inference_model(job: Job, data: Dataset, step: CheckpointChoice = None) -> InferenceModel:
    """Return the model of a run's newest whole checkpoint, or of that of `step`. Raises JobError, CheckpointError."""
    served = inference_job(job, data)
    runs, checkpoint = find_checkpoint(job, step)
    weights = CheckpointWeights(runs=runs, run=job.name, checkpoint=checkpoint)
    return InferenceModel(
        job=served, weights=weights, sha256=checkpoint.manifest_sha256, architecture=job.model, base=base_weights(job)
    )


def inference_job(job: Job, data: Dataset) -> Job:
    """Return the job without what only training needs; the data needs no targets. Raises JobError."""
    if not job.inputs:
        raise JobError(["inputs= is missing: name the columns given to the model to predict with it"])
    needed = job.data.collation.sources(job.arguments)
    return job.replace(
        train=data,
        evaluate=None,
        step=None,
        loss=no_loss,
        metrics={},
        targets=(),
        schedule=None,
        pad={name: pad for name, pad in job.data.pad.items() if name in needed},
        workers=None,
        accumulation=1,
        inexact=("batch_norm",),  # its statistics are not taken from batches here
    )


def no_loss(outputs: Any, targets: Any) -> Any:
    """Loss of a model that is not trained."""
    raise AssertionError("nothing is trained")


def frozen_optimizer(parameters: Any) -> Any:
    """Return an optimizer for a model that is not trained, in the parameters' framework."""
    found = list(parameters)
    return model_backend(found[0]).still(found)


# --- How workers hold a model that predicts ---------------------------------------------------------------------------


def inference_layout(
    subject: InferenceModel, index: Index, parts: int, cluster: Cluster, workers: int | None = None
) -> tuple[Plan, int]:
    """Return the plan of each worker of a pool and the size of the pool; or a plan that divides the model, and 0.

    Several workers hold a model together where its run was trained so, where `plan=` of a model without a run says so,
    and where no worker can hold it whole; then the planner divides it.

    Args:
        subject: the model.
        index: of its data set.
        parts: number of ranges to compute; a worker of a pool has one at a time.
        cluster: to run on.
        workers: of a pool, if given.

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
        problem = f"{subject.whole_model_reason}, which the layout {divided.name} has on no worker whole"
        raise JobError(
            [f"{problem}, and the whole model fits on none: {error.what} ({error.where})"], where=job.name
        ) from error


def _plan_pool(
    subject: InferenceModel, index: Index, parts: int, cluster: Cluster, workers: int | None
) -> tuple[Plan, int]:
    """Return the plan of each worker, and their number: as given, or one for each accelerator or CPU slot.

    Raises:
        ResourceError: more is asked for than the cluster has.
        PlanError, UserCodeError, JobError: the model cannot be run.
    """
    job = subject.job
    room = usable_cluster(cluster, job.replace(workers=workers) if workers else job)
    size = min(workers or room.slots, parts)
    alone = job.on_one_device(model=subject.architecture)
    plan = choose(_asked(alone, index), cluster, alone).chosen
    return replace(plan, placement=placement_for(room, size, kind=pinned_kind(job, room))), size


def _asked(job: Job, index: Index) -> ModelProfile:
    """Return the cost of the model without training."""
    return replace(profile_job(job, job.train, index), trains=False)


def _torn(subject: InferenceModel, plan: Plan) -> bool:
    """Whether this layout cannot give the requested outputs."""
    return bool(subject.whole_model_reason) and max(plan.mesh.tensor, plan.mesh.pipeline) > 1


def _divided(subject: InferenceModel, index: Index, cluster: Cluster) -> Plan | None:
    """Return the layout of the run, or the pinned one, where several workers hold the model together."""
    pinned = subject.job.planning.plan if subject.weights is None else None
    found = trained_plan(subject.job) if subject.weights else _chosen(subject, index, cluster) if pinned else None
    return found if found is not None and single_replica(found).workers > 1 else None


def _chosen(subject: InferenceModel, index: Index, cluster: Cluster) -> Plan | None:
    """Return the planner's layout for the whole cluster; None where nothing fits, or it does not divide the model."""
    job = subject.job.replace(model=subject.architecture)
    try:
        plan = choose(_asked(job, index), cluster, job).chosen
    except PlanError:
        if subject.weights is None and job.planning.plan:
            raise
        return None
    return plan if single_replica(plan).workers > 1 else None


# --- The layout of a trained run on the present cluster, and the rows of each rank ------------------------------------


def trained_plan(job: Job) -> Plan | None:
    """Return the plan that the job's run was last trained under; None where there is none. Raises StorageError.

    A plan without collective ranks becomes a plan of replicas: see `serving_plan`.
    """
    plan = plan_from(read_run_summary(open_store(job.storage), job.name).start.plan)
    return plan if plan is None or plan.topology == "collective" else serving_plan(plan)


def trained_steps(job: Job) -> int:
    """Return the steps of the whole run, as it was last started; 1 where that is not known. Raises StorageError."""
    return read_run_summary(open_store(job.storage), job.name).start.total_steps or 1


def serving_plan(plan: Plan) -> Plan | None:
    """Return a plan of replicas on as many workers, or of one. Any layout can load a checkpoint."""
    for name, data in (("data_parallel", plan.mesh.data), ("one_device", 1), ("tf_one_device", 1)):
        for framework, engine in STRATEGIES[name].engines.items():
            if f".{framework}." in plan.engine:
                return replace(
                    plan, strategy=name, engine=engine, mesh=Mesh(data=data), topology="collective", servers=0,
                    devices_per_worker=1, tpu="", consistency="", wire="full", local_steps=1, outer="",
                )  # fmt: skip
    return None


def single_replica(plan: Plan) -> Plan:
    """Return the plan for one replica of the model."""
    return plan.resized(max(1, plan.workers // plan.mesh.data))


def plan_on_cluster(plan: Plan, job: Job, verbose: bool = False) -> Plan:
    """As `fit_plan`, on the connected cluster."""
    connect(verbose)
    return fit_plan(discover(possible=True), plan, job)


def fit_plan(cluster: Cluster, plan: Plan, job: Job) -> Plan:
    """Return the plan for the nodes of this cluster, with fewer replicas where there is less room.

    Raises:
        ResourceError: there is no room for a whole replica.
    """
    room = usable_cluster(grow_to_slots(cluster, job, plan.workers * plan.devices_per_worker), job.on_one_device())
    most = worker_capacity(room) // (plan.devices_per_worker if room.accelerators else 1)
    for workers in range(min(plan.workers, most), 0, -1):
        try:
            fitting = plan.resized(workers)
        except ValueError:  # no whole number of replicas
            continue
        kind = pinned_kind(job, room)
        return replace(fitting, placement=placement_for(room, workers, plan.devices_per_worker, kind=kind))
    raise ResourceError(
        f"the run was trained as {plan.name}, which needs {single_replica(plan).workers} workers; the cluster has "
        f"room for {most}",
        where=f"{job.name}: {cluster}",
        remedy="connect to a cluster that has more, or use one device of this machine: here=True, or for "
        "predictions workers=",
    )


def split_into_feeds(plan: Plan, columns: Columns) -> list[tuple[Feed, ...]]:
    """Return the feed of each worker, so that the model gets these rows in their order.

    Every data rank has as many rows in a feed, no more than in a micro-batch of training; where they do not divide, the
    last one is repeated with weight 0.
    """
    rows = len(next(iter(columns.values())))
    most = plan.mesh.data_ranks * plan.micro_batches(plan.batch_size)[1]
    parts = [range(start, min(start + most, rows)) for start in range(0, rows, most)]
    return [tuple(_feed(plan.feed_of(worker), columns, part) for part in parts) for worker in range(plan.workers)]


def _feed(feeding: FeedAssignment, columns: Columns, given: range) -> Feed:
    """Return the rows of a worker."""
    each = -(-len(given) // feeding.total)
    batches = []
    for rank in feeding.data_ranks:
        places = np.arange(rank * each, (rank + 1) * each)
        samples = given.start + np.minimum(places, len(given) - 1)
        held = {name: column[samples] for name, column in columns.items()} if feeding.inputs else {}
        batches.append((Batch(columns=held, weights=np.where(places < len(given), 1.0, 0.0), samples=samples),))
    return Feed(
        step=0, parts=tuple(batches), data_ranks=feeding.data_ranks, total=feeding.total, rows=len(given)
    )  # fmt: skip


def gather_outputs(plan: Plan, answers: Sequence[Sequence[Columns]], feeds: Sequence[Feed]) -> Iterator[Columns]:
    """Return the outputs of all rows in their order, in pieces.

    Args:
        answers: of each worker, what it has for each feed; those with the outputs have some.
        feeds: of any worker.
    """
    holders = sorted((plan.feed_of(worker).data_ranks.start, worker) for worker, had in enumerate(answers) if any(had))
    for number, feed in enumerate(feeds):
        left = feed.rows
        for _, worker in holders:
            piece = {name: column[:left] for name, column in answers[worker][number].items()}
            rows = min(left, len(next(iter(piece.values()))))
            left -= rows
            if rows:
                yield piece
