"""Crash loops and pauses between failures, as the driver decides about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.simulation.plans import Plans, staged
from tests.support.driver_harness import HEAD, Story
from trainwright.core import events
from trainwright.core.errors import HangError, TrainwrightError, WorkerLost
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.driver.failure_policy import backoff_s


def samples_of(step: int, rank: int, workers: int, plan: Plan | None) -> Sequence[int]:
    return [100 * step + 10 * rank + workers]


def dies(story: Story, rank: int = 1, at: int = 2, cause: str = "killed by SIGKILL") -> Story:
    """A rank dies while steps run, the other one stands at step `at`; all are ready to form."""
    story.tell(m.WorkerDied(worker=story.state.membership.members[rank].worker, cause=cause))
    other = story.state.membership.members[1 - rank].worker
    story.raises(other, "run", "peer", RuntimeError("gone"))
    if story.state.phase is Phase.GATHERING:
        story.start()
    if "backoff" in story.state.timers:
        story.now_s += 100
        story.expires("backoff")
    return story


def reforms(story: Story, rank: int = 1, at: int = 2) -> Story:
    """The survivor restores the newcomer."""
    story.returns("reserve", Address(host="h", port=1))
    tags = [StateTag(step=at), StateTag(step=at)]
    tags[rank] = StateTag(step=None)
    return story.returns("form", *tags)


def looping(times: int, *, rank: int = 1, **settings: object) -> Story:
    """After so many deaths at step 3; about to restore_plan."""
    story = Story(**{"failures": 5, "samples_of": samples_of, **settings}).running()
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=2))
    for number in range(times):
        if number:
            story.returns("restore", StateTag(step=2))
        reforms(dies(story, rank), rank)
    return story


def test_the_last_straw_names_the_step_the_samples_and_the_way_out() -> None:
    story = looping(1, failures=1).returns("restore", StateTag(step=2))
    error = dies(story).state.shutdown.error
    assert isinstance(error, WorkerLost)
    assert "step 3 failed 2 times on rank 1: killed by SIGKILL; its share of that batch holds samples 312" in error.what
    assert "failure 2 in a row" in error.what and 'on_crash_loop="skip"' in error.remedy


@pytest.mark.parametrize(("schedule", "until"), [("1f1b", 8), ("pipedream", 3)])
def test_steps_that_overlap_are_taken_one_at_a_time_after_a_failure(schedule: str, until: int) -> None:
    """Else a batch that ends the step before its own would be blamed on that one, of which replicas hold the state."""
    plan = replace(staged(2, 2), schedule=schedule)
    story = looping(1, layouts=Plans(plans=(plan,)), steps_per_epoch=8)
    assert story.state.epoch.restore_plan is not None and story.state.epoch.restore_plan.source == "replica"
    assert {call.argument for call in story.returns("restore", StateTag(step=2)).calls("run")} == {
        m.RunRequest(steps=range(2, until))
    }


def test_failures_that_differ_are_no_loop() -> None:
    story = looping(1, failures=1).returns("restore", StateTag(step=2))
    error = dies(story, rank=0).state.shutdown.error
    assert isinstance(error, WorkerLost) and "step 3 failed" not in error.what and "rank 0 ended" in error.what


def test_internal_errors_alike_are_a_loop_and_keep_their_traceback() -> None:
    story = Story(failures=1).running()
    for _ in range(2):
        story.raises(
            1 + bool(story.state.recovery.failures), "run", "internal", TrainwrightError("KeyError: 7", detail="here")
        )
        story.raises(0, "run", "peer", RuntimeError("gone")).start()
        if story.state.phase is Phase.RESERVING:
            reforms(story, at=0).returns("restore", StateTag(step=0))
    error = story.state.shutdown.error
    assert isinstance(error, TrainwrightError) and error.detail == "here"
    assert "step 1 failed 2 times on rank 1: KeyError: 7" in error.what


def test_the_third_failure_alike_has_the_batch_passed_by_for_good() -> None:
    assert not looping(2, pass_limit=1).state.recovery.passing
    story = looping(3, pass_limit=1)
    note = story.emitted(events.Noted)[0].text
    passed = story.calls("restore")[0].argument.passing
    assert [call.argument.passing for call in story.calls("restore")] == [passed, passed], "all ranks alike"
    assert (passed[0].step, passed[0].why) == (3, "step 3 failed 3 times on rank 1: killed by SIGKILL")
    assert passed[0].why in note and "quarantine/" in note
    story.returns("restore", StateTag(step=2))
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=5))
    dies(story, at=5)
    reforms(story, at=5)
    assert story.calls("restore")[0].argument.passing == passed


def test_nothing_is_passed_by_where_the_job_does_not_allow_it_or_allows_no_more() -> None:
    assert not looping(4).state.recovery.passing
    story = looping(3, pass_limit=1).returns("restore", StateTag(step=2))
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=3))
    for _ in range(3):
        reforms(dies(story), at=3).returns("restore", StateTag(step=3))
    assert story.state.recovery.loop is not None and (
        story.state.recovery.loop.step,
        story.state.recovery.loop.times,
    ) == (4, 3)
    assert [passed.step for passed in story.state.recovery.passing] == [3]


def test_a_step_that_fails_without_its_batch_ends_the_run_and_says_that_the_batch_is_innocent() -> None:
    story = looping(3, failures=3, pass_limit=9).returns("restore", StateTag(step=2))
    error = dies(story).state.shutdown.error
    assert isinstance(error, WorkerLost) and "step 3 failed 4 times" in error.what
    assert "passing its batch by did not help" in error.what and "not the cause" in error.remedy


def test_a_death_in_the_throwaway_step_before_counts_too() -> None:
    story = looping(1)
    story.tell(m.WorkerDied(worker=story.state.membership.members[1].worker, cause="killed by SIGKILL"))
    story.raises(story.state.membership.members[0].worker, "restore", "peer", RuntimeError("gone")).start()
    reforms(story)
    assert story.state.recovery.loop is not None and story.state.recovery.loop.times == 2


def test_lost_connections_alone_are_never_a_loop() -> None:
    story = Story(failures=9, pass_limit=9).running()
    for _ in range(4):
        for member in story.state.membership.members:
            story.raises(member.worker, "run", "peer", RuntimeError("gone"))
        if "backoff" in story.state.timers:
            story.now_s += 100
            story.expires("backoff")
        story.formed(StateTag(step=0)).returns("restore", StateTag(step=0))
    assert story.state.recovery.failures == 4 and story.state.recovery.loop is None and not story.state.recovery.passing


def test_a_rank_that_hangs_in_the_same_step_is_a_loop() -> None:
    story = Story(failures=1, samples_of=samples_of).running()
    for _ in range(2):
        story.expires("hang").raises(story.state.membership.members[0].worker, "run", "peer", RuntimeError("gone"))
        story.expires("leave").start()
        if story.state.phase is Phase.RESERVING:
            reforms(story, at=0).returns("restore", StateTag(step=0))
    error = story.state.shutdown.error
    assert isinstance(error, HangError) and "step 1 failed 2 times on rank 1" in error.what


def test_where_nobody_survives_the_next_steps_are_taken_one_at_a_time() -> None:
    story = Story(workers=1, spares=0, failures=5).running(HEAD)
    assert story.calls("run")[0].argument.steps.stop == 8
    story.tell(
        m.StepsCompleted(generation=story.state.epoch.generation, step=6), m.WorkerDied(worker=0, cause="killed")
    ).start()
    story.formed().returns("restore", StateTag(step=4))
    assert story.calls("run")[0].argument.steps.stop == 6, "as far as known to be good"
    assert story.segment(6).calls("run")[0].argument.steps.stop == 7
    assert story.segment(7).calls("run")[0].argument.steps.stop == 8 and story.state.recovery.failures == 0


def test_pauses_grow_to_a_minute_and_the_first_failure_has_none() -> None:
    assert [backoff_s(failures) for failures in range(8)] == [0, 0, 1, 2, 4, 8, 16, 32]
    assert backoff_s(9) == backoff_s(1000) == 60


def test_the_first_failure_is_recovered_from_at_once_and_the_third_after_a_pause() -> None:
    story = Story(failures=9).running()
    for number in range(3):
        story.tell(m.WorkerDied(worker=story.state.membership.members[1].worker, cause="killed"))
        story.now_s -= 2.9  # all that follows takes 0.1 s
        story.raises(0, "run", "peer", RuntimeError("gone")).start()
        if number:
            assert story.state.phase is Phase.GATHERING
            waiting = story.emitted(events.Waiting)[-1]
            assert waiting.deadline_s == pytest.approx(backoff_s(number + 1), abs=1.0)
            assert f"after {number + 1} failures in a row" in waiting.what
            story.now_s += waiting.deadline_s
            story.expires("backoff")
        assert story.state.phase is Phase.RESERVING
        reforms(story, at=0).returns("restore", StateTag(step=0))


def test_a_wish_to_stop_ends_the_pause() -> None:
    story = looping(2).returns("restore", StateTag(step=2))
    story.tell(m.WorkerDied(worker=story.state.membership.members[1].worker, cause="killed"))
    story.now_s -= 2
    story.raises(0, "run", "peer", RuntimeError("gone")).start()
    assert "backoff" in story.state.timers
    assert story.tell(m.StopRequested()).state.phase is Phase.RESERVING


def raised(story: Story, cause: str, times: int) -> Story:
    """Rank 1 raises the same error of ours again and again, in new processes, in the first step."""
    for _ in range(times):
        worker = story.state.membership.members[1].worker
        story.raises(worker, "run", "internal", TrainwrightError(cause, detail="here"))
        story.raises(0, "run", "peer", RuntimeError("gone")).start()
        if "backoff" in story.state.timers:
            story.now_s += 100
            story.expires("backoff")
        if story.state.phase is Phase.RESERVING:
            reforms(story, at=0).returns("restore", StateTag(step=0))
    return story


def test_an_error_of_code_is_tried_twice_and_neither_samples_nor_memory_are_blamed() -> None:
    error = raised(
        Story(failures=9, samples_of=samples_of).running(), "TypeError: no such argument", 2
    ).state.shutdown.error
    assert isinstance(error, TrainwrightError) and error.detail == "here"
    assert "step 1 failed 2 times on rank 1: TypeError: no such argument" in error.what
    assert "a new process raised the same error" in error.what and "sample" not in error.what
    assert "traceback" in error.remedy and "memory" not in error.remedy


def test_errors_that_may_pass_by_themselves_are_tried_as_often_as_the_job_says() -> None:
    assert raised(Story(failures=3).running(), "ConnectionError: refused", 3).state.shutdown.error is None
    assert raised(Story(failures=3).running(), "ConnectionError: refused", 4).state.shutdown.error is not None
    assert raised(Story(failures=9, pass_limit=1).running(), "TypeError: torn row", 3).state.shutdown.error is None


def test_an_error_of_code_while_the_model_is_built_ends_the_run_the_second_time() -> None:
    story = Story(failures=9).running()
    story.raises(1, "run", "internal", TrainwrightError("KeyError: 'a'")).raises(0, "run", "peer", RuntimeError("gone"))
    story.start()
    for _ in range(2):
        if "backoff" in story.state.timers:
            story.now_s += 100
            story.expires("backoff")
        story.returns("reserve", Address(host="h", port=1))
        story.raises(story.state.membership.members[1].worker, "form", "internal", TrainwrightError("ValueError: meta"))
        story.raises(story.state.membership.members[0].worker, "form", "peer", RuntimeError("gone")).start()
    error = story.state.shutdown.error
    assert isinstance(error, TrainwrightError) and "ValueError: meta; a new process raised the same" in error.what
    assert "traceback" in error.remedy
