"""The report of a run: collects charts, tables and texts, fills the template, and writes it beside the checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainwright.core import formatting
from trainwright.core.events import Event, Failed, Placed, RunStarted
from trainwright.core.metric_goals import metric_name
from trainwright.core.plan import Plan
from trainwright.reporting.device_memory import RankMemory, rank_memory
from trainwright.reporting.event_messages import event_line, prefetch_text, recovery_text, source_text, waiting_text
from trainwright.reporting.html import run_charts
from trainwright.reporting.html.chart_data import chart_data, undrawn_text
from trainwright.reporting.html.recovery_timeline import recoveries, run_segments, wall_s
from trainwright.reporting.html.templates import render_report_page, render_template, sanitized_svg
from trainwright.reporting.plan_view import (
    SHOWN_ROWS,
    configuration,
    mesh_table,
    other_rows,
    plan_from,
    plan_line,
    plan_rows,
)
from trainwright.reporting.run_history import TIME_LABELS, RunHistory, noise_text, read_history, step_parts
from trainwright.reporting.scorecard import Scorecard
from trainwright.storage.event_files import read_run_summary
from trainwright.storage.run_summary import epoch_of, staleness_of, staleness_text

if TYPE_CHECKING:
    from markupsafe import Markup

    from trainwright.storage.object_store import Store

_TIME_COLOURS = {
    "computing": "series-1", "data": "series-4", "start": "series-5", "evaluation": "series-2",
    "checkpoint": "series-3", "recovery": "bad", "other": "soft",
}  # fmt: skip


class _KeyFigure(NamedTuple):
    """A key figure: a name, a value and a small note below it."""

    name: str
    value: str
    note: str = ""


class _BarPart(NamedTuple):
    """A part of a stacked bar: a name, seconds, a share of the whole bar in per cent, a colour class."""

    name: str
    seconds: float
    percent: float
    colour: str


class _Incident(NamedTuple):
    """One failure or recovery in the table."""

    time: str
    step: int
    kind: str
    text: str
    detail: str


def render_report(history: RunHistory, *, uri: str = "", now_s: float = 0.0, live: bool = False) -> str:
    """Return the whole report as HTML: styles, scripts and data inline, nothing fetched.

    Args:
        uri: of the run's folder.
        now_s: time of the report, in seconds since the epoch.
        live: the page asks its server for newer contents, `render_report_body`, until the run has ended.
    """
    title = f"{history.summary.start.run or 'run'}: {history.state}"
    return render_report_page(title, render_report_body(history, uri=uri, now_s=now_s), live=live)


def render_report_body(history: RunHistory, *, uri: str = "", now_s: float = 0.0) -> str:
    """Return the body of the report, with the values of its curves as JSON; see `render_report`."""
    summary, start = history.summary, history.summary.start
    plan, strip = plan_from(start.plan), run_segments(history, now_s)
    title = start.run or "run"
    return render_template(
        "report_body.html.j2",
        title=title,
        state=history.state,
        headline=_headline(history, plan),
        activity=_activity(history),
        error=history.error if history.state == "failed" else "",
        key_figures=_key_figures(history),
        data={"title": f"{title}: {history.state}", **chart_data(history)},
        undrawn=undrawn_text(history),
        run_segments=strip,
        recoveries=recoveries(history, now_s),
        began=_utc(summary.time.sessions[0].started_s) if strip else "",
        wall_s=wall_s(history, now_s),
        incidents=_incidents(history),
        notes=[note.text for note in summary.notes],
        verdict=verdict_html(summary.judged.verdict) if summary.judged else "",
        time_parts=time_parts(history),
        prefetch=prefetch_text(summary.prefetch) if summary.prefetch else "",
        **_plan_values(history, plan),
        lines=[_line(event, start.steps_per_epoch) for event in summary.newest],
        memory=[_memory_cells(each) for each in rank_memory(plan, summary.memory)],
        traces=[(trace.rank, trace.node, trace.steps, trace.path) for trace in summary.traces.values()],
        viewers=[*dict.fromkeys(trace.viewer for trace in summary.traces.values())],
        **configuration(start),
        versions=sorted(start.versions.items()),
        uri=uri,
        made=_utc(now_s) if history.state != "running" else "",
        shown=SHOWN_ROWS,
        duration=formatting.duration,
    )


def write_report(
    store: Store, run: str, *, history: RunHistory | None = None, clock: Callable[[], float] = time.time
) -> str:
    """Write `<run>/report.html` from storage, or from `history`, and return its URI. Raises StorageError."""
    path, history = f"{run}/report.html", history or read_history(store, run)
    store.put(path, render_report(history, uri=store.uri_of(run), now_s=clock()).encode())
    return store.uri_of(path)


class ReportListener:
    """An event listener that writes the report when the run has ended, with earlier sessions."""

    def __init__(self, store: Store, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._started = False

    def on(self, event: Event) -> None:
        """Remember that the run has started."""
        self._started = self._started or isinstance(event, RunStarted)

    def close(self) -> None:
        """Write the report; the events are in storage by now. Raises StorageError."""
        if self._started:
            # The driver ends here: no later event will report an outcome.
            summary = read_run_summary(self._store, self._run)
            history = RunHistory(summary=summary, state=summary.state(owner_alive=False))
            write_report(self._store, self._run, history=history, clock=self._clock)


def _plan_values(history: RunHistory, plan: Plan | None) -> dict[str, Any]:
    """Return what the page says of the plan, of its step, and of the ranks."""
    summary, start = history.summary, history.summary.start
    return {
        "plan_line": plan_line(plan) if plan else "",
        "plan_rows": plan_rows(plan) if plan else [],
        "cluster": start.cluster,
        "mesh": mesh_table(plan, summary.nodes) if plan else None,
        "processes": _processes(summary.processes.values()),
        "timeline": sanitized_svg(start.timeline),
        "bars": step_bars(history, plan),
        "comparison": [row.cells() for row in step_parts(history, plan)],
        "timed": _timed_steps_text(history),
        "noise": noise_text(history, plan),
        "staleness": staleness_text(staleness_of(summary.stale)),
        "others": other_rows(start.rejected),
    }


def _activity(history: RunHistory) -> str:
    """Return what a running run does; empty for others."""
    summary = history.summary
    if history.state != "running":
        return ""
    if summary.cause is not None:
        return f"recovering from the failure of {_failure(summary.cause)}"
    if summary.waiting is not None:
        return waiting_text(summary.waiting)
    return "training" if summary.formed else "starting"


def _processes(processes: Iterable[Placed]) -> list[tuple[str, str, str]]:
    """Return rows of running processes by node: workers, and standbys without a rank."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for each in sorted(processes, key=lambda process: process.worker):
        rows.setdefault(each.node, ([], []))[each.spare].append(f"worker {each.worker} (pid {each.pid})")
    return [(node, ", ".join(workers), ", ".join(spares)) for node, (workers, spares) in sorted(rows.items())]


def _line(event: Event, steps_per_epoch: int) -> tuple[str, str, str]:
    """Return time, tone and text of a line of the log."""
    line = event_line(event, steps_per_epoch)
    return _utc(event.time_s).removesuffix(" UTC"), line.tone, line.text


def summary_html(history: RunHistory) -> str:
    """Return outcome, key figures and charts as HTML for a notebook."""
    return render_template(
        "summary.html.j2",
        title=history.summary.start.run or "run",
        state=history.state,
        key_figures=_key_figures(history),
        loss=_markup(run_charts.loss_chart(history)),
        metrics=_markup(run_charts.metrics_chart(history)),
    )


def _markup(svg: str) -> Markup:
    from markupsafe import Markup

    return Markup(svg)  # drawn by `run_charts`, which escapes texts


def _headline(history: RunHistory, plan: Plan | None) -> str:
    summary, start = history.summary, history.summary.start
    steps = f"step {summary.step:,} of {start.total_steps:,}"
    epoch, last = (epoch_of(step, start.steps_per_epoch) for step in (summary.step, start.total_steps))
    epochs = f"epoch {epoch} of {last}"
    how = f"{plan.strategy}, {formatting.count(plan.workers, 'worker')}" if plan else ""
    return " · ".join(part for part in (how, steps, epochs, history.reason, _utc(start.time_s)) if part)


def _key_figures(history: RunHistory) -> list[_KeyFigure]:
    """Return the key figures: metrics, loss, throughput, duration, goodput, recoveries."""
    summary = history.summary
    found = [
        _KeyFigure(name, formatting.metric(value), "evaluation") for name, value in sorted(history.metrics.items())
    ]
    found.sort(key=lambda item: item.name == "loss")
    if history.best is not None:
        name, best = metric_name(history.best[0]), history.best[1]
        found.append(_KeyFigure(f"best {name}", formatting.metric(best.metrics[name]), f"step {best.step:,}"))
    waited = history.wait_share
    if history.records:
        found.append(_KeyFigure("training loss", formatting.metric(_recent_loss(history)), "last 50 steps"))
        found.append(
            _KeyFigure(
                name="samples/s",
                value=formatting.throughput(history.samples_per_s).split()[0],
                note=f"{formatting.percent(waited)} waiting for data" if math.isfinite(waited) else "",
            )
        )
    if math.isfinite(history.mfu):
        found.append(_KeyFigure("MFU", formatting.percent(history.mfu), "of the accelerators' peak by data sheet"))
    sessions = formatting.count(len(summary.time.sessions), "session")
    found.append(_KeyFigure("duration", formatting.duration(history.totals.wall_s), sessions))
    found.append(_KeyFigure("goodput", formatting.percent(history.totals.goodput), "of the time: steps that count"))
    lost = f"{formatting.count(summary.steps_lost, 'step')} lost"
    found.append(_KeyFigure("recoveries", str(len(summary.recoveries) + len(summary.resumes)), lost))
    return found


def _recent_loss(history: RunHistory) -> float:
    last = [record.loss for record in history.records[-50:] if math.isfinite(record.loss)]
    return sum(last) / len(last) if last else math.nan


def time_parts(history: RunHistory) -> list[_BarPart]:
    """Return where the time of all sessions went, largest part first, without empty parts."""
    totals = history.totals
    spent = {name: getattr(totals, f"{name}_s") for name in _TIME_COLOURS}
    whole = sum(spent.values())
    shown = [
        _BarPart(TIME_LABELS[name], seconds, 100 * seconds / whole, _TIME_COLOURS[name])
        for name, seconds in spent.items()
        if seconds > 0
    ]
    return sorted(shown, key=lambda part: -part.seconds)


def step_bars(history: RunHistory, plan: Plan | None) -> list[tuple[str, float, list[_BarPart]]]:
    """Return the predicted step by term and the measured one, on one scale; empty where one is missing."""
    if plan is None or plan.estimate is None or not history.records:
        return []
    colours = ("series-1", "series-3", "series-2", "series-5", "soft")
    terms = [(name.replace("_", " "), seconds) for name, seconds in plan.estimate.terms.items()]
    median_s, waited = history.median_step_s, history.wait_share
    data_s = median_s * waited if math.isfinite(waited) else 0.0
    longest = max(plan.estimate.step_s, median_s) or 1.0
    predicted = [
        _BarPart(name, value, 100 * value / longest, colours[min(number, len(colours) - 1)])
        for number, (name, value) in enumerate(terms)
    ]
    measured = [
        _BarPart("computing and communicating", median_s - data_s, 100 * (median_s - data_s) / longest, "series-1"),
        *([_BarPart("waiting for data", data_s, 100 * data_s / longest, "series-4")] if math.isfinite(waited) else []),
    ]
    return [("predicted", plan.estimate.step_s, predicted), ("measured, median", median_s, measured)]


def _timed_steps_text(history: RunHistory) -> str:
    """Return the number of steps behind the medians of phases, and the number of workers."""
    summary = history.summary
    steps = formatting.count(history.phases.steps if history.phases else 0, "timed step")
    return f"{steps} with {formatting.count(summary.measured[-1].workers, 'worker')}" if summary.measured else steps


def _incidents(history: RunHistory) -> list[_Incident]:
    """Return failures, recoveries, resumes and skipped checkpoints in order of time."""
    summary = history.summary
    rows: list[tuple[float, _Incident]] = [
        (failure.time_s, _Incident(_utc(failure.time_s), failure.step, "failure", _failure(failure), failure.detail))
        for failure in summary.failures
    ]
    for formed in [recovery.formed for recovery in summary.recoveries]:
        rows.append((formed.time_s, _Incident(_utc(formed.time_s), formed.step, "recovery", recovery_text(formed), "")))
    for formed in summary.resumes:
        text = f"resumed from {source_text(formed)} after {formatting.duration(formed.seconds)}"
        rows.append((formed.time_s, _Incident(_utc(formed.time_s), formed.step, "resume", text, "")))
    rows += [
        (skip.time_s, _Incident(_utc(skip.time_s), skip.step, "no checkpoint", skip.reason, ""))
        for skip in summary.skipped
    ]
    return [incident for _, incident in sorted(rows, key=lambda row: row[0])]


def _memory_cells(memory: RankMemory) -> tuple[str, ...]:
    """Return rank, predicted, used and reserved memory as cells."""
    sizes = (memory.predicted_bytes, memory.used_bytes, memory.reserved_bytes)
    return str(memory.rank), *(formatting.size(size) if size else "" for size in sizes)


def _failure(failure: Failed) -> str:
    who = f"rank {failure.rank}" if failure.rank >= 0 else ""
    place = ", ".join(part for part in (who, failure.node) if part)
    return f"{place}: {failure.cause}" if place else failure.cause


def _utc(time_s: float) -> str:
    return formatting.timestamp(time_s, utc=True) if time_s else ""


# --- scorecard of distillation ----------------------------------------------------------------------------------------


def verdict_html(facts: Mapping[str, Any]) -> Markup:
    """Return the part of the report with a scorecard, from the facts of a `Judged` event."""
    from markupsafe import Markup

    verdict = Scorecard.read(facts)
    ordered = sorted(verdict.marks, key=lambda mark: mark.student)  # teachers first
    pictures = [
        (mark.name, _markup(run_charts.soft_targets_chart(mark.name, mark.soft, verdict.classes)))
        for mark in ordered
        if mark.soft
    ]
    reliability = {mark.name: mark.reliability for mark in ordered if mark.reliability}
    return Markup(
        render_template(
            "verdict.html.j2",
            sentences=verdict.sentences(),
            scope=verdict.scope,
            device=verdict.device,
            timed=any(mark.latency_s for mark in verdict.marks),
            tokens=verdict.kind == "language_model",
            header=verdict.header(),
            rows=verdict.table(),
            pair_header=verdict.pair_header(),
            pairs=verdict.pair_table(),
            pictures=pictures,
            labels=verdict.kind == "multi_label",
            reliability=_markup(run_charts.reliability_chart(reliability)) if reliability else "",
            seconds=formatting.duration(verdict.seconds),
        )
    )
