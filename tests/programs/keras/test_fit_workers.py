"""Keras' `fit` on several workers, in programs as tutorials have them: each equals `fit` itself on one device."""

from __future__ import annotations

import csv
import functools
import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainwright as tw
from tests.programs.keras.engines import epochs, plan_of, spec_of, train_on_workers, weights_of
from tests.support.conformance.harness import Pool
from trainwright.core.errors import JobError
from trainwright.strategies.tensorflow.fit_workers import _CompiledOnWorkers, _WorkerSums

SIDE, CLASSES, BATCH = 8, 3, 16
RANDOM = np.random.default_rng(0)
layers = keras.layers


def images(rows: int) -> tuple[Any, Any]:
    """Images with a bright third, which is the class."""
    labels = RANDOM.integers(0, CLASSES, rows)
    pixels = RANDOM.normal(size=(rows, SIDE, SIDE)).astype("float32")
    pixels += 1.5 * (np.arange(SIDE) * CLASSES // SIDE == labels[:, None])[:, None, :]
    return pixels, labels


X, Y = images(61)  # four batches, the last of 13 rows
JUDGED = images(33)  # the last batch has one row: fewer than workers


def job(model: Any, **fields: Any) -> tw.Job:
    given: dict[str, Any] = {
        "train": tw.datasets.table({"x": X, "y": Y}),
        "evaluate": tw.datasets.table({"x": JUDGED[0], "y": JUDGED[1]}),
        "batch_size": BATCH, "epochs": 3, "shuffle": False,
    }  # fmt: skip
    return tw.Job(name="workers", model=model, run="fit", **{"inputs": "x", "targets": "y", **given, **fields})


def assert_weights(found: list[Any], expected: list[Any]) -> None:
    for own, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=0, atol=2e-5)


def assert_logs(ours: Path, theirs: Path) -> list[Any]:
    """The logs of epochs are alike in two folders; return those of the first one."""
    found, expected = (list(csv.DictReader((folder / "log.csv").read_text().splitlines())) for folder in (ours, theirs))
    for one, other in zip(found, expected, strict=True):
        assert {name: float(value) for name, value in one.items()} == pytest.approx(
            {name: float(value) for name, value in other.items()}, rel=1e-4, abs=1e-6
        )
    return found


# --- tensorflow.org/tutorials/distribute/multi_worker_with_keras ------------------------------------------------------


def tutorial() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input(shape=(SIDE, SIDE)),
            layers.Reshape(target_shape=(SIDE, SIDE, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


def test_the_multi_worker_tutorial(pool: Pool) -> None:
    """With weights of classes, and gradients summed in packs."""
    given: dict[str, Any] = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "class_weight": {0: 3.0, 2: 0.5}}
    trained = train_on_workers(pool, job(tutorial, communication="ring", bytes_per_pack=64, **given))
    model = tutorial()
    history = model.fit(X, Y, verbose=0, **given).history
    assert epochs(trained.losses, len(X), BATCH) == pytest.approx(history["loss"], rel=1e-5)
    assert [each.logged.means()["accuracy"] for each in trained.reports if each.logged.totals] == history["accuracy"]
    assert_weights(weights_of(tutorial(), trained), model.get_weights())
    judged = model.evaluate(*JUDGED, batch_size=BATCH, verbose=0, return_dict=True)
    assert trained.means == pytest.approx(judged, rel=1e-5)


# --- an image classifier with the callbacks of most programs ----------------------------------------------------------


def classifier() -> keras.Model:
    keras.utils.set_random_seed(2)
    inputs = keras.Input(shape=(SIDE, SIDE))
    x = layers.Rescaling(0.5)(inputs)
    x = layers.Reshape((SIDE, SIDE, 1))(x)
    x = layers.Conv2D(6, 3, strides=2, activation="relu")(x)
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.Dense(CLASSES, activation="softmax", kernel_regularizer="l2")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.1, global_clipnorm=1.0), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def callbacks(folder: str) -> list[Any]:
    return [
        keras.callbacks.EarlyStopping("val_loss", min_delta=0.004, patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.3, patience=1, min_delta=0.004),
        keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", save_best_only=True),
        keras.callbacks.ModelCheckpoint(f"{folder}/right.keras", "val_accuracy", save_best_only=True),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        keras.callbacks.TensorBoard(f"{folder}/curves"),
    ]


def curves(folder: Path) -> list[tuple[str, int, float]]:
    """The values by name and epoch that a TensorBoard callback has written below a folder."""
    found = []
    for file in folder.rglob("*.tfevents.*.v2"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.tag.startswith("epoch_"):
                    found.append((f"{file.parent.name} {value.tag}", event.step, float(tf.make_ndarray(value.tensor))))
    return sorted(found)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' ReduceLROnPlateau
def test_an_image_classifier_with_callbacks(pool: Pool, tmp_path: Path) -> None:
    """Training ends early, at a lower learning rate, with the weights of the best epoch."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    trained = train_on_workers(pool, job(classifier, epochs=40, callbacks=functools.partial(callbacks, str(ours))))
    model = classifier()
    model.fit(
        X, Y, batch_size=BATCH, epochs=40, shuffle=False, verbose=0, validation_data=JUDGED,
        validation_batch_size=BATCH, callbacks=callbacks(str(theirs)),
    )  # fmt: skip
    assert 5 < len(assert_logs(ours, theirs)) < 40
    assert_weights(weights_of(classifier(), trained), model.get_weights())
    best, other_best = (keras.models.load_model(folder / "best.keras").get_weights() for folder in (ours, theirs))
    assert_weights(best, other_best)
    written, expected = curves(ours), curves(theirs)
    assert [each[:2] for each in written] == [each[:2] for each in expected] and len(written) > 20
    assert [each[2] for each in written] == pytest.approx([each[2] for each in expected], rel=1e-4)


# --- losses and metrics of every kind ---------------------------------------------------------------------------------

ROWS, FEW, WIDTH, WORDS, STEPS = 29, 1, 6, 9, 5  # batches of 16 and 13 rows; the evaluation has fewer rows than workers
TOKENS = np.where(
    np.arange(STEPS) < RANDOM.integers(1, STEPS + 1, (ROWS, 1)), RANDOM.integers(1, WORDS, (ROWS, STEPS)), 0
)
COLUMNS = {
    "x": RANDOM.normal(size=(ROWS, WIDTH)).astype("float32"),
    "kind": RANDOM.integers(0, CLASSES, ROWS),
    "yes": RANDOM.integers(0, 2, (ROWS, 1)).astype("float32"),
    "value": RANDOM.normal(size=(ROWS, 1)).astype("float32"),
    "weight": RANDOM.uniform(0.0, 3.0, ROWS).astype("float32"),
    "tokens": TOKENS,
    "tags": TOKENS % CLASSES,
    "weights": RANDOM.uniform(0.0, 3.0, (ROWS, STEPS)).astype("float32"),
}


def of_columns(model: Any, inputs: str, targets: tuple[str, ...], folder: Path, **fields: Any) -> tw.Job:
    data, few = (tw.datasets.table({name: each[:rows] for name, each in COLUMNS.items()}) for rows in (ROWS, FEW))
    return job(
        model, train=data, evaluate=few, inputs=inputs, targets=targets,
        callbacks=functools.partial(logging, str(folder)), **fields,
    )  # fmt: skip


def logging(folder: str) -> list[Any]:
    Path(folder).mkdir(exist_ok=True)
    return [keras.callbacks.CSVLogger(f"{folder}/log.csv")]


def fit_columns(model: keras.Model, inputs: str, targets: tuple[str, ...], folder: Path, weight: str = "") -> None:
    """Train by Keras itself."""
    chosen = (*targets, *([weight] if weight else ()))

    def batches(rows: int) -> Any:
        columns = [COLUMNS[name][:rows] for name in chosen]
        goals = columns[: len(targets)]
        parts = (COLUMNS[inputs][:rows], tuple(goals) if len(goals) > 1 else goals[0], *columns[len(targets) :])
        return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)

    model.fit(
        batches(ROWS), epochs=3, shuffle=False, verbose=0, validation_data=batches(FEW), callbacks=logging(str(folder))
    )


def branched() -> keras.Model:
    keras.utils.set_random_seed(4)
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l2")(inputs)
    outputs = [
        layers.Dense(CLASSES, "softmax", name="kind")(x),
        layers.Dense(1, "sigmoid", name="yes")(x),
        layers.Dense(1, name="value")(x),
    ]
    model = keras.Model(inputs, outputs)
    metrics = keras.metrics
    model.compile(
        keras.optimizers.SGD(0.3, momentum=0.9, clipnorm=0.5),
        ["sparse_categorical_crossentropy", "binary_crossentropy", keras.losses.MeanSquaredError(reduction="sum")],
        loss_weights=[1.0, 0.5, 0.02],
        metrics=[
            ["accuracy", metrics.MeanIoU(CLASSES, sparse_y_pred=False, name="iou")],
            [metrics.AUC(name="auc"), metrics.F1Score(threshold=0.5, average="micro", name="f1")],
            [metrics.RootMeanSquaredError(name="rmse"), metrics.R2Score(name="r2")],
        ],
        weighted_metrics=[[], [metrics.Precision(name="sure")], ["mae"]],
    )
    return model


@pytest.mark.soak
def test_several_outputs_and_metrics_with_state(pool: Pool, tmp_path: Path) -> None:
    targets = ("kind", "yes", "value")
    given = of_columns(branched, "x", targets, tmp_path / "ours", sample_weight="weight")
    trained = train_on_workers(pool, given)
    model = branched()
    fit_columns(model, "x", targets, tmp_path / "theirs", weight="weight")
    assert len(assert_logs(tmp_path / "ours", tmp_path / "theirs")) == 3
    assert_weights(weights_of(branched(), trained), model.get_weights())


@pytest.fixture(params=["mean_with_sample_weight", pytest.param("sum_over_batch_size", marks=pytest.mark.soak)])
def reduction(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tagger(reduction: str) -> keras.Model:
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int64"),
            layers.Embedding(WORDS, 6, mask_zero=True),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    return model


def test_masks_and_means_by_weight(pool: Pool, tmp_path: Path, reduction: str) -> None:
    build, weight = functools.partial(tagger, reduction), "weights" if reduction.startswith("mean") else ""
    fields = {"sample_weight": weight} if weight else {}
    trained = train_on_workers(pool, of_columns(build, "tokens", ("tags",), tmp_path / "ours", **fields))
    model = build()
    fit_columns(model, "tokens", ("tags",), tmp_path / "theirs", weight)
    assert_logs(tmp_path / "ours", tmp_path / "theirs")
    assert_weights(weights_of(build(), trained), model.get_weights())


class Autoencoder(keras.Model):
    """As on keras.io: with its own step, means and metrics; and with a running mean that is no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = layers.Dense(2, "tanh"), layers.Dense(WIDTH)
        self.loss_tracker, self.penalty_tracker = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="penalty")
        self.center = self.add_weight(shape=(WIDTH,), initializer="zeros", trainable=False, name="center")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.penalty_tracker]

    def call(self, inputs: Any) -> Any:
        return self.outer(self.inner(inputs))

    def train_step(self, data: Any) -> Any:
        x, _ = data
        with tf.GradientTape() as tape:
            penalty = tf.reduce_mean(tf.reduce_sum(tf.square(self.inner(x)), axis=1))
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(x - self.center - self(x)), axis=1)) + 0.1 * penalty
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(x, axis=0))
        rows = tf.shape(x)[0]
        self.loss_tracker.update_state(loss, sample_weight=rows)
        self.penalty_tracker.update_state(penalty, sample_weight=rows)
        return {"loss": self.loss_tracker.result(), "penalty": self.penalty_tracker.result(), "last": penalty}

    def test_step(self, data: Any) -> Any:
        x, _ = data
        self.loss_tracker.update_state(tf.reduce_mean(tf.square(x - self(x))), sample_weight=tf.shape(x)[0])
        return {"loss": self.loss_tracker.result()}


def autoencoder() -> keras.Model:
    keras.utils.set_random_seed(6)
    model = Autoencoder()
    model(np.zeros((1, WIDTH), "float32"))
    model.compile(keras.optimizers.Adam(0.02))
    return model


def test_a_step_of_its_own_with_its_own_means(pool: Pool, tmp_path: Path) -> None:
    trained = train_on_workers(pool, of_columns(autoencoder, "x", ("value",), tmp_path / "ours"))
    model = autoencoder()
    fit_columns(model, "x", ("value",), tmp_path / "theirs")
    assert_logs(tmp_path / "ours", tmp_path / "theirs")
    assert_weights(weights_of(autoencoder(), trained), model.get_weights())


# --- random numbers ---------------------------------------------------------------------------------------------------


class Noise(layers.Layer):
    """Adds numbers without a seed in a branch."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not (training and self.draws):
            return inputs
        return tf.cond(
            tf.reduce_sum(inputs) > 0, lambda: inputs + keras.random.normal(tf.shape(inputs)), lambda: inputs
        )


class OwnSums(_WorkerSums):
    """Of the second of two workers: its own values."""

    def __init__(self) -> None:
        super().__init__(tf.distribute.get_strategy(), 1, 2, None)
        self.seeds = 0

    def sum(self, values: Any) -> list[Any]:
        found = [tf.convert_to_tensor(value) for value in values]
        self.seeds += sum(not value.dtype.is_floating for value in found)
        return found


@pytest.mark.parametrize("draws", [False, True])
def test_only_the_seeds_that_a_step_draws_from_are_summed(draws: bool) -> None:
    def noisy() -> keras.Model:
        model = keras.Sequential([keras.Input((WIDTH,)), layers.Dropout(0.5), Noise(draws), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    given = job(noisy, train=tw.datasets.table(COLUMNS), targets="value", evaluate=None)
    sums, spec = OwnSums(), spec_of(given, 2)
    compiled = _CompiledOnWorkers(spec, plan_of(given), "rank 1", sums)
    compiled.make_functions()
    dropped, unseeded = compiled.carried["seeds"]
    before = unseeded.numpy()
    compiled.train([(COLUMNS["x"], COLUMNS["value"])])
    assert sums.seeds == 1 + draws
    assert dropped.numpy().tolist() == [0, 0], "the sum of what the first worker has"
    assert (unseeded.numpy() == before).all() != draws


# --- decisions of callbacks -------------------------------------------------------------------------------------------


def rank() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker")


def disagreeing() -> list[Any]:
    """Another learning rate on each worker, and an end that the second worker alone wants."""

    def rate(epoch: int) -> float:
        return 0.1 / (epoch + 1 + rank())

    def end(batch: int, logs: Any) -> None:
        ending.model.stop_training = batch == 1 and rank() == 1 and ending.model.optimizer.iterations.numpy() > 4

    ending = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    return [keras.callbacks.LearningRateScheduler(rate), ending]


def test_workers_agree_on_the_rate_and_the_end(pool: Pool) -> None:
    trained = train_on_workers(pool, job(tutorial, evaluate=None, callbacks=disagreeing))
    assert [report.learning_rate for report in trained.reports] == pytest.approx([0.1] * 4 + [0.05] * 2)
    assert trained.reports[-1].finished


def drifting() -> list[Any]:
    def drift(batch: int, logs: Any) -> None:
        weights = drifted.model.trainable_variables[0]
        weights.assign(weights + 0.001 * rank())

    drifted = keras.callbacks.LambdaCallback(on_train_batch_end=drift)
    return [drifted]


def recompiling() -> list[Any]:
    def compile_again(epoch: int, logs: Any) -> None:
        if rank() == 1:
            own.model.make_train_function(force=True)

    own = keras.callbacks.LambdaCallback(on_epoch_begin=compile_again)
    return [own]


class Largest(keras.metrics.Metric):
    """The largest value: no sum."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(tf.maximum(self.most, tf.reduce_max(tf.abs(y_pred))))

    def result(self) -> Any:
        return self.most


def with_largest() -> keras.Model:
    model = tutorial()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[Largest()])
    return model


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": tutorial, "callbacks": drifting}, "the model of rank 1 is not that of rank 0 after step 1"),
        ({"model": tutorial, "callbacks": recompiling}, "compiles the model's step again on 1 of 2 workers"),
        ({"model": with_largest}, "metric variable 'largest/most' is not a sum over batches"),
    ],
    ids=["drift", "compiled", "metric"],
)
def test_what_workers_cannot_do_is_said(pool: Pool, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        train_on_workers(pool, job(fields.pop("model"), evaluate=None, **fields))
