"""The engine: the one interface between the core and a framework. Free of Ray.

Who calls when: `reserve`, `form`, `build` (first time in a process), then one of `transfer`, `load` or nothing (a fresh
start at step 0), then `warm`, then `train_step` and `evaluate_step`. After a failure: `leave`, then again from
`reserve`; `build` is not repeated in a process that has built. It follows `form` at once, where others may wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from trainwright.core.checkpoint import Reader, Writer
from trainwright.core.collation import Collation
from trainwright.core.data import Batch, Columns, Feed, StepReport, Sums
from trainwright.core.errors import JobError
from trainwright.core.group import Address, Capabilities, Generation, Group, Move, Role, StateTag
from trainwright.core.plan import Plan
from trainwright.core.staleness import Staleness, Unit


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The part of a job that an engine needs; field names and meanings are the job's.

    Attributes:
        model: () -> the framework's model.
        loss: (outputs, targets) -> losses (samples,) or Terms; unused with `step`.
        optimizer: (parameters) -> the framework's optimizer; None where the model brings its own (`run="fit"`).
        step: (model, batch) -> losses or Terms, where batch is the dict of all columns as tensors.
        inputs: column names given to the model, as positional arguments where there are no keywords.
        keywords: the model's argument that each of `inputs` is given as; empty, or as many.
        targets: column names given to loss and metrics (one value, or a tuple when several).
        compile: `auto`, `eager`, `xla` or `inductor`.
        collation: applied to each micro-batch before its columns become tensors.
        sample_weight: column that the losses of each sample are multiplied by; empty for none.
        class_weight: class -> what the losses of its samples are multiplied by in training; 1 for others.
        metrics: name -> (outputs, targets) -> (samples,) or Terms.
        schedule: (step, total_steps) -> factor on the optimizer's own learning rate.
        clip_norm: largest global gradient norm; None does not clip.
        guard: look at the gradient of each step even where it is not clipped: it can be NaN where the loss is not.
        inexact: what the user accepts as not equal across layouts, such as `batch_norm`.
        batch_norm: `local` or `sync`: what batch norms of torch models look at in training.
        local_state: names or patterns of buffers that each data rank keeps as its own.
        tensor_plan: how tensor-parallel ranks divide modules, by name or pattern; empty finds it.
        outputs: names of the outputs that `predict_step` gives; empty gives all.
        sample: () -> a batch of one row, for a model that learns its shapes from data.
        batch_size: rows of a global batch.
        epochs: that the steps are of.
        callbacks: () -> callbacks of Keras, for `run="fit"`.
        validation: () -> feeds of an evaluation, from step 0 on, for `run="fit"`.
        validation_epochs: epochs between two of them.
    """

    model: Callable[[], Any]
    optimizer: Callable[[Any], Any] | None
    total_steps: int
    loss: Callable[[Any, Any], Any] | None = None
    step: Callable[[Any, Any], Any] | None = None
    inputs: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    sample_weight: str = ""
    class_weight: Mapping[int, float] = field(default_factory=dict)
    compile: Literal["auto", "eager", "xla", "inductor"] = "auto"
    collation: Collation = field(default_factory=Collation)
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    schedule: Callable[[int, int], float] | None = None
    clip_norm: float | None = None
    guard: bool = False
    seed: int = 0
    inexact: tuple[str, ...] = ()
    batch_norm: Literal["local", "sync"] = "local"
    local_state: tuple[str, ...] = ()
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    sample: Callable[[], Batch] | None = None
    batch_size: int = 1
    epochs: int = 1
    callbacks: Callable[[], Sequence[Any]] | None = None
    validation: Callable[[], Iterable[Feed]] | None = None
    validation_epochs: int = 1

    def check(self, capabilities: Capabilities) -> None:
        """Raise JobError for what an engine of these capabilities cannot do. Engines call it when they build."""
        problems = self.collation.static_problems() if capabilities.static_shapes else []
        if self.compile == "xla" and not capabilities.xla:
            problems.append('compile="xla" is for TensorFlow models: leave it out')
        if self.compile == "inductor" and not capabilities.inductor:
            problems.append('compile="inductor" is for torch models: leave it out')
        whole = 'strategy="data_parallel" or "one_device" with a torch model'
        if self.batch_norm == "sync" and not capabilities.synchronized_batch_norm:
            problems.append(f'batch_norm="sync" needs {whole}; Keras has BatchNormalization(synchronized=True)')
        if self.local_state and not capabilities.local_state:
            problems.append(f"local_state= needs {whole}")
        if problems:
            raise JobError(problems)


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """A copy of a rank's state in host memory. `state` is the engine's own and opaque to the core."""

    step: int
    size_bytes: int
    state: Any


class Engine(Protocol):
    """One rank of a strategy. Methods are called from one thread, except `interrupt` and `save`.

    Errors: `PeerLost` when a collective breaks because another rank went away, `UserCodeError` when the user's function
    raises, `NonFiniteLoss` before anything is applied, `JobError` for a model or loss of the wrong shape.
    """

    capabilities: ClassVar[Capabilities]

    def reserve(self, generation: Generation, role: Role) -> Address:
        """Bind a port that the system chooses and keep it until `form`."""

    def form(self, group: Group) -> StateTag:
        """Join the group; every member calls it. Says what state this rank holds."""

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer, the same on every rank for one seed; step None."""

    def warm(self, feed: Feed) -> None:
        """One throwaway step of full shape; all state is kept. Compiles, and fixes the order of sums."""

    def train_step(self, feed: Feed) -> StepReport:
        """One step of this rank; in collective topologies its part of one global step.

        Given the feed of the following step, it may begin that: `train_step` is the next call then, unless the report
        tells of a wish, or the group is left.
        """

    def evaluate_step(self, feed: Feed) -> Sums:
        """Local sums of `loss` and the metrics. A divided model is gathered: every rank calls it, and as often."""

    def predict_step(self, feed: Feed) -> Columns:
        """Outputs of the model for the feed's rows, as numpy arrays by name. Called as `evaluate_step` is."""

    def verify(self) -> None:
        """Between two steps: raise JobError, on every rank, where replicas have come to differ. Every rank calls it.

        Does nothing where no two ranks hold the same, or the framework itself keeps them equal.
        """

    def transfer(self, moves: Sequence[Move]) -> StateTag:
        """Send and receive state as decided; every member of the group calls it with the same moves."""

    def snapshot(self) -> StateCopy:
        """Copy the state to host memory. Training may go on at once."""

    def restore(self, copy: StateCopy) -> StateTag:
        """Take a state copied by `snapshot` of the same layout."""

    def save(self, copy: StateCopy, writer: Writer) -> None:
        """Write a snapshot's pieces. May run in another thread while steps go on."""

    def load(self, reader: Reader) -> StateTag:
        """Take the state of a checkpoint, saved in any layout."""

    def interrupt(self, deadline_s: float) -> bool:
        """Make a blocked call of another thread raise. False means: kill the process."""

    def leave(self) -> None:
        """The group ends, the process lives on with its state. Safe to call at any time, twice too."""


class Coordinated(Engine, Protocol):
    """What an engine of the coordinator topology has beside: rank 0 leads."""

    def follow(self) -> None:
        """Of all but rank 0: do what that wants; returns when it says so or is gone."""


class Independent(Engine, Protocol):
    """What an engine of the independent topology has beside: its workers step alone, against servers.

    From `form` to `leave` a server answers its workers, whatever else is asked of it, so that one may join at any time;
    an error of that comes from the next call. Between two calls of `serve` no update is applied, and all servers stand
    at the same step: snapshots and evaluations are of one state. In `train_step` a worker pulls, computes and pushes
    its part of the unit that it was given last.
    """

    def serve(self, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """A server: let the workers take the steps before `until`; ends when all are applied on all servers.

        The first server gives each step's report, over all its units, when that is complete, in order; the others give
        none. Once `wish()` is true (the first server's is heard) no step is begun any more: those begun are completed,
        and the last report has `wish`.
        """

    def lease(self, first: int) -> Unit | None:
        """A worker: what to compute next. None when the `serve` that begins at step `first` is over.

        Waits while nothing may be begun, also for that `serve` to begin.

        Raises:
            PeerLost: a server is gone, or does not answer within the deadline.
        """

    def staleness(self) -> Staleness:
        """The first server: of what was pushed since it was asked last."""
