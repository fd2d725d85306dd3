"""Losses with their derivatives, one value per sample or element; nothing here reduces over samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.strategies.reference.model import Array


class Graded(NamedTuple):
    """Terms that carry their derivative.

    Attributes:
        values: (rows,) or (rows, k).
        gradient: of the outputs' shape. `values[i]` depends on `outputs[i, ...]` alone, and `gradient[i, ...]` is its
            derivative by them; for values of (rows, k) the same with (i, j).
        weights: of the shape of `values`, or something that broadcasts to it.
    """

    values: Array
    gradient: Array
    weights: npt.ArrayLike = 1.0


def cross_entropy(outputs: Array, targets: npt.NDArray[Any]) -> Graded:
    """-log softmax(outputs)[target]; outputs (..., classes), integer targets (...)."""
    shifted = outputs - outputs.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=-1, keepdims=True)
    chosen = np.asarray(targets, np.int64)[..., None]
    values = (np.log(sums) - np.take_along_axis(shifted, chosen, axis=-1))[..., 0]
    gradient = exponentials / sums
    np.put_along_axis(gradient, chosen, np.take_along_axis(gradient, chosen, axis=-1) - 1.0, axis=-1)
    return Graded(values, gradient)


def squared_error(outputs: Array, targets: npt.NDArray[Any]) -> Graded:
    """(output - target) squared, element by element; both (rows, k), values (rows, k)."""
    difference = outputs - np.asarray(targets, np.float64).reshape(outputs.shape)
    return Graded(difference * difference, 2.0 * difference)


def accuracy(outputs: Array, targets: npt.NDArray[Any]) -> Array:
    """1.0 where the largest output is the target's; outputs (rows, classes), integer targets (rows,)."""
    return np.asarray(outputs.argmax(axis=-1) == targets, np.float64)
