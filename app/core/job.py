"""What the user wants. Strict: unknown fields are refused with the nearest valid name, all problems at once."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainwright.core import strict_model
from trainwright.core.cluster import Cluster
from trainwright.core.data import Batch, Feed
from trainwright.core.engine import MASK_SUFFIX, Collation, ModelSpec, Pad
from trainwright.core.errors import JobError, PlanError, nearest
from trainwright.core.loss_api import has_sum_reduction
from trainwright.core.plan import Plan, single_device_spec
from trainwright.core.strict_model import StrictModel
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer

ColumnNames = tuple[str, ...]
START_DEADLINE_S, NEW_NODE_DEADLINE_S = (
    300.0,
    1800.0,
)  # for workers to start on nodes that run, on nodes that may have to be started


class Job(StrictModel):
    """A training job. Going from one device to a cluster changes no field of it.

    Attributes:
        name: of the run; the same name resumes it. Letters, digits, dots, dashes and underscores.
        model: () -> torch.nn.Module or keras.Model; called in each worker. What this process is told for all its models
            (Keras' policy, floatx, epsilon and image format, torch's default type) is what workers are told.
        optimizer: (parameters) -> torch.optim.Optimizer or keras.optimizers.Optimizer. May be left out, like loss and
            metrics, where `run="fit"` and model() returns a compiled model.
        train: data set to train on, such as `tw.datasets.parquet("data/train")`.
        loss: (outputs, targets) -> one loss per sample, or `tw.Terms(values, weights)` for tokens and masks. Keras' own
            losses and functions, and a function whose parameters are called `(y_true, y_pred)`, are called in that
            order; so are metrics.
        inputs: column name or names given to the model, or the model's argument -> column:
            `{"input_ids": "tokens", "attention_mask": "tokens_mask"}` calls `model(input_ids=..., attention_mask=...)`.
        targets: column name or names given to loss and metrics; none where a Keras `train_step` takes inputs alone.
        sample_weight: column that each sample's loss is multiplied by, (rows,) or one for each step (rows, steps), as
            Keras' `fit` does it: the mean is over all samples, whatever their weights. Of `evaluate` too; metrics are
            not weighted. To divide by the sum of weights, return `Terms` or give Keras' loss
            `reduction="mean_with_sample_weight"`.
        class_weight: class -> factor of its samples' losses in training, 1 for others, as Keras' `fit` has it: the
            target is the number of the class, or one-hot. Instead of sample_weight.
        pad: column -> `tw.Pad(value=0, multiple=8)`, for columns whose rows differ in length: each micro-batch is
            padded, and `<column>_mask` (bool, True where the data is) may be named in inputs and targets.
        collate: (columns) -> columns of as many rows, instead of pad: takes the dict of all the data set's columns as
            arrays, gives a dict of arrays or tensors, which inputs and targets name.
        step: (model, batch) -> losses or Terms, instead of loss, inputs and targets.
        evaluate: data set to evaluate on after each `evaluate_epochs` epochs.
        metrics: name -> (outputs, targets) -> one value per sample, or Terms.
        batch_size: global, in samples: it means the same on 1 and on 1,000 workers.
        epochs: passes over the data, unless `epoch_samples` is given.
        epoch_samples: samples of a virtual epoch: checkpoints, evaluations, schedules and `epochs` count these instead
            of passes, and mean the same when the data grows. A batch may hold the end of one pass and the beginning of
            the next; only the last one of an epoch is short.
        seed: of everything random: each step seeds the global generators of torch, NumPy and Python, which a
            transform must leave alone (it is given one of its own), since it runs beside steps.
        storage: a folder, or `s3://`, `gs://`, `az://` with a bucket and a prefix.
        workers: number of worker actors; by default what the planner finds best.
        min_workers: fewest with which the run goes on, or starts, where there is no room for more; by default all of
            them, or with neither this nor `workers` nor `max_workers` any number after `place_deadline_s`. The global
            batch stays, results agree within float tolerance (not bitwise, nor with dropout). Where fewer cannot carry
            the plan out, they go on under another.
        max_workers: to which the run grows while there is room; by default `workers`.
        shrink_s: seconds that missing workers are waited for before the others go on without them.
        spares: processes that wait, warmed up, to take the rank of one that is lost; by default one where there are two
            workers or more. Each holds what a worker does before its first step: framework, model and one batch. Where
            every failure needs new processes (TensorFlow), one for each worker, with the framework alone (0.4 GB).
        preemption_s: seconds from a preemption notice (SIGTERM to a worker's process) to its end: by then
            a checkpoint is made, and the rank goes to a spare, a new process or, within `min_workers`, to nobody.
        replace_stragglers: how many times as long as the others' a worker's own part of a step (data, forward and
            backward, known on the CPU) takes when another process gets its rank, once an hour and node; by default
            stragglers are only named.
        devices: that each worker drives, where its strategy drives several (`tf_mirrored`): by default all accelerators
            of its node; without any, logical devices of its CPU.
        tf_config: of TensorFlow's workers: `own` has each choose a port, and writes their TF_CONFIG anew; `environment`
            takes each worker's address from the TF_CONFIG that it finds.
        tpu: that TensorFlow drives: `local`, a name that Google Cloud knows, or `grpc://host:port`; by default the one
            on the worker's host, else what its environment tells.
        strategy: name of a strategy to pin; by default what the planner finds best.
        plan: what to pin of the plan: degrees and choices such as `dp=4,tp=2,accumulation=2` (see `Plan.parse`; where a
            degree is given, those left out are 1), or a file that `trainwright plan --out` wrote.
        consistency: how far workers may be apart that step alone, against servers which hold the parameters: `sync`
            (one update a step, of all workers, as one device would), `sync(backup=1)` (without the slowest 1, whose
            samples come again), `ssp(3)` (no worker begins a step 4 ahead of what is applied), `async` (each worker's
            part of a step is an update of its own, at once) or `async(scaled)` (that, with the learning rate divided by
            how many others came in between). By default what the planner finds best; all but `sync` give another result
            than one device, and not the same twice. `docs/asynchronous.md` says when which is worth it.
        wire: how these push gradients: `full`, `fp16`, `bf16`, `int8`, or `topk(0.01)`: the largest hundredth; what
            that leaves over is added to the next push.
        local_steps: that each worker takes by itself, with an optimizer of its own, before it pushes what they came to
            (local SGD; DiLoCo with `outer="nesterov(0.7,0.9)"`): so many times less to send, and another result.
        outer: how servers apply that: `average`, the default (parameters become the workers' mean), or
            `nesterov(rate,momentum)`: Nesterov's method on the mean difference.
        probe: measure plans that are predicted to be about as good before the first step of a run that is long enough,
            and go on with the quickest; nothing of it is left in state, order or randomness.
        preflight: try model, loss, optimizer, schedule and metrics on five rows before any worker starts, in a process
            of its own on one CPU, so that what is wrong with them shows before the run begins. Callbacks are not
            called. Left out where a transform of the data is slow to open, where teachers run in the loss, inside Ray
            Train, and for a run that goes on; cut short for models of more than 1 GiB, or after 5 s of CPU time.
        accelerator: `auto`, `cpu`, `gpu` or `tpu`.
        precision: `fp32` leaves the model's own types, `bf16` computes under autocast, and torch's `fp16` with losses
            scaled as by `torch.amp.GradScaler`: a step that overflows changes nothing and halves the scale.
        compile: how steps run: `auto` as the framework does by itself (TensorFlow as a graph), `eager` operation by
            operation for a debugger, `xla` by TensorFlow's XLA (`jit_compile`), or `inductor` by `torch.compile`: the
            model, of one in parts each block, with other dropout; a CPU needs a C++ compiler.
        run: whose steps: `step`, trainwright's, or `fit`, Keras' own on one node: the model's `train_step`, its
            `compile`, metrics of any kind, callbacks and validation after each `evaluate_epochs` epochs, as `Model.fit`
            has them. Fed, copied and resumed as all runs are, in the middle of an epoch too; callbacks begin anew then.
        callbacks: () -> list of keras.callbacks.Callback, for `run="fit"`; one that sets `model.stop_training` ends it.
        accumulation: micro-batches of a worker in one step; by default as few as fit its memory.
        clip_norm: largest global gradient norm.
        schedule: (step, total_steps) -> factor on the optimizer's own learning rate; see `tw.schedules`. One that wants
            a keyword `batch_size` is given the job's.
        shuffle: whether the training order changes with each epoch.
        shuffle_window: rows that are permuted together, larger for a better shuffle and more memory; by default as many
            as fit a reader's memory. `trainwright data inspect` measures what that gives.
        drop_last: leave out the short last batch of an epoch.
        checkpoint_steps: a checkpoint after this many steps; by default at the end of each epoch. `auto` lets their
            measured cost and the failures seen decide how often (Young, 1974).
        keeper_s: seconds between copies of the state in the nodes' shared memory, which outlive all processes: what a
            failure of all workers costs at most, in at most a hundredth of the time. They take twice the state on one
            node (on two, where every failure needs new processes). 0 for none; none where replicas live on two nodes.
        keep: checkpoints kept.
        evaluate_epochs: epochs between evaluations.
        inexact: what may differ between one device and many: `("batch_norm",)`; `("batch_loss",)` for a loss that
            compares the samples of a batch and sees a part of it (`tw.gather` shows it all of them); `("replicas",)`
            for workers on unlike hardware, whose copies of the model may drift apart. By default these are compared
            before each checkpoint and evaluation and after each recovery, and a difference ends the run
            (`docs/replicas.md`).
        batch_norm: what a torch model's batch norms look at in training: `local`, each worker's own share (needs
            `inexact`), with running statistics that are averaged over the workers in each step, or `sync`, the whole
            batch, as on one device.
        local_state: names or patterns, such as `*.hidden`, of a torch model's buffers that each worker keeps as its
            own, saved and restored by rank. Where a worker is lost, all go back to the last copy of the state in memory
            (`keeper_s`) or storage; their number cannot change.
        tensor_plan: how tensor-parallel ranks divide modules, by name or pattern such as `blocks.*.up`: `column`
            (linear layers by their outputs), `row` (by the inputs that columns give them), `gathered` (by outputs,
            which are then gathered) or `vocabulary` (tables). By default it is found.
        failures: failures in a row without a completed step in between after which the run ends.
        failures_an_hour: failures within any hour after which the run ends, even where each was recovered from; by
            default any number.
        place_deadline_s: seconds to wait for the cluster to start the workers; by default 300, or 1,800 on one that
            starts nodes when they are asked for.
        on_error: `raise`, or `skip` samples that cannot be read or transformed: they get weight 0, and a line in the
            quarantine beside the run.
        on_nonfinite: what to do where the loss or its gradient is NaN or infinite: `raise`, or `skip` the step: it
            changes nothing, its bad samples get a line in the quarantine, and the next step follows.
        on_crash_loop: what to do where the same step ends the same worker again and again: `raise` after `failures`
            tries with the samples' names, or, after 3, `skip` its batch: the step changes nothing, its samples get a
            line in the quarantine. A run that is resumed tries the batch again, since the cause may be mended.
        max_loss_ratio: a loss more than so many times the median of the last 100, or of 20 at least, is a spike; by
            default none is looked for.
        on_spike: what to do then: `raise`, or `rollback`: go back to the newest state from before it, in memory or in
            storage, and pass its batch by; its samples get a line in the quarantine.
        skip_limit: samples that each worker may skip, and steps, before the run ends all the same.
        trackers: who are told of the run while it goes, such as `tw.trackers.MLflow(uri=...)`; see `docs/watching.md`.
        hang_deadline_s: seconds without a completed step, or for an evaluation, after which the workers that hang are
            replaced; by default 30 times the longest wait so far, between 2 and 15 minutes.
    """

    name: str
    model: Callable[[], Any]
    optimizer: Callable[[Any], Any] | None = None
    train: Any
    loss: Callable[[Any, Any], Any] | None = None
    inputs: str | ColumnNames | Mapping[str, str] = ()
    targets: str | ColumnNames = ()
    sample_weight: str | None = None
    class_weight: Mapping[int, float] = Field(default_factory=dict)
    pad: Mapping[str, Pad] = Field(default_factory=dict)
    collate: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    step: Callable[[Any, Any], Any] | None = None
    evaluate: Any = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = Field(default_factory=dict)
    batch_size: Annotated[int, Field(ge=1)]
    epochs: Annotated[int, Field(ge=1)] = 1
    epoch_samples: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    storage: str = "runs"
    workers: Annotated[int, Field(ge=1)] | None = None
    min_workers: Annotated[int, Field(ge=1)] | None = None
    max_workers: Annotated[int, Field(ge=1)] | None = None
    shrink_s: Annotated[float, Field(gt=0)] = 30.0
    preemption_s: Annotated[float, Field(gt=0)] = 25.0
    replace_stragglers: Annotated[float, Field(gt=1)] | None = None
    spares: Annotated[int, Field(ge=0)] | None = None
    devices: Annotated[int, Field(ge=1)] | None = None
    tf_config: Literal["own", "environment"] = "own"
    tpu: str | None = None
    strategy: str | None = None
    plan: str | None = None
    consistency: str | None = None
    wire: str = "full"
    local_steps: Annotated[int, Field(ge=1)] = 1
    outer: str | None = None
    probe: bool = True
    preflight: bool = True
    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: Literal["auto", "eager", "xla", "inductor"] = "auto"
    run: Literal["step", "fit"] = "step"
    callbacks: Callable[[], Sequence[Any]] | None = None
    accumulation: Annotated[int, Field(ge=1)] | None = None
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    schedule: Callable[[int, int], float] | None = None
    shuffle: bool = True
    shuffle_window: Annotated[int, Field(ge=1)] | None = None
    drop_last: bool = False
    checkpoint_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    keeper_s: Annotated[float, Field(ge=0)] = 10.0
    keep: Annotated[int, Field(ge=1)] = 3
    evaluate_epochs: Annotated[int, Field(ge=1)] = 1
    inexact: ColumnNames = ()
    batch_norm: Literal["local", "sync"] = "local"
    local_state: str | ColumnNames = ()
    tensor_plan: Mapping[str, Literal["column", "row", "gathered", "vocabulary"]] = Field(default_factory=dict)
    failures: Annotated[int, Field(ge=0)] = 3
    failures_an_hour: Annotated[int, Field(ge=0)] | None = None
    place_deadline_s: Annotated[float, Field(gt=0)] | None = None
    on_error: Literal["raise", "skip"] = "raise"
    on_nonfinite: Literal["raise", "skip"] = "raise"
    max_loss_ratio: Annotated[float, Field(gt=1)] | None = None
    on_spike: Literal["raise", "rollback"] = "raise"
    on_crash_loop: Literal["raise", "skip"] = "raise"
    skip_limit: Annotated[int, Field(ge=0)] = 100
    hang_deadline_s: Annotated[float, Field(gt=0)] | None = None
    trackers: tuple[Any, ...] = ()

    @field_validator("inexact", mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        """Take names in one text, as the command line gives them, for several."""
        return tuple(name.strip() for name in given.split(",") if name.strip()) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        problems = _inconsistencies(self)
        if problems:
            raise JobError(problems)
        return self

    def alone(self, **fields: Any) -> Job:
        """The same for one worker with one device, by whatever strategy: nothing of the layout is pinned.

        Micro-batches stay as `accumulation=` or `plan=` has them.
        """
        plan = single_device_spec(self.plan or "") or None
        one = {"workers": 1, "min_workers": None, "max_workers": None, "devices": 1, "strategy": None, "plan": plan}
        apart = {"consistency": None, "wire": "full", "local_steps": 1, "outer": None}
        return self.replace(**{**one, **apart, **fields})

    def patience_s(self, cluster: Cluster) -> float:
        """Seconds to wait for this cluster to start the workers."""
        return self.place_deadline_s or (NEW_NODE_DEADLINE_S if cluster.grows else START_DEADLINE_S)

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.min_workers is not None or self.max_workers is not None

    @property
    def collation(self) -> Collation:
        """What is done to a micro-batch before its columns become tensors."""
        return Collation(pad=self.pad, function=self.collate)

    @property
    def arguments(self) -> ColumnNames:
        """Names of the columns given to the model, in order, masks included."""
        return tuple(self.inputs.values()) if isinstance(self.inputs, Mapping) else _names(self.inputs)

    @property
    def keywords(self) -> ColumnNames:
        """The model's own name of each of `arguments`; empty where they are positional."""
        return tuple(self.inputs) if isinstance(self.inputs, Mapping) else ()

    @property
    def wanted_targets(self) -> ColumnNames:
        """Names of the columns given to loss and metrics, masks included."""
        return _names(self.targets)

    @property
    def input_columns(self) -> ColumnNames:
        """Columns of the data set that the inputs are made of; none where `collate` makes them of what it likes."""
        return () if self.collate else self.collation.sources(self.arguments)

    @property
    def target_columns(self) -> ColumnNames:
        """Columns of the data set that the targets are made of; none where `collate` makes them of what it likes."""
        return () if self.collate else self.collation.sources(self.wanted_targets)

    @property
    def weight_columns(self) -> ColumnNames:
        """Columns of the data set that the samples' weights are made of; none where `collate` makes them."""
        return () if self.collate or not self.sample_weight else self.collation.sources((self.sample_weight,))

    @property
    def columns(self) -> ColumnNames | None:
        """Columns that must be read; None for all, where `step` or `collate` takes what it likes."""
        if self.step is not None or self.collate is not None:
            return None
        return tuple(dict.fromkeys(self.input_columns + self.target_columns + self.weight_columns))

    def ordering(self, *, evaluate: bool = False) -> dict[str, Any]:
        """What the order of the samples follows from beside the data: arguments of `datasets.stream.schedule_of`."""
        if evaluate:
            return {"batch_size": self.batch_size, "seed": self.seed, "epochs": 1, "shuffle": False, "drop_last": False}
        names = ("batch_size", "seed", "epochs", "shuffle", "drop_last", "epoch_samples")
        return {**{name: getattr(self, name) for name in names}, "window": self.shuffle_window}

    def model_spec(
        self,
        total_steps: int,
        sample: Callable[[], Batch] | None = None,
        validation: Callable[[], Iterable[Feed]] | None = None,
    ) -> ModelSpec:
        """The part of the job that an engine needs.

        Args:
            total_steps: of the run.
            sample: gives a batch of one row.
            validation: gives the feeds of an evaluation.
        """
        return ModelSpec(
            model=self.model,
            optimizer=self.optimizer,
            total_steps=total_steps,
            loss=self.loss,
            step=self.step,
            inputs=self.arguments,
            keywords=self.keywords,
            targets=self.wanted_targets,
            sample_weight=self.sample_weight or "",
            class_weight=dict(self.class_weight),
            collation=self.collation,
            compile=self.compile,
            metrics=dict(self.metrics),
            schedule=_scheduled(self),
            clip_norm=self.clip_norm,
            guard=self.on_nonfinite == "skip",
            seed=self.seed,
            inexact=self.inexact,
            batch_norm=self.batch_norm,
            local_state=_names(self.local_state),
            tensor_plan=dict(self.tensor_plan),
            sample=sample,
            batch_size=self.batch_size,
            epochs=self.epochs,
            callbacks=self.callbacks,
            validation=validation,
            validation_epochs=self.evaluate_epochs,
        )

    def check_plan(self, plan: Plan) -> None:
        """Raise JobError where the plan cannot serve this job."""
        most = max(plan.mesh.data_ranks, self.max_workers or 0)
        if self.batch_size < most:
            raise JobError(
                [
                    f"batch_size={self.batch_size} is smaller than the {most} data-parallel workers: "
                    f"set batch_size to {most} or more, or workers={self.batch_size} or fewer"
                ]
            )


def _names(given: str | ColumnNames) -> ColumnNames:
    """One name or several as several."""
    return (given,) if isinstance(given, str) else given


def _scheduled(job: Job) -> Callable[[int, int], float] | None:
    """The schedule, given the batch size where it wants it, so that it follows the job's when that is changed."""
    schedule: Callable[..., float] | None = job.schedule
    if schedule is None:
        return None
    try:
        wanted = inspect.signature(schedule).parameters.get("batch_size")
    except (TypeError, ValueError):  # of a function that is not Python's
        return schedule
    open_keyword = wanted is not None and wanted.kind is wanted.KEYWORD_ONLY and wanted.default is wanted.empty
    return functools.partial(schedule, batch_size=job.batch_size) if open_keyword else schedule


# --- What fields of a job contradict each other, in words that say what to do -----------------------------------------


CRASH_LOOP_FAILURES = 3  # failures alike in a row, after which the batch is passed by
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _inconsistencies(job: Job) -> list[str]:
    """All of them."""
    problems = []
    if not _RUN_NAME.fullmatch(job.name):
        problems.append(f"name={job.name!r}: use up to 100 letters, digits, '.', '-' and '_'")
    if job.run == "step":
        problems += _step_problems(job)
    else:
        problems += _fit_problems(job)
    if (job.loss is not None or job.run == "fit") and not job.inputs:
        problems.append("inputs= is missing: name the columns given to the model")
    if job.metrics and not job.inputs:
        problems.append("metrics= need inputs= and targets=")
    data = {"train": job.train} | ({} if job.evaluate is None else {"evaluate": job.evaluate})
    problems += filter(None, (strict_model.data_problem(name, value) for name, value in data.items()))
    problems += filter(
        None, (strict_model.function_problem(name, getattr(job, name)) for name in ("model", "schedule"))
    )
    if job.on_crash_loop == "skip" and job.failures < CRASH_LOOP_FAILURES:
        problems.append(
            f'on_crash_loop="skip" tells a loop by {CRASH_LOOP_FAILURES} failures alike: set '
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
    """Where what ranks keep or see together does not go with how many they are, or with their micro-batches."""
    problems = []
    if job.local_state and job.elastic:
        problems.append(
            "local_state= is kept by rank and cannot be divided anew: leave min_workers= and max_workers= out"
        )
    if job.batch_norm == "sync" and (job.accumulation or 1) > 1 and "batch_norm" not in job.inexact:
        problems.append(
            f'batch_norm="sync" looks at micro-batches, not at the whole batch, with accumulation={job.accumulation}: '
            'leave accumulation= out, or accept the difference with inexact=("batch_norm",)'
        )
    return problems


def _weight_problems(job: Job) -> list[str]:
    """What is wrong with the weights of samples, and with the reduction of a loss of Keras'."""
    problems = []
    given = [name for name in ("sample_weight", "class_weight") if getattr(job, name)]
    if len(given) > 1:
        problems.append("sample_weight= and class_weight= exclude each other: multiply the weights in a column")
    if given and job.step is not None:
        problems.append(f"{given[0]}= has no place with step=: multiply the losses there, or return Terms")
    if job.class_weight and len(job.wanted_targets) != 1:
        problems.append("class_weight= needs one column of targets=, the class: weigh several with sample_weight=")
    if has_sum_reduction(job.loss) and job.run == "step":
        problems.append(
            'loss= has reduction="sum", and steps take the mean over the global batch: leave reduction= out and '
            'multiply the loss by batch_size, or use run="fit", which sums'
        )
    return problems


def _bounds_problems(job: Job) -> list[str]:
    """Where min_workers, workers and max_workers contradict each other."""
    named = [(name, getattr(job, name)) for name in ("min_workers", "workers", "max_workers")]
    given = [(name, value) for name, value in named if value is not None]
    return [
        f"{low}={least} is more than {high}={most}"
        for (low, least), (high, most) in itertools.pairwise(given)
        if least > most
    ]


def _async_problems(job: Job) -> list[str]:
    """What is wrong with the fields of workers that step alone."""
    problems = []
    for name, parse in (
        ("consistency", Consistency.parse),
        ("wire", GradientCompression.parse),
        ("outer", OuterOptimizer.parse),
    ):
        try:
            parse(getattr(job, name) or {"consistency": "sync", "wire": "full", "outer": "average"}[name])
        except PlanError as error:
            problems.append(f"{error.what}: {error.remedy}")
    if problems:
        return problems
    consistency = Consistency.parse(job.consistency or "sync")
    if job.workers and consistency.backup >= job.workers:
        problems.append(
            f"consistency={job.consistency!r} waits for none of workers={job.workers}: use a smaller backup="
        )
    if job.outer is not None and job.local_steps == 1:
        problems.append(
            f"outer={job.outer!r} is for what several local steps came to: set local_steps=, or leave it out"
        )
    if job.local_steps > 1 and consistency.scaled:
        problems.append(
            'consistency="async(scaled)" scales the rate of an update, and local_steps= have none: use "async"'
        )
    if job.local_steps > 1 and consistency.backup:
        problems.append(
            "sync(backup=...) drops shares of a step, and local_steps= are whole ones: leave one of them out"
        )
    return problems


def _step_problems(job: Job) -> list[str]:
    """What a job lacks whose steps are ours."""
    problems = []
    if (job.loss is None) == (job.step is None):
        problems.append("give either loss= with inputs= and targets=, or step=")
    if job.optimizer is None:
        problems.append("optimizer= is missing")
    if not (job.loss or job.step or job.optimizer):
        problems.append(
            'where model() returns a compiled Keras model, run="fit" trains it by what it was compiled with'
        )
    if job.callbacks is not None:
        problems.append('callbacks= are for run="fit": set it, or leave them out')
    return problems


def _fit_problems(job: Job) -> list[str]:
    """What Keras' fit cannot do, and whose way to do it is another."""
    instead = {
        "step": "override train_step() of the model",
        "clip_norm": "set global_clipnorm of the optimizer",
        "accumulation": "set gradient_accumulation_steps of the optimizer",
        "schedule": "give the optimizer a LearningRateSchedule, or use a callback",
        "consistency": "Keras' fit has all workers step together: leave run or it out",
        "wire": "Keras' fit pushes nothing to servers: leave run or it out",
        "local_steps": "Keras' fit takes steps of its own: leave run or it out",
        "on_error": 'run="fit" counts every row of a batch: leave it out',
        "on_nonfinite": 'run="fit" applies an update before its loss is known: leave run or it out',
        "on_crash_loop": 'run="fit" cannot pass a batch by: leave run or it out',
        "on_spike": 'run="fit" cannot pass a batch by: leave run or it out',
    }
    defaults = {name: type(job).model_fields[name].default for name in instead}
    return [
        f'{name}= has no place in run="fit": {remedy}'
        for name, remedy in instead.items()
        if getattr(job, name) != defaults[name]
    ]


def _padding_problems(job: Job) -> list[str]:
    """What is wrong with inputs, pad and collate together."""
    problems = [f"inputs={name!r} is no name of an argument" for name in job.keywords if not name.isidentifier()]
    if job.pad and job.collate:
        problems.append("collate= takes the place of pad=: give one of them")
    used = set(job.collation.sources((*job.arguments, *job.wanted_targets)))
    for name in job.pad if job.step is None and used else ():
        if name not in used:
            problems.append(f"pad={name!r} is neither an input nor a target: {nearest(name, used)}")
        elif name + MASK_SUFFIX in job.pad:
            problems.append(f"pad={name + MASK_SUFFIX!r} is the name of the mask of {name!r}: rename the column")
    return problems
