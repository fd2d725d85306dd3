"""One call of a loss or metric: in the order that it takes its arguments in, with Keras' mask of the outputs.

Keras gives `y_pred` a mask where a layer made one (`Embedding(mask_zero=True)`, `Masking`), and a loss may give its
values another (`ignore_class`). `Model.fit` leaves what they mask out of loss and metrics: the sum is over the values
that count, and so is the number that it is divided by. Here the masks become the weights of `Terms`.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from trainwright.core.argument_order import is_of_keras, takes_targets_first
from trainwright.core.data import Terms
from trainwright.core.errors import JobError
from trainwright.strategies.common.loss_shapes import broadcast_problem
from trainwright.strategies.distillation.losses import Distilled, Heard, Judged
from trainwright.strategies.tensorflow.tensorflow_compat import LossFunctionWrapper, keras_mask, to_graph_code

_ROWS = (2, 3)  # of the outputs and the targets by which a broadcast is recognized


class Masked(Terms):
    """Terms whose weights are Keras' mask."""


def applied(function: Any, outputs: Any, targets: Any, *, metric: bool = False) -> Any:
    """Call a loss or metric as Keras would; without its reduction.

    Args:
        function: (outputs, targets) -> values or Terms; or one that takes them in Keras' order.
        outputs: of the model.
        targets: the target column, or a tuple of several.
        metric: it is called as a metric: then Keras converts no targets.

    Returns:
        Values, one or more for each sample; or Terms: the user's, or `Masked`.

    Raises:
        JobError: the metric is no mean over samples, or the mask does not fit the values.
    """
    if isinstance(function, Distilled | Judged | Heard):
        return function(outputs, targets)
    return _masked(function, outputs, called(function, outputs, targets, metric=metric), metric)


def called(function: Any, outputs: Any, targets: Any, *, metric: bool = False) -> Any:
    """What a loss or metric returns for a batch, before any mask; see `applied`."""
    if isinstance(function, keras.metrics.MeanMetricWrapper):
        return rewritten(function._fn)(targets, outputs, **function._fn_kwargs)
    if isinstance(function, keras.metrics.Metric):
        raise JobError(
            [
                f"keras.metrics.{type(function).__name__} is no mean over samples, and cannot be summed over workers: "
                'use run="fit", a metric that is a mean, such as SparseCategoricalAccuracy, or a function that gives '
                "one value per sample"
            ]
        )
    if not takes_targets_first(function):
        return rewritten(function)(outputs, targets)
    if metric and not isinstance(function, keras.losses.Loss):
        return rewritten(function)(targets, outputs)
    return _loss(function, outputs, targets)


def check_broadcast(what: str, function: Any, outputs: Any, targets: Any, result: Any, where: str) -> None:
    """Raise JobError where one output and one target were broadcast to all pairs of samples.

    The shape of the values tells, or, where the function has taken a mean over the pairs, that it also takes outputs of
    two rows with targets of three.
    """
    values = result.values if isinstance(result, Terms) else result
    if not all(tf.is_tensor(each) for each in (outputs, targets, values)):
        return
    shapes = tuple(outputs.shape), tuple(targets.shape)
    problem = broadcast_problem(what, *shapes, tuple(values.shape))
    if not problem and sorted(map(len, shapes)) == [1, 2] and max(shapes, key=len)[-1] == 1:
        pairs = _of_pairs(function, outputs, targets)
        problem = broadcast_problem(what, *shapes, (shapes[0][0],) * 2) if pairs else ""
    if problem:
        raise JobError([problem], where=where)


def rewritten(function: Any) -> Any:
    """A function of the user's as AutoGraph has it; as it is, where steps run eagerly or it is Keras' own."""
    if tf.executing_eagerly() or is_of_keras(function):
        return function
    return to_graph_code(function)


def _loss(function: Any, outputs: Any, targets: Any) -> Any:
    """Values of a loss of Keras' kind, as `Loss.__call__` computes them: in the loss's own type, of one rank."""
    loss = function
    if not isinstance(function, keras.losses.Loss):
        if not (tf.is_tensor(outputs) and tf.is_tensor(targets)):
            return rewritten(function)(targets, outputs)
        loss = LossFunctionWrapper(rewritten(function), name="loss")
    kinds = {tf.as_dtype(loss.dtype), *(each.dtype for each in tf.nest.flatten(outputs) if tf.is_tensor(each))}
    kind = tf.float64 if tf.float64 in kinds else tf.as_dtype(loss.dtype)
    targets, outputs = tf.nest.map_structure(lambda each: tf.cast(each, kind), (targets, outputs))
    return loss.call(targets, outputs)


def _masked(function: Any, outputs: Any, result: Any, metric: bool) -> Any:
    """The result with what Keras masks of it left out; as it is where nothing is masked, or Terms have weights."""
    if isinstance(result, Terms) or not tf.is_tensor(result):
        return result
    masks = [keras_mask(outputs) if tf.is_tensor(outputs) else None, keras_mask(result)]
    if masks[0] is None and (metric or masks[1] is None):  # Keras' metrics look at no mask of the values alone
        return result
    mask = functools.reduce(tf.logical_and, [tf.cast(each, tf.bool) for each in masks if each is not None])
    if result.shape[: mask.shape.rank].is_compatible_with(mask.shape):
        return Masked(result, mask)
    if not takes_targets_first(function):
        return result  # the function has summed over the steps itself
    raise JobError(
        [
            f"the outputs have a mask of shape {tuple(mask.shape)} (mask_zero=True or Masking), and the loss or metric "
            f"gives values of shape {tuple(result.shape)}: give one value for each step that is masked or not"
        ]
    )


def _of_pairs(function: Any, outputs: Any, targets: Any) -> bool:
    """Whether a function compares each sample's output with every target: it takes two outputs with three targets."""
    specs = [
        tf.TensorSpec((rows, *each.shape[1:]), each.dtype) for rows, each in zip(_ROWS, (outputs, targets), strict=True)
    ]
    trial = tf.function(lambda one, other: called(function, one, other), autograph=False)
    try:
        graph = trial.get_concrete_function(*specs).graph
    except Exception:  # whatever the function raises: it does not take them, which is well
        return False
    found, waiting = set(), [each.op for each in tf.nest.flatten(graph.structured_outputs) if tf.is_tensor(each)]
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [each.op for each in operation.inputs]
    return all(each.op in found for each in graph.inputs[: len(specs)])
