"""Planned hand-overs, event by event."""

from __future__ import annotations

import math

import pytest

from tests.simulation.plans import stage_piece
from tests.support.driver_harness import FILES, HEAD, Story
from trainwright.core.data import MetricSums
from trainwright.core.events import CheckpointSkipped, Failed, Leaving, Noted, Promoted, Resized
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase


def notice(worker: int) -> m.PreemptionNoticed:
    return m.PreemptionNoticed(worker=worker, left_s=25.0)


def uploaded(story: Story, worker: int, step: int) -> Story:
    story.returns("upload", FILES, workers=[worker])
    return story.committed(step)


def spare_up(story: Story, worker: int, node: str) -> Story:
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=story.state.position.step + 1))
    assert [place.worker for place in story.all(m.StartWorker)] == [worker]
    return story.tell(m.WorkerStarted(worker=worker, node=node, pid=9))


def test_a_notice_pauses_the_ranks_and_those_who_stay_write_a_checkpoint_at_once() -> None:
    story = Story(total_steps=100, steps_per_epoch=100).running().tell(notice(0))
    assert [event.rank for event in story.emitted(Leaving)] == [0] and [c.worker for c in story.calls("stop")] == [0]
    story.tell(notice(0))
    assert not story.wanted, "told once"
    story.segment(3)
    assert [call.worker for call in story.calls("snapshot")] == [1], "by the one who stays"
    story.snapshot(3, worker=1)
    assert [call.worker for call in story.calls("upload")] == [1]
    assert [kill.worker for kill in story.all(m.KillWorker)] == [0], "while it is uploaded"
    assert [place.slot for place in story.all(m.StartWorker)] == [0] and [c.worker for c in story.calls("leave")] == [1]
    story.returns("leave", None, workers=[1])
    story.start().formed(StateTag(step=None), StateTag(step=3))
    assert story.state.epoch.restore_plan is not None and (
        story.state.epoch.restore_plan.source,
        story.state.epoch.restore_plan.step,
    ) == (
        "replica",
        3,
    )
    assert not story.emitted(Failed) and story.state.recovery.failures == 0


def test_a_spare_elsewhere_takes_the_rank_and_one_on_the_same_node_does_not() -> None:
    for node, promoted in (("n9", [2]), ("n1", [])):
        story = spare_up(Story(total_steps=100, steps_per_epoch=100, spares=1).running(), 2, node)
        story.tell(notice(1)).segment(3).snapshot(3)
        assert [event.worker for event in story.emitted(Promoted)] == promoted
        assert [place.worker for place in story.all(m.StartWorker)] == ([] if promoted else [3])


def test_a_state_that_only_those_who_go_hold_is_stored_before_they_do() -> None:
    story = Story(total_steps=100, steps_per_epoch=100, workers=1).running().tell(notice(0))
    story.segment(3).snapshot(3)
    assert story.state.phase is Phase.WAITING and not story.all(m.KillWorker)
    uploaded(story, 0, 3)
    assert [kill.worker for kill in story.all(m.KillWorker)] == [0]
    story.start().formed()
    assert story.state.epoch.restore_plan is not None and (
        story.state.epoch.restore_plan.source,
        story.state.epoch.restore_plan.step,
    ) == (
        "checkpoint",
        3,
    )


def test_a_slow_store_does_not_make_those_who_go_late() -> None:
    story = Story(total_steps=100, steps_per_epoch=100, workers=1).running(HEAD).tell(notice(0))
    story.segment(6).snapshot(6)
    waits = [timer.after_s for timer in story.all(m.SetTimer) if timer.name == "notice"]
    assert waits and max(waits) < 25 * 0.8
    story.now_s += 20.0
    story.expires("notice")
    assert [kill.worker for kill in story.all(m.KillWorker)] == [0]


def test_a_node_that_is_drained_without_an_end_waits_for_a_frozen_writer_as_long_as_any_upload_may_take() -> None:
    story = Story(total_steps=100, steps_per_epoch=100, workers=1).running(HEAD)
    story.tell(m.PreemptionNoticed(worker=0, left_s=math.inf)).segment(6).snapshot(6)
    assert story.state.phase is Phase.WAITING
    story.now_s += story.state.settings.saving.upload_deadline_s
    story.expires("upload")
    assert story.state.phase is Phase.RUNNING and not story.all(m.KillWorker)
    assert "that are to leave continue for now" in story.emitted(Noted)[0].text
    uploaded(story, 0, 6)
    assert story.calls("stop"), "the store takes checkpoints again"
    story.segment(9).snapshot(9)
    uploaded(story, 0, 9)
    assert [kill.worker for kill in story.all(m.KillWorker)] == [0]


@pytest.mark.parametrize("left_s", [math.inf, 2000.0])
def test_a_step_whose_handover_waits_for_a_frozen_writer_is_evaluated_all_the_same(left_s: float) -> None:
    story = Story(total_steps=100, steps_per_epoch=100, workers=1, evaluate_steps=6).running(HEAD)
    story.tell(m.PreemptionNoticed(worker=0, left_s=left_s)).segment(6).snapshot(6)
    assert story.state.phase is Phase.WAITING
    assert [call.argument.step for call in story.expires("upload").calls("evaluate")] == [6]
    assert "notice" not in story.state.timers, "it could expire in the evaluation"
    story.returns("evaluate", MetricSums(totals={"loss": (1.0, 1.0)})).expires("upload")
    assert [call.argument.metrics for call in story.calls("run")] == [{"loss": 1.0}]


def half(rank: int, step: int | None) -> StateTag:
    """What a rank of two stages holds."""
    return StateTag(step=step, layout="pp", pieces=frozenset({stage_piece(rank, 2)}), total=2)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "lost"])
def test_a_writer_that_stays_is_asked_for_no_checkpoint_while_it_still_writes_one(stored: bool) -> None:
    """The handover waits for it no longer, and its checkpoint counts if the one who went had written its own part."""
    story = Story(total_steps=100, steps_per_epoch=100, checkpoint_steps=8).up(HEAD)
    story.formed(half(0, None), half(1, None)).returns("restore", half(0, 4), half(1, 4)).tell(notice(0))
    story.segment(6).returns("snapshot", m.SnapshotTaken(step=6, size_bytes=8, blocked_s=0.1))
    late = m.CallReturned(worker=1, generation=story.state.epoch.generation, verb="upload", value=FILES)
    if stored:
        story.returns("upload", FILES, workers=[0])
    story.now_s = story.state.handover.leaving[0] - 5.0 - 1.0 - 1e-9  # a timer may be early by an error of rounding
    story.expires("notice")
    assert [kill.worker for kill in story.all(m.KillWorker)] == [0]
    assert story.state.checkpoints.upload is not None and story.state.checkpoints.upload.owing == {1}
    story.returns("leave", None, workers=[1]).start().formed(half(0, None), half(1, 6))
    story.returns("restore", half(0, 4), half(1, 4)).segment(8)
    assert "is still being written" in story.emitted(CheckpointSkipped)[0].reason and not story.calls("snapshot")
    assert [commit.step for commit in story.tell(late).all(m.CommitCheckpoint)] == ([6] if stored else [])
    if stored:
        story.committed(6)
    story.segment(16)
    assert {call.worker for call in story.calls("snapshot")} == {1, 2}


def test_a_commit_under_way_is_waited_for_after_the_deadline_of_a_handover() -> None:
    story = Story(total_steps=100, steps_per_epoch=100, workers=1).running(HEAD).tell(notice(0))
    story.segment(6).snapshot(6).returns("upload", FILES)
    story.now_s += 20.0
    assert story.expires("notice").state.phase is Phase.WAITING and not story.all(m.KillWorker)
    assert [kill.worker for kill in story.committed(6).all(m.KillWorker)] == [0]


def test_steps_go_on_while_one_who_goes_still_writes_an_older_checkpoint() -> None:
    story = Story(total_steps=100, steps_per_epoch=100, checkpoint_steps=4).running().segment(4).snapshot(4)
    story.tell(notice(0))
    assert not story.calls("stop")
    story.returns("upload", FILES, workers=[0])
    assert story.calls("stop")
    story.committed(4)
    story.segment(5)
    assert [call.worker for call in story.calls("snapshot")] == [1]


def test_an_elastic_world_goes_on_with_fewer() -> None:
    story = Story(total_steps=100, steps_per_epoch=100, workers=3, min_workers=1).running()
    story.tell(notice(0), notice(2)).segment(3).snapshot(3, worker=1)
    assert [kill.worker for kill in story.all(m.KillWorker)] == [0, 2] and not story.all(m.StartWorker)
    assert [(event.former, event.workers) for event in story.emitted(Resized)] == [(3, 1)]
    assert [member.worker for member in story.state.membership.members] == [1]


def test_the_end_of_a_process_that_was_to_end_is_not_counted() -> None:
    story = Story(total_steps=100, steps_per_epoch=100, failures=0).running().tell(notice(1))
    story.tell(m.WorkerDied(worker=1, cause="its node was lost"))
    assert (
        story.state.phase is Phase.GATHERING
        and story.state.recovery.failures == 0
        and not story.state.recovery.failed_s
    )
    story = Story(total_steps=100, steps_per_epoch=100, failures=0).running().tell(notice(1))
    story.tell(m.WorkerDied(worker=0, cause="killed"))
    assert story.state.recovery.failures == 1, "nobody told that one"


def test_a_spare_that_is_told_to_go_is_let_go_at_once_and_replaced() -> None:
    story = spare_up(Story(total_steps=100, steps_per_epoch=100, spares=1).running(), 2, "n1").tell(notice(2))
    assert [kill.worker for kill in story.all(m.KillWorker)] == [2] and [
        p.worker for p in story.all(m.StartWorker)
    ] == [3]
    assert story.state.membership.spares_lost == 0 and not story.calls("stop")


def test_a_notice_of_an_earlier_end_counts_and_a_later_one_does_not() -> None:
    story = Story(total_steps=100, steps_per_epoch=100).running()
    story.tell(m.PreemptionNoticed(worker=0, left_s=math.inf, why="Ray drains its node"))
    (told,) = story.emitted(Leaving)
    assert told.why == "Ray drains its node" and told.left_s == 0.0, "events say 0 where no time is known"
    story.tell(m.PreemptionNoticed(worker=0, left_s=120.0, why="AWS spot interruption (stop)"))
    assert [(event.why, event.left_s) for event in story.emitted(Leaving)] == [("AWS spot interruption (stop)", 120.0)]
    end_s = story.state.handover.leaving[0]
    story.tell(m.PreemptionNoticed(worker=0, left_s=math.inf, why="Ray drains its node"))
    assert not story.wanted and story.state.handover.leaving[0] == end_s
    story.tell(notice(0))
    assert story.state.handover.leaving[0] < end_s
