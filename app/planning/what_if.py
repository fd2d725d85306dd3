"""The answer to "what if this job ran on that cluster": a table in the terminal, HTML with charts in a notebook."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.cluster import Cluster, find_accelerator
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Estimate
from trainwright.planning.cluster_sizing import GOALS, ClusterChoice, SizeComparison, SizingRequest, compare_sizes
from trainwright.planning.decision import compare_plans
from trainwright.planning.plan_charts import curve_svg, timeline_svg
from trainwright.reporting.html.templates import render_template
from trainwright.reporting.plan_view import estimate_table, infeasible_name, memory_text, plan_name, stage_sizes_text
from trainwright.strategies.search.plan_ranking import estimate_of

_SHOWN_OTHERS = 6
_NUMBERS = ("accelerators", "time", "cost", "goodput", "batch size", "steps to target")  # headings of columns


@dataclass(frozen=True, kw_only=True, repr=False)
class WhatIf(SizeComparison):
    """The best plan on a cluster that need not exist. Prints as a table; HTML with charts in a notebook."""

    def __repr__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=110, color_system=None, force_terminal=False, force_jupyter=False)
        console.print(_what_if_table(self))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        return _what_if_html(self)


def what_if(profile: ModelProfile, cluster: Cluster, request: SizingRequest) -> WhatIf:
    """Find the best plan on a cluster with accelerators, or on a part of it.

    Raises:
        ResourceError: the cluster has no accelerator, one that is not in the table, or the cheapest has no price.
        PlanError: the model fits nowhere, or its batch leaves no plan; names the nearest plan.
    """
    return WhatIf(**vars(compare_sizes(profile, cluster, request)))


def _what_if_table(answer: WhatIf) -> RenderableType:
    """Return the answer for the terminal."""
    estimate = estimate_of(answer.chosen.plan)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _fact_rows(answer):
        facts.add_row(name, Text(value))
    parts: list[RenderableType] = [facts, estimate_table(estimate), _table("Accelerators", *_size_rows(answer))]
    batches = _batch_rows(answer)
    if batches[1]:
        parts.append(_table("Batch sizes", *batches))
    others = _other_rows(answer)
    if others:
        parts.append(_table("Not chosen", ("plan", "", "why"), others))
    head = Text.assemble(("Plan  ", "bold"), (_headline(answer), "bold green"))
    return Group(head, *(Padding(part, (1, 0, 0, 2)) for part in parts))


def _headline(answer: WhatIf) -> str:
    """Return the plan and its step time in one line."""
    plan = answer.chosen.plan
    return f"{plan_name(plan)}, est. {formatting.duration(estimate_of(plan).step_s)}/step"


def _fact_rows(answer: WhatIf) -> list[tuple[str, str]]:
    """Return names and values of the question and the predictions."""
    chosen, request = answer.chosen, answer.wishes
    estimate = estimate_of(chosen.plan)
    device = find_accelerator(answer.cluster.kinds[0])
    assert device is not None
    parameters = formatting.count(answer.profile.parameters, "parameter")
    used = "all" if chosen.accelerators == answer.cluster.accelerators else f"{chosen.accelerators:,}"
    rows = [
        ("model", f"{parameters}, batch {chosen.batch_size:,}, {chosen.plan.precision}"),
        ("cluster", f"{answer.cluster}; predicted, not measured"),
        ("used", f"{used} of {answer.cluster.accelerators:,} accelerators: {request.aim}, {GOALS[request.aim]}"),
        ("step, predicted", f"{formatting.duration(estimate.step_s)} ({formatting.duration(estimate.low_s)} to "
         f"{formatting.duration(estimate.high_s)}, nine of ten)"),
        ("memory by stage", memory_text(estimate)),
    ]  # fmt: skip
    if chosen.plan.stages:
        rows.append(("layers by stage", stage_sizes_text(chosen.plan.stages)))
    rows.append((f"all {chosen.steps:,} steps", formatting.duration(chosen.total_s)))
    if request.critical_batch is not None:
        rows.append(("batch", _efficiency(chosen.batch_size, request.critical_batch)))
    if chosen.goodput:
        every = formatting.duration(chosen.goodput.interval_s)
        rows.append(("goodput", f"{formatting.percent(chosen.goodput.share)} with a checkpoint every {every}"))
    if chosen.dollars_an_hour is not None:
        source = f"{request.price}, list" if isinstance(request.price, str) else "as given"
        rows.append(("cost", f"${chosen.dollars_an_hour:,.2f} an hour ({source}), {_dollars(chosen)} in all"))
    if answer.profile.untraced:
        stopped = f"tracing the model raised {answer.profile.untraced}"
        rows.append(("note", f"{stopped}: activations are not counted, operations are two a parameter and token"))
    if not chosen.plan.engine:
        rows.append(("note", "trainwright has no engine for this plan yet"))
    return rows


_TableRows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _size_rows(answer: WhatIf) -> _TableRows:
    """Return headings, and for each number of accelerators time, cost, goodput and plan."""
    rows: dict[int, tuple[str, ...]] = {
        size.accelerators: ("-", "-", "-", "", f"{size.nearest.reason}, {infeasible_name(size.nearest)}")
        for size in answer.unfit
    }
    rows |= {choice.accelerators: _figures(answer, choice) for choice in answer.sizes}
    headings = ("accelerators", "time", "cost", "goodput", "", "best plan")
    return headings, [(f"{size:,}", *row) for size, row in sorted(rows.items())]


def _batch_rows(answer: WhatIf) -> _TableRows:
    """Return headings, and for each requested batch size steps, accelerators, time, cost, goodput and plan."""
    if not answer.wishes.batch_sizes:
        return (), []
    none = ("-", "-", "-", "-", "", "no plan fits")
    found: dict[int, tuple[str, ...]] = dict.fromkeys(answer.wishes.batch_sizes, none)
    found |= {choice.batch_size: (f"{choice.accelerators:,}", *_figures(answer, choice)) for choice in answer.batches}
    headings = ("batch size", "steps to target", "accelerators", "time", "cost", "goodput", "", "best plan")
    return headings, [(f"{size:,}", f"{answer.wishes.steps_with(size):,}", *row) for size, row in sorted(found.items())]


def _other_rows(answer: WhatIf) -> list[tuple[str, ...]]:
    """Return the best plan of each other strategy, and the nearest ones that do not fit."""
    shown = {answer.plans[0].strategy}
    rows: list[tuple[str, ...]] = []
    for plan in answer.plans:
        if plan.strategy not in shown:
            shown.add(plan.strategy)
            rows.append((f"{plan.strategy}: {plan_name(plan)}", "slower", compare_plans(plan, answer.plans[0])))
    for misfit in answer.misfits:
        if misfit.strategy not in shown:
            shown.add(misfit.strategy)
            rows.append(
                (
                    f"{misfit.strategy}: {infeasible_name(misfit)}" if misfit.plan else misfit.strategy,
                    "not possible",
                    f"{misfit.reason}; {misfit.hint}",
                )
            )
    return rows[:_SHOWN_OTHERS]


def _figures(answer: WhatIf, choice: ClusterChoice) -> tuple[str, ...]:
    goodput = formatting.percent(choice.goodput.share) if choice.goodput else "-"
    mark = "chosen" if choice is answer.chosen else ""
    return formatting.duration(choice.total_s), _dollars(choice), goodput, mark, plan_name(choice.plan)


def _dollars(choice: ClusterChoice) -> str:
    if choice.dollars is None:
        return "-"
    return f"${choice.dollars:,.2f}" if choice.dollars < 1000 else f"${choice.dollars:,.0f}"


def _efficiency(batch_size: int, critical_batch: float) -> str:
    """Compare steps and samples with the fewest of each (McCandlish et al., 2018, equations 2.11 and 2.12)."""
    steps, samples = 1 + critical_batch / batch_size, 1 + batch_size / critical_batch
    return (
        f"{steps:.2f} times the fewest steps, {samples:.2f} times the fewest samples, "
        f"at a critical batch of {critical_batch:,.0f}"
    )


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        justify: JustifyMethod = "right" if heading in _NUMBERS else "left"
        table.add_column(heading, header_style="dim", overflow="fold", justify=justify)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _what_if_html(answer: WhatIf) -> str:
    """Return the answer as HTML: facts, terms and memory as bars, a timeline of a step, time and cost by size.

    Styles and pictures inline, no scripts, nothing fetched; light and dark.
    """
    estimate = estimate_of(answer.chosen.plan)
    device = find_accelerator(answer.cluster.kinds[0])
    assert device is not None
    terms = estimate.terms.items()
    return render_template(
        "whatif.html.j2",
        headline=_headline(answer),
        facts=_fact_rows(answer),
        terms=[(name.replace("_", " "), formatting.duration(s), 100 * s / estimate.step_s) for name, s in terms],
        room=formatting.size(device.memory_bytes),
        memory=list(_memory_rows(estimate, device.memory_bytes)),
        timeline=Markup(timeline_svg(answer.profile, answer.cluster, answer.chosen.plan)),
        curve=Markup(curve_svg(answer.sizes, answer.chosen)),
        sizes=_size_rows(answer),
        batches=_batch_rows(answer),
        others=(("plan", "", "why"), _other_rows(answer)),
        numbers=_NUMBERS,
    )


def standalone_page(body: str) -> str:
    """Return the HTML of a notebook's cell as a whole page."""
    return render_template("page.html.j2", title="trainwright plan", body=Markup(body))


def _memory_rows(estimate: Estimate, room_bytes: int) -> Iterator[tuple[str, str, float]]:
    """Yield stages with the memory they need; equal neighbours together."""
    held = list(enumerate(estimate.stage_memory_bytes))
    for said, same in groupby(held, key=lambda item: formatting.size(item[1])):
        run = list(same)
        first, last = run[0][0], run[-1][0]
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        yield name if len(held) > 1 else "device", said, 100 * run[0][1] / room_bytes
