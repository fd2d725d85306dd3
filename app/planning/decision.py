"""The decision for a plan, and how it is shown: a table in the terminal, HTML with charts in a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.cluster import Cluster
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import InfeasiblePlan, Plan, RejectedPlan
from trainwright.reporting.html.templates import render_template
from trainwright.reporting.plan_view import (
    SHOWN_ROWS,
    estimate_table,
    factor_texts,
    facts_table,
    mesh_table,
    mesh_text,
    other_rows,
    plan_line,
    plan_name,
    plan_rows,
    planned_nodes,
    share_of_step,
)
from trainwright.strategies.cost_model.machine_model import DEFAULT, Calibration
from trainwright.strategies.cost_model.step_timeline import Span, SpanKind, Timeline, timeline
from trainwright.strategies.cost_model.step_work import planned_step_work
from trainwright.strategies.search.plan_ranking import estimate_of, is_asynchronous


@dataclass(frozen=True, kw_only=True, repr=False)
class Decision:
    """The chosen plan and the others, with reasons. Prints as a table, shows as HTML in a notebook."""

    chosen: Plan  # the plan
    rejected: tuple[RejectedPlan, ...]  # the best plan of each other strategy
    infeasible: tuple[InfeasiblePlan, ...]  # why the other strategies are impossible
    profile: ModelProfile  # of the model, divided by layers as the job says
    cluster: Cluster  # the whole cluster
    used: Cluster  # the part of it that the job may use
    # plans to measure before the first step, the chosen one first; empty where none are measured
    contenders: tuple[Plan, ...] = ()
    calibration: Calibration = DEFAULT  # that the chosen plan's estimate was made with
    delivery: str = "direct"  # how the training rows reach the workers, `direct` or `ray_data`

    @property
    def data_cpus(self) -> float:
        """CPUs for Ray Data: what the workers leave free on their nodes, and all of the other nodes."""
        return self.chosen.placement.data_cpus + max(0.0, self.cluster.cpus - self.used.cpus)

    @property
    def timeline(self) -> str:
        """SVG of the predicted step of the chosen plan; empty where workers step asynchronously."""
        return (
            "" if is_asynchronous(self.chosen) else timeline_svg(self.profile, self.used, self.chosen, self.calibration)
        )

    def __rich__(self) -> RenderableType:
        """Return the chosen plan with its estimate, then the others with reasons."""
        chosen, others = self.chosen, other_rows(other_plans(self))
        mesh = mesh_table(chosen, planned_nodes(chosen, self.used))
        parts: list[RenderableType] = [facts_table(_context(self) + plan_rows(chosen))]
        parts += [mesh_text(mesh)] if mesh is not None else []
        parts += [estimate_table(chosen.estimate)] if chosen.estimate is not None else []
        parts += [others_table(others)] if others else []
        head = Text.assemble(("Plan  ", "bold"), (plan_line(chosen), "bold green"))
        return Group(head, *(Padding(part, (1, 0, 0, 2)) for part in parts))

    def __repr__(self) -> str:
        return formatting.plain_text(self)

    def _repr_html_(self) -> str:
        """Return HTML that inherits the colours of the page around it (notebooks, light and dark)."""
        chosen = self.chosen
        return render_template(
            "plan.html.j2",
            headline=plan_line(chosen),
            facts=_context(self) + plan_rows(chosen),
            mesh=mesh_table(chosen, planned_nodes(chosen, self.used)),
            shown=SHOWN_ROWS,
            estimate=chosen.estimate,
            duration=formatting.duration,
            share=share_of_step,
            timeline=Markup(self.timeline) if chosen.estimate else "",
            others=other_rows(other_plans(self)),
        )


def other_plans(decision: Decision) -> list[dict[str, str]]:
    """Return rejected and infeasible plans as facts for `RunStarted.rejected`: strategy, plan, reason, hint."""
    rejected = [
        {"strategy": item.plan.strategy, "plan": f"{item.plan.strategy}: {plan_name(item.plan)}", "reason": item.reason}
        for item in decision.rejected
    ]
    return rejected + [
        {"strategy": item.strategy, "reason": item.reason, "hint": item.hint} for item in decision.infeasible
    ]


def compare_plans(plan: Plan, best: Plan) -> str:
    """Compare a plan with the best one: by step time, or by time to the same loss where these differ."""
    own, other = estimate_of(plan), estimate_of(best)
    if not own.factors and not other.factors:
        return f"predicted {own.step_s / other.step_s:.2f} times the step time of {best.strategy}"
    took = f"predicted {own.target_s / other.target_s:.2f} times the time of {best.strategy} to the same loss"
    steps = f"{own.step_s / other.step_s:.2f} times its step time"
    return f"{took} ({', '.join([steps, *factor_texts(own)])})"


def _context(decision: Decision) -> list[tuple[str, str]]:
    profile = decision.profile
    parameters = f"{formatting.count(profile.parameters, 'parameter')} ({formatting.size(profile.parameter_bytes)})"
    return [("model", f"{parameters}, {profile.framework}"), ("cluster", str(decision.cluster))]


def others_table(rows: Sequence[tuple[str, str, str]]) -> Table:
    """Return plans that were not chosen: name, verdict and reason of each."""
    table = Table(title="Not chosen", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("plan", "", "why"):
        table.add_column(name, header_style="dim", overflow="fold")
    for plan, verdict, why in rows:
        table.add_row(Text(plan), Text(verdict, style="red" if verdict == "not possible" else "yellow"), Text(why))
    return table


# --- The timeline of a step as inline SVG -----------------------------------------------------------------------------


# Colours are the page's CSS variables where it has them, else colours that suit light and dark pages; texts take the
# page's own colour and font.
_SPAN_KINDS: Mapping[SpanKind, tuple[str, str]] = {
    "forward": ("forward", "var(--series-1,#3f7fdd)"),
    "recompute": ("forward again", "var(--series-4,#d9920f)"),
    "backward": ("backward", "var(--series-2,#22a07a)"),
    "inputs": ("backward of inputs", "var(--series-2,#22a07a)"),
    "weights": ("backward of weights", "var(--series-6,#8bbf3f)"),
    "gather": ("parameters gathered", "var(--series-3,#9170d8)"),
    "send": ("sending", "var(--series-7,#d4679e)"),
    "reduction": ("gradients reduced", "var(--series-3,#9170d8)"),
    "optimizer": ("optimizer", "var(--bad,#d8504a)"),
    "other": ("other", "var(--series-5,#7c8fa6)"),
}
_EDGE_STAGES = 4  # stages that are drawn at either end of a longer pipeline
RECTANGLES = 1200  # more spans than this are drawn as columns, so that a page stays small
_COLUMNS, _COLUMN_PARTS = 150, 24  # of a lane, and of a column's height
_WIDE, _LEFT, _RIGHT, _LANE, _BAR, _STRIP = 960.0, 76.0, 936.0, 34.0, 20.0, 6.0
_INK, _SOFT, _GRID = "var(--ink,currentColor)", "var(--soft,#7b8694)", "var(--grid,#8a94a033)"


def timeline_svg(profile: ModelProfile, cluster: Cluster, plan: Plan, calibration: Calibration = DEFAULT) -> str:
    """Draw the predicted step of a plan on a cluster: a lane for each stage, with gradient reductions below it.

    Args:
        profile: of the model.
        cluster: that the plan is for; it need not exist.
        plan: with its batch size and precision, as the ranking gives it.
        calibration: that its estimate was made with.

    Raises:
        PlanError: the plan is impossible on this cluster, or with this model and batch.
        ResourceError: an accelerator is not in the table.
    """
    found = timeline(planned_step_work(profile, cluster, plan), calibration)
    stages = list(range(len(found.lanes)))
    shown = stages if len(stages) <= 2 * _EDGE_STAGES + 1 else stages[:_EDGE_STAGES] + stages[-_EDGE_STAGES:]
    spans = [span for stage in shown for span in (*found.lanes[stage], *found.reductions[stage])]
    column_s = _column_s(found) if sum(span.kind != "idle" for span in spans) > RECTANGLES else 0.0
    kinds = [kind for kind in _SPAN_KINDS if any(span.kind == kind for span in spans)]
    rows = [*shown[: len(shown) // 2], None, *shown[len(shown) // 2 :]] if len(shown) < len(stages) else shown
    parts: list[str] = []
    for number, stage in enumerate(rows):
        top = number * _LANE
        if stage is None:
            between = f"stages {shown[_EDGE_STAGES - 1] + 1} to {shown[_EDGE_STAGES] - 1} are left out"
            parts.append(_text(_LEFT, top + 15, between, fill=_SOFT))
            continue
        parts.append(_text(_LEFT - 12, top + 15, f"stage {stage}" if len(stages) > 1 else "device", end=True))
        parts += _columns(found, stage, top, column_s) if column_s else _lane(found, stage, top)
    low = len(rows) * _LANE
    note = f"devices idle for {formatting.percent(found.share('idle'))} of the step"
    if column_s:
        note += f"; drawn in columns of {formatting.duration(column_s)}, whose colours are their shares of that time"
    parts += [*_time_axis(found.step_s, low), _text(_LEFT, low + 42, note, fill=_SOFT)]
    legend, low = _legend([_SPAN_KINDS[kind] for kind in kinds], low + 66)
    parts += legend
    label = f"One step of {plan_name(plan)}, {formatting.duration(found.step_s)}"
    return _svg(label, _WIDE, low + 8, parts)


def _lane(found: Timeline, stage: int, top: float) -> Iterator[str]:
    """Draw every span of a stage, with the number of its micro-batch where there is room."""
    for spans, y, height in ((found.lanes[stage], top, _BAR), (found.reductions[stage], top + _BAR + 2, _STRIP)):
        for kind, same in groupby(sorted(spans, key=lambda span: span.kind), key=lambda span: span.kind):
            if kind != "idle":
                rects = "".join(_bar(span, found, y, height) for span in same)
                yield f'<g fill="{_SPAN_KINDS[kind][1]}">{rects}</g>'
    yield from (
        _text((_x(span.begin_s, found) + _x(span.end_s, found)) / 2, top + 14, str(span.micro_batch), number=True)
        for span in found.lanes[stage]
        if span.kind in ("forward", "backward", "inputs") and _x(span.seconds, found) - _LEFT > 17
    )


def _bar(span: Span, found: Timeline, y: float, height: float) -> str:
    begin, end = _x(span.begin_s, found), _x(span.end_s, found)
    where = "" if span.micro_batch is None else f", micro-batch {span.micro_batch}"
    faint = ""
    if span.chunk:
        where, faint = f"{where}, chunk {span.chunk}", ' opacity=".72"'
    said = f"{_SPAN_KINDS[span.kind][0]}{where}: {formatting.duration(span.seconds)}"
    return _rect(begin, y, max(end - begin - 0.4, 0.3), height, said, faint)


def _columns(found: Timeline, stage: int, top: float, column_s: float) -> Iterator[str]:
    """Draw a stage as columns of equal time, one path for each kind; equal neighbours are merged."""
    for spans, y, height in ((found.lanes[stage], top, _BAR), (found.reductions[stage], top + _BAR + 2, _STRIP)):
        shares = _shares(spans, column_s, math.ceil(found.step_s / column_s))
        drawn: dict[SpanKind, list[str]] = {}
        for mix, same in groupby(range(len(shares)), key=lambda column: _rounded(shares[column])):
            columns = list(same)
            begin, end = (_x(min(edge * column_s, found.step_s), found) for edge in (columns[0], columns[-1] + 1))
            for kind, under, over in mix:
                low, tall = y + height * (1 - under / _COLUMN_PARTS), height * (over - under) / _COLUMN_PARTS
                drawn.setdefault(kind, []).append(f"M{begin:.1f} {low:.1f}v-{tall:.1f}H{end:.1f}v{tall:.1f}z")
        for kind, paths in drawn.items():
            part = sum(span.seconds for span in spans if span.kind == kind) / found.step_s
            said = f"stage {stage}, {_SPAN_KINDS[kind][0]}: {formatting.percent(part)} of the step"
            yield f'<path fill="{_SPAN_KINDS[kind][1]}" d="{"".join(paths)}"><title>{said}</title></path>'


def _column_s(found: Timeline) -> float:
    """Return the time of a column: whole micro-batches of the busiest stage, so that each column has the same mix."""
    busy = [[span for span in lane if span.micro_batch is not None] for lane in found.lanes]
    each_s = max(sum(span.seconds for span in lane) for lane in busy) / len({span.micro_batch for span in busy[0]})
    return each_s * math.ceil(found.step_s / each_s / _COLUMNS)


def _shares(spans: Iterable[Span], column_s: float, columns: int) -> list[dict[SpanKind, float]]:
    """Return the shares of each column's time by kind."""
    shares: list[dict[SpanKind, float]] = [{} for _ in range(columns)]
    for span in spans:
        if span.kind != "idle":
            for column in range(int(span.begin_s / column_s), min(math.ceil(span.end_s / column_s), columns)):
                inside = min(span.end_s, (column + 1) * column_s) - max(span.begin_s, column * column_s)
                shares[column][span.kind] = shares[column].get(span.kind, 0.0) + inside / column_s
    return shares


def _rounded(shares: Mapping[SpanKind, float]) -> tuple[tuple[SpanKind, int, int], ...]:
    """Stack kinds: where each starts and ends, in parts of a column's height."""
    kinds = [kind for kind in _SPAN_KINDS if kind in shares]
    tops = [round(_COLUMN_PARTS * top) for top in accumulate(shares[kind] for kind in kinds)]
    return tuple(
        (kind, under, over) for kind, under, over in zip(kinds, [0, *tops], tops, strict=False) if over > under
    )


def _x(seconds: float, found: Timeline) -> float:
    return _LEFT + (_RIGHT - _LEFT) * seconds / found.step_s


def _time_axis(step_s: float, y: float) -> Iterator[str]:
    step = _nice_step(step_s / 8)
    wide = _RIGHT - _LEFT
    yield _line(_LEFT, y + 2, _RIGHT, y + 2)
    for number in range(int(step_s / step) + 1):
        x = _LEFT + wide * number * step / step_s
        yield _line(x, y + 2, x, y + 6)
        yield _text(x, y + 20, formatting.duration(number * step) if number else "0", fill=_SOFT, middle=bool(number))


def _nice_step(least: float) -> float:
    """Return the next of 1, 2, 5, 10, 20 ..."""
    unit = 10.0 ** math.floor(math.log10(least))
    return next(unit * times for times in (1, 2, 5, 10) if unit * times >= least)


def _legend(kinds: Sequence[tuple[str, str]], y: float) -> tuple[list[str], float]:
    """Draw the colours with names in rows; return the position of the last row too."""
    parts, x = [], _LEFT
    for name, colour in kinds:
        wide = 24 + 6.9 * len(name)
        if x + wide > _WIDE:
            x, y = _LEFT, y + 20
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="11" height="11" rx="2.5" fill="{colour}"/>')
        parts.append(_text(x + 17, y + 1, name))
        x += wide + 14
    return parts, y


def _svg(label: str, wide: float, high: float, parts: Iterable[str]) -> str:
    return (
        f'<svg class="figure" viewBox="0 0 {wide:g} {high:g}" role="img" aria-label="{escape(label)}" '
        f'width="{wide:g}" font-size="12.5" font-family="inherit">{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, wide: float, high: float, said: str, more: str = "") -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return f"<rect {size}{more}><title>{escape(said)}</title></rect>"


def _text(
    x: float, y: float, said: str, *, fill: str = _INK, end: bool = False, middle: bool = False, number: bool = False
) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle or number else ""
    look = 'fill="var(--paper,#fff)" pointer-events="none" font-size="10.5"' if number else f'fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor} {look}>{escape(said)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{_GRID}"/>'
