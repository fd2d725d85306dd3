"""The job: a run as the user describes it, its groups of options, and checks of its fields against each other.

A job has one field for each group. The name of an option belongs to exactly one group, so that the option alone is a
short form: `tw.Job(..., spares=2)` is `tw.Job(..., recovery=tw.Recovery(spares=2))`. Unknown fields are refused with
the nearest valid name, and all problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from trainwright.core.cluster import Cluster
from trainwright.core.data import Batch, Feed
from trainwright.core.engine import (
    Collation,
    ModelSpec,
    Pad,
    schedule_by_epoch,
    takes_optimizer,
    with_batch_size,
)
from trainwright.core.errors import JobError, nearest
from trainwright.core.initial_weights import InitialWeights, WeightSource
from trainwright.core.job_consistency import inconsistencies
from trainwright.core.metric_goals import EarlyStop, check_goals, goals_of
from trainwright.core.peer_options import advice_of
from trainwright.core.plan import SUMMED_BY, Plan, single_device_spec
from trainwright.core.strict_model import Duration, StepRange, StrictModel, as_dataset
from trainwright.core.weight_average import WeightAverage

ColumnNames = tuple[str, ...]


class _JobModel(StrictModel):
    """Base of a job and of its groups, whose errors are errors of the job."""

    error_name: ClassVar[str] = "job"


class _OptionGroup(_JobModel):
    """Base of the groups."""

    @classmethod
    def advice_on(cls, name: str) -> str:
        """Name the group in which a misplaced option belongs, or the nearest field."""
        return f"it belongs to {GROUP_OF[name]}=" if name in GROUP_OF else super().advice_on(name)


class Data(_OptionGroup):
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
            data set as arrays and returns a dict of arrays or tensors, which inputs and targets name. It may change the
            objects of a column in place, such as arrays of different lengths: they are copies.
        epoch_samples: samples of a virtual epoch: checkpoints, evaluations, schedules and `epochs` count these instead
            of passes over the data. A batch may hold the end of one pass and the beginning of the next.
        shuffle: whether rows are shuffled for each epoch of training; otherwise they come as they are stored.
        shuffle_window: rows that are permuted together; by default as many as fit a reader's memory. `trainwright data
            inspect` measures the quality.
        drop_last: leave out the short last batch of an epoch.
        delivery: `direct` (workers read and transform their samples), `ray_data` (other processes of the cluster do) or
            `auto`: Ray Data for Ray Datasets, and where a transform asks for CPUs or GPUs.
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
    delivery: Literal["auto", "direct", "ray_data"] = "auto"

    @property
    def collation(self) -> Collation:
        """How a micro-batch is padded or collated before its columns become tensors."""
        return Collation(pad=self.pad, function=self.collate)


class Training(_OptionGroup):
    """How a step is computed.

    Attributes:
        step: (model, batch) -> what `loss` may return, or an output of Hugging Face's models with `.loss`; instead of
            loss, inputs and targets. The batch is a dict of all columns as tensors, in torch without those of text and
            bytes. A dict with that as "loss" may be returned too; its other values are logged as by `tw.log`.
        weight: how many items a loss of one number is the mean of (torch): a column, whose sum that is, or a function
            of the micro-batch: `lambda batch: (batch["labels"] != -100).sum()`. It gets the columns of targets, or all
            columns with step. By default the loss must be a mean over rows; see `docs/strategies.md`.
        seed: of all randomness. Each step seeds the global generators of torch, NumPy and Python. A transform runs
            beside steps: it must use the generator that it is given and not the global ones.
        schedule: (step, total_steps) -> factor on the optimizer's own learning rate; see `tw.schedules`. A function
            with a keyword-only argument `batch_size` gets the job's. A tuple of functions is one for each parameter
            group. Or, for torch models, (optimizer) -> any scheduler of `torch.optim.lr_scheduler`:
            `lambda optimizer: StepLR(optimizer, 30)` or `partial(OneCycleLR, max_lr=0.1)`, where `total_steps` and
            `num_training_steps` are filled in if they are not set. Its state is part of each checkpoint.
        schedule_by: `step`, or `epoch`: then functions get (epoch, epochs), and schedulers count on after each epoch.
        schedule_metric: `loss` or one of `metrics` that a scheduler such as ReduceLROnPlateau gets after evaluations.
        initial_weights: folder or file of safetensors, local or `s3://` and others, that the weights of a torch model
            are loaded from before the first step; or a `tw.InitialWeights`. See `docs/training.md`.
        weight_average: `tw.WeightAverage(decay=0.999)`: an average of the parameters (EMA, or SWA) of a torch model,
            which is evaluated, loaded and exported in their place. An EMA has a warm-up.
        clip_norm: largest global gradient norm.
        accumulation: micro-batches of a worker in one step; by default as few as fit its memory.
        precision: `fp32` keeps the model's own types, `bf16` computes under autocast, and `fp16` (torch) scales losses
            as `torch.amp.GradScaler` does: a step that overflows changes nothing and halves the scale.
        compile: how steps run: `auto` (the framework's default; TensorFlow as a graph), `eager` operation by operation
            for a debugger, `xla` by TensorFlow's XLA (`jit_compile`), or `inductor` by `torch.compile` of the model, or
            of each block of a model that is divided; dropout differs. A CPU needs a C++ compiler.
        batch_norm: what batch norms of a torch model see in training: `sync`, the whole batch, or `local`, a worker's
            share (needs `inexact`), with running statistics averaged over the workers in each step.
        inexact: accepted differences between one device and many: `("batch_norm",)`; `("batch_loss",)` for a loss that
            compares the samples of a batch and sees only a part of it (`tw.gather` returns all of them);
            `("replicas",)` for workers on different hardware, whose copies of the model may drift apart. By default
            copies are compared before each checkpoint and evaluation and after each recovery, and a difference ends
            the run (`docs/replicas.md`).
        local_state: names or patterns, such as `*.hidden`, of buffers of a torch model that each worker keeps as its
            own, saved and restored by rank. When a worker is lost, all workers return to the last copy of the state in
            memory (`keeper_s`) or storage. The number of workers cannot change.
        profile: steps that are traced by the framework's profiler, such as `20:25` for steps 20 to 24: one file of each
            worker in `profile/` of the run. The results stay the same, bit by bit. See `docs/watching.md`.
    """

    step: Callable[[Any, Any], Any] | None = None
    weight: str | Callable[[Any], Any] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    schedule: Callable[..., Any] | tuple[Callable[[int, int], float], ...] | None = None
    schedule_by: Literal["step", "epoch"] = "step"
    schedule_metric: str | None = None
    initial_weights: str | InitialWeights | None = None
    weight_average: WeightAverage | None = None
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    accumulation: Annotated[int, Field(ge=1)] | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: Literal["auto", "eager", "xla", "inductor"] = "auto"
    batch_norm: Literal["local", "sync"] = "local"
    inexact: ColumnNames = ()
    local_state: str | ColumnNames = ()
    profile: StepRange | None = None

    @field_validator("inexact", mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        """Split a comma-separated text, the form of the command line, into names."""
        return tuple(name.strip() for name in given.split(",") if name.strip()) if isinstance(given, str) else given

    @property
    def schedules(self) -> tuple[Any, ...]:
        """The functions of `schedule=`: one for each parameter group, or one for all."""
        return self.schedule if isinstance(self.schedule, tuple) else () if self.schedule is None else (self.schedule,)


class Planning(_OptionGroup):
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
        preflight: try model, loss, optimizer, schedule and metrics on a few rows before any worker starts, in a process
            of its own on one CPU, so that errors show before the run starts. For workers on this machine's CPUs, steps
            are then timed for 0.4 s. Callbacks are not called. Left out where a transform of the data is slow to open,
            where teachers run in the loss, inside Ray Train, and for a resumed run; cut short after 5 s of CPU time.
        consistency: how far apart workers may be that step asynchronously against parameter servers: `sync` (one update
            a step from all workers, as on one device), `sync(backup=1)` (without the slowest worker, whose samples are
            used later), `ssp(3)` (no worker starts a step 4 ahead of the applied ones), `async` (each worker's part of
            a step is applied as an update of its own, at once), `async(scaled)` (the same, with the learning rate
            divided by the number of updates applied in between) or `async(pushes=4)` (an update of the mean of the next
            4 such parts, whoever computed them). By default the planner chooses. All but `sync` give
            another result than one device, and not the same twice; see `docs/asynchronous.md`.
        wire: compression of pushed gradients: `full`, `fp16`, `bf16`, `int8`, or `topk(0.01)`: the largest hundredth,
            the rest is added to the next push. `bf16` with `zero=` or `fsdp=` in `plan`: of reduced gradients.
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


class Scaling(_OptionGroup):
    """How many workers, on which devices, and how that may change.

    Attributes:
        workers: number of worker actors; by default the planner chooses.
        min_workers: fewest workers with which the run starts or continues when there is no room for more; by default
            all of them, or, with none of `min_workers`, `workers` and `max_workers` given, any number after
            `place_deadline_s`. The global batch stays the same; results agree within float tolerance (not bitwise, nor
            with dropout). Where fewer workers cannot carry out the plan, they continue under another plan.
        max_workers: the run grows up to this number when there is room; by default `workers`.
        shrink_s: seconds to wait for missing workers before the others continue without them; see also `on_loss`.
        accelerator: `auto`, `cpu`, `gpu`, `tpu`, or a model such as `A100-80GB`: its nodes alone are used.
        place_deadline_s: seconds to wait for the cluster to start the workers; by default 300, or 1,800 on a cluster
            that starts nodes on demand.
        threads_per_worker: CPU threads that each worker trains with; by default the CPUs of its node divided by the
            workers there. Give it where runs with different numbers of workers are compared.
    """

    workers: Annotated[int, Field(ge=1)] | None = None
    min_workers: Annotated[int, Field(ge=1)] | None = None
    max_workers: Annotated[int, Field(ge=1)] | None = None
    shrink_s: Annotated[float, Field(gt=0)] = 30.0
    accelerator: str = "auto"
    place_deadline_s: Annotated[float, Field(gt=0)] | None = None
    threads_per_worker: Annotated[int, Field(ge=1)] | None = None

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.min_workers is not None or self.max_workers is not None


class Recovery(_OptionGroup):
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
        on_oom: when a device runs out of memory: `raise`, or `replan`: continue under the fastest plan with as many
            workers that is predicted to need at least a tenth less memory. For torch with one device in each worker.
        on_loss: when a worker is lost and no spare takes its rank: `wait` for a new process, or `shrink`: the others
            continue at once with the same global batch, and the new process joins when it is up. Where they could not
            all continue with the state that they hold, they wait for `shrink_s`. Needs `min_workers`; for torch.
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
    on_oom: Literal["raise", "replan"] = "raise"
    on_loss: Literal["wait", "shrink"] = "wait"


class Checkpointing(_OptionGroup):
    """When state is copied and evaluated, which checkpoint is the best, and when a run ends early.

    `best` and `early_stop` name an evaluated metric, `loss` or one of `metrics`. A larger value is better; of `loss`,
    and with a leading minus (`-error`), a smaller one. NaN is never better. See `docs/best.md`.

    Attributes:
        checkpoint_steps: steps between checkpoints; by default one at the end of each epoch. `auto` chooses by their
            measured cost and the failures seen (Young, 1974).
        keeper_s: seconds between copies of the state in the nodes' shared memory, which outlive all processes: at most
            this much work is lost when all workers fail, for at most a hundredth of the time. They take twice the state
            on one node (on two, where every failure needs new processes). 0 for none; there are none where replicas
            live on two nodes.
        keep: checkpoints kept.
        save_frozen: whether checkpoints and copies hold the parameters of a torch model that are not trained. With
            `False`, for adapters such as LoRA on a large model, they hold a digest of these, and `model()` must make
            the same ones in each process, such as by loading the same files.
        evaluate_epochs: epochs between evaluations.
        best: metric whose best evaluation has a checkpoint, which is kept beside the `keep` newest ones. Use it with
            `step="best"`, as in `tw.load_model(job, step="best")`. Steps wait until it is stored.
        early_stop: `tw.EarlyStop("loss", patience=3, min_delta=0.0)` ends the run, with a checkpoint and as `done`,
            after so many evaluations in a row without an improvement of more than `min_delta`.
        max_time: seconds, or a text such as `2h30m`, after which the run ends at the next step, with a checkpoint and
            as `done`: the time of all drivers of the run together, start, evaluations and recoveries included. With a
            larger limit, the same command continues it.
    """

    checkpoint_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    keeper_s: Annotated[float, Field(ge=0)] = 10.0
    keep: Annotated[int, Field(ge=1)] = 3
    save_frozen: bool = True
    evaluate_epochs: Annotated[int, Field(ge=1)] = 1
    best: str | None = None
    early_stop: EarlyStop | None = None
    max_time: Duration | None = None

    @property
    def goals(self) -> dict[str, str]:
        """The goals for evaluated metrics, by option."""
        return goals_of(self.best, self.early_stop)

    def check_goals(self, metrics: Collection[str]) -> None:
        """Raise JobError where a goal is none of the evaluated metrics."""
        check_goals(self.goals, metrics)


class TensorFlow(_OptionGroup):
    """Options of Keras models on TensorFlow, and callbacks.

    Attributes:
        run: who computes steps: `step`, trainwright, or `fit`, Keras' own loop: the model's `train_step`,
            its `compile`, metrics of any kind, callbacks, and validation after each `evaluate_epochs` epochs, as in
            `Model.fit`. Data, copies and resuming work as in all runs, in the middle of an epoch too; callbacks start
            again then (`docs/tensorflow.md`).
        callbacks: () -> list of keras.callbacks.Callback, for `run="fit"`; a callback that sets `model.stop_training`
            ends the run. Of a torch model, () -> list of objects with any of `after_step`, `after_epoch`,
            `after_evaluation`, `after_checkpoint` and `after_recovery`, which rank 0 calls with a `tw.CallbackContext`,
            in a step that is done again after a failure once more; see `docs/training.md`.
        tf_config: `own`: each worker chooses a port and sets its TF_CONFIG; `environment`: each worker takes its
            address from the TF_CONFIG that it finds.
        tpu: the TPU to use: `local`, a name known to Google Cloud, or `grpc://host:port`; by default the TPU of the
            worker's host, else the one named in its environment.
        devices: number of devices that each worker drives, for strategies that drive several (`tf_mirrored`); by
            default all accelerators of its node, or logical devices of its CPU.
        cross_device_ops: how `tf_mirrored` sums over devices; by default TensorFlow chooses.
        communication: how `tf_multi_worker_mirrored` sums over workers; with `auto`, TensorFlow chooses.
        bytes_per_pack: about how many bytes of gradients `tf_multi_worker_mirrored` sums at a time; 0 for all of them.
    """

    run: Literal["step", "fit"] = "step"
    callbacks: Callable[[], Sequence[Any]] | None = None
    tf_config: Literal["own", "environment"] = "own"
    tpu: str | None = None
    devices: Annotated[int, Field(ge=1)] | None = None
    cross_device_ops: Literal["nccl", "hierarchical_copy", "reduce_to_one_device"] | None = None
    communication: Literal["auto", "ring", "nccl"] = "auto"
    bytes_per_pack: Annotated[int, Field(ge=0)] = 0


GROUPS: Mapping[str, type[_OptionGroup]] = {
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
    "on_spike", "on_crash_loop", "skip_limit", "hang_deadline_s", "trackers", "schedule_by", "schedule_metric",
    "weight_average", "save_frozen", "weight", "best", "early_stop", "max_time", "initial_weights", "cross_device_ops",
    "communication", "bytes_per_pack", "delivery", "profile", "on_oom", "on_loss",
    "threads_per_worker",
)  # fmt: skip
"""Fields of a job and its groups by their own names, in the order of stored descriptions. New ones go to the end."""


# --- Job --------------------------------------------------------------------------------------------------------------


START_DEADLINE_S = 300.0  # for workers to start on running nodes
NEW_NODE_DEADLINE_S = 1800.0  # on nodes that may have to be started first


class Job(_JobModel):
    """A training job. Moving from one device to a cluster changes no field of it.

    Each option of a group can be given by itself: `tw.Job(..., spares=2)` is `tw.Job(..., recovery=tw.Recovery(
    spares=2))`. The groups' classes describe the options: `help(tw.Recovery)`.

    Attributes:
        name: of the run; the same name resumes it. Letters, digits, dots, dashes and underscores.
        model: () -> torch.nn.Module or keras.Model; called in each worker. Global settings of this process for new
            models (Keras' policy, floatx, epsilon and image format, torch's default type) apply in workers too.
        optimizer: (parameters) -> torch.optim.Optimizer or keras.optimizers.Optimizer. With a parameter called
            `named_parameters` it gets (name, parameter) pairs, for groups by name. For torch models it may be a dict:
            {"generator": ..., "discriminator": ...}, each for the module of that name; `step` then yields the name of
            one and a loss, in turn (`docs/training.md`). May be left out, like loss and metrics, where `run="fit"` and
            model() returns a compiled model.
        loss: (outputs, targets) -> one loss per sample, or `tw.Terms(values, weights)` for tokens and masks, or with
            torch a mean, such as `nn.CrossEntropyLoss()` (see `weight`, `docs/strategies.md`). Keras' own losses and
            functions take (targets, outputs). So does a function whose first parameter is called `y_true`, `true`,
            `truth`, `ground_truth`, `label(s)` or `target(s)`, or whose second is called `y_pred` or `y_hat`, or with
            `(y, pred)`, `(y, logits)` or `(y, outputs)`. The same holds for metrics. Of a torch model, a loss or `step`
            with keyword-only arguments `step` and `total_steps` gets the numbers of completed steps and of all steps;
            state of its own would not be saved (`docs/training.md`).
        train: data set to train on, such as `tw.datasets.parquet("data/train")`, or a data set or loader of torch,
            Hugging Face or Ray Data.
        evaluate: data set to evaluate on after each `evaluate_epochs` epochs.
        inputs: column name or names given to the model, or the model's argument -> column:
            `{"input_ids": "tokens", "attention_mask": "tokens_mask"}` calls `model(input_ids=..., attention_mask=...)`.
        targets: column name or names given to loss and metrics; none where a Keras `train_step` takes inputs alone.
        metrics: name -> (outputs, targets) -> one value per sample, or Terms; their mean is the metric. Also name -> a
            class, or a function without arguments, whose objects have `update(outputs, targets)`, `merge(other)` and
            `compute() -> float`, such as metrics of torchmetrics (`lambda: F1Score(task="binary")`), or a metric of
            Keras (`keras.metrics.AUC()`): each rank updates one, and they are merged in the order of ranks. The names
            `loss`, `step`, `epoch` and `seconds` are taken.
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
    optimizer: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    train: Any
    evaluate: Any = None
    inputs: str | ColumnNames | Mapping[str, str] = ()
    targets: str | ColumnNames = ()
    metrics: Mapping[str, Callable[..., Any]] = Field(default_factory=dict)
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
        fields, twice = _group_options(given)
        if twice:
            raise JobError(twice)
        return fields | {name: as_dataset(name, fields[name]) for name in ("train", "evaluate") if name in fields}

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        if problems := [*inconsistencies(self)]:
            raise JobError(problems)
        return self

    def replace(self, **fields: Any) -> Job:
        """Return a copy with some fields or options changed, validated like a new job."""
        changed = {**self.explicit(), **{name: value for name, value in fields.items() if name not in GROUP_OF}}
        for name in [name for name in fields if name in GROUP_OF]:
            changed[GROUP_OF[name]] = {**_set_options(changed.get(GROUP_OF[name])), name: fields[name]}
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
        job_fields = self.model_fields_set - GROUPS.keys()
        return frozenset(job_fields.union(*(getattr(self, group).model_fields_set for group in GROUPS)))

    @classmethod
    def advice_on(cls, name: str) -> str:
        """Name what another trainer's option is called here, or the nearest field, group or option."""
        return advice_of(name) or nearest(name, [*cls.model_fields, *GROUP_OF])

    def on_one_device(self, **fields: Any) -> Job:
        """Return the job for one worker with one device, without pinned layout or strategy.

        Micro-batches stay as `accumulation=` or `plan=` pins them.
        """
        plan = single_device_spec(self.planning.plan or "") or None
        several = ("min_workers", "max_workers", "strategy", "consistency", "wire", "local_steps", "outer", *SUMMED_BY)
        overrides = {"workers": 1, "devices": 1, "plan": plan, **{name: self.default(name) for name in several}}
        return self.replace(**{**overrides, **fields})

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
        """Return what the order of samples depends on beside the data: arguments of `make_schedule` of data sets."""
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
        weights: WeightSource | None = None,
    ) -> ModelSpec:
        """Return the part of the job that an engine needs.

        Args:
            total_steps: of the run.
            sample: () -> a batch of one row.
            validation: () -> the feeds of an evaluation.
            weights: opened files of `initial_weights`; None where a checkpoint brings all weights.
        """
        return ModelSpec(
            model=self.model,
            optimizer=self.optimizer,
            total_steps=total_steps,
            loss=self.loss,
            step=self.training.step,
            weight=self.training.weight,
            inputs=self.arguments,
            keywords=self.keywords,
            targets=self.target_names,
            sample_weight=self.data.sample_weight or "",
            class_weight=dict(self.data.class_weight),
            collation=self.data.collation,
            compile=self.training.compile,
            metrics=dict(self.metrics),
            schedule=_scheduled(self, total_steps),
            schedule_by=self.training.schedule_by,
            schedule_metric=self.training.schedule_metric or "",
            weight_average=self.training.weight_average,
            initial_weights=InitialWeights.of(self.training.initial_weights),
            weights=weights,
            save_frozen=self.checkpointing.save_frozen,
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
        worker_count = max(plan.mesh.data_ranks, self.scaling.max_workers or 0)
        if self.batch_size < worker_count:
            raise JobError(
                [
                    f"batch_size={self.batch_size} is smaller than the {worker_count} data-parallel workers: "
                    f"set batch_size to {worker_count} or more, or workers={self.batch_size} or fewer"
                ]
            )


def _group_options(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Move options given by themselves into their groups.

    Returns:
        The fields of a job, and the problems found.
    """
    collected = {name: value for name, value in fields.items() if name not in GROUP_OF}
    problems = []
    for name in [name for name in fields if name in GROUP_OF]:
        group = GROUP_OF[name]
        if not isinstance(collected.get(group), _OptionGroup | Mapping | None):
            continue  # a wrong type, which is reported with the group
        options = _set_options(collected.get(group))
        if name in options:
            problems.append(f"{name}= is given twice: by itself and in {group}=")
        collected[group] = {**options, name: fields[name]}
    return collected, problems


def _set_options(group: _OptionGroup | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of a group that are set explicitly."""
    return group.explicit() if isinstance(group, _OptionGroup) else dict(group or {})


def _names(names: str | ColumnNames) -> ColumnNames:
    """Return one name or several as a tuple."""
    return (names,) if isinstance(names, str) else names


def _scheduled(job: Job, total_steps: int) -> Any:
    """Return the schedule as engines call it."""
    schedule = job.training.schedule
    if schedule is None or takes_optimizer(schedule):
        return schedule
    epoch_steps = total_steps // job.epochs if job.training.schedule_by == "epoch" else 1
    functions = [
        schedule_by_epoch(each, epoch_steps, job.epochs) if job.training.schedule_by == "epoch" else each
        for each in (with_batch_size(function, job.batch_size) for function in job.training.schedules)
    ]
    return tuple(functions) if isinstance(schedule, tuple) else functions[0]
