"""Which losses and metrics take the targets first, by what they are and how their parameters are called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from trainwright.core.loss_api import has_sum_reduction, outputs_first, step_keywords, takes_targets_first, with_step


def as_keras(y_true: Any, y_pred: Any) -> Any:
    return y_true, y_pred


def in_words(labels: Any, scores: Any, weight: float = 1.0) -> Any:
    return labels, scores


def in_statistics(actual: Any, predicted: Any) -> Any:
    return actual, predicted


def by_the_second(y: Any, y_pred: Any) -> Any:
    return y, y_pred


def by_both(y: Any, outputs: Any) -> Any:
    return y, outputs


def documented(outputs: Any, targets: Any) -> Any:
    return outputs, targets


def swapped(y_pred: Any, y_true: Any) -> Any:
    return y_pred, y_true


def of_torch(input: Any, target: Any) -> Any:
    return input, target


def open_ended(*given: Any) -> Any:
    return given


class Focal:
    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return y_true, y_pred


def distilled(student: Any, logits: Any) -> Any:
    """The targets are a teacher's logits."""
    return student, logits


def reconstruction(x: Any, output: Any) -> Any:
    return x, output


class Module:
    """As a module of torch, whose parameters are those of `forward`."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.forward(*given, **named)

    def forward(self, y_true: Any, y_pred: Any) -> Any:
        return y_true, y_pred


class OfKeras:
    """Stands where Keras' own losses do."""

    __module__ = "keras.src.losses.loss"

    def __init__(self, reduction: str = "sum_over_batch_size") -> None:
        self.reduction = reduction

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_true, y_pred


class Derived(OfKeras):
    def call(self, one: Any, other: Any) -> Any:
        return one, other


FIRST = [
    as_keras, in_words, in_statistics, by_the_second, by_both, functools.partial(in_words, weight=2.0), Focal(),
    Module(), OfKeras(), Derived(),
]  # fmt: skip
LAST = [
    documented, swapped, of_torch, open_ended, distilled, reconstruction, lambda o, t: (o, t),
    functools.partial(as_keras, "bound"), max,
]  # fmt: skip


@pytest.mark.parametrize("function", FIRST)
def test_targets_come_first_where_keras_or_the_names_say_so(function: Callable[..., Any]) -> None:
    assert takes_targets_first(function)
    assert outputs_first(function)("outputs", "targets") == ("targets", "outputs")


@pytest.mark.parametrize("function", LAST)
def test_outputs_come_first_otherwise(function: Callable[..., Any]) -> None:
    assert not takes_targets_first(function)


def test_in_order_gives_outputs_first_otherwise() -> None:
    assert outputs_first(documented)("outputs", "targets") == ("outputs", "targets")


def numbered(outputs: Any, targets: Any, *, step: int, total_steps: int = 9) -> Any:
    return step, total_steps


class NumberedModule(Module):
    def forward(self, y_true: Any, y_pred: Any, *, step: int = 0) -> Any:
        return y_true, y_pred, step


class DecoratedModule(NumberedModule):
    forward = functools.wraps(NumberedModule.forward)(lambda self, *given, **named: given)


class Called:
    def __call__(self, outputs: Any, targets: Any, *, step: int | None = None) -> Any:
        return outputs


def strided(outputs: Any, targets: Any, *, step: float = 0.1, total_steps: int) -> Any:
    """The step of a grid."""
    return outputs


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (numbered, ("step", "total_steps")),
        (functools.partial(numbered, step=3), ("total_steps",)),
        (functools.partial(NumberedModule(), temperature=2.0), ("step",)),
        (functools.wraps(numbered)(lambda *given, **named: given), ("step", "total_steps")),
        (functools.wraps(numbered)(lambda outputs, targets: outputs), ()),
        (functools.wraps(numbered)(lambda *given, total_steps: given), ("total_steps",)),
        (functools.partial(functools.wraps(numbered)(lambda *given, **named: given), step=1), ("total_steps",)),
        (
            functools.update_wrapper(functools.partial(lambda *given, **named: given, 1), numbered),
            ("step", "total_steps"),
        ),
        (strided, ("total_steps",)),
        (Called(), ("step",)),
        (DecoratedModule(), ("step",)),
        (lambda outputs, targets, step: step, ()),
        (open_ended, ()),
        (max, ()),
        (None, ()),
    ],
)
def test_a_loss_takes_the_step_where_it_is_a_keyword_that_no_partial_sets(function: Any, names: Any) -> None:
    assert step_keywords(function) == names


def test_a_loss_in_keras_order_takes_the_step_too() -> None:
    function = with_step(outputs_first(NumberedModule()), step_keywords(NumberedModule()), 5, 9)
    assert function("outputs", "targets") == ("targets", "outputs", 5)


def test_only_a_loss_of_keras_is_summed() -> None:
    assert has_sum_reduction(Derived("sum")) and not has_sum_reduction(Derived())
    assert not has_sum_reduction(type("Other", (), {"reduction": "sum"})())
