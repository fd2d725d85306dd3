"""Call a job's functions, and compute the loss of a micro-batch as terms.

A step's gradient is that of sum(values * weights) / W over the whole global batch, where W is the sum of all weights.
Each micro-batch contributes sum(values * weights) / rows, and gradients are summed over the replicas. This is right if
all weights are 1 (W = rows); otherwise gradients are scaled by rows / W before they are applied.

AutoGraph rewrites the job's loss, step and metrics, as in a `tf.function` of the user. It does not rewrite code of
trainwright, which would take seconds in each new process.

Layers can give `y_pred` a mask (`Embedding(mask_zero=True)`, `Masking`), and a loss can give its values another mask
(`ignore_class`). `Model.fit` leaves masked values out of loss and metrics, both out of the sum and out of the divisor.
Here the masks become the weights of `Terms`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainwright.core.data import Terms
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.loss_api import (
    is_keras_function,
    log_name_problem,
    log_with,
    order_problem,
    refuse_log,
    takes_targets_first,
)
from trainwright.strategies.common.user_code_errors import loss_broadcast_problem
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, StudentMetric
from trainwright.strategies.tensorflow.tensorflow_compat import (
    Functional,
    LossFunctionWrapper,
    keras_mask,
    to_graph_code,
)
from trainwright.strategies.tensorflow.training import tensor_conversion
from trainwright.strategies.tensorflow.training.tensorflow_errors import TensorFlowUserCode

LOSS = "loss"
MEAN_BY_WEIGHT = "mean_with_sample_weight"  # Keras' name of the reduction that divides by the sum of the weights


@dataclass(frozen=True, kw_only=True)
class KerasCaller:
    """Calls a job's functions with the columns that they use."""

    spec: ModelSpec  # the job's functions and columns
    where: str  # the rank, for errors

    @property
    def wanted(self) -> tuple[str, ...] | None:
        """Columns that the job's functions use; None for all columns, which a user's step gets."""
        spec = self.spec
        weights = (spec.sample_weight,) if spec.sample_weight else ()
        return None if spec.step else tuple(dict.fromkeys((*spec.inputs, *spec.targets, *weights)))

    def outputs(self, model: keras.Model, columns: tensor_conversion.Tensors, *, training: bool) -> Any:
        """Return the model's outputs for the input columns."""
        inputs = model_inputs(columns, self.spec.inputs, self.spec.keywords)
        with TensorFlowUserCode("the model", self.where):
            return call_model(model, inputs, training=training)

    def targets(self, columns: tensor_conversion.Tensors) -> Any:
        """Return the target column, or a tuple of several."""
        chosen = tuple(columns[name] for name in self.spec.targets)
        return chosen[0] if len(chosen) == 1 else chosen

    def loss(
        self, model: keras.Model, columns: tensor_conversion.Tensors, weights: tf.Tensor, *, training: bool
    ) -> Terms:
        """Return the loss terms of a micro-batch, with sample weights."""
        if self.spec.step:
            return self.step_terms(model, columns, weights)[LOSS]
        outputs = self.outputs(model, columns, training=training)
        return self.loss_of(model, outputs, columns, weights, training=training)

    def step_terms(
        self, model: keras.Model, columns: tensor_conversion.Tensors, weights: tf.Tensor
    ) -> dict[str, Terms]:
        """Return the terms of all results of `step=` for a micro-batch: `loss`, and the other values of a dict by name.

        A single number counts once for each sample.

        Raises:
            JobError: there is no loss, a name is reserved, or a value has the wrong shape.
            UserCodeError: the step raised.
        """
        with TensorFlowUserCode("step=", self.where), log_with(refuse_log):
            result = _autograph_function(self.spec.step)(model, dict(columns))
        if type(result) is not dict:
            return {LOSS: self.terms("step=", result, weights)}
        if LOSS not in result:
            keys = ", ".join(map(repr, result))
            raise self._job_error(f'step= returned a dict with the keys {keys}: add "loss", one per sample')
        terms = {LOSS: self.terms("step=", result[LOSS], weights)}
        for name in (each for each in result if each != LOSS):
            value = result[name]
            if problem := log_name_problem(name, self.spec.metrics):
                raise self._job_error(problem)
            single = not isinstance(value, Terms) and tf.convert_to_tensor(value).shape.rank == 0
            terms[name] = self.terms(
                f"{name!r} of step=", tf.fill(tf.shape(weights), value) if single else value, weights
            )
        return terms

    def loss_of(
        self,
        model: keras.Model,
        outputs: Any,
        columns: tensor_conversion.Tensors,
        weights: tf.Tensor,
        *,
        training: bool,
    ) -> Terms:
        """Return the loss terms of the outputs. Each includes the cost of the model's regularizers."""
        assert self.spec.loss is not None, "a job has loss= or step="
        result = self.applied("loss=", self.spec.loss, outputs, self.targets(columns))
        values, weights = self.weighted(self.terms("loss=", result, weights), self.factors(columns, training=training))
        for penalty in model.losses:
            values += tf.cast(penalty, values.dtype)
        return Terms(values, weights)

    def factors(self, columns: tensor_conversion.Tensors, *, training: bool) -> Any:
        """Return the factor on each sample's losses, from the weight column or the classes; None without any."""
        if self.spec.sample_weight:
            return columns[self.spec.sample_weight]
        if self.spec.class_weight and training:
            return _class_factors(columns[self.spec.targets[0]], self.spec.class_weight)
        return None

    def weighted(self, terms: Terms, factors: Any) -> Terms:
        """Multiply losses by the samples' weights. If Keras divides the loss by their sum, multiply the terms' weights.

        Args:
            terms: losses and their weights.
            factors: weights of the samples, (rows,) or (rows, 1), or of each loss; None for no weights.

        Raises:
            JobError: the shape of the weights does not fit the losses.
        """
        if factors is None:
            return terms
        values, weights = terms
        factors = tf.stop_gradient(tf.cast(factors, values.dtype))
        if factors.shape.rank == values.shape.rank + 1 and factors.shape[-1] == 1:
            factors = factors[..., 0]
        factors = self._shape_weights("sample_weight=", factors, values)
        if getattr(self.spec.loss, "reduction", None) == MEAN_BY_WEIGHT:
            return Terms(values, weights * factors)
        return Terms(values * factors, weights)

    def metric(self, name: str, outputs: Any, columns: tensor_conversion.Tensors, weights: tf.Tensor) -> Terms:
        """Return the terms of a metric."""
        subject = f"metric {name!r}"
        result = self.applied(subject, self.spec.metrics[name], outputs, self.targets(columns), metric=True)
        return self.terms(subject, result, weights)

    def applied(self, what: str, function: Any, outputs: Any, targets: Any, *, metric: bool = False) -> Any:
        """Return the result of a loss or metric: values, or Terms. Raises JobError, UserCodeError."""
        if problem := order_problem(what, function):
            raise self._job_error(problem)
        with TensorFlowUserCode(what, self.where), log_with(refuse_log):
            result = apply_function(function, outputs, targets, metric=metric)
        _check_broadcast(what, function, outputs, targets, result, self.where)
        return result

    def terms(self, what: str, result: Any, weights: tf.Tensor) -> Terms:
        """Check the result of a loss or metric, and multiply its weights by those of the feed's samples.

        Values of weight 0 do not count, even if they are not finite.

        Args:
            what: name of the function, for errors.
            result: values, or Terms.
            weights: (rows,), of the feed.

        Raises:
            JobError: the result is not a tensor, was reduced, or its first dimension is not the batch.
        """
        values = tf.convert_to_tensor(result.values if isinstance(result, Terms) else result)
        self._check(what, values, weights)
        values = values if values.dtype in (tf.float32, tf.float64) else tf.cast(values, tf.float32)
        sample_weights = _rowwise(tf.cast(weights, values.dtype), values)
        value_weights = tf.broadcast_to(sample_weights, tf.shape(values))
        if isinstance(result, Terms):
            user_weights = tf.stop_gradient(tf.cast(result.weights, values.dtype))
            value_weights = value_weights * self._shape_weights(what, user_weights, values)
        return Terms(tf.where(value_weights == 0.0, tf.zeros_like(values), values), value_weights)

    def _check(self, what: str, values: tf.Tensor, weights: tf.Tensor) -> None:
        if values.shape.rank == 0:
            loss = "one loss per sample: use reduction=None"
            remedy = "one value per sample, without a mean" if what.startswith("metric") else loss
            raise self._job_error(f"{what} returned a single number: return {remedy}, or Terms(values, weights)")
        if not values.shape[:1].is_compatible_with(weights.shape[:1]):
            raise self._job_error(
                f"{what} returned shape {tuple(values.shape)} for a batch of {weights.shape[0]} rows: the first "
                "dimension must be the batch, one loss per sample; for tokens or pixels return (samples, k) or "
                "Terms(values, weights)"
            )

    def _shape_weights(self, what: str, weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Return the user's weights in the shape of the values."""
        leading = values.shape[: weights.shape.rank].is_compatible_with(weights.shape)
        try:
            return tf.broadcast_to(_rowwise(weights, values) if leading else weights, tf.shape(values))
        except (ValueError, tf.errors.InvalidArgumentError):
            raise self._job_error(
                f"{what} has weights of shape {tuple(weights.shape)} for values of shape {tuple(values.shape)}: "
                "give each value its weight"
            ) from None

    def _job_error(self, problem: str) -> JobError:
        return JobError([problem], where=self.where)


def model_inputs(columns: Mapping[str, Any], inputs: Sequence[str], keywords: Sequence[str]) -> Any:
    """Return the inputs for `call_model`: a list, or a dict if `keywords` has the name of an argument for each."""
    values = [columns[name] for name in inputs]
    return dict(zip(keywords, values, strict=True)) if keywords else values


def call_model(model: keras.Model, inputs: Any, *, training: bool | None) -> Any:
    """Call a model with its inputs.

    Functional models get several inputs as one structure. Other models get them as arguments, or as one structure if
    their `call` has no such arguments: Keras' usual `call(self, inputs)`.

    Args:
        model: to call.
        inputs: a list of inputs, or a dict of inputs by the names of arguments.
        training: as Keras' `training=`.
    """
    if isinstance(inputs, list) and len(inputs) == 1:
        return model(inputs[0], training=training)
    if isinstance(model, keras.Sequential | Functional) or not _accepts_inputs(model.call, inputs):
        return model(inputs, training=training)
    if isinstance(inputs, dict):
        return model(**inputs, training=training)
    return model(*inputs, training=training)


def _accepts_inputs(call: Any, inputs: Any) -> bool:
    """Whether a model's `call` has an argument for each input, by name or by position."""
    signature = inspect.signature(call)
    parameters = [each for each in signature.parameters.values() if each.name != "training"]
    names, places = (inputs, ()) if isinstance(inputs, dict) else ({}, inputs)
    try:
        signature.replace(parameters=parameters).bind_partial(*places, **names)
    except TypeError:
        return False
    return True


def _class_factors(targets: tf.Tensor, weights: Mapping[int, float]) -> tf.Tensor:
    """Return the weights (rows,) of the samples' classes, numbers or one-hot, as Keras does for `class_weight`."""
    if targets.shape.rank > 1:
        targets = targets[..., 0] if targets.shape[-1] == 1 else tf.argmax(targets, -1)
    classes = tf.cast(tf.round(tf.cast(targets, tf.float64)), tf.int64)
    factors = tf.ones_like(classes, tf.float64)
    for number, weight in weights.items():
        factors = tf.where(classes == number, tf.constant(weight, tf.float64), factors)
    return factors


def _rowwise(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Append dimensions of 1 to weights until they broadcast against the values."""
    extra = values.shape.rank - weights.shape.rank
    return tf.reshape(weights, tf.concat((tf.shape(weights), tf.ones(extra, tf.int32)), 0))


# --- One call of a loss or metric -------------------------------------------------------------------------------------


_BROADCAST_ROWS = (2, 3)  # rows of the outputs and of the targets in the trial that detects a broadcast


class MaskedTerms(Terms):
    """Terms whose weights are a Keras mask."""


def apply_function(function: Any, outputs: Any, targets: Any, *, metric: bool = False) -> Any:
    """Call a loss or metric as Keras does, without its reduction.

    Args:
        function: (outputs, targets) -> values or Terms; or a function with arguments in Keras' order.
        outputs: outputs of the model.
        targets: the target column, or a tuple of several.
        metric: whether the function is a metric: Keras then converts no targets.

    Returns:
        Values, one or more for each sample; or Terms: the user's, or `MaskedTerms`.

    Raises:
        JobError: the metric is not a mean over samples, or the mask does not fit the values.
    """
    if isinstance(function, DistillationLoss | StudentMetric):
        return function(outputs, targets)
    return _apply_mask(function, outputs, _call_function(function, outputs, targets, metric=metric), metric)


def _call_function(function: Any, outputs: Any, targets: Any, *, metric: bool = False) -> Any:
    """Return the result of a loss or metric before any mask; see `apply_function`."""
    if isinstance(function, keras.metrics.MeanMetricWrapper):
        return _autograph_function(function._fn)(targets, outputs, **function._fn_kwargs)
    if isinstance(function, keras.metrics.Metric):
        kind = f"keras.metrics.{type(function).__name__}"
        raise JobError([f"{kind} is not a mean over samples: it can be one of metrics=, but not loss="])
    if not takes_targets_first(function):
        return _autograph_function(function)(outputs, targets)
    if metric and not isinstance(function, keras.losses.Loss):
        return _autograph_function(function)(targets, outputs)
    return _loss(function, outputs, targets)


def _check_broadcast(what: str, function: Any, outputs: Any, targets: Any, result: Any, where: str) -> None:
    """Raise JobError if one output and one target were broadcast to all pairs of samples.

    The shape of the values shows a broadcast. A mean over the pairs hides it, and a trial shows it: the function also
    accepts two rows of outputs with three rows of targets.
    """
    values = result.values if isinstance(result, Terms) else result
    if not all(tf.is_tensor(each) for each in (outputs, targets, values)):
        return
    shapes = tuple(outputs.shape), tuple(targets.shape)
    problem = loss_broadcast_problem(what, *shapes, tuple(values.shape))
    if not problem and sorted(map(len, shapes)) == [1, 2] and max(shapes, key=len)[-1] == 1:
        pairs = _compares_all_pairs(function, outputs, targets)
        problem = loss_broadcast_problem(what, *shapes, (shapes[0][0],) * 2) if pairs else ""
    if problem:
        raise JobError([problem], where=where)


def _autograph_function(function: Any) -> Any:
    """Return a user's function, rewritten by AutoGraph; unchanged in eager steps and for functions of Keras."""
    if tf.executing_eagerly() or is_keras_function(function):
        return function
    return to_graph_code(function)


def _loss(function: Any, outputs: Any, targets: Any) -> Any:
    """Return the values of a Keras loss as `Loss.__call__` computes them, in the type of the loss."""
    loss = function
    if not isinstance(function, keras.losses.Loss):
        if not (tf.is_tensor(outputs) and tf.is_tensor(targets)):
            return _autograph_function(function)(targets, outputs)
        loss = LossFunctionWrapper(_autograph_function(function), name="loss")
    kinds = {tf.as_dtype(loss.dtype), *(each.dtype for each in tf.nest.flatten(outputs) if tf.is_tensor(each))}
    kind = tf.float64 if tf.float64 in kinds else tf.as_dtype(loss.dtype)
    targets, outputs = tf.nest.map_structure(lambda each: tf.cast(each, kind), (targets, outputs))
    return loss.call(targets, outputs)


def _apply_mask(function: Any, outputs: Any, result: Any, metric: bool) -> Any:
    """Return the result without masked values; unchanged without a mask, or for Terms with weights."""
    if isinstance(result, Terms) or not tf.is_tensor(result):
        return result
    masks = [keras_mask(outputs) if tf.is_tensor(outputs) else None, keras_mask(result)]
    if masks[0] is None and (metric or masks[1] is None):  # Keras' metrics ignore a mask of the values alone
        return result
    mask = functools.reduce(tf.logical_and, [tf.cast(each, tf.bool) for each in masks if each is not None])
    if result.shape[: mask.shape.rank].is_compatible_with(mask.shape):
        return MaskedTerms(result, mask)
    if not takes_targets_first(function):
        return result  # the function itself has summed over the steps
    raise JobError(
        [
            f"the outputs have a mask of shape {tuple(mask.shape)} (mask_zero=True or Masking), and the loss or metric "
            f"gives values of shape {tuple(result.shape)}: give one value for each step that is masked or not"
        ]
    )


def _compares_all_pairs(function: Any, outputs: Any, targets: Any) -> bool:
    """Whether a function compares each output with every target: it accepts two outputs with three targets."""
    specs = [
        tf.TensorSpec((rows, *each.shape[1:]), each.dtype)
        for rows, each in zip(_BROADCAST_ROWS, (outputs, targets), strict=True)
    ]
    trial = tf.function(lambda output, target: _call_function(function, output, target), autograph=False)
    try:
        graph = trial.get_concrete_function(*specs).graph
    except Exception:  # the function does not accept these shapes, as it should
        return False
    operations, waiting = set(), [each.op for each in tf.nest.flatten(graph.structured_outputs) if tf.is_tensor(each)]
    while waiting:
        operation = waiting.pop()
        if operation not in operations:
            operations.add(operation)
            waiting += [each.op for each in operation.inputs]
    return all(each.op in operations for each in graph.inputs[: len(specs)])
