"""TensorFlow's parameter servers: with one share nothing differs from one device; deaths of workers are lived through.

A chief, its servers and its workers are processes of their own here, as everywhere in this suite. One world serves for
as many questions as it can: to start TensorFlow's cluster takes longer than they do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support.conformance import problems, tensorflow_case
from tests.support.conformance.cases import Case, label
from tests.support.conformance.harness import Outcome, Pool, World, value_of
from tests.support.conformance.problems import PROBLEMS, Problem
from trainwright.core.data import Batch, Columns, Feed, MetricSums
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, NonFiniteLoss, PeerLost
from trainwright.core.plan import Plan

ENGINE = "trainwright.strategies.tensorflow.ps.parameter_server:TensorFlowParameterServer"
CASE = Case(name="tf-parameter-server", framework="tensorflow", engine=ENGINE, topology="coordinator", in_place=False)
ALONE = Case(
    name="tf-one-device",
    framework="tensorflow",
    engine="trainwright.strategies.tensorflow.strategy_engines:TensorFlowOneDevice",
)
STEPS, TOLERANCE = 12, 1e-9
CLASSES, FEATURES, WIDTH, BATCH, ROWS = 10, 64, 2048, 96, 1920  # each of two servers holds half of the first layer
CHIEF, SERVERS, WORKERS = 0, (1, 2), (3, 4)
SOON_S = 20.0


def plan_of(batch_size: int, workers: int, *, servers: int, in_flight: int = 1, accumulation: int = 1) -> Plan:
    problem = Problem(name="any", batch_size=batch_size, accumulation=accumulation)
    plan = problems.plan_of(problem, ENGINE, workers, 1, "coordinator")
    return replace(plan, servers=servers, in_flight=in_flight)


@pytest.mark.parametrize("case", [CASE], ids=label)  # so that the pool imports what it needs
def test_one_worker_and_one_step_in_flight_equal_one_device(pool: Pool, case: Case) -> None:
    """All problems of the suite, in float64, each built anew in the same cluster; and averages of weights."""
    every = {**PROBLEMS, "averaged": replace(PROBLEMS["dividing"], optimizer="averaged", steps=STEPS)}
    plans = {name: replace(case.plan(problem, 1), servers=1) for name, problem in every.items()}
    first = PROBLEMS["dividing"]
    world = World(pool, "tensorflow", plans["dividing"], tensorflow_case.spec(first), reusable=False)
    with world:
        world.start()
        chief = world.ranks[CHIEF]
        for name, problem in every.items():
            data, ids = problems.columns(problem), problems.batches(problem, STEPS)
            steps = [problems.feeds(problem, plans[name], step, ids[step], data)[CHIEF] for step in range(STEPS)]
            chief.call("build", tensorflow_case.spec(problem), plans[name])
            chief.call("warm", steps[0])
            start = tensorflow_case.parameters(chief.call("files"))
            reports = chief.call("train", steps)
            end = tensorflow_case.parameters(chief.call("files"))
            losses, norms, wanted = tensorflow_case.by_hand(problem, start, ids, data)
            assert [report.loss for report in reports] == pytest.approx(losses, rel=0, abs=TOLERANCE), name
            if problem.clip:
                assert [report.gradient_norm or 0.0 for report in reports] == pytest.approx(norms, abs=TOLERANCE)
            for parameter, value in wanted.items():
                np.testing.assert_allclose(end[parameter], value, rtol=0, atol=TOLERANCE, err_msg=name)
        _refusals(world, steps[0])


def _refusals(world: World, feed: Feed) -> None:
    chief = world.ranks[CHIEF]
    eager = replace(tensorflow_case.spec(PROBLEMS["dividing"]), compile="eager")
    with pytest.raises(JobError, match="run compiled functions"):
        chief.call("build", eager, world.plan)
    scaled = replace(tensorflow_case.spec(PROBLEMS["dividing"]), optimizer=loss_scaled)
    with pytest.raises(JobError, match="cannot follow a loss scale"):
        chief.call("build", scaled, world.plan)
    (batch,) = feed.parts[0]
    row = int(np.flatnonzero(batch.columns["w"])[0])  # one that counts
    with pytest.raises(NonFiniteLoss, match="data ranks 0") as caught:
        chief.call("train", [replace(feed, parts=((broken_at(batch, row),),))])
    assert caught.value.samples == (int(batch.samples[row]),)


def loss_scaled(parameters: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, loss_scale_factor=8.0)


def net() -> keras.Model:
    inputs = keras.Input((FEATURES,), name="x")
    hidden = keras.layers.Dense(WIDTH, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Dropout(0.1)(hidden)))


def adam(parameters: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)


def job() -> ModelSpec:
    return ModelSpec(
        model=net,
        loss=tensorflow_case.cross_entropy,
        optimizer=adam,
        total_steps=200,
        inputs=("x",),
        targets=("y",),
        metrics={"accuracy": accuracy},
        seed=3,
    )


def accuracy(outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.equal(tf.argmax(outputs, axis=1), targets), tf.float32)


def clouds() -> Columns:
    """Rows of ten classes, each of three clouds that overlap with others': a line between them does not do."""
    random = np.random.default_rng(5)
    centres = random.normal(size=(CLASSES, 3, FEATURES))
    y = random.integers(0, CLASSES, ROWS)
    x = centres[y, random.integers(0, 3, ROWS)] + 1.1 * random.normal(size=(ROWS, FEATURES))
    return {"x": x.astype(np.float32), "y": y}


def feeds(plan: Plan, data: Columns, steps: range, rows: range = range(ROWS * 3 // 4)) -> list[Feed]:
    """The chief's, each told of those that may begin with it, as a worker does it."""
    problem = Problem(name="clouds", batch_size=plan.batch_size)
    found: list[Feed] = []
    for step in steps:
        ids = np.take(np.asarray(rows), np.arange(step * BATCH, (step + 1) * BATCH), mode="wrap")
        found.append(problems.feeds(problem, plan, step, ids, data)[CHIEF])
    following: list[Feed] = []
    for at, feed in enumerate(found):
        ahead: Feed | None = None
        for later in reversed(found[at + 1 : at + plan.in_flight]):
            ahead = replace(later, following=ahead)
        following.append(replace(feed, following=ahead))
    return following


@pytest.fixture(scope="module")
def world(pool: Pool) -> Iterator[World]:
    """A chief, two servers and two workers, three steps in flight."""
    plan = plan_of(BATCH, 2, servers=2, in_flight=3)
    world = World(pool, "tensorflow", plan, job(), reusable=False)
    try:
        world.start()
        world.ranks[CHIEF].call("warm", feeds(plan, clouds(), range(1))[0])
        yield world
    finally:
        world.close(failed=True)


def test_the_same_accuracy_as_one_process(pool: Pool, world: World) -> None:
    """On rows that nobody trained on; the checkpoint of one is read by the other, cut variables whole again."""
    data, steps = clouds(), range(60)
    held_out = [replace(feed, following=None) for feed in feeds(world.plan, data, range(5), range(ROWS * 3 // 4, ROWS))]
    chief = world.ranks[CHIEF]
    reports = chief.call("train", feeds(world.plan, data, steps))
    assert [report.step for report in reports] == [step + 1 for step in steps]
    assert all(report.weight == BATCH for report in reports)
    found, files = chief.call("evaluate", held_out), chief.call("files")

    plan = replace(ALONE.plan(Problem(name="clouds", batch_size=BATCH), 1), mesh=world.plan.mesh, devices_per_worker=2)
    one = replace(plan, mesh=replace(plan.mesh, data=1), devices_per_worker=1)
    with World(pool, "tensorflow", one, job(), reusable=False) as alone:
        alone.start()
        rank = alone.ranks[0]
        rank.call("train", feeds(one, data, steps))
        wanted: MetricSums = rank.call("evaluate", [_joined(feed) for feed in held_out])
        accuracies = found.means()["accuracy"], wanted.means()["accuracy"]
        assert min(accuracies) > 0.75 and abs(accuracies[0] - accuracies[1]) < 0.06, accuracies
        rank.call("load", files)
        same: MetricSums = rank.call("evaluate", [_joined(feed) for feed in held_out])
        assert same.means() == pytest.approx(found.means(), rel=1e-5)
        assert rank.call("predict", held_out[0])["output"].shape == (BATCH, CLASSES)
        other = rank.call("files")
    chief.call("load", other)
    _same_state(chief.call("files"), other)


def _joined(feed: Feed) -> Feed:
    """The shares of all data ranks as one's micro-batches."""
    return replace(feed, parts=(tuple(batch for part in feed.parts for batch in part),), data_ranks=range(1), total=1)


def _same_state(files: Mapping[str, bytes], others: Mapping[str, bytes]) -> None:
    mine, theirs = tensorflow_case.state(files), tensorflow_case.state(others)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def test_a_wish_to_stop_is_told_by_the_last_step_that_was_begun(world: World) -> None:
    given = feeds(world.plan, clouds(), range(100, 104))
    chief = world.ranks[CHIEF]
    first = chief.call("train", given[:1])
    assert not first[0].stop_requested  # two more are under way
    wishing = [replace(feed, stop_requested=True) for feed in given[1:3]]
    assert [report.stop_requested for report in chief.call("train", wishing)] == [False, True]


def test_a_share_that_is_not_finite_is_passed_by(world: World) -> None:
    first, second = feeds(world.plan, clouds(), range(110, 112))
    (good,), (bad,) = first.parts
    chief = world.ranks[CHIEF]
    broken = replace(first, parts=((broken_at(bad, 2),), (broken_at(bad, 2),)))
    before = _weights(chief)
    passed = chief.call("train_past", [replace(broken, following=None)])
    after = _weights(chief)
    assert passed[0].weight == 0 and all(np.array_equal(value, after[name]) for name, value in before.items())
    half = replace(first, parts=((good,), (broken_at(bad, 2),)), following=second)
    passed = chief.call("train_past", [half, second])
    assert [report.weight for report in passed] == [0, BATCH]
    assert any(not np.array_equal(value, before[name]) for name, value in _weights(chief).items())


def broken_at(batch: Batch, row: int) -> Batch:
    x = np.array(batch.columns["x"])
    x[row] = np.nan
    return replace(batch, columns={**batch.columns, "x": x})


def _weights(chief: Any) -> Mapping[str, npt.NDArray[Any]]:
    return tensorflow_case.parameters(chief.call("files"))


def test_workers_die_and_are_replaced_while_the_others_go_on(world: World) -> None:
    """In the end nobody is left of those that began, so that newcomers have computed what was trained last."""
    data, chief = clouds(), world.ranks[CHIEF]
    for stretch, victim in enumerate(WORKERS):
        steps = range(120 + 40 * stretch, 160 + 40 * stretch)
        chief.send("train", feeds(world.plan, data, steps))
        world.ranks[victim].kill()
        if victim == WORKERS[-1]:
            world.rejoin(victim)
        reports = value_of(chief.outcome())
        assert [report.step for report in reports] == [step + 1 for step in steps]
        assert all(report.weight == BATCH for report in reports)  # each share is counted once, and none is missing
        if victim != WORKERS[-1]:
            world.rejoin(victim)
    assert world.ranks[WORKERS[0]].call("evaluate", feeds(world.plan, data, range(1))).totals == {}


def test_a_server_that_is_gone_ends_the_group_at_once(world: World) -> None:
    chief = world.ranks[CHIEF]
    chief.send("train", feeds(world.plan, clouds(), range(200, 400)))
    world.ranks[SERVERS[1]].strike()
    begun = time.monotonic()
    outcome = chief.outcome(SOON_S)
    assert isinstance(outcome.error, PeerLost) and time.monotonic() - begun < SOON_S, outcome
    world.ranks[SERVERS[0]].send("follow")
    assert not world.ranks[SERVERS[0]].outcome(SOON_S).dead  # the chief has left, as a worker does after an error


def test_followers_end_when_the_chief_is_gone_or_they_are_interrupted(pool: Pool) -> None:
    """The latter where it lives and does not run: whoever does not end then is who is frozen."""
    world = World(pool, "tensorflow", plan_of(BATCH, 2, servers=1), job(), reusable=False)
    try:
        world.form()
        *others, interrupted = world.ranks[1:]
        interrupted.send("interrupted", 0.1, "follow")
        assert interrupted.outcome(SOON_S) == Outcome()
        for rank in others:
            rank.send("follow")
        world.ranks[CHIEF].strike()
        assert [rank.outcome(SOON_S) for rank in others] == [Outcome()] * 2
    finally:
        world.close(failed=True)
