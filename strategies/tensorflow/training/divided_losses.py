"""Check that the parts of a batch add up to the batch: a loss must be a mean over its rows.

One row twice must have the loss of the row. So means over rows, tokens or weights pass, and so do batch norms. A sum
over rows does not, nor a loss that compares the rows with each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainwright.core.errors import JobError
from trainwright.core.loss_api import BATCH_LOSS
from trainwright.strategies.tensorflow.tensorflow_compat import replaced
from trainwright.strategies.tensorflow.training.train_state import seed_generators

LossValues = list[npt.NDArray[Any]]
_MANY, _TRIALS = 32, 3  # rows and trials of a loss with random numbers
_ROUGH, _SPREADS = 0.4, 6.0  # of such a loss: the relative error, and the error in ranges of the trials
_EXACT, _ON_GPU, _HALF = 1e-4, 1e-2, 0.1  # relative errors: GPUs multiply float32 in TF32
_LEAST = 1e-5  # an error that is not told from rounding
_log = logging.getLogger(__name__)


@contextmanager
def variables_kept(model: keras.Model, others: Sequence[tf.Variable] = ()) -> Iterator[None]:
    """Give the variables of a model, and others, their values back after the block."""
    seeds = [generator.state for generator in seed_generators(model)]
    parts = [*tf.train.TrackableView(model).descendants(), *model.metrics_variables, *seeds, *others]
    held = [part.value if isinstance(part, keras.Variable) else part for part in parts]
    variables = [each for each in held if isinstance(each, tf.Variable)]
    before = [tf.identity(each) for each in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


@contextmanager
def gradients_recorded(optimizers: Sequence[Any]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield a dict that gets the gradients, by number and optimizer, which the block applies. None is applied."""
    found: dict[str, npt.NDArray[Any]] = {}
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(replaced(optimizer, "apply", partial(_record, found, optimizer.name)))
        yield found


def _record(found: dict[str, Any], name: str, gradients: Any, trainable_variables: Any = None) -> None:
    """Keep gradients instead of applying them."""
    given = [tf.reshape(tf.convert_to_tensor(each), [-1]).numpy() for each in gradients if each is not None]
    found[f"gradient {len(found) + 1}, for {name!r},"] = np.concatenate(given)


def check_losses(
    what: str, model: keras.Model, measure: Callable[[int], LossValues], where: str, *, drawn: bool
) -> None:
    """Raise JobError if one row twice has another loss than the row. Without a result, a warning is logged.

    Args:
        what: the subject of the error.
        model: whose types decide on the tolerance.
        measure: (n) -> losses or gradients of one row n times.
        where: the rank, for errors.
        drawn: also check losses with random numbers, on 96 rows three times; else they pass.
    """
    try:
        problem = _difference(measure, _tolerance(model), drawn=drawn)
    except Exception as error:  # of the user's code on other rows than those of a step
        _log.warning("%s was not tried on divided batches: %s: %s", what, type(error).__name__, error)
        return
    if problem is not None:
        one, two = problem
        raise JobError(
            [
                f"{what} is no mean over rows: {one:.6g} for one row, and {two:.6g} for the same row twice; this plan "
                "divides the batch, so that the result would depend on the plan: return or add means over rows of "
                "losses of each row alone; or run on one worker with accumulation=1; or accept the difference with "
                f'inexact=("{BATCH_LOSS}",)'
            ],
            where=where,
        )


def _difference(measure: Callable[[int], LossValues], tolerance: float, *, drawn: bool) -> tuple[float, float] | None:
    """Return the sizes of a value for one row and for the row twice, where they differ."""
    one, again = measure(1), measure(1)
    if all(np.array_equal(*each, equal_nan=True) for each in zip(one, again, strict=True)):
        pairs = zip(one, measure(2), strict=True)
        wrong = [(a, b) for a, b in pairs if _norm(a - b) > tolerance * max(_norm(a), _norm(b)) + _LEAST]
    elif drawn:
        trials = [[np.stack(each) for each in zip(*(measure(rows) for _ in range(_TRIALS)), strict=True)]
                  for rows in (_MANY, 2 * _MANY)]  # fmt: skip
        wrong = [(a.mean(0), b.mean(0)) for a, b in zip(*trials, strict=True) if _differ(a, b)]
    else:
        return None
    return (_norm(wrong[0][0]), _norm(wrong[0][1])) if wrong else None


def _differ(one: npt.NDArray[Any], two: npt.NDArray[Any]) -> bool:
    """Return whether trials, in the first dimension, differ by more than their random numbers explain."""
    error, spread = _norm(one.mean(0) - two.mean(0)), max(_norm(np.ptp(each, axis=0)) for each in (one, two))
    return error > max(_ROUGH * max(_norm(one.mean(0)), _norm(two.mean(0))), _SPREADS * spread) + _LEAST


def _norm(value: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(value))


def _tolerance(model: keras.Model) -> float:
    if any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers()):
        return _HALF
    return _ON_GPU if tf.config.get_visible_devices("GPU") else _EXACT
