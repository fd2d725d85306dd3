"""State: counted randomness, warming, snapshots, checkpoints and transfers all keep the run bitwise the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.conformance import problems
from tests.support.conformance.cases import Case, label, several, sizes, variants
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.unbroken_runs import PART, PROBLEM, WHOLE, assert_same, state_of, unbroken


@pytest.mark.parametrize(("case", "workers"), sizes(1, 3), ids=label)
def test_dropout_repeats_bitwise_and_follows_the_seed(pool: Pool, case: Case, workers: int) -> None:
    first, again = unbroken(pool, case, workers).end, run_whole(pool, case, workers, PROBLEM)
    assert_same(first, again)
    other = run_whole(pool, case, workers, replace(PROBLEM, dropout=0.6))
    assert not _same(first, other), "dropout does nothing"


@pytest.mark.parametrize(("case", "workers"), sizes(1, 3), ids=label)
def test_each_data_rank_and_micro_batch_draws_its_own_dropout(pool: Pool, case: Case, workers: int) -> None:
    """With one and the same row in every micro-batch, equal masks would give the loss of that row alone."""
    total, accumulation = workers * case.devices, 2 if workers == 1 else 1
    several = replace(PROBLEM, loss="cross_entropy", batch_size=total * accumulation, accumulation=accumulation)
    losses = []
    for problem in (several, replace(several, batch_size=1)):
        ids = np.zeros(problem.batch_size, np.int64)
        feeds = problems.feeds(problem, case.plan(problem, workers), 0, ids, problems.columns(problem))
        with case.world(pool, problem, workers) as world:
            world.start(feeds)
            losses.append(world.train([feeds])[0][0].loss)
    assert abs(losses[0] - losses[1]) > 1e-6


@pytest.mark.parametrize(("case", "workers"), sizes(1, 2), ids=label)
def test_warming_leaves_all_state_as_it_was(pool: Pool, case: Case, workers: int) -> None:
    feeds = case.feeds(PROBLEM, workers, range(PART))
    with case.world(pool, PROBLEM, workers) as world:
        world.start()
        fresh = state_of(case, world)
        world.warm(feeds[0])
        assert_same(fresh, state_of(case, world))
        world.train(feeds)
        trained = state_of(case, world)
        assert not _same(fresh, trained)
        world.warm(feeds[0])
        assert_same(trained, state_of(case, world))


@pytest.mark.parametrize(("case", "workers"), sizes(2, in_place=True), ids=label)
def test_a_snapshot_is_a_copy_and_restores_bitwise(pool: Pool, case: Case, workers: int) -> None:
    feeds = case.feeds(PROBLEM, workers, range(WHOLE))
    with case.world(pool, PROBLEM, workers) as world:
        world.start(feeds[0])
        world.train(feeds[:PART])
        then = state_of(case, world)
        assert world.every("keep", lambda _: ("then",)) == [PART] * workers
        reports = world.train(feeds[PART:])
        end = state_of(case, world)
        assert_same(then, case.code.state(world.files("then")))
        world.leave()
        world.form()
        assert {tag.step for tag in world.every("restore", lambda _: ("then",))} == {PART}
        world.settle(0, feeds[PART])
        assert world.train(feeds[PART:]) == reports
        assert_same(end, state_of(case, world))


@pytest.mark.parametrize(("case", "workers"), [*sizes(1, 2), *variants()], ids=label)
def test_a_checkpoint_continues_bitwise_in_fresh_processes(pool: Pool, case: Case, workers: int) -> None:
    feeds, whole = case.feeds(PROBLEM, workers, range(WHOLE)), unbroken(pool, case, workers)
    with case.world(pool, PROBLEM, workers, fresh=True) as world:
        _load(world, whole.files, PART)
        world.warm(feeds[PART])
        assert world.train(feeds[PART:]) == whole.reports
        assert_same(whole.end, state_of(case, world))


@pytest.mark.parametrize(("case", "workers"), several(3), ids=label)
def test_a_checkpoint_continues_with_another_number_of_workers(pool: Pool, case: Case, workers: int) -> None:
    problem = replace(PROBLEM, dropout=0.0)  # dropout is counted by data rank, so it differs between layouts
    feeds, other = case.feeds(problem, workers, range(WHOLE)), max(1, workers - 2)
    with case.world(pool, problem, workers) as world:
        world.start(feeds[0])
        world.train(feeds[:PART])
        files, then = world.files(), state_of(case, world)
        reports = world.train(feeds[PART:])
    with case.world(pool, problem, other) as world:
        _load(world, files, PART)
        assert_same(then, state_of(case, world))
        continued = case.feeds(problem, other, range(WHOLE))[PART:]
        world.warm(continued[0])
        losses = [report.loss for report in world.train(continued)[0]]
    assert losses == pytest.approx([report.loss for report in reports[0]], rel=1e-9)


@pytest.mark.parametrize(("case", "workers"), several(2, 3, in_place=True, copied=True), ids=label)
@pytest.mark.parametrize("newcomer", [0, -1], ids=["first", "last"])
def test_a_newcomer_gets_the_state_of_a_survivor(pool: Pool, case: Case, workers: int, newcomer: int) -> None:
    feeds = case.feeds(PROBLEM, workers, range(WHOLE))
    new = newcomer % workers
    whole = unbroken(pool, case, workers)
    with case.world(pool, PROBLEM, workers) as world:
        world.start(feeds[0])
        world.train(feeds[:PART])
        world.leave()
        world.replace(new)
        tags = world.form()
        assert [tag.step for tag in tags] == [None if rank == new else PART for rank in range(workers)]
        together = frozenset().union(*(tag.pieces for tag in tags))
        assert all(tag.sound and tag.total == len(together) for tag in tags)
        assert {tag.step for tag in world.settle((new + 1) % workers, feeds[PART])} == {PART}
        world.train(feeds[PART:])
        assert_same(whole.end, state_of(case, world))


@pytest.mark.parametrize(("case", "workers"), sizes(2), ids=label)
def test_builds_of_one_seed_are_equal_and_stand_nowhere(pool: Pool, case: Case, workers: int) -> None:
    with case.world(pool, PROBLEM, workers) as world:
        assert [tag.step for tag in world.form()] == [None] * workers
        fresh = [case.code.state(files) for files in world.each_files()]
    for one in fresh:
        assert_same(fresh[0], one)
    with case.world(pool, replace(PROBLEM, seed=8), workers) as world:
        world.form()
        assert not _same(fresh[0], state_of(case, world))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def run_whole(pool: Pool, case: Case, workers: int, problem: problems.Problem) -> Mapping[str, Any]:
    """The state after an unbroken run of WHOLE steps."""
    feeds = case.feeds(problem, workers, range(WHOLE))
    with case.world(pool, problem, workers) as world:
        world.start(feeds[0])
        world.train(feeds)
        return state_of(case, world)


def _load(world: World, files: Mapping[str, bytes], step: int) -> None:
    world.form()
    assert {tag.step for tag in world.every("load", lambda rank: (files,))} == {step}
