"""Hundreds of seeded failure schedules: no step lost or applied twice, one writer, an end, and the right outcome."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.plans import Plans, staged
from tests.simulation.scenario import KINDS, Fault, Scenario, draw
from tests.simulation.schedules import tally
from tests.simulation.world import simulate
from trainwright.core import events
from trainwright.core.topology import RestartMode
from trainwright.driver.run_policy import RunPolicy

SCHEDULES = 600  # a share of those of `make schedules`
# Of its others, those with pairs of phase and event that these lack.
RARE = (
    649, 723, 773, 860, 1038, 1556, 1836, 1987, 1989, 2006, 2018, 2090, 2152, 2171, 2307, 3437, 3633, 4537, 4954,
)  # fmt: skip


def untraced(seed: int, also: tuple[str, ...] = ()) -> Scenario:
    """The scenario of a seed, without traces: their segments end elsewhere, and a fault might no longer show itself."""
    scenario = draw(seed, also=also)
    return replace(scenario, settings=scenario.settings.with_fields(profile=range(0)))


def test_hundreds_of_schedules_hold_every_invariant() -> None:
    tally((*range(SCHEDULES), *RARE)).check()


def test_an_upload_given_up_at_the_end_of_a_notice_is_not_begun_again() -> None:
    assert simulate(untraced(1054955)).outcomes == ["done"]


def test_a_writer_that_hangs_before_a_handover_without_an_end_does_not_stop_the_run() -> None:
    assert simulate(untraced(20000646, also=("preempt", "upload hangs"))).outcomes == ["done"]


@pytest.mark.parametrize("seed", [20000170, 20000350])
def test_a_writer_that_hangs_until_the_deadline_of_a_handover_is_asked_for_no_second_upload(seed: int) -> None:
    """Whether it goes or stays."""
    assert simulate(untraced(seed, also=("preempt all", "upload hangs"))).outcomes == ["done"]


@pytest.mark.parametrize(("seed", "workers"), [(1, 100), (2, 200), (3, 300), (4, 500), (5, 1000), (6, 1000), (9, 1000)])
def test_large_worlds(seed: int, workers: int) -> None:
    outcome = simulate(draw(seed, workers))
    assert outcome.outcomes[-1] in ("done", "stopped", "failed")


@pytest.mark.parametrize("workers", [1, 2, 5, 1000])
def test_an_unbroken_run_does_each_thing_once(workers: int) -> None:
    settings = RunPolicy.of(workers=workers, total_steps=60, steps_per_epoch=20, evaluate_steps=30)
    emitted = simulate(Scenario(seed=3, settings=settings)).emitted
    kinds = Counter(event.kind for event in emitted)
    assert kinds == {
        "waiting": 1, "placed": workers, "formed": 1, "checkpointed": 3, "evaluated": 2, "run_ended": 1,
    }  # fmt: skip
    assert [event.step for event in emitted if isinstance(event, events.Checkpointed)] == [20, 40, 60]


def test_a_thousand_workers_recover_from_a_kill() -> None:
    settings = RunPolicy.of(workers=1000, total_steps=6, steps_per_epoch=3)
    fault = Fault(kind="kill", verb="run", nth=1500, target=0.5)
    outcome = simulate(Scenario(seed=7, settings=settings, faults=(fault,)))
    formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
    assert outcome.outcomes == ["done"]
    assert [event.survivors for event in formed] == [0, pytest.approx(999, abs=60)]
    assert formed[1].source == "replica"


@pytest.mark.parametrize("kind", ["preempt", "preempt all"])
@pytest.mark.parametrize(("workers", "reform"), [(1, "in_place"), (3, "in_place"), (3, "new_process")])
def test_preempted_workers_cost_no_step_and_are_no_failure(kind: str, workers: int, reform: RestartMode) -> None:
    settings = RunPolicy.of(
        workers=workers, total_steps=24, steps_per_epoch=12, evaluate_steps=6, failures=0, spares=1, reform=reform
    )
    moved = 0
    for tenth in range(100):
        fault = Fault(kind=kind, at_s=tenth / 10, target=0.3)
        outcome = simulate(Scenario(seed=tenth, settings=settings, faults=(fault,)))
        formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
        assert outcome.outcomes == ["done"]
        assert not any(isinstance(event, events.Failed) for event in outcome.emitted)
        assert not any(event.steps_lost for event in formed)
        moved += len(formed) > 1
    assert moved > 30


@pytest.mark.parametrize("keep_s", [None, 0.5])
def test_lost_room_changes_the_layout_and_room_that_returns_changes_it_back_at_no_cost(keep_s: float | None) -> None:
    plans = Plans(plans=(staged(2, 2),), others=frozenset({1}))
    steps = {"total_steps": 240, "steps_per_epoch": 240, "checkpoint_steps": 5}
    settings = RunPolicy.of(workers=2, min_workers=1, keep_s=keep_s, **steps)  # type: ignore[arg-type]
    settings = settings.with_fields(layouts=plans, shrink_s=3.0)
    for tenth in range(50):
        at_s = 3.0 + tenth / 10
        lost = (Fault(kind="slow start", at_s=at_s), Fault(kind="kill", at_s=at_s + 0.05, target=tenth / 50))
        outcome = simulate(Scenario(seed=tenth, settings=settings, layout="planned", faults=lost))
        assert outcome.outcomes == ["done"]
        changed = [event for event in outcome.emitted if isinstance(event, events.Replanned)]
        assert [(event.name, bool(event.why)) for event in changed] == [
            ("other", True), ("pipeline (pp=2,accumulation=1)", False),
        ]  # fmt: skip
        formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
        assert [event.workers for event in formed[-2:]] == [1, 2] and formed[-1].steps_lost == 0


def test_more_replicas_of_a_pipeline_leave_every_stage_where_it_is() -> None:
    settings = RunPolicy.of(workers=2, max_workers=6, total_steps=30, steps_per_epoch=30)
    settings = settings.with_fields(layouts=Plans(plans=(staged(2, 2),)))
    for seed in range(20):
        outcome = simulate(Scenario(seed=seed, settings=settings, layout="planned"))
        formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
        assert formed[-1].workers == 6 and outcome.outcomes == ["done"]
        assert {(event.source, event.steps_lost) for event in formed[1:]} == {("replica", 0)}


def test_plans_are_measured_once_and_leave_nothing_behind() -> None:
    plans = Plans(plans=(staged(1, 2, "first"), staged(2, 2, "second"), staged(1, 2, "third")))
    settings = RunPolicy.of(workers=2, total_steps=9, steps_per_epoch=3, layouts=plans)
    chosen = Counter[str]()
    for seed in range(40):
        outcome = simulate(Scenario(seed=seed, settings=settings, layout="planned"))
        (probed,) = [event for event in outcome.emitted if isinstance(event, events.Probed)]
        formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
        assert [(event.source, event.step, event.steps_lost) for event in formed] == [("initial", 0, 0)]
        assert outcome.outcomes == ["done"] and probed.seconds > 0
        chosen[probed.name] += 1
    assert len(chosen) == 3


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_fault_changes_something(kind: str) -> None:
    """A catalogue whose faults do nothing would prove nothing."""
    settings = RunPolicy.of(workers=2, total_steps=24, steps_per_epoch=12, evaluate_steps=6, keep_s=0.5)
    also = {"copies lost": (Fault(kind="kill all", at_s=7.0),)}.get(kind, ())
    plain = simulate(Scenario(seed=11, settings=settings, faults=also))
    struck = [
        simulate(Scenario(seed=11, settings=settings, faults=(Fault(kind=kind, at_s=at_s, amount=0.95), *also)))
        for at_s in (0.2, 3.0, 4.0, 5.0, 6.0)
    ]
    shape = (plain.outcomes, plain.events, plain.seconds)
    assert any((run.outcomes, run.events, run.seconds) != shape for run in struck)


SERVED: dict[str, Any] = {
    "topology": "independent", "tolerates": frozenset({"worker"}), "hang_deadline_s": 40.0, "failures": 3,
}  # fmt: skip
LED = {**SERVED, "topology": "coordinator", "reform": "new_process"}
CREWS = {"served": SERVED, "led": LED}


@pytest.mark.parametrize("layout", CREWS)
@pytest.mark.parametrize("kind", ["kill", "hang", "preempt", "internal", "storage", "cut"])
def test_workers_that_servers_do_without_come_and_go_and_stop_nobody(kind: str, layout: str) -> None:
    crew, chief = CREWS[layout], layout == "led"
    settings = RunPolicy.of(workers=5 + chief, servers=2, total_steps=24, steps_per_epoch=12, evaluate_steps=6, **crew)
    joined = 0
    for seed in range(40):
        faults = tuple(Fault(kind=kind, at_s=6.0 + seed / 16 + late, target=0.5 + late / 8) for late in (0.0, 3.5))
        outcome = simulate(Scenario(seed=seed, settings=settings, layout=layout, faults=faults))
        formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
        assert outcome.outcomes == ["done"] and [event.steps_lost for event in formed] == [0]
        joined += sum(isinstance(event, events.Joined) for event in outcome.emitted)
        evaluated = [event for event in outcome.emitted if isinstance(event, events.Evaluated)]
        assert [event.step for event in evaluated] == [6, 12, 18, 24]
    assert joined > 30


@pytest.mark.parametrize("layout", CREWS)
def test_the_loss_of_all_workers_at_once_is_waited_out_and_that_of_a_server_is_recovered_from(layout: str) -> None:
    """However late the next ones start: nobody hangs meanwhile. A chief is needed as its servers are."""
    others = 2 if layout == "led" else 1
    settings = RunPolicy.of(
        workers=3 + others, servers=1, total_steps=24, steps_per_epoch=6, evaluate_steps=6, **CREWS[layout]
    )
    for seed in range(40):
        at_s = 4.0 + seed / 8
        slow = (Fault(kind="slow start", at_s=at_s),) * 3
        workers = tuple(Fault(kind="kill", at_s=at_s, target=target) for target in (0.99, 0.99, 0.99))
        outcome = simulate(Scenario(seed=seed, settings=settings, layout=layout, faults=(*slow, *workers)))
        formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
        assert outcome.outcomes == ["done"] and len(formed) == 1
        needed = (Fault(kind="kill", at_s=at_s, target=(seed % others) / settings.world.workers),)
        outcome = simulate(Scenario(seed=seed, settings=settings, layout=layout, faults=needed))
        formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
        assert outcome.outcomes == ["done"] and [event.source for event in formed][1:] in (
            ["checkpoint"], ["initial"], ["replica"],
        )  # fmt: skip


def test_a_thousand_workers_lose_some_and_no_step() -> None:
    settings = RunPolicy.of(workers=1004, servers=4, total_steps=6, steps_per_epoch=3, evaluate_steps=3, **SERVED)
    faults = tuple(Fault(kind="kill", at_s=5.0 + each / 10, target=0.1 + each / 25) for each in range(20))
    outcome = simulate(Scenario(seed=7, settings=settings, layout="served", faults=faults))
    formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
    assert outcome.outcomes == ["done"] and [event.steps_lost for event in formed] == [0]
    assert sum(isinstance(event, events.Joined) for event in outcome.emitted) > 10


@pytest.mark.parametrize(
    ("seed", "also", "ended"),
    [(10005294, ("preempt", "upload hangs"), "failed"), (401291, (), "done"), (401293, (), "done")],
)
def test_those_who_stay_are_seated_for_the_plan_that_goes_on(seed: int, also: tuple[str, ...], ended: str) -> None:
    """The last plan on trial is set aside by a preemption, and the one that goes on is for fewer; then all is lost.

    Or a worker dies in the last one, and the plan that goes on needs as many as there were: its place is waited for.
    """
    assert simulate(untraced(seed, also=also)).outcomes == [ended]


def test_what_the_users_code_raises_after_a_checkpoint_ends_the_run_with_how_to_go_on() -> None:
    assert simulate(untraced(628)).outcomes == ["failed"]


@pytest.mark.parametrize("seed", [20000202, 20000217])
def test_callbacks_are_told_of_the_last_checkpoint(seed: int) -> None:
    """While a worker dies, which costs no step; or where the time of the run is over before an evaluation."""
    assert simulate(untraced(seed, also=("preempt all", "upload hangs"))).outcomes == ["done"]


def test_what_the_users_code_raises_once_a_plan_is_chosen_ends_the_run() -> None:
    """After it raised under a plan on trial, which was set aside for that."""
    assert simulate(untraced(500674)).outcomes == ["failed"]


@pytest.mark.parametrize("crew", ["in_place", "new_process", "served", "led"])
def test_a_spike_takes_all_back_to_before_it_and_is_no_failure(crew: str) -> None:
    """Whether processes can join again or not, and where some are still at their part of a step."""
    layout = crew if crew in CREWS else "replicated"
    given = {**CREWS.get(crew, {"reform": crew}), "failures": 0, "servers": 2 if crew in CREWS else 0}
    settings = RunPolicy.of(
        workers=5, total_steps=40, steps_per_epoch=10, evaluate_steps=3, max_loss_ratio=10.0, spike_limit=1, **given
    )
    for seed in range(10):
        outcome = simulate(Scenario(seed=seed, settings=settings, layout=layout, spikes=frozenset({23})))
        formed = [event for event in outcome.emitted if isinstance(event, events.Formed)]
        causes = [event.cause for event in outcome.emitted if isinstance(event, events.Failed)]
        assert outcome.outcomes == ["done"] and len(causes) == 1 and "loss of step 23" in causes[0]
        assert [event.source for event in formed][1:] in (["checkpoint"], ["initial"]) and formed[1].step < 23


@pytest.mark.parametrize(("seed", "also", "ended"), [
    (20000466, ("preempt", "outage"), "done"),  # at once, after the last step: callbacks hear of no more checkpoints
    (30000252, ("upload hangs", "crash"), "failed"),  # a dead server is ended before its death is told
    (40000173, ("copies lost", "preempt all"), "done"),  # a writer hangs before a handover, and the time is over
    (1055048, (), "stopped"),  # a recovery fails again after a wish to stop, before the last evaluation
    (30000351, ("upload hangs", "crash"), "done"),  # workers that another driver takes over wait for nobody any more
])  # fmt: skip
def test_a_run_ends_as_its_faults_want_it(seed: int, also: tuple[str, ...], ended: str) -> None:
    assert simulate(untraced(seed, also=also)).outcomes[-1] == ended


@pytest.mark.parametrize(("seed", "layout"), [(1023282, "replicated"), (1043003, "led")])
def test_who_has_died_while_the_log_was_given_back_is_not_ended_when_it_is_lost(seed: int, layout: str) -> None:
    assert (draw(seed).layout, simulate(untraced(seed)).outcomes[-1]) == (layout, "failed")


def test_an_evaluation_that_waits_for_a_worker_which_hangs_has_another_one() -> None:
    """All others do without it, and nobody else is there to judge."""
    assert simulate(untraced(1034506)).outcomes[-1] == "done"


def test_a_schedule_repeats() -> None:
    first, second = simulate(draw(5)), simulate(draw(5))
    assert (first.outcomes, first.events, first.seconds) == (second.outcomes, second.events, second.seconds)
    assert first.emitted == second.emitted


@pytest.mark.parametrize("tried", [False, True], ids=["", "plans are tried"])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("step", [1, 4, 7, 8])
def test_a_step_that_ends_its_worker_each_time_is_passed_by_or_ends_the_run(
    step: int, workers: int, tried: bool
) -> None:
    """Whether survivors know where they stand or all begin again from a checkpoint, the right step is found."""
    plans = Plans(plans=(staged(1, workers, "first"), staged(workers, workers, "second"))) if tried else None
    settings = RunPolicy.of(workers=workers, total_steps=8, steps_per_epoch=3, failures=5, layouts=plans)
    loop = Fault(kind="crash loop", amount=(step - 0.5) / settings.length.total_steps)
    layout = "planned" if tried else "replicated"
    ended = simulate(Scenario(seed=step, settings=settings, faults=(loop,), layout=layout))
    assert ended.outcomes == ["failed"]
    assert f"step {step} failed" in next(event.error for event in ended.emitted if isinstance(event, events.RunEnded))
    skips = simulate(Scenario(seed=step, settings=settings.with_fields(pass_limit=1), faults=(loop,), layout=layout))
    assert skips.outcomes == ["done"]
    notes = [event.text for event in skips.emitted if isinstance(event, events.Noted)]
    assert len(notes) == 1 and f"step {step} failed 3 times" in notes[0]
