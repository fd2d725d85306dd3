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
_TRIAL_ROWS, _TRIALS = 32, 3  # rows and trials of a loss with random numbers
_RANDOM_ERROR, _RANDOM_SPREADS = 0.4, 6.0  # bounds for such a loss: relative error, and error in ranges of the trials
_FLOAT32_ERROR, _TF32_ERROR, _HALF_ERROR = 1e-4, 1e-2, 0.1  # relative errors: GPUs multiply float32 in TF32
_MIN_ERROR = 1e-5  # smaller errors can be rounding
_log = logging.getLogger(__name__)


@contextmanager
def variables_kept(model: keras.Model, others: Sequence[tf.Variable] = ()) -> Iterator[None]:
    """Restore the values of a model's variables, and of others, after the block."""
    seeds = [generator.state for generator in seed_generators(model)]
    parts = [*tf.train.TrackableView(model).descendants(), *model.metrics_variables, *seeds, *others]
    items = [part.value if isinstance(part, keras.Variable) else part for part in parts]
    variables = [each for each in items if isinstance(each, tf.Variable)]
    values = [tf.identity(each) for each in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


@contextmanager
def gradients_recorded(optimizers: Sequence[Any]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Record the gradients that the block applies in the dict, by number and optimizer, instead of applying them."""
    recorded: dict[str, npt.NDArray[Any]] = {}
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(replaced(optimizer, "apply", partial(_record, recorded, optimizer.name)))
        yield recorded


def _record(recorded: dict[str, Any], name: str, gradients: Any, trainable_variables: Any = None) -> None:
    """Keep gradients instead of applying them."""
    values = [tf.reshape(tf.convert_to_tensor(each), [-1]).numpy() for each in gradients if each is not None]
    recorded[f"gradient {len(recorded) + 1}, for {name!r},"] = np.concatenate(values)


def check_losses(
    what: str, model: keras.Model, measure: Callable[[int], LossValues], where: str, *, drawn: bool
) -> None:
    """Raise JobError if one row twice has another loss than the row. If `measure` raises, log a warning.

    Args:
        what: the subject of the error.
        model: its types decide on the tolerance.
        measure: (n) -> losses or gradients of one row n times.
        where: the rank, for errors.
        drawn: also check losses with random numbers, on 96 rows three times; otherwise they pass.
    """
    try:
        problem = _difference(measure, _tolerance(model), drawn=drawn)
    except Exception as error:  # of the user's code on other rows than those of a step
        _log.warning("%s was not tried on divided batches: %s: %s", what, type(error).__name__, error)
        return
    if problem is not None:
        size, doubled = problem
        raise JobError(
            [
                f"{what} is no mean over rows: {size:.6g} for one row, and {doubled:.6g} for the same row twice; this "
                "plan divides the batch, so that the result would depend on the plan: return or add means over rows of "
                "losses of each row alone; or run on one worker with accumulation=1; or accept the difference with "
                f'inexact=("{BATCH_LOSS}",)'
            ],
            where=where,
        )


def _difference(measure: Callable[[int], LossValues], tolerance: float, *, drawn: bool) -> tuple[float, float] | None:
    """Return the sizes of a value for one row and for the row twice, if they differ."""
    first, repeated = measure(1), measure(1)
    if all(np.array_equal(*each, equal_nan=True) for each in zip(first, repeated, strict=True)):
        pairs = zip(first, measure(2), strict=True)
        differing = [(a, b) for a, b in pairs if _norm(a - b) > tolerance * max(_norm(a), _norm(b)) + _MIN_ERROR]
    elif drawn:
        trials = [[np.stack(each) for each in zip(*(measure(rows) for _ in range(_TRIALS)), strict=True)]
                  for rows in (_TRIAL_ROWS, 2 * _TRIAL_ROWS)]  # fmt: skip
        differing = [(a.mean(0), b.mean(0)) for a, b in zip(*trials, strict=True) if _trials_differ(a, b)]
    else:
        return None
    return (_norm(differing[0][0]), _norm(differing[0][1])) if differing else None


def _trials_differ(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    """Return whether trials, in the first dimension, differ by more than their random numbers explain."""
    means = first.mean(0), second.mean(0)
    error, spread = _norm(means[0] - means[1]), max(_norm(np.ptp(each, axis=0)) for each in (first, second))
    return error > max(_RANDOM_ERROR * max(map(_norm, means)), _RANDOM_SPREADS * spread) + _MIN_ERROR


def _norm(value: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(value))


def _tolerance(model: keras.Model) -> float:
    if any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers()):
        return _HALF_ERROR
    return _TF32_ERROR if tf.config.get_visible_devices("GPU") else _FLOAT32_ERROR
