"""What a running job measures of its steps, from the worker's meter to the report."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.driver_harness import Story
from tests.support.run_views import printed, record, storage
from tests.support.sample_run import PLAN, started, stepped
from trainwright.core import events
from trainwright.core.data import (
    COMPILED_PHASE,
    LEAST_NOISE_SAMPLES,
    STEP_PHASES,
    GradientScatter,
    NoiseScale,
    PhaseTimes,
    StepReport,
    merge_phase_times,
    slowest_phase_times,
)
from trainwright.core.plan import Estimate, Mesh
from trainwright.driver import messages as m
from trainwright.driver.driver_state import Phase
from trainwright.reporting import run_views as views
from trainwright.reporting.html.run_report import render_report
from trainwright.reporting.run_history import RunHistory, StepPart, compare_step, noise_text, step_parts
from trainwright.worker.worker import StepTimer

PHASES = {"forward": 0.003, "backward": 0.006, "wait": 0.001, "optimizer": 0.002, "other": 0.0005}
NOISE = NoiseScale(scale=310.0, low=250.0, high=400.0, batch=256.0, count=36)


def estimate(**terms: float) -> Estimate:
    step_s = sum(terms.values())
    return Estimate(step_s=step_s, low_s=step_s / 2, high_s=step_s * 2, terms=terms, stage_memory_bytes=())


def measured(step: int = 100, **changes: Any) -> events.Measured:
    fields: dict[str, Any] = {"steps": 80, "workers": 2, "phases": PHASES, "data_s": 0.0004, "sampled": 3}
    return events.Measured(step=step, time_s=106.0, **{**fields, **changes})


def ran(*told: events.Measured) -> list[events.Event]:
    return [started(), events.Formed(time_s=104, generation=1, workers=2), stepped(range(1, 11), time_s=105), *told]


# --- the worker's meter ----------------------------------------------------------------------------------------


def report(step: int, scatter: GradientScatter | None = None, **phases: float) -> StepReport:
    fields: dict[str, Any] = {"loss": 1.0, "weight": 1.0, "learning_rate": 0.1, "scatter": scatter}
    return StepReport(step=step, phases=phases or None, **fields)


def test_the_meter_tells_medians_and_what_is_left_of_a_step() -> None:
    meter = StepTimer()
    for step, forward in enumerate([0.001] * 15 + [0.002] * 16 + [5.0]):
        meter.add(report(step, forward=forward, optimizer=0.001), step_s=forward + 0.0045, wait_s=0.003)
        meter.add(report(step), step_s=9.0, wait_s=9.0)
    phases = meter.phases(last=False)
    assert phases is not None and phases.steps == 32 and phases.data_s == 0.003
    assert phases.medians == pytest.approx({"forward": 0.002, "optimizer": 0.001, "other": 0.0005})
    assert meter.phases(last=True) is None, "each step is told once"


def test_a_few_steps_are_told_at_the_end_alone_and_none_of_an_older_generation() -> None:
    meter = StepTimer()
    meter.add(report(1, forward=1.0), step_s=1.0, wait_s=0.0)
    meter.begin()
    assert meter.phases(last=True) is None
    meter.add(report(2, forward=2.0), step_s=2.5, wait_s=0.0)
    assert meter.phases(last=False) is None
    assert meter.phases(last=True) == PhaseTimes(steps=1, medians={"forward": 2.0, "other": 0.5})


def test_the_meter_counts_samples_of_the_noise() -> None:
    meter = StepTimer()
    for step in range(LEAST_NOISE_SAMPLES):
        jitter = 1 + 0.01 * (step % 5)
        meter.add(
            report(step, GradientScatter(samples=64, shares=2, parts=9.0 * jitter, whole=64 * 5.0)), step_s=1, wait_s=0
        )
    assert meter.sampled == LEAST_NOISE_SAMPLES and meter.noise is not None and meter.noise.batch == pytest.approx(64)


# --- phases of several ranks and segments ----------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 10.0)), min_size=1, max_size=8))
def test_the_merged_median_is_that_of_all_steps_told_one_by_one(told: list[tuple[int, float]]) -> None:
    both = merge_phase_times([PhaseTimes(steps=steps, medians={"forward": value}) for steps, value in told])
    one_by_one = sorted(value for steps, value in told for _ in range(steps))
    assert both is not None and both.steps == len(one_by_one)
    assert both.medians["forward"] == one_by_one[(len(one_by_one) - 1) // 2]


def test_phases_of_another_engine_are_not_mixed_in() -> None:
    found = merge_phase_times(
        [PhaseTimes(steps=9, medians={COMPILED_PHASE: 1.0}), PhaseTimes(steps=2, medians={"forward": 3.0})]
    )
    assert found == PhaseTimes(steps=2, medians={"forward": 3.0})
    assert merge_phase_times([]) is None


def test_the_slowest_rank_is_the_one_that_the_others_wait_for() -> None:
    quick = PhaseTimes(steps=9, medians={"forward": 0.1, "wait": 0.5}, data_s=0.0)
    slow = PhaseTimes(steps=9, medians={"forward": 0.3, "wait": 0.1}, data_s=0.2)
    assert slowest_phase_times([quick, slow]) is slow and slowest_phase_times([]) is None


# --- predicted beside measured ---------------------------------------------------------------------------------


def test_terms_meet_the_phases_that_they_take_place_in() -> None:
    given = estimate(compute=0.008, gradients=0.002, optimizer=0.001)
    rows = compare_step(given, PhaseTimes(steps=9, medians=PHASES, data_s=0.0004), 0.013)
    assert [(row.name, row.predicted_s, row.measured_s) for row in rows] == [
        ("compute", 0.008, pytest.approx(0.009)),
        ("gradients, exposed", 0.002, 0.001),
        ("optimizer", 0.001, 0.002),
        ("other", None, 0.0005),
        ("waiting for data", None, 0.0004),
        ("step", pytest.approx(0.011), 0.013),
    ]
    assert rows[0].note == "measured forward 3 ms, backward 6 ms"
    assert rows[0].ratio == pytest.approx(8 / 9) and rows[3].ratio is None
    assert "within the predicted interval, 5.5 ms to 22 ms" in rows[-1].note
    assert "outside" in compare_step(given, PhaseTimes(steps=9, medians=PHASES), 0.023)[-1].note


def test_what_cannot_be_told_apart_is_one_part_that_names_all_of_it() -> None:
    rows = compare_step(
        estimate(compute=0.008, gradients=0.002), PhaseTimes(steps=9, medians={COMPILED_PHASE: 0.02}), 0.02
    )
    assert (rows[0].name, rows[0].predicted_s, rows[0].measured_s) == ("compute + gradients", 0.01, 0.02)
    assert rows[0].note == (
        "predicted compute 8 ms, gradients 2 ms; measured forward + backward + wait + optimizer 20 ms"
    )


def test_what_was_not_measured_has_no_figure() -> None:
    rows = compare_step(
        estimate(compute=0.008, gradients=0.002), PhaseTimes(steps=9, medians={"forward": 1, "backward": 2}), 3
    )
    missing = rows[1]
    assert (missing.name, missing.measured_s, missing.ratio) == ("gradients", None, None)
    assert missing.cells() == ("gradients", "2 ms", "-", "-", "")
    bare = compare_step(None, PhaseTimes(steps=9, medians={"forward": 1.0}), 3.0)
    assert [(row.name, row.predicted_s) for row in bare] == [
        ("forward", None),
        ("waiting for data", None),
        ("step", None),
    ]


TERMS = st.sampled_from(["compute", "recompute", "bubble", "gradients", "optimizer", "other", "a_new_one"])


@st.composite
def timed(draw: st.DrawFn) -> dict[str, float]:
    """Phases that cover some places once, in any division."""
    places = draw(st.lists(st.sampled_from(STEP_PHASES), unique=True, min_size=1))
    groups = draw(st.lists(st.integers(0, 4), min_size=len(places), max_size=len(places)))
    joined = ["+".join(p for p, g in zip(places, groups, strict=True) if g == group) for group in sorted(set(groups))]
    return {phase: draw(st.floats(0.0, 1.0)) for phase in joined}


@given(terms=st.dictionaries(TERMS, st.floats(0.001, 1.0), min_size=1), medians=timed())
def test_every_term_and_every_phase_counts_once(terms: dict[str, float], medians: dict[str, float]) -> None:
    *parts, data, whole = compare_step(estimate(**terms), PhaseTimes(steps=1, medians=medians, data_s=0.5), 1.0)
    assert sum(row.predicted_s or 0.0 for row in parts) == pytest.approx(sum(terms.values()))
    assert sum(row.measured_s or 0.0 for row in parts) == pytest.approx(sum(medians.values()))
    assert (data.measured_s, data.predicted_s, whole.measured_s) == (0.5, None, 1.0)


# --- the driver ------------------------------------------------------------------------------------------------


def segment(step: int, *found: tuple[PhaseTimes | None, NoiseScale | None]) -> list[m.SegmentReport]:
    return [m.SegmentReport(step=step, phases=phases, sampled=5, noise=noise) for phases, noise in found]


def test_the_driver_tells_the_slowest_rank_and_warns_of_a_large_batch_once() -> None:
    slow, quick = (
        PhaseTimes(steps=9, medians={"forward": 2.0}),
        PhaseTimes(steps=9, medians={"forward": 1.0, "wait": 1.0}),
    )
    far = dataclasses.replace(NOISE, batch=2000.0)
    told = Story(total_steps=100, steps_per_epoch=10).running()
    told.returns("run", *segment(10, (quick, None), (slow, far)))
    (event,) = told.emitted(events.Measured)
    assert (event.step, event.phases, event.workers, event.noise["high"]) == (10, {"forward": 2.0}, 2, 400.0)
    assert [note.text for note in told.emitted(events.Noted)] == [far.advice]
    assert events.from_json(event.to_json()) == event
    assert told.state.segment.advised and told.state.phase is Phase.SNAPSHOTTING


def test_the_warning_comes_once_and_nothing_is_told_without_measurements() -> None:
    far = dataclasses.replace(NOISE, batch=2000.0)
    told = Story(total_steps=100, steps_per_epoch=100, checkpoint_steps=100).running()
    slow = PhaseTimes(steps=9, medians={"forward": 2.0})
    assert told.returns("run", *segment(10, (slow, far), (slow, far))).emitted(events.Noted)
    assert not told.returns("run", *segment(20, (slow, far), (slow, far))).emitted(events.Noted)
    assert not told.returns("run", *segment(30, (None, None), (None, None))).emitted(events.Measured)


# --- what the user sees ----------------------------------------------------------------------------------------


def test_history_keeps_what_belongs_to_the_newest_plan_and_world_size() -> None:
    told = ran(
        measured(phases={**PHASES, "forward": 0.5}), measured(workers=1, steps=10), measured(workers=1, steps=30)
    )
    found = RunHistory.fold(told).phases
    assert found is not None and found.steps == 40
    again = RunHistory.fold([*told, started(token=2)])
    assert len(again.summary.measured) == 3, "the same plan goes on"
    other = dataclasses.replace(started(token=2), plan={**started().plan, "accumulation": 2})
    assert not RunHistory.fold([*told, other]).summary.measured


def test_the_noise_scale_is_told_with_the_step_at_which_it_was_known() -> None:
    history = RunHistory.fold(ran(measured(noise=vars(NOISE))))
    assert history.noise == (100, NOISE)
    assert noise_text(history, PLAN).startswith("310 samples, 250 to 400 at step 100 (36 steps")
    later = RunHistory.fold(ran(measured(noise=vars(NOISE)), measured(step=300, sampled=50)))
    assert "at step 100; the estimates since then" in noise_text(later, PLAN)


def test_why_the_noise_scale_is_not_known() -> None:
    none, few, many = (RunHistory.fold(ran(measured(sampled=count))) for count in (0, 3, 300))
    assert noise_text(none, PLAN) == "not known: no step was sampled"
    assert "12 are needed" in noise_text(few, PLAN) and "vary too much" in noise_text(many, PLAN)
    assert "cannot be measured" in noise_text(many, dataclasses.replace(PLAN, mesh=Mesh()))
    assert noise_text(RunHistory.fold(ran()), PLAN) == ""


def test_report_and_show_have_the_parts_of_the_step() -> None:
    uri, told = storage(), ran(measured(noise=vars(NOISE)))
    record(uri, told, outcome="done")
    view = views.run_view(uri, "demo")
    assert [StepPart(**part) for part in view.data["step_parts"]] == step_parts(RunHistory.fold(told), PLAN)
    assert view.data["noise_scale"] == {"step": 100, **vars(NOISE)}
    text = " ".join(printed(view).split())
    assert "compute 12 ms 9 ms 1.33 measured forward 3 ms, backward 6 ms" in text and "310 samples" in text
    page = render_report(RunHistory.fold(told))
    assert (
        "gradients, exposed" in page
        and "Medians of 80 timed steps with 2 workers" in page
        and "310 samples, 250 to 400" in page
    )
    bare = render_report(RunHistory.fold(ran()))
    assert "predicted and measured" not in bare and "noise scale" not in bare
