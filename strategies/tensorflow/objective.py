"""How a job's functions are called, and the loss of a micro-batch as terms.

A step's gradient is that of sum(values * weights) / W over the whole global batch, with W the sum of all weights. Each
micro-batch contributes sum(values * weights) / rows; gradients are summed over the replicas, which is right where all
weights are 1 (W = rows); otherwise they are scaled by rows / W before they are applied.

AutoGraph rewrites the job's loss, step and metrics, as it does in a `tf.function` of the user's own, and nothing of
ours, which would take seconds in each new process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainwright.core.data import Terms
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.strategies.distilling import Distilled, Judged
from trainwright.strategies.tensorflow import batches
from trainwright.strategies.tensorflow.compat import Functional, to_graph_code
from trainwright.strategies.tensorflow.failures import user_code


@dataclass(frozen=True, kw_only=True)
class Caller:
    """How a job's functions are called.

    Attributes:
        spec: the job's functions and columns.
        where: the rank, for errors.
    """

    spec: ModelSpec
    where: str

    @property
    def wanted(self) -> tuple[str, ...] | None:
        """Columns that the job's functions want; None for all, which a step of the user's own takes."""
        return None if self.spec.step else tuple(dict.fromkeys((*self.spec.inputs, *self.spec.targets)))

    def outputs(self, model: keras.Model, columns: batches.Tensors, *, training: bool) -> Any:
        """The model's outputs for the input columns, whatever they are."""
        given = [columns[name] for name in self.spec.inputs]
        with user_code("the model", self.where):
            if self.spec.keywords:
                return call_model(model, dict(zip(self.spec.keywords, given, strict=True)), training=training)
            return call_model(model, given, training=training)

    def targets(self, columns: batches.Tensors) -> Any:
        """The target column, or a tuple where there are several."""
        chosen = tuple(columns[name] for name in self.spec.targets)
        return chosen[0] if len(chosen) == 1 else chosen

    def loss(self, model: keras.Model, columns: batches.Tensors, weights: tf.Tensor, *, training: bool) -> Terms:
        """The loss terms of a micro-batch, sample weights included."""
        if self.spec.step:
            with user_code("step=", self.where):
                result = _rewritten(self.spec.step)(model, dict(columns))
            return self.terms("step=", result, weights)
        return self.loss_of(model, self.outputs(model, columns, training=training), columns, weights)

    def loss_of(self, model: keras.Model, outputs: Any, columns: batches.Tensors, weights: tf.Tensor) -> Terms:
        """The loss terms of outputs that are there already; what the model's regularizers cost is part of each."""
        assert self.spec.loss is not None, "a job has loss= or step="
        with user_code("loss=", self.where):
            result = applied(self.spec.loss, outputs, self.targets(columns))
            penalties = model.losses
        values, counted = self.terms("loss=", result, weights)
        for penalty in penalties:
            values += tf.cast(penalty, values.dtype)
        return Terms(values, counted)

    def metric(self, name: str, outputs: Any, columns: batches.Tensors, weights: tf.Tensor) -> Terms:
        """The terms of a metric."""
        with user_code(f"metric {name!r}", self.where):
            result = applied(self.spec.metrics[name], outputs, self.targets(columns))
        return self.terms(f"metric {name!r}", result, weights)

    def terms(self, what: str, result: Any, weights: tf.Tensor) -> Terms:
        """What a loss or metric returned, checked, with the feed's sample weights multiplied in.

        Values of weight 0 do not count, whatever they are: not even if they are not finite.

        Args:
            weights: (rows,), of the feed.

        Raises:
            JobError: it is no tensor, it was reduced, or its first dimension is not the batch.
        """
        values = tf.convert_to_tensor(result.values if isinstance(result, Terms) else result)
        self._check(what, values, weights)
        values = values if values.dtype in (tf.float32, tf.float64) else tf.cast(values, tf.float32)
        fed = _rowwise(tf.cast(weights, values.dtype), values)
        counted = tf.broadcast_to(fed, tf.shape(values))
        if isinstance(result, Terms):
            own = tf.stop_gradient(tf.cast(result.weights, values.dtype))
            counted = counted * self._fitted(what, own, values)
        return Terms(tf.where(counted == 0.0, tf.zeros_like(values), values), counted)

    def _check(self, what: str, values: tf.Tensor, weights: tf.Tensor) -> None:
        if values.shape.rank == 0:
            loss = "one loss per sample: use reduction=None"
            wanted = "one value per sample, without a mean" if what.startswith("metric") else loss
            raise self._wrong(f"{what} returned a single number: return {wanted}, or Terms(values, weights)")
        if not values.shape[:1].is_compatible_with(weights.shape[:1]):
            raise self._wrong(
                f"{what} returned shape {tuple(values.shape)} for a batch of {weights.shape[0]} rows: the first "
                "dimension must be the batch, one loss per sample; for tokens or pixels return (samples, k) or "
                "Terms(values, weights)"
            )

    def _fitted(self, what: str, weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """The user's weights in the shape of the values."""
        leading = values.shape[: weights.shape.rank].is_compatible_with(weights.shape)
        try:
            return tf.broadcast_to(_rowwise(weights, values) if leading else weights, tf.shape(values))
        except (ValueError, tf.errors.InvalidArgumentError):
            raise self._wrong(
                f"{what} returned weights of shape {tuple(weights.shape)} for values of shape {tuple(values.shape)}: "
                "give each value its weight"
            ) from None

    def _wrong(self, problem: str) -> JobError:
        return JobError([problem], where=self.where)


def call_model(model: keras.Model, given: Any, *, training: bool | None) -> Any:
    """Several inputs go to functional models as one structure, to others as arguments."""
    if isinstance(model, keras.Sequential | Functional):
        whole = given[0] if isinstance(given, list) and len(given) == 1 else given
        return model(whole, training=training)
    if isinstance(given, dict):
        return model(**given, training=training)
    return model(*given, training=training)


def per_sample(function: Any, outputs: Any, targets: Any) -> Any:
    """The same as Keras' `compile` takes it: losses alone, for what Keras multiplies with weights. Raises JobError."""
    result = applied(function, outputs, targets)
    if isinstance(result, Terms):
        raise JobError(['run="fit" takes one loss per sample, and no Terms: leave run out, or return the losses'])
    return result


def applied(function: Any, outputs: Any, targets: Any) -> Any:
    """A function (outputs, targets), or one of Keras' losses and metrics, which take them the other way round."""
    if isinstance(function, Distilled | Judged):
        return function(outputs, targets)
    if isinstance(function, keras.losses.Loss):
        return function.call(targets, outputs)
    if isinstance(function, keras.metrics.MeanMetricWrapper):
        return _rewritten(function._fn)(targets, outputs, **function._fn_kwargs)
    if isinstance(function, keras.metrics.Metric):
        raise JobError(
            [
                f"keras.metrics.{type(function).__name__} is no mean over samples, and cannot be summed over workers: "
                "use one that is, such as SparseCategoricalAccuracy, or a function that gives one value per sample"
            ]
        )
    return _rewritten(function)(outputs, targets)


def _rewritten(function: Any) -> Any:
    """A function of the user's as AutoGraph has it; as it is, where steps run eagerly."""
    if tf.executing_eagerly():
        return function
    return to_graph_code(function)


def _rowwise(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Weights of the leading dimensions, with dimensions of 1 appended until they broadcast against the values."""
    extra = values.shape.rank - weights.shape.rank
    return tf.reshape(weights, tf.concat((tf.shape(weights), tf.ones(extra, tf.int32)), 0))
