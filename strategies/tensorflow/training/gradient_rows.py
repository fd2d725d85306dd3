"""Gradients as TensorFlow gives them: tensors, or rows of one as `tf.IndexedSlices`, with a row for each use of it.

The gradient of an embedding consists of rows, and one row comes as often as its token does in the batch. Keras'
optimizers square each of them, so they reach the optimizer as they are: with the same values as in Keras' `fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def changed(gradient: Any, change: Callable[[Any], Any]) -> Any:
    """Return a gradient with changed values: None, a tensor, or rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)


def added(one: Any, other: Any) -> Any:
    """Return the sum of two gradients of a variable; rows are those of both."""
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        values, indices = (tf.concat(pair, 0) for pair in ((one.values, other.values), (one.indices, other.indices)))
        return tf.IndexedSlices(values, indices, one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def whole_norm(gradients: Sequence[Any]) -> Any:
    """Return the norm of all gradients together, (); rows of one place are added up."""
    return tf.linalg.global_norm([tf.convert_to_tensor(each) for each in gradients])


def split_rows(gradient: Any, shapes: Sequence[Any]) -> list[Any]:
    """Return a gradient as parts of these shapes, which follow each other along the first axis."""
    if len(shapes) == 1:
        return [gradient]
    if not isinstance(gradient, tf.IndexedSlices):
        parts: list[Any] = tf.split(gradient, [shape[0] for shape in shapes])
        return parts
    parts, first = [], 0
    for shape in shapes:
        own = tf.logical_and(gradient.indices >= first, gradient.indices < first + shape[0])
        values, indices = (tf.boolean_mask(each, own) for each in (gradient.values, gradient.indices))
        parts.append(tf.IndexedSlices(values, indices - first, tf.constant(shape, gradient.dense_shape.dtype)))
        first += shape[0]
    return parts
