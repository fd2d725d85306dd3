"""The engine: the one interface between the core and a framework. Free of Ray.

Who calls when: `reserve`, `form`, `build` (first time in a process), then one of `transfer`, `load` or nothing (a fresh
start at step 0), then `warm`, then `train_step` and `evaluate_step`. After a failure: `leave`, then again from
`reserve`; `build` is not repeated in a process that has built. It follows `form` at once, where others may wait for it.

Engines apply a collation where a batch becomes tensors: there the rows of a micro-batch are final, so each micro-batch
is padded to its own longest row. Training, evaluation, prediction and warm-up all pass through that one place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Batch, Columns, Feed, MetricSums, PeakMemory, StepReport, copy_objects
from trainwright.core.errors import DataError, JobError, nearest, user_code
from trainwright.core.initial_weights import InitialWeights, WeightSource
from trainwright.core.loss_api import parameters_of, step_keywords, with_step
from trainwright.core.plan import Plan
from trainwright.core.topology import (
    Address,
    Capabilities,
    Group,
    Role,
    StalenessCounts,
    StateTag,
    StateTransfer,
    WorkUnit,
)
from trainwright.core.weight_average import WeightAverage

_CollateFunction = Callable[[dict[str, Any]], Mapping[str, Any]]
_ANY_NUMBER = inspect.Parameter.VAR_POSITIONAL
_ANY_NUMBERS = (_ANY_NUMBER, inspect.Parameter.VAR_KEYWORD)
_LENGTHS = ("total_steps", "num_training_steps")  # parameters of schedulers

MASK_SUFFIX = "_mask"
_SHOWN_SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Pad:
    """How a column of arrays of different lengths becomes one array (rows, width, ...).

    Beside it stands the column `<name>_mask`, bool (rows, width): True where the data is, False where it was padded.

    Attributes:
        value: put behind the end of each row; the column's own type must be able to hold it.
        multiple: the width is the smallest multiple of this that holds the longest row of the micro-batch.
        length: the width of every micro-batch instead; engines with static shapes need it.
    """

    value: float = 0
    multiple: int = 1
    length: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.multiple < 1:
            problems.append(f"Pad(multiple={self.multiple}): use 1 or more")
        if self.length is not None and self.length < 1:
            problems.append(f"Pad(length={self.length}): use 1 or more, or None for the longest row")
        if self.length is not None and self.length % max(self.multiple, 1):
            problems.append(f"Pad(length={self.length}) is not a multiple of {self.multiple}: leave multiple= out")
        if problems:
            raise JobError(problems)

    def width(self, longest: int) -> int:
        """Return the width for a longest row of a number of elements; at least 1."""
        return self.length if self.length is not None else -(-max(longest, 1) // self.multiple) * self.multiple


@dataclass(frozen=True, kw_only=True)
class Collation:
    """How a micro-batch is padded or collated before its columns become tensors."""

    pad: Mapping[str, Pad] = field(default_factory=dict)  # columns to pad, by name
    # does all of it instead: the dict of columns -> a dict of arrays, or of the framework's tensors
    function: _CollateFunction | None = None

    def __call__(self, batch: Batch) -> Mapping[str, Any]:
        """Return the columns of a micro-batch, padded, with masks; first dimensions are the batch's rows.

        Raises:
            DataError: a padded column is not there, or its rows cannot be padded; the function gave other rows.
            UserCodeError: the function raised.
        """
        if self.function is not None:
            return _apply_collate(self.function, batch)
        if not self.pad:
            return batch.columns
        columns = dict(batch.columns)
        for name, pad in self.pad.items():
            if name not in batch.columns:
                raise DataError(
                    f"pad= names the column {name!r}, but there is none", remedy=nearest(name, batch.columns)
                )
            if name + MASK_SUFFIX in batch.columns:
                raise DataError(
                    f"the data has a column {name + MASK_SUFFIX!r}, which is also the name of the mask of {name!r}",
                    remedy=f"rename the data's column, or leave {name!r} out of pad=",
                )
            columns[name], columns[name + MASK_SUFFIX] = pad_column(name, batch.columns[name], pad, batch.samples)
        return columns

    def sources(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the data set's columns behind these names, each once; a mask's column for the mask."""
        masks = {name + MASK_SUFFIX: name for name in self.pad}
        return tuple(dict.fromkeys(masks.get(name, name) for name in names))

    def static_problems(self) -> list[str]:
        """Describe why an engine that needs static shapes cannot use this, one line for each problem."""
        return [
            f"pad={name!r}: the accelerator needs one width in every step: give Pad(length=...)"
            for name, pad in self.pad.items()
            if pad.length is None
        ]


def pad_column(
    name: str, column: npt.NDArray[Any], pad: Pad, samples: Sequence[int] | npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return a column as one array (rows, width, ...) and its mask (rows, width). Not copied without need.

    Args:
        name: of the column, for errors.
        column: (rows,) objects, each an array (length, ...) of numbers; or a rectangular array (rows, length, ...).
        pad: value and width.
        samples: row numbers in the data set, for errors.

    Raises:
        DataError: a row is longer than the width, is no array of numbers, or differs from others in more than length.
    """
    rows = _row_arrays(name, column, samples)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    width = pad.width(int(lengths.max(initial=0)))
    if lengths.max(initial=0) > width:
        worst = int(lengths.argmax())
        raise DataError(
            f"a row of column {name!r} has {lengths[worst]} elements, more than Pad(length={width})",
            where=f"sample {samples[worst]}",
            remedy="raise length=, or cut the rows in a transform of the data set",
        )
    mask = np.arange(width) < lengths[:, None]
    if column.dtype != object and column.shape[1] == width:
        return column, mask
    flat = _join_rows(name, rows)
    result = np.full((len(rows), width, *flat.shape[1:]), _padding_value(name, pad, flat.dtype), flat.dtype)
    result[mask] = flat
    return result, mask


def stack_column(name: str, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column of objects as one array where its rows are numbers or arrays of one shape.

    Raises:
        DataError: it is ragged, or holds no numbers; says what to do.
    """
    rows = [_row_array(row) for row in column]
    kinds = {row.dtype.kind for row in rows}
    if not kinds <= set("biufc"):
        type_names = sorted({type(row).__name__ for row in column})
        raise DataError(
            f"column {name!r} holds {', '.join(type_names)}, of which there are no tensors",
            where=f"column {name!r}",
            remedy="turn it into numbers in a transform of the data set: text as indices, lists within a row as "
            "lists of one length; or use collate=",
        )
    shapes = sorted({row.shape for row in rows})
    if len(shapes) > 1:
        raise DataError(
            f"column {name!r} is ragged: shape {shapes[0]} in one row and {shapes[-1]} in another",
            where=f"column {name!r}",
            remedy=f"pad it with pad={{{name!r}: tw.Pad()}}, use collate=, or crop the rows in a transform",
        )
    return np.stack(rows)


# --- inside -----------------------------------------------------------------------------------------------------------


def _row_array(row: Any) -> npt.NDArray[Any]:
    """Return a row as an array with all dimensions, also for lists of lists, which files give as arrays of arrays.

    Lists of different lengths within the row become an array of objects.
    """
    if isinstance(row, np.ndarray) and row.dtype == object and row.ndim:
        row = [_row_array(item) for item in row]
    try:
        return np.asarray(row)
    except ValueError:
        return np.fromiter(row, dtype=object, count=len(row))


def _row_arrays(name: str, column: npt.NDArray[Any], samples: Any) -> list[npt.NDArray[Any]]:
    """Return each row as an array of numbers with at least one dimension."""
    rows = [_row_array(row) for row in column]
    for row, sample in zip(rows, samples, strict=True):
        if not row.ndim or row.dtype.kind not in "biufc":
            content = "a single value" if not row.ndim and row.dtype.kind in "biufc" else f"{row.dtype} values"
            raise DataError(
                f"column {name!r} cannot be padded: a row is {content}",
                where=f"sample {sample}",
                remedy="pad only columns whose rows are arrays of numbers",
            )
    return rows


def _join_rows(name: str, rows: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate all elements of all rows. Empty rows do not determine the type."""
    filled = [row for row in rows if len(row)] or rows[:1]
    shapes = sorted({row.shape[1:] for row in filled})
    if len(shapes) > 1:
        raise DataError(
            f"the rows of column {name!r} differ in more than length: their elements have shapes {shapes[0]} and "
            f"{shapes[-1]}",
            where=f"column {name!r}",
            remedy="give all elements one shape in a transform of the data set",
        )
    return np.concatenate(filled)


def _padding_value(name: str, pad: Pad, dtype: np.dtype[Any]) -> Any:
    """Return the padding value in the column's type."""
    if dtype.kind in "fc":
        return pad.value
    with np.errstate(invalid="ignore"):
        fits = float(np.array(pad.value).astype(dtype)) == float(pad.value)
    if not fits:
        raise DataError(
            f"column {name!r} is {dtype}, which cannot hold Pad(value={pad.value})",
            where=f"column {name!r}",
            remedy="use another value, or convert the column in a transform of the data set",
        )
    return pad.value


def _apply_collate(function: _CollateFunction, batch: Batch) -> Mapping[str, Any]:
    """Check the columns that the user's function returned."""
    sample_text = ", ".join(map(str, batch.samples[:_SHOWN_SAMPLES].tolist()))
    where = f"samples {sample_text}{', ...' if batch.rows > _SHOWN_SAMPLES else ''}"
    columns = copy_objects(batch.columns)
    with user_code("collate=", "correct the function, or the rows it was given", where):
        result = function(columns)
    if not isinstance(result, Mapping):
        raise DataError(
            f"collate= returned a {type(result).__name__}",
            where=where,
            remedy="return a dict of arrays or tensors by name",
        )
    arrays = {str(name): _as_array(str(name), value, where) for name, value in result.items()}
    for name, value in arrays.items():
        rows = value.shape[0] if len(value.shape) else 0
        if rows != batch.rows:
            raise DataError(
                f"collate= returned {rows} rows of {name!r} for {batch.rows} rows",
                where=where,
                remedy="return one row for each row given, in the same order; leave rows out with dataset.filter",
            )
    return arrays


def _as_array(name: str, value: Any, where: str) -> Any:
    """Return an array or tensor unchanged, and another value as an array."""
    if hasattr(value, "shape"):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"collate= returned {name!r} as a {type(value).__name__} that makes no array: {error}",
            where=where,
            remedy="give every row one shape: pad",
        ) from None


# --- Engine -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The part of a job that an engine needs; field names and meanings are the job's."""

    model: Callable[[], Any]  # () -> the framework's model
    # (parameters) -> the framework's optimizer; None where the model brings its own (`run="fit"`). One whose
    # parameter is called `named_parameters` gets (name, parameter) pairs. Several, by the names of the modules that
    # they train, make their updates in turn, as `step` yields their names and losses.
    optimizer: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None
    total_steps: int
    # (outputs, targets) -> losses (samples,) or Terms; unused with `step`. Both get the keyword-only arguments `step`,
    # completed steps, and `total_steps`, if they have them
    loss: Callable[[Any, Any], Any] | None = None
    # (model, batch) -> losses or Terms, where batch is the dict of all columns that can be tensors
    step: Callable[[Any, Any], Any] | None = None
    # column, or (batch) -> number of items that a loss of one number is the mean of; None for its rows
    weight: str | Callable[[Any], Any] | None = None
    inputs: tuple[str, ...] = ()  # column names given to the model, as positional arguments where there are no keywords
    keywords: tuple[str, ...] = ()  # the model's argument that each of `inputs` is given as; empty, or as many
    targets: tuple[str, ...] = ()  # column names given to loss and metrics (one value, or a tuple when several)
    sample_weight: str = ""  # column that the losses of each sample are multiplied by; empty for none
    # class -> what the losses of its samples are multiplied by in training; 1 for others
    class_weight: Mapping[int, float] = field(default_factory=dict)
    compile: Literal["auto", "eager", "xla", "inductor"] = "auto"
    # applied to each micro-batch before its columns become tensors
    collation: Collation = field(default_factory=Collation)
    # name -> (outputs, targets) -> (samples,) or Terms; or what makes a metric with state
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # (step, total_steps) -> factor on the optimizer's own learning rate, or one for each parameter group; or, see
    # `takes_optimizer`, (optimizer) -> scheduler of `torch.optim.lr_scheduler`
    schedule: Callable[..., Any] | tuple[Callable[[int, int], float], ...] | None = None
    schedule_by: Literal["step", "epoch"] = "step"  # when a scheduler counts on: after each `step` or `epoch`
    # metric of the evaluation set by which a scheduler counts on after each evaluation; empty for none
    schedule_metric: str = ""
    weight_average: WeightAverage | None = None  # average of the parameters that is evaluated and loaded in their place
    # what the model's weights are loaded from; None where `model()` makes them
    initial_weights: InitialWeights | None = None
    weights: WeightSource | None = None  # its opened files; None where a checkpoint brings all weights
    # states hold parameters that are not trained; if not, `model()` makes the same ones everywhere
    save_frozen: bool = True
    clip_norm: float | None = None  # largest global gradient norm; None does not clip
    # look at the gradient of each step even where it is not clipped: it can be NaN where the loss is not
    guard: bool = False
    seed: int = 0
    inexact: tuple[str, ...] = ()  # what the user accepts as not equal across layouts, such as `batch_norm`
    # `local` or `sync`: what batch norms of torch models look at in training
    batch_norm: Literal["local", "sync"] = "local"
    local_state: tuple[str, ...] = ()  # names or patterns of buffers that each data rank keeps as its own
    # how tensor-parallel ranks divide modules, by name or pattern; empty finds it
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()  # names of the outputs that `predict_step` gives; empty gives all
    sample: Callable[[], Batch] | None = None  # () -> a batch of one row, for a model that learns its shapes from data
    batch_size: int = 1  # rows of a global batch
    epochs: int = 1  # that the steps are of
    # () -> callbacks of Keras, for `run="fit"`; those of torch jobs are the worker's (`core.callbacks`)
    callbacks: Callable[[], Sequence[Any]] | None = None
    # () -> feeds of an evaluation, from step 0 on, for `run="fit"`
    validation: Callable[[], Iterable[Feed]] | None = None
    validation_epochs: int = 1  # epochs between two of them

    def check(self, capabilities: Capabilities) -> None:
        """Raise JobError for options that these capabilities do not support. Engines call it in build."""
        problems = self.collation.static_problems() if capabilities.static_shapes else []
        if self.compile == "xla" and not capabilities.xla:
            problems.append('compile="xla" is for TensorFlow models: leave it out')
        if self.compile == "inductor" and not capabilities.inductor:
            problems.append('compile="inductor" is for torch models: leave it out')
        requirement = 'strategy="data_parallel" or "one_device" with a torch model'
        if self.batch_norm == "sync" and not capabilities.synchronized_batch_norm:
            problems.append(f'batch_norm="sync" needs {requirement}; Keras has BatchNormalization(synchronized=True)')
        if isinstance(self.optimizer, Mapping) and not capabilities.custom_steps:
            problems.append(f"several optimizers need {requirement}")
        if self.local_state and not capabilities.local_state:
            problems.append(f"local_state= needs {requirement}")
        if not capabilities.torch_training:
            problems += self._torch_problems()
        if problems:
            raise JobError(problems)

    def _torch_problems(self) -> Iterator[str]:
        """Describe options that need the capability `torch_training`."""
        needs = "needs a torch model and no parameter servers"
        if isinstance(self.schedule, tuple) or takes_optimizer(self.schedule):
            yield (
                f"schedule= with a scheduler, or with a function for each parameter group, {needs}: give one function "
                "(step, total_steps) -> factor, or Keras' optimizer a LearningRateSchedule"
            )
        if self.weight_average is not None:
            yield f"weight_average= {needs}: leave it out; Keras' optimizers have use_ema="
        if names := self._step_keywords:
            option = "step=" if self.step else "loss="
            yield f"{option} takes {names[0]}=, which {needs}: leave it out, and count steps in a variable of the model"
        if not self.save_frozen:
            yield f"save_frozen=False {needs}: leave it out"
        if self.initial_weights is not None:
            yield f"initial_weights= {needs}: load them in model()"

    def numbered(self, function: Callable[..., Any], step: int) -> Callable[..., Any]:
        """Return the loss or step, or what calls it, with the numbers that it takes after `step` completed steps."""
        return with_step(function, self._step_keywords, step, self.total_steps)

    @property
    def takes_step(self) -> bool:
        """Whether the loss or step may change with the number of the step."""
        return "step" in self._step_keywords

    @functools.cached_property
    def _step_keywords(self) -> tuple[str, ...]:
        return step_keywords(self.step or self.loss)

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch."""
        return max(1, self.total_steps // self.epochs)

    def make_optimizer(self, named: Sequence[tuple[str, Any]], key: str = "") -> Any:
        """Return the job's optimizer, or the one of `key`, for these full names and parameters.

        Raises what the user's function raises.
        """
        function = self.optimizer[key] if isinstance(self.optimizer, Mapping) else self.optimizer
        assert function is not None, "only a job with run='fit' may leave it out"
        pairs = [each.name.startswith("named_param") for each in _positional_parameters(function)[:1]]
        return function(list(named) if any(pairs) else [parameter for _, parameter in named])

    def make_scheduler(self, optimizer: Any) -> Any:
        """Return the scheduler of `schedule=` for the optimizer. Raises the errors of the user's function.

        An unset parameter `total_steps` or `num_training_steps` gets the number of the scheduler's steps.
        """
        assert callable(self.schedule), "takes_optimizer(schedule)"
        length = self.epochs if self.schedule_by == "epoch" else self.total_steps
        known = inspect.signature(self.schedule).parameters
        fixed = any(known[name].default is not None for name in ("epochs", "steps_per_epoch") if name in known)
        unset = [name for name in _LENGTHS if name in known and known[name].default in (inspect.Parameter.empty, None)]
        return self.schedule(optimizer, **({} if fixed else dict.fromkeys(unset, length)))


def takes_optimizer(schedule: Any) -> bool:
    """Return whether `schedule=` makes a scheduler of an optimizer, and is no function (step, total_steps) -> factor.

    Its first parameter is called `optimizer`, or it is the only one.
    """
    places = _positional_parameters(schedule) if callable(schedule) else []
    return bool(places) and (places[0].name == "optimizer" or (len(places) == 1 and places[0].kind is not _ANY_NUMBER))


def unset_parameters(schedule: Callable[..., Any]) -> list[str]:
    """Return the unset parameters of a function that `takes_optimizer`, without those that `make_scheduler` sets."""
    parameters = [*inspect.signature(schedule).parameters.values()][1:]
    unset_items = [item for item in parameters if item.default is item.empty and item.kind not in _ANY_NUMBERS]
    return [item.name for item in unset_items if item.name not in _LENGTHS]


def schedule_by_epoch(
    schedule: Callable[[int, int], float], epoch_steps: int, epochs: int
) -> Callable[[int, int], float]:
    """Return a function of steps from one of epochs."""
    return lambda step, total: schedule(step // epoch_steps, epochs)


def with_batch_size(schedule: Callable[..., float], batch_size: int) -> Callable[[int, int], float]:
    """Return the schedule; a schedule with a keyword-only `batch_size` gets the job's current one."""
    keyword = parameters_of(schedule).get("batch_size")
    is_open = keyword is not None and keyword.kind is keyword.KEYWORD_ONLY and keyword.default is keyword.empty
    return functools.partial(schedule, batch_size=batch_size) if is_open else schedule


def _positional_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the positional parameters; none for a function without a Python signature."""
    parameters = parameters_of(function).values()
    return [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD, _ANY_NUMBER)]


@dataclass(frozen=True, kw_only=True)
class StateSnapshot:
    """A copy of a rank's state in host memory. `state` is the engine's own and opaque to the core."""

    step: int
    size_bytes: int
    state: Any


class UpdatedMetric(Protocol):
    """A metric with state in an evaluation, on one rank; see `core.metric_states`."""

    metric: Any  # the user's object

    def update(self, outputs: Any, targets: Any) -> None:
        """Add the rows of a micro-batch that have weight."""


MetricStates = Mapping[str, UpdatedMetric]


class Engine(Protocol):
    """One rank of a strategy. Methods are called from one thread, except `interrupt` and `save`.

    Errors: `PeerLost` when a collective breaks because another rank went away, `UserCodeError` when the user's function
    raises, `NonFiniteLoss` before anything is applied, `JobError` for a model or loss of the wrong shape.
    """

    capabilities: ClassVar[Capabilities]

    def reserve(self, role: Role) -> Address:
        """Bind a port that the system chooses and keep it until `form`."""

    def form(self, group: Group) -> StateTag:
        """Join the group; every member calls it. Returns the state that this rank holds."""

    def build(self, spec: ModelSpec, plan: Plan) -> StateTag:
        """Make model and optimizer, equal on every rank for one seed; the step is None."""

    def warm(self, feed: Feed) -> None:
        """Run one step of full shape and discard it. Compiles, and fixes the order of sums."""

    def train_step(self, feed: Feed) -> StepReport:
        """Run one step of this rank; in collective topologies its part of one global step.

        Given the feed of the following step, it may begin that: `train_step` is the next call then, unless the report
        tells of a stop request, or the group is left.
        """

    def evaluate_step(self, feed: Feed, states: MetricStates | None = None) -> MetricSums:
        """Return local sums of `loss` and metrics, and update the metrics with state.

        Every rank calls it equally often: a divided model is gathered. One of the ranks with the same rows updates.
        """

    def predict_step(self, feed: Feed) -> Columns:
        """Return outputs of the model for the feed's rows, as numpy arrays by name. Called as `evaluate_step` is."""

    def peak_memory(self) -> PeakMemory | None:
        """Return the most memory of this rank's device used since `form`; None on a CPU."""

    def verify(self) -> None:
        """Raise JobError on every rank where replicas differ. Every rank calls it between two steps.

        Does nothing where no two ranks hold the same, or the framework itself keeps them equal.
        """

    def transfer(self, moves: Sequence[StateTransfer]) -> StateTag:
        """Send and receive state as decided; every member of the group calls it with the same moves."""

    def check_unsaved(self) -> None:
        """Raise JobError where what no checkpoint holds has changed since `build`. Called before a stored snapshot."""

    def snapshot(self) -> StateSnapshot:
        """Copy the state to host memory. Training may go on at once."""

    def restore(self, copy: StateSnapshot) -> StateTag:
        """Restore a state copied by `snapshot` in the same layout."""

    def save(self, copy: StateSnapshot, writer: StateWriter) -> None:
        """Write a snapshot's pieces. May run in another thread while steps go on."""

    def load(self, reader: StateReader) -> StateTag:
        """Restore the state of a checkpoint, saved in any layout."""

    def interrupt(self, deadline_s: float) -> bool:
        """Make a blocked call of another thread raise. False means: kill the process."""

    def leave(self) -> None:
        """Leave the group; the process keeps its state. Safe to call at any time, and twice."""


class TorchTrainingEngine(Engine, Protocol):
    """An engine with the capability `torch_training`."""

    def whole_model(self) -> AbstractContextManager[Any]:
        """Return a context with the user's module as evaluations see it. Raises JobError where the plan divides it."""

    def prefetcher(self) -> Callable[[Feed], Feed] | None:
        """Return a function that copies a feed's batches to the device, for another thread; None where none is needed.

        Steps take the feeds that it returns, or others.
        """


class CoordinatorTopologyEngine(Engine, Protocol):
    """An engine of the coordinator topology: rank 0 leads, the other ranks follow."""

    def follow(self) -> None:
        """Carry out what rank 0 asks for, on another rank; return when rank 0 says so or is lost."""


class IndependentEngine(Engine, Protocol):
    """An engine of the independent topology: workers step asynchronously against servers.

    From `form` to `leave` a server answers its workers, whatever else is asked of it, so that one may join at any time;
    an error of that comes from the next call. Between two calls of `serve` no update is applied, and all servers stand
    at the same step: snapshots and evaluations are of one state. In `train_step` a worker pulls, computes and pushes
    its part of the unit that it was given last.
    """

    def serve(self, until: int, stop_requested: Callable[[], bool]) -> Iterator[StepReport]:
        """On a server: let workers take the steps before `until`; ends when all are applied on all servers.

        The first server gives each step's report, over all its units, when that is complete, in order; the others give
        none. Once `stop_requested()` is true (the first server's counts) no step is begun: those begun are completed,
        and the last report has `stop_requested`.
        """

    def lease(self, first: int) -> WorkUnit | None:
        """On a worker: return the next unit. None when the `serve` that starts at step `first` is over.

        Waits while nothing may be begun, also for that `serve` to begin.

        Raises:
            PeerLost: a server is gone, or does not answer within the deadline.
        """

    def staleness(self) -> StalenessCounts:
        """On the first server: return the staleness of pushes since the last call."""


class DecodingEngine(Engine, Protocol):
    """An engine whose capabilities say `decodes`: a language model need not compute earlier tokens again."""

    def decode_step(self, feed: Feed, cache: dict[int, Any]) -> Columns | None:
        """Return outputs as `predict_step`, for the tokens that follow those of earlier calls with the same cache.

        Every call has the same rows: the first one any number of tokens of each, the later ones one. None where the
        model keeps nothing in the cache: it needs all tokens in each call.
        """


# --- Names of what is stored ------------------------------------------------------------------------------------------


OPTIMIZER_PREFIX = "optimizer"  # names of files that hold nothing but the optimizer's state begin with it


def checkpoint_path(step: int, token: int, again: int = 0) -> str:
    """Return the folder, within the run, of the checkpoint that the driver `token` takes after `step` completed steps.

    `again` tells a further try at the same step from the first, so that a late write of an uploader given up cannot
    touch it.
    """
    return f"checkpoints/{step:08d}-{token}" + (f".{again}" if again else "")


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint: name within it, size and SHA-256 (hexadecimal)."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """A checkpoint as the run log names it."""

    step: int  # completed steps it holds
    path: str  # its folder within the run, `checkpoints/00001200-<token>`
    manifest_sha256: str  # of its MANIFEST.json
    parent: str = ""  # path of the checkpoint before it; empty for the first


CheckpointChoice = int | Literal["best"] | None
"""The checkpoint at a step, that of the best evaluation, or the newest."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The content of a checkpoint."""

    step: int
    files: tuple[CheckpointFile, ...]


class StateWriter(Protocol):
    """Where an engine writes the files of one checkpoint. Runs in an upload thread."""

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store one file of pieces in this order. `name` is relative, without `..`; raises StorageError."""


class StateReader(Protocol):
    """Where an engine reads the files of one checkpoint; sizes and checksums are verified on the way.

    Attributes:
        weights_only: the model is not trained further: an engine that can, leaves out the optimizer's state.
    """

    @property
    def weights_only(self) -> bool:
        """Whether the optimizer's state is not needed."""

    def names(self) -> tuple[str, ...]:
        """Names of all files."""

    def read(self, name: str) -> bytes | bytearray:
        """Return one file, verified; raises CheckpointError when it is missing, torn or altered."""

    def stream(self, name: str) -> Iterator[memoryview]:
        """Yield one file in chunks; raises as `read`, at the end at the latest: it is verified then."""
