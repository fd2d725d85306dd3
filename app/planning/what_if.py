"""A job on a cluster that is not there: the best plan, how long it takes, what it costs, and why not another.

Steps to a target by batch size as in McCandlish et al. (2018): S = S_min (1 + B_crit / B), so that batches far above
the critical one take no fewer steps. Failures as in Young (1974).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.cluster import Cluster, find_accelerator
from trainwright.core.errors import PlanError, ResourceError, nearest
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import InfeasiblePlan, Plan
from trainwright.reporting.plan_view import (
    compare_plans,
    estimate_table,
    infeasible_name,
    memory_text,
    plan_name,
    stage_sizes_text,
)
from trainwright.strategies.search.plan_ranking import (
    TIE_RATIO,
    Ranking,
    estimate_of,
    search_plans,
    simplest_plan,
    suggest_changes,
)
from trainwright.strategies.search.plan_request import PlanRequest

_SHOWN_OTHERS = 6
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
    wishes: SizingRequest
    chosen: ClusterChoice
    plans: tuple[Plan, ...]
    misfits: tuple[InfeasiblePlan, ...]
    sizes: tuple[ClusterChoice, ...]
    unfit: tuple[InfeasibleSize, ...]
    batches: tuple[ClusterChoice, ...]

    def __repr__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=110, color_system=None, force_terminal=False, force_jupyter=False)
        console.print(_what_if_table(self))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        from trainwright.planning.plan_charts import what_if_html

        return what_if_html(self)


def what_if(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch_size: int,
    precision: str,
    steps: int,
    aim: Goal = "fastest",
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
    wishes = SizingRequest(
        batch_size=batch_size,
        precision=precision,
        steps=steps,
        aim=aim,
        price=price,
        mtbf_hours=mtbf_hours,
        critical_batch=critical_batch,
        batch_sizes=tuple(batch_sizes),
    )
    found = _compare_sizes(profile, cluster, wishes)
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


def _what_if_table(answer: WhatIf) -> RenderableType:
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
    return f"{plan_name(plan)}, est. {formatting.duration(estimate_of(plan).step_s)}/step"


def fact_rows(answer: WhatIf) -> list[tuple[str, str]]:
    """What was asked, and what it would be like."""
    chosen, wishes = answer.chosen, answer.wishes
    estimate = estimate_of(chosen.plan)
    device = find_accelerator(answer.cluster.kinds[0])
    assert device is not None
    parameters = formatting.count(answer.profile.parameters, "parameter")
    used = "all" if chosen.accelerators == answer.cluster.accelerators else f"{chosen.accelerators:,}"
    rows = [
        ("model", f"{parameters}, batch {chosen.batch_size:,}, {chosen.plan.precision}"),
        ("cluster", f"{answer.cluster}; nothing of it was asked or measured"),
        ("used", f"{used} of {answer.cluster.accelerators:,} accelerators: {wishes.aim}, {GOALS[wishes.aim]}"),
        ("step, predicted", f"{formatting.duration(estimate.step_s)} ({formatting.duration(estimate.low_s)} to "
         f"{formatting.duration(estimate.high_s)}, nine of ten)"),
        ("memory by stage", memory_text(estimate)),
    ]  # fmt: skip
    if chosen.plan.stages:
        rows.append(("layers by stage", stage_sizes_text(chosen.plan.stages)))
    rows.append((f"all {chosen.steps:,} steps", formatting.duration(chosen.total_s)))
    if wishes.critical_batch is not None:
        rows.append(("batch", _efficiency(chosen.batch_size, wishes.critical_batch)))
    if chosen.goodput:
        every = formatting.duration(chosen.goodput.interval_s)
        rows.append(("goodput", f"{formatting.percent(chosen.goodput.share)} with a checkpoint every {every}"))
    if chosen.dollars_an_hour is not None:
        source = f"{wishes.price}, list" if isinstance(wishes.price, str) else "as given"
        rows.append(("cost", f"${chosen.dollars_an_hour:,.2f} an hour ({source}), {_dollars(chosen)} in all"))
    if answer.profile.untraced:
        stopped = f"tracing the model raised {answer.profile.untraced}"
        rows.append(("note", f"{stopped}: activations are not counted, operations are two a parameter and token"))
    if not chosen.plan.engine:
        rows.append(("note", "trainwright has no engine for this plan yet"))
    return rows


_TableRows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def size_rows(answer: WhatIf) -> _TableRows:
    """Headings, and for each number of accelerators time, cost, goodput and plan."""
    rows: dict[int, tuple[str, ...]] = {
        size.accelerators: ("-", "-", "-", "", f"{size.nearest.reason}, {infeasible_name(size.nearest)}")
        for size in answer.unfit
    }
    rows |= {choice.accelerators: _figures(answer, choice) for choice in answer.sizes}
    headings = ("accelerators", "time", "cost", "goodput", "", "best plan")
    return headings, [(f"{size:,}", *row) for size, row in sorted(rows.items())]


def batch_rows(answer: WhatIf) -> _TableRows:
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


# --- What to rent for a job -------------------------------------------------------------------------------------------


Goal = Literal["fastest", "cheapest", "smallest"]
Price = Literal["on-demand", "spot"] | float
GOALS: Mapping[Goal, str] = {
    "fastest": "least time",
    "cheapest": "least dollars for the run",
    "smallest": "fewest accelerators on which the model fits",
}
COPY_BYTES_PER_S = 10e9  # of a device's state to its host, for a checkpoint: assumed
RECOVER_S = 60.0  # from a failure to the next step, beside what is done again: assumed


@dataclass(frozen=True, kw_only=True)
class SizingRequest:
    """What a job is and what is wanted of it.

    Attributes:
        batch_size: of the job, global.
        precision: of its steps.
        steps: of the whole run with that batch size.
        aim: what is best.
        price: of an accelerator: by list, or dollars an hour.
        mtbf_hours: between failures of one accelerator; None where nothing fails.
        critical_batch: samples; None where it is not known.
        batch_sizes: compared by the time to where the job's own steps lead; its own alone where empty.
    """

    batch_size: int
    precision: str
    steps: int
    aim: Goal = "fastest"
    price: Price = "on-demand"
    mtbf_hours: float | None = None
    critical_batch: float | None = None
    batch_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises PlanError for what makes no sense."""
        if self.aim not in GOALS:
            raise PlanError(f"{self.aim!r} is no aim", where="for", remedy=nearest(self.aim, GOALS))
        if isinstance(self.price, str) and self.price not in ("on-demand", "spot"):
            remedy = "write on-demand, spot, or the dollars an hour of one accelerator: 2.50"
            raise PlanError(f"{self.price!r} is no price", where="price", remedy=remedy)
        for name in ("price", "mtbf_hours", "critical_batch"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise PlanError(f"{name}={value:g} must be above 0 and finite", where=name, remedy="give another")
        if any(size < 1 for size in self.batch_sizes):
            wrong = min(self.batch_sizes)
            raise PlanError(f"{wrong} is no batch size", where="batch_sizes", remedy="give samples, from 1")
        if self.batch_sizes and self.critical_batch is None:
            raise PlanError(
                "batch sizes are compared by the steps that they take to the target, which the critical batch tells",
                where="batch_sizes",
                remedy="give it in samples: critical_batch=2000 (the gradient noise scale; see README)",
            )

    def steps_with(self, batch_size: int) -> int:
        """Steps to where the job's own steps lead with its own batch size."""
        if self.critical_batch is None:
            return self.steps
        taken = [1 + self.critical_batch / size for size in (batch_size, self.batch_size)]
        return max(1, round(self.steps * taken[0] / taken[1]))


@dataclass(frozen=True, kw_only=True)
class _Goodput:
    """What failures leave of the time.

    Attributes:
        share: of the time in steps that count.
        interval_s: between checkpoints, the best by Young (1974).
    """

    share: float
    interval_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterChoice:
    """The best plan with so many accelerators.

    Attributes:
        accelerators, nodes: of the plan.
        batch_size: global.
        steps: to the target.
        plan: with its estimate.
        goodput: None where no mean time between failures was given.
        total_s: of the run, failures included.
        dollars_an_hour: of all accelerators; None where the table has no price.
        dollars: of the run, likewise.
    """

    accelerators: int
    nodes: int
    batch_size: int
    steps: int
    plan: Plan
    goodput: _Goodput | None
    total_s: float
    dollars_an_hour: float | None
    dollars: float | None


@dataclass(frozen=True, kw_only=True)
class InfeasibleSize:
    """A size at which no plan fits, and what comes nearest."""

    accelerators: int
    nearest: InfeasiblePlan


@dataclass(frozen=True, kw_only=True)
class _SizeComparison:
    """What was found.

    Attributes:
        chosen: the best by the aim.
        ranking: all plans at its size, with its batch.
        sizes: the best of each size with the chosen batch, by accelerators.
        unfit: sizes at which nothing fits, likewise.
        batches: the best of each batch size by the aim, by batch size.
    """

    chosen: ClusterChoice
    ranking: Ranking
    sizes: tuple[ClusterChoice, ...]
    unfit: tuple[InfeasibleSize, ...]
    batches: tuple[ClusterChoice, ...]


def _compare_sizes(profile: ModelProfile, cluster: Cluster, wishes: SizingRequest) -> _SizeComparison:
    """Look at 1, 2, 4 ... accelerators of a node, 1, 2, 4 ... nodes and all, with each batch size.

    Raises:
        ResourceError: the cluster has no accelerator, one that is not in the table, or the cheapest has no price.
        PlanError: the model fits nowhere, or its batch leaves no plan; names what comes nearest.
    """
    if not cluster.accelerators:
        raise ResourceError("a cluster of CPUs has no data sheet", where="cluster", remedy="leave cluster= out")
    if wishes.aim == "cheapest" and _dollars_an_hour(cluster, wishes.price) is None:
        remedy = "give dollars an hour of one accelerator: price=2.50"
        raise ResourceError(f"no {wishes.price} price is known of {' or '.join(cluster.kinds)}", remedy=remedy)
    sizes = every_size(cluster)
    batch_sizes = dict.fromkeys((wishes.batch_size, *wishes.batch_sizes))
    looked = {batch_size: _search_sizes(profile, sizes, wishes, batch_size) for batch_size in batch_sizes}
    best = [best_of(choices, wishes.aim) for choices in map(_feasible, looked.values()) if choices]
    if not best:
        raise _nothing_fits(_plan_request(profile, cluster, wishes, wishes.batch_size), looked[wishes.batch_size])
    chosen = best_of(best, wishes.aim)
    found = looked[chosen.batch_size]
    return _SizeComparison(
        chosen=chosen,
        ranking=next(ranking for choice, ranking in found if choice is chosen),
        sizes=tuple(_feasible(found)),
        unfit=tuple(choice for choice, _ in found if isinstance(choice, InfeasibleSize)),
        batches=tuple(sorted(best, key=lambda choice: choice.batch_size)),
    )


def every_size(cluster: Cluster) -> list[Cluster]:
    """The first accelerators of a cluster: of the first node one by one, then node by node."""
    nodes = tuple(node for node in cluster.nodes if node.accelerators)
    parts = [Cluster(nodes=(replace(nodes[0], accelerators=count),)) for count in range(1, nodes[0].accelerators)]
    return parts + [Cluster(nodes=nodes[:count]) for count in range(1, len(nodes) + 1)]


def doubling(sizes: Sequence[Cluster]) -> list[int]:
    """Of all sizes the places of 1, 2, 4 ... accelerators of a node, 1, 2, 4 ... nodes, and the last."""
    node = len(sizes) - len(sizes[-1].nodes)
    powers = [2**power for power in range(len(sizes).bit_length())]
    within = [power - 1 for power in powers if power <= node]
    return sorted({*within, *(node - 1 + power for power in powers if node - 1 + power < len(sizes)), len(sizes) - 1})


def best_of(choices: Sequence[ClusterChoice], aim: Goal) -> ClusterChoice:
    """By the aim; of those as quick the smallest, of those as cheap the quickest."""
    if aim == "smallest":
        return min(choices, key=lambda choice: (choice.accelerators, choice.total_s))
    if aim == "fastest":
        limit = TIE_RATIO * min(choice.total_s for choice in choices)
        tied = [choice for choice in choices if choice.total_s <= limit]
        return min(tied, key=lambda choice: (choice.accelerators, choice.total_s))
    limit = TIE_RATIO * min(choice.dollars or 0.0 for choice in choices)
    return min((choice for choice in choices if (choice.dollars or 0.0) <= limit), key=lambda choice: choice.total_s)


_SizeResult = tuple[ClusterChoice | InfeasibleSize, Ranking]


def _search_sizes(
    profile: ModelProfile, sizes: Sequence[Cluster], wishes: SizingRequest, batch_size: int
) -> list[_SizeResult]:
    """What is best at each size; for the smallest, sizes between the last that is too small and the next too."""
    found = {place: _best_at_size(profile, sizes[place], wishes, batch_size) for place in doubling(sizes)}
    if wishes.aim == "smallest":
        fits = min((place for place, (best, _) in found.items() if isinstance(best, ClusterChoice)), default=0)
        below = max((place for place in found if place < fits), default=-1)
        while fits - below > 1:
            middle = (below + fits) // 2
            found[middle] = _best_at_size(profile, sizes[middle], wishes, batch_size)
            below, fits = (below, middle) if isinstance(found[middle][0], ClusterChoice) else (middle, fits)
    return [found[place] for place in sorted(found)]


def _feasible(found: Sequence[_SizeResult]) -> list[ClusterChoice]:
    return [choice for choice, _ in found if isinstance(choice, ClusterChoice)]


def _best_at_size(profile: ModelProfile, cluster: Cluster, wishes: SizingRequest, batch_size: int) -> _SizeResult:
    """On all accelerators of a cluster; the ranking has the simplest of its best plans in front."""
    found = search_plans(_plan_request(profile, cluster, wishes, batch_size))
    if not found.plans:
        return InfeasibleSize(accelerators=cluster.accelerators, nearest=found.misfits[0]), found
    plan, steps = simplest_plan(found.plans), wishes.steps_with(batch_size)
    found = replace(found, plans=(plan, *(other for other in found.plans if other is not plan)))
    goodput = _goodput(plan, cluster.accelerators, wishes.mtbf_hours) if wishes.mtbf_hours else None
    total_s = steps * estimate_of(plan).target_s / (goodput.share if goodput else 1.0)
    dollars = _dollars_an_hour(cluster, wishes.price)
    choice = ClusterChoice(
        accelerators=cluster.accelerators,
        nodes=len(cluster.nodes),
        batch_size=batch_size,
        steps=steps,
        plan=plan,
        goodput=goodput,
        total_s=total_s,
        dollars_an_hour=dollars,
        dollars=None if dollars is None else dollars * total_s / 3600,
    )
    return choice, found


def _plan_request(profile: ModelProfile, cluster: Cluster, wishes: SizingRequest, batch_size: int) -> PlanRequest:
    return PlanRequest(profile=profile, cluster=cluster, batch_size=batch_size, precision=wishes.precision)


def _nothing_fits(question: PlanRequest, found: Sequence[_SizeResult]) -> PlanError:
    last = [best.nearest for best, _ in found if isinstance(best, InfeasibleSize)][-1]
    what = f"no plan fits {question.cluster}; the nearest, {infeasible_name(last)}: {last.reason}"
    return PlanError(what, where="cluster", remedy=suggest_changes(question) or last.hint)


def _goodput(plan: Plan, devices: int, mtbf_hours: float) -> _Goodput:
    """By Young (1974): C / tau + tau / (2 M) + R / M of the time are lost, least at tau = sqrt(2 C M)."""
    failure_s = mtbf_hours * 3600 / devices
    copy_s = max(estimate_of(plan).stage_memory_bytes) / COPY_BYTES_PER_S
    interval_s = math.sqrt(2 * copy_s * failure_s)
    lost = copy_s / interval_s + interval_s / (2 * failure_s) + RECOVER_S / failure_s
    return _Goodput(share=max(1 - lost, 0.01), interval_s=interval_s)


def _dollars_an_hour(cluster: Cluster, price: Price) -> float | None:
    """An hour of all accelerators."""
    if isinstance(price, int | float):
        return price * cluster.accelerators
    total = 0.0
    for kind in cluster.kinds:
        device = find_accelerator(kind)
        each = device and (device.spot_price if price == "spot" else device.price)
        if not each:
            return None
        total += each * sum(node.accelerators for node in cluster.nodes if node.kind == kind)
    return total
