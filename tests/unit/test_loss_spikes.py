"""Losses that rise far above those before: the run ends, or goes back and passes the batch by."""

from __future__ import annotations

import math

from tests.support.driver_harness import HEAD, Story
from trainwright.core import events
from trainwright.core.errors import LossSpike
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import MemoryCopy, Phase
from trainwright.driver.failure_policy import MIN_LOSSES, median_loss


def story(**settings: object) -> Story:
    """Two workers that go on from a checkpoint at step 4, with a limit of three times the usual loss."""
    given = {"total_steps": 100, "steps_per_epoch": 100, "max_loss_ratio": 3.0, "spike_limit": 5, **settings}
    return Story(**given).running(HEAD)


def news(told: Story, last: int, *losses: float) -> Story:
    return told.tell(m.StepsCompleted(generation=told.state.epoch.generation, step=last, losses=losses))


def spiked(**settings: object) -> Story:
    """Usual losses up to step 24, then a spike at step 25, and news of it together with step 26."""
    return news(news(story(**settings), 24, *[1.0] * MIN_LOSSES), 26, 3.5, 90.0)


def test_what_is_usual_is_the_median_of_enough_steps() -> None:
    told = news(story(), 22, *[1.0] * (MIN_LOSSES - 2), 99.0)
    assert median_loss(told.state) is None and not told.state.recovery.spiked
    assert median_loss(news(told, 24, 1.2, 0.9).state) == 1.0


def test_a_spike_takes_all_ranks_back_and_passes_its_batch_by() -> None:
    told = spiked()
    assert [call.verb for call in told.all(m.CallWorker)] == ["stop"] and told.state.recovery.spiked == 25
    assert "3.5 times the usual 1" in told.emitted(events.Failed)[0].cause
    told.segment(27)
    assert [call.verb for call in told.all(m.CallWorker)] == ["leave", "leave"]
    told.returns("leave", None).formed(StateTag(step=27))
    restore_plan = told.calls("restore")[0].argument
    assert (restore_plan.source, restore_plan.step, [passed.step for passed in restore_plan.passing]) == (
        "checkpoint",
        4,
        [25],
    )
    told.returns("restore", StateTag(step=4))
    assert told.emitted(events.Formed)[0].steps_lost == 23
    assert told.state.phase is Phase.RUNNING and not told.state.recovery.spiked and not told.state.recovery.losses


def test_losses_from_before_the_state_gone_back_to_still_count() -> None:
    told = spiked().segment(27).returns("leave", None).formed(StateTag(step=27))
    told.returns("restore", StateTag(step=4))
    assert median_loss(news(told, 24, *[1.0] * MIN_LOSSES).state) == 1.0
    assert not news(told, 25, math.nan).state.recovery.spiked, "the step that is passed by has no loss"


def test_a_copy_in_memory_from_before_the_spike_is_newer_than_the_checkpoint() -> None:
    kept = m.MemoryCheckpoint(version=9, step=20, files=())
    told = Story(total_steps=100, steps_per_epoch=100, max_loss_ratio=3.0, spike_limit=5)
    told.tell(m.LeaseAcquired(token=3, head=HEAD, kept=kept)).start().formed().returns("restore", StateTag(step=20))
    told = news(news(told, 40, *[1.0] * MIN_LOSSES), 41, 50.0).segment(42)
    told.returns("leave", None).formed(StateTag(step=42))
    assert told.calls("restore")[0].argument.source == "keeper"


def test_one_from_after_it_is_forgotten() -> None:
    told = news(story(), 24, *[1.0] * MIN_LOSSES)
    told.state = told.state.with_fields(kept=m.MemoryCheckpoint(version=9, step=25, files=()))
    assert news(told, 26, 50.0, 1.0).state.memory.kept is None
    assert told.all(m.MarkComplete)[-1].kept is None, "by a driver to come as well"


def test_one_from_after_it_that_is_on_its_way_will_not_count() -> None:
    told = news(story(), 24, *[1.0] * MIN_LOSSES)
    copying = MemoryCopy(version=9, step=25, owing=frozenset({0, 1}), blocked_s=0.1, started_s=told.now_s)
    told.state = told.state.with_fields(keeping=copying)
    news(told, 26, 50.0, 1.0).returns("keep", m.MemoryCopyTaken(files=()))
    assert told.state.memory.keeping is None and told.state.memory.kept is None and not told.all(m.MarkComplete)


def test_without_leave_to_go_back_the_run_ends_with_the_figures() -> None:
    told = spiked(spike_limit=0)
    assert [release.outcome for release in told.all(m.ReleaseLease)] == ["failed"]
    error = told.tell(m.LeaseReleased()).all(m.FinishRun)[0].error
    assert isinstance(error, LossSpike) and 'on_spike="rollback"' in error.remedy


def test_it_goes_back_only_so_often() -> None:
    told = spiked(spike_limit=1).segment(27).returns("leave", None)
    told.formed(StateTag(step=27)).returns("restore", StateTag(step=4))
    news(news(told, 24, *[1.0] * MIN_LOSSES), 30, 77.0)
    error = told.tell(m.LeaseReleased()).all(m.FinishRun)[0].error
    assert isinstance(error, LossSpike) and "1 batches were skipped before" in error.what


def test_a_failure_on_the_way_back_still_leads_there() -> None:
    told = spiked().tell(m.WorkerDied(worker=1, cause="killed"))
    told.returns("run", m.SegmentReport(step=27), workers=[0])
    told.returns("leave", None, workers=[0]).start().formed(StateTag(step=27), StateTag(step=None))
    restore_plan = told.calls("restore")[0].argument
    assert (restore_plan.source, restore_plan.step) == ("checkpoint", 4)


def test_nobody_looks_where_the_job_does_not_ask() -> None:
    told = news(story(max_loss_ratio=None), 30, *[1.0] * 25, 1e9)
    assert not told.all(m.CallWorker) and not told.state.recovery.losses


def test_losses_that_are_not_a_size_are_no_measure() -> None:
    told = news(story(), 30, *[-1.0] * 25, 5.0)
    assert not told.state.recovery.spiked
