"""The tensor functions of TensorFlow for distillation losses: see `strategies.distillation.divergences.TensorOps`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from trainwright.core.loss_api import InlineTeacher
from trainwright.strategies.distillation.divergences import TensorOps
from trainwright.strategies.tensorflow.training.objective import apply_function

_TINY = 1e-24  # smallest square of a length
_loaded: dict[tuple[str, str], Any] = {}


class _TensorFlowTensorOps:
    channels = 3

    def is_tensor(self, value: Any) -> bool:
        return bool(tf.is_tensor(value))

    def first(self, outputs: Any) -> tf.Tensor:
        return next(leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf))

    def shape(self, value: tf.Tensor) -> tuple[int | None, ...]:
        return tuple(value.shape)

    def wide(self, value: tf.Tensor) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        return value if value.dtype == tf.float64 else tf.cast(value, tf.float32)

    def typed(self, value: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        return tf.cast(value, like.dtype)

    def near(self, value: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        return tf.stop_gradient(tf.cast(value, like.dtype))

    def held(self, value: tf.Tensor) -> tf.Tensor:
        return tf.stop_gradient(value)

    def precisely(self, like: tf.Tensor) -> AbstractContextManager[Any]:
        """Return an empty context: in Keras only layers compute in half precision, and these functions are none."""
        return nullcontext()

    def called(self, function: Callable[..., Any], outputs: Any, targets: Any, *, metric: bool = False) -> Any:
        return apply_function(function, outputs, targets, metric=metric)

    def answers(
        self, teacher: InlineTeacher, columns: Mapping[str, tf.Tensor], like: tf.Tensor
    ) -> Mapping[str, tf.Tensor]:
        """Load the model once in a process, outside graph and strategy. It replaces another model of its name."""
        key = (teacher.name, teacher.identity())
        if key not in _loaded:
            for old in [old for old in _loaded if old[0] == teacher.name]:
                del _loaded[old]
            _loaded[key] = _apart(teacher.module)
        return {name: tf.stop_gradient(value) for name, value in _loaded[key](columns).items()}

    def log_softmax(self, logits: tf.Tensor) -> tf.Tensor:
        return tf.nn.log_softmax(logits)

    def log_sigmoid(self, logits: tf.Tensor) -> tf.Tensor:
        return tf.math.log_sigmoid(logits)

    def exp(self, value: tf.Tensor) -> tf.Tensor:
        return tf.exp(value)

    def log(self, value: tf.Tensor) -> tf.Tensor:
        return tf.math.log(value)

    def log_add(self, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        return tf.reduce_logsumexp(tf.stack((one, other)), 0)

    def log_total(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reduce_logsumexp(value, 0)

    def softmax(self, value: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(value, 0)

    def counted(self, chance: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        return tf.where(chance == 0, tf.zeros_like(value), chance * value)

    def total(self, value: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
        return tf.reduce_sum(value, axes)

    def mean(self, value: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
        return tf.reduce_mean(value, axes)

    def unit(self, value: tf.Tensor) -> tf.Tensor:
        return value * tf.math.rsqrt(tf.maximum(tf.reduce_sum(value * value, -1, keepdims=True), _TINY))

    def stacked(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.stack([*values])

    def unstacked(self, value: tf.Tensor) -> Sequence[tf.Tensor]:
        return list(tf.unstack(value))

    def paired(self, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        return tf.stack((one, other), -1)

    def transposed(self, value: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
        return tf.transpose(value, axes)

    def flat(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reshape(value, (tf.shape(value)[0], -1))

    def shortened(self, value: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        return value[:, : tf.shape(like)[1]]

    def widened(self, value: tf.Tensor, dimensions: int) -> tf.Tensor:
        return value[(..., *(tf.newaxis for _ in range(dimensions - value.shape.rank)))]


TENSORS: TensorOps = _TensorFlowTensorOps()


def _apart(function: Callable[[], Any]) -> Any:
    """Return the result of a function in its own thread, outside of graph, strategy and Keras scopes."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="teacher").start()
    return found.result()
