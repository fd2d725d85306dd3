"""Random numbers, rates and logs of everyday Keras programs, also where a run goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainwright as tw
from tests.programs.keras.engines import train, train_mirrored, train_on_workers, weights_of
from tests.support.conformance.harness import Pool
from trainwright.core.errors import JobError

ROWS, BATCH, EPOCHS = 40, 16, 3  # three steps an epoch, the last of 8 rows
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 8)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
AT = slice(4, None)  # within the second epoch
layers = keras.layers


def job(model: Any, **fields: Any) -> tw.Job:
    given = {"inputs": "x", "targets": "y", "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
    given["train"] = tw.datasets.table({"x": X, "y": Y, "z": Y})
    return tw.Job(name="resumed", model=model, **{**given, **fields})


def dense(metrics: Any = (), optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(1, "sigmoid")])
    model.compile(optimizer or keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=list(metrics))
    return model


# --- random numbers without a seed ------------------------------------------------------------------------------------


class Noise(layers.Layer):
    """Adds numbers without a seed."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs)) if training else inputs


def noisy() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((8,)), Noise(), layers.Dense(1, kernel_initializer="ones")])


def still(variables: Any) -> Any:
    return keras.optimizers.SGD(0.0)


@pytest.mark.parametrize("run", ["step", "fit"])
def test_numbers_without_a_seed_are_others_in_each_step_and_the_same_after_a_checkpoint(run: str, pool: Pool) -> None:
    """All rows, weights and rates are the same in each step: losses differ by the random numbers alone."""
    data = tw.datasets.table({"x": np.ones_like(X[:32]), "y": Y[:32] * 0})
    given = job(noisy, train=data, optimizer=still, loss=keras.losses.MeanSquaredError(), run=run)
    whole = train(given)
    assert len(set(whole.losses)) == len(whole.losses) == 6
    assert train(given, whole.early, slice(4, None)).losses == whole.losses[4:]
    assert train(given).losses == whole.losses
    on_devices = [train_mirrored(pool, given)] if run == "step" else []  # Keras' fit makes a generator on each device
    for several in (*on_devices, train_on_workers(pool, given)):
        assert len(set(several.losses)) == 6


def outside() -> keras.Model:
    keras.utils.set_random_seed(1)
    seed = keras.random.SeedGenerator(3)
    inputs = keras.Input((8,))
    noise = layers.Lambda(lambda each: each + keras.random.normal(keras.ops.shape(each), seed=seed))
    return keras.Model(inputs, layers.Dense(1)(noise(inputs)))


def test_a_generator_that_no_layer_holds_is_refused() -> None:
    with pytest.raises(JobError, match="no layer holds it: make it an attribute"):
        train(job(outside, optimizer=still, loss=keras.losses.MeanSquaredError()))


# --- short batches ----------------------------------------------------------------------------------------------------


def normed() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16), layers.BatchNormalization(), layers.Dense(1, "sigmoid")]
    )
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "binary_crossentropy")
    return model


def test_a_run_that_goes_on_with_a_short_batch_has_the_bits_of_one_that_was_not_interrupted() -> None:
    rows = np.random.default_rng(0).normal(size=(60, 8)).astype("float32")
    data = tw.datasets.table({"x": rows, "y": (rows[:, :1] > 0).astype("float32")})
    given = job(normed, run="fit", train=data, batch_size=24)
    whole = train(given)
    for place in (2, 3):  # before the short batch, and after it
        begun = train(given, steps=slice(0, place))
        rest = train(given, begun.files, slice(place, None))
        assert rest.losses == whole.losses[place:]
        for own, other in zip(weights_of(normed(), rest), weights_of(normed(), whole), strict=True):
            np.testing.assert_array_equal(own, other)


# --- learning rates ---------------------------------------------------------------------------------------------------


def halving() -> list[Any]:
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate)]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' LearningRateScheduler
def test_a_rate_that_falls_by_epoch_falls_once_where_a_run_goes_on() -> None:
    given = job(dense, run="fit", callbacks=halving)
    whole = train(given)
    assert [report.learning_rate for report in whole.reports] == [0.5] * 3 + [0.25] * 3 + [0.125] * 3
    for place in (3, 4):
        begun = train(given, steps=slice(0, place))
        rest = train(given, begun.files, slice(place, None))
        assert [report.learning_rate for report in rest.reports] == [
            report.learning_rate for report in whole.reports[place:]
        ]
        assert rest.losses == whole.losses[place:]


def uncompiled() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((8,)), layers.Dense(1)])


def with_rate(rate: Any) -> Callable[[Any], Any]:
    return lambda variables: keras.optimizers.SGD(rate)


def test_a_run_goes_on_with_the_rate_that_the_job_has_now() -> None:
    loss = keras.losses.MeanSquaredError()
    begun = train(job(uncompiled, optimizer=with_rate(0.5), loss=loss), steps=slice(0, 4))
    rest = train(job(uncompiled, optimizer=with_rate(0.0), loss=loss), begun.files, AT)
    assert {report.learning_rate for report in rest.reports} == {0.0}
    for old, new in zip(weights_of(uncompiled(), begun), weights_of(uncompiled(), rest), strict=True):
        np.testing.assert_array_equal(old, new)


def several(variables: Any) -> Any:
    return keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD(0.1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": uncompiled, "optimizer": with_rate(lambda: 0.1)}, "learning rate is a function: use schedule="),
        ({"model": uncompiled, "optimizer": several}, "MultiOptimizer has several learning rates"),
        ({"model": uncompiled, "optimizer": several, "run": "fit"}, "MultiOptimizer has several learning rates"),
    ],
)
def test_an_optimizer_without_one_rate_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        train(job(fields.pop("model"), loss=keras.losses.MeanSquaredError(), **fields))


# --- averages of weights, and logs ------------------------------------------------------------------------------------


def averaging() -> keras.Model:
    return dense(optimizer=keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5))


def swapping() -> list[Any]:
    return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]


def test_averages_that_are_swapped_by_epoch_are_swapped_back_where_a_run_goes_on() -> None:
    given = job(averaging, run="fit", callbacks=swapping)
    whole = train(given)
    for place in (3, 4):
        begun = train(given, steps=slice(0, place))
        assert train(given, begun.files, slice(place, None)).losses == whole.losses[place:]


class Own(keras.Model):
    """The step of Keras' guide "Customizing fit"."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, self(x, training=True))
        return {metric.name: metric.result() for metric in self.metrics}


def guided() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    model = Own(inputs, layers.Dense(1, "sigmoid")(inputs))
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=["mae"])
    return model


def test_a_step_may_return_metrics_in_a_dict(pool: Pool) -> None:
    given = job(guided, run="fit")
    model = guided()
    history = model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    for trained in (train(given), train_on_workers(pool, given)):
        logged = [report.logged.means() for report in trained.reports[2::3]]
        assert [each["mae"] for each in logged] == pytest.approx(history["mae"], rel=1e-5)


class Judged(keras.Model):
    """Only its evaluation is its own, with results in a dict."""

    def test_step(self, data: Any) -> Any:
        x, y, *_ = data
        outputs = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=outputs)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


def judged() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    model = Judged(inputs, layers.Dense(1, "sigmoid")(inputs))
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=["mae"])
    return model


def test_an_evaluation_may_return_metrics_in_a_dict_on_several_devices(pool: Pool) -> None:
    trained = train_mirrored(pool, job(judged, run="fit", evaluate=tw.datasets.table({"x": X, "y": Y, "z": Y})))
    model = judged()
    model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    assert trained.means["mae"] == pytest.approx(model.evaluate(X, Y, verbose=0, return_dict=True)["mae"], rel=1e-5)


def test_metrics_with_a_value_for_each_class_do_not_end_a_run() -> None:
    metrics = [keras.metrics.F1Score(threshold=0.5), keras.metrics.Precision(thresholds=[0.2, 0.8], name="both")]
    given = job(lambda: dense(metrics), run="fit", evaluate=tw.datasets.table({"x": X, "y": Y, "z": Y}))
    trained = train(given)
    judged = trained.model.evaluate(X, Y, verbose=0, return_dict=True)
    assert set(trained.means) == {"loss", "f1_score"}, "one class has one value; two thresholds have two"
    assert trained.means["f1_score"] == pytest.approx(float(judged["f1_score"][0]), rel=1e-6)


@pytest.mark.parametrize("append", [False, True])
def test_a_csv_log_has_a_row_for_each_epoch_of_a_run_that_is_resumed(append: bool, tmp_path: Path) -> None:
    """Also where an epoch is done again. With append=True, rows may be of another training: none is left out."""
    log, made = tmp_path / "log.csv", list[Any]()

    def logging() -> list[Any]:
        made.append(keras.callbacks.CSVLogger(str(log), ";", append=append))
        return made[-1:]

    given = job(dense, run="fit", callbacks=logging)
    train(given)
    whole = log.read_text()
    log.unlink()
    begun = train(given, steps=slice(0, 6))  # with a checkpoint within the second epoch, which then ends
    made[-1].on_train_end()  # closes the file
    rest = log.read_text()
    assert [row[0] for row in rest.splitlines()] == ["e", "0", "1"]
    train(given, begun.early, AT)
    assert log.read_text() == (whole if not append else rest + "".join(whole.splitlines(True)[2:]))


def branched() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    model = keras.Model(inputs, [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)])
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"])
    return model


def evaluating() -> list[Any]:
    def evaluate(epoch: int, logs: Any) -> None:
        own.model.evaluate(X[:BATCH], [Y[:BATCH]] * 2, batch_size=BATCH, verbose=0)

    own = keras.callbacks.LambdaCallback(on_epoch_begin=evaluate)
    return [own]


def test_losses_of_outputs_do_not_depend_on_evaluations_of_a_callback() -> None:
    data = tw.datasets.table({"x": X, "y": Y, "z": Y})
    given = job(branched, run="fit", targets=("y", "z"), evaluate=data, callbacks=evaluating)
    model = branched()
    expected = model.fit(
        X, [Y, Y], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, validation_data=(X, [Y, Y]),
        validation_batch_size=BATCH,
    ).history  # fmt: skip
    assert train(given).means["a_loss"] == pytest.approx(expected["val_a_loss"][-1], rel=1e-6)


def test_losses_of_outputs_are_those_of_fit_with_a_short_last_batch() -> None:
    given = job(branched, run="fit", targets=("y", "z"))
    history = branched().fit(X, [Y, Y], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    whole = train(given)
    begun = train(given, steps=slice(0, 5))
    for reports in (whole.reports, [*begun.reports, *train(given, begun.files, slice(5, None)).reports]):
        logged = [report.logged.means() for report in reports[2::3]]
        assert [each["a_loss"] for each in logged] == pytest.approx(history["a_loss"], rel=1e-6)
