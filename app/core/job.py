"""The job: a run as the user describes it, with checks of its fields against each other.

Unknown fields are refused with the nearest valid name, and all problems are reported at once.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from trainwright.core import strict_model
from trainwright.core.cluster import Cluster
from trainwright.core.data import Batch, Feed
from trainwright.core.engine import MASK_SUFFIX, ModelSpec
from trainwright.core.errors import JobError, PlanError, nearest
from trainwright.core.job_options import (
    GROUP_OF,
    GROUPS,
    Checkpointing,
    ColumnNames,
    Data,
    JobModel,
    Planning,
    Recovery,
    Scaling,
    TensorFlow,
    Training,
    collect_options,
    set_options,
)
from trainwright.core.loss_api import has_sum_reduction
from trainwright.core.plan import Plan, single_device_spec
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer

START_DEADLINE_S = 300.0  # for workers to start on running nodes
NEW_NODE_DEADLINE_S = 1800.0  # on nodes that may have to be started first


class Job(JobModel):
    """A training job. Moving from one device to a cluster changes no field of it.

    Each option of a group can be given by itself: `tw.Job(..., spares=2)` is `tw.Job(..., recovery=tw.Recovery(
    spares=2))`. The groups' classes describe the options: `help(tw.Recovery)`.

    Attributes:
        name: of the run; the same name resumes it. Letters, digits, dots, dashes and underscores.
        model: () -> torch.nn.Module or keras.Model; called in each worker. Global settings of this process for new
            models (Keras' policy, floatx, epsilon and image format, torch's default type) apply in workers too.
        optimizer: (parameters) -> torch.optim.Optimizer or keras.optimizers.Optimizer. May be left out, like loss and
            metrics, where `run="fit"` and model() returns a compiled model.
        loss: (outputs, targets) -> one loss per sample, or `tw.Terms(values, weights)` for tokens and masks. Keras' own
            losses and functions, and a function with parameters named `(y_true, y_pred)`, are called in that order; so
            are metrics.
        train: data set to train on, such as `tw.datasets.parquet("data/train")`.
        evaluate: data set to evaluate on after each `evaluate_epochs` epochs.
        inputs: column name or names given to the model, or the model's argument -> column:
            `{"input_ids": "tokens", "attention_mask": "tokens_mask"}` calls `model(input_ids=..., attention_mask=...)`.
        targets: column name or names given to loss and metrics; none where a Keras `train_step` takes inputs alone.
        metrics: name -> (outputs, targets) -> one value per sample, or Terms.
        batch_size: global, in samples: it means the same on 1 and on 1,000 workers.
        epochs: passes over the data, or virtual epochs of `epoch_samples`.
        storage: a folder, or `s3://`, `gs://`, `az://` with a bucket and a prefix.
        trackers: experiment trackers to report to, such as `tw.trackers.MLflow(uri=...)`; see `docs/watching.md`.
        data: how samples are read, ordered, weighted and batched.
        training: how a step is computed.
        planning: what the planner must keep to, and asynchronous training.
        scaling: how many workers, on which devices, and how that may change.
        recovery: what happens after failures and bad steps.
        checkpointing: when state is copied and evaluated.
        tensorflow: options of Keras models on TensorFlow.
    """

    name: str
    model: Callable[[], Any]
    optimizer: Callable[[Any], Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    train: Any
    evaluate: Any = None
    inputs: str | ColumnNames | Mapping[str, str] = ()
    targets: str | ColumnNames = ()
    metrics: Mapping[str, Callable[[Any, Any], Any]] = Field(default_factory=dict)
    batch_size: Annotated[int, Field(ge=1)]
    epochs: Annotated[int, Field(ge=1)] = 1
    storage: str = "runs"
    trackers: tuple[Any, ...] = ()
    data: Data = Field(default_factory=Data)
    training: Training = Field(default_factory=Training)
    planning: Planning = Field(default_factory=Planning)
    scaling: Scaling = Field(default_factory=Scaling)
    recovery: Recovery = Field(default_factory=Recovery)
    checkpointing: Checkpointing = Field(default_factory=Checkpointing)
    tensorflow: TensorFlow = Field(default_factory=TensorFlow)

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...  # options of groups too

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, given: dict[str, Any]) -> dict[str, Any]:
        fields, twice = collect_options(given)
        if twice:
            raise JobError(twice)
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        problems = _inconsistencies(self)
        if problems:
            raise JobError(problems)
        return self

    def replace(self, **fields: Any) -> Job:
        """Return a copy with some fields or options changed, validated like a new job."""
        changed = {**self.explicit(), **{name: value for name, value in fields.items() if name not in GROUP_OF}}
        for name in [name for name in fields if name in GROUP_OF]:
            changed[GROUP_OF[name]] = {**set_options(changed.get(GROUP_OF[name])), name: fields[name]}
        return Job(**changed)

    def get(self, name: str) -> Any:
        """Return a field, or an option of a group, by its own name."""
        return getattr(getattr(self, GROUP_OF[name]) if name in GROUP_OF else self, name)

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the default of a field or an option."""
        kind = GROUPS[GROUP_OF[name]] if name in GROUP_OF else cls
        return kind.model_fields[name].get_default(call_default_factory=True)

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields and options that are set explicitly, without the names of groups."""
        own = self.model_fields_set - GROUPS.keys()
        return frozenset(own.union(*(getattr(self, group).model_fields_set for group in GROUPS)))

    @classmethod
    def advice_on(cls, name: str) -> str:
        """Name the nearest field, group or option."""
        return nearest(name, [*cls.model_fields, *GROUP_OF])

    def on_one_device(self, **fields: Any) -> Job:
        """Return the job for one worker with one device, without pinned layout or strategy.

        Micro-batches stay as `accumulation=` or `plan=` pins them.
        """
        plan = single_device_spec(self.planning.plan or "") or None
        one = {"workers": 1, "min_workers": None, "max_workers": None, "devices": 1, "strategy": None, "plan": plan}
        apart = {"consistency": None, "wire": "full", "local_steps": 1, "outer": None}
        return self.replace(**{**one, **apart, **fields})

    def start_deadline_s(self, cluster: Cluster) -> float:
        """Return the seconds to wait until a cluster has started the workers."""
        return self.scaling.place_deadline_s or (NEW_NODE_DEADLINE_S if cluster.grows else START_DEADLINE_S)

    @property
    def arguments(self) -> ColumnNames:
        """Names of the columns given to the model, in order, masks included."""
        return tuple(self.inputs.values()) if isinstance(self.inputs, Mapping) else _names(self.inputs)

    @property
    def keywords(self) -> ColumnNames:
        """Names of the model's parameters for `arguments`; empty where they are positional."""
        return tuple(self.inputs) if isinstance(self.inputs, Mapping) else ()

    @property
    def target_names(self) -> ColumnNames:
        """Names of the columns given to loss and metrics, masks included."""
        return _names(self.targets)

    @property
    def input_columns(self) -> ColumnNames:
        """Columns of the data set that the inputs come from; none where `collate` makes them."""
        return () if self.data.collate else self.data.collation.sources(self.arguments)

    @property
    def target_columns(self) -> ColumnNames:
        """Columns of the data set that the targets come from; none where `collate` makes them."""
        return () if self.data.collate else self.data.collation.sources(self.target_names)

    @property
    def weight_columns(self) -> ColumnNames:
        """Columns of the data set that the samples' weights come from; none where `collate` makes them."""
        data = self.data
        return () if data.collate or not data.sample_weight else data.collation.sources((data.sample_weight,))

    @property
    def columns(self) -> ColumnNames | None:
        """Columns that must be read; None for all of them, where `step` or `collate` gets all columns."""
        if self.training.step is not None or self.data.collate is not None:
            return None
        return tuple(dict.fromkeys(self.input_columns + self.target_columns + self.weight_columns))

    def ordering(self, *, evaluate: bool = False) -> dict[str, Any]:
        """Return what the order of samples depends on beside the data: arguments of `datasets.stream.schedule_of`."""
        always = {"batch_size": self.batch_size, "seed": self.training.seed}
        if evaluate:
            return {**always, "epochs": 1, "shuffle": False, "drop_last": False}
        return {
            **always,
            "epochs": self.epochs,
            "shuffle": self.data.shuffle,
            "drop_last": self.data.drop_last,
            "epoch_samples": self.data.epoch_samples,
            "window": self.data.shuffle_window,
        }

    def model_spec(
        self,
        total_steps: int,
        sample: Callable[[], Batch] | None = None,
        validation: Callable[[], Iterable[Feed]] | None = None,
    ) -> ModelSpec:
        """Return the part of the job that an engine needs.

        Args:
            total_steps: of the run.
            sample: () -> a batch of one row.
            validation: () -> the feeds of an evaluation.
        """
        return ModelSpec(
            model=self.model,
            optimizer=self.optimizer,
            total_steps=total_steps,
            loss=self.loss,
            step=self.training.step,
            inputs=self.arguments,
            keywords=self.keywords,
            targets=self.target_names,
            sample_weight=self.data.sample_weight or "",
            class_weight=dict(self.data.class_weight),
            collation=self.data.collation,
            compile=self.training.compile,
            metrics=dict(self.metrics),
            schedule=_scheduled(self),
            clip_norm=self.training.clip_norm,
            guard=self.recovery.on_nonfinite == "skip",
            seed=self.training.seed,
            inexact=self.training.inexact,
            batch_norm=self.training.batch_norm,
            local_state=_names(self.training.local_state),
            tensor_plan=dict(self.planning.tensor_plan),
            sample=sample,
            batch_size=self.batch_size,
            epochs=self.epochs,
            callbacks=self.tensorflow.callbacks,
            validation=validation,
            validation_epochs=self.checkpointing.evaluate_epochs,
        )

    def check_plan(self, plan: Plan) -> None:
        """Raise JobError where the plan cannot serve this job."""
        most = max(plan.mesh.data_ranks, self.scaling.max_workers or 0)
        if self.batch_size < most:
            raise JobError(
                [
                    f"batch_size={self.batch_size} is smaller than the {most} data-parallel workers: "
                    f"set batch_size to {most} or more, or workers={self.batch_size} or fewer"
                ]
            )


def _names(given: str | ColumnNames) -> ColumnNames:
    """Return one name or several as a tuple."""
    return (given,) if isinstance(given, str) else given


def _scheduled(job: Job) -> Callable[[int, int], float] | None:
    """Return the schedule; one with a keyword-only `batch_size` gets the job's, whenever that changes."""
    schedule: Callable[..., float] | None = job.training.schedule
    if schedule is None:
        return None
    try:
        wanted = inspect.signature(schedule).parameters.get("batch_size")
    except (TypeError, ValueError):  # of a function that is not Python's
        return schedule
    open_keyword = wanted is not None and wanted.kind is wanted.KEYWORD_ONLY and wanted.default is wanted.empty
    return functools.partial(schedule, batch_size=job.batch_size) if open_keyword else schedule


# --- Fields that contradict each other, and what to do ----------------------------------------------------------------


CRASH_LOOP_FAILURES = 3  # equal failures in a row, after which the batch is skipped
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _inconsistencies(job: Job) -> list[str]:
    """Describe all contradictions."""
    problems = []
    if not _RUN_NAME.fullmatch(job.name):
        problems.append(f"name={job.name!r}: use up to 100 letters, digits, '.', '-' and '_'")
    if job.tensorflow.run == "step":
        problems += _step_problems(job)
    else:
        problems += _fit_problems(job)
    if (job.loss is not None or job.tensorflow.run == "fit") and not job.inputs:
        problems.append("inputs= is missing: name the columns given to the model")
    if job.metrics and not job.inputs:
        problems.append("metrics= need inputs= and targets=")
    data = {"train": job.train} | ({} if job.evaluate is None else {"evaluate": job.evaluate})
    problems += filter(None, (strict_model.data_problem(name, value) for name, value in data.items()))
    problems += filter(None, (strict_model.function_problem(name, job.get(name)) for name in ("model", "schedule")))
    if job.recovery.on_crash_loop == "skip" and job.recovery.failures < CRASH_LOOP_FAILURES:
        problems.append(
            f'on_crash_loop="skip" recognizes a loop after {CRASH_LOOP_FAILURES} equal failures: set '
            f"failures={CRASH_LOOP_FAILURES} or more"
        )
    for tracker in job.trackers:
        problems += [
            f"trackers= has {type(tracker).__name__}, which has no {name}(): see tw.trackers.Tracker"
            for name in ("begin", "log", "end")
            if not callable(getattr(tracker, name, None))
        ]
    problems += _weight_problems(job) + _padding_problems(job) + _bounds_problems(job)
    problems += _async_problems(job) + _rank_problems(job)
    return problems


def _rank_problems(job: Job) -> list[str]:
    """Describe conflicts of what ranks keep, or see together, with their number or their micro-batches."""
    problems, training = [], job.training
    if training.local_state and job.scaling.elastic:
        problems.append(
            "local_state= is kept by rank and cannot be redistributed: leave min_workers= and max_workers= out"
        )
    if training.batch_norm == "sync" and (training.accumulation or 1) > 1 and "batch_norm" not in training.inexact:
        problems.append(
            f'batch_norm="sync" sees micro-batches, not the whole batch, with accumulation={training.accumulation}: '
            'leave accumulation= out, or accept the difference with inexact=("batch_norm",)'
        )
    return problems


def _weight_problems(job: Job) -> list[str]:
    """Describe conflicts of sample weights, and of the reduction of a Keras loss."""
    problems = []
    given = [name for name in ("sample_weight", "class_weight") if job.get(name)]
    if len(given) > 1:
        problems.append("sample_weight= and class_weight= exclude each other: multiply the weights in a column")
    if given and job.training.step is not None:
        problems.append(f"{given[0]}= cannot be used with step=: multiply the losses there, or return Terms")
    if job.data.class_weight and len(job.target_names) != 1:
        problems.append("class_weight= needs one column of targets=, the class: weigh several with sample_weight=")
    if has_sum_reduction(job.loss) and job.tensorflow.run == "step":
        problems.append(
            'loss= has reduction="sum", and steps take the mean over the global batch: leave reduction= out and '
            'multiply the loss by batch_size, or use run="fit", which sums'
        )
    return problems


def _bounds_problems(job: Job) -> list[str]:
    """Describe contradictions between min_workers, workers and max_workers."""
    named = [(name, job.get(name)) for name in ("min_workers", "workers", "max_workers")]
    given = [(name, value) for name, value in named if value is not None]
    return [
        f"{low}={least} is more than {high}={most}"
        for (low, least), (high, most) in itertools.pairwise(given)
        if least > most
    ]


def _async_problems(job: Job) -> list[str]:
    """Describe conflicts between the options of asynchronous training."""
    problems, planning, workers = [], job.planning, job.scaling.workers
    parsers: tuple[tuple[str, Callable[[str], object]], ...] = (
        (planning.consistency or "sync", Consistency.parse),
        (planning.wire or "full", GradientCompression.parse),
        (planning.outer or "average", OuterOptimizer.parse),
    )
    for text, parse in parsers:
        try:
            parse(text)
        except PlanError as error:
            problems.append(f"{error.what}: {error.remedy}")
    if problems:
        return problems
    consistency = Consistency.parse(planning.consistency or "sync")
    if workers and consistency.backup >= workers:
        problems.append(
            f"consistency={planning.consistency!r} waits for none of workers={workers}: use a smaller backup="
        )
    if planning.outer is not None and planning.local_steps == 1:
        problems.append(f"outer={planning.outer!r} applies to several local steps: set local_steps=, or leave it out")
    if planning.local_steps > 1 and consistency.scaled:
        problems.append(
            'consistency="async(scaled)" scales the learning rate of an update, and the differences that local_steps= '
            'pushes have none: use "async"'
        )
    if planning.local_steps > 1 and consistency.backup:
        problems.append(
            "sync(backup=...) drops parts of a step, and local_steps= are whole steps: leave one of them out"
        )
    return problems


def _step_problems(job: Job) -> list[str]:
    """Describe what is missing or misplaced in a job with trainwright's own steps."""
    problems = []
    if (job.loss is None) == (job.training.step is None):
        problems.append("give either loss= with inputs= and targets=, or step=")
    if job.optimizer is None:
        problems.append("optimizer= is missing")
    if not (job.loss or job.training.step or job.optimizer):
        problems.append(
            'where model() returns a compiled Keras model, run="fit" trains it with its own loss and optimizer'
        )
    if job.tensorflow.callbacks is not None:
        problems.append('callbacks= are for run="fit": set it, or leave them out')
    return problems


def _fit_problems(job: Job) -> list[str]:
    """Describe options that Keras' fit does not have, and what to use instead."""
    instead = {
        "step": "override train_step() of the model",
        "clip_norm": "set global_clipnorm of the optimizer",
        "accumulation": "set gradient_accumulation_steps of the optimizer",
        "schedule": "give the optimizer a LearningRateSchedule, or use a callback",
        "consistency": "Keras' fit steps synchronously: leave out run= or this option",
        "wire": "Keras' fit has no parameter servers: leave out run= or this option",
        "local_steps": "Keras' fit has no local steps: leave out run= or this option",
        "on_error": 'run="fit" counts every row of a batch: leave it out',
        "on_nonfinite": 'run="fit" applies an update before its loss is known: leave out run= or this option',
        "on_crash_loop": 'run="fit" cannot skip a batch: leave out run= or this option',
        "on_spike": 'run="fit" cannot skip a batch: leave out run= or this option',
    }
    return [
        f'{name}= cannot be used with run="fit": {remedy}'
        for name, remedy in instead.items()
        if job.get(name) != job.default(name)
    ]


def _padding_problems(job: Job) -> list[str]:
    """Describe conflicts between inputs, pad and collate."""
    problems = [f"inputs={name!r} is not a valid argument name" for name in job.keywords if not name.isidentifier()]
    if job.data.pad and job.data.collate:
        problems.append("collate= replaces pad=: give one of them")
    used = set(job.data.collation.sources((*job.arguments, *job.target_names)))
    for name in job.data.pad if job.training.step is None and used else ():
        if name not in used:
            problems.append(f"pad={name!r} is neither an input nor a target: {nearest(name, used)}")
        elif name + MASK_SUFFIX in job.data.pad:
            problems.append(f"pad={name + MASK_SUFFIX!r} is the name of the mask of {name!r}: rename the column")
    return problems
