"""Failures: deaths, errors of the user's code and interrupts. Nobody hangs, nothing is applied, the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tests.support.conformance.cases import Case, label, new_process, several, sizes
from tests.support.conformance.harness import SOON_S, Outcome, Pool, World
from tests.support.conformance.problems import PROBLEMS, Problem
from tests.support.conformance.unbroken_runs import PART, PROBLEM, WHOLE, assert_same, state_of, unbroken
from trainwright.core.errors import JobError, NonFiniteLoss, PeerLost, TrainwrightError, UserCodeError
from trainwright.driver.rendezvous import agree_at_step

ABORTED = [(case, workers) for case, workers in several(2, in_place=True) if case.framework == "torch"]
ENDED = [
    (case, workers) for case, workers in several(2) if not case.in_place and case.topology == "collective"
]  # fmt: skip
FAULTS = {
    "error": (UserCodeError, "ZeroDivisionError"),
    "nan": (NonFiniteLoss, f"step {PART + 1}"),
    "reduced": (JobError, "per sample"),
    "short": (JobError, "shape"),
}


@pytest.mark.parametrize(("case", "workers"), several(2, 3, in_place=True), ids=label)
@pytest.mark.parametrize("victim", [0, -1], ids=["first", "last"])
def test_a_killed_rank_is_replaced_and_the_run_is_the_unbroken_one(
    pool: Pool, case: Case, workers: int, victim: int
) -> None:
    dead = case.losing(workers)[victim]
    whole, feeds = unbroken(pool, case, workers), case.feeds(PROBLEM, workers, range(WHOLE))
    with case.world(pool, PROBLEM, workers) as world:
        world.start(feeds[0])
        pids = list(world.pids)
        world.train(feeds[:PART])
        files = world.files()
        outcomes, spent_s = world.train_with_fault(feeds[PART : PART + 1], dead, "kill")
        assert outcomes[dead].dead
        _check_survivors(outcomes, dead)
        assert spent_s < SOON_S
        _recover(world, dead, feeds, files)
        assert [pid for rank, pid in enumerate(world.pids) if rank != dead] == [
            pid for rank, pid in enumerate(pids) if rank != dead
        ]
        assert_same(whole.end, state_of(case, world))


@pytest.mark.parametrize(("case", "workers"), several(2, 3, in_place=True), ids=label)
def test_a_group_that_did_not_form_forms_with_a_new_process(pool: Pool, case: Case, workers: int) -> None:
    feeds = case.feeds(PROBLEM, workers, range(WHOLE))
    whole = unbroken(pool, case, workers)
    with case.world(pool, PROBLEM, workers) as world:
        outcomes = world.form_without(workers - 1, deadline_s=1.0)
        assert all(isinstance(outcome.error, PeerLost) for outcome in outcomes), outcomes
        world.start(feeds[0])
        world.train(feeds)
        assert_same(whole.end, state_of(case, world))


@pytest.mark.parametrize(("case", "workers"), several(2, in_place=True), ids=label)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_in_one_rank_ends_the_step_for_all(pool: Pool, case: Case, workers: int, fault: str) -> None:
    victim = workers - 1
    kind, words = FAULTS[fault]
    feeds = case.feeds(PROBLEM, workers, range(PART + 1))
    with case.world(pool, PROBLEM, workers) as world:
        world.start(feeds[0])
        world.train(feeds[:PART])
        before = state_of(case, world)
        outcomes, spent_s = world.train_with_fault(feeds[PART:], victim, fault)
        assert spent_s < SOON_S
        _check_error(outcomes[victim].error, kind, words, victim)
        if fault == "nan":
            share = feeds[PART][victim].parts[0]
            rows = share[0].samples[share[0].columns["w"] > 0]
            assert str(rows[0]) in str(outcomes[victim].error), "the samples are not named"
        for outcome in outcomes:
            assert isinstance(outcome.error, PeerLost | kind), outcome
        assert_same(before, state_of(case, world))


@pytest.mark.parametrize(("case", "workers"), sizes(1, in_place=True), ids=label)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_in_the_only_rank(pool: Pool, case: Case, workers: int, fault: str) -> None:
    kind, words = FAULTS[fault]
    feeds = case.feeds(PROBLEM, workers, range(PART + 1))
    with case.world(pool, PROBLEM, workers) as world:
        world.start(feeds[0])
        world.train(feeds[:PART])
        before = state_of(case, world)
        victim = case.losing(workers)[0]
        outcomes, _ = world.train_with_fault(feeds[PART:], victim, fault)
        _check_error(outcomes[victim].error, kind, words, victim)
        if kind is UserCodeError:
            assert "on purpose" in getattr(outcomes[victim].error, "detail", ""), "the user's traceback is missing"
        assert_same(before, state_of(case, world))


@pytest.mark.parametrize(("case", "workers"), sizes(1, 2, in_place=True), ids=label)
def test_outputs_of_the_wrong_shape(pool: Pool, case: Case, workers: int) -> None:
    problem = Problem(name="flat", flat=True)
    feeds = case.feeds(problem, workers, range(1))
    with case.world(pool, problem, workers) as world:
        world.start()
        outcomes, _ = world.train_with_fault(feeds, 0, "")
        first = case.losing(workers)[0]
        _check_error(outcomes[first].error, JobError, "shape", first)
        assert {tag.step for tag in world.form()} <= {0, None}


@pytest.mark.parametrize(("case", "workers"), new_process(), ids=label)
def test_a_process_that_left_refuses_another_group(pool: Pool, case: Case, workers: int) -> None:
    with case.world(pool, PROBLEM, workers) as world:
        world.start()
        world.leave()
        with pytest.raises(TrainwrightError, match="new process"):
            world.form()


@pytest.mark.parametrize(("case", "workers"), ENDED, ids=label)
def test_a_survivor_whose_process_will_end_has_the_state_before_the_failed_step(
    pool: Pool, case: Case, workers: int
) -> None:
    feeds = case.feeds(PROBLEM, workers, range(PART + 1))
    world = case.world(pool, PROBLEM, workers)
    try:
        world.start(feeds[0])
        world.train(feeds[:PART])
        before, survivor = state_of(case, world), world.ranks[1]
        survivor.send("train", [feeds[PART][1]], "")  # rank 0 does not step, so it blocks
        world.ranks[0].kill()
        outcome = survivor.outcome(SOON_S)
        assert isinstance(outcome.error, PeerLost), outcome
        after = case.code.state(survivor.call("files"))
        rates = [name for name in before if "learning_rate" in name]  # of the step that failed: each step sets it
        assert_same(*({**state, **dict.fromkeys(rates)} for state in (before, after)))
    finally:
        world.close(failed=True)


@pytest.mark.parametrize(("case", "workers"), several(2, in_place=True), ids=label)
def test_interrupt_frees_a_blocked_step_or_says_that_it_cannot(pool: Pool, case: Case, workers: int) -> None:
    feeds = case.feeds(PROBLEM, workers, range(2))
    world = case.world(pool, PROBLEM, workers)
    try:
        world.start()
        world.ranks[0].send("interrupted", 0.5, "train_step", feeds[0][0])  # the others do not step, so it blocks
        outcome = world.ranks[0].outcome(SOON_S)
        assert isinstance(outcome.value, PeerLost) or (outcome.dead and not case.interruptible), outcome
    finally:
        world.close(failed=True)


@pytest.mark.parametrize(("case", "workers"), ABORTED, ids=label)
def test_an_abort_frees_whoever_waits_where_collectives_raise_nothing(pool: Pool, case: Case, workers: int) -> None:
    """As those of NCCL: they end with any values. Nothing is applied, and the run goes on as the unbroken one."""
    whole, feeds = unbroken(pool, case, workers), case.feeds(PROBLEM, workers, range(WHOLE))
    world = case.world(pool, PROBLEM, workers)
    divided, staged = bool(case.copies), bool(case.schedule)
    others = dict.fromkeys(("train_step", "warm", "verify", "form"), True)
    expected = {"build": staged, "evaluate_step": divided, **others}

    def blocks(call: str, *arguments: object) -> bool:
        """Whether rank 0 waits in a call that the others do not make; all have left the group afterwards."""
        after_s = 0.3 if expected[call] else SOON_S / 2  # a call that ends is not interrupted, however slow it is
        world.ranks[0].send("interrupted", after_s, call, *arguments)
        outcome = world.ranks[0].outcome(SOON_S)
        assert outcome.error is None and not outcome.dead, outcome
        assert outcome.value is None or isinstance(outcome.value, PeerLost), outcome
        world.leave()
        return outcome.value is not None

    try:
        for rank in world.ranks:
            rank.call("block_until_aborted")
        world.start(feeds[0])
        waited = {"build": blocks("build", world.spec, world.plan)}
        world.form()
        world.rebuild(world.spec)
        world.settle(0, feeds[0])
        world.train(feeds[:PART])
        before, feed = state_of(case, world), feeds[PART][0]
        for call in ("train_step", "warm", "evaluate_step", "verify", "form"):
            if call == "form":
                world.leave()
                waited[call] = blocks(call, world.reserve()[0])
            else:
                waited[call] = blocks(call, *([] if call == "verify" else [feed]))
            assert_same(before, state_of(case, world))
            world.form()
            world.settle(0, feeds[PART])
        assert waited == expected
        world.train(feeds[PART:])
        end = state_of(case, world)
        assert whole.end.keys() == end.keys()
        for name, value in whole.end.items():
            if value.dtype.kind == "f":  # the sums of ZeRO are made in another order than over gloo
                np.testing.assert_allclose(end[name], value, rtol=0, atol=1e-12, err_msg=name)
            else:
                np.testing.assert_array_equal(end[name], value, err_msg=name)
    finally:
        world.close(failed=True)


@pytest.mark.parametrize(("case", "workers"), ABORTED, ids=label)
def test_a_build_that_was_interrupted_is_done_again_with_those_that_had_not_begun(
    pool: Pool, case: Case, workers: int
) -> None:
    whole, feeds = unbroken(pool, case, workers), case.feeds(PROBLEM, workers, range(WHOLE))
    with case.world(pool, PROBLEM, workers) as world:
        groups = world.reserve()
        world.every("form", lambda number: (groups[number],))
        world.ranks[0].send("interrupted", 0.3, "build", world.spec, world.plan)
        outcome = world.ranks[0].outcome(SOON_S)
        assert outcome.error is None and not outcome.dead, outcome
        assert outcome.value is None or isinstance(outcome.value, PeerLost), outcome
        world.leave()
        world.start(feeds[0])
        world.train(feeds)
        assert_same(whole.end, state_of(case, world))


@pytest.mark.parametrize(("case", "workers"), several(2, in_place=True), ids=label)
def test_ranks_that_leave_free_the_others(pool: Pool, case: Case, workers: int) -> None:
    problem = replace(PROBLEMS["dividing"], accumulation=2)
    feeds = case.feeds(problem, workers, range(1))
    with case.world(pool, problem, workers) as world:
        world.start(feeds[0])
        world.ranks[0].send("train", feeds and [feeds[0][0]])
        for rank in world.ranks[1:]:
            rank.call("leave")
        outcome = world.ranks[0].outcome(SOON_S)
        assert isinstance(outcome.error, PeerLost), outcome


def _check_survivors(outcomes: list[Outcome], dead: int) -> None:
    """All but the dead lost a peer."""
    for rank, outcome in enumerate(outcomes):
        assert rank == dead or isinstance(outcome.error, PeerLost), outcome


def _recover(world: World, newcomer: int, feeds: list[list[object]], files: Mapping[str, bytes]) -> None:
    """Form again, take the state of the survivor that is furthest, or of files where a part is lost; finish the run."""
    tags = world.form()
    assert tags[newcomer].step is None and all(tag.sound for tag in tags)
    source = max(range(len(tags)), key=lambda rank: -1 if tags[rank].step is None else tags[rank].step)
    assert tags[source].step == PART
    if agree_at_step(dict(enumerate(tags)), PART) is None:
        assert {tag.step for tag in world.every("load", lambda rank: (files,))} == {PART}
        world.warm(feeds[PART])
    else:
        world.settle(source, feeds[PART])
    world.train(feeds[PART:])


def _check_error(error: Exception | None, kind: type[Exception], words: str, rank: int) -> None:
    assert isinstance(error, kind) and isinstance(error, TrainwrightError), error
    assert words in str(error) and f"rank {rank}" in error.where, str(error)
