"""The order in which a loss or metric takes its arguments: (outputs, targets), or Keras' (targets, outputs).

No framework is imported: what belongs to Keras is recognized by the modules of its classes and functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_HOMES = ("keras.src.losses", "keras.src.metrics")
_TARGETS = frozenset({"y_true", "true", "truth", "ground_truth", "label", "labels", "target", "targets"})
_OUTPUTS = frozenset(
    {"y_pred", "pred", "preds", "predicted", "prediction", "predictions", "y_hat", "logits", "output", "outputs"}
)


def takes_targets_first(function: Callable[..., Any]) -> bool:
    """Say whether a loss or metric takes (targets, outputs), as Keras' do.

    Losses, metrics and functions of `keras.losses` and `keras.metrics` do, and classes derived from them. Any other
    function does where its parameters say so: the first is called `y_true`, `true`, `truth`, `label(s)` or `target(s)`,
    or the second `y_pred`, `pred`, `prediction(s)`, `y_hat`, `logits` or `output(s)`. The rest take (outputs, targets).
    """
    while isinstance(function, functools.partial):
        if function.args:
            break
        function = function.func
    return is_of_keras(function) or _named_so(function)


def in_order(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a loss or metric as a function of (outputs, targets); a loss object of Keras' without its reduction."""
    if is_of_keras(function) and hasattr(function, "reduction"):
        function = function.call  # type: ignore[attr-defined]  # of every `keras.losses.Loss`
        return lambda outputs, targets: function(targets, outputs)
    return (lambda outputs, targets: function(targets, outputs)) if takes_targets_first(function) else function


def is_of_keras(function: Any) -> bool:
    """Say whether it is a function of `keras.losses` or `keras.metrics`, or an object of a class of theirs."""
    homes = [getattr(function, "__module__", None), *(kind.__module__ for kind in type(function).__mro__)]
    return any(isinstance(home, str) and home.startswith(_HOMES) for home in homes)


def is_summed(function: Any) -> bool:
    """Say whether it is a loss object of Keras' whose value for a batch is a sum."""
    return is_of_keras(function) and getattr(function, "reduction", None) == "sum"


def _named_so(function: Callable[..., Any]) -> bool:
    """Whether the names of the first two parameters say that the targets come first."""
    try:
        parameters = [*inspect.signature(getattr(function, "python_function", function)).parameters.values()]
    except (TypeError, ValueError):  # of a function that is not Python's
        return False
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)][:2]
    first, second = [*names, "", ""][:2]
    targets_first = first in _TARGETS or second in _OUTPUTS
    return targets_first and first not in _OUTPUTS and second not in _TARGETS
