"""Gradients of embeddings stay rows, and are the same gradients as tensors."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainwright.strategies.tensorflow.training.gradient_rows import added, changed, split_rows, whole_norm

SHAPES = [(3, 2), (4, 2), (2, 2)]


def rows(*indices: int) -> tf.IndexedSlices:
    values = tf.reshape(tf.range(1.0, 2 * len(indices) + 1.0), (len(indices), 2))
    return tf.IndexedSlices(values, tf.constant(indices, tf.int64), tf.constant((9, 2), tf.int64))


def dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient).numpy()


def test_a_sum_has_the_rows_of_both() -> None:
    whole = added(rows(1, 8, 1), rows(0, 1))
    assert whole.indices.numpy().tolist() == [1, 8, 1, 0, 1]
    np.testing.assert_array_equal(dense(whole), dense(rows(1, 8, 1)) + dense(rows(0, 1)))
    mixed = added(rows(1, 1), tf.ones((9, 2)))
    np.testing.assert_array_equal(dense(mixed), dense(rows(1, 1)) + 1.0)


@pytest.mark.parametrize("gradient", [rows(1, 8, 1, 3, 6, 0, 8), rows(4), tf.reshape(tf.range(18.0), (9, 2))])
def test_parts_have_the_rows_of_their_pieces(gradient: Any) -> None:
    parts = split_rows(gradient, SHAPES)
    assert [type(part) for part in parts] == [type(parts[0])] * len(SHAPES)
    ends = list(accumulate((shape[0] for shape in SHAPES), initial=0))
    for part, shape, (first, end) in zip(parts, SHAPES, pairwise(ends), strict=True):
        assert dense(part).shape == shape
        np.testing.assert_array_equal(dense(part), dense(gradient)[first:end])
    assert split_rows(tf.constant(1.0), [()]) == [tf.constant(1.0)]


def test_the_norm_is_of_sums_of_rows() -> None:
    assert float(whole_norm([rows(1, 1), tf.constant([2.0])])) == pytest.approx((4.0**2 + 6.0**2 + 2.0**2) ** 0.5)


def test_a_change_keeps_places() -> None:
    np.testing.assert_array_equal(dense(changed(rows(1, 8, 1), lambda each: each * 2.0)), 2 * dense(rows(1, 8, 1)))
    assert changed(None, lambda each: each * 2.0) is None
