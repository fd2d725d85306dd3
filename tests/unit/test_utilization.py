"""Model FLOPs utilization: the model's operations over the peak of a data sheet, wherever a rate is shown."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

import trainwright as tw
from tests.support.run_views import printed, record, storage
from tests.support.sample_run import PLAN, whole_run
from trainwright.core.cluster import ACCELERATORS
from trainwright.core.events import Event, Formed, Replanned, RunStarted
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.core.plan import Estimate, Plan
from trainwright.reporting.event_messages import EventFormatter
from trainwright.reporting.html.run_report import render_report
from trainwright.reporting.run_history import RunHistory
from trainwright.reporting.run_views import run_view
from trainwright.reporting.utilization import UtilizationMeter
from trainwright.storage.run_summary import RunSummary
from trainwright.tracking.listeners import _TrackerPosition

GPT = tw.transformer_profile(hidden=1024, layers=4, heads=16, sequence=512, vocabulary=10_000)
PEAK = 1e12


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An accelerator with a data sheet of round figures."""
    rates = {"bf16": PEAK, "fp32": PEAK / 4}
    sheet = replace(ACCELERATORS["H100-80GB"], name="FAKE-80GB", flops_per_s=rates, aliases=())
    monkeypatch.setitem(ACCELERATORS, sheet.name, sheet)
    yield


def estimated(cluster: str, profile: ModelProfile = GPT, precision: str = "bf16", plan: str = "dp=2") -> Estimate:
    return tw.estimate(profile, tw.Cluster.parse(cluster), Plan.parse(plan), batch_size=8, precision=precision)


def test_operations_are_those_of_forward_and_backward_without_recomputation(fake: None) -> None:
    plain, again = (estimated("2xFAKE-80GB", plan=f"dp=2,recompute={how}") for how in ("none", "full"))
    assert plain.sample_flops == again.sample_flops == 3 * GPT.flops > 0
    assert again.step_s > plain.step_s
    assert plain.sample_flops == pytest.approx(6 * GPT.parameters * 512, rel=0.3), "6 for each parameter and token"


def test_frozen_layers_need_less(fake: None) -> None:
    def layer(trained: bool) -> LayerCost:
        return LayerCost(name="", parameters=8, parameter_bytes=32, flops=1e3, trained=trained)

    profile = ModelProfile(framework="torch", layers=tuple(map(layer, (False, False, True, False))))
    assert profile.training_flops == 1e3 * (1 + 1 + 3 + 2)
    assert replace(profile, layers=(layer(True),)).training_flops == 3e3


def test_the_peak_is_that_of_a_data_sheet_in_the_precision_or_none(fake: None) -> None:
    assert estimated("2xFAKE-80GB").peak_flops_per_s == PEAK
    assert estimated("2xFAKE-80GB", precision="fp32").peak_flops_per_s == PEAK / 4
    assert estimated("1x8xCPU").peak_flops_per_s == 0
    assert estimated("1xFAKE-80GB + 1xA100-80GB").peak_flops_per_s == 0, "they have no common peak"
    measured = replace(ACCELERATORS["FAKE-80GB"], name="OWN-80GB", data_sheet=False)
    ACCELERATORS["OWN-80GB"] = measured
    try:
        assert estimated("2xOWN-80GB").peak_flops_per_s == 0
    finally:
        del ACCELERATORS["OWN-80GB"]
    assert estimated("2xFAKE-80GB", replace(GPT, untraced="it raised")).sample_flops == 0


# --- Where it is shown: two workers take 2,560 samples a second -------------------------------------------------------


def run(estimate: Estimate | None = None) -> list[Event]:
    """The made-up run, on accelerators that it uses to 40% with two workers."""
    known = estimate or replace(PLAN.estimate or estimated("1x8xCPU"), sample_flops=PEAK / 3200, peak_flops_per_s=PEAK)
    begun, *rest = whole_run()
    return [replace(begun, plan=asdict(replace(PLAN, estimate=known))), *rest]  # type: ignore[type-var]


def test_progress() -> None:
    formatter = EventFormatter()
    for event in run():
        formatter.tell(event)
    assert formatter.figures.mfu == pytest.approx(0.4)
    assert "MFU 40%" in formatter.figures.text()


def test_show_and_report() -> None:
    uri = storage()
    record(uri, run())
    view = run_view(uri, "demo")
    assert view.data["mfu"] == pytest.approx(0.4) and "MFU 40%" in printed(view)
    history = RunHistory.fold(run())
    assert history.mfu == pytest.approx(0.4)
    assert "MFU" in render_report(history) and "40%" in render_report(history)
    summary = RunSummary.of(history.summary.facts())
    assert RunHistory(summary=summary).mfu == pytest.approx(0.4), "the summary that compaction stores knows it too"


def test_trackers() -> None:
    position = _TrackerPosition()
    rows = [row for event in run() for row in position.rows(event) if "speed/samples_per_s" in row.values]
    assert rows and all(row.values["speed/mfu"] == pytest.approx(0.4) for row in rows)


def test_nothing_is_shown_without_a_data_sheet() -> None:
    formatter = EventFormatter()
    for event in whole_run():
        formatter.tell(event)
    assert math.isnan(formatter.figures.mfu) and "MFU" not in formatter.figures.text()
    history = RunHistory.fold(whole_run())
    assert math.isnan(history.mfu) and "MFU" not in render_report(history)
    position = _TrackerPosition()
    assert not [row for event in whole_run() for row in position.rows(event) if "speed/mfu" in row.values]


def test_another_plan_and_another_number_of_workers_count() -> None:
    meter = UtilizationMeter()
    meter.on(run()[0])
    assert math.isnan(meter.at(2560)), "no worker is there yet"
    meter.on(Formed(workers=4))
    assert meter.at(2560) == pytest.approx(0.2)
    other = {**asdict(PLAN), "estimate": {"sample_flops": 1.0, "peak_flops_per_s": 10.0}, "devices_per_worker": 8}
    meter.on(Replanned(plan=other, workers=1))
    meter.on(Formed(workers=1))
    assert meter.at(40.0) == pytest.approx(0.5)
    meter.on(RunStarted(plan={}))
    assert math.isnan(meter.at(40.0))
