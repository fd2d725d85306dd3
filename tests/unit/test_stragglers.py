"""Slow ranks are named once, after they were slow for long enough, and replaced on request."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.driver_harness import Story
from trainwright.core.data import StepReport
from trainwright.core.events import Leaving, Straggling
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.worker.worker import MEDIAN_STEPS, StepLog


def story(**changes: Any) -> Story:
    return Story(**{"workers": 3, "total_steps": 1000, "steps_per_epoch": 1000, **changes}).running()


def paused(story: Story, step: int, *own_s: float | None) -> Story:
    """All ranks stop after a step and say how long their own part took."""
    reports = [m.SegmentReport(step=step, own_s=seconds) for seconds in own_s]
    return story.returns("run", *reports)


def test_a_slow_rank_is_named_once_after_two_comparisons() -> None:
    told = story()
    assert not paused(told, 20, 0.1, 0.1, 0.25).emitted(Straggling)
    assert not paused(told, 30, 0.1, 0.1, 0.25).emitted(Straggling), "too soon to compare again"
    found = paused(told, 40, 0.1, 0.1, 0.25).emitted(Straggling)
    assert [(event.rank, event.node, event.ratio) for event in found] == [(2, "n2", pytest.approx(2.5))]
    assert not paused(told, 60, 0.1, 0.1, 0.25).emitted(Straggling)
    assert told.state.phase is Phase.RUNNING and not told.emitted(Leaving)


@pytest.mark.parametrize("own_s", [(0.1, 0.1, 0.14), (0.001, 0.001, 0.004), (0.1, None, 0.3), (0.3, 0.3, 0.3)], ids=str)
def test_others_are_not_named(own_s: tuple[float | None, ...]) -> None:
    """A little slower; by what nobody notices; not known of all; all alike."""
    told = story()
    assert not [event for step in (20, 40, 60) for event in paused(told, step, *own_s).emitted(Straggling)]


def test_a_rank_that_was_slow_once_is_not_named() -> None:
    told = story()
    for step, slow_s in ((20, 0.3), (40, 0.1), (60, 0.3)):
        assert not paused(told, step, 0.1, 0.1, slow_s).emitted(Straggling)


def test_of_two_ranks_the_slower_one_is_named() -> None:
    told = story(workers=2)
    paused(told, 20, 0.1, 0.2)
    assert [event.rank for event in paused(told, 40, 0.1, 0.2).emitted(Straggling)] == [1]


def test_a_slow_worker_is_replaced_on_request_once_an_hour_and_node() -> None:
    told = story(replace_stragglers=2.0)
    paused(told, 20, 0.1, 0.1, 0.25)
    paused(told, 40, 0.1, 0.1, 0.25)
    assert [event.rank for event in told.emitted(Leaving)] == [2]
    assert [kill.worker for kill in told.all(m.KillWorker)] == [2] and not told.calls("snapshot"), (
        "others hold the state"
    )
    told.returns("leave", None, workers=[0, 1])
    told.tell(m.WorkerStarted(worker=3, node="n2", pid=3)).formed(
        StateTag(step=40), StateTag(step=40), StateTag(step=None)
    )
    told.returns("restore", StateTag(step=40))
    assert told.state.position.step == 40 and told.state.recovery.failures == 0
    paused(told, 60, 0.1, 0.1, 0.25)
    assert paused(told, 80, 0.1, 0.1, 0.25).emitted(Straggling) and not told.all(m.KillWorker)
    told.now_s += 3600.0
    assert [kill.worker for kill in paused(told, 100, 0.1, 0.1, 0.25).all(m.KillWorker)] == [3]


def test_one_that_is_slow_but_not_that_slow_stays() -> None:
    told = story(replace_stragglers=3.0)
    paused(told, 20, 0.1, 0.1, 0.25)
    assert paused(told, 40, 0.1, 0.1, 0.25).emitted(Straggling) and not told.all(m.KillWorker)


def test_ranks_pause_once_a_minute_to_be_compared() -> None:
    told = story()
    waits = [timer.after_s for timer in told.all(m.SetTimer) if timer.name == "pause"]
    assert waits == [60.0]
    told.now_s += 60.0
    assert told.expires("pause").calls("stop")
    assert "pause" not in story(workers=1).state.timers


def test_the_median_of_a_rank_is_known_after_enough_steps_of_a_generation() -> None:
    records = StepLog()
    records.begin(1, 0)
    for step in range(1, MEDIAN_STEPS + 1):
        assert records.own_s is None
        report = StepReport(step=step, loss=0.0, weight=1.0, learning_rate=0.1, own_s=0.5)
        records.add(report, samples=1, step_s=2.0, wait_s=0.25 if step > 2 else 9.0)
    assert records.own_s == 0.75
    records.begin(2, MEDIAN_STEPS)
    assert records.own_s is None
