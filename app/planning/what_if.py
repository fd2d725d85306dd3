"""A job on a cluster that is not there: the best plan, how long it takes, what it costs, and why not another."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core.accelerators import accelerator
from trainwright.core.cluster import Cluster
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Infeasible, Plan
from trainwright.planning.cluster_sizing import AIMS, Aim, Choice, Price, Unfit, Wishes, compare
from trainwright.reporting import formatting
from trainwright.reporting.plan_view import compared, estimate_table, memory_of, misfit_name, name_of, runs_of
from trainwright.strategies.search.ranking import estimate_of

OTHERS = 6
NUMBERS = ("accelerators", "time", "cost", "goodput", "batch size", "steps to target")  # headings of columns


@dataclass(frozen=True, kw_only=True, repr=False)
class WhatIf:
    """The answer. Prints as a table; HTML with pictures in a notebook.

    Attributes:
        profile, cluster, wishes: what was asked about.
        chosen: how many accelerators, which batch size and which plan, with its time and price.
        plans: that fit with these, best first; of those that are as good, the simplest comes first.
        misfits: that do not, the nearest to fitting first.
        sizes: the best plan at each number of accelerators that was looked at, with the chosen batch size.
        unfit: numbers of accelerators at which no plan fits.
        batches: the best of each batch size that was asked about.
    """

    profile: ModelProfile
    cluster: Cluster
    wishes: Wishes
    chosen: Choice
    plans: tuple[Plan, ...]
    misfits: tuple[Infeasible, ...]
    sizes: tuple[Choice, ...]
    unfit: tuple[Unfit, ...]
    batches: tuple[Choice, ...]

    def __repr__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=110, color_system=None, force_terminal=False, force_jupyter=False)
        console.print(what_if_table(self))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        from trainwright.reporting.what_if_view import what_if_html

        return what_if_html(self)


def what_if(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch_size: int,
    precision: str,
    steps: int,
    aim: Aim = "fastest",
    price: Price = "on-demand",
    mtbf_hours: float | None = None,
    critical_batch: float | None = None,
    batch_sizes: Sequence[int] = (),
) -> WhatIf:
    """The best plan on a cluster with accelerators, or on some of them.

    Args:
        steps: of the whole run.
        aim: `fastest`, `cheapest` (dollars of the run) or `smallest` (accelerators).
        price: of an accelerator: list price on demand, of machines that may be taken back, or dollars an hour.
        mtbf_hours: mean time between failures of one accelerator, with all that belongs to it.
        critical_batch: samples; the gradient noise scale (McCandlish et al., 2018).
        batch_sizes: to compare beside the job's own, by the time to where its steps lead.

    Raises:
        ResourceError: the cluster has no accelerator, one that is not in the table, or the cheapest has no price.
        PlanError: the model fits nowhere, or its batch leaves no plan; names what comes nearest. Or a wish makes no
            sense.
    """
    wishes = Wishes(
        batch_size=batch_size,
        precision=precision,
        steps=steps,
        aim=aim,
        price=price,
        mtbf_hours=mtbf_hours,
        critical_batch=critical_batch,
        batch_sizes=tuple(batch_sizes),
    )
    found = compare(profile, cluster, wishes)
    return WhatIf(
        profile=profile,
        cluster=cluster,
        wishes=wishes,
        chosen=found.chosen,
        plans=found.ranking.plans,
        misfits=found.ranking.misfits,
        sizes=found.sizes,
        unfit=found.unfit,
        batches=found.batches,
    )


def what_if_table(answer: WhatIf) -> RenderableType:
    """The answer for the terminal."""
    estimate = estimate_of(answer.chosen.plan)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in fact_rows(answer):
        facts.add_row(name, Text(value))
    parts: list[RenderableType] = [facts, estimate_table(estimate), _table("Accelerators", *size_rows(answer))]
    batches = batch_rows(answer)
    if batches[1]:
        parts.append(_table("Batch sizes", *batches))
    others = other_rows(answer)
    if others:
        parts.append(_table("Not chosen", ("plan", "", "why"), others))
    head = Text.assemble(("Plan  ", "bold"), (headline(answer), "bold green"))
    return Group(head, *(Padding(part, (1, 0, 0, 2)) for part in parts))


def headline(answer: WhatIf) -> str:
    """The plan and its step in one line."""
    plan = answer.chosen.plan
    return f"{name_of(plan)}, est. {formatting.duration(estimate_of(plan).step_s)}/step"


def fact_rows(answer: WhatIf) -> list[tuple[str, str]]:
    """What was asked, and what it would be like."""
    chosen, wishes = answer.chosen, answer.wishes
    estimate = estimate_of(chosen.plan)
    device = accelerator(answer.cluster.kinds[0])
    assert device is not None
    parameters = formatting.count(answer.profile.parameters, "parameter")
    used = "all" if chosen.accelerators == answer.cluster.accelerators else f"{chosen.accelerators:,}"
    rows = [
        ("model", f"{parameters}, batch {chosen.batch_size:,}, {chosen.plan.precision}"),
        ("cluster", f"{answer.cluster}; nothing of it was asked or measured"),
        ("used", f"{used} of {answer.cluster.accelerators:,} accelerators: {wishes.aim}, {AIMS[wishes.aim]}"),
        ("step, predicted", f"{formatting.duration(estimate.step_s)} ({formatting.duration(estimate.low_s)} to "
         f"{formatting.duration(estimate.high_s)}, nine of ten)"),
        ("memory by stage", memory_of(estimate)),
    ]  # fmt: skip
    if chosen.plan.stages:
        rows.append(("layers by stage", runs_of(chosen.plan.stages)))
    rows.append((f"all {chosen.steps:,} steps", formatting.duration(chosen.total_s)))
    if wishes.critical_batch is not None:
        rows.append(("batch", _efficiency(chosen.batch_size, wishes.critical_batch)))
    if chosen.goodput:
        every = formatting.duration(chosen.goodput.interval_s)
        rows.append(("goodput", f"{formatting.share(chosen.goodput.share)} with a checkpoint every {every}"))
    if chosen.dollars_an_hour is not None:
        source = f"{wishes.price}, list" if isinstance(wishes.price, str) else "as given"
        rows.append(("cost", f"${chosen.dollars_an_hour:,.2f} an hour ({source}), {_dollars(chosen)} in all"))
    if answer.profile.untraced:
        stopped = f"tracing the model raised {answer.profile.untraced}"
        rows.append(("note", f"{stopped}: activations are not counted, operations are two a parameter and token"))
    if not chosen.plan.engine:
        rows.append(("note", "trainwright has no engine for this plan yet"))
    return rows


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def size_rows(answer: WhatIf) -> Rows:
    """Headings, and for each number of accelerators time, cost, goodput and plan."""
    rows: dict[int, tuple[str, ...]] = {
        size.accelerators: ("-", "-", "-", "", f"{size.nearest.reason}, {misfit_name(size.nearest)}")
        for size in answer.unfit
    }
    rows |= {choice.accelerators: _figures(answer, choice) for choice in answer.sizes}
    headings = ("accelerators", "time", "cost", "goodput", "", "best plan")
    return headings, [(f"{size:,}", *row) for size, row in sorted(rows.items())]


def batch_rows(answer: WhatIf) -> Rows:
    """Headings, and for each batch size that was asked about steps, accelerators, time, cost, goodput and plan."""
    if not answer.wishes.batch_sizes:
        return (), []
    none = ("-", "-", "-", "-", "", "no plan fits")
    found: dict[int, tuple[str, ...]] = dict.fromkeys(answer.wishes.batch_sizes, none)
    found |= {choice.batch_size: (f"{choice.accelerators:,}", *_figures(answer, choice)) for choice in answer.batches}
    headings = ("batch size", "steps to target", "accelerators", "time", "cost", "goodput", "", "best plan")
    return headings, [(f"{size:,}", f"{answer.wishes.steps_with(size):,}", *row) for size, row in sorted(found.items())]


def other_rows(answer: WhatIf) -> list[tuple[str, ...]]:
    """The best of each other kind, and the nearest misses."""
    shown = {answer.plans[0].strategy}
    rows: list[tuple[str, ...]] = []
    for plan in answer.plans:
        if plan.strategy not in shown:
            shown.add(plan.strategy)
            rows.append((f"{plan.strategy}: {name_of(plan)}", "slower", compared(plan, answer.plans[0])))
    for misfit in answer.misfits:
        if misfit.strategy not in shown:
            shown.add(misfit.strategy)
            rows.append(
                (
                    f"{misfit.strategy}: {misfit_name(misfit)}" if misfit.plan else misfit.strategy,
                    "not possible",
                    f"{misfit.reason}; {misfit.hint}",
                )
            )
    return rows[:OTHERS]


def _figures(answer: WhatIf, choice: Choice) -> tuple[str, ...]:
    goodput = formatting.share(choice.goodput.share) if choice.goodput else "-"
    mark = "chosen" if choice is answer.chosen else ""
    return formatting.duration(choice.total_s), _dollars(choice), goodput, mark, name_of(choice.plan)


def _dollars(choice: Choice) -> str:
    if choice.dollars is None:
        return "-"
    return f"${choice.dollars:,.2f}" if choice.dollars < 1000 else f"${choice.dollars:,.0f}"


def _efficiency(batch_size: int, critical_batch: float) -> str:
    """Steps and samples beside the fewest of each (McCandlish et al., 2018, equations 2.11 and 2.12)."""
    steps, samples = 1 + critical_batch / batch_size, 1 + batch_size / critical_batch
    return (
        f"{steps:.2f} times the fewest steps, {samples:.2f} times the fewest samples, "
        f"at a critical batch of {critical_batch:,.0f}"
    )


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        justify: JustifyMethod = "right" if heading in NUMBERS else "left"
        table.add_column(heading, header_style="dim", overflow="fold", justify=justify)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
