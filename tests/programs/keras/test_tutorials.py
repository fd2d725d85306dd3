"""The programs of `docs/tensorflow.md` equal what their authors run: on one worker, on two, from a checkpoint on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainwright as tw
from tests.programs.keras.engines import Trained, epochs, train, train_each_on_workers, train_mirrored
from tests.programs.keras.tutorials import BATCH, CLASSES, PROGRAMS, ROWS, SIDE, Program
from tests.support.conformance import tensorflow_case
from tests.support.conformance.harness import Pool
from tests.support.conformance.rank import Files
from tests.support.conformance.unbroken_runs import assert_same
from trainwright.core.errors import TrainwrightError
from trainwright.planning.job_preparation import prepare
from trainwright.runtime.function_trial import run_trial, task_of
from trainwright.strategies.tensorflow.training.checkpoint_files import take_weights

layers = keras.layers
QUICK = 3  # programs that are trained in each run of the tests; `make soak` trains the others
each = pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=program.name, marks=() if number < QUICK else pytest.mark.soak)
        for number, program in enumerate(PROGRAMS)
    ],
)


@functools.cache
def expected(name: str) -> Any:
    (program,) = [program for program in PROGRAMS if program.name == name]
    return program.plain()


def same(found: Trained, program: Program, rel: float) -> None:
    losses, means, weights = expected(program.name)
    ours = found.losses if program.loop else epochs(found.losses, ROWS, BATCH)
    assert len(set(losses)) == len(losses), "nothing is trained"
    assert ours == pytest.approx(losses, rel=rel)
    assert found.means == (pytest.approx(means, rel=rel) if program.job().evaluate else {})
    model = program.built()
    take_weights(model, Files(found.files))
    for own, theirs in zip(model.trainable_variables, weights, strict=True):
        np.testing.assert_allclose(own.numpy(), theirs, rtol=0, atol=20 * rel)


@each
def test_one_worker_is_the_original_and_goes_on_from_a_checkpoint(program: Program) -> None:
    whole = train(program.job())
    same(whole, program, 1e-6)
    rest = train(program.job(), whole.early, slice(-2, None))
    assert rest.losses == whole.losses[-2:]
    assert_same(*(tensorflow_case.state(one.files) for one in (rest, whole)))


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest, pool: Pool) -> dict[str, Trained]:
    """What the chosen programs come to; one pair of workers trains all, since starts take longest."""
    here = (item for item in request.session.items if item.path == request.path)
    programs = [item.callspec.params["program"] for item in here if "on_two" in item.fixturenames]
    trained = train_each_on_workers(pool, [program.job() for program in programs])
    return {program.name: found for program, found in zip(programs, trained, strict=True)}


@each
def test_two_workers_are_the_original(program: Program, on_two: dict[str, Trained]) -> None:
    same(on_two[program.name], program, 1e-5)


@pytest.mark.parametrize("program", [program for program in PROGRAMS if program.loop], ids=lambda each: each.name)
def test_the_trial_before_workers_start_finds_nothing_in_a_loop(program: Program, tmp_path: Path) -> None:
    found = run_trial(task_of(prepare(program.job(storage=str(tmp_path)))))
    assert (found.error, found.divided, found.untried) == (None, None, "")


def test_a_loop_on_two_devices_is_the_original(pool: Pool) -> None:
    """Of batches that they divide."""
    program, even = PROGRAMS[0], 2 * BATCH
    losses, means, _ = program.plain(even)
    found = train_mirrored(pool, program.job(even))
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert found.means == pytest.approx(means, rel=1e-5)


def test_means_are_refused_on_several_devices(pool: Pool) -> None:
    with pytest.raises(TrainwrightError, match='reduction="mean" cannot be told on several devices'):
        train_mirrored(pool, PROGRAMS[3].job(2 * BATCH))


# --- what cannot be divided is refused before workers start -----------------------------------------------------------


def small(step: Any, **parts: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((SIDE, SIDE, 1)), layers.Flatten(), layers.Dense(CLASSES)])
    optimizer, loss = keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            value = step(model, images, labels, loss)
        optimizer.apply(tape.gradient(value, model.trainable_weights), model.trainable_weights)
        return value

    return tw.CustomLoop(train_step, **{"model": model, "optimizer": optimizer, **parts})


def mean(model: Any, images: Any, labels: Any, loss: Any) -> Any:
    return loss(labels, model(images))


def penalized(model: Any, images: Any, labels: Any, loss: Any) -> Any:
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
    return tf.reduce_sum(each) / BATCH + 0.01 * tf.nn.l2_loss(model.trainable_weights[0])


def drawn(model: Any, images: Any, labels: Any, loss: Any) -> Any:
    return loss(labels, model(images + tf.random.normal(tf.shape(images))))


TRACKED = keras.metrics.Mean(name="tracked")


def tracked(model: Any, images: Any, labels: Any, loss: Any) -> Any:
    value = loss(labels, model(images))
    TRACKED.update_state(value)
    return value


@pytest.mark.parametrize(
    ("step", "parts", "said"),
    [
        (mean, {}, r"is not twice that of the row.*say so: CustomLoop\(..., reduction=\"mean\"\)"),
        (penalized, {}, "is not twice that of the row"),
        (penalized, {"reduction": "mean"}, "is not that of the row, as reduction="),
        (drawn, {}, "draws numbers by RandomStandardNormal"),
        (tracked, {"reduction": "mean"}, "use the variable .*no part of it holds"),
        (tracked, {"reduction": "mean", "tracked": TRACKED}, "metric variable .* is not twice as much"),
        (mean, {"optimizer": None}, "there is no optimizer"),
        (mean, {"metrics": TRACKED}, "metrics= is a name of keras.Model"),
    ],
    ids=["mean", "penalty", "sum", "drawn", "outside", "metric", "optimizer", "name"],
)
def test_what_workers_cannot_divide_is_refused_before_they_start(
    step: Any, parts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = PROGRAMS[1].job(model=functools.partial(small, step, **parts), storage=str(tmp_path))
    with pytest.raises(TrainwrightError, match=said):
        found = run_trial(task_of(prepare(given)))
        raise found.error or found.divided or AssertionError("nothing is found")
