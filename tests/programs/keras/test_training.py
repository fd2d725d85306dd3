"""What Keras' `fit` does beside steps (masks, weights, averages, loss scales, callbacks), beside `fit` itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainwright as tw
from tests.programs.keras.engines import Trained, epochs, train, train_mirrored, train_on_workers, weights_of
from tests.support.conformance.harness import Pool
from trainwright.core.errors import JobError, UserCodeError
from trainwright.planning.job_preparation import prepare
from trainwright.runtime.function_trial import run_trial, task_of

ROWS, BATCH, EPOCHS, STEPS, WORDS = 48, 16, 2, 6, 9
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 8)).astype("float32")
Y = (X[:, :1] + RANDOM.normal(0.0, 0.7, (ROWS, 1)) > 0).astype("float32")
LENGTHS = RANDOM.integers(1, STEPS, (ROWS, 1))
TOKENS = np.where(np.arange(STEPS) < LENGTHS, RANDOM.integers(1, WORDS, (ROWS, STEPS)), 0)
TAGS = TOKENS % 3
WEIGHTS = RANDOM.uniform(0.0, 3.0, (ROWS, STEPS)).astype("float32")
layers, losses = keras.layers, keras.losses


def job(columns: Mapping[str, Any], **fields: Any) -> tw.Job:
    data = tw.datasets.table(dict(columns))
    given = {"inputs": "x", "targets": "y", "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
    return tw.Job(name="training", train=data, **{**given, "evaluate": data, **fields})


def by_fit(model: keras.Model, x: Any, y: Any, **fit: Any) -> tuple[list[float], list[Any]]:
    """Losses of the epochs, and the weights at the end."""
    given = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, **{**given, **fit}).history
    return history["loss"], model.get_weights()


def assert_alike(
    trained: Trained, model: keras.Model, expected: tuple[list[float], list[Any]], rel: float = 1e-6
) -> None:
    assert epochs(trained.losses, ROWS, BATCH) == pytest.approx(expected[0], rel=rel)
    for own, theirs in zip(weights_of(model, trained), expected[1], strict=True):
        np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-6)


# --- masks and weights ------------------------------------------------------------------------------------------------


def tagger() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int64"),
            layers.Embedding(
                WORDS, 6, mask_zero=True, embeddings_initializer=keras.initializers.RandomNormal(seed=1), name="words"
            ),
            layers.Dense(3, activation="softmax", kernel_initializer=keras.initializers.RandomNormal(seed=2)),
        ]
    )


def quick(variables: Any) -> Any:
    return keras.optimizers.SGD(0.5)


def test_masked_steps_and_weights_count_as_in_fit_on_one_worker_and_two(pool: Pool) -> None:
    given = job(
        {"x": TOKENS, "y": TAGS, "w": WEIGHTS}, model=tagger, optimizer=quick, sample_weight="w",
        loss=losses.sparse_categorical_crossentropy, metrics={"right": keras.metrics.sparse_categorical_accuracy},
    )  # fmt: skip
    model = tagger()
    model.compile(quick(None), "sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])
    expected = by_fit(model, TOKENS, TAGS, sample_weight=WEIGHTS)
    right = model.evaluate(TOKENS, TAGS, verbose=0)[1]
    for trained in (train(given), train_on_workers(pool, given)):
        assert_alike(trained, tagger(), expected)
        assert trained.means["right"] == pytest.approx(right, rel=1e-6)


def tagging() -> keras.Model:
    model = tagger()
    model.compile(quick(None), "sparse_categorical_crossentropy")
    return model


def test_fit_with_a_mask_is_refused_on_several_devices(pool: Pool) -> None:
    with pytest.raises(JobError, match="use devices=1, or leave run= out"):
        train_mirrored(pool, job({"x": TOKENS, "y": TAGS}, model=tagging, run="fit"))


def wordy() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int64"),
            layers.Embedding(WORDS, 4, embeddings_initializer=keras.initializers.RandomNormal(seed=1)),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=2)),
        ]
    )


def adaptive(variables: Any) -> Any:
    return keras.optimizers.Adam(0.05)


def test_adam_squares_each_row_of_an_embedding_as_in_fit(pool: Pool) -> None:
    """Words come several times in a batch: the square of their sum is not the sum of their squares."""
    given = job(
        {"x": TOKENS, "y": Y}, model=wordy, optimizer=adaptive, loss=losses.MeanSquaredError(), clip_norm=1e3,
        evaluate=None,
    )  # fmt: skip
    model = wordy()
    model.compile(adaptive(None), "mse")
    expected = by_fit(model, TOKENS, Y)
    for trained in (train(given), train_mirrored(pool, given), train_on_workers(pool, given)):
        assert_alike(trained, wordy(), expected)


def binary(policy: str = "float32") -> keras.Model:
    ones = keras.initializers.RandomNormal(seed=1)
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(4, activation="tanh", kernel_initializer=ones, dtype=policy),
            layers.Dense(1, activation="sigmoid", kernel_initializer=ones, dtype="float32"),
        ]
    )


def compiled(**fields: Any) -> keras.Model:
    model = binary()
    model.compile(quick(None), "binary_crossentropy", **fields)
    return model


@pytest.mark.parametrize("run", ["step", "fit"])
@pytest.mark.parametrize("weighed", ["sample_weight", "class_weight"])
def test_weights_of_samples_and_classes(run: str, weighed: str) -> None:
    weights = RANDOM.uniform(0.0, 3.0, ROWS).astype("float32")
    own: dict[str, Any] = {"sample_weight": "w"} if weighed == "sample_weight" else {"class_weight": {0: 0.5, 1: 4.0}}
    whose = {"optimizer": quick, "loss": losses.BinaryCrossentropy()} if run == "step" else {"run": "fit"}
    trained = train(job({"x": X, "y": Y, "w": weights}, model=binary if run == "step" else compiled, **own, **whose))
    model, judging = compiled(), {"sample_weight": weights} if weighed == "sample_weight" else {}
    assert_alike(trained, binary(), by_fit(model, X, Y, **(judging or own)))
    judged = model.evaluate(X, Y, verbose=0, **judging)
    assert trained.means["loss"] == pytest.approx(judged, rel=1e-6)


def focal(y_true: Any, y_pred: Any) -> Any:
    likely = y_true * y_pred + (1 - y_true) * (1 - y_pred)
    return tf.reduce_mean(-((1 - likely) ** 2) * tf.math.log(likely), axis=-1)


@pytest.mark.parametrize("loss", [focal, losses.BinaryCrossentropy(reduction="sum")], ids=["function", "sum"])
def test_losses_that_fit_is_given_are_as_in_compile(loss: Any) -> None:
    model = binary()
    model.compile(keras.optimizers.SGD(0.01), loss)
    given = job({"x": X, "y": Y}, model=binary, run="fit", loss=loss, optimizer=lambda _: keras.optimizers.SGD(0.01))
    trained = train(given)
    assert_alike(trained, binary(), by_fit(model, X, Y))


# --- metrics with state -----------------------------------------------------------------------------------------------

KINDS = np.eye(3, dtype="float32")[np.digitize(X[:, 0], (-0.5, 0.5))]
FEW = 17  # rows: the last batch has one, so that a worker has none


def kinds() -> keras.Model:
    keras.utils.set_random_seed(4)
    return keras.Sequential([keras.Input((8,)), layers.Dense(3, "softmax")])


def descent(variables: Any) -> Any:
    return keras.optimizers.SGD(0.5)


def in_classes() -> Any:
    return keras.metrics.MeanIoU(num_classes=3, sparse_y_true=False, sparse_y_pred=False)


class Largest(keras.metrics.Metric):
    """The largest output: a state that is no sum."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.top = self.add_variable((), "zeros", name="top")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.top.assign(keras.ops.maximum(self.top, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.top


class Hits:
    """The share of rows that are right, without Keras."""

    def __init__(self) -> None:
        self.right = self.rows = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.right += int((outputs.numpy().argmax(1) == targets.numpy().argmax(1)).sum())
        self.rows += len(outputs)

    def merge(self, other: Hits) -> None:
        self.right, self.rows = self.right + other.right, self.rows + other.rows

    def compute(self) -> float:
        return self.right / self.rows


def stateful() -> dict[str, Any]:
    return {
        "auc": keras.metrics.AUC(multi_label=True), "f1": keras.metrics.F1Score("macro"),
        "rmse": keras.metrics.RootMeanSquaredError(), "iou": in_classes, "precision": keras.metrics.Precision,
        "accuracy": keras.metrics.CategoricalAccuracy(),
    }  # fmt: skip


def of_kinds(metrics: Mapping[str, Any]) -> tw.Job:
    few = tw.datasets.table({"x": X[:FEW], "y": KINDS[:FEW]})
    return job(
        {"x": X, "y": KINDS}, evaluate=few, model=kinds, optimizer=descent, loss=losses.CategoricalCrossentropy(),
        metrics=metrics,
    )  # fmt: skip


def test_metrics_with_state_are_those_of_keras_on_all_rows(pool: Pool) -> None:
    model = kinds()
    made = {name: each if isinstance(each, keras.metrics.Metric) else each() for name, each in stateful().items()}
    model.compile(descent(None), "categorical_crossentropy", metrics=list(made.values()))
    by_fit(model, X, KINDS)
    model.evaluate(X[:FEW], KINDS[:FEW], batch_size=BATCH, verbose=0)
    expected = {name: float(each.result()) for name, each in made.items()}
    assert len({round(value, 3) for value in expected.values()} - {0.0, 1.0}) > 4, "they tell different things"
    expected["hits"] = expected["accuracy"]
    given = of_kinds({**stateful(), "hits": Hits})
    for trained in (train(given), train_on_workers(pool, given)):
        assert {name: trained.means[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_a_metric_that_is_no_sum_is_refused(pool: Pool) -> None:
    with pytest.raises(JobError, match=r"metric variable .*top. is not a sum over batches, .* or another metric"):
        train_on_workers(pool, of_kinds({"top": Largest}))


# --- values of a step beside its loss ---------------------------------------------------------------------------------


def logging_step(model: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    likely = model(columns["x"], training=True)
    right = keras.metrics.binary_accuracy(columns["y"], likely)
    found = losses.binary_crossentropy(columns["y"], likely)
    return {"loss": found, "right": right, "surest": tw.Terms(likely[:, 0], columns["y"][:, 0]), "one": 1.0}


def taken(model: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    return {**logging_step(model, columns), "epoch": 1.0}


def lossless(model: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    return {"right": logging_step(model, columns)["right"]}


def test_values_that_a_step_returns_beside_its_loss_are_means_over_the_batch(pool: Pool) -> None:
    data = tw.datasets.table({"x": X[:FEW], "y": Y[:FEW]})
    given = job(
        {"x": X[:FEW], "y": Y[:FEW]}, model=binary, optimizer=descent, step=logging_step, evaluate=data, inputs=(),
        targets=(), epochs=1,
    )  # fmt: skip
    likely, goals = binary()(X[:BATCH]).numpy()[:, 0], Y[:BATCH, 0]
    first = {"right": ((likely > 0.5) == goals).mean(), "surest": likely[goals > 0].mean(), "one": 1.0}
    runs = [train(given), train_mirrored(pool, given), train_on_workers(pool, given)]
    for trained in runs:
        assert trained.reports[0].logged.means() == pytest.approx(first, rel=1e-6)
        assert trained.reports[-1].logged.totals["one"] == (1.0, 1.0), "of the last batch's one row"
        assert trained.means == pytest.approx(runs[0].means, rel=1e-6) and set(trained.means) == {"loss", *first}
    for step, said in ((taken, "'epoch' has the name of a metric or of a column"), (lossless, 'add "loss"')):
        with pytest.raises(JobError, match=said):
            train(given.replace(step=step))


# --- averages and loss scales -----------------------------------------------------------------------------------------


def averaged(variables: Any) -> Any:
    return keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.8)


def test_averages_of_weights_are_taken_at_the_end_as_in_fit(pool: Pool) -> None:
    given = job({"x": X, "y": Y}, model=binary, optimizer=averaged, loss=losses.BinaryCrossentropy())
    model = binary()
    model.compile(averaged(None), "binary_crossentropy")
    expected = by_fit(model, X, Y)
    judged = model.evaluate(X, Y, verbose=0)
    for trained in (train(given), train_mirrored(pool, given)):
        assert_alike(trained, binary(), expected)
        assert trained.means["loss"] == pytest.approx(judged, rel=1e-6), "of the weights that are saved"


def half() -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return binary("mixed_float16")
    finally:
        keras.config.set_dtype_policy("float32")


def tiny(y_true: Any, y_pred: Any) -> Any:
    """Its gradients are nothing in float16."""
    return tf.reduce_mean((y_true - y_pred) ** 2, -1) * 1e-6


def huge(y_true: Any, y_pred: Any) -> Any:
    """Its gradients are too large for float16 until the loss scale has been halved some times."""
    return tf.reduce_mean((y_true - y_pred) ** 2, -1) * 4000


def fast(variables: Any) -> Any:
    return keras.optimizers.SGD(1e5, momentum=0.5)


def slow(variables: Any) -> Any:
    return keras.optimizers.Adam(0.01)


@pytest.mark.parametrize(("loss", "optimizer", "overflows"), [(tiny, fast, False), (huge, slow, True)])
def test_float16_has_the_loss_scale_of_fit(pool: Pool, loss: Any, optimizer: Any, overflows: bool) -> None:
    given = job({"x": X, "y": Y}, model=half, optimizer=optimizer, loss=loss)
    model = half()
    model.compile(optimizer(None), loss)
    expected = by_fit(model, X, Y)
    whole = train(given)
    assert_alike(whole, half(), expected)
    assert any(report.overflowed for report in whole.reports) == overflows
    begun = train(given, steps=slice(0, 2))
    rest = train(given, begun.files, slice(2, None))
    assert rest.losses == whole.losses[2:], "the scale is saved"
    if overflows:
        mirrored = train_mirrored(pool, given)
        assert mirrored.losses == pytest.approx(whole.losses, rel=0.01), "parts of a batch are rounded by themselves"
        assert any(report.overflowed for report in mirrored.reports)


def test_a_fixed_loss_scale_changes_nothing() -> None:
    def scaled(variables: Any) -> Any:
        return keras.optimizers.SGD(0.5, loss_scale_factor=64.0)

    model = compiled()
    trained = train(job({"x": X, "y": Y}, model=binary, optimizer=scaled, loss=losses.BinaryCrossentropy()))
    assert_alike(trained, binary(), by_fit(model, X, Y))


# --- what is saved, and what is told of it ----------------------------------------------------------------------------


def restoring() -> list[Any]:
    return [keras.callbacks.EarlyStopping("val_loss", mode="max", patience=1, restore_best_weights=True)]


@pytest.mark.parametrize("how", ["restored", "averaged"])
def test_the_evaluation_at_the_end_of_fit_is_of_the_model_that_is_saved(how: str) -> None:
    def build() -> keras.Model:
        model = binary()
        model.compile(averaged(None) if how == "averaged" else quick(None), "binary_crossentropy", metrics=["accuracy"])
        return model

    given = job({"x": X, "y": Y}, model=build, run="fit", epochs=4, callbacks=restoring if how == "restored" else None)
    trained = train(given)
    saved = build()
    weights_of(saved, trained)
    judged = saved.evaluate(X, Y, verbose=0, return_dict=True)
    assert trained.means == pytest.approx(judged, rel=1e-6)


class Longest(keras.callbacks.Callback):
    """Counts epochs, as a checkpoint is told to keep; and others, which it is not."""

    carried = ("epochs",)

    def __init__(self) -> None:
        super().__init__()
        self.epochs = self.others = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs, self.others = self.epochs + 1, self.others + 1


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' ReduceLROnPlateau
def test_callbacks_go_on_with_what_they_had_counted(tmp_path: Path) -> None:
    """By `mode="max"` the first epoch is best: the rate falls after two others, and training ends after three."""
    counting: list[Longest] = []

    def callbacks() -> list[Any]:
        counting.append(Longest())
        return [
            keras.callbacks.EarlyStopping("loss", mode="max", patience=3, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", mode="max", patience=2, factor=0.5),
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", "loss", mode="max", save_best_only=True),
            counting[-1],
        ]

    given = job({"x": X, "y": Y}, model=compiled, run="fit", epochs=9, callbacks=callbacks, evaluate=None)
    whole = train(given)
    begun = train(given, steps=slice(0, 7))
    (tmp_path / "best.keras").unlink()
    rest = train(given, begun.files, slice(7, None))
    assert [report.learning_rate for report in whole.reports] == [*[0.5] * 8, *[0.25] * 4]
    assert rest.losses == whole.losses[7:] and rest.files["callbacks.npz"] == whole.files["callbacks.npz"]
    assert all(map(np.array_equal, *(weights_of(compiled(), each) for each in (rest, whole))))
    assert not (tmp_path / "best.keras").exists(), "no later epoch is better"
    assert [(each.epochs, each.others) for each in counting] == [(4, 4), (2, 2), (4, 2)]


# --- stateful layers --------------------------------------------------------------------------------------------------


def recurrent(*, known: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    shape = [keras.Input(batch_shape=(BATCH, 4, 2))] if known else []
    return keras.Sequential([*shape, layers.GRU(3, stateful=True), layers.Dense(1, "sigmoid")])


def recurrent_job(run: str, known: bool = True, **fields: Any) -> tw.Job:
    own = {"optimizer": descent, "loss": losses.BinaryCrossentropy(), "evaluate": None}
    columns = {"x": X.reshape(ROWS, 4, 2), "y": Y}
    return job(columns, model=functools.partial(recurrent, known=known), run=run, **{**own, **fields})


@pytest.mark.parametrize("known", [True, False])
def test_fit_carries_the_states_of_a_layer_from_zero_on(known: bool) -> None:
    trained = train(recurrent_job("fit", known))
    model = recurrent(known=known)
    model.compile(descent(None), losses.BinaryCrossentropy())
    assert_alike(trained, model, by_fit(model, X.reshape(ROWS, 4, 2), Y))
    assert train(recurrent_job("fit", known), trained.early, slice(4, None)).losses == trained.losses[4:]


def test_a_stateful_layer_is_refused_where_its_states_are_lost_or_mixed(tmp_path: Path, pool: Pool) -> None:
    with pytest.raises(JobError, match=r"'sequential.*gru.*' is a stateful RNN.*: set run=.fit"):
        train(recurrent_job("step"))
    with pytest.raises(JobError, match=r"is a stateful RNN.*: use one worker with one device"):
        train_on_workers(pool, recurrent_job("fit"))
    found = run_trial(task_of(prepare(recurrent_job("fit", storage=str(tmp_path)))), rows=BATCH)
    assert found.error is None and "is a stateful RNN" in str(found.divided)


def test_an_accumulating_optimizer_is_refused_by_plans_of_several_workers(tmp_path: Path) -> None:
    def accumulating(variables: Any) -> Any:
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    own = {"optimizer": accumulating, "loss": losses.BinaryCrossentropy()}
    found = run_trial(task_of(prepare(job({"x": X, "y": Y}, model=binary, storage=str(tmp_path), **own))))
    assert found.error is None and "accumulation=2 and 2 times the batch_size" in str(found.divided)


# --- compiled steps ---------------------------------------------------------------------------------------------------


class Tiled(keras.Model):
    """Repeats a row of its own for each row of a batch, whose number it takes from the shape; and scales its loss."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.token = self.add_weight(shape=(1, 8), initializer="ones", name="token")
        self.heads = [layers.Dense(1, "sigmoid", kernel_initializer="ones", name=f"h{at}") for at in range(outputs)]
        self.factor = 1.0

    def call(self, inputs: Any) -> Any:
        found = [head(inputs * tf.tile(self.token, (inputs.shape[0], 1))) for head in self.heads]
        return found[0] if len(found) == 1 else found

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self.factor * super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_model_may_take_the_number_of_rows_from_a_shape(outputs: int) -> None:
    def build() -> keras.Model:
        model = Tiled(outputs)
        model.compile(quick(None), ["binary_crossentropy"] * outputs)
        return model

    columns = {"x": X, **{f"y{at}": Y for at in range(outputs)}}
    targets = tuple(columns)[1:]
    trained = train(job(columns, model=build, run="fit", targets=targets if outputs > 1 else targets[0]))
    model = build()
    expected = by_fit(model, X, [Y] * outputs if outputs > 1 else Y)
    assert epochs(trained.losses, ROWS, BATCH) == pytest.approx(expected[0], rel=1e-6)
    for own, theirs in zip(trained.model.get_weights(), expected[1], strict=True):
        np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-6)


def tiled() -> keras.Model:
    model = Tiled()
    model.compile(quick(None), "binary_crossentropy", weighted_metrics=["mae"])
    return model


def test_an_evaluation_with_weights_may_take_the_number_of_rows_from_a_shape(pool: Pool) -> None:
    given = job({"x": X, "y": Y, "w": WEIGHTS[:, 0]}, model=tiled, run="fit", sample_weight="w", epochs=1)
    trained = train(given)
    judged = trained.model.test_on_batch(X, Y, WEIGHTS[:, 0], return_dict=True)
    assert trained.means == pytest.approx(judged, rel=1e-6)
    with pytest.raises(UserCodeError, match=r"(?s)train_step\(\) raised .*None.*tf.shape\(inputs\)\[0\]"):
        train_on_workers(pool, given)


class Scaled(Tiled):
    """For any number of rows."""

    def call(self, inputs: Any) -> Any:
        return self.heads[0](inputs * self.token)


def scaled() -> keras.Model:
    model = Scaled()
    model.compile(quick(None), "binary_crossentropy")
    return model


class Rescale(keras.callbacks.Callback):
    """Changes what the model's compiled step took from it, and has it compiled again."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.factor = 1.0 + epoch
        self.model.make_train_function(force=True)


def rescaling() -> list[Any]:
    return [Rescale()]


def test_a_callback_can_have_the_step_compiled_again(pool: Pool) -> None:
    given = job({"x": X, "y": Y}, model=scaled, run="fit", callbacks=rescaling)
    model = scaled()
    losses, weights = by_fit(model, X, Y, callbacks=rescaling())
    for trained in (train(given), train_on_workers(pool, given)):
        assert epochs(trained.losses, ROWS, BATCH) == pytest.approx(losses, rel=1e-5)
    for own, theirs in zip(train(given).model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-6)
