"""What the report says: figures, tables and words, put into the template."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from trainwright.core.events import Event, Failed, RunStarted
from trainwright.core.plan import Plan
from trainwright.planning.code_fingerprint import for_people
from trainwright.reporting import formatting
from trainwright.reporting.event_messages import prefetch_text, recovery_text, source_text
from trainwright.reporting.history import History, read_history
from trainwright.reporting.history_records import staleness_of, staleness_text
from trainwright.reporting.html import figures
from trainwright.reporting.html.distillation_section import verdict_html
from trainwright.reporting.html.svg_sanitizer import drawing
from trainwright.reporting.html.templates import fill
from trainwright.reporting.mesh_view import SHOWN, mesh_table
from trainwright.reporting.plan_view import other_rows, plan_from, plan_line, plan_rows
from trainwright.reporting.predicted_vs_measured import noise_text, step_parts
from trainwright.storage.event_folding import epoch_of
from trainwright.storage.run_summary import read_folding
from trainwright.storage.store import Store

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a report says that events do not hold.

    Attributes:
        uri: of the run's folder.
        now_s: when the report is made, seconds since the epoch.
    """

    uri: str = ""
    now_s: float = 0.0


class Figure(NamedTuple):
    """A key figure: a name, a value and what stands small below it."""

    name: str
    value: str
    note: str = ""


class Part(NamedTuple):
    """A part of a stacked bar: a name, seconds, a share of the whole bar in per cent, a colour class."""

    name: str
    seconds: float
    percent: float
    colour: str


class Incident(NamedTuple):
    """One failure or recovery in the table."""

    time: str
    step: int
    kind: str
    text: str
    detail: str


def render(history: History, facts: Facts) -> str:
    """The whole report as HTML: styles and figures inline, no scripts, nothing fetched."""
    plan = plan_from(history.start.plan)
    return fill(
        "template.html.j2",
        title=history.start.run or "run",
        state=history.state,
        headline=_headline(history, plan),
        error=history.error if history.state == "failed" else "",
        key_figures=key_figures(history),
        loss=_markup(figures.loss_figure(history)),
        metrics=_markup(figures.metrics_figure(history)),
        small=[(title, _markup(svg)) for title, svg in figures.small_figures(history)],
        plan_line=plan_line(plan) if plan else "",
        plan_rows=plan_rows(plan) if plan else [],
        cluster=history.start.cluster,
        mesh=mesh_table(plan, history.nodes) if plan else None,
        shown=SHOWN,
        timeline=drawing(history.start.timeline),
        bars=step_bars(history, plan),
        comparison=[row.cells() for row in step_parts(history, plan)],
        timed=_timed(history),
        noise=noise_text(history, plan),
        staleness=staleness_text(staleness_of(history.stale)),
        others=other_rows(history.start.rejected),
        time_parts=time_parts(history),
        prefetch=prefetch_text(history.prefetch) if history.prefetch else "",
        incidents=incidents(history),
        notes=[note.text for note in history.notes],
        configuration=sorted((name, str(value)) for name, value in for_people(history.start.job).items()),
        versions=sorted(history.start.versions.items()),
        uri=facts.uri,
        made=_when(facts.now_s),
        duration=formatting.duration,
        verdict=verdict_html(history.judged.verdict) if history.judged else "",
    )


def summary_html(history: History) -> str:
    """Outcome, key figures and the curves, for a notebook; inherits its colours."""
    return fill(
        "summary.html.j2",
        title=history.start.run or "run",
        state=history.state,
        key_figures=key_figures(history),
        loss=_markup(figures.loss_figure(history)),
        metrics=_markup(figures.metrics_figure(history)),
    )


def write_report(
    store: Store, run: str, *, history: History | None = None, clock: Callable[[], float] = time.time
) -> str:
    """Write `<run>/report.html` from what storage says of the run, or from `history`, and return where it is.

    Raises StorageError.
    """
    path = f"{run}/report.html"
    facts = Facts(uri=store.uri_of(run), now_s=clock())
    store.put(path, render(history or read_history(store, run), facts).encode())
    return store.uri_of(path)


class ReportListener:
    """A listener of the journal that writes the report when the run has ended, earlier sessions included."""

    def __init__(self, store: Store, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._started = False

    def on(self, event: Event) -> None:
        """Notice that there is something to report."""
        self._started = self._started or isinstance(event, RunStarted)

    def close(self) -> None:
        """Write the report; the journal has written its events by now. Raises StorageError."""
        if self._started:
            # The driver ends here: where the events tell no outcome, nobody will add one.
            folding = read_folding(self._store, self._run)
            history = History.of(folding, folding.state(owner_alive=False))
            write_report(self._store, self._run, history=history, clock=self._clock)


def _markup(svg: str) -> Markup:
    from markupsafe import Markup

    return Markup(svg)  # our own drawing; texts in it were escaped by the one who drew it


def _headline(history: History, plan: Plan | None) -> str:
    start = history.start
    steps = f"step {history.step:,} of {start.total_steps:,}"
    epoch, last = epoch_of(history.step, start.steps_per_epoch), epoch_of(start.total_steps, start.steps_per_epoch)
    epochs = f"epoch {epoch} of {last}"
    how = f"{plan.strategy}, {formatting.count(plan.workers, 'worker')}" if plan else ""
    return " · ".join(part for part in (how, steps, epochs, _when(start.time_s)) if part)


def key_figures(history: History) -> list[Figure]:
    """Metrics, loss, throughput, duration, recoveries: what one looks for first."""
    found = [Figure(name, formatting.figure(value), "evaluation") for name, value in sorted(history.metrics.items())]
    found.sort(key=lambda item: item.name == "loss")
    waited = history.wait_share
    if history.records:
        found.append(Figure("training loss", formatting.figure(_recent_loss(history)), "last 50 steps"))
        found.append(
            Figure(
                name="samples/s",
                value=formatting.rate(history.samples_per_s).split()[0],
                note=f"{formatting.share(waited)} waiting for data" if math.isfinite(waited) else "",
            )
        )
    sessions = formatting.count(len(history.sessions), "session")
    found.append(Figure("duration", formatting.duration(history.totals.wall_s), sessions))
    found.append(Figure("goodput", formatting.share(history.totals.goodput), "of the time: steps that count"))
    lost = f"{formatting.count(history.steps_lost, 'step')} lost"
    found.append(Figure("recoveries", str(len(history.recoveries) + len(history.resumes)), lost))
    return found


def _recent_loss(history: History) -> float:
    last = [record.loss for record in history.records[-50:] if math.isfinite(record.loss)]
    return sum(last) / len(last) if last else math.nan


def time_parts(history: History) -> list[Part]:
    """Where the time of all sessions went, largest first; parts of no time are left out."""
    totals = history.totals
    parts = [
        ("computing steps", totals.computing_s, "series-1"),
        ("waiting for data", totals.data_s, "series-4"),
        ("start-up", totals.start_s, "series-5"),
        ("evaluation", totals.evaluation_s, "series-2"),
        ("checkpoints", totals.checkpoint_s, "series-3"),
        ("recovery and repeated steps", totals.recovery_s, "bad"),
        ("other", totals.other_s, "soft"),
    ]
    whole = sum(seconds for _, seconds, _ in parts)
    shown = [Part(name, seconds, 100 * seconds / whole, colour) for name, seconds, colour in parts if seconds > 0]
    return sorted(shown, key=lambda part: -part.seconds)


def step_bars(history: History, plan: Plan | None) -> list[tuple[str, float, list[Part]]]:
    """The predicted step by term above the measured one, on one scale; empty where one of them is missing."""
    if plan is None or plan.estimate is None or not history.records:
        return []
    colours = ("series-1", "series-3", "series-2", "series-5", "soft")
    terms = [(name.replace("_", " "), seconds) for name, seconds in plan.estimate.terms.items()]
    median_s, waited = history.median_step_s, history.wait_share
    data_s = median_s * waited if math.isfinite(waited) else 0.0
    longest = max(plan.estimate.step_s, median_s) or 1.0
    predicted = [
        Part(name, value, 100 * value / longest, colours[min(number, len(colours) - 1)])
        for number, (name, value) in enumerate(terms)
    ]
    measured = [
        Part("computing and communicating", median_s - data_s, 100 * (median_s - data_s) / longest, "series-1"),
        *([Part("waiting for data", data_s, 100 * data_s / longest, "series-4")] if math.isfinite(waited) else []),
    ]
    return [("predicted", plan.estimate.step_s, predicted), ("measured, median", median_s, measured)]


def _timed(history: History) -> str:
    """How many steps the medians of phases are over, and with how many workers."""
    steps = formatting.count(history.phases.steps if history.phases else 0, "timed step")
    return f"{steps} with {formatting.count(history.measured[-1].workers, 'worker')}" if history.measured else steps


def incidents(history: History) -> list[Incident]:
    """Failures, recoveries and resumes in order of time."""
    rows: list[tuple[float, Incident]] = [
        (failure.time_s, Incident(_when(failure.time_s), failure.step, "failure", _failure(failure), failure.detail))
        for failure in history.failures
    ]
    for formed in [recovery.formed for recovery in history.recoveries]:
        rows.append((formed.time_s, Incident(_when(formed.time_s), formed.step, "recovery", recovery_text(formed), "")))
    for formed in history.resumes:
        text = f"resumed from {source_text(formed)} after {formatting.duration(formed.seconds)}"
        rows.append((formed.time_s, Incident(_when(formed.time_s), formed.step, "resume", text, "")))
    rows += [
        (skip.time_s, Incident(_when(skip.time_s), skip.step, "no checkpoint", skip.reason, ""))
        for skip in history.skipped
    ]
    return [incident for _, incident in sorted(rows, key=lambda row: row[0])]


def _failure(failure: Failed) -> str:
    who = f"rank {failure.rank}" if failure.rank >= 0 else ""
    place = ", ".join(part for part in (who, failure.node) if part)
    return f"{place}: {failure.cause}" if place else failure.cause


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if time_s else ""
