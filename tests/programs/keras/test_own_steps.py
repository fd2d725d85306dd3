"""Models with a `train_step` of their own, such as GANs: beside Keras' `fit`, and from a checkpoint on."""

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
from tests.support.conformance.rank import Files
from tests.support.conformance.unbroken_runs import assert_same
from trainwright.core.errors import JobError
from trainwright.strategies.tensorflow.training.checkpoint_files import take_weights
from trainwright.strategies.tensorflow.training.keras_profile import profile_model

ROWS, BATCH, EPOCHS, WIDTH = 64, 16, 2, 4
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
layers = keras.layers


class Gan(keras.Model):
    """Two optimizers, noise, metrics, no call(), and no value that is called loss."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        self.seed = keras.random.SeedGenerator(5)
        self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(WIDTH)])
        self.discriminator = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(1, "sigmoid")])

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_mean, self.g_mean = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_mean, self.g_mean]

    def train_step(self, real: Any) -> Any:
        noise = keras.random.normal((tf.shape(real)[0], 2), seed=self.seed)
        with tf.GradientTape() as tape:
            right, wrong = self.discriminator(real), self.discriminator(self.generator(noise))
            d_loss = tf.reduce_mean((1 - right) ** 2) + tf.reduce_mean(wrong**2)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = tf.reduce_mean((1 - self.discriminator(self.generator(noise))) ** 2)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_mean.update_state(d_loss)
        self.g_mean.update_state(g_loss)
        return {"d_loss": self.d_mean.result(), "g_loss": self.g_mean.result()}


def gan() -> keras.Model:
    model = Gan()
    model.compile(keras.optimizers.Adam(0.03), keras.optimizers.Adam(0.01))
    return model


def job(**fields: Any) -> tw.Job:
    given: dict[str, Any] = {
        "name": "own", "train": tw.datasets.table({"x": X}), "inputs": "x", "batch_size": BATCH, "epochs": EPOCHS,
        "shuffle": False, "run": "fit", "model": gan,
    }  # fmt: skip
    return tw.Job(**{**given, **fields})


def test_a_gan_trains_as_keras_does_and_goes_on_from_a_checkpoint() -> None:
    model = gan()
    history = model.fit(X, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    whole = train(job())
    last = len(whole.losses) // EPOCHS - 1
    assert whole.losses[last :: last + 1] == pytest.approx(history["d_loss"], rel=1e-6)
    assert [report.learning_rate for report in whole.reports] == pytest.approx([0.03] * len(whole.reports))
    logged = [report.logged.means() for report in whole.reports]
    assert [epoch["g_loss"] for epoch in logged[last :: last + 1]] == pytest.approx(history["g_loss"], rel=1e-6)
    assert not any(logged[:last]), "values of an epoch are those of its last step"
    for own, theirs in zip(whole.model.trainable_weights, model.trainable_weights, strict=True):
        assert np.allclose(own, theirs, rtol=0, atol=1e-6)
    first = train(job(), steps=slice(3))
    rest = train(job(), first.files, slice(3, None))
    assert rest.losses == whole.losses[3:]
    assert_same(*(tensorflow_case.state(each.files) for each in (rest, whole)))


def test_a_loaded_model_with_optimizers_of_its_own_trains_on() -> None:
    model = gan()
    take_weights(model, Files(train(job(), steps=slice(3)).files))
    before = [weight.numpy() for weight in model.trainable_weights]
    model.fit(X, batch_size=BATCH, verbose=0)
    after = [weight.numpy() for weight in model.trainable_weights]
    assert any(not np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_a_model_without_call_is_planned_by_its_weights() -> None:
    profile = profile_model(gan, {"x": X[:1]}, ("x",))
    assert "no call()" in profile.untraced
    assert sum(layer.parameters for layer in profile.layers) == (2 + 1) * WIDTH + WIDTH + 1


class Hidden(keras.Model):
    """Its optimizer and its noise are where no checkpoint would look for them."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        self.dense = layers.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        x = data + keras.random.normal(tf.shape(data))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - data) ** 2)
        OUTSIDE["optimizer"].apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


OUTSIDE: dict[str, Any] = {}


def hidden() -> keras.Model:
    model = Hidden()
    model.build((None, WIDTH))
    model.compile()
    OUTSIDE["optimizer"] = keras.optimizers.Adam(0.03)
    return model


def test_what_a_step_uses_is_kept_wherever_it_is() -> None:
    whole = train(job(model=hidden))
    first = train(job(model=hidden), steps=slice(3))
    rest = train(job(model=hidden), first.files, slice(3, None))
    assert rest.losses == whole.losses[3:]
    assert_same(*(tensorflow_case.state(each.files) for each in (rest, whole)))


class Silent(Hidden):
    def train_step(self, data: Any) -> Any:
        return {}


class Eager(Hidden):
    def train_step(self, data: Any) -> Any:
        float(tf.reduce_sum(data).numpy())
        return super().train_step(data)


def made(kind: type[keras.Model], optimizer: Any = None) -> keras.Model:
    model = kind()
    model.build((None, WIDTH))
    model.compile(run_eagerly=kind is Eager)
    model.own = optimizer or keras.optimizers.Adam()
    return model


def test_what_cannot_be_told_or_resumed_is_refused_before_the_first_step() -> None:
    with pytest.raises(JobError, match="returns no dict of values"):
        train(job(model=lambda: made(Silent)))
    with pytest.raises(JobError, match="could not be resumed: call its build"):
        train(job(model=lambda: made(Eager)))


def autoencoder() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(2, "tanh"), layers.Dense(WIDTH)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError(name="rmse")])
    return model


@pytest.mark.soak
def test_two_devices_evaluate_any_number_of_rows_as_one(pool: Pool) -> None:
    """With a last batch of fewer rows than devices, and a metric that is no mean."""
    rows = 33
    data = tw.datasets.table({"x": X[:rows], "y": X[:rows]})
    whole = tw.datasets.table({"x": X, "y": X})
    two = train_mirrored(pool, job(model=autoencoder, train=whole, evaluate=data, targets="y", epochs=1))
    model = autoencoder()
    history = model.fit(X, X, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    assert epochs(two.losses, ROWS, BATCH) == pytest.approx(history["loss"], rel=1e-6)
    expected = model.evaluate(X[:rows], X[:rows], batch_size=BATCH, verbose=0, return_dict=True)
    assert two.means == pytest.approx(expected, rel=1e-6)


def test_a_gan_trains_on_two_devices_and_saves_what_its_optimizers_hold(pool: Pool) -> None:
    trained = train_mirrored(pool, job())
    assert np.isfinite(trained.losses).all() and len(trained.losses) == 8
    assert [report.learning_rate for report in trained.reports] == pytest.approx([0.03] * 8)
    assert train(job(), trained.files, slice(7, 8)).losses


class Computing(keras.Model):
    """Its step computes the metrics of `compile`, as in Keras' guide."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return self.compute_metrics(x, y, outputs)


def computing() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((WIDTH,))
    model = Computing(inputs, [layers.Dense(WIDTH, name="a")(inputs), layers.Dense(WIDTH, name="b")(inputs)])
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"], metrics=[["mae"], ["mae"]])
    return model


def test_metrics_of_compile_are_made_once_for_two_devices(pool: Pool) -> None:
    data = tw.datasets.table({"x": X, "y": X, "z": X})
    given = job(model=computing, train=data, evaluate=data, targets=("y", "z"))
    alone, two = train(given), train_mirrored(pool, given)
    for own, other in zip(two.reports[3::4], alone.reports[3::4], strict=True):
        assert own.logged.means() == pytest.approx(other.logged.means(), rel=1e-5)
    assert two.means == pytest.approx(alone.means, rel=1e-5)


class OwnLoss(keras.Model):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def descent(variables: Any) -> Any:
    return keras.optimizers.SGD(0.1)


@pytest.mark.parametrize(("kind", "name"), [(Computing, "train_step"), (OwnLoss, "compute_loss")])
def test_trainwrights_steps_leave_out_no_step_of_the_model(kind: type[keras.Model], name: str) -> None:
    def build() -> keras.Model:
        inputs = keras.Input((WIDTH,))
        return kind(inputs, layers.Dense(WIDTH)(inputs))

    def squares(model: Any, batch: Any) -> Any:
        return tf.reduce_mean((model(batch["x"]) - batch["x"]) ** 2, axis=1)

    own: dict[str, Any] = {"model": build, "run": "step", "optimizer": descent}
    with pytest.raises(JobError, match=rf'has a {name}\(\) of its own.*: set run="fit", or'):
        train(job(**own, targets="x", loss=keras.losses.MeanSquaredError()))
    assert train(job(**own, inputs=(), step=squares)).losses
