"""Inputs as Keras users have them, beside Keras' own `fit` on the same rows in the same order."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import trainwright as tw
from tests.programs.keras.engines import epochs, train
from trainwright.core.errors import JobError
from trainwright.strategies.tensorflow.training.keras_profile import profile_model

ROWS, BATCH, EPOCHS = 70, 16, 2
DATA = np.random.default_rng(0).normal(size=(ROWS, 9)).astype("float32")
LABELS = (DATA[:, 8:] > 0).astype("float32")
PARTS = {"a": DATA[:, :4], "b": DATA[:, 4:8]}
layers = keras.layers


class OfDict(keras.Model):
    """Takes its inputs as one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1, activation="sigmoid", kernel_initializer="ones")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.dense(keras.ops.concatenate([inputs["a"], inputs["b"] * 0.5], axis=-1))


class OfList(OfDict):
    """Takes its inputs as one list."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return super().call({"a": inputs[0], "b": inputs[1]})


class OfArguments(OfDict):
    """Takes each input as an argument."""

    def call(self, a: Any, b: Any, training: bool = False) -> Any:
        return super().call({"a": a, "b": b})


def functional() -> keras.Model:
    inputs = {name: keras.Input((4,), name=name) for name in PARTS}
    return keras.Model(inputs, OfDict().dense(layers.concatenate([inputs["a"], inputs["b"] * 0.5])))


def compiled() -> keras.Model:
    """As a file gives it that was saved after training."""
    model = functional()
    model.compile("adam", "mse", metrics=["mae"])
    return model


def job(**fields: Any) -> tw.Job:
    given: dict[str, Any] = {
        "name": "inputs", "train": tw.datasets.table({**PARTS, "y": LABELS}), "targets": "y", "batch_size": BATCH,
        "epochs": EPOCHS, "shuffle": False, "loss": keras.losses.BinaryCrossentropy(),
        "optimizer": lambda variables: keras.optimizers.SGD(0.5),
    }  # fmt: skip
    return tw.Job(**{**given, **fields})


def by_fit(model: keras.Model, inputs: Any) -> list[float]:
    """Losses of epochs."""
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    history = model.fit(inputs, LABELS, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return list(history.history["loss"])


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (OfDict, {"a": "a", "b": "b"}),
        (OfList, ("a", "b")),
        (OfArguments, {"a": "a", "b": "b"}),
        (OfArguments, ("a", "b")),
        (functional, {"a": "a", "b": "b"}),
        (compiled, {"a": "a", "b": "b"}),
    ],
)
def test_models_take_their_inputs_as_keras_gives_them(model: Any, inputs: Any) -> None:
    trained = train(job(model=model, inputs=inputs))
    assert epochs(trained.losses, ROWS, BATCH) == pytest.approx(by_fit(OfDict(), PARTS), rel=1e-6)
    plain = job(model=model, inputs=inputs)
    sample = {name: column[:1] for name, column in PARTS.items()}
    assert not profile_model(model, sample, plain.arguments, keywords=plain.keywords).untraced


def test_a_compiled_model_that_takes_a_dict_trains_by_fit() -> None:
    def own() -> keras.Model:
        model = OfDict()
        model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
        return model

    trained = train(job(model=own, inputs={"a": "a", "b": "b"}, run="fit", loss=None, optimizer=None))
    assert epochs(trained.losses, ROWS, BATCH) == pytest.approx(by_fit(OfDict(), PARTS), rel=1e-6)


def test_columns_may_be_slices_of_an_array() -> None:
    sliced, copied = ({"x": DATA[:, :4], "y": column} for column in (DATA[:, 8], DATA[:, 8].copy()))
    data = tw.datasets.table(sliced)
    assert data.index().hash == tw.datasets.table(copied).index().hash
    assert np.array_equal(data.read(data.index(), range(ROWS))["y"], DATA[:, 8])


def test_a_job_without_loss_and_optimizer_is_told_of_fit() -> None:
    with pytest.raises(JobError, match='compiled Keras model, run="fit" trains it'):
        job(model=functional, inputs=("a", "b"), loss=None, optimizer=None)


# --- outputs in a dict ------------------------------------------------------------------------------------------------


def of_two() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, {"price": layers.Dense(1)(inputs), "cls": layers.Dense(1)(inputs)})
    model.compile(keras.optimizers.SGD(0.1), loss={"price": "mse", "cls": "mae"})
    return model


@pytest.mark.parametrize("targets", [("price", "cls"), ("cls", "price")])
def test_targets_of_outputs_in_a_dict_go_by_their_names(targets: Any) -> None:
    columns = {"price": 10 + LABELS, "cls": LABELS}
    data = tw.datasets.table({"a": PARTS["a"], **columns})
    trained = train(job(model=of_two, inputs="a", train=data, targets=targets, run="fit", loss=None, optimizer=None))
    history = of_two().fit(PARTS["a"], columns, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    assert epochs(trained.losses, ROWS, BATCH) == pytest.approx(history["loss"], rel=1e-6)


def test_targets_with_other_names_than_outputs_in_a_dict_are_refused() -> None:
    data = tw.datasets.table({"a": PARTS["a"], "y": LABELS, "cls": LABELS})
    given = job(model=of_two, inputs="a", train=data, targets=("y", "cls"), run="fit", loss=None, optimizer=None)
    with pytest.raises(JobError, match="keys 'price', 'cls', and targets= are the columns 'y', 'cls': give each"):
        train(given)
