"""What Keras users bring: own losses, metrics and schedules, precision, XLA, late shapes; and what is refused."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.conformance import problems, tensorflow_case
from tests.support.conformance.cases import Case
from tests.support.conformance.harness import Pool
from tests.support.conformance.keras_cases import ALONE, MIRRORED, PROBLEM, TF
from tests.support.conformance.problems import CLASSES, PROBLEMS, RATE
from tests.support.conformance.unbroken_runs import assert_same
from tests.support.s3_server import free_ports
from trainwright.core.data import Batch, StepReport
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, NonFiniteLoss, PeerLost, TrainwrightError, UserCodeError
from trainwright.core.topology import Address
from trainwright.strategies.tensorflow import strategy_engines

GIVEN = "trainwright.strategies.tensorflow.strategy_engines:AtGivenAddresses"
MIXED = replace(PROBLEM, dtype="float32")


def changed(problem: problems.Problem = PROBLEM, **fields: Any) -> ModelSpec:
    return replace(tensorflow_case.spec(problem), **fields)


def train(
    pool: Pool, case: Case, spec: ModelSpec, problem: problems.Problem = PROBLEM, **plan: Any
) -> tuple[list[StepReport], dict[str, float], dict[str, Any]]:
    """Reports of six steps, the means of an evaluation, and the state at the end."""
    feeds = case.feeds(problem, 1, range(problem.steps))
    with case.world(pool, problem, 1) as world:
        world.spec, world.plan = spec, replace(world.plan, **plan)
        world.start(feeds[0])
        (reports,) = world.train(feeds)
        (sums,) = world.every("evaluate", lambda rank: ([feeds[0][rank]],))
        return reports, sums.means(), tensorflow_case.state(world.files())


def losses_of(reports: list[StepReport]) -> list[float]:
    return [report.loss for report in reports]


@functools.cache
def usual(pool: Pool) -> tuple[list[StepReport], dict[str, float], dict[str, Any]]:
    """What two devices come to when nothing is changed."""
    return train(pool, MIRRORED, changed())


@functools.cache
def alone(pool: Pool) -> tuple[list[StepReport], dict[str, float], dict[str, Any]]:
    """What one device comes to."""
    return train(pool, ALONE, changed())


@pytest.mark.parametrize("how", ["eager", "xla"])
def test_eager_and_xla_train_the_same(pool: Pool, how: str) -> None:
    compiled, mean, _ = usual(pool)
    other, again, _ = train(pool, MIRRORED, changed(compile=how))
    assert losses_of(other) == pytest.approx(losses_of(compiled), rel=1e-12)
    assert again == pytest.approx(mean, rel=1e-12)


def noted(path: str) -> Any:
    """Make the model of the problem in a process that writes what TensorFlow logs of its sums to a file."""
    tf.get_logger().setLevel("INFO")
    tf.get_logger().addHandler(logging.FileHandler(path))
    return tensorflow_case.spec(PROBLEM).model()


SUMMED = (
    ("tf-mirrored", 1, {"cross_device_ops": "hierarchical_copy"}, "with algorithm = hierarchical_copy"),
    ("tf-mirrored", 1, {"cross_device_ops": "reduce_to_one_device"}, r"Reduce to .* then broadcast"),
    pytest.param(
        "tf-multi-worker-mirrored", 2, {"communication": "ring", "bytes_per_pack": 64},
        r"group_size = 2, implementation = \S*RING, num_packs = [2-9]", marks=pytest.mark.soak,
    ),
)  # fmt: skip


@pytest.mark.parametrize(("name", "workers", "sums", "logged"), SUMMED)
def test_sums_are_computed_as_the_plan_says_and_equal_one_device(
    pool: Pool, tmp_path: Path, name: str, workers: int, sums: dict[str, Any], logged: str
) -> None:
    expected, _, state = alone(pool)
    feeds = TF[name].feeds(PROBLEM, workers, range(PROBLEM.steps))
    world = TF[name].world(pool, PROBLEM, workers)
    world.spec = changed(model=functools.partial(noted, str(tmp_path / "log")))
    world.plan = replace(world.plan, **sums)
    with world:
        world.every("open", lambda rank: (world.plan,))
        world.start(feeds[0])
        for reports in world.train(feeds):
            assert losses_of(reports) == pytest.approx(losses_of(expected), rel=1e-9)
        found = tensorflow_case.state(world.files())
    assert re.search(logged, (tmp_path / "log").read_text())
    numbers = [each for each, value in state.items() if value.dtype.kind == "f"]
    assert len(numbers) > 4 and all(np.allclose(found[each], state[each], rtol=1e-9, atol=1e-9) for each in numbers)


def test_losses_and_metrics_of_keras(pool: Pool) -> None:
    by_function, mean, _ = usual(pool)
    own = changed(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64"),
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )
    by_object, again, _ = train(pool, MIRRORED, own)
    assert losses_of(by_object) == pytest.approx(losses_of(by_function), rel=1e-12)
    assert again == pytest.approx(mean)


def test_a_metric_that_is_no_mean_is_no_loss(pool: Pool) -> None:
    with pytest.raises(JobError, match="AUC is not a mean over samples: it can be one of metrics=, but not loss="):
        train(pool, ALONE, changed(loss=keras.metrics.AUC()))


def decaying(variables: Any) -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(RATE, 2, 0.5))


def test_a_schedule_of_the_optimizers_own(pool: Pool) -> None:
    reports, _, _ = train(pool, MIRRORED, changed(optimizer=decaying))
    assert [report.learning_rate for report in reports] == pytest.approx([RATE * 0.5 ** (n / 2) for n in range(6)])
    with pytest.raises(JobError, match="exclude each other"):
        train(pool, ALONE, changed(optimizer=decaying, schedule=problems.schedule))


def narrow() -> Any:
    inputs = [keras.Input((problems.FEATURES,), name=name) for name in PROBLEM.inputs]
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Concatenate()(inputs)))


def test_bf16_computes_in_bfloat16_and_keeps_float32(pool: Pool) -> None:
    full, _, state = train(pool, MIRRORED, changed(MIXED, model=narrow), MIXED)
    half, _, mixed = train(pool, MIRRORED, changed(MIXED, model=narrow), MIXED, precision="bf16")
    assert losses_of(half) != losses_of(full)
    assert losses_of(half) == pytest.approx(losses_of(full), rel=0.02)
    kept = [name for name in state if "_trainable_variables" in name]
    assert kept and all(mixed[name].dtype == state[name].dtype == np.float32 for name in kept)


class Late(keras.Model):
    """Knows its shapes once it is called."""

    def __init__(self) -> None:
        super().__init__(dtype="float64")
        self.dense = keras.layers.Dense(CLASSES, dtype="float64")

    def call(self, x: Any, z: Any) -> Any:
        return self.dense(keras.ops.concatenate([x, z], axis=1))


def first_row() -> Batch:
    columns = {name: column[:1] for name, column in problems.columns(PROBLEM).items()}
    return Batch(columns=columns, weights=np.ones(1), samples=np.zeros(1, np.int64))


def test_a_model_without_shapes_gets_them_from_a_sample(pool: Pool) -> None:
    feeds = MIRRORED.feeds(PROBLEM, 1, range(6))
    with MIRRORED.world(pool, PROBLEM, 1) as world:
        world.spec = changed(model=Late, sample=first_row)
        world.start(feeds[0])
        world.train(feeds[:3])
        files = world.files()
        world.train(feeds[3:])
        whole = tensorflow_case.state(world.files())
    with MIRRORED.world(pool, PROBLEM, 1) as world:
        world.spec = changed(model=Late, sample=first_row)
        world.form()
        world.every("load", lambda rank: (files,))
        world.warm(feeds[3])
        world.train(feeds[3:])
        assert_same(whole, tensorflow_case.state(world.files()))


def penalized() -> Any:
    inputs = [keras.Input((problems.FEATURES,), name=name, dtype="float64") for name in PROBLEM.inputs]
    joined = keras.layers.Concatenate(dtype="float64")(inputs)
    costly = keras.layers.Dense(CLASSES, kernel_regularizer="l2", dtype="float64")(joined)
    return keras.Model(inputs, costly)


@pytest.mark.parametrize("case", [MIRRORED], ids=lambda case: case.name)  # so that the pool imports what it needs
def test_regularizers_count_once_in_the_loss_and_its_gradient(pool: Pool, case: Case) -> None:
    feeds = case.feeds(PROBLEM, 1, range(1))
    with case.world(pool, PROBLEM, 1) as world:
        world.spec = changed(model=penalized, optimizer=plain)
        world.start(feeds[0])
        before = tensorflow_case.parameters(world.files())
        ((report,),) = world.train(feeds)
        after = tensorflow_case.parameters(world.files())
    model, data = penalized(), problems.columns(PROBLEM)
    for variable, value in zip(model.trainable_variables, before.values(), strict=True):
        variable.assign(value)
    ids = problems.batches(PROBLEM)[0]
    with tf.GradientTape() as tape:
        outputs = model([tf.constant(data[name][ids]) for name in PROBLEM.inputs])
        losses = tensorflow_case.cross_entropy(outputs, tf.constant(data["y"][ids]))
        loss = tf.reduce_mean(losses) + tf.add_n(model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    assert report.loss == pytest.approx(float(loss), rel=1e-12) and float(tf.add_n(model.losses)) > 0.01
    for old, new, gradient in zip(before.values(), after.values(), gradients, strict=True):
        assert np.allclose(old - new, RATE * gradient.numpy(), rtol=0, atol=1e-9)


def plain(variables: Any) -> Any:
    return keras.optimizers.SGD(RATE)


def normed() -> Any:
    inputs = [keras.Input((problems.FEATURES,), name=name, dtype="float64") for name in PROBLEM.inputs]
    joined = keras.layers.Concatenate(dtype="float64")(inputs)
    hidden = keras.layers.BatchNormalization(dtype="float64", name="norm")(joined)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, dtype="float64")(hidden))


def test_moving_statistics_are_averaged_over_the_devices(pool: Pool) -> None:
    problem = replace(PROBLEMS["dividing"], inputs=("x", "z"), steps=1)
    _, _, state = train(pool, MIRRORED, changed(problem, model=normed, inexact=("batch_norm",)), problem)
    columns, ids = problems.columns(problem), problems.batches(problem)[0]
    joined = np.concatenate([columns["x"], columns["z"]], axis=1)[ids]
    halves = [joined[rank::2].mean(axis=0) for rank in range(2)]
    (mean,) = [value for name, value in state.items() if "moving_mean" in name]
    assert np.allclose(mean, 0.01 * np.mean(halves, axis=0), rtol=1e-9)


def test_a_loss_that_is_not_finite_names_its_samples_and_applies_nothing(pool: Pool) -> None:
    data = {name: np.array(column) for name, column in problems.columns(PROBLEM).items()}
    ids = problems.batches(PROBLEM)[1]
    data["x"][ids[3]] = np.nan
    plan = MIRRORED.plan(PROBLEM, 1)
    good, bad = (problems.feeds(PROBLEM, plan, step, ids, data) for step in (0, 1))
    good = MIRRORED.feeds(PROBLEM, 1, range(1))[0]
    with MIRRORED.world(pool, PROBLEM, 1) as world:
        world.start(good)
        world.train([good])
        before = tensorflow_case.state(world.files())
        with pytest.raises(NonFiniteLoss, match=rf"step 2, in samples {ids[3]}\b"):
            world.train([bad])
        assert_same(before, tensorflow_case.state(world.files()))


def broken(outputs: Any, targets: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def total(outputs: Any, targets: Any) -> Any:
    return tf.reduce_mean(tensorflow_case.cross_entropy(outputs, targets))


def no_model() -> Any:
    return "a model"


def test_batch_norm_under_accumulation_is_refused_unless_it_is_accepted(pool: Pool) -> None:
    with pytest.raises(JobError, match="'norm' is a batch norm: 1 data ranks and accumulation=2"):
        train(pool, ALONE, changed(model=normed))
    train(pool, ALONE, changed(model=normed, inexact=("batch_norm",)))


def accumulating(variables: Any) -> Any:
    return keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)


def overwriting(variables: Any) -> Any:
    return keras.optimizers.SGD(RATE, use_ema=True, ema_overwrite_frequency=3)


WRONG: tuple[tuple[dict[str, Any], type[TrainwrightError], str], ...] = (
    ({"loss": broken}, UserCodeError, "ZeroDivisionError: on purpose"),
    ({"loss": total}, JobError, "return one loss per sample"),
    ({"model": no_model}, JobError, "return a keras.Model"),
    ({"optimizer": functools.partial(str)}, JobError, "return a keras.optimizers.Optimizer"),
    ({"optimizer": accumulating}, JobError, "accumulation=2 and 2 times the batch_size"),
    ({"optimizer": overwriting}, JobError, "ema_overwrite_frequency=3 needs one device"),
)


@pytest.mark.parametrize(("fields", "kind", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_what_is_wrong_is_told(pool: Pool, fields: dict[str, Any], kind: type[TrainwrightError], words: str) -> None:
    with pytest.raises(kind, match=words):
        train(pool, MIRRORED, changed(**fields))


def test_the_environments_addresses_are_used_on_request(pool: Pool) -> None:
    case = TF["tf-multi-worker-mirrored"]
    feeds = case.feeds(PROBLEM, 2, range(2))
    with case.world(pool, PROBLEM, 2) as own:
        own.start(feeds[0])
        expected = own.train(feeds)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    world = case.world(pool, PROBLEM, 2)
    world.plan = replace(world.plan, engine=GIVEN)
    with world:
        world.every("open", lambda rank: (world.plan,))
        with pytest.raises(JobError, match=r"TF_CONFIG of .* does not give its own address: None"):
            world.form()
        for index, rank in enumerate(world.ranks):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            rank.call("set_environment", "TF_CONFIG", json.dumps(config))
        world.start(feeds[0])
        assert world.train(feeds) == expected


def test_a_worker_waits_for_the_chiefs_server() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = Address(host="127.0.0.1", port=server.getsockname()[1])
        with pytest.raises(PeerLost, match=rf"server at 127.0.0.1:{address.port} did not start within 0.05 s"):
            strategy_engines._await_server(address, 0.05)
        waiting = threading.Thread(target=strategy_engines._await_server, args=(address, 60.0))
        waiting.start()
        server.listen()
        waiting.join(30.0)
        assert not waiting.is_alive()


class Early(str):
    """What makes a tensor when it arrives in a process."""

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return _arrived, (str(self),)


def _arrived(value: str) -> str:
    return str(tf.constant(value).numpy())


def test_a_strategy_that_comes_too_late_names_the_line_that_was_first(pool: Pool) -> None:
    case = TF["tf-multi-worker-mirrored"]
    with case.world(pool, PROBLEM, 2) as world:
        for rank in world.ranks:
            rank.call("set_environment", "EARLY", Early("bird"))
        with pytest.raises(JobError, match=r"first in .*test_keras.py, line \d+: return str\(tf.constant"):
            world.form()


BACKENDS = """
import sys
import keras
import numpy as np
from trainwright.core.errors import JobError
from trainwright.planning.profiler import profiler_of

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
try:
    profile = profiler_of(model).profile_model(model, {"x": np.ones((1, 3), np.float32)}, ("x",))
    print(profile.framework, profile.keras_backend, profile.parameters)
except JobError as error:
    print(error)
"""


@pytest.mark.parametrize(("backend", "said"), [("torch", "torch torch 8"), ("tensorflow", "tensorflow tensorflow 8")])
def test_a_model_belongs_to_the_framework_of_its_backend(backend: str, said: str) -> None:
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", BACKENDS], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout.strip() == said, done.stderr
