"""Divergences of a student's outputs from a teacher's, and the tensor functions that they need from a framework.

`distillation/tensor_ops.py` in `strategies/torch` and in `strategies/tensorflow` has their `TensorOps`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from trainwright.core.errors import JobError
from trainwright.core.frameworks import load_module
from trainwright.core.loss_api import InlineTeacher

if TYPE_CHECKING:
    from trainwright.core.soft_loss import SoftLoss

_FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}


class TensorOps(Protocol):
    """The tensor functions of a framework that the losses use.

    Attributes:
        channels: the usual axis of a feature map's channels.
    """

    channels: int

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor of the framework."""

    def shape(self, value: Any) -> tuple[int | None, ...]:
        """Sizes; None if unknown."""

    def wide(self, value: Any) -> Any:
        """As float64 if it is that, else as float32: half precision is too coarse for a divergence."""

    def typed(self, value: Any, like: Any) -> Any:
        """In the type of another tensor."""

    def near(self, value: Any, like: Any) -> Any:
        """In the type and on the device of another tensor, without a gradient."""

    def held(self, value: Any) -> Any:
        """Without a gradient."""

    def precisely(self, like: Any) -> AbstractContextManager[Any]:
        """Return a context in which nothing is computed in half precision."""

    def called(self, function: Callable[..., Any], outputs: Any, targets: Any, *, metric: bool = False) -> Any:
        """Call a loss or metric of the user, as the engines do."""

    def answers(self, teacher: InlineTeacher, columns: Mapping[str, Any], like: Any) -> Mapping[str, Any]:
        """Return the columns of an inline teacher, on the device of a tensor."""

    def log_softmax(self, logits: Any) -> Any:
        """Along the last axis."""

    def log_sigmoid(self, logits: Any) -> Any:
        """Of each number."""

    def exp(self, value: Any) -> Any:
        """Of each number."""

    def log(self, value: Any) -> Any:
        """Of each number."""

    def log_add(self, one: Any, other: Any) -> Any:
        """log(exp(one) + exp(other))."""

    def log_total(self, value: Any) -> Any:
        """log of the sum of exp over the first axis."""

    def softmax(self, value: Any) -> Any:
        """Along the first axis."""

    def counted(self, chance: Any, value: Any) -> Any:
        """probability * value; 0 where the probability is 0, whatever the value."""

    def total(self, value: Any, axes: tuple[int, ...]) -> Any:
        """The sum over some axes."""

    def mean(self, value: Any, axes: tuple[int, ...]) -> Any:
        """The mean over some axes."""

    def unit(self, value: Any) -> Any:
        """Normalized to length 1 along the last axis."""

    def stacked(self, values: Sequence[Any]) -> Any:
        """Stack along a new first axis."""

    def unstacked(self, value: Any) -> Sequence[Any]:
        """The parts along the first axis."""

    def paired(self, one: Any, other: Any) -> Any:
        """Stack along a new last axis."""

    def transposed(self, value: Any, axes: tuple[int, ...]) -> Any:
        """With its axes in this order."""

    def flat(self, value: Any) -> Any:
        """(rows, ...) as (rows, numbers)."""

    def shortened(self, value: Any, like: Any) -> Any:
        """(rows, tokens): the first tokens, as many as another tensor has."""

    def widened(self, value: Any, dimensions: int) -> Any:
        """With axes of size 1 behind its own."""

    def first(self, outputs: Any) -> Any:
        """The first tensor of a model's outputs."""


def tensor_ops_for(outputs: Any) -> TensorOps:
    """Return the functions for the framework of some outputs. Raises JobError if they are no tensors."""
    value = outputs
    while isinstance(value, Mapping | tuple | list) and len(value):
        value = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
    for kind in type(value).__mro__:
        framework = _FRAMEWORKS.get(kind.__module__.partition(".")[0])
        if framework:
            tensors: TensorOps = load_module(f"trainwright.strategies.{framework}.distillation.tensor_ops").TENSORS
            return tensors
    raise JobError([f"the model returned {type(value).__name__}: return tensors of torch or TensorFlow"])


def divergence(soft: SoftLoss, student: Any, teacher: Any, ops: TensorOps) -> Any:
    """Return D(teacher, student) at temperature T, without the factor T^2.

    Args:
        student, teacher: logits or values of one shape, wide.

    Returns:
        One value for each sample or token; in multi-label one for each label, in regression one for each number.
    """
    if soft.kind == "regression":
        return soft.divergence(student, teacher) if callable(soft.divergence) else _squared(student - teacher)
    student, teacher = student / soft.temperature, teacher / soft.temperature
    if callable(soft.divergence):
        return soft.divergence(student, teacher)
    if soft.divergence == "mse":
        squared = _squared(student - teacher)
        return squared if soft.kind == "multi_label" else ops.mean(squared, (len(ops.shape(squared)) - 1,))
    theirs, own = _outcomes(soft, teacher, ops), _outcomes(soft, student, ops)
    if soft.divergence == "kl":
        return _kl(theirs, own, ops)
    if soft.divergence == "reverse_kl":
        return _kl(own, theirs, ops)
    middle = ops.log_add(own, theirs) - math.log(2.0)
    return _kl(theirs, middle, ops) * 0.5 + _kl(own, middle, ops) * 0.5


def teacher_entropy(soft: SoftLoss, teacher: Any, ops: TensorOps) -> Any:
    """Return the entropy of a teacher's outputs, for each sample, token or label."""
    chances = _outcomes(soft, teacher, ops)
    return -_last_total(ops.counted(ops.exp(chances), chances), ops)


def combined_teacher(soft: SoftLoss, said: Any, shares: Any, ops: TensorOps) -> Any:
    """Return the outputs of several teachers as one: the logits of their mean probabilities, or the mean of values.

    Args:
        said: (teachers, rows, ...) logits or values.
        shares: (teachers, rows, 1, ...) whose sum over the teachers is 1.
    """
    if soft.kind == "regression":
        return ops.total(said * shares, (0,))
    logs = ops.log(shares)
    if soft.kind == "multi_label":
        return ops.log_total(ops.log_sigmoid(said) + logs) - ops.log_total(ops.log_sigmoid(-said) + logs)
    return ops.log_total(ops.log_softmax(said) + logs)


def _outcomes(soft: SoftLoss, logits: Any, ops: TensorOps) -> Any:
    """Return log probabilities along the last axis: of the classes, or of yes and no for each label."""
    if soft.kind == "multi_label":
        return ops.paired(ops.log_sigmoid(logits), ops.log_sigmoid(-logits))
    return ops.log_softmax(logits)


def _kl(one: Any, other: Any, ops: TensorOps) -> Any:
    """Return KL(one || other) of log probabilities along the last axis."""
    return _last_total(ops.counted(ops.exp(one), one - other), ops)


def _last_total(value: Any, ops: TensorOps) -> Any:
    return ops.total(value, (len(ops.shape(value)) - 1,))


def _squared(value: Any) -> Any:
    return value * value
