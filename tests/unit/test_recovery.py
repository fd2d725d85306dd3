"""Spare workers and budgets of failures, as the driver decides about them."""

from __future__ import annotations

import pytest

from tests.support.driver_harness import Story, progressed
from trainwright.core import events
from trainwright.core.errors import JobError, NonFiniteLoss, WorkerLost
from trainwright.core.topology import Address, StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.driver.membership import MAX_STANDBY_FAILURES
from trainwright.reporting.event_messages import failure_text


def with_spare(**settings: object) -> Story:
    """Two workers that step, and worker 2 as a spare that is ready."""
    story = progressed(Story(**{"spares": 1, **settings}).running(), 1)
    return story.tell(m.WorkerStarted(worker=2, node="n1", pid=2))


def test_spares_start_when_steps_run_and_not_before() -> None:
    story = Story(spares=2).running()
    assert not story.all(m.StartWorker)
    progressed(story, 1)
    assert story.all(m.StartWorker) == [
        m.StartWorker(worker=2, slot=0, spare=True, beside=True),
        m.StartWorker(worker=3, slot=1, spare=True, beside=True),
    ]
    assert not progressed(story, 2).all(m.StartWorker)
    assert story.tell(m.WorkerStarted(worker=3, node="n1", pid=7)).emitted(events.Placed)[0].spare
    assert story.state.phase is Phase.RUNNING


def test_a_spare_takes_a_lost_rank_at_once_and_is_replaced_once_steps_run_again() -> None:
    story = with_spare().tell(m.WorkerDied(worker=1, cause="killed"))
    assert not story.all(m.StartWorker)
    assert story.emitted(events.Promoted) == [events.Promoted(worker=2, rank=1, slot=1, node="n1")]
    story.returns("run", m.SegmentReport(step=2), workers=[0])
    story.returns("leave", None, workers=[0])
    assert [(call.worker, call.verb) for call in story.all(m.CallWorker)] == [(0, "reserve"), (2, "reserve")]
    story.returns("reserve", Address(host="h", port=1)).returns("form", StateTag(step=2), StateTag(step=None))
    restore_plan = story.calls("restore")[0].argument
    assert (restore_plan.step, restore_plan.source, restore_plan.moves[0].target) == (2, "replica", 1)
    formed = story.returns("restore", StateTag(step=2)).emitted(events.Formed)[0]
    assert (formed.survivors, formed.steps_lost) == (1, 0)
    assert progressed(story, 3).all(m.StartWorker) == [m.StartWorker(worker=3, slot=1, spare=True, beside=True)]


def test_a_spare_s_node_is_known_by_the_same_id_once_it_has_a_rank() -> None:
    story = progressed(Story(spares=1).running(), 1).tell(m.WorkerStarted(worker=2, node="n1", pid=2, home="id-of-n1"))
    story.tell(m.WorkerDied(worker=1, cause="killed"))
    assert (story.state.membership.members[1].node, story.state.membership.members[1].home) == ("n1", "id-of-n1")


def test_a_spare_that_is_still_starting_is_waited_for() -> None:
    story = progressed(Story(spares=1).running(), 1).tell(m.WorkerDied(worker=0, cause="killed"))
    assert story.emitted(events.Promoted) and not story.all(m.StartWorker) and story.state.membership.starting == {2}
    story.returns("run", m.SegmentReport(step=1), workers=[1])
    story.returns("leave", None, workers=[1])
    assert story.state.phase is Phase.GATHERING
    assert story.start().state.phase is Phase.RESERVING


def test_one_spare_and_two_dead_give_one_new_process() -> None:
    story = with_spare().tell(m.WorkerDied(worker=1, cause="killed"), m.WorkerDied(worker=0, cause="killed"))
    assert story.all(m.StartWorker) == [m.StartWorker(worker=3, slot=0)]
    assert story.state.membership.rank_of == {2: 1, 3: 0}


def test_a_spare_of_its_own_node_comes_first_and_alone_where_it_takes_over_accelerators() -> None:
    def story(**settings: object) -> Story:
        told = progressed(Story(spares=2, **settings).running(), 1)
        return told.tell(m.WorkerStarted(worker=2, node="n1", pid=2), m.WorkerStarted(worker=3, node="n0", pid=3))

    assert story().tell(m.WorkerDied(worker=0, cause="")).emitted(events.Promoted)[0].worker == 3
    stays = story(spares_stay=True).tell(m.WorkerDied(worker=0, cause=""), m.WorkerDied(worker=3, cause=""))
    assert [promoted.worker for promoted in stays.emitted(events.Promoted)] == [3]
    assert stays.all(m.StartWorker) == [m.StartWorker(worker=4, slot=0)]


def test_a_spare_that_takes_over_accelerators_is_never_chosen_before_its_node_is_known() -> None:
    story = progressed(Story(spares=1, spares_stay=True).running(), 1).tell(m.WorkerDied(worker=1, cause=""))
    assert story.all(m.StartWorker) == [m.StartWorker(worker=3, slot=1)] and not story.emitted(events.Promoted)
    story.tell(m.WorkerDied(worker=3, cause="could not start"))
    assert story.all(m.StartWorker) == [m.StartWorker(worker=4, slot=1)] and not story.emitted(events.Promoted)


def test_a_dead_rank_s_accelerators_are_told_to_whoever_takes_it() -> None:
    story = Story(spares=1).tell(m.LeaseAcquired(token=3, head=None))
    story.tell(*(m.WorkerStarted(worker=w, node="n", pid=w, accelerators=(f"gpu-{w}",)) for w in (0, 1)))
    story.formed().returns("restore", StateTag(step=0))
    progressed(story, 1).tell(m.WorkerStarted(worker=2, node="n", pid=2), m.WorkerDied(worker=1, cause=""))
    story.raises(0, "run", "peer", RuntimeError("gone")).returns("reserve", Address(host="h", port=1))
    assert [call.argument.accelerators for call in story.calls("form")] == [("gpu-0",), ("gpu-1",)]


def test_a_spare_s_end_is_no_failure_of_the_run() -> None:
    story = with_spare().tell(m.WorkerDied(worker=2, cause="out of memory"))
    assert story.state.phase is Phase.RUNNING and story.state.recovery.failures == 0
    assert story.wanted == (m.StartWorker(worker=3, slot=1, spare=True, beside=True),)


def test_spares_that_keep_ending_are_given_up_and_that_is_said() -> None:
    story = progressed(Story(spares=1).running(), 1)
    for number in range(MAX_STANDBY_FAILURES):
        assert story.all(m.StartWorker) == [m.StartWorker(worker=2 + number, slot=number % 2, spare=True, beside=True)]
        story.tell(m.WorkerDied(worker=2 + number, cause="out of memory"))
    assert "out of memory" in story.emitted(events.Noted)[0].text
    assert not story.all(m.StartWorker) and not progressed(story, 2).all(m.StartWorker)


def test_a_budget_of_failures_an_hour_ends_a_run_that_recovers_each_time() -> None:
    story = Story(failures_an_hour=2).running()
    for number in range(3):
        progressed(story, number + 1)
        story.tell(m.WorkerDied(worker=story.state.membership.members[1].worker, cause="killed"))
        story.raises(0, "run", "peer", RuntimeError("gone")).start()
        if number < 2:
            story.returns("reserve", Address(host="h", port=1))
            story.returns("form", StateTag(step=number + 1), StateTag(step=None)).returns(
                "restore", StateTag(step=number + 1)
            )
    error = story.state.shutdown.error
    assert isinstance(error, WorkerLost) and "failure 3 within an hour; failures_an_hour=2" in error.what


def test_failures_longer_ago_than_an_hour_do_not_count() -> None:
    story = progressed(Story(failures_an_hour=1).running(), 1)
    story.tell(m.WorkerDied(worker=1, cause="killed")).raises(0, "run", "peer", RuntimeError("gone")).start()
    story.formed(StateTag(step=1), StateTag(step=None)).returns("restore", StateTag(step=1))
    progressed(story, 2)
    story.now_s += 3600
    story.tell(m.WorkerDied(worker=2, cause="killed")).raises(0, "run", "peer", RuntimeError("gone")).start()
    assert story.state.phase is Phase.RESERVING


def test_an_upload_that_finds_the_state_unfit_ends_the_run_at_once() -> None:
    story = Story().running().segment(4).snapshot(4)
    story.raises(0, "upload", "user", NonFiniteLoss("a parameter is not finite"))
    assert story.state.phase is Phase.RELEASING and story.all(m.ReleaseLease)[0].outcome == "failed"
    assert isinstance(story.state.shutdown.error, NonFiniteLoss)


def test_spares_end_with_the_run() -> None:
    story = with_spare().tell(m.StopRequested(now=True))
    assert {kill.worker for kill in story.all(m.KillWorker)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("problems", "cause"),
    [
        (["loss= is no mean"], "the job has 1 problem: loss= is no mean"),
        (["loss= is no mean", "metric 'f1' has no merge"], "the job has 2 problems, the first is: loss= is no mean"),
    ],
)
def test_the_line_of_a_failure_names_the_problem_of_the_job(problems: list[str], cause: str) -> None:
    story = Story().running().raises(1, "run", "user", JobError(problems))
    (failed,) = story.emitted(events.Failed)
    assert failed.cause == cause and failure_text(failed) == f"rank 1 (n1, pid 1) failed at about step 0: {cause}"
    assert all(problem in failed.detail for problem in problems)
