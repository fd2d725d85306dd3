"""When which fault is due: drawn from a seed, and only where the run can get on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from trainwright.chaos_testing.fault_schedule import (
    CATALOGUE,
    FaultRequirements,
    FaultType,
    PreviousFault,
    ScheduledFault,
    is_due,
    next_fault,
    processes_of,
    random_schedule,
    remaining_faults,
    select_faults,
    spread_schedule,
)
from trainwright.core import events
from trainwright.core.errors import JobError
from trainwright.storage.run_summary import RunSummary

FAULTS = {fault.name: fault for fault in CATALOGUE}
KILL = FAULTS["kill"]
STAGE = FaultRequirements(workers=2, spares=1)


def summary_of(*told: events.Event) -> RunSummary:
    run = RunSummary()
    for event in told:
        run.add(event)
    return run


def running(step: int, committed: int, *more: events.Event) -> RunSummary:
    """Two workers and a spare, formed at step 0."""
    return summary_of(
        events.RunStarted(),
        *(events.Placed(worker=worker, node="n", pid=worker + 100) for worker in (0, 1)),
        events.Formed(step=0),
        events.Placed(worker=2, node="n", pid=102, spare=True),
        steps(1, step),
        events.Checkpointed(step=committed),
        *more,
    )


def steps(first: int, last: int) -> events.Steps:
    numbers = [*range(first, last + 1)]
    ones = [1.0] * len(numbers)
    return events.Steps(
        step=numbers, loss=ones, learning_rate=ones, gradient_norm=[*ones], samples=numbers, step_s=ones, wait_s=ones
    )


def names(strikes: tuple[ScheduledFault, ...]) -> list[str]:
    return [strike.fault.name for strike in strikes]


def test_the_same_seed_gives_the_same_schedule_and_another_gives_another() -> None:
    assert (
        spread_schedule(CATALOGUE, 7, 100) == spread_schedule(CATALOGUE, 7, 100) != spread_schedule(CATALOGUE, 8, 100)
    )
    assert (
        random_schedule(CATALOGUE, 7, 20, 50)
        == random_schedule(CATALOGUE, 7, 20, 50)
        != random_schedule(CATALOGUE, 8, 20, 50)
    )


@pytest.mark.parametrize("seed", range(20))
def test_each_fault_is_spread_once_over_the_run_in_growing_steps(seed: int) -> None:
    strikes = spread_schedule(CATALOGUE, seed, 1000)
    assert sorted(names(strikes)) == sorted(FAULTS)
    steps = [strike.step for strike in strikes]
    assert strikes[0].fault.at_start and steps[0] == 0
    assert names(strikes)[-1] == "storage", "what came behind would wait for its end"
    assert steps == sorted(steps) and steps[1] > 50 and steps[-1] < 950
    assert all(later - earlier >= 1000 / 10 * 0.4 for earlier, later in pairwise(steps[1:]))


@pytest.mark.parametrize("total", [1, 2, 5])
def test_a_run_of_few_steps_gets_no_fault_beyond_its_end(total: int) -> None:
    assert all(0 <= strike.step < total for strike in spread_schedule(CATALOGUE, 0, total))


def test_random_faults_go_on_and_a_start_is_struck_only_behind_a_driver() -> None:
    found = names(random_schedule(CATALOGUE, 1, 20, 400))
    assert len(found) >= 400 and set(found) == set(FAULTS) and found[0] == "start"
    behind = [found[place - 1] for place, name in enumerate(found) if name == "start" and place]
    assert set(behind) == {"driver", "stall"}


def test_a_fault_waits_until_the_run_has_settled() -> None:
    strike, first = ScheduledFault(fault=KILL, step=5, after_s=10), PreviousFault(at_s=100.0)
    assert is_due(strike, running(5, 0), first, 110.0)
    assert not is_due(strike, running(4, 0), first, 110.0), "before its step"
    assert not is_due(strike, running(5, 0), first, 109.0), "before its time"
    failed, formed = events.Failed(worker=1), events.Formed(step=5)
    assert not is_due(strike, running(5, 0, failed), first, 200.0), "nothing is formed"
    assert not is_due(strike, running(5, 0, failed, formed), first, 200.0), "no step since it was formed"
    assert is_due(strike, running(5, 0, failed, formed, steps(6, 8)), first, 200.0)
    assert not is_due(strike, running(5, 0, events.RunEnded(outcome="done", step=5)), first, 200.0)


def test_a_fault_waits_for_a_checkpoint_beyond_the_one_before() -> None:
    strike, past = ScheduledFault(fault=KILL), PreviousFault(at_s=0.0, step=20)
    assert not is_due(strike, running(30, 20), past, 1.0)
    assert is_due(strike, running(30, 21), past, 1.0)


def test_a_fault_of_the_start_strikes_before_anything_is_formed() -> None:
    strike, past = ScheduledFault(fault=FAULTS["start"]), PreviousFault(at_s=0.0)
    placed = summary_of(events.RunStarted(), events.Placed(worker=0, node="n", pid=1))
    assert not is_due(strike, RunSummary(), past, 0.0) and is_due(strike, placed, past, 0.0)
    assert not is_due(strike, running(5, 0), past, 0.0)


def test_one_without_a_target_lets_the_next_go_first_but_no_start_jumps_the_queue() -> None:
    spare, kill, start = (ScheduledFault(fault=FAULTS[name]) for name in ("spare", "kill", "start"))
    past, scene = PreviousFault(at_s=0.0), running(5, 0)
    assert next_fault((spare, kill), scene, past, 0.0, lambda _: True) is spare
    assert next_fault((spare, kill), scene, past, 0.0, lambda strike: strike is not spare) is kill
    placed = summary_of(events.RunStarted(), events.Placed(worker=0, node="n", pid=1))
    assert next_fault((start,), placed, past, 0.0, lambda _: True) is start
    assert next_fault((kill, start), placed, past, 0.0, lambda _: True) is None


def test_a_start_right_behind_a_driver_that_went_first_is_next_in_line() -> None:
    spare, driver, start, kill = (ScheduledFault(fault=FAULTS[name]) for name in ("spare", "driver", "start", "kill"))
    assert remaining_faults((spare, driver, start, kill), driver) == [start, spare, kill]
    assert remaining_faults((spare, driver, kill, start), driver) == [spare, kill, start]
    assert remaining_faults((spare, kill, kill), kill) == [spare, kill]


def test_targets_follow_promotion_loss_and_a_new_driver() -> None:
    run = running(5, 0)
    assert [process.pid for process in processes_of(run)] == [100, 101]
    assert [process.pid for process in processes_of(run, spares=True)] == [102]
    late = events.Promoted(worker=9, rank=0)  # a spare that is not up yet is placed as a worker later
    run = running(5, 0, events.Failed(worker=1), events.Promoted(worker=2, rank=1), late)
    assert [process.pid for process in processes_of(run)] == [100, 102] and not processes_of(run, spares=True)
    run.add(events.RunStarted())
    assert not run.processes


def test_faults_that_do_not_fit_are_refused_all_at_once_with_the_remedy() -> None:
    alone = FaultRequirements(workers=1, spares=0, storage="it is a cloud")
    assert set(FAULTS) == {fault.name for fault in select_faults((), STAGE)}
    fitting = {"start", "kill", "kill-all", "stop", "again", "driver", "stall"}
    assert {fault.name for fault in select_faults((), alone)} == fitting
    with pytest.raises(JobError) as caught:
        select_faults(("kil", "kill-two", "spare", "storage"), alone)
    text = str(caught.value)
    assert "4 problems" in text and "did you mean 'kill'?" in text
    assert "needs 2 workers" in text and "spares=1" in text and "it is a cloud" in text


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_a_small_delay_keeps_faults_from_keeping_time_with_the_news(fault: FaultType) -> None:
    delays = {replace(ScheduledFault(fault=fault), draw=number / 50).delay_s for number in range(50)}
    assert delays == {0.0} if fault.at_start else (min(delays) >= 0.0 and max(delays) < 0.5 and len(delays) > 25)
