"""Preprocessing layers inside a model, beside Keras' own `fit`; on two devices as on one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainwright as tw
from tests.programs.keras.engines import epochs, train, train_mirrored
from tests.support.conformance import tensorflow_case
from tests.support.conformance.harness import Pool
from tests.support.conformance.unbroken_runs import assert_same
from trainwright.core.pickling import dumps, loads

ROWS, BATCH, EPOCHS = 64, 16, 2
RANDOM = np.random.default_rng(0)
AGE = RANDOM.normal(50, 10, (ROWS, 1)).astype("float32")
GRADE = RANDOM.integers(0, 4, ROWS)
KIND = np.array(["fixed", "normal", "reversible"])[RANDOM.integers(0, 3, ROWS)]
TEXT = np.array([["a good film"], ["a bad film!"]])[RANDOM.integers(0, 2, ROWS)]
LABEL = ((AGE[:, 0] > 50) ^ (KIND == "fixed")).astype("float32")[:, None]
INPUTS = {"age": AGE, "grade": GRADE, "kind": KIND, "text": TEXT}
layers = keras.layers


def tabular() -> keras.Model:
    """Adapted numbers, strings, integers and text; hashed and crossed."""
    keras.utils.set_random_seed(3)
    age, grade = keras.Input((1,), name="age"), keras.Input((), dtype="int64", name="grade")
    kind, text = keras.Input((), dtype="string", name="kind"), keras.Input((1,), dtype="string", name="text")
    normal, number = layers.Normalization(), layers.IntegerLookup(output_mode="one_hot")
    word, words = layers.StringLookup(output_mode="one_hot"), layers.TextVectorization(output_sequence_length=3)
    for layer, column in ((normal, AGE), (number, GRADE), (word, KIND), (words, TEXT)):
        layer.adapt(column)
    embedded = layers.Flatten()(layers.Embedding(9, 2)(words(text)))
    crossed = layers.HashedCrossing(8, output_mode="one_hot")((kind, layers.Hashing(3)(kind)))
    one_hot = layers.CategoryEncoding(4, output_mode="one_hot")(grade)
    joined = layers.concatenate([normal(age), number(grade), word(kind), embedded, crossed, one_hot])
    hidden = layers.Dense(4, activation="tanh")(joined)
    return keras.Model({"age": age, "grade": grade, "kind": kind, "text": text}, layers.Dense(1, "sigmoid")(hidden))


def sgd(variables: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.5)


def compiled() -> keras.Model:
    model = tabular()
    model.compile(sgd(None), "binary_crossentropy")
    return model


def job(**fields: Any) -> tw.Job:
    data = tw.datasets.table({**INPUTS, "y": LABEL})
    given: dict[str, Any] = {
        "name": "tabular", "train": data, "inputs": {name: name for name in INPUTS}, "targets": "y",
        "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False,
    }  # fmt: skip
    return tw.Job(**{**given, **fields})


STEP: dict[str, Any] = {"model": tabular, "loss": keras.losses.BinaryCrossentropy(), "optimizer": sgd}
FIT: dict[str, Any] = {"model": compiled, "run": "fit"}


@pytest.fixture(scope="module")
def by_fit() -> list[float]:
    """Losses of Keras' epochs."""
    given = {name: tf.constant(column) for name, column in INPUTS.items()}
    found = compiled().fit(given, LABEL, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return list(found.history["loss"])


@pytest.mark.parametrize("fields", [STEP, FIT], ids=["step", "fit"])
def test_adapted_layers_train_as_keras_does_and_go_on_from_a_checkpoint(
    fields: dict[str, Any], by_fit: list[float]
) -> None:
    whole = train(job(**fields))
    assert epochs(whole.losses, ROWS, BATCH) == pytest.approx(by_fit, rel=1e-6)
    half = len(whole.losses) // 2
    first = train(job(**fields), steps=slice(half))
    rest = train(job(**fields), first.files, slice(half, None))
    assert rest.losses == whole.losses[half:]
    assert_same(*(tensorflow_case.state(each.files) for each in (rest, whole)))


@pytest.mark.parametrize("fields", [STEP, FIT], ids=["step", "fit"])
def test_two_devices_train_adapted_layers_as_one(pool: Pool, fields: dict[str, Any], by_fit: list[float]) -> None:
    trained = train_mirrored(pool, job(**fields, cross_device_ops="hierarchical_copy"))
    assert epochs(trained.losses, ROWS, BATCH) == pytest.approx(by_fit, rel=1e-6)


def counting() -> keras.Model:
    class Counting(layers.Layer):
        """Counts its calls in integers, and follows the mean of its inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
            self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.calls.assign_add(1)
                self.mean.assign(keras.ops.mean(inputs))
            return inputs

    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((1,)), layers.Rescaling(0.01), Counting(), layers.Dense(1, "sigmoid")])


def test_state_of_any_type_is_one_on_two_devices(pool: Pool) -> None:
    one, two = (
        trained(job(model=counting, loss=keras.losses.BinaryCrossentropy(), optimizer=sgd, inputs="age"))
        for trained in (train, lambda given: train_mirrored(pool, given))
    )
    assert one.losses == pytest.approx(two.losses, rel=1e-6)
    state, other = (tensorflow_case.state(each.files) for each in (one, two))
    assert any(value.dtype == np.int64 and value == len(one.losses) for name, value in state.items() if "model" in name)
    for name, value in state.items():
        if value.dtype.kind in "if":
            assert other[name] == pytest.approx(value, rel=1e-5), name


@keras.saving.register_keras_serializable()
def registered(text: Any) -> Any:
    return tf.strings.regex_replace(tf.strings.lower(text), "!", "")


def unregistered(text: Any) -> Any:
    return tf.strings.regex_replace(tf.strings.lower(text), "!", "")


@pytest.mark.parametrize("standardize", [registered, unregistered])
def test_a_layer_in_a_closure_takes_its_functions_along(standardize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layers.TextVectorization(standardize=standardize, output_sequence_length=3)
    layer.adapt(TEXT)
    packed = dumps(lambda text: layer(text))
    monkeypatch.setattr("keras.src.saving.object_registration.GLOBAL_CUSTOM_OBJECTS", {})  # as in a new process
    vectorize = loads(packed)
    assert np.array_equal(vectorize(tf.constant(TEXT)), layer(tf.constant(TEXT)))
    assert "Custom>registered" in keras.saving.get_custom_objects()  # model() may load a file that names it
