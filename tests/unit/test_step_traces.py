"""Traces of chosen steps: what the driver asks for and reports, and what a rank records and stores."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.support.driver_harness import FILES, HEAD, Story
from tests.support.scripted_engine import ScriptedEngine, join, scripted_worker
from tests.support.work_orders import table_job
from trainwright.core.data import Feed, StepReport
from trainwright.core.errors import JobError, PeerLost, StorageError
from trainwright.core.events import Noted, RunStarted, TraceWritten
from trainwright.core.topology import StateTag
from trainwright.driver import messages as m
from trainwright.planning.job_description import describe, description_changes, state_relevant_fields
from trainwright.reporting.event_messages import EventFormatter
from trainwright.reporting.html.run_report import render_report
from trainwright.reporting.run_history import RunHistory
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_summary import RunSummary
from trainwright.strategies.torch.step_trace import TorchTraceRecorder, span
from trainwright.worker.step_profiler import StepProfiler


def stored(rank: int) -> m.StoredTrace:
    return m.StoredTrace(steps=range(2, 4), path=f"profile/steps-2-3/rank-{rank}.trace.json.gz", size_bytes=8)


def notes(story: Story) -> list[str]:
    return [note.text for note in story.emitted(Noted)]


# --- The job ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "steps"), [("20:25", range(20, 25)), ("20", range(20, 21)), (7, range(7, 8)), (range(2, 4), range(2, 4))]
)
def test_a_slice_names_the_steps(given: Any, steps: range) -> None:
    assert table_job(profile=given).training.profile == steps


@pytest.mark.parametrize("given", ["25:20", "5:5", "0:3", "x", 3.5, range(1, 9, 2), "1:500", ":5", "5:"])
def test_other_values_are_refused_with_the_field_and_the_remedy(given: Any) -> None:
    with pytest.raises(JobError, match=r"profile=.*(20:25|100 steps at most)"):
        table_job(profile=given)


def test_a_profiled_job_is_the_same_job() -> None:
    plain, profiled = (describe(table_job(**fields)) for fields in ({}, {"profile": "2:4"}))
    assert profiled["profile"] != plain["profile"]
    assert state_relevant_fields(plain) == state_relevant_fields(profiled)
    assert description_changes(plain, profiled) == []


# --- The driver -------------------------------------------------------------------------------------------------------


def test_a_segment_ends_with_the_last_chosen_step() -> None:
    story = Story(profile=range(2, 4)).running()
    assert [call.argument.steps for call in story.calls("run")] == [range(3)] * 2
    assert [call.argument.steps for call in story.segment(3).calls("run")] == [range(3, 4)] * 2


def test_each_rank_writes_its_trace_while_steps_go_on() -> None:
    story = Story(profile=range(2, 4)).running()
    story.returns("run", m.SegmentReport(step=3, traced=range(2, 4)))
    assert [(call.worker, call.argument) for call in story.calls("trace")] == [(0, 0), (1, 1)]
    assert story.calls("run"), "nothing waits for the traces"
    story.returns("trace", stored(1), workers=[1])
    (told,) = story.emitted(TraceWritten)
    assert (told.rank, told.node, told.first, told.last, told.path) == (1, "n1", 2, 3, stored(1).path)
    assert story.returns("trace", stored(1), workers=[1]).wanted == (), "each counts once"


def test_a_rank_may_owe_two_traces() -> None:
    """The first is still being written when a rank that was asked to pause among the steps has recorded the others."""
    story = Story(profile=range(2, 7)).running()
    for steps in (range(2, 4), range(4, 7)):
        story.returns("run", m.SegmentReport(step=steps[-1], traced=steps))
        assert [(call.worker, call.argument) for call in story.calls("trace")] == [(0, 0), (1, 1)]
    later = replace(stored(0), steps=range(4, 7))
    for trace in (stored(0), later):
        story.returns("trace", trace, workers=[0])
        assert [told.first for told in story.emitted(TraceWritten)][-1] == trace.steps[0]
    story.tell(m.WorkerDied(worker=1, cause="killed"))
    assert sum("the trace of rank 1 was dropped: its process" in text for text in notes(story)) == 2


def test_the_end_of_the_run_waits_for_traces_but_not_for_ever() -> None:
    for late in (False, True):
        story = Story(profile=range(7, 9), total_steps=8, steps_per_epoch=8, workers=1).running()
        story.returns("run", m.SegmentReport(step=6)).returns("run", m.SegmentReport(step=8, traced=range(7, 9)))
        story.snapshot(8).returns("upload", FILES).committed(8)
        assert not story.all(m.ReleaseLease)
        story = story.expires("trace") if late else story.returns("trace", stored(0))
        assert story.all(m.ReleaseLease)
        assert any("was dropped: it was not written within" in text for text in notes(story)) is late


def test_a_stop_at_once_waits_for_no_trace() -> None:
    story = Story(profile=range(2, 4)).running()
    story.returns("run", m.SegmentReport(step=3, traced=range(2, 4)))
    story.tell(m.StopRequested(now=True))
    assert "trace" not in story.state.timers and not story.state.traces.tracing
    assert [text for text in notes(story) if "the run ended at once" in text]


def test_a_lost_process_and_a_broken_store_cost_only_the_trace() -> None:
    story = Story(profile=range(2, 4)).running()
    story.returns("run", m.SegmentReport(step=3, traced=range(2, 4)))
    story.raises(0, "trace", "storage", StorageError("the disk is full"))
    assert notes(story) == ["the trace of rank 0 was dropped: the disk is full"]
    assert not story.all(m.KillWorker) and story.state.phase.value == "running"
    story.tell(m.WorkerDied(worker=1, cause="killed"))
    assert "the trace of rank 1 was dropped: its process ended before the trace was written" in notes(story)
    assert not story.state.traces.tracing


def test_a_rank_that_cannot_record_is_reported() -> None:
    story = Story(profile=range(2, 4)).running().returns("run", m.SegmentReport(step=3, untraced="no profiler"))
    assert notes(story) == [f"rank {rank} wrote no trace: no profiler" for rank in range(2)]
    assert not story.calls("trace")


def test_a_failure_among_the_steps_is_told_with_what_is_traced_instead() -> None:
    story = Story(profile=range(2, 5)).running()
    story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=2))
    story.tell(m.WorkerDied(worker=1, cause="killed")).raises(0, "run", "peer", PeerLost("gone"))
    story.tell(m.WorkerStarted(worker=2, node="n1", pid=2))
    if story.calls("leave"):
        story.returns("leave", None, workers=[0])
    story.formed(StateTag(step=2), StateTag(step=None)).returns("restore", StateTag(step=2))
    (told,) = [text for text in notes(story) if "traces" in text]
    assert told == (
        "the traces of steps 2 to 2 were dropped, because a failure cut them off; steps 3 to 4 are traced from here on"
    )


@pytest.mark.parametrize(
    ("steps", "head", "told"),
    [
        (range(9, 12), None, "profile=9:12: nothing is traced, because the run has 8 steps"),
        (range(2, 4), HEAD, "profile=2:4: nothing is traced, because the run is at step 4 already"),
        (range(7, 12), None, "profile=7:12: only steps 7 to 8 are traced"),
        (range(3, 7), HEAD, "profile=3:7: only steps 5 to 6 are traced"),
    ],
)
def test_steps_that_the_run_does_not_take_are_told(steps: range, head: Any, told: str) -> None:
    (text,) = notes(Story(profile=steps).running(head))
    assert text.startswith(told)


def test_nothing_is_told_or_asked_without_the_option() -> None:
    story = Story().running()
    assert notes(story) == []
    assert not story.segment(4).calls("trace")


# --- A rank -----------------------------------------------------------------------------------------------------------


class Recorder:
    """A recorder that notes what is asked of it."""

    suffix: ClassVar[str] = ".trace.json.gz"
    folder: ClassVar[str] = "profile"
    fails: ClassVar[str] = ""
    asked: ClassVar[list[str]] = []

    def _do(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails:
            raise RuntimeError("Can't start the profiler twice")

    def start(self) -> None:
        self._do("start")

    def step(self, number: int) -> AbstractContextManager[object]:
        self._do(f"step {number}")
        return nullcontext()

    def span(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    def stop(self) -> None:
        self._do("stop")

    def save(self, path: Path) -> None:
        path.write_bytes(b"trace")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(Recorder, "asked", [])
    return Recorder


def store() -> Store:
    return open_store("memory://step-traces")


def take(profiler: StepProfiler, steps: range, recorder: Any = Recorder) -> None:
    for number in steps:
        with profiler.step(number, recorder):
            pass


def test_exactly_the_chosen_steps_are_recorded(recorder: type[Recorder]) -> None:
    profiler = StepProfiler(store(), "run", range(2, 4))
    take(profiler, range(1, 6))
    assert recorder.asked == ["start", "step 2", "step 3", "stop"]
    assert profiler.report(5, over=False) == (range(2, 4), "")
    assert profiler.report(6, over=True) == (None, ""), "each is told once"
    trace = profiler.save(1)
    assert trace == m.StoredTrace(steps=range(2, 4), path="profile/steps-2-3/rank-1.trace.json.gz", size_bytes=5)
    assert store().get(f"run/{trace.path}") == b"trace"


def test_a_run_that_ends_among_the_steps_keeps_those_that_it_took(recorder: type[Recorder]) -> None:
    profiler = StepProfiler(store(), "run", range(2, 9))
    take(profiler, range(1, 4))
    assert profiler.report(3, over=False) == (None, "")
    assert profiler.report(3, over=True) == (range(2, 4), "")


def test_parts_of_steps_come_in_any_order(recorder: type[Recorder]) -> None:
    profiler = StepProfiler(store(), "run", range(2, 5))
    for number in (2, 4, 3, 4, 5, 4):
        take(profiler, range(number, number + 1))
    assert recorder.asked == ["start", "step 2", "step 4", "step 3", "step 4", "stop"], "one recording"
    assert profiler.report(4, over=False) == (range(2, 5), "")


def test_a_failed_step_drops_the_recording_and_later_steps_are_recorded(recorder: type[Recorder]) -> None:
    profiler = StepProfiler(store(), "run", range(2, 6))
    take(profiler, range(2, 4))
    with pytest.raises(PeerLost), profiler.step(4, recorder):
        raise PeerLost("gone")
    assert recorder.asked[-1] == "stop"
    assert profiler.report(3, over=False) == (None, "")
    take(profiler, range(4, 6))
    assert profiler.report(5, over=False) == (range(4, 6), "")


@pytest.mark.parametrize("fails", ["start", "stop"])
def test_a_profiler_that_fails_does_not_end_the_run(
    recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(recorder, "fails", fails)
    profiler = StepProfiler(store(), "run", range(2, 4))
    take(profiler, range(1, 6))
    assert recorder.asked.count("start") == 1
    assert profiler.report(5, over=False) == (None, "RuntimeError: Can't start the profiler twice")
    assert profiler.report(6, over=False) == (None, "")


def test_another_driver_chooses_anew_and_leaves_the_profiler_to_the_thread_of_steps(recorder: type[Recorder]) -> None:
    profiler = StepProfiler(store(), "run", range(2, 4))
    take(profiler, range(1, 3))
    profiler.choose(range(3, 5))
    assert "stop" not in recorder.asked, "it comes on another thread than the recording"
    profiler.drop()
    take(profiler, range(3, 6))
    assert profiler.report(5, over=False) == (range(3, 5), "")


def test_another_driver_hears_of_a_recording_that_is_finished_and_drops_one_of_other_steps(
    recorder: type[Recorder],
) -> None:
    for steps, told in ((range(2, 4), range(2, 4)), (range(5, 6), None)):
        profiler = StepProfiler(store(), "run", range(2, 4))
        take(profiler, range(1, 4))
        assert profiler.report(3, over=False) == (range(2, 4), "")
        profiler.choose(steps)
        profiler.drop()
        assert profiler.report(4, over=False) == (told, "")
    take(profiler, range(4, 7))
    assert profiler.report(6, over=False) == (range(5, 6), "")


def test_the_start_of_the_profiler_is_no_time_that_a_step_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, which would be taken for slow data."""
    clock = [0.0]

    @contextmanager
    def slow_start(self: StepProfiler, number: int, tracer: object) -> Iterator[None]:
        clock[0] += 5.0
        yield

    def train_step(engine: object, feed: Feed) -> StepReport:
        clock[0] += 1.0
        return StepReport(step=feed.step + 1, loss=1.0, weight=1.0, learning_rate=0.1)

    monkeypatch.setattr(StepProfiler, "step", slow_start)
    monkeypatch.setattr(ScriptedEngine, "train_step", train_step, raising=False)
    worker = scripted_worker(monkeypatch, table_job())
    join(worker)
    worker.restore(m.RestorePlan(step=0, source="initial"))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    worker.run(m.RunRequest(steps=range(2)))
    steps = worker.watch(0, 0.0)
    assert (steps.step_s, steps.wait_s) == ([1.0] * 2, [0.0] * 2)


def test_an_engine_without_a_profiler_says_so() -> None:
    profiler = StepProfiler(store(), "run", range(2, 4))
    take(profiler, range(1, 6), None)
    assert profiler.report(5, over=False) == (None, "the engine of this plan has no profiler")


def test_torch_writes_a_chrome_trace_with_the_names_of_steps_and_phases() -> None:
    profiler = StepProfiler(store(), "run", range(2, 4))
    for number in range(1, 5):
        with profiler.step(number, TorchTraceRecorder), span("forward"):
            torch.ones(3) + number
    profiler.report(4, over=False)
    trace = json.loads(gzip.decompress(store().get(f"run/{profiler.save(0).path}")))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert sorted(name for name in names if str(name).startswith("ProfilerStep#")) == [
        "ProfilerStep#2",
        "ProfilerStep#3",
    ]
    assert names.count("forward") == 2 and names.count("aten::add") == 2


# --- Reports ----------------------------------------------------------------------------------------------------------


def written(rank: int) -> TraceWritten:
    path = stored(rank).path
    return TraceWritten(rank=rank, node="n", first=2, last=3, path=path, size_bytes=3 << 19)


def test_progress_names_the_folder_once_and_says_how_to_open_a_trace() -> None:
    formatter = EventFormatter()
    formatter.tell(RunStarted(run="r", job={"storage": "s3://b/p"}))
    (line,) = formatter.tell(written(0))
    assert line.text == (
        "traces of steps 2 to 3 are in s3://b/p/r/profile/steps-2-3, a file for each rank; "
        "open one in https://ui.perfetto.dev, or in chrome://tracing"
    )
    assert formatter.tell(written(1)) == []
    (line,) = EventFormatter(verbose=True).tell(written(1))
    assert line.text.startswith("trace of rank 1 (n): steps 2 to 3, profile/steps-2-3/rank-1.trace.json.gz (1.5 MiB)")


def test_the_report_links_the_traces_also_after_the_summary_was_stored() -> None:
    summary = RunSummary()
    for event in (RunStarted(run="r"), written(0), written(1), written(1)):
        summary.add(event)
    again = RunSummary.of(json.loads(json.dumps(summary.facts())))
    assert list(again.traces.values()) == [written(0), written(1)]
    page = render_report(RunHistory(summary=again))
    assert page.count('<a href="profile/steps-2-3/rank-') == 2
    assert "ui.perfetto.dev" in page
    assert "Traces of steps" not in render_report(RunHistory(summary=RunSummary()))
