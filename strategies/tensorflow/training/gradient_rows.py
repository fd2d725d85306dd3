"""Gradients in TensorFlow's forms: tensors, or `tf.IndexedSlices` with a row for each use of a row of the variable.

The gradient of an embedding consists of rows, and a row is repeated for each occurrence of its token in the batch.
Keras' optimizers square each row, so they get the rows without a sum over repetitions, as in Keras' `fit`.
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


def added(left: Any, right: Any) -> Any:
    """Return the sum of two gradients of a variable; rows are concatenated."""
    if isinstance(left, tf.IndexedSlices) and isinstance(right, tf.IndexedSlices):
        values, indices = (tf.concat(pair, 0) for pair in ((left.values, right.values), (left.indices, right.indices)))
        return tf.IndexedSlices(values, indices, left.dense_shape)
    return tf.convert_to_tensor(left) + tf.convert_to_tensor(right)


def whole_norm(gradients: Sequence[Any]) -> Any:
    """Return the norm of all gradients together, (); rows with the same index are added up."""
    return tf.linalg.global_norm([tf.convert_to_tensor(each) for each in gradients])


def split_rows(gradient: Any, shapes: Sequence[Any]) -> list[Any]:
    """Return a gradient as parts of these shapes, which follow each other along the first axis."""
    if len(shapes) == 1:
        return [gradient]
    if not isinstance(gradient, tf.IndexedSlices):
        parts: list[Any] = tf.split(gradient, [shape[0] for shape in shapes])
        return parts
    parts, start = [], 0
    for shape in shapes:
        mask = tf.logical_and(gradient.indices >= start, gradient.indices < start + shape[0])
        values, indices = (tf.boolean_mask(each, mask) for each in (gradient.values, gradient.indices))
        parts.append(tf.IndexedSlices(values, indices - start, tf.constant(shape, gradient.dense_shape.dtype)))
        start += shape[0]
    return parts
