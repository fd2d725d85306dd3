"""Prepare a job before workers start: open data and storage, compare with the run's past, and choose the plan."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainwright.core import formatting
from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, PlanError, ResourceError, RunConflict, RunFinished, nearest
from trainwright.core.job import Job
from trainwright.core.metric_goals import check_goals, goal_notes
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan, RejectedPlan
from trainwright.datasets.dataset import Index, delivery_of, transformed_fields
from trainwright.datasets.loading.batch_loader import make_schedule
from trainwright.datasets.metadata_cache import MetadataContext, metadata_context
from trainwright.datasets.ops.row_transforms import function_name
from trainwright.datasets.sample_order import steps_per_epoch
from trainwright.planning.alternative_layouts import is_movable, is_worth_measuring
from trainwright.planning.code_fingerprint import CodeFingerprints
from trainwright.planning.data_delivery import deliver_by_measuring
from trainwright.planning.decision import Decision
from trainwright.planning.job_description import comparable, describe, description_changes
from trainwright.planning.measured_step import TimeStep, predict_by_measuring, predict_from_past
from trainwright.planning.planner import apply_plan_file, choose, expansions, growth_notes
from trainwright.planning.profiler import profile_job
from trainwright.ray_cluster.discovery import discover
from trainwright.storage.event_files import read_run_summary
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import LogEntry, RunLog
from trainwright.storage.weight_files import WeightFiles, initial_weights

_TF_CONFIG_NOTE = 'TF_CONFIG of the environment is replaced in the workers; tf_config="environment" takes its addresses'

_LISTED_COLUMNS = 6  # columns of a note
_LENGTH_OPTIONS = ("epochs", "epoch_samples", "early_stop", "max_time")  # a finished run continues if one changes

_NOT_COMPARED_NOTE = (
    "whether the code of model, loss, step and transforms changed since the run was started is not known: "
    "another version of trainwright or of Python recorded it; from now on it is compared again"
)


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """A job with opened data and storage."""

    job: Job
    store: Store  # storage of the run
    train: Index  # index of the training set
    evaluate: Index | None  # index of the evaluation set
    steps_per_epoch: int  # global steps of one epoch
    description: dict[str, str]  # the job as text; see `job_description.describe`
    measured: str = ""  # name of the plan that was the fastest when plans were measured; empty without measurement
    begun: bool = False  # there is a checkpoint to resume from
    # cache files of the data files' metadata by name, which the run stores
    metadata: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # about the run's past, shown to the user
    unused: tuple[str, ...] = ()  # columns of the training set that the job does not use
    weights: WeightFiles | None = None  # opened files of `initial_weights`; None where the job names none

    @property
    def total_steps(self) -> int:
        """Global steps of the whole run."""
        return self.steps_per_epoch * self.job.epochs


def prepare(
    job: Job, *, resume: bool = False, fresh: bool = False, connect: Callable[[], object] | None = None
) -> PreparedJob:
    """Open data and storage, and compare the job with the run's past.

    Args:
        resume, fresh: as of `tw.fit`.
        connect: connects to the run's cluster, for data whose index takes long to read in this process.

    Raises:
        DataError, StorageError: a data set or the store cannot be used.
        JobError: columns are missing, the batch leaves no step, or `initial_weights` names no files.
        RunConflict: the name belongs to a finished or changed job, and neither `resume` nor `fresh` was given.
    """
    store = open_store(job.storage)
    store.check()

    def find(name: str) -> bytes | None:
        return None if fresh else store.find(_metadata_path(job.name, name))

    with metadata_context(MetadataContext(find=find, connect=connect, fingerprint=CodeFingerprints().digest)) as used:
        train = job.train.index()
        evaluate = job.evaluate.index() if job.evaluate is not None else None
    unused = _check_columns(job, train, evaluate)
    _check_goals(job)
    steps = steps_per_epoch(train.rows, job.batch_size, job.data.drop_last, job.data.epoch_samples)
    if not steps:
        rows = job.data.epoch_samples or train.rows
        raise JobError([f"batch_size={job.batch_size} with drop_last=True leaves no step of {rows} rows"])
    weights = initial_weights(job)
    prepared = PreparedJob(
        job=job, store=store, train=train, evaluate=evaluate, steps_per_epoch=steps, metadata=used.kept, unused=unused,
        description=describe(job, train=train, evaluate=evaluate, weights=weights.digest if weights else ""),
        weights=weights,
    )  # fmt: skip
    if not fresh:
        head = RunLog(store, job.name).head()
        if head is not None:
            _check_past(prepared, head, resume)
            notes = () if comparable(head.job) else (_NOT_COMPARED_NOTE,)
            probed = read_run_summary(store, job.name).probed
            measured = probed.name if probed else ""
            return replace(prepared, measured=measured, begun=bool(head.checkpoints), notes=notes)
    return prepared


def _check_goals(job: Job) -> None:
    """Check that best= and early_stop= name a metric that is evaluated, as far as the job tells. Raises JobError."""
    goals = job.checkpointing.goals
    if goals and job.evaluate is None:
        raise JobError([f"{option}= needs evaluate=: give the job a data set to evaluate on" for option in goals])
    if job.tensorflow.run == "step" and job.training.step is None:
        check_goals(goals, ("loss", *job.metrics))


def store_metadata(prepared: PreparedJob) -> None:
    """Store the data files' metadata beside the run, for a resume on another machine. Raises StorageError."""
    for name, content in prepared.metadata.items():
        prepared.store.put(_metadata_path(prepared.job.name, name), content, sync=False)


def _metadata_path(run: str, name: str) -> str:
    return f"{run}/metadata/{name}"


def needs_cluster_to_open(job: Job) -> bool:
    """Return whether reading a row opens a slow resource, such as a model, in a process of the cluster."""
    return any(data is not None and data.stateful for data in (job.train, job.evaluate))


def profile_of(prepared: PreparedJob) -> ModelProfile:
    """Return the profile of the job's model."""
    return profile_job(prepared.job, prepared.job.train, prepared.train, prepared.weights)


def decide_plan(prepared: PreparedJob, time_step: TimeStep = lambda rows, workers: (0.0, False)) -> Decision:
    """Choose the plan for the connected cluster.

    Args:
        time_step: as for `predict_by_measuring`; called if this machine has no stored time of the step.
    """
    decision = plan_for(prepared, discover(possible=True))
    from_past = predict_from_past(decision, prepared.job, prepared.description, prepared.store)
    decision = from_past or predict_by_measuring(decision, prepared.job, prepared.description, time_step)
    return deliver_by_measuring(decision, prepared.job, prepared.train)


def plan_for(prepared: PreparedJob, cluster: Cluster) -> Decision:
    """Choose the plan for a cluster, with as many more nodes as the plan needs."""
    profile, last_error = profile_of(prepared), None
    for grown in expansions(cluster, prepared.job):
        try:
            return _plan_on(prepared, profile, grown)
        except (PlanError, ResourceError) as error:
            last_error = error
    assert last_error is not None, "there is one expansion at least"
    raise last_error


def _plan_on(prepared: PreparedJob, profile: ModelProfile, cluster: Cluster) -> Decision:
    job = apply_plan_file(prepared.job, profile, cluster)
    planned_job = job.replace(probe=True) if prepared.measured else job  # for what it was measured among
    worker_cluster, reserved_notes = reserve_for_transforms(cluster, prepared.job)
    decision = replace(_apply_measurements(choose(profile, worker_cluster, planned_job), prepared), cluster=cluster)
    _check_fit(prepared, decision.chosen)
    _check_batch_norm(prepared, profile, decision.chosen)
    _check_weights(job, profile)
    if job.recovery.on_loss == "shrink" and profile.framework == "tensorflow":
        raise JobError(['on_loss="shrink" is for torch: after each failure all processes of TensorFlow start again'])
    if job.recovery.on_oom == "replan" and not is_movable(decision.chosen):
        problem = 'on_oom="replan" needs a torch module on one device in each worker'
        raise JobError([f"{problem}; the plan is {decision.chosen.name}: leave it out"])
    notes = [*prepared.notes, *growth_notes(cluster, prepared.job), *decision.chosen.notes, *reserved_notes]
    notes += goal_notes(prepared.job.checkpointing.goals)
    made_for = getattr(prepared.job.training.schedule, "total_steps", prepared.total_steps)  # of an adapter's schedule
    if made_for != prepared.total_steps:
        notes.append(
            f"the schedule was made for {made_for:,} steps, and the run has {prepared.total_steps:,}: give epochs= and "
            "batch_size= to from_lightning or from_hf_trainer, unless the rates do not depend on them"
        )
    if decision.profile.framework == "tensorflow" and job.tensorflow.tf_config == "own" and "TF_CONFIG" in os.environ:
        notes.append(_TF_CONFIG_NOTE)
    notes += [f"train= is {note}" for note in (job.train.source.plan_note, prepared.train.note) if note]
    delivery, reason = delivery_of(job.train, job.data.delivery)
    if delivery == "ray_data" and not job.train.streamed:
        notes.append(f"train= is delivered by Ray Data: {reason}")
    if prepared.unused:
        notes.append(_unused_note(prepared.unused))
    return replace(decision, chosen=replace(decision.chosen, notes=tuple(notes)), delivery=delivery)


def _unused_note(names: Sequence[str]) -> str:
    """Return a note on unused columns."""
    more = len(names) - _LISTED_COLUMNS
    text = ", ".join(names[:_LISTED_COLUMNS]) + (f" and {more} more" if more > 0 else "")
    return f"unused columns of train=: {text}; inputs=, targets= and sample_weight= name those that the job uses"


def _apply_measurements(decision: Decision, prepared: PreparedJob) -> Decision:
    """Choose the plan measured in an earlier session, and drop measurements that would not pay off."""
    measured = [plan for plan in decision.contenders if plan.name == prepared.measured]
    if measured:
        chosen = measured[0].noted("it was the quickest when plans were measured")
        return replace(decision, chosen=chosen, rejected=_reject_unmeasured(decision, chosen), contenders=())
    measurable = decision.contenders and prepared.job.planning.probe and not prepared.begun
    if not measurable or not is_worth_measuring(decision.contenders, prepared.total_steps):
        return replace(decision, contenders=())
    names = [plan.strategy for plan in decision.contenders]
    rejected = [
        replace(item, reason=f"{item.reason}; both are measured before the first step")
        if item.plan.strategy in names
        else item
        for item in decision.rejected
    ]
    return replace(decision, rejected=tuple(rejected))


def _reject_unmeasured(decision: Decision, measured: Plan) -> tuple[RejectedPlan, ...]:
    """Return the rejected plans of a measured plan, with the plan that the estimates would have chosen."""
    rejected = tuple(item for item in decision.rejected if item.plan.strategy != measured.strategy)
    if decision.chosen.strategy == measured.strategy:
        return rejected
    reason = f"{measured.strategy} was quicker when plans were measured"
    return (RejectedPlan(plan=decision.chosen, reason=reason), *rejected)


def _check_fit(prepared: PreparedJob, plan: Plan) -> None:
    """Refuse a last training batch that Keras' fit would weight unevenly. Raises JobError."""
    job, devices = prepared.job, plan.devices_per_worker
    last = prepared.train.rows % job.batch_size
    if job.tensorflow.run == "fit" and last % devices and not job.data.drop_last:
        raise JobError(
            [
                f"the last batch of train has {last} rows, which Keras' fit would weigh differently on each of "
                f"{devices} devices: use a batch_size that leaves none, drop_last=True, or devices=1"
            ]
        )


def _check_batch_norm(prepared: PreparedJob, profile: ModelProfile, plan: Plan) -> None:
    """Refuse batches that leave a batch norm too few rows for a variance, such as an epoch's last. Raises JobError."""
    if profile.least_rows == 1:
        return
    job, schedule = prepared.job, make_schedule(prepared.train, **prepared.job.ordering())
    parts, _ = plan.micro_batches(job.batch_size)
    ranks = 1 if job.training.batch_norm == "sync" else plan.mesh.data_ranks
    last, lanes = prepared.steps_per_epoch - 1, schedule.order.lanes.count
    for step in (*range(min(last, lanes)), last):  # the shares of full batches repeat after `lanes` steps
        least, size = int(schedule.share_rows(range(step, step + 1), ranks).min()), schedule.size(step)
        if least < profile.least_rows * parts:
            cause = f"a batch of {formatting.count(size, 'row')} leaves a data rank {least // parts} for a micro-batch"
            larger = "a larger batch_size" if size == job.batch_size else "drop_last=True, another batch_size"
            raise JobError(
                [
                    f"{cause}, and a batch norm of vectors is trained on {profile.least_rows} at least: set {larger}, "
                    'fewer workers, or batch_norm="sync", which counts the rows of all data ranks'
                ]
            )


def _check_weights(job: Job, profile: ModelProfile) -> None:
    """Refuse Keras sample weights for models of other frameworks, and weight= for Keras models. Raises JobError."""
    if job.training.weight is not None and profile.framework == "tensorflow":
        problem = "weight= is for torch models: Keras' losses are given sample_weight=, and others return Terms"
        raise JobError([problem])
    for name in ("sample_weight", "class_weight"):
        if job.get(name) and profile.framework != "tensorflow":
            raise JobError(
                [
                    f"{name}= is for Keras models on TensorFlow: name the weights in targets= and return losses times "
                    "weights, or Terms(losses, weights), which divides by the sum of the weights"
                ]
            )


def _check_columns(job: Job, train: Index, evaluate: Index | None) -> tuple[str, ...]:
    """Return unused columns of the training set.

    Raises:
        JobError: a column is missing, a weight is unused, or labels of images mean different classes.
    """
    names = list(transformed_fields(job.train, train))
    problems = [*_missing_columns(job, "train", names), *_unused_weights(job, "train", train, names)]
    if evaluate is not None:
        columns = list(transformed_fields(job.evaluate, evaluate))
        problems += [*_missing_columns(job, "evaluate", columns), *_unused_weights(job, "evaluate", evaluate, columns)]
    if job.columns is None or "label" in job.columns:
        problems += _different_classes(train, evaluate)
    if problems:
        raise JobError(problems)
    return tuple(name for name in names if job.columns is not None and name not in job.columns)


def _missing_columns(job: Job, where: str, names: Sequence[str]) -> Iterable[str]:
    options = ("inputs", job.input_columns), ("targets", job.target_columns), ("sample_weight", job.weight_columns)
    for option, columns in options:
        for column in columns:
            if column not in names:
                yield f"{option}={column!r} is not a column of {where}: {nearest(column, names)}"


def _unused_weights(job: Job, where: str, index: Index, names: Sequence[str]) -> Iterable[str]:
    """Yield a problem where a pipeline gives (x, y, weight), as Keras takes it, and the weight is unused."""
    weight = index.weight
    if weight in names and job.columns is not None and weight not in job.columns:
        yield (
            f"{where}= gives (x, y, weight), and nothing uses the weight: set sample_weight={weight!r}, or leave it "
            "out with .map(lambda x, y, weight: (x, y))"
        )


def _different_classes(train: Index, evaluate: Index | None) -> Iterable[str]:
    """Yield a problem for each data set where a label is another class than in the first folder of images."""
    class_lists = [("train", names) for names in train.class_names()]
    class_lists += [("evaluate", names) for names in evaluate.class_names()] if evaluate is not None else []
    for where, names in class_lists[1:]:
        for label, (first, second) in enumerate(zip(class_lists[0][1], names, strict=False)):
            if first != second:
                yield (
                    f"label means other classes in {where}=: {label} is {second!r} there and {first!r} in "
                    f"{class_lists[0][0]}=; give all folders the same names: images(path, classes=[...])"
                )
                break


def _check_past(prepared: PreparedJob, head: LogEntry, resume: bool) -> None:
    """Refuse to continue the run of a different job without `resume`, unless it failed before its first checkpoint."""
    if resume:
        return
    name, where = prepared.job.name, prepared.store.uri_of(prepared.job.name)
    changes = description_changes(head.job, prepared.description)
    if changes and (head.checkpoints or head.outcome != "failed"):  # workers of a killed driver may hold its state
        change_lines = "".join(f"\n    {line}" for line in changes)
        raise RunConflict(
            f"the run {name!r} was started with another job:{change_lines}\n ",
            where=where,
            remedy="resume=True goes on from its last checkpoint, fresh=True begins again, or give the job a new name",
        )
    last_step = max((item.step for item in head.checkpoints), default=0)
    ended_early = all(head.job.get(option, "None") == prepared.description[option] for option in _LENGTH_OPTIONS)
    if head.outcome == "done" and (last_step >= prepared.total_steps or ended_early):
        raise RunFinished(
            f"the run {name!r} is finished ({last_step} steps)",
            where=where,
            remedy=f"tw.open_run({name!r}, {prepared.job.storage!r}) shows it; fresh=True trains again, a larger "
            "epochs= goes on for longer, or give a new name; a run that early_stop= or max_time= ended goes on with a "
            "larger patience or limit",
        )


def reserve_for_transforms(cluster: Cluster, job: Job) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster without the GPUs that heavy transforms request, and a note for the plan.

    Raises:
        ResourceError: too few GPUs are left for the workers.
    """
    requests = [(name, need) for name, need in _heavy_transforms(job) if need]
    if not requests or cluster.accelerator != "GPU" or job.scaling.accelerator == "cpu":
        return cluster, ()
    names = ", ".join(dict.fromkeys(name for name, _ in requests))
    reserved, available = math.ceil(sum(need for _, need in requests) - 1e-6), cluster.accelerators
    if available - reserved < (job.scaling.workers or 1):
        raise ResourceError(
            f"the transforms {names} ask for {formatting.count(reserved, 'GPU')} and the workers for "
            f"{job.scaling.workers or 'at least 1'}; the cluster has {available}",
            where="map_batches",
            remedy="set fewer workers, give the transforms cpus= or a fraction of a GPU, or compute what they add once "
            "and store it",
        )
    nodes, remaining = list(cluster.nodes), reserved
    for number, node in reversed(list(enumerate(nodes))):
        node_gpus = min(remaining, node.accelerators)
        nodes[number], remaining = replace(node, accelerators=node.accelerators - node_gpus), remaining - node_gpus
    note = f"{formatting.count(reserved, 'GPU')} {'is' if reserved == 1 else 'are'} kept for {names}"
    return replace(cluster, nodes=tuple(nodes)), (note,)


def _heavy_transforms(job: Job) -> list[tuple[str, float]]:
    """Return name and GPUs of each heavy class with its arguments, and of the function that requests most GPUs."""
    classes: dict[Any, tuple[str, float]] = {}
    functions: dict[str, float] = {}
    for dataset in (job.train, job.evaluate):
        if dataset is not None and dataset.streamed:
            classes[id(dataset)] = repr(dataset), sum(dataset.source.needs["GPU"])
        for step in dataset.transforms if dataset is not None and job.data.delivery != "direct" else ():
            if step.heavy:
                name = function_name(step.function)
                if step.stateful:
                    classes[step.function.key, step.cpus, step.gpus] = name, step.gpus
                else:
                    functions[name] = max(functions.get(name, 0.0), step.gpus)
    largest = max(functions, key=functions.__getitem__, default="")
    return [*classes.values(), *([(largest, functions[largest])] if largest else [])]
