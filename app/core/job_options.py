"""Option groups of a job: data, training, planning, scaling, recovery, checkpointing and TensorFlow.

A job has one field for each group. The name of an option belongs to exactly one group, so that the option alone is a
short form: `tw.Job(..., spares=2)` is `tw.Job(..., recovery=tw.Recovery(spares=2))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from trainwright.core.engine import Collation, Pad
from trainwright.core.strict_model import StrictModel

ColumnNames = tuple[str, ...]


class JobModel(StrictModel):
    """Base of a job and of its groups, whose errors are errors of the job."""

    error_name: ClassVar[str] = "job"


class OptionGroup(JobModel):
    """Base of the groups."""

    @classmethod
    def advice_on(cls, name: str) -> str:
        """Name the group in which a misplaced option belongs, or the nearest field."""
        return f"it belongs to {GROUP_OF[name]}=" if name in GROUP_OF else super().advice_on(name)


class Data(OptionGroup):
    """How samples are read, ordered, weighted and batched.

    Attributes:
        sample_weight: column that each sample's loss is multiplied by, of shape (rows,) or (rows, steps), as in Keras'
            `fit`: the mean is over all samples, whatever their weights. It applies to `evaluate` too; metrics are not
            weighted. To divide by the sum of weights, return `Terms` or give Keras' loss
            `reduction="mean_with_sample_weight"`.
        class_weight: class -> factor of its samples' losses in training, 1 for other classes, as in Keras' `fit`. The
            target is the number of the class, or one-hot. It excludes sample_weight.
        pad: column -> `tw.Pad(value=0, multiple=8)`, for columns whose rows differ in length: each micro-batch is
            padded, and `<column>_mask` (bool, True where there is data) can be named in inputs and targets.
        collate: (columns) -> columns with the same number of rows, instead of pad: takes a dict of all columns of the
            data set as arrays and returns a dict of arrays or tensors, which inputs and targets name.
        epoch_samples: samples of a virtual epoch: checkpoints, evaluations, schedules and `epochs` count these instead
            of passes over the data, and mean the same when the data grows. A batch may hold the end of one pass and
            the beginning of the next; only the last batch of an epoch is short.
        shuffle: whether the training order changes with each epoch.
        shuffle_window: rows that are permuted together: a larger window shuffles better and takes more memory; by
            default as many as fit a reader's memory. `trainwright data inspect` measures the quality.
        drop_last: leave out the short last batch of an epoch.
        on_error: `raise`, or `skip` samples that cannot be read or transformed: they get weight 0 and a line in the
            run's quarantine. See `skip_limit`.
    """

    sample_weight: str | None = None
    class_weight: Mapping[int, float] = Field(default_factory=dict)
    pad: Mapping[str, Pad] = Field(default_factory=dict)
    collate: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    epoch_samples: Annotated[int, Field(ge=1)] | None = None
    shuffle: bool = True
    shuffle_window: Annotated[int, Field(ge=1)] | None = None
    drop_last: bool = False
    on_error: Literal["raise", "skip"] = "raise"

    @property
    def collation(self) -> Collation:
        """How a micro-batch is padded or collated before its columns become tensors."""
        return Collation(pad=self.pad, function=self.collate)


class Training(OptionGroup):
    """How a step is computed.

    Attributes:
        step: (model, batch) -> losses or Terms, instead of loss, inputs and targets.
        seed: of all randomness. Each step seeds the global generators of torch, NumPy and Python. A transform runs
            beside steps: it must use the generator that it is given and not the global ones.
        schedule: (step, total_steps) -> factor on the optimizer's own learning rate; see `tw.schedules`. A function
            with a keyword-only argument `batch_size` gets the job's.
        clip_norm: largest global gradient norm.
        accumulation: micro-batches of a worker in one step; by default as few as fit its memory.
        precision: `fp32` keeps the model's own types, `bf16` computes under autocast, and `fp16` (torch) scales losses
            as `torch.amp.GradScaler` does: a step that overflows changes nothing and halves the scale.
        compile: how steps run: `auto` (the framework's default; TensorFlow as a graph), `eager` operation by operation
            for a debugger, `xla` by TensorFlow's XLA (`jit_compile`), or `inductor` by `torch.compile` of the model, or
            of each block of a model that is divided; dropout differs. A CPU needs a C++ compiler.
        batch_norm: what batch norms of a torch model see in training: `local`, each worker's own share (needs
            `inexact`), with running statistics averaged over the workers in each step, or `sync`, the whole batch, as
            on one device.
        inexact: accepted differences between one device and many: `("batch_norm",)`; `("batch_loss",)` for a loss that
            compares the samples of a batch and sees only a part of it (`tw.gather` returns all of them);
            `("replicas",)` for workers on different hardware, whose copies of the model may drift apart. By default
            copies are compared before each checkpoint and evaluation and after each recovery, and a difference ends
            the run (`docs/replicas.md`).
        local_state: names or patterns, such as `*.hidden`, of buffers of a torch model that each worker keeps as its
            own, saved and restored by rank. When a worker is lost, all workers return to the last copy of the state in
            memory (`keeper_s`) or storage. The number of workers cannot change.
    """

    step: Callable[[Any, Any], Any] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    schedule: Callable[[int, int], float] | None = None
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    accumulation: Annotated[int, Field(ge=1)] | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: Literal["auto", "eager", "xla", "inductor"] = "auto"
    batch_norm: Literal["local", "sync"] = "local"
    inexact: ColumnNames = ()
    local_state: str | ColumnNames = ()

    @field_validator("inexact", mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        """Split a comma-separated text, the form of the command line, into names."""
        return tuple(name.strip() for name in given.split(",") if name.strip()) if isinstance(given, str) else given


class Planning(OptionGroup):
    """What the planner must keep to, and how workers that step asynchronously exchange updates.

    Attributes:
        strategy: name of a strategy to pin; by default the planner chooses.
        plan: parts of the plan to pin: degrees and choices such as `dp=4,tp=2,accumulation=2` (see `Plan.parse`; with
            one degree given, degrees left out are 1), or a file that `trainwright plan --out` wrote.
        tensor_plan: how tensor-parallel ranks divide modules, by name or pattern such as `blocks.*.up`: `column`
            (linear layers by outputs), `row` (by inputs that come from column layers), `gathered` (by outputs, which
            are then gathered) or `vocabulary` (embedding tables). By default it is derived from the model.
        probe: in runs that are long enough, measure plans with about equal predictions before the first step, and use
            the fastest. Measuring changes neither state, order nor randomness.
        preflight: try model, loss, optimizer, schedule and metrics on five rows before any worker starts, in a process
            of its own on one CPU, so that errors in them show before the run starts. Callbacks are not called. The
            trial is left out where a transform of the data is slow to open, where teachers run in the loss, inside Ray
            Train, and for a resumed run; it is cut short for models of more than 1 GiB, or after 5 s of CPU time.
        consistency: how far apart workers may be that step asynchronously against parameter servers: `sync` (one update
            a step from all workers, as on one device), `sync(backup=1)` (without the slowest worker, whose samples are
            used later), `ssp(3)` (no worker starts a step 4 ahead of the applied ones), `async` (each worker's part of
            a step is applied as an update of its own, at once) or `async(scaled)` (the same, with the learning rate
            divided by the number of updates applied in between). By default the planner chooses. All but `sync` give
            another result than one device, and not the same twice; see `docs/asynchronous.md`.
        wire: compression of pushed gradients: `full`, `fp16`, `bf16`, `int8`, or `topk(0.01)`: the largest hundredth,
            the rest is added to the next push.
        local_steps: steps that each worker takes with its own optimizer before it pushes the difference (local SGD;
            DiLoCo with `outer="nesterov(0.7,0.9)"`): divides the traffic by this number, and gives another result.
        outer: how servers apply that difference: `average`, the default (parameters become the workers' mean), or
            `nesterov(rate,momentum)`: Nesterov's method on the mean difference.
    """

    strategy: str | None = None
    plan: str | None = None
    tensor_plan: Mapping[str, Literal["column", "row", "gathered", "vocabulary"]] = Field(default_factory=dict)
    probe: bool = True
    preflight: bool = True
    consistency: str | None = None
    wire: str = "full"
    local_steps: Annotated[int, Field(ge=1)] = 1
    outer: str | None = None


class Scaling(OptionGroup):
    """How many workers, on which devices, and how that may change.

    Attributes:
        workers: number of worker actors; by default the planner chooses.
        min_workers: fewest workers with which the run starts or continues when there is no room for more; by default
            all of them, or, with none of `min_workers`, `workers` and `max_workers` given, any number after
            `place_deadline_s`. The global batch stays the same; results agree within float tolerance (not bitwise, nor
            with dropout). Where fewer workers cannot carry out the plan, they continue under another plan.
        max_workers: the run grows up to this number when there is room; by default `workers`.
        shrink_s: seconds to wait for missing workers before the others continue without them.
        accelerator: `auto`, `cpu`, `gpu` or `tpu`.
        place_deadline_s: seconds to wait for the cluster to start the workers; by default 300, or 1,800 on a cluster
            that starts nodes on demand.
    """

    workers: Annotated[int, Field(ge=1)] | None = None
    min_workers: Annotated[int, Field(ge=1)] | None = None
    max_workers: Annotated[int, Field(ge=1)] | None = None
    shrink_s: Annotated[float, Field(gt=0)] = 30.0
    accelerator: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    place_deadline_s: Annotated[float, Field(gt=0)] | None = None

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.min_workers is not None or self.max_workers is not None


class Recovery(OptionGroup):
    """How a run survives failed, hanging, slow and preempted workers, and bad steps.

    Attributes:
        spares: warm standby processes that wait to take the rank of a lost worker; by default one where there are two
            or more workers. Each holds what a worker has before its first step: framework, model and one batch. Where
            every failure needs new processes (TensorFlow), one for each worker, with the framework alone (0.4 GB).
        preemption_s: seconds from a preemption notice (SIGTERM to a worker's process) to the end of the process. By
            then a checkpoint is written, and the rank goes to a spare, to a new process or, within `min_workers`, to
            no process.
        replace_stragglers: replace a worker whose own part of a step (data, forward and backward, measured on the CPU)
            takes this many times as long as the others', at most once an hour and node; by default stragglers are only
            reported.
        failures: failures in a row, without a completed step in between, after which the run ends.
        failures_an_hour: failures within any hour after which the run ends, even where each was recovered from; by
            default any number.
        hang_deadline_s: seconds without a completed step, or for an evaluation, after which hanging workers are
            replaced; by default 30 times the longest wait so far, between 2 and 15 minutes.
        on_nonfinite: when the loss or its gradient is NaN or infinite: `raise`, or `skip` the step: it changes nothing,
            and its bad samples get a line in the quarantine.
        on_crash_loop: when the same step ends the same worker again and again: `raise` after `failures` attempts, with
            the samples' names, or, after 3, `skip` its batch: the step changes nothing, and its samples get a line in
            the quarantine. A resumed run tries the batch again, since the cause may be fixed.
        max_loss_ratio: a loss above this many times the median of the last 100 losses (at least 20) is a spike; by
            default spikes are not looked for.
        on_spike: after a spike: `raise`, or `rollback`: return to the newest state from before it, in memory or in
            storage, and skip its batch; its samples get a line in the quarantine.
        skip_limit: samples, and steps, that each worker may skip before the run ends in spite of `skip`.
    """

    spares: Annotated[int, Field(ge=0)] | None = None
    preemption_s: Annotated[float, Field(gt=0)] = 25.0
    replace_stragglers: Annotated[float, Field(gt=1)] | None = None
    failures: Annotated[int, Field(ge=0)] = 3
    failures_an_hour: Annotated[int, Field(ge=0)] | None = None
    hang_deadline_s: Annotated[float, Field(gt=0)] | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"
    on_crash_loop: Literal["raise", "skip"] = "raise"
    max_loss_ratio: Annotated[float, Field(gt=1)] | None = None
    on_spike: Literal["raise", "rollback"] = "raise"
    skip_limit: Annotated[int, Field(ge=0)] = 100


class Checkpointing(OptionGroup):
    """When state is copied and evaluated.

    Attributes:
        checkpoint_steps: steps between checkpoints; by default one at the end of each epoch. `auto` chooses by their
            measured cost and the failures seen (Young, 1974).
        keeper_s: seconds between copies of the state in the nodes' shared memory, which outlive all processes: at most
            this much work is lost when all workers fail, for at most a hundredth of the time. They take twice the state
            on one node (on two, where every failure needs new processes). 0 for none; there are none where replicas
            live on two nodes.
        keep: checkpoints kept.
        evaluate_epochs: epochs between evaluations.
    """

    checkpoint_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    keeper_s: Annotated[float, Field(ge=0)] = 10.0
    keep: Annotated[int, Field(ge=1)] = 3
    evaluate_epochs: Annotated[int, Field(ge=1)] = 1


class TensorFlow(OptionGroup):
    """Options of Keras models on TensorFlow.

    Attributes:
        run: who computes steps: `step`, trainwright, or `fit`, Keras' own loop on one node: the model's `train_step`,
            its `compile`, metrics of any kind, callbacks, and validation after each `evaluate_epochs` epochs, as in
            `Model.fit`. Data, copies and resuming work as in all runs, in the middle of an epoch too; callbacks start
            again then.
        callbacks: () -> list of keras.callbacks.Callback, for `run="fit"`; a callback that sets `model.stop_training`
            ends the run.
        tf_config: `own`: each worker chooses a port and sets its TF_CONFIG; `environment`: each worker takes its
            address from the TF_CONFIG that it finds.
        tpu: the TPU to use: `local`, a name known to Google Cloud, or `grpc://host:port`; by default the TPU of the
            worker's host, else the one named in its environment.
        devices: number of devices that each worker drives, for strategies that drive several (`tf_mirrored`); by
            default all accelerators of its node, or logical devices of its CPU.
    """

    run: Literal["step", "fit"] = "step"
    callbacks: Callable[[], Sequence[Any]] | None = None
    tf_config: Literal["own", "environment"] = "own"
    tpu: str | None = None
    devices: Annotated[int, Field(ge=1)] | None = None


GROUPS: Mapping[str, type[OptionGroup]] = {
    "data": Data,
    "training": Training,
    "planning": Planning,
    "scaling": Scaling,
    "recovery": Recovery,
    "checkpointing": Checkpointing,
    "tensorflow": TensorFlow,
}

GROUP_OF: Mapping[str, str] = {name: group for group, kind in GROUPS.items() for name in kind.model_fields}
"""Group of each option."""

FIELD_ORDER: ColumnNames = (
    "name", "model", "optimizer", "train", "loss", "inputs", "targets", "sample_weight", "class_weight", "pad",
    "collate", "step", "evaluate", "metrics", "batch_size", "epochs", "epoch_samples", "seed", "storage", "workers",
    "min_workers", "max_workers", "shrink_s", "preemption_s", "replace_stragglers", "spares", "devices", "tf_config",
    "tpu", "strategy", "plan", "consistency", "wire", "local_steps", "outer", "probe", "preflight", "accelerator",
    "precision", "compile", "run", "callbacks", "accumulation", "clip_norm", "schedule", "shuffle", "shuffle_window",
    "drop_last", "checkpoint_steps", "keeper_s", "keep", "evaluate_epochs", "inexact", "batch_norm", "local_state",
    "tensor_plan", "failures", "failures_an_hour", "place_deadline_s", "on_error", "on_nonfinite", "max_loss_ratio",
    "on_spike", "on_crash_loop", "skip_limit", "hang_deadline_s", "trackers",
)  # fmt: skip
"""Fields of a job and its groups by their own names, in the order of stored descriptions. New ones go to the end."""


def collect_options(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Move options given by themselves into their groups.

    Returns:
        The fields of a job, and the problems found.
    """
    collected = {name: value for name, value in fields.items() if name not in GROUP_OF}
    twice = []
    for name in [name for name in fields if name in GROUP_OF]:
        group = GROUP_OF[name]
        if not isinstance(collected.get(group), OptionGroup | Mapping | None):
            continue  # a wrong type, which is reported with the group
        held = set_options(collected.get(group))
        if name in held:
            twice.append(f"{name}= is given twice: by itself and in {group}=")
        collected[group] = {**held, name: fields[name]}
    return collected, twice


def set_options(group: OptionGroup | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of a group that are set explicitly."""
    return group.explicit() if isinstance(group, OptionGroup) else dict(group or {})
