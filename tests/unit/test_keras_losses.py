"""Losses and metrics of Keras' users on one batch, beside Keras' own `evaluate`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.metric_states import MetricState
from trainwright.core.pickling import dumps, loads
from trainwright.planning.code_fingerprint import CodeFingerprints
from trainwright.strategies.tensorflow.training.objective import KerasCaller

ROWS, STEPS, CLASSES, WORDS = 12, 5, 3, 7
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 4)).astype("float32")
YES = (X[:, :1] + RANDOM.normal(0.0, 0.5, (ROWS, 1)) > 0).astype("float32")
LENGTHS = RANDOM.integers(1, STEPS, ROWS)[:, None]
TOKENS = np.where(np.arange(STEPS) < LENGTHS, RANDOM.integers(1, WORDS, (ROWS, STEPS)), 0)
TAGS = TOKENS % CLASSES
WEIGHTS = RANDOM.uniform(0.0, 3.0, ROWS).astype("float32")
losses, metrics = keras.losses, keras.metrics


@functools.cache
def binary() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid", name="yes")])


@functools.cache
def tagger() -> keras.Model:
    """Its outputs have a mask."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int64"),
            keras.layers.Embedding(WORDS, 6, mask_zero=True, name="words"),
            keras.layers.Dense(CLASSES, activation="softmax", kernel_regularizer="l2", name="tags"),
        ]
    )


def focal(y_true: Any, y_pred: Any, gamma: float = 2.0) -> Any:
    likely = y_true * y_pred + (1 - y_true) * (1 - y_pred)
    return tf.reduce_mean(-((1 - likely) ** gamma) * tf.math.log(likely), axis=-1)


def near(y_true: Any, y_pred: Any) -> Any:
    return tf.cast(tf.abs(y_true - y_pred) < 0.4, tf.float32)


def squared(y_true: Any, y_pred: Any) -> Any:
    return (y_true - y_pred) ** 2


def crossed(outputs: Any, targets: Any) -> Any:
    return losses.sparse_categorical_crossentropy(targets, outputs)


class Squared(losses.Loss):  # type: ignore[misc]  # Keras has no types
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred - y_true), axis=-1)


def ours(
    model: keras.Model, x: Any, y: Any, loss: Any, metric: Any = None, *, training: bool = False, **fields: Any
) -> tuple[float, ...]:
    """Loss and metric of one batch, one row of which does not count."""
    weighed = {"sample_weight": "w"} if "w" in fields else {}
    spec = ModelSpec(
        model=lambda: model, optimizer=None, total_steps=1, loss=loss, inputs=("x",), targets=("y",),
        class_weight=fields.get("class_weight", {}), metrics={"m": metric} if metric else {}, **weighed,
    )  # fmt: skip
    columns: Mapping[str, Any] = {"x": x, "y": y, **({"w": fields["w"]} if weighed else {})}
    columns = {name: tf.convert_to_tensor(np.concatenate([value, value[:1]])) for name, value in columns.items()}
    feed = tf.constant([1.0] * len(x) + [0.0], tf.float64)
    caller = KerasCaller(spec=spec, where="rank 0")
    outputs = caller.outputs(model, columns, training=training)
    found = [caller.loss_of(model, outputs, columns, feed, training=training)]
    found += [caller.metric("m", outputs, columns, feed)] if metric else []
    return tuple(float(tf.reduce_sum(values * counted) / tf.reduce_sum(counted)) for values, counted in found)


def by_keras(model: keras.Model, x: Any, y: Any, loss: Any, metric: Any = None, **fit: Any) -> tuple[float, ...]:
    """The same, of Keras."""
    model.compile("sgd", loss, metrics=[metric] if metric else [], run_eagerly=True)
    result = model.evaluate(x, y, batch_size=len(x), verbose=0, return_dict=True, **fit)
    return tuple(value for name, value in sorted(result.items(), key=lambda item: item[0] != "loss"))


@pytest.mark.parametrize(
    "loss",
    [
        losses.BinaryCrossentropy(), losses.binary_crossentropy, focal, functools.partial(focal, gamma=1.0), squared,
        Squared(), losses.BinaryCrossentropy(reduction="mean"), losses.BinaryFocalCrossentropy(label_smoothing=0.1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("targets", [YES, YES[:, 0], YES[:, 0].astype("int64")], ids=["column", "flat", "whole"])
def test_losses_in_keras_order(loss: Any, targets: Any) -> None:
    """Also where targets and outputs differ in rank, which Keras brings to one; its loss classes do that themselves."""
    if isinstance(loss, Squared) and targets.ndim == 1:
        with pytest.raises(JobError, match=r"outputs of shape \(13, 1\) and targets of shape \(13,\)"):
            ours(binary(), X, targets, loss)
    else:
        assert ours(binary(), X, targets, loss) == pytest.approx(by_keras(binary(), X, targets, loss), rel=1e-6)


@pytest.mark.parametrize(
    "metric",
    [
        metrics.BinaryAccuracy(threshold=0.6), metrics.binary_accuracy, near, metrics.MeanMetricWrapper(near),
        metrics.Poisson(), losses.mean_absolute_error,
    ],
)  # fmt: skip
def test_metrics_in_keras_order(metric: Any) -> None:
    expected = by_keras(binary(), X, YES, "mse", metric)
    assert ours(binary(), X, YES, losses.MeanSquaredError(), metric) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "metric"),
    [
        (losses.SparseCategoricalCrossentropy(), metrics.SparseCategoricalAccuracy()),
        (losses.sparse_categorical_crossentropy, metrics.sparse_categorical_accuracy),
        (losses.SparseCategoricalCrossentropy(ignore_class=1), metrics.SparseCategoricalAccuracy()),
    ],
)
def test_what_keras_masks_counts_neither_in_loss_nor_metric(loss: Any, metric: Any) -> None:
    expected = by_keras(tagger(), TOKENS, TAGS, loss, metric)
    assert ours(tagger(), TOKENS, TAGS, loss, metric) == pytest.approx(expected, rel=1e-6)
    everything = float(tf.reduce_mean(crossed(tagger()(TOKENS), TAGS))) + float(tf.add_n(tagger().losses))
    assert everything != pytest.approx(expected[0], rel=1e-3), "the mask matters"


def test_what_keras_masks_does_not_count_in_a_function_of_outputs_and_targets() -> None:
    expected = by_keras(tagger(), TOKENS, TAGS, losses.SparseCategoricalCrossentropy())
    assert ours(tagger(), TOKENS, TAGS, crossed) == pytest.approx(expected, rel=1e-6)
    summed = ours(tagger(), TOKENS, TAGS, lambda outputs, targets: tf.reduce_mean(crossed(outputs, targets), -1))
    assert summed != pytest.approx(expected, rel=1e-3), "a function that sums over the steps masks them itself"


def test_a_mask_that_does_not_fit_the_values_is_refused() -> None:
    def flat(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(losses.sparse_categorical_crossentropy(y_true, y_pred), axis=-1)

    with pytest.raises(JobError, match=r"a mask of shape \(13, 5\) .* values of shape \(13,\)"):
        ours(tagger(), TOKENS, TAGS, flat)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
@pytest.mark.parametrize("weights", [WEIGHTS, WEIGHTS[:, None]], ids=["flat", "column"])
def test_weights_of_samples(reduction: str, weights: Any) -> None:
    loss = losses.BinaryCrossentropy(reduction=reduction)
    expected = by_keras(binary(), X, YES, loss, "binary_accuracy", sample_weight=weights)
    found = ours(binary(), X, YES, loss, metrics.BinaryAccuracy(), w=weights)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found[0] != pytest.approx(ours(binary(), X, YES, loss)[0], rel=0.01)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_weights_of_steps_beside_a_mask(reduction: str) -> None:
    loss, weights = losses.SparseCategoricalCrossentropy(reduction=reduction), WEIGHTS[:, None] + np.arange(STEPS)
    expected = by_keras(tagger(), TOKENS, TAGS, loss, sample_weight=weights.astype("float32"))
    assert ours(tagger(), TOKENS, TAGS, loss, w=weights) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("form", ["flat", "column", "one-hot"])
def test_weights_of_classes_count_in_training_alone(form: str) -> None:
    targets = {"flat": YES[:, 0], "column": YES, "one-hot": np.concatenate([1 - YES, YES], 1)}[form]
    loss, factors = losses.CategoricalHinge() if form == "one-hot" else losses.BinaryCrossentropy(), {1: 5.0, 7: 9.0}
    weights = np.where(YES[:, 0] == 1, 5.0, 1.0).astype("float32")
    weighed = by_keras(binary(), X, targets, loss, sample_weight=weights)
    assert ours(binary(), X, targets, loss, class_weight=factors, training=True) == pytest.approx(weighed, rel=1e-6)
    plain = by_keras(binary(), X, targets, loss)
    assert ours(binary(), X, targets, loss, class_weight=factors) == pytest.approx(plain, rel=1e-6)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(JobError, match=r"sample_weight= has weights of shape \(13, 5\) for values of shape \(13,\)"):
        ours(binary(), X, YES, losses.BinaryCrossentropy(), w=np.ones((ROWS, STEPS)))


def pairs(outputs: Any, targets: Any) -> Any:
    return (outputs - targets) ** 2


def mean_of_pairs(outputs: Any, targets: Any) -> Any:
    return tf.reduce_mean((outputs - targets) ** 2, axis=-1)


def own_column(outputs: Any, targets: Any) -> Any:
    return (outputs[:, 0] - targets) ** 2


def no_targets(outputs: Any, targets: Any) -> Any:
    return tf.reduce_mean(outputs**2, axis=-1)


@pytest.mark.parametrize("function", [pairs, mean_of_pairs])
def test_outputs_and_targets_that_broadcast_to_all_pairs_are_refused(function: Any) -> None:
    words = r"broadcasts outputs of shape \(13, 1\) and targets of shape \(13,\) to \(13, 13\)"
    with pytest.raises(JobError, match="loss= " + words):
        ours(binary(), X, YES[:, 0], function)
    with pytest.raises(JobError, match="metric 'm' " + words):
        ours(binary(), X, YES[:, 0], losses.MeanSquaredError(), function)


@pytest.mark.parametrize("function", [own_column, no_targets])
def test_functions_that_look_at_one_sample_at_a_time_are_let_be(function: Any) -> None:
    assert len(ours(binary(), X, YES[:, 0], function)) == 1


# --- objects of a user's classes, which are made again in other processes ---------------------------------------------


class Focal(losses.Loss):  # type: ignore[misc]  # Keras has no types
    def __init__(self, gamma: float = 2.0, **given: Any) -> None:
        super().__init__(**given)
        self.gamma = gamma

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return focal(y_true, y_pred, self.gamma)


class Bare(Focal):
    def __init__(self, gamma: float) -> None:
        super().__init__(gamma, reduction="sum")


class Above(metrics.Metric):  # type: ignore[misc]  # Keras has no types
    def __init__(self, limit: float = 0.5, **given: Any) -> None:
        super().__init__(**given)
        self._limit, self.seen = limit, self.add_variable((), "zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign_add(tf.reduce_sum(tf.cast(y_pred > self._limit, tf.float32)))

    def result(self) -> Any:
        return self.seen


class Named(Above):
    def __init__(self) -> None:
        super().__init__(name="above")


class Score(metrics.F1Score):  # type: ignore[misc]  # Keras has no types
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)


class Complete(Above):
    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "limit": self._limit}


@pytest.mark.parametrize("loss", [Focal(4.0), Bare(4.0)])
def test_a_loss_of_a_users_class_keeps_its_arguments(loss: Focal) -> None:
    again = loads(dumps(loss))
    assert vars(again).keys() == vars(loss).keys()
    assert (type(again), again.gamma, again.reduction) == (type(loss), 4.0, loss.reduction)
    assert float(again(YES, 0.4 * YES + 0.2)) == float(loss(YES, 0.4 * YES + 0.2))
    digests = {CodeFingerprints().digest(type(loss)(gamma)) for gamma in (2.0, 4.0)}
    assert len(digests) == 2


def test_a_metric_that_cannot_be_made_again_is_refused() -> None:
    used = Score(threshold=0.5)
    used.update_state(YES, YES)
    for made in (Above(), Complete(0.9), used, metrics.AUC(num_thresholds=7)):
        again = loads(dumps(made))
        assert type(again) is type(made) and again.get_config() == made.get_config()
        MetricState("above", made)
    for metric, said in ((Above(0.9), "Above: .* would lose 'limit': return it from get_config"), (Named(), "kwargs")):
        with pytest.raises(JobError, match=said):
            dumps(metric)
        with pytest.raises(JobError, match=said):
            MetricState("above", metric)


def actual_first(actual: Any, predicted: Any) -> Any:
    return squared(actual, predicted) * tf.cast(actual > predicted, tf.float32)


def unknown(x: Any, predicted: Any) -> Any:
    return actual_first(x, predicted)


def test_names_that_leave_the_order_open_are_refused() -> None:
    expected = by_keras(binary(), X, YES, actual_first)
    assert ours(binary(), X, YES, actual_first) == pytest.approx(expected, rel=1e-6)
    for named in ({"loss": unknown}, {"loss": squared, "metric": unknown}):
        with pytest.raises(
            JobError, match=r"takes \(x, predicted\).* call them \(y_true, y_pred\), or \(outputs, targ"
        ):
            ours(binary(), X, YES, **named)
