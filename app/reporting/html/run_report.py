"""What the report says: figures, tables and words, put into the template."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from trainwright.core import formatting
from trainwright.core.events import Event, Failed, RunStarted
from trainwright.core.plan import Plan
from trainwright.reporting.event_messages import prefetch_text, recovery_text, source_text
from trainwright.reporting.html import run_charts
from trainwright.reporting.html.templates import render_template, sanitized_svg
from trainwright.reporting.plan_view import SHOWN_ROWS, mesh_table, other_rows, plan_from, plan_line, plan_rows
from trainwright.reporting.predicted_vs_measured import noise_text, step_parts
from trainwright.reporting.run_history import RunHistory, read_history
from trainwright.reporting.scorecard import ModelScore, Scorecard
from trainwright.storage.event_files import read_run_summary
from trainwright.storage.object_store import Store
from trainwright.storage.run_records import staleness_of, staleness_text
from trainwright.storage.run_summary import epoch_of

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """What a report says that events do not hold.

    Attributes:
        uri: of the run's folder.
        now_s: when the report is made, seconds since the epoch.
    """

    uri: str = ""
    now_s: float = 0.0


class _KeyFigure(NamedTuple):
    """A key figure: a name, a value and what stands small below it."""

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


def render_report(history: RunHistory, facts: ReportFacts) -> str:
    """The whole report as HTML: styles and figures inline, no scripts, nothing fetched."""
    plan = plan_from(history.start.plan)
    return render_template(
        "template.html.j2",
        title=history.start.run or "run",
        state=history.state,
        headline=_headline(history, plan),
        error=history.error if history.state == "failed" else "",
        key_figures=_key_figures(history),
        loss=_markup(run_charts.loss_chart(history)),
        metrics=_markup(run_charts.metrics_chart(history)),
        small=[(title, _markup(svg)) for title, svg in run_charts.small_charts(history)],
        plan_line=plan_line(plan) if plan else "",
        plan_rows=plan_rows(plan) if plan else [],
        cluster=history.start.cluster,
        mesh=mesh_table(plan, history.nodes) if plan else None,
        shown=SHOWN_ROWS,
        timeline=sanitized_svg(history.start.timeline),
        bars=step_bars(history, plan),
        comparison=[row.cells() for row in step_parts(history, plan)],
        timed=_timed_steps_text(history),
        noise=noise_text(history, plan),
        staleness=staleness_text(staleness_of(history.stale)),
        others=other_rows(history.start.rejected),
        time_parts=time_parts(history),
        prefetch=prefetch_text(history.prefetch) if history.prefetch else "",
        incidents=_incidents(history),
        notes=[note.text for note in history.notes],
        configuration=sorted((name, str(value)) for name, value in history.start.shown_job.items()),
        versions=sorted(history.start.versions.items()),
        uri=facts.uri,
        made=_when(facts.now_s),
        duration=formatting.duration,
        verdict=verdict_html(history.judged.verdict) if history.judged else "",
    )


def summary_html(history: RunHistory) -> str:
    """Outcome, key figures and the curves, for a notebook; inherits its colours."""
    return render_template(
        "summary.html.j2",
        title=history.start.run or "run",
        state=history.state,
        key_figures=_key_figures(history),
        loss=_markup(run_charts.loss_chart(history)),
        metrics=_markup(run_charts.metrics_chart(history)),
    )


def write_report(
    store: Store, run: str, *, history: RunHistory | None = None, clock: Callable[[], float] = time.time
) -> str:
    """Write `<run>/report.html` from what storage says of the run, or from `history`, and return where it is.

    Raises StorageError.
    """
    path = f"{run}/report.html"
    facts = ReportFacts(uri=store.uri_of(run), now_s=clock())
    store.put(path, render_report(history or read_history(store, run), facts).encode())
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
            folding = read_run_summary(self._store, self._run)
            history = RunHistory.of(folding, folding.state(owner_alive=False))
            write_report(self._store, self._run, history=history, clock=self._clock)


def _markup(svg: str) -> Markup:
    from markupsafe import Markup

    return Markup(svg)  # our own drawing; texts in it were escaped by the one who drew it


def _headline(history: RunHistory, plan: Plan | None) -> str:
    start = history.start
    steps = f"step {history.step:,} of {start.total_steps:,}"
    epoch, last = epoch_of(history.step, start.steps_per_epoch), epoch_of(start.total_steps, start.steps_per_epoch)
    epochs = f"epoch {epoch} of {last}"
    how = f"{plan.strategy}, {formatting.count(plan.workers, 'worker')}" if plan else ""
    return " · ".join(part for part in (how, steps, epochs, _when(start.time_s)) if part)


def _key_figures(history: RunHistory) -> list[_KeyFigure]:
    """Metrics, loss, throughput, duration, recoveries: what one looks for first."""
    found = [
        _KeyFigure(name, formatting.metric(value), "evaluation") for name, value in sorted(history.metrics.items())
    ]
    found.sort(key=lambda item: item.name == "loss")
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
    sessions = formatting.count(len(history.sessions), "session")
    found.append(_KeyFigure("duration", formatting.duration(history.totals.wall_s), sessions))
    found.append(_KeyFigure("goodput", formatting.percent(history.totals.goodput), "of the time: steps that count"))
    lost = f"{formatting.count(history.steps_lost, 'step')} lost"
    found.append(_KeyFigure("recoveries", str(len(history.recoveries) + len(history.resumes)), lost))
    return found


def _recent_loss(history: RunHistory) -> float:
    last = [record.loss for record in history.records[-50:] if math.isfinite(record.loss)]
    return sum(last) / len(last) if last else math.nan


def time_parts(history: RunHistory) -> list[_BarPart]:
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
    shown = [_BarPart(name, seconds, 100 * seconds / whole, colour) for name, seconds, colour in parts if seconds > 0]
    return sorted(shown, key=lambda part: -part.seconds)


def step_bars(history: RunHistory, plan: Plan | None) -> list[tuple[str, float, list[_BarPart]]]:
    """The predicted step by term above the measured one, on one scale; empty where one of them is missing."""
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
    """How many steps the medians of phases are over, and with how many workers."""
    steps = formatting.count(history.phases.steps if history.phases else 0, "timed step")
    return f"{steps} with {formatting.count(history.measured[-1].workers, 'worker')}" if history.measured else steps


def _incidents(history: RunHistory) -> list[_Incident]:
    """Failures, recoveries and resumes in order of time."""
    rows: list[tuple[float, _Incident]] = [
        (failure.time_s, _Incident(_when(failure.time_s), failure.step, "failure", _failure(failure), failure.detail))
        for failure in history.failures
    ]
    for formed in [recovery.formed for recovery in history.recoveries]:
        rows.append(
            (formed.time_s, _Incident(_when(formed.time_s), formed.step, "recovery", recovery_text(formed), ""))
        )
    for formed in history.resumes:
        text = f"resumed from {source_text(formed)} after {formatting.duration(formed.seconds)}"
        rows.append((formed.time_s, _Incident(_when(formed.time_s), formed.step, "resume", text, "")))
    rows += [
        (skip.time_s, _Incident(_when(skip.time_s), skip.step, "no checkpoint", skip.reason, ""))
        for skip in history.skipped
    ]
    return [incident for _, incident in sorted(rows, key=lambda row: row[0])]


def _failure(failure: Failed) -> str:
    who = f"rank {failure.rank}" if failure.rank >= 0 else ""
    place = ", ".join(part for part in (who, failure.node) if part)
    return f"{place}: {failure.cause}" if place else failure.cause


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if time_s else ""


# --- Students beside their teachers, as a part of the report ----------------------------------------------------------


_CELL, _MARGIN = 26, 30
_MOST_NUMBERED_CLASSES = 10  # classes of which each cell has room for its number
_PLOT = 220
_SHARE = 0.01  # of all units that a bin has at least
_COLOURS = tuple(f"var(--series-{number})" for number in range(1, 8))


def verdict_html(facts: Mapping[str, Any]) -> Markup:
    """The part of the report that a verdict makes, from what the event `Judged` holds."""
    from markupsafe import Markup

    verdict = Scorecard.read(facts)
    ordered = sorted(verdict.marks, key=lambda mark: mark.student)  # teachers first
    pictures = [(mark.name, Markup(_soft_targets_svg(mark, verdict.classes))) for mark in ordered if mark.soft]
    sure = [mark for mark in ordered if mark.reliability]
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
            reliability=Markup(_reliability_svg(sure)) if sure else "",
            names=[(mark.name, colour) for mark, colour in zip(sure, _COLOURS, strict=False)],
            seconds=formatting.duration(verdict.seconds),
        )
    )


def _soft_targets_svg(mark: ModelScore, classes: Sequence[int]) -> str:
    """What a model says on the mean of each class: a row for each true one, darker the more chance there is."""
    count = len(classes)
    side = count * _CELL
    parts = [_label(classes, along, number) for along in (True, False) for number in range(count)]
    for row, chances in enumerate(mark.soft):
        for column, chance in enumerate(chances):
            parts += _cell(row, column, chance, classes, numbered=count <= _MOST_NUMBERED_CLASSES)
    box = f"0 0 {side + _MARGIN + 2} {side + _MARGIN + 2}"
    name = escape(f"soft targets of {mark.name}")
    width = f"max-width:{side + _MARGIN + 2}px"
    return f'<svg class="figure" style="{width}" viewBox="{box}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def _reliability_svg(marks: Sequence[ModelScore]) -> str:
    """Accuracy by confidence, a line for each model; on the diagonal a model is right as often as it is sure."""
    box = f"-40 -10 {_PLOT + 60} {_PLOT + 50}"
    parts = list(_axes())
    for mark, colour in zip(marks, _COLOURS, strict=False):
        shown = [row for row in mark.reliability if row[2] >= _SHARE]
        line = " ".join(f"{sure * _PLOT:.1f},{(1 - right) * _PLOT:.1f}" for sure, right, _ in shown)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        for sure, right, share in shown:
            x, y = sure * _PLOT, (1 - right) * _PLOT
            told = escape(f"{mark.name}: {sure:.0%} sure, {right:.1%} right, {share:.1%} of all")
            radius = 1.5 + 6 * math.sqrt(share)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" fill-opacity=".75">'
                f"<title>{told}</title></circle>"
            )
    style = f"max-width:{2 * _PLOT}px"
    svg = f'<svg class="figure" style="{style}" viewBox="{box}" role="img" aria-label="reliability">'
    return f"{svg}{''.join(parts)}</svg>"


def _axes() -> Iterator[str]:
    for number in range(5):
        at, share = number * _PLOT / 4, number / 4
        yield f'<path d="M0 {_PLOT - at:g}H{_PLOT}" stroke="var(--grid)" stroke-width=".8"/>'
        yield _text(-8, _PLOT - at + 3.5, f"{share:.0%}", anchor="end")
        yield _text(at, _PLOT + 16, f"{share:.0%}")
    yield f'<path d="M0 {_PLOT}L{_PLOT} 0" stroke="var(--soft)" stroke-width="1" stroke-dasharray="4 3"/>'
    yield _text(_PLOT / 2, _PLOT + 32, "how sure it is")
    yield f'<g transform="translate(-34 {_PLOT / 2}) rotate(-90)">{_text(0, 0, "how often it is right")}</g>'


def _cell(row: int, column: int, chance: float, classes: Sequence[int], *, numbered: bool) -> Iterator[str]:
    shade = math.sqrt(max(chance, 0.0))  # so that what is unlikely is seen too
    x, y = _MARGIN + column * _CELL, _MARGIN + row * _CELL
    told = f"{classes[row]}: {chance:.2%} for {classes[column]}"
    yield f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" fill="var(--card)"/>'
    yield (
        f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" fill="var(--series-1)" '
        f'fill-opacity="{shade:.3f}"><title>{told}</title></rect>'
    )
    if numbered and chance >= 0.005:
        ink = "var(--paper)" if shade > 0.6 else "var(--ink)"
        yield _text(x + _CELL / 2 - 0.5, y + _CELL / 2 + 2.5, f"{100 * chance:.0f}", fill=ink)


def _label(classes: Sequence[int], along: bool, number: int) -> str:
    middle = _MARGIN + number * _CELL + _CELL / 2
    x, y = (middle, _MARGIN - 8) if along else (_MARGIN - 6, middle + 3)
    return _text(x, y, str(classes[number]), anchor="middle" if along else "end")


def _text(x: float, y: float, text: str, *, anchor: str = "middle", fill: str = "var(--soft)") -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="9.5"'
    return f'<text {at} fill="{fill}">{escape(text)}</text>'
