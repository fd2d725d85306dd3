"""Workers that step alone, told event by event: lost, late and joining, while servers and the others go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.driver_harness import Story
from trainwright.core import events
from trainwright.core.data import MetricSums
from trainwright.core.errors import PeerLost, UserCodeError
from trainwright.core.topology import Address, StalenessCounts, StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.reporting.event_messages import event_line

SERVER = StateTag(step=None, layout="shards", pieces=frozenset({"shard-0"}))
WORKER = StateTag(step=None, layout="shards", pieces=frozenset())


def running(**changes: Any) -> Story:
    """A server (worker 0) and two workers, at the first steps of 8 in epochs of 4."""
    fields: dict[str, Any] = {"workers": 3, "servers": 1, "topology": "independent", **changes}
    story = Story(tolerates=frozenset({"worker"}), **fields).up().formed(SERVER, WORKER, WORKER)
    story.returns("restore", *(StateTag(step=0, pieces=tag.pieces) for tag in (SERVER, WORKER, WORKER)))
    assert [call.worker for call in story.calls("run")] == [0, 1, 2]
    return story


def ended(story: Story, step: int, *workers: int) -> Story:
    """Those have left the loop; the server knows the step."""
    for worker in workers:
        stale = StalenessCounts(counts={0: 3, 1: 1}, dropped=1) if worker == 0 else None
        report = m.SegmentReport(step=step if worker == 0 else 0, staleness=stale)
        story.returns("run", report, workers=[worker])
    return story


def joined(story: Story, worker: int) -> Story:
    """From its start to its first steps."""
    story.tell(m.WorkerStarted(worker=worker, node="n9", pid=9))
    story.returns("reserve", Address(host="h", port=9), workers=[worker])
    (form,) = story.calls("form")
    assert form.argument.peers[form.argument.rank].address.port == 9
    story.returns("form", WORKER, workers=[worker])
    (restore_plan,) = story.calls("restore")
    assert restore_plan.argument.source == "join"
    return story.returns("restore", StateTag(step=0), workers=[worker])


def test_a_lost_worker_is_replaced_by_one_that_joins_while_the_others_step() -> None:
    story = running().tell(m.WorkerDied(worker=1, cause="killed"))
    assert [place.slot for place in story.all(m.StartWorker)] == [1] and not story.all(m.CallWorker)
    assert story.state.phase is Phase.RUNNING and story.state.recovery.failures == 1
    joined(story, 3)
    (event,) = story.emitted(events.Joined)
    assert (event.rank, event.worker, event.former) == (1, 3, 1) and event.seconds > 0
    assert [(call.worker, call.argument) for call in story.calls("run")] == [(3, m.RunRequest(steps=range(4)))]
    assert story.state.epoch.generation.number == 1


def test_the_steps_are_over_when_the_server_says_so_and_the_late_one_comes_back() -> None:
    story = ended(running(), 4, 1, 0)
    (stale,) = story.emitted(events.Stale)
    assert (stale.step, stale.counts, stale.dropped) == (4, [[0, 3], [1, 1]], 1)
    assert [call.worker for call in story.calls("snapshot")] == [0]
    story.snapshot(4)
    assert [call.worker for call in story.calls("run")] == [0, 1]
    ended(story, 0, 2)
    assert [(call.worker, call.argument) for call in story.calls("run")] == [(2, m.RunRequest(steps=range(4, 8)))]


def test_one_that_does_not_come_back_is_frozen_and_replaced() -> None:
    story = ended(running(hang_deadline_s=30.0), 4, 1, 0).snapshot(4)
    story.now_s += 40.0
    story.expires("apart")
    assert [kill.worker for kill in story.all(m.KillWorker)] == [2] and len(story.all(m.StartWorker)) == 1
    (failed,) = story.emitted(events.Failed)
    assert failed.rank == 2 and "hung" in failed.cause and story.state.phase is Phase.RUNNING


def test_an_evaluation_is_dealt_between_the_workers_that_are_there_and_again_without_one_that_dies() -> None:
    story = ended(running(evaluate_steps=4, checkpoint_steps=8), 4, 2, 1, 0)
    dealt = {call.worker: call.argument.feeding for call in story.calls("evaluate")}
    assert {worker: (feeding.data_ranks, feeding.total) for worker, feeding in dealt.items()} == {
        1: (range(1), 2), 2: (range(1, 2), 2),
    }  # fmt: skip
    story.tell(m.WorkerDied(worker=2, cause="killed"))
    assert not story.calls("evaluate")
    story.returns("evaluate", MetricSums(), workers=[1])
    assert [(call.worker, call.argument.feeding.total) for call in story.calls("evaluate")] == [(1, 1)]
    story.returns("evaluate", MetricSums(), workers=[1])
    assert len(story.emitted(events.Evaluated)) == 1 and story.state.phase is Phase.RUNNING


def test_a_lost_server_ends_the_generation_with_whoever_is_joining() -> None:
    story = running().tell(m.WorkerDied(worker=1, cause="killed"), m.WorkerStarted(worker=3, node="n", pid=1))
    story.tell(m.WorkerDied(worker=0, cause="killed"))
    assert story.state.phase is Phase.GATHERING and not story.state.dynamic.apart
    assert [call.worker for call in story.calls("interrupt")] == [2, 3]
    assert [place.slot for place in story.all(m.StartWorker)] == [0]


def test_one_that_lost_the_servers_tries_again_and_a_user_error_ends_the_run() -> None:
    story = running().raises(1, "run", "peer", PeerLost("the connection broke"))
    assert not story.emitted(events.Failed) and story.state.phase is Phase.RUNNING
    story.now_s += 2.0
    story.expires("apart")
    assert [call.worker for call in story.calls("reserve")] == [1] and len(story.emitted(events.Failed)) == 1
    story.raises(2, "run", "user", UserCodeError("the model raised"))
    assert story.state.phase in (Phase.CLOSING, Phase.RELEASING)


@pytest.mark.parametrize(
    "stop", [m.StopRequested(), m.PreemptionNoticed(worker=0, left_s=25.0)], ids=["stop", "notice"]
)
def test_the_first_server_hears_a_wish_for_all(stop: m.DriverEvent) -> None:
    assert [call.worker for call in running().tell(stop).calls("stop")] == [0]


def test_a_worker_with_a_notice_goes_at_once() -> None:
    story = running().tell(m.PreemptionNoticed(worker=2, left_s=25.0))
    assert [kill.worker for kill in story.all(m.KillWorker)] == [2] and len(story.all(m.StartWorker)) == 1
    assert story.state.recovery.failures == 0 and not story.calls("stop")


def test_a_recruit_joins_without_a_pause() -> None:
    story = running(max_workers=4)
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=1))
    (place,) = story.all(m.StartWorker)
    assert place.slot == 3
    joined(story, place.worker)
    assert [call.worker for call in story.calls("run")] == [place.worker] and len(story.state.membership.members) == 4


def test_one_that_ends_each_time_while_it_starts_is_waited_for_longer_though_the_others_step() -> None:
    story, pauses = running(), []
    for worker in (1, 3, 4, 5, 6):
        story.tell(
            m.StepsCompleted(generation=story.state.epoch.generation, step=worker),
            m.WorkerDied(worker=worker, cause="killed"),
        )
        (place,) = story.all(m.StartWorker)
        pauses.append(place.after_s)
    assert pauses == [0.0, 0.0, 1.0, 2.0, 4.0] and story.state.phase is Phase.RUNNING


def test_servers_are_told_apart_from_workers() -> None:
    story = Story(workers=3, servers=1, topology="independent", tolerates=frozenset({"worker"}))
    story.tell(m.LeaseAcquired(token=1, head=None))
    assert [event.what for event in story.emitted(events.Waiting)] == ["2 workers and 1 server to start"]
    story.start().formed(SERVER, WORKER, WORKER)
    story.returns("restore", *(StateTag(step=0, pieces=tag.pieces) for tag in (SERVER, WORKER, WORKER)))
    (formed,) = story.emitted(events.Formed)
    assert (formed.workers, formed.servers) == (2, 1)
    assert event_line(formed).text.startswith("2 workers and 1 server ready after")
