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
    calibration: Calibration = DEFAULT  # of the chosen plan's estimate
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
        chosen, rows = self.chosen, other_rows(other_plans(self))
        mesh = mesh_table(chosen, planned_nodes(chosen, self.used))
        parts: list[RenderableType] = [facts_table(_context(self) + plan_rows(chosen))]
        parts += [mesh_text(mesh)] if mesh is not None else []
        parts += [estimate_table(chosen.estimate)] if chosen.estimate is not None else []
        parts += [others_table(rows)] if rows else []
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
    first, second = estimate_of(plan), estimate_of(best)
    if not first.factors and not second.factors:
        return f"predicted {first.step_s / second.step_s:.2f} times the step time of {best.strategy}"
    by_target = f"predicted {first.target_s / second.target_s:.2f} times the time of {best.strategy} to the same loss"
    by_step = f"{first.step_s / second.step_s:.2f} times its step time"
    return f"{by_target} ({', '.join([by_step, *factor_texts(first)])})"


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
_WIDTH, _LEFT, _RIGHT, _LANE, _BAR, _STRIP = 960.0, 76.0, 936.0, 34.0, 20.0, 6.0
_INK, _MUTED, _GRID = "var(--ink,currentColor)", "var(--soft,#7b8694)", "var(--grid,#8a94a033)"


def timeline_svg(profile: ModelProfile, cluster: Cluster, plan: Plan, calibration: Calibration = DEFAULT) -> str:
    """Draw the predicted step of a plan on a cluster: a lane for each stage, with gradient reductions below it.

    Args:
        profile: of the model.
        cluster: of the plan; the cluster need not exist.
        plan: with its batch size and precision, as the ranking gives it.
        calibration: of the plan's estimate.

    Raises:
        PlanError: the plan is impossible on this cluster, or with this model and batch.
        ResourceError: an accelerator is not in the table.
    """
    step = timeline(planned_step_work(profile, cluster, plan), calibration)
    stages = list(range(len(step.lanes)))
    shown = stages if len(stages) <= 2 * _EDGE_STAGES + 1 else stages[:_EDGE_STAGES] + stages[-_EDGE_STAGES:]
    spans = [span for stage in shown for span in (*step.lanes[stage], *step.reductions[stage])]
    column_s = _column_s(step) if sum(span.kind != "idle" for span in spans) > RECTANGLES else 0.0
    kinds = [kind for kind in _SPAN_KINDS if any(span.kind == kind for span in spans)]
    rows = [*shown[: len(shown) // 2], None, *shown[len(shown) // 2 :]] if len(shown) < len(stages) else shown
    parts: list[str] = []
    for number, stage in enumerate(rows):
        top = number * _LANE
        if stage is None:
            omitted = f"stages {shown[_EDGE_STAGES - 1] + 1} to {shown[_EDGE_STAGES] - 1} are left out"
            parts.append(_text(_LEFT, top + 15, omitted, fill=_MUTED))
            continue
        parts.append(_text(_LEFT - 12, top + 15, f"stage {stage}" if len(stages) > 1 else "device", end=True))
        parts += _columns(step, stage, top, column_s) if column_s else _lane(step, stage, top)
    low = len(rows) * _LANE
    note = f"devices idle for {formatting.percent(step.share('idle'))} of the step"
    if column_s:
        note += f"; drawn in columns of {formatting.duration(column_s)}, whose colours are their shares of that time"
    parts += [*_time_axis(step.step_s, low), _text(_LEFT, low + 42, note, fill=_MUTED)]
    legend, low = _legend([_SPAN_KINDS[kind] for kind in kinds], low + 66)
    parts += legend
    label = f"One step of {plan_name(plan)}, {formatting.duration(step.step_s)}"
    return _svg(label, _WIDTH, low + 8, parts)


def _lane(step: Timeline, stage: int, top: float) -> Iterator[str]:
    """Draw every span of a stage, with the number of its micro-batch where there is room."""
    for spans, y, height in ((step.lanes[stage], top, _BAR), (step.reductions[stage], top + _BAR + 2, _STRIP)):
        for kind, spans_of_kind in groupby(sorted(spans, key=lambda span: span.kind), key=lambda span: span.kind):
            if kind != "idle":
                rects = "".join(_bar(span, step, y, height) for span in spans_of_kind)
                yield f'<g fill="{_SPAN_KINDS[kind][1]}">{rects}</g>'
    yield from (
        _text((_x(span.begin_s, step) + _x(span.end_s, step)) / 2, top + 14, str(span.micro_batch), number=True)
        for span in step.lanes[stage]
        if span.kind in ("forward", "backward", "inputs") and _x(span.seconds, step) - _LEFT > 17
    )


def _bar(span: Span, step: Timeline, y: float, height: float) -> str:
    begin, end = _x(span.begin_s, step), _x(span.end_s, step)
    position = "" if span.micro_batch is None else f", micro-batch {span.micro_batch}"
    opacity = ""
    if span.chunk:
        position, opacity = f"{position}, chunk {span.chunk}", ' opacity=".72"'
    title = f"{_SPAN_KINDS[span.kind][0]}{position}: {formatting.duration(span.seconds)}"
    return _rect(begin, y, max(end - begin - 0.4, 0.3), height, title, opacity)


def _columns(step: Timeline, stage: int, top: float, column_s: float) -> Iterator[str]:
    """Draw a stage as columns of equal time, one path for each kind; merge equal adjacent columns."""
    for spans, y, height in ((step.lanes[stage], top, _BAR), (step.reductions[stage], top + _BAR + 2, _STRIP)):
        shares = _shares(spans, column_s, math.ceil(step.step_s / column_s))
        drawn: dict[SpanKind, list[str]] = {}
        for mix, equal_columns in groupby(range(len(shares)), key=lambda column: _rounded(shares[column])):
            columns = list(equal_columns)
            begin, end = (_x(min(edge * column_s, step.step_s), step) for edge in (columns[0], columns[-1] + 1))
            for kind, under, over in mix:
                low, tall = y + height * (1 - under / _COLUMN_PARTS), height * (over - under) / _COLUMN_PARTS
                drawn.setdefault(kind, []).append(f"M{begin:.1f} {low:.1f}v-{tall:.1f}H{end:.1f}v{tall:.1f}z")
        for kind, paths in drawn.items():
            share = sum(span.seconds for span in spans if span.kind == kind) / step.step_s
            title = f"stage {stage}, {_SPAN_KINDS[kind][0]}: {formatting.percent(share)} of the step"
            yield f'<path fill="{_SPAN_KINDS[kind][1]}" d="{"".join(paths)}"><title>{title}</title></path>'


def _column_s(step: Timeline) -> float:
    """Return the time of a column: whole micro-batches of the busiest stage, so that each column has the same mix."""
    busy = [[span for span in lane if span.micro_batch is not None] for lane in step.lanes]
    batch_s = max(sum(span.seconds for span in lane) for lane in busy) / len({span.micro_batch for span in busy[0]})
    return batch_s * math.ceil(step.step_s / batch_s / _COLUMNS)


def _shares(spans: Iterable[Span], column_s: float, columns: int) -> list[dict[SpanKind, float]]:
    """Return the shares of each column's time by kind."""
    shares: list[dict[SpanKind, float]] = [{} for _ in range(columns)]
    for span in spans:
        if span.kind != "idle":
            for column in range(int(span.begin_s / column_s), min(math.ceil(span.end_s / column_s), columns)):
                overlap_s = min(span.end_s, (column + 1) * column_s) - max(span.begin_s, column * column_s)
                shares[column][span.kind] = shares[column].get(span.kind, 0.0) + overlap_s / column_s
    return shares


def _rounded(shares: Mapping[SpanKind, float]) -> tuple[tuple[SpanKind, int, int], ...]:
    """Stack kinds: where each starts and ends, in parts of a column's height."""
    kinds = [kind for kind in _SPAN_KINDS if kind in shares]
    tops = [round(_COLUMN_PARTS * top) for top in accumulate(shares[kind] for kind in kinds)]
    return tuple(
        (kind, under, over) for kind, under, over in zip(kinds, [0, *tops], tops, strict=False) if over > under
    )


def _x(seconds: float, step: Timeline) -> float:
    return _LEFT + (_RIGHT - _LEFT) * seconds / step.step_s


def _time_axis(step_s: float, y: float) -> Iterator[str]:
    tick = _round_interval(step_s / 8)
    width = _RIGHT - _LEFT
    yield _line(_LEFT, y + 2, _RIGHT, y + 2)
    for number in range(int(step_s / tick) + 1):
        x = _LEFT + width * number * tick / step_s
        yield _line(x, y + 2, x, y + 6)
        yield _text(x, y + 20, formatting.duration(number * tick) if number else "0", fill=_MUTED, middle=bool(number))


def _round_interval(least: float) -> float:
    """Return the next of 1, 2, 5, 10, 20 ..."""
    unit = 10.0 ** math.floor(math.log10(least))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least)


def _legend(kinds: Sequence[tuple[str, str]], y: float) -> tuple[list[str], float]:
    """Draw the colours with names in rows; return the position of the last row too."""
    parts, x = [], _LEFT
    for name, colour in kinds:
        width = 24 + 6.9 * len(name)
        if x + width > _WIDTH:
            x, y = _LEFT, y + 20
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="11" height="11" rx="2.5" fill="{colour}"/>')
        parts.append(_text(x + 17, y + 1, name))
        x += width + 14
    return parts, y


def _svg(label: str, width: float, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg class="figure" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'width="{width:g}" font-size="12.5" font-family="inherit">{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, title: str, attributes: str = "") -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {size}{attributes}><title>{escape(title)}</title></rect>"


def _text(
    x: float, y: float, label: str, *, fill: str = _INK, end: bool = False, middle: bool = False, number: bool = False
) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle or number else ""
    style = 'fill="var(--paper,#fff)" pointer-events="none" font-size="10.5"' if number else f'fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor} {style}>{escape(label)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{_GRID}"/>'
