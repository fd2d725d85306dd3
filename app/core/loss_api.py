"""Loss functions: the order of their arguments, `tw.gather`, the columns of teacher outputs, and the loss of students.

No framework is imported: what belongs to Keras is recognized by the modules of its classes and functions.

A teacher `t` adds the column `teacher.t` to the data, its outputs (logits, or values in regression), and for each of
its layers that a student is to match the column `teacher.t/<layer>`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field, model_validator

from trainwright.core.errors import JobError
from trainwright.core.model_profile import ModelProfile
from trainwright.core.strict_model import StrictModel

# --- The order in which a loss or metric takes its arguments ----------------------------------------------------------


_KERAS_MODULES = ("keras.src.losses", "keras.src.metrics")
_TARGET_NAMES = frozenset({"y_true", "true", "truth", "ground_truth", "label", "labels", "target", "targets"})
_OUTPUT_NAMES = frozenset(
    {"y_pred", "pred", "preds", "predicted", "prediction", "predictions", "y_hat", "logits", "output", "outputs"}
)


def takes_targets_first(function: Callable[..., Any]) -> bool:
    """Return whether a loss or metric takes (targets, outputs), as Keras' do.

    Losses, metrics and functions of `keras.losses` and `keras.metrics` do, and classes derived from them. Any other
    function does where its parameters say so: the first is called `y_true`, `true`, `truth`, `label(s)` or `target(s)`,
    or the second `y_pred`, `pred`, `prediction(s)`, `y_hat`, `logits` or `output(s)`. The rest take (outputs, targets).
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
    return (lambda outputs, targets: function(targets, outputs)) if takes_targets_first(function) else function


def is_keras_function(function: Any) -> bool:
    """Return whether it is a function of `keras.losses` or `keras.metrics`, or an object of a class of theirs."""
    homes = [getattr(function, "__module__", None), *(kind.__module__ for kind in type(function).__mro__)]
    return any(isinstance(home, str) and home.startswith(_KERAS_MODULES) for home in homes)


def has_sum_reduction(function: Any) -> bool:
    """Return whether it is a loss object of Keras' whose value for a batch is a sum."""
    return is_keras_function(function) and getattr(function, "reduction", None) == "sum"


def _names_targets_first(function: Callable[..., Any]) -> bool:
    """Return whether the names of the first two parameters put the targets first."""
    try:
        parameters = [*inspect.signature(getattr(function, "python_function", function)).parameters.values()]
    except (TypeError, ValueError):  # of a function that is not Python's
        return False
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)][:2]
    first, second = [*names, "", ""][:2]
    targets_first = first in _TARGET_NAMES or second in _OUTPUT_NAMES
    return targets_first and first not in _OUTPUT_NAMES and second not in _TARGET_NAMES


# --- `tw.gather` ------------------------------------------------------------------------------------------------------


_Tensor = TypeVar("_Tensor")
_gather_function: ContextVar[Callable[[Any], Any] | None] = ContextVar("gather", default=None)


def gather(tensor: _Tensor) -> _Tensor:
    """Return the rows of the whole global batch, of which each data rank computes a part; gradients flow back.

    For losses whose samples are compared with each other, such as CLIP's and SimCLR's. It may be called in `loss=`,
    `step=` and metrics. Rows come rank by rank, the ranks' own in their order, so that several gathered tensors fit
    each other; samples of weight 0 are left out. The function then returns one value for each row of the global batch,
    of which each rank takes its own, or one for each of its own rows. On one device, and outside of a run, it returns
    the tensor as it is.

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


@contextmanager
def gather_with(by: Callable[[Any], Any]) -> Iterator[None]:
    """Let `gather` call a function."""
    token = _gather_function.set(by)
    try:
        yield
    finally:
        _gather_function.reset(token)


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


# --- The loss of students ---------------------------------------------------------------------------------------------


_Divergence = Literal["kl", "reverse_kl", "jensen_shannon", "mse"]


class Match(StrictModel):
    """A layer of the student that learns the hidden states of a teacher's layer.

    A layer is named as in the model's `named_modules()` (torch), or as a Keras layer; `name:1` and `name:key` take an
    item of what it gives, which is a tuple or a dict. Where the two differ in width, a linear map that is trained with
    the student comes in between.

    Attributes:
        student: the student's layer.
        teacher: the teacher's.
        of: the teacher's name; it may be left out where there is one.
        by: `mse`, the mean squared difference, for hidden states and for maps of attention (rows, heads, queries,
            keys), as in TinyBERT (Jiao et al., 2020); `cosine`, one minus the cosine along the last axis, as in
            DistilBERT (Sanh et al., 2019); `attention`, that of attention transfer for feature maps (Zagoruyko &
            Komodakis, 2017): the mean squared difference of where they are active, squares summed over the channels,
            at length 1.
        weight: of this term in a sample's or token's loss.
    """

    student: Annotated[str, Field(min_length=1)]
    teacher: Annotated[str, Field(min_length=1)]
    of: str = ""
    by: Literal["mse", "cosine", "attention"] = "mse"
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class SoftLoss(StrictModel):
    """The loss of a student: labels, teacher outputs and matched layers.

    The loss of a sample (of a token in language models), with D the divergence at temperature T and w the teachers'
    weights, is alpha * hard + (1 - alpha) * T^2 * sum of w * D(teacher, student), plus the sum of the matches' weights
    times their distances (Hinton et al., 2015). T^2 keeps the size of the gradient as T grows. The hard loss is the
    job's; its weights, such as a mask of tokens, count for all terms.

    Attributes:
        kind: `classification`, logits (rows, classes); `language_model`, logits (rows, tokens, vocabulary), a loss for
            each token; `multi_label`, logits (rows, labels), each label by itself; `regression`, values (rows, ...).
        alpha: share of the hard loss; 0 leaves it out, as where there are no labels.
        temperature: T, by which both logits are divided; none in regression.
        divergence: `kl`, of the student from the teacher, KL(teacher || student); `reverse_kl`, KL(student || teacher);
            `jensen_shannon`; `mse`, the mean squared difference of the logits; or a function (student, teacher) ->
            one value per sample or token, given both logits divided by T. In multi-label all are of the two outcomes
            of each label, summed over the labels. In regression it is always the mean squared difference, or a
            function of the two values.
        matches: layers that are to be alike.
        combine: weights of several teachers: `fixed`, by `weights`; `confidence`, for each sample or token by the
            softmax over the teachers of minus their own hard loss with its label (for two teachers that of CA-MKD,
            Zhang et al., 2022), or where there is no hard loss of minus the entropy of their outputs; `learned`, the
            softmax of trained numbers, which follow the hard loss of the teachers' mixture and never the divergence.
        weights: teacher -> weight, for `fixed`; 1 where none is given. Their sum is made 1.
        output: which of the student's outputs is compared with the teachers', where it has several; by default the
            only one, or `logits`.
        mask: target column with a weight for each sample or token, where there is no hard loss to give it.
    """

    kind: Literal["classification", "multi_label", "regression", "language_model"] = "classification"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    divergence: _Divergence | Callable[[Any, Any], Any] = "kl"
    matches: tuple[Match, ...] = ()
    combine: Literal["fixed", "confidence", "learned"] = "fixed"
    weights: Mapping[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    output: str = ""
    mask: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> SoftLoss:
        problems = [*self._idle(), *self._of_values()]
        if self.weights and self.combine != "fixed":
            problems.append(f'weights= are those of combine="fixed": leave them out for combine={self.combine!r}')
        if self.weights and not sum(self.weights.values()):
            problems.append("weights= are all 0: give one teacher a weight")
        if problems:
            raise JobError(problems)
        return self

    @property
    def factor(self) -> float:
        """Weight of a divergence: (1 - alpha) * T^2."""
        return (1.0 - self.alpha) * (1.0 if self.kind == "regression" else self.temperature**2)

    def share(self, teachers: tuple[str, ...]) -> tuple[float, ...]:
        """Return the fixed weights of teachers, in their order, with sum 1. Raises JobError for a sum of 0."""
        given = [self.weights.get(name, 0.0 if self.weights.keys() & {*teachers} else 1.0) for name in teachers]
        total = sum(given)
        if not total:
            raise JobError([f"weights= give none to {', '.join(teachers)}: give one of them a weight"])
        return tuple(weight / total for weight in given)

    def _idle(self) -> list[str]:
        if self.alpha == 1.0 and not self.matches:
            return ["alpha=1 leaves nothing to learn from a teacher: use less than 1, or matches="]
        return []

    def _of_values(self) -> list[str]:
        """Describe options that regression does not use."""
        if self.kind != "regression":
            return []
        problems = []
        if "temperature" in self.model_fields_set:
            problems.append("temperature= is for logits: leave it out for kind='regression'")
        if isinstance(self.divergence, str) and self.divergence != "mse" and "divergence" in self.model_fields_set:
            problems.append(f'divergence={self.divergence!r} is for logits: use "mse" or a function in regression')
        if self.combine == "confidence" and self.alpha == 0:
            problems.append("combine='confidence' needs a hard loss in regression: values have no entropy")
        return problems
