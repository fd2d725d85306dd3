"""Peak memory of devices: what ranks report, when it is told, and what stands beside it."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from tests.support.driver_harness import Story
from tests.support.run_views import printed, record, storage
from tests.support.sample_run import PLAN, started, whole_run
from trainwright.core.data import MetricSums, PeakMemory
from trainwright.core.events import Event, MemoryMeasured, Replanned
from trainwright.core.plan import Estimate, Mesh
from trainwright.driver import messages as m
from trainwright.reporting.device_memory import memory_text, rank_memory
from trainwright.reporting.event_messages import EventFormatter
from trainwright.reporting.html.run_report import render_report
from trainwright.reporting.run_history import RunHistory
from trainwright.reporting.run_views import run_view
from trainwright.storage.run_summary import RunSummary
from trainwright.strategies.torch.engines.base import TorchEngine

GIB = 2**30
STAGES = Estimate(step_s=1.0, low_s=1.0, high_s=1.0, terms={}, stage_memory_bytes=(8 * GIB, 4 * GIB))
PIPELINE = replace(PLAN, strategy="pipeline", mesh=Mesh(pipeline=2), estimate=STAGES)
MEASURED = MemoryMeasured(
    step=4, ranks=[0, 1], allocated_bytes=[6 * GIB, 5 * GIB], reserved_bytes=[7 * GIB, 0]
)  # fmt: skip


# --- A rank -----------------------------------------------------------------------------------------------------------


def test_torch_tells_of_a_gpu_and_not_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine()
    assert engine.peak_memory() is None
    engine._device = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + device.index)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 200 + device.index)
    assert engine.peak_memory() == PeakMemory(allocated_bytes=101, reserved_bytes=201)


def test_tensorflow_tells_of_its_fullest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from trainwright.strategies.tensorflow.strategy_engines import Mirrored

    assert Mirrored().peak_memory() is None
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a", "b"])
    peaks = {"GPU:0": 3, "GPU:1": 5}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: {"current": 1, "peak": peaks[name]})
    assert Mirrored().peak_memory() == PeakMemory(allocated_bytes=5)


# --- The driver -------------------------------------------------------------------------------------------------------


def ended(story: Story, step: int, *peaks: int | None) -> list[MemoryMeasured]:
    memory = [None if peak is None else PeakMemory(allocated_bytes=peak, reserved_bytes=peak + 1) for peak in peaks]
    story.returns("run", *(m.SegmentReport(step=step, memory=each) for each in memory))
    return story.emitted(MemoryMeasured)


def test_peaks_are_told_at_first_and_when_one_has_grown() -> None:
    story = Story(checkpoint_steps=100, evaluate_steps=1).running()
    (told,) = ended(story, 1, 1000, 2000)
    assert told == MemoryMeasured(step=1, ranks=[0, 1], allocated_bytes=[1000, 2000], reserved_bytes=[1001, 2001])
    assert not ended(evaluated(story), 2, 1005, 2000)
    (told,) = ended(evaluated(story), 3, 1020, 2000)
    assert told.allocated_bytes == [1020, 2000]


def evaluated(story: Story) -> Story:
    return story.returns("evaluate", MetricSums())


def test_cpus_tell_nothing() -> None:
    assert not ended(Story().running(), 4, None, None)


# --- What users see ---------------------------------------------------------------------------------------------------


def test_each_rank_stands_beside_the_prediction_for_its_stage() -> None:
    found = [(each.rank, each.predicted_bytes, each.used_bytes) for each in rank_memory(PIPELINE, MEASURED)]
    assert found == [(0, 8 * GIB, 6 * GIB), (1, 4 * GIB, 5 * GIB)]
    text = memory_text(PIPELINE, MEASURED)
    assert text == ("peak memory: predicted 8 GiB, used 6 GiB (7 GiB reserved) on rank 0, the most of 2 ranks")
    assert memory_text(None, MEASURED).startswith("peak memory: used 6 GiB")


def test_servers_have_no_prediction() -> None:
    served = replace(PLAN, topology="independent", servers=1, mesh=Mesh(data=1))
    assert [each.predicted_bytes for each in rank_memory(served, MEASURED)] == [0, 4096]


def run() -> list[Event]:
    begun, *rest = whole_run()
    assert begun == started()
    return [replace(started(), plan=asdict(PIPELINE)), *rest[:-1], replace(MEASURED, time_s=rest[-1].time_s), rest[-1]]


def test_progress_tells_it_once_for_each_plan() -> None:
    formatter = EventFormatter()
    lines = [line.text for event in [*run(), MEASURED] for line in formatter.tell(event)]
    assert lines.count(memory_text(PIPELINE, MEASURED)) == 1
    formatter.tell(Replanned(plan=asdict(PLAN)))
    (line,) = formatter.tell(MEASURED)
    assert line.text == memory_text(PLAN, MEASURED)


def test_show_and_report() -> None:
    uri = storage()
    record(uri, run())
    view = run_view(uri, "demo")
    assert view.data["memory"][0] == {
        "rank": 0, "predicted_bytes": 8 * GIB, "used_bytes": 6 * GIB, "reserved_bytes": 7 * GIB,
    }  # fmt: skip
    assert "predicted 4 GiB, used 5 GiB on rank 1" in printed(view)
    page = render_report(RunHistory.fold(run()))
    assert "Peak memory of devices" in page and "7 GiB" in page
    assert "Peak memory of devices" not in render_report(RunHistory.fold(whole_run()))


def test_a_stored_summary_has_the_peaks_of_its_plan_alone() -> None:
    summary = RunHistory.fold(run()).summary
    assert RunSummary.of(summary.facts()).memory == summary.memory is not None
    summary.add(Replanned(plan=asdict(PLAN)))
    assert summary.memory is None
