"""Loss functions: their arguments, `tw.gather`, `tw.log`, and the columns of teacher outputs.

No framework is imported: what belongs to Keras is recognized by the modules of its classes and functions.

A teacher `t` adds the column `teacher.t` to the data, its outputs (logits, or values in regression), and for each of
its layers that a student is to match the column `teacher.t/<layer>`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, Protocol, TypeVar

import numpy as np

from trainwright.core.errors import JobError
from trainwright.core.model_profile import ModelProfile

BATCH_LOSS = "batch_loss"  # in a job's inexact=: the loss may depend on how the batch is divided


# --- The order in which a loss or metric takes its arguments ----------------------------------------------------------


_KERAS_MODULES = ("keras.src.losses", "keras.src.metrics")
_TARGET_NAMES = frozenset({"y_true", "true", "truth", "ground_truth", "actual", "label", "labels", "target", "targets"})
_PREDICTION_NAMES = frozenset({"y_pred", "y_hat"})  # of outputs alone; targets can be a teacher's logits or predictions
_LIKELY_NAMES = frozenset({"pred", "preds", "predicted", "prediction", "predictions"})
_OUTPUT_NAMES = _PREDICTION_NAMES | _LIKELY_NAMES | frozenset({"logits", "output", "outputs"})


def takes_targets_first(function: Callable[..., Any]) -> bool:
    """Return whether a loss or metric takes (targets, outputs), as Keras' do.

    Losses, metrics and functions of `keras.losses` and `keras.metrics` do, and classes derived from them. Any other
    function does where its parameters, those of `forward` of a module of torch, say so: the first is called `y_true`,
    `true`, `truth`, `ground_truth`, `actual`, `label(s)` or `target(s)`, the second `y_pred` or `y_hat`, or the
    first `y` and the second `pred(s)`, `prediction(s)`, `logits` or `output(s)`. The rest take (outputs, targets).
    """
    while isinstance(function, functools.partial):
        if function.args:
            break
        function = function.func
    return is_keras_function(function) or _names_targets_first(function)


def outputs_first(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a loss or metric as a function of (outputs, targets); a loss object of Keras' without its reduction."""
    if is_keras_function(function) and hasattr(function, "reduction"):
        function = function.call  # type: ignore[attr-defined]  # of every `keras.losses.Loss`
        return lambda outputs, targets: function(targets, outputs)
    if not takes_targets_first(function):
        return function
    return lambda outputs, targets, **numbers: function(targets, outputs, **numbers)


def is_keras_function(function: Any) -> bool:
    """Return whether it is a function of `keras.losses` or `keras.metrics`, or an object of a class of theirs."""
    homes = [getattr(function, "__module__", None), *(kind.__module__ for kind in type(function).__mro__)]
    return any(isinstance(home, str) and home.startswith(_KERAS_MODULES) for home in homes)


def is_keras_class(kind: type) -> bool:
    """Return whether a class is Keras' own, and not one that a user derived from it."""
    return kind.__module__.partition(".")[0] == "keras"


def has_sum_reduction(function: Any) -> bool:
    """Return whether it is a loss object of Keras' whose value for a batch is a sum."""
    return is_keras_function(function) and getattr(function, "reduction", None) == "sum"


def _names_targets_first(function: Callable[..., Any]) -> bool:
    """Return whether the names of the first two parameters put the targets first."""
    first, second = _first_names(function)
    targets_first = first in _TARGET_NAMES or second in _PREDICTION_NAMES or (first == "y" and second in _OUTPUT_NAMES)
    return targets_first and first not in _OUTPUT_NAMES and second not in _TARGET_NAMES


def order_problem(what: str, function: Callable[..., Any]) -> str:
    """Return why the order of a Keras model's loss or metric, named `what` in the job, is not known; empty if it is."""
    if takes_targets_first(function):
        return ""
    first, second = _first_names(function)
    if second not in _LIKELY_NAMES or first in _OUTPUT_NAMES:
        return ""
    problem = f"{what} takes ({first}, {second}), which may be in Keras' order"
    return f"{problem}: call them (y_true, y_pred), or (outputs, targets)"


def _first_names(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the names of the first two positional parameters, each empty where there is none."""
    parameters = parameters_of(_called(function)).values()
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)][:2]
    first, second = [*names, "", ""][:2]
    return first, second


def parameters_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none for a function without a Python signature."""
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped).parameters
    except (TypeError, ValueError):
        return {}


def _called(function: Any) -> Any:
    """Return the function that has the parameters of a `tf.function`, a torch module or another callable object."""
    for name in ("python_function", "forward"):
        function = getattr(function, name, function)
    call = getattr(function, "__call__", None)  # noqa: B004
    return call if inspect.ismethod(call) and not hasattr(function, "__wrapped__") else function


# --- Metrics that are made again --------------------------------------------------------------------------------------


_BUILT = ("_built", "_variables")  # attributes of Keras' metrics that the first update sets


def metric_config(metric: Any) -> dict[str, Any]:
    """Return the configuration from which a metric of Keras is made again.

    Raises:
        JobError: a metric of the user's class cannot be made from it, or not with the same attributes.
    """
    config: dict[str, Any] = metric.get_config()
    kind = type(metric)
    if is_keras_class(kind):
        return config
    subject = f"metric class {kind.__qualname__}: each worker makes the metric again from its get_config()"
    remedy = "return the arguments of __init__() from get_config(), and pass **kwargs to super().__init__()"
    try:
        copy = kind.from_config(config)
    except TypeError as error:
        raise JobError([f"{subject}, which raised TypeError: {error}: {remedy}"]) from error
    attributes = vars(copy)  # one that was updated has more attributes
    for name, value in vars(metric).items():
        if name in attributes and name not in _BUILT and not _is_same(value, attributes[name]):
            argument = name.lstrip("_")
            raise JobError([f"{subject}, and would lose {argument!r}: return it from get_config()"])
    return config


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two attributes are equal, or cannot be compared, such as variables."""
    if type(value) is not type(other):
        return False
    if isinstance(value, FunctionType):
        cells = [tuple(cell.cell_contents for cell in each.__closure__ or ()) for each in (value, other)]
        return value.__code__ is other.__code__ and _is_same(*cells)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(item, other[key]) for key, item in value.items())
    if isinstance(value, np.ndarray):
        return np.array_equal(value, other, equal_nan=value.dtype.kind in "fc")
    return value == other if isinstance(value, bool | int | float | complex | str | bytes) else True


# --- The number of the step -------------------------------------------------------------------------------------------


def step_keywords(function: Any) -> tuple[str, ...]:
    """Return which of `step` and `total_steps` a loss or step takes.

    They are keyword-only arguments that no partial sets. A `step` whose default is neither None nor 0 means another
    thing, such as a width. A decorator's function with `**kwargs` takes what the decorated one does.
    """
    return tuple(name for name in ("step", "total_steps") if _takes(function, name))


def _takes(function: Any, name: str) -> bool:
    """Return whether a function takes the number of this name."""
    if isinstance(function, functools.partial) and not hasattr(function, "__wrapped__"):
        return name not in function.keywords and _takes(function.func, name)
    function = _called(function)
    parameters = parameters_of(function, follow_wrapped=False)
    if own := parameters.get(name):
        meant = own.default in (own.empty, None) or (type(own.default) is int and (name != "step" or own.default == 0))
        return own.kind is own.KEYWORD_ONLY and meant
    passes = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return passes and hasattr(function, "__wrapped__") and _takes(function.__wrapped__, name)


def with_step(function: Callable[..., Any], names: Collection[str], step: int, total_steps: int) -> Callable[..., Any]:
    """Return a loss or step with the numbers that it takes: `names` of `step_keywords`."""
    numbers = {"step": step, "total_steps": total_steps}
    return functools.partial(function, **{name: numbers[name] for name in names}) if names else function


# --- `tw.gather` and `tw.log` -----------------------------------------------------------------------------------------


_Tensor = TypeVar("_Tensor")
_gather_function: ContextVar[Callable[[Any], Any] | None] = ContextVar("gather", default=None)
_log_function: ContextVar[Callable[[str, Any], None] | None] = ContextVar("log", default=None)
EVALUATION_COLUMNS = frozenset({"loss", "step", "epoch", "seconds"})  # of `run.evaluations`, beside the metrics
_NOT_LOGGED = EVALUATION_COLUMNS | {"learning_rate", "gradient_norm", "samples_per_s", "wait_share", "generation"}


def gather(tensor: _Tensor) -> _Tensor:
    """Return the rows of the whole global batch. Each data rank computes a part of them; gradients flow back.

    For losses whose samples are compared with each other, such as CLIP's and SimCLR's. It may be called in `loss=`,
    `step=` and metrics. Rows come rank by rank, the ranks' own in their order, so that several gathered tensors fit
    each other; samples of weight 0 are left out. The function then returns one value for each row of the global batch,
    and each rank takes its own; or it returns one for each of its own rows. On one device, and outside of a run,
    `gather` returns the tensor as it is.

        def clip(outputs, targets):
            image, text = (tw.gather(each) for each in outputs)
            scores, labels = image @ text.t(), torch.arange(len(image))
            return sum(cross_entropy(each, labels, reduction="none") for each in (scores, scores.t())) / 2

    Args:
        tensor: a torch tensor (rows, ...), with this rank's rows of the micro-batch.

    Raises:
        JobError: the batch is cut into micro-batches, which never see each other, or this strategy cannot gather.
    """
    current = _gather_function.get()
    if type(tensor).__module__.partition(".")[0] in ("tensorflow", "keras"):
        raise JobError(["tw.gather is for torch tensors: it has no counterpart for TensorFlow models"])
    return tensor if current is None else current(tensor)


def log(name: str, value: Any) -> None:
    """Record a value of this step, as its mean over the global batch.

    It may be called in `loss=`, `step=` and metrics of torch models. Values are averaged over micro-batches and ranks
    as the loss is: a single number counts once for each sample of its micro-batch, and samples of weight 0 do not
    count. The means are columns of `run.history`, curves of the trackers (`train/<name>`), and charts of the report. In
    an evaluation they are metrics. Outside of a run it does nothing, nor in the `forward` of a model with `loss=`:
    return the value as an output there.

        def loss(outputs, targets):
            tw.log("entropy", Categorical(logits=outputs).entropy())
            return cross_entropy(outputs, targets, reduction="none")

    Args:
        name: of the value. The names of a job are those that its first micro-batch logs; a later one may leave a name
            out, and then does not count for it.
        value: a number, a torch tensor () or (samples, ...), or `Terms`; no gradient flows through it.

    Raises:
        JobError: the name is new, or is that of a metric or of a column of the history; the value is not a tensor with
            a row for each sample; or the model is a TensorFlow model.
    """
    current = _log_function.get()
    if current is not None:
        current(name, value)


def refuse_log(name: str, _value: Any) -> None:
    """Refuse a value of `tw.log` in a TensorFlow model's functions. Raises JobError."""
    remedy = "leave it out, return it from step= beside the loss, or make it one of metrics="
    raise JobError([f"tw.log({name!r}) is for torch models: {remedy}"])


def log_name_problem(name: Any, metrics: Collection[str] = ()) -> str:
    """Return why a value cannot have this name; empty where it can."""
    if not isinstance(name, str) or not name:
        return f"a value is logged as {name!r}: use a text"
    if name in metrics or name in _NOT_LOGGED:
        return f"the logged value {name!r} has the name of a metric or of a column of the history: use another name"
    return ""


@contextmanager
def gather_with(by: Callable[[Any], Any]) -> Iterator[None]:
    """Let `gather` call a function."""
    token = _gather_function.set(by)
    try:
        yield
    finally:
        _gather_function.reset(token)


@contextmanager
def log_with(by: Callable[[str, Any], None]) -> Iterator[None]:
    """Let `log` call a function."""
    token = _log_function.set(by)
    try:
        yield
    finally:
        _log_function.reset(token)


# --- Teacher columns --------------------------------------------------------------------------------------------------


_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+")
_TEACHER_PREFIX = "teacher."

TEACHER_WEIGHTS_OUTPUT = "teachers"  # the output with the logits of the teachers' weights, where these are learned


def teacher_column(teacher: str, layer: str = "") -> str:
    """Return the column of a teacher's outputs, or of one of its layers."""
    return f"{_TEACHER_PREFIX}{teacher}/{layer}" if layer else f"{_TEACHER_PREFIX}{teacher}"


def bridge_output(student: str, number: int) -> str:
    """Return the output with the student's layer of its n-th match, projected to the teacher's width."""
    return f"{student}/match-{number}"


def layer_output(teacher: str, layer: str) -> str:
    """Return the output with a layer of a student that teaches others."""
    return f"{teacher}/{layer}"


def name_problems(what: str, name: str) -> list[str]:
    """Describe problems of a teacher's or student's name, which becomes part of column and parameter names."""
    if _NAME_PATTERN.fullmatch(name):
        return []
    return [f"{what} is named {name!r}: use letters, digits, dashes and underscores"]


class InlineTeacher(Protocol):
    """A teacher that runs in the student's step."""

    @property
    def name(self) -> str:
        """Name of the teacher."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Target columns that it needs."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it adds."""

    def identity(self) -> str:
        """Return whether another teacher gives the same outputs."""

    def module(self) -> Any:
        """Call the model: {column: tensor} -> its own columns, without gradients, as in evaluation."""

    def profile(self, sample: Mapping[str, Any]) -> ModelProfile:
        """Return its costs, given the columns of a row."""
