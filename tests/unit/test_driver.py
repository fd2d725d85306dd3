"""The driver's decisions one by one: what it wants after each event of a short story."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.driver_harness import FILES, HEAD, Story
from trainwright.core import events
from trainwright.core.data import MetricSums
from trainwright.core.engine import CheckpointRef
from trainwright.core.errors import (
    FencedError,
    HangError,
    PeerLost,
    ResourceError,
    StorageError,
    StoreDown,
    TrainwrightError,
    UserCodeError,
    WorkerLost,
)
from trainwright.core.plan import Mesh
from trainwright.core.topology import Address, Generation, StateTag, StateTransfer
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase

# --- an unbroken run --------------------------------------------------------------------------------------


def test_a_run_begins_by_taking_its_log_and_placing_all_workers() -> None:
    story = Story()
    assert story.wanted == (m.AcquireLease(),)
    story.tell(m.LeaseAcquired(token=3, head=None))
    assert story.all(m.StartWorker) == [m.StartWorker(worker=0, slot=0), m.StartWorker(worker=1, slot=1)]
    assert [timer.name for timer in story.all(m.SetTimer)] == ["place"]
    assert story.emitted(events.Waiting)[0].deadline_s == 300.0


def test_a_group_is_built_from_addresses_and_nodes() -> None:
    story = Story(threads=2, devices=("cuda:0",)).up()
    assert {call.generation for call in story.calls("reserve")} == {Generation(token=3, number=1)}
    story.returns("reserve", Address(host="a", port=1), Address(host="b", port=2))
    first, second = (call.argument for call in story.calls("form"))
    assert [(peer.rank, peer.address.port, peer.node) for peer in first.peers] == [(0, 1, "n0"), (1, 2, "n1")]
    assert (first.rank, second.rank, second.devices, second.threads) == (0, 1, ("cuda:0",), 2)
    assert first.peers == second.peers


def test_a_new_run_takes_rank_0_s_build_and_a_resumed_one_the_head() -> None:
    fresh = Story().up().formed().calls("restore")[0].argument
    assert fresh == m.RestorePlan(step=0, source="initial", moves=(StateTransfer(source=0, target=1, piece="state"),))
    assert Story().up(HEAD).formed().calls("restore")[1].argument == m.RestorePlan(
        step=4, source="checkpoint", checkpoint=HEAD
    )


def test_a_checkpoint_is_uploaded_while_steps_go_on() -> None:
    story = Story().running()
    assert [call.argument for call in story.calls("run")] == [m.RunRequest(steps=range(4))] * 2
    story.segment(4)
    assert [call.worker for call in story.calls("snapshot")] == [0]
    story.snapshot(4)
    assert story.calls("upload")[0].argument == "checkpoints/00000004-3"
    assert [call.argument for call in story.calls("run")] == [m.RunRequest(steps=range(4, 8))] * 2
    story.returns("upload", FILES, workers=[0])
    assert story.all(m.CommitCheckpoint) == [
        m.CommitCheckpoint(step=4, path="checkpoints/00000004-3", files=FILES, parent="")
    ]
    done = story.committed(4).emitted(events.Checkpointed)[0]
    assert (done.step, done.size_bytes, done.blocked_s, done.seconds) == (4, 8, 0.1, 2.0)


def test_the_end_waits_for_evaluation_upload_and_commit() -> None:
    story = Story(evaluate_steps=8).running(HEAD).segment(8).snapshot(8)
    assert len(story.calls("evaluate")) == 2
    story.returns("evaluate", MetricSums(totals={"loss": (3.0, 1.0)}), MetricSums(totals={"loss": (1.0, 3.0)}))
    assert story.emitted(events.Evaluated)[0].metrics == {"loss": 1.0}
    assert story.state.phase is Phase.WAITING
    story.returns("upload", FILES, workers=[0])
    assert story.all(m.CommitCheckpoint)[0].parent == HEAD.path
    assert story.committed(8).all(m.ReleaseLease) == [m.ReleaseLease(outcome="done", step=8)]
    assert story.tell(m.LeaseReleased()).wanted == (m.FinishRun(outcome="done", step=8),)


def test_metrics_with_state_are_computed_by_the_first_rank() -> None:
    story = Story(evaluate_steps=8).running(HEAD).segment(8).snapshot(8)
    parts = [MetricSums(totals={"loss": (3.0, 1.0)}, states={"f1": (part,)}) for part in (b"0", b"1")]
    story.returns("evaluate", *parts)
    (call,) = story.calls("evaluate")
    assert call.worker == 0 and call.argument.evaluated.states == {"f1": (b"0", b"1")}
    assert story.emitted(events.Evaluated) == []
    story.returns("evaluate", MetricSums(totals={"loss": (6.0, 2.0), "f1": (0.5, 1.0)}), workers=[0])
    assert story.emitted(events.Evaluated)[0].metrics == {"loss": 3.0, "f1": 0.5}


def test_a_finished_run_needs_no_workers() -> None:
    head = CheckpointRef(step=8, path="checkpoints/00000008-1", manifest_sha256="00")
    story = Story().tell(m.LeaseAcquired(token=3, head=head))
    assert story.all(m.StartWorker) == []
    assert story.all(m.ReleaseLease) == [m.ReleaseLease(outcome="done", step=8)]


def test_a_checkpoint_that_falls_due_during_an_upload_is_skipped() -> None:
    story = Story(checkpoint_steps=2).running().segment(2).snapshot(2).segment(4)
    assert story.calls("snapshot") == []
    assert story.emitted(events.CheckpointSkipped)[0].step == 4
    assert len(story.calls("run")) == 2


# --- failures ---------------------------------------------------------------------------------------------


def test_a_dead_worker_is_replaced_and_restored_from_a_survivor() -> None:
    story = Story().running()
    story.tell(
        m.StepsCompleted(generation=story.state.epoch.generation, step=2), m.WorkerDied(worker=0, cause="signal 9")
    )
    assert story.all(m.StartWorker) == [m.StartWorker(worker=2, slot=0)]
    failed = story.emitted(events.Failed)[0]
    assert (failed.worker, failed.rank, failed.node, failed.cause, failed.step) == (0, 0, "n0", "signal 9", 2)
    assert story.calls("leave") == []  # rank 1 is busy: it will raise
    story.raises(1, "run", "peer", PeerLost("gone")).start().formed(StateTag(step=None), StateTag(step=3))
    restore_plan = story.calls("restore")[0].argument
    assert restore_plan == m.RestorePlan(
        step=3, source="replica", moves=(StateTransfer(source=1, target=0, piece="state"),)
    )
    formed = story.returns("restore", StateTag(step=3)).emitted(events.Formed)[0]
    assert (formed.generation, formed.step, formed.survivors, formed.steps_lost) == (2, 3, 1, 0)


def test_idle_survivors_are_told_to_leave() -> None:
    story = Story().running().returns("run", m.SegmentReport(step=4), workers=[1])
    story.tell(m.WorkerDied(worker=0, cause="signal 9"))
    assert [call.worker for call in story.calls("leave")] == [1]


def test_new_processes_are_placed_for_survivors_where_the_engine_cannot_form_again() -> None:
    story = Story(reform="new_process").running().tell(m.WorkerDied(worker=0, cause="signal 9"))
    assert story.all(m.KillWorker) == []  # what rank 1 raises may explain it
    story.raises(1, "run", "peer", PeerLost("gone"))
    assert (story.all(m.KillWorker), story.all(m.StartWorker)) == (
        [m.KillWorker(worker=1)],
        [m.StartWorker(worker=3, slot=1)],
    )


def test_without_a_sound_state_or_a_checkpoint_every_process_begins_anew() -> None:
    story = Story().running().raises(0, "run", "peer", PeerLost("gone")).raises(1, "run", "peer", PeerLost("gone"))
    story.formed(StateTag(step=3, sound=False))
    assert story.all(m.KillWorker) == [m.KillWorker(worker=0), m.KillWorker(worker=1)]
    assert story.start().formed().calls("restore")[0].argument.source == "initial"


def test_steps_that_must_be_done_again_are_counted() -> None:
    story = Story().running(HEAD)
    story.tell(
        m.StepsCompleted(generation=story.state.epoch.generation, step=7), m.WorkerDied(worker=0, cause="signal 9")
    )
    story.raises(1, "run", "peer", PeerLost("gone")).start()
    story.formed(StateTag(step=None), StateTag(step=7, sound=False)).returns("restore", StateTag(step=4))
    assert story.emitted(events.Formed)[0].steps_lost == 3


def test_the_users_error_outranks_the_peers_that_told_first() -> None:
    error = UserCodeError("boom", detail="Traceback: boom")
    story = Story().running().raises(1, "run", "peer", PeerLost("gone"))
    assert story.emitted(events.Failed) == []
    story.raises(0, "run", "user", error)
    assert story.emitted(events.Failed)[0].detail == "Traceback: boom"
    assert story.all(m.ReleaseLease)[0].outcome == "failed"
    assert story.tell(m.LeaseReleased()).all(m.FinishRun)[0].error is error


@pytest.mark.parametrize(("given", "told"), [
    ("", "correct the job; with resume=True it continues from step 4"), ("mend the labels", "mend the labels"),
])  # fmt: skip
def test_an_error_of_user_code_says_how_a_corrected_job_continues(given: str, told: str) -> None:
    story = Story().running(HEAD).raises(0, "run", "user", UserCodeError("boom", where="rank 0", remedy=given))
    assert story.emitted(events.RunEnded)[0].error == f"boom (rank 0)\n  -> {told}"
    assert story.tell(m.LeaseReleased()).all(m.FinishRun)[0].error.remedy == told  # type: ignore[union-attr]


def test_failures_in_a_row_end_the_run_with_the_last_one() -> None:
    story = Story(failures=1).running()
    story.tell(m.WorkerDied(worker=0, cause="out of memory")).raises(1, "run", "peer", PeerLost("gone"))
    assert story.state.phase is Phase.GATHERING
    story.tell(m.WorkerDied(worker=2, cause="out of memory"))
    error = story.tell(m.LeaseReleased()).all(m.FinishRun)[0].error
    assert isinstance(error, WorkerLost)
    assert "rank 0" in str(error) and "out of memory" in str(error) and "failure 2 in a row" in str(error)


def test_a_new_step_clears_the_failures_but_one_done_again_does_not() -> None:
    story = Story(failures=1).running()
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=3), m.WorkerDied(worker=0, cause="x"))
    story.raises(1, "run", "peer", PeerLost("gone")).start()
    story.formed(StateTag(step=None), StateTag(step=3, sound=False)).returns("restore", StateTag(step=0))
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=3))
    assert story.state.recovery.failures == 1
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=4))
    assert story.state.recovery.failures == 0


def test_ranks_that_do_not_move_are_interrupted_and_the_one_that_hangs_is_ended() -> None:
    story = Story(failures=1, workers=3).running().expires("hang")
    assert [call.worker for call in story.calls("interrupt")] == [0, 1, 2]
    assert "ranks 0, 1, 2 did not move for 300 s while running" in story.emitted(events.Failed)[0].cause
    for worker in (0, 2):
        story.raises(worker, "run", "peer", PeerLost("interrupted"))
    assert story.all(m.KillWorker) == []
    story.expires("leave")
    assert story.all(m.KillWorker) == [m.KillWorker(worker=1)]
    failed = story.emitted(events.Failed)[0]
    assert failed.rank == failed.worker == 1 and "rank 1 hung: no answer 3 s after being interrupted" in failed.cause
    story.start().formed(StateTag(step=3), StateTag(step=None), StateTag(step=3))
    assert story.state.epoch.restore_plan is not None and story.state.epoch.restore_plan.source == "replica"


def test_a_hang_that_is_one_failure_too_many_names_its_rank() -> None:
    story = Story(failures=0).running().expires("hang").raises(0, "run", "peer", PeerLost("x")).expires("leave")
    error = story.tell(m.LeaseReleased()).all(m.FinishRun)[0].error
    assert isinstance(error, HangError) and "rank 1 hung" in str(error) and "node n1" in str(error)


def test_a_hang_of_nobody_costs_no_process() -> None:
    story = Story(failures=0, workers=2).running().expires("hang")
    story.raises(0, "run", "peer", PeerLost("x")).raises(1, "run", "peer", PeerLost("x"))
    error = story.tell(m.LeaseReleased()).all(m.FinishRun)[0].error
    assert isinstance(error, HangError) and "ranks 0, 1 did not move" in str(error)


def test_busy_ranks_are_interrupted_when_another_fails() -> None:
    story = Story(workers=3).running().tell(m.WorkerDied(worker=0, cause="x"))
    assert [call.worker for call in story.calls("interrupt")] == [1, 2]


def test_silent_survivors_are_replaced_as_part_of_the_same_failure() -> None:
    story = Story(failures=1, workers=3).running().tell(m.WorkerDied(worker=0, cause="x"))
    story.raises(1, "run", "peer", PeerLost("gone")).expires("leave")
    assert (story.all(m.KillWorker), story.state.recovery.failures) == ([m.KillWorker(worker=2)], 1)


def test_survivors_in_a_long_step_have_time_while_none_has_let_go() -> None:
    story = Story(failures=1).running().tell(m.WorkerDied(worker=0, cause="x")).expires("leave")
    assert story.all(m.KillWorker) == [] and "leave" in story.state.timers
    story.now_s += story.state.settings.deadlines.call_deadline_s
    assert story.expires("leave").all(m.KillWorker) == [m.KillWorker(worker=1)]


def test_workers_that_never_start_end_the_run() -> None:
    story = (
        Story().tell(m.LeaseAcquired(token=3, head=None), m.WorkerStarted(worker=1, node="n", pid=1)).expires("place")
    )
    error = story.tell(m.LeaseReleased()).all(m.FinishRun)[0].error
    assert isinstance(error, ResourceError)
    assert "1 of 2 workers started within 300 s" in str(error) and "workers=1" in str(error)


def test_an_internal_error_replaces_the_worker_that_raised_it() -> None:
    story = Story().running().raises(1, "run", "internal", RuntimeError("bug"))
    assert story.all(m.KillWorker) == [m.KillWorker(worker=1)]
    assert story.all(m.StartWorker) == [m.StartWorker(worker=2, slot=1)]


def test_what_an_older_generation_says_is_dropped() -> None:
    story = Story().running()
    before = story.state
    late = m.StepsCompleted(generation=Generation(token=3, number=0), step=99)
    foreign = m.CallReturned(worker=0, generation=Generation(token=2, number=1), verb="run", value=None)
    assert (
        story.tell(late, foreign, m.WorkerDied(worker=77, cause="x"), m.TimerExpired(name="call", number=1)).wanted
        == ()
    )
    assert story.state == before


def test_an_event_that_cannot_be_is_refused() -> None:
    with pytest.raises(AssertionError, match="CheckpointCommitted cannot come while acquiring"):
        Story().tell(m.CheckpointCommitted(checkpoint=HEAD))


# --- storage ----------------------------------------------------------------------------------------------


def test_a_failed_upload_skips_a_checkpoint_and_training_goes_on() -> None:
    story = Story().running().segment(4).snapshot(4).raises(0, "upload", "storage", StorageError("no space left"))
    assert story.emitted(events.CheckpointSkipped)[0].reason == "no space left"
    assert story.state.phase is Phase.RUNNING


def test_the_last_checkpoint_is_tried_again_a_few_times() -> None:
    story = Story(storage_attempts=2, retry_s=3.0).running(HEAD).segment(8).snapshot(8)
    story.raises(0, "upload", "storage", StorageError("no space left"))
    assert [(timer.name, timer.after_s) for timer in story.all(m.SetTimer)] == [("retry", 3.0)]
    story.expires("retry").snapshot(8)
    assert story.calls("upload")[0].argument == "checkpoints/00000008-3.1"
    story.raises(0, "upload", "storage", StorageError("no space left"))
    error = story.tell(m.LeaseReleased()).all(m.FinishRun)[0].error
    assert isinstance(error, StorageError) and "no space left" in str(error)


def test_a_store_that_is_down_is_waited_for_by_time_and_not_by_count() -> None:
    story = Story(storage_attempts=2, retry_s=30.0, outage_deadline_s=200.0).running(HEAD).segment(8).snapshot(8)
    pauses = []
    while not story.all(m.ReleaseLease):
        story.raises(0, "upload", "storage", StoreDown("the store cannot be reached"))
        pauses += [timer.after_s for timer in story.all(m.SetTimer) if timer.name == "retry"]
        if story.all(m.ReleaseLease):
            break
        story.now_s += pauses[-1]
        story.expires("retry").snapshot(8)
    assert pauses == [30.0, 60.0, 60.0, 60.0]
    error = story.tell(m.LeaseReleased()).all(m.FinishRun)[0].error
    assert isinstance(error, StorageError) and "in 5 attempts" in error.what


def test_an_upload_outlives_its_generation_but_not_its_uploader() -> None:
    story = Story().running().segment(4).snapshot(4).tell(m.WorkerDied(worker=1, cause="x"))
    uploading = story.state.checkpoints.upload
    assert uploading is not None and uploading.owing == {0}
    story.tell(m.WorkerDied(worker=0, cause="x"))
    assert story.state.checkpoints.upload is None
    assert story.emitted(events.CheckpointSkipped)[0].step == 4


def test_an_upload_that_hangs_at_the_end_costs_its_process() -> None:
    story = Story().running(HEAD).segment(8).snapshot(8).expires("upload")
    assert story.all(m.KillWorker) == [m.KillWorker(worker=0)]
    assert [call.worker for call in story.calls("leave")] == [1]
    story.returns("leave", None, workers=[1]).start().formed(StateTag(step=None), StateTag(step=8))
    assert story.returns("restore", StateTag(step=8)).calls("snapshot")[0].argument.step == 8


@pytest.mark.parametrize(("error", "killed"), [(FencedError("taken over"), []), (StorageError("full"), [0, 1])])
def test_a_driver_that_lost_the_log_writes_nothing_and_ends_the_workers_that_are_its_own(
    error: TrainwrightError, killed: list[int]
) -> None:
    story = Story().running().tell(m.LeaseLost(error=error))
    assert story.all(m.KillWorker) == [m.KillWorker(worker=worker) for worker in killed]
    assert (story.all(m.ReleaseLease), story.all(m.FinishRun)[0].error) == ([], error)


# --- stopping ---------------------------------------------------------------------------------------------


def test_a_wish_to_stop_ends_with_a_checkpoint_of_the_step_reached() -> None:
    story = Story().running().tell(m.StopRequested())
    assert [call.worker for call in story.calls("stop")] == [0]
    story.segment(2).snapshot(2).returns("upload", FILES, workers=[0]).committed(2)
    assert story.all(m.ReleaseLease) == [m.ReleaseLease(outcome="stopped", step=2)]


def test_a_wish_to_stop_before_any_step_ends_at_once() -> None:
    assert Story().tell(m.StopRequested(), m.LeaseAcquired(token=3, head=None)).all(m.StartWorker) == []
    assert Story().up().tell(m.StopRequested()).all(m.ReleaseLease) == [m.ReleaseLease(outcome="stopped", step=0)]


def test_a_wish_to_stop_during_recovery_saves_what_the_survivors_hold() -> None:
    story = Story().running()
    story.tell(
        m.StepsCompleted(generation=story.state.epoch.generation, step=2),
        m.WorkerDied(worker=0, cause="x"),
        m.StopRequested(),
    )
    story.raises(1, "run", "peer", PeerLost("gone")).start()
    story.formed(StateTag(step=None), StateTag(step=2)).returns("restore", StateTag(step=2))
    assert (len(story.calls("snapshot")), story.calls("run")) == (1, [])


def test_a_recovery_that_fails_again_after_the_wish_stops_with_what_is_committed() -> None:
    story = Story().running(HEAD)
    story.tell(
        m.StepsCompleted(generation=story.state.epoch.generation, step=6),
        m.WorkerDied(worker=0, cause="x"),
        m.StopRequested(),
    )
    story.tell(m.WorkerDied(worker=2, cause="x"))
    assert story.all(m.ReleaseLease) == [m.ReleaseLease(outcome="stopped", step=4)]


def test_stopping_now_waits_for_nothing() -> None:
    story = Story().running().tell(m.StopRequested(now=True))
    assert story.all(m.KillWorker) == [m.KillWorker(worker=0), m.KillWorker(worker=1)]
    assert story.all(m.ReleaseLease) == [m.ReleaseLease(outcome="stopped", step=0)]


def test_stopping_now_waits_for_a_log_entry_under_way() -> None:
    story = Story().running().segment(4).snapshot(4).returns("upload", FILES, workers=[0])
    assert story.tell(m.StopRequested(now=True)).all(m.ReleaseLease) == []
    assert story.committed(4).all(m.ReleaseLease) == [m.ReleaseLease(outcome="stopped", step=4)]


def test_a_wish_that_races_with_the_last_step_ends_as_done() -> None:
    story = Story().running(HEAD).tell(m.StopRequested()).segment(8).snapshot(8)
    story.returns("upload", FILES, workers=[0]).committed(8)
    assert story.all(m.ReleaseLease) == [m.ReleaseLease(outcome="done", step=8)]


def test_a_resumed_run_makes_the_evaluation_of_its_last_step() -> None:
    last = replace(HEAD, step=8)
    story = Story(total_steps=8, evaluate_steps=8).running(last)
    assert [call.argument.step for call in story.calls("evaluate")] == [8] * 2 and not story.calls("run")
    story.returns("evaluate", *[MetricSums(totals={"loss": (1.0, 1.0)})] * 2)
    assert story.all(m.ReleaseLease) == [m.ReleaseLease(outcome="done", step=8)]


def test_a_stopped_run_is_not_done_without_the_evaluation_of_its_last_step() -> None:
    story = Story(evaluate_steps=8).running(HEAD).tell(m.StopRequested()).segment(8).snapshot(8)
    story.tell(m.WorkerDied(worker=1, cause="x"), m.WorkerDied(worker=2, cause="x"))
    assert story.state.phase is Phase.CLOSING
    story.returns("upload", FILES, workers=[0]).committed(8)
    assert story.all(m.ReleaseLease) == [m.ReleaseLease(outcome="stopped", step=8)]


def test_ranks_are_laid_over_the_nodes_before_they_are_told_and_never_again() -> None:
    """Two replicas of two stages, whose processes come up on two nodes in turn."""
    story = Story(workers=4, mesh=Mesh(pipeline=2, data=2)).tell(m.LeaseAcquired(token=3, head=None))
    story.tell(*(m.WorkerStarted(worker=w, node="same", pid=w, home=f"node-{w % 2}") for w in range(4)))
    assert [member.worker for member in story.state.membership.members] == [0, 1, 2, 3], (
        "0 and 2 are a replica, 1 and 3 another"
    )
    story = Story(workers=4, mesh=Mesh(pipeline=2, data=2)).tell(m.LeaseAcquired(token=3, head=None))
    story.tell(*(m.WorkerStarted(worker=w, node=f"node-{w // 2}", pid=w) for w in range(4)))
    assert [member.worker for member in story.state.membership.members] == [0, 2, 1, 3]
    assert story.state.membership.rank_of == {0: 0, 2: 1, 1: 2, 3: 3} and story.calls("reserve")
    story.formed()
    assert [call.worker for call in story.calls("restore")] == [0, 2, 1, 3]
    story.returns("restore", StateTag(step=0))
    assert story.emitted(events.Formed)[0].nodes == {"node-0": "0, 2", "node-1": "1, 3"}
    story.tell(m.WorkerDied(worker=2, cause="killed"))
    story.returns("leave", None, workers=[0, 1, 3])
    story.tell(m.WorkerStarted(worker=4, node="node-0", pid=4))
    assert [member.worker for member in story.state.membership.members] == [0, 4, 1, 3], "the others hold their parts"
