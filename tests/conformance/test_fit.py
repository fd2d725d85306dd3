"""`run="fit"` against `Model.fit` itself: the same weights, logs and hooks; resumed in the middle of an epoch too."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.conformance import problems, tensorflow_case
from tests.support.conformance.cases import Case
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import PROBLEMS
from trainwright.core.data import Feed, StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, NonFiniteLoss, UserCodeError

FIT = "trainwright.strategies.tensorflow.keras_fit"
ALONE = Case(name="fit-one-device", framework="tensorflow", engine=f"{FIT}:FitOneDevice", workers=(1,), in_place=False)
WORKERS = replace(
    ALONE, name="fit-workers", engine="trainwright.strategies.tensorflow.fit_workers:FitMultiWorker", workers=(2,)
)
FOUR_WORKERS = replace(WORKERS, workers=(4,))
MIRRORED = replace(ALONE, name="fit-mirrored", engine=f"{FIT}:FitMirrored", devices=2)
PROBLEM = replace(PROBLEMS["dividing"], rows=68, batch_size=24, steps=9)  # 24, 24 and 20 rows, three times
EPOCHS = 3


class Recorder(keras.callbacks.Callback):
    """Writes down each hook with its logs, and ends the training where it is told to."""

    def __init__(self, path: str, stop_after: int = -1) -> None:
        super().__init__()
        self._path, self._stop_after = path, stop_after

    def _told(self, hook: str, *arguments: Any) -> None:
        with open(self._path, "a", encoding="ascii") as file:
            plain = [
                {name: float(value) for name, value in item.items()} if isinstance(item, dict) else item
                for item in arguments
            ]
            file.write(json.dumps([hook, *plain]) + "\n")

    def on_train_begin(self, logs: Any = None) -> None:
        self._told("train begin")

    def on_train_end(self, logs: Any = None) -> None:
        self._told("train end", logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._told("epoch begin", epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._told("epoch end", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._told("batch begin", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._told("batch end", batch, logs)
        if batch == self._stop_after:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        self._told("test begin")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._told("test batch end", batch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._told("test end", logs)


def recorders(path: str, stop_after: int = -1) -> list[Any]:
    rank, _ = place()
    return [Recorder(f"{path}{rank or ''}", stop_after)]


def place() -> tuple[int, int]:
    """Number of this worker and of all, by TF_CONFIG."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    task, cluster = config.get("task", {"type": "chief", "index": 0}), config.get("cluster", {"chief": [""]})
    return task["index"] + (task["type"] == "worker"), sum(map(len, cluster.values()))


def validation() -> Iterator[Feed]:
    rank, workers = place()
    yield from (step[rank] for step in ALONE.feeds(PROBLEM, workers, range(3)))


def spec(path: Path, problem: problems.Problem = PROBLEM, stop_after: int = -1, **fields: Any) -> ModelSpec:
    made: dict[str, Any] = {
        "epochs": EPOCHS,
        "callbacks": functools.partial(recorders, str(path), stop_after),
        "validation": validation,
        "validation_epochs": 2,
        "sample": functools.partial(first_row, problem),
        **fields,
    }
    return replace(tensorflow_case.spec(problem), **made)


def first_row(problem: problems.Problem) -> Any:
    return ALONE.feeds(problem, 1, range(1))[0][0].parts[0][0]


def world_of(pool: Pool, case: Case, path: Path, problem: problems.Problem = PROBLEM, **fields: Any) -> World:
    made = case.world(pool, problem, case.workers[0])
    made.spec = spec(path, problem, **fields)
    return made


def hooks(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    plain, own = (
        [[item for item in call if not isinstance(item, dict)] for call in calls] for calls in (expected, found)
    )
    assert own == plain
    for one, other in zip(found, expected, strict=True):
        for own, theirs in zip(one, other, strict=True):
            if isinstance(theirs, dict):
                assert own == pytest.approx(theirs, rel=1e-5, abs=1e-6), one


def by_fit(start: dict[str, Any], path: Path, stop_after: int = -1) -> list[Any]:
    """Weights after `Model.fit` itself on the same batches, from the same start."""
    model, data = tensorflow_case.net(PROBLEM), problems.columns(PROBLEM)
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(start[tensorflow_case.TRAINED.format(number) + tensorflow_case.VALUE])
    optimizer = tensorflow_case.optimizer(PROBLEM.optimizer, None)
    model.compile(
        optimizer,
        loss=lambda y, outputs: tensorflow_case.cross_entropy(outputs, tf.cast(y, tf.int64)),
        metrics=[keras.metrics.MeanMetricWrapper(lambda y, o: tensorflow_case.accuracy(o, y), name="accuracy")],
    )
    rows = tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(PROBLEM.batch_size)
    model.fit(
        rows, epochs=EPOCHS, validation_data=rows, validation_freq=2, verbose=0, shuffle=False,
        callbacks=recorders(str(path), stop_after),
    )  # fmt: skip
    return [variable.numpy() for variable in model.trainable_variables]


def weights(files: dict[str, bytes]) -> list[Any]:
    found = tensorflow_case.parameters(files)
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize(
    ("case", "stop_after"),
    [(ALONE, -1), (MIRRORED, 1), (WORKERS, -1), pytest.param(FOUR_WORKERS, -1, marks=pytest.mark.soak)],
    ids=["whole", "stopped", "workers", "four workers"],
)
def test_it_is_fit(pool: Pool, tmp_path: Path, case: Case, stop_after: int) -> None:
    """But for losses, which are those of the batches of steps: Keras' own logs have the mean of the epoch so far."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    steps = PROBLEM.steps if stop_after < 0 else stop_after + 1
    feeds = case.feeds(PROBLEM, case.workers[0], range(steps))
    with world_of(pool, case, ours, stop_after=stop_after) as world:
        world.start(feeds[0])
        start = tensorflow_case.parameters(world.files())
        reports, *others = world.train(feeds)
        ends = weights(world.files())
    expected = by_fit(start, theirs, stop_after)
    assert_alike(hooks(ours), hooks(theirs))
    for rank, other in enumerate(others, 1):
        assert other == reports and hooks(tmp_path / f"ours{rank}") == hooks(ours), "all workers see the same"
    for found, own in zip(ends, expected, strict=True):
        assert np.allclose(found, own, rtol=0, atol=1e-5)  # Keras computes its mean in float32
    assert [report.finished for report in reports] == [False] * (steps - 1) + [True]
    assert [report.weight for report in reports] == [24.0, 24.0, 20.0][:steps] * (steps // 3 or 1)
    by_hand, _, _ = tensorflow_case.by_hand(PROBLEM, start, problems.batches(PROBLEM, steps), problems.columns(PROBLEM))
    assert losses(reports) == pytest.approx(by_hand, rel=1e-5)


def losses(reports: list[StepReport]) -> list[float]:
    return [report.loss for report in reports]


@pytest.mark.parametrize("at", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_it_goes_on_in_another_process_at_any_batch(pool: Pool, tmp_path: Path, at: int) -> None:
    """With dropout, whose seeds Keras carries on, and with the metrics of the epoch so far."""
    problem = replace(PROBLEM, dropout=0.3)
    feeds = ALONE.feeds(problem, 1, range(problem.steps))
    with world_of(pool, ALONE, tmp_path / "whole", problem) as world:
        world.start(feeds[0])
        (reports,) = world.train(feeds)
        whole = tensorflow_case.parameters(world.files())
    with world_of(pool, ALONE, tmp_path / "first", problem) as world:
        world.start(feeds[0])
        world.train(feeds[:at])
        files = world.files()
    with world_of(pool, ALONE, tmp_path / "second", problem) as world:
        world.form()
        world.every("load", lambda rank: (files,))
        world.warm(feeds[at])
        (rest,) = world.train(feeds[at:])
        end = tensorflow_case.parameters(world.files())
    assert losses(rest) == losses(reports)[at:]
    assert end.keys() == whole.keys()
    assert all(np.array_equal(end[name], value) for name, value in whole.items())
    expected = [call for call in hooks(tmp_path / "whole") if call[0] != "train begin"]
    later = [call for call in hooks(tmp_path / "second") if call[0] != "train begin"]
    assert later[1:] == expected[len(expected) - len(later) + 1 :], "but for the epoch that begins once more"


def test_evaluation_is_what_keras_says(pool: Pool, tmp_path: Path) -> None:
    """Also of a metric that is not a mean over samples."""
    own = {
        "metrics": {"rmse": keras.metrics.RootMeanSquaredError()}, "loss": keras.losses.MeanAbsoluteError(),
        "targets": ("t",), "validation_epochs": 1,
    }  # fmt: skip
    with world_of(pool, ALONE, tmp_path / "hooks", **own) as world:
        feeds = ALONE.feeds(PROBLEM, 1, range(3))
        world.start(feeds[0])
        world.train(feeds)
        (sums,) = world.every("evaluate", lambda rank: ([step[rank] for step in feeds],))
        outputs = world.ranks[0].call("predict", feeds[0][0])["output"]
    told = [call[1] for call in hooks(tmp_path / "hooks") if call[0] == "test end"]
    assert len(told) == 1 and sums.means() == pytest.approx(told[0], rel=1e-6)
    wanted = problems.columns(PROBLEM)["t"][:24]
    assert sums.means()["rmse"] > sums.means()["loss"] > 0.1 * np.abs(wanted).mean()
    assert outputs.shape == (24, problems.CLASSES)


class Own(keras.Model):
    """With a train_step of its own."""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        super().__init__(inputs=inputs, outputs=outputs)

    def train_step(self, data: Any) -> Any:
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tensorflow_case.cross_entropy(self(inputs, training=True), targets))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def compiled() -> Any:
    plain = tensorflow_case.net(PROBLEM)
    model = Own(plain.inputs, plain.outputs)
    model.compile(tensorflow_case.optimizer("sgd", None))
    return model


def test_a_compiled_model_with_a_step_of_its_own(pool: Pool, tmp_path: Path) -> None:
    feeds = ALONE.feeds(PROBLEM, 1, range(PROBLEM.steps))
    own: dict[str, Any] = {"model": compiled, "optimizer": None, "loss": None, "metrics": {}, "validation": None}
    with world_of(pool, ALONE, tmp_path / "own", **own) as world:
        world.start(feeds[0])
        (reports,) = world.train(feeds)
    with world_of(pool, ALONE, tmp_path / "usual") as world:
        world.start(feeds[0])
        (usual,) = world.train(feeds)
    assert losses(reports) == pytest.approx(losses(usual), rel=1e-5)


def test_a_state_of_trainwrights_steps_goes_on_with_fit_and_back(pool: Pool, tmp_path: Path) -> None:
    plain = Case(
        name="plain", framework="tensorflow", workers=(1,), in_place=False,
        engine="trainwright.strategies.tensorflow.strategy_engines:TensorFlowOneDevice",
    )  # fmt: skip
    feeds = ALONE.feeds(PROBLEM, 1, range(PROBLEM.steps))
    with plain.world(pool, PROBLEM, 1) as world:
        world.start(feeds[0])
        world.train(feeds[:3])
        files = world.files()
        (whole,) = world.train(feeds[3:])
    for number, case in enumerate((ALONE, plain)):
        with case.world(pool, PROBLEM, 1) as world:
            world.spec = spec(tmp_path / "hooks") if case is ALONE else world.spec
            world.form()
            world.every("load", lambda rank: (files,))  # noqa: B023
            start = 3 + 2 * number
            world.warm(feeds[start])
            (reports,) = world.train(feeds[start : start + 2])
            files = world.files()
            assert losses(reports) == pytest.approx(losses(whole)[start - 3 : start - 1], rel=1e-5)


def raising() -> list[Any]:
    return [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: 1 // 0)]


def test_what_goes_wrong_is_said(pool: Pool, tmp_path: Path) -> None:
    feeds = ALONE.feeds(PROBLEM, 1, range(3))
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"callbacks": backup}, JobError, "BackupAndRestore: leave it out"),
        ({"callbacks": strings}, JobError, "callbacks.. gives a str"),
        ({"callbacks": raising}, UserCodeError, "a callback raised ZeroDivisionError"),
        ({"model": compiled}, JobError, "returns a compiled model: leave optimizer=, loss=, metrics= out"),
        ({"optimizer": None}, JobError, "needs a compiled model"),
    ]
    for fields, kind, message in wrong:
        with world_of(pool, ALONE, tmp_path / "hooks", **fields) as world, pytest.raises(kind, match=message):
            world.start(feeds[0])
            world.train(feeds)
    with world_of(pool, MIRRORED, tmp_path / "hooks") as world, pytest.raises(JobError, match="batch of 23"):
        world.start(feeds[0])
        world.train(MIRRORED.feeds(replace(PROBLEM, batch_size=23), 1, range(1)))


def backup() -> list[Any]:
    return [keras.callbacks.BackupAndRestore("/nowhere")]


def strings() -> list[Any]:
    return ["early stopping"]


def broken(outputs: Any, targets: Any) -> Any:
    return tensorflow_case.cross_entropy(outputs, targets) * np.nan


def test_a_loss_that_is_not_finite_leaves_no_sound_state(pool: Pool, tmp_path: Path) -> None:
    feeds = ALONE.feeds(PROBLEM, 1, range(1))
    with world_of(pool, ALONE, tmp_path / "hooks", loss=broken) as world:
        world.start(feeds[0])
        with pytest.raises(NonFiniteLoss, match="in step 1"):
            world.train(feeds)
