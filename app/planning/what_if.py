"""The answer to "what if this job ran on that cluster": the best plan for each size, with time and price.

It shows as a table in the terminal, and as HTML with charts in a notebook. Steps to a target by batch size follow
McCandlish et al. (2018): S = S_min (1 + B_crit / B), so that batches far above the critical one take hardly fewer
steps. Losses by failures follow Young (1974).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from markupsafe import Markup
from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.cluster import Cluster, find_accelerator
from trainwright.core.errors import PlanError, ResourceError, nearest
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Estimate, InfeasiblePlan, Plan
from trainwright.planning.decision import compare_plans, others_table, timeline_svg
from trainwright.reporting.html.run_charts import scaling_charts
from trainwright.reporting.html.templates import render_template
from trainwright.reporting.plan_view import (
    estimate_table,
    facts_table,
    infeasible_name,
    memory_text,
    plan_name,
    stage_sizes_text,
)
from trainwright.strategies.cost_model.plan_constraints import check_request
from trainwright.strategies.search.plan_ranking import (
    TIE_RATIO,
    Ranking,
    best_plan,
    estimate_of,
    first_of_strategies,
    nothing_fits,
    search_plans,
)
from trainwright.strategies.search.plan_request import PlanRequest

Goal = Literal["fastest", "cheapest", "smallest"]
Price = Literal["on-demand", "spot"] | float
_GOALS: Mapping[Goal, str] = {
    "fastest": "least time",
    "cheapest": "least dollars for the run",
    "smallest": "fewest accelerators on which the model fits",
}
COPY_BYTES_PER_S = 10e9  # of a device's state to its host, for a checkpoint: assumed
RECOVER_S = 60.0  # from a failure to the next step, without repeated steps: assumed


@dataclass(frozen=True, kw_only=True)
class SizingRequest:
    """A job and the aim by which accelerators are chosen for it. Raises PlanError for values that make no sense."""

    batch_size: int  # of the job, global, in samples
    precision: str  # of its steps
    steps: int  # of the whole run with that batch size
    aim: Goal = "fastest"  # `fastest`, `cheapest` (dollars of the run) or `smallest` (accelerators)
    price: Price = "on-demand"  # of an accelerator: its list price on demand or as a spot machine, or dollars an hour
    # mean time between failures of one accelerator and what belongs to it; None for no failures
    mtbf_hours: float | None = None
    # samples; the gradient noise scale (McCandlish et al., 2018); None where it is unknown
    critical_batch: float | None = None
    # other batch sizes, compared by the time to the same loss; needs `critical_batch`
    batch_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the values."""
        for size in (self.batch_size, *self.batch_sizes):
            check_request(size, self.precision)
        if self.aim not in _GOALS:
            raise PlanError(f"unknown aim {self.aim!r}", where="for", remedy=nearest(self.aim, _GOALS))
        if isinstance(self.price, str) and self.price not in ("on-demand", "spot"):
            remedy = "write on-demand, spot, or the dollars an hour of one accelerator: 2.50"
            raise PlanError(f"unknown price {self.price!r}", where="price", remedy=remedy)
        for name in ("price", "mtbf_hours", "critical_batch"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise PlanError(f"{name}={value:g} must be above 0 and finite", where=name, remedy="give another")
        if self.batch_sizes and self.critical_batch is None:
            raise PlanError(
                "batch sizes cannot be compared without the critical batch, which determines their steps to the target",
                where="batch_sizes",
                remedy="give it in samples: critical_batch=2000 (the gradient noise scale; see docs/planning.md)",
            )

    def steps_with(self, batch_size: int) -> int:
        """Return the steps with a batch size to the loss that the job reaches with its own."""
        if self.critical_batch is None:
            return self.steps
        taken = [1 + self.critical_batch / size for size in (batch_size, self.batch_size)]
        return max(1, round(self.steps * taken[0] / taken[1]))


@dataclass(frozen=True, kw_only=True)
class _Goodput:
    """The share of time in steps that count, and the best interval between checkpoints by Young (1974)."""

    share: float
    interval_s: float


@dataclass(frozen=True, kw_only=True)
class ClusterChoice:
    """The best plan with a number of accelerators."""

    # accelerators, nodes: of the plan
    accelerators: int
    nodes: int
    batch_size: int  # global
    steps: int  # to the target
    plan: Plan  # with its estimate
    goodput: _Goodput | None  # None where no mean time between failures was given
    total_s: float  # of the run, failures included
    dollars_an_hour: float | None  # of all accelerators; None where the table has no price
    dollars: float | None  # of the run, likewise


@dataclass(frozen=True, kw_only=True)
class _InfeasibleSize:
    """A size at which no plan fits, and the plan that comes nearest."""

    accelerators: int
    nearest: InfeasiblePlan


@dataclass(frozen=True, kw_only=True, repr=False)
class WhatIf:
    """The best plans of a job on a cluster that need not exist, on parts of it, and with other batch sizes.

    Prints as a table; HTML with charts in a notebook.
    """

    # profile, cluster, request: the question; `--json` shows it under these names
    profile: ModelProfile
    cluster: Cluster
    request: SizingRequest
    chosen: ClusterChoice  # the best choice by the aim: accelerators, batch size and plan, with time and price
    # that fit the chosen accelerators and batch size, best first; of equal plans, the simplest comes first
    plans: tuple[Plan, ...]
    misfits: tuple[InfeasiblePlan, ...]  # plans that do not fit, the nearest to fitting first
    # the best choice for each number of accelerators looked at, with the chosen batch size
    sizes: tuple[ClusterChoice, ...]
    unfit: tuple[_InfeasibleSize, ...]  # numbers of accelerators at which no plan fits
    batches: tuple[ClusterChoice, ...]  # the best choice of each requested batch size

    def __repr__(self) -> str:
        return formatting.plain_text(_what_if_table(self))

    def _repr_html_(self) -> str:
        return _what_if_html(self)


def what_if(profile: ModelProfile, cluster: Cluster, request: SizingRequest) -> WhatIf:
    """Compare 1, 2, 4 ... accelerators of a node, 1, 2, 4 ... nodes and all of a cluster, with each batch size.

    Raises:
        ResourceError: the cluster has no accelerator, one that is not in the table, or the cheapest has no price.
        PlanError: the model fits nowhere, or its batch leaves no plan; names what comes nearest.
    """
    if not cluster.accelerators:
        raise ResourceError(
            "cluster= needs accelerators: there is no data sheet for CPUs",
            where="cluster",
            remedy="leave cluster= out",
        )
    if request.aim == "cheapest" and _dollars_an_hour(cluster, request.price) is None:
        remedy = "give dollars an hour of one accelerator: price=2.50"
        raise ResourceError(f"no {request.price} price is known of {' or '.join(cluster.kinds)}", remedy=remedy)
    sizes = every_size(cluster)
    batch_sizes = dict.fromkeys((request.batch_size, *request.batch_sizes))
    question = PlanRequest(profile=profile, cluster=cluster, batch_size=request.batch_size, precision=request.precision)
    looked = {size: _search_sizes(replace(question, batch_size=size), sizes, request) for size in batch_sizes}
    best = [best_of(choices, request.aim) for choices in map(_feasible, looked.values()) if choices]
    if not best:
        _, ranking = looked[request.batch_size][-1]
        raise nothing_fits(question, ranking)
    chosen = best_of(best, request.aim)
    found = looked[chosen.batch_size]
    ranking = next(ranking for choice, ranking in found if choice is chosen)
    return WhatIf(
        profile=profile,
        cluster=cluster,
        request=request,
        chosen=chosen,
        plans=ranking.plans,
        misfits=ranking.misfits,
        sizes=tuple(_feasible(found)),
        unfit=tuple(choice for choice, _ in found if isinstance(choice, _InfeasibleSize)),
        batches=tuple(sorted(best, key=lambda choice: choice.batch_size)),
    )


def every_size(cluster: Cluster) -> list[Cluster]:
    """Return all parts of a cluster: accelerators of the first node one by one, then node by node."""
    nodes = tuple(node for node in cluster.nodes if node.accelerators)
    parts = [Cluster(nodes=(replace(nodes[0], accelerators=count),)) for count in range(1, nodes[0].accelerators)]
    return parts + [Cluster(nodes=nodes[:count]) for count in range(1, len(nodes) + 1)]


def doubling(sizes: Sequence[Cluster]) -> list[int]:
    """Return the indices in all sizes of 1, 2, 4 ... accelerators of a node, 1, 2, 4 ... nodes, and the last."""
    node = len(sizes) - len(sizes[-1].nodes)
    powers = [2**power for power in range(len(sizes).bit_length())]
    within = [power - 1 for power in powers if power <= node]
    return sorted({*within, *(node - 1 + power for power in powers if node - 1 + power < len(sizes)), len(sizes) - 1})


def best_of(choices: Sequence[ClusterChoice], aim: Goal) -> ClusterChoice:
    """Return the best choice by the aim; of equally fast ones the smallest, of equally cheap ones the fastest."""
    if aim == "smallest":
        return min(choices, key=lambda choice: (choice.accelerators, choice.total_s))
    if aim == "fastest":
        limit = TIE_RATIO * min(choice.total_s for choice in choices)
        tied = [choice for choice in choices if choice.total_s <= limit]
        return min(tied, key=lambda choice: (choice.accelerators, choice.total_s))
    limit = TIE_RATIO * min(choice.dollars or 0.0 for choice in choices)
    return min((choice for choice in choices if (choice.dollars or 0.0) <= limit), key=lambda choice: choice.total_s)


_SizeResult = tuple[ClusterChoice | _InfeasibleSize, Ranking]


def _search_sizes(question: PlanRequest, sizes: Sequence[Cluster], request: SizingRequest) -> list[_SizeResult]:
    """Return the best choice at each size; for `smallest`, also search between the last too small size and the next."""
    found = {place: _best_at_size(replace(question, cluster=sizes[place]), request) for place in doubling(sizes)}
    if request.aim == "smallest":
        fits = min((place for place, (best, _) in found.items() if isinstance(best, ClusterChoice)), default=0)
        below = max((place for place in found if place < fits), default=-1)
        while fits - below > 1:
            middle = (below + fits) // 2
            found[middle] = _best_at_size(replace(question, cluster=sizes[middle]), request)
            below, fits = (below, middle) if isinstance(found[middle][0], ClusterChoice) else (middle, fits)
    return [found[place] for place in sorted(found)]


def _feasible(found: Sequence[_SizeResult]) -> list[ClusterChoice]:
    return [choice for choice, _ in found if isinstance(choice, ClusterChoice)]


def _best_at_size(question: PlanRequest, request: SizingRequest) -> _SizeResult:
    """Return the best choice on all accelerators of a cluster, and the ranking, its simplest best plan first."""
    cluster, found = question.cluster, search_plans(question)
    plan, steps = best_plan(question, found), request.steps_with(question.batch_size)
    if plan is None:
        return _InfeasibleSize(accelerators=cluster.accelerators, nearest=found.misfits[0]), found
    found = replace(found, plans=(plan, *(other for other in found.plans if other.text != plan.text)))
    goodput = _goodput(plan, cluster.accelerators, request.mtbf_hours) if request.mtbf_hours else None
    total_s = steps * estimate_of(plan).target_s / (goodput.share if goodput else 1.0)
    dollars = _dollars_an_hour(cluster, request.price)
    choice = ClusterChoice(
        accelerators=cluster.accelerators,
        nodes=len(cluster.nodes),
        batch_size=question.batch_size,
        steps=steps,
        plan=plan,
        goodput=goodput,
        total_s=total_s,
        dollars_an_hour=dollars,
        dollars=None if dollars is None else dollars * total_s / 3600,
    )
    return choice, found


def _goodput(plan: Plan, devices: int, mtbf_hours: float) -> _Goodput:
    """Return the goodput by Young (1974).

    Of the time, C / tau + tau / (2 M) + R / M are lost, least at tau = sqrt(2 C M).
    """
    failure_s = mtbf_hours * 3600 / devices
    copy_s = max(estimate_of(plan).stage_memory_bytes) / COPY_BYTES_PER_S
    interval_s = math.sqrt(2 * copy_s * failure_s)
    lost = copy_s / interval_s + interval_s / (2 * failure_s) + RECOVER_S / failure_s
    return _Goodput(share=max(1 - lost, 0.01), interval_s=interval_s)


def _dollars_an_hour(cluster: Cluster, price: Price) -> float | None:
    """Return the dollars of an hour of all accelerators; None where a price is unknown."""
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


# --- Tables and pages -------------------------------------------------------------------------------------------------


_SHOWN_OTHERS = 6
_NUMBERS = ("accelerators", "time", "cost", "goodput", "batch size", "steps to target")  # headings of columns


def _what_if_table(answer: WhatIf) -> RenderableType:
    """Return the answer for the terminal."""
    estimate = estimate_of(answer.chosen.plan)
    parts = [facts_table(_fact_rows(answer)), estimate_table(estimate), _table("Accelerators", *_size_rows(answer))]
    batches, others = _batch_rows(answer), _other_rows(answer)
    if batches[1]:
        parts.append(_table("Batch sizes", *batches))
    if others:
        parts.append(others_table(others))
    head = Text.assemble(("Plan  ", "bold"), (_headline(answer), "bold green"))
    return Group(head, *(Padding(part, (1, 0, 0, 2)) for part in parts))


def _headline(answer: WhatIf) -> str:
    """Return the plan and its step time in one line."""
    plan = answer.chosen.plan
    return f"{plan_name(plan)}, est. {formatting.duration(estimate_of(plan).step_s)}/step"


def _fact_rows(answer: WhatIf) -> list[tuple[str, str]]:
    """Return names and values of the question and the predictions."""
    chosen, request = answer.chosen, answer.request
    estimate = estimate_of(chosen.plan)
    device = find_accelerator(answer.cluster.kinds[0])
    assert device is not None
    parameters = formatting.count(answer.profile.parameters, "parameter")
    used = "all" if chosen.accelerators == answer.cluster.accelerators else f"{chosen.accelerators:,}"
    rows = [
        ("model", f"{parameters}, batch {chosen.batch_size:,}, {chosen.plan.precision}"),
        ("cluster", f"{answer.cluster}; predicted, not measured"),
        ("used", f"{used} of {answer.cluster.accelerators:,} accelerators: {request.aim}, {_GOALS[request.aim]}"),
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
        source = f"{request.price}, {_price_source(answer)}" if isinstance(request.price, str) else "as given"
        rows.append(("cost", f"${chosen.dollars_an_hour:,.2f} an hour ({source}), {_dollars(chosen)} in all"))
    if answer.profile.untraced:
        stopped = f"tracing the model raised {answer.profile.untraced}"
        rows.append(("note", f"{stopped}: activations are not counted, operations are two a parameter and token"))
    return rows


def _price_source(answer: WhatIf) -> str:
    """Return where the prices of the cluster's accelerators are from."""
    found = [find_accelerator(kind) for kind in answer.cluster.kinds]
    return " and ".join(dict.fromkeys(each.price_source or each.source for each in found if each))


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
    if not answer.request.batch_sizes:
        return (), []
    none = ("-", "-", "-", "-", "", "no plan fits")
    found: dict[int, tuple[str, ...]] = dict.fromkeys(answer.request.batch_sizes, none)
    found |= {choice.batch_size: (f"{choice.accelerators:,}", *_figures(answer, choice)) for choice in answer.batches}
    headings = ("batch size", "steps to target", "accelerators", "time", "cost", "goodput", "", "best plan")
    return headings, [
        (f"{size:,}", f"{answer.request.steps_with(size):,}", *row) for size, row in sorted(found.items())
    ]


def _reason(plan: Plan, best: Plan) -> str:
    """Say why a plan was not chosen. A model is divided only where that is clearly faster."""
    return "slower" if estimate_of(plan).target_s > estimate_of(best).target_s else "not clearly faster"


def _other_rows(answer: WhatIf) -> list[tuple[str, str, str]]:
    """Return the best plan of each other strategy, and the nearest ones that do not fit."""
    plans, misfits = first_of_strategies(answer.plans), first_of_strategies(answer.misfits)
    best, *others = plans.values()
    rows = [(f"{plan.strategy}: {plan_name(plan)}", _reason(plan, best), compare_plans(plan, best)) for plan in others]
    rows += [
        (infeasible_name(misfit), "not possible", f"{misfit.reason}; {misfit.hint}")
        for name, misfit in misfits.items()
        if name not in plans
    ]
    return rows[:_SHOWN_OTHERS]


def _figures(answer: WhatIf, choice: ClusterChoice) -> tuple[str, ...]:
    goodput = formatting.percent(choice.goodput.share) if choice.goodput else "-"
    mark = "chosen" if choice is answer.chosen else ""
    return formatting.duration(choice.total_s), _dollars(choice), goodput, mark, plan_name(choice.plan)


def _dollars(choice: ClusterChoice) -> str:
    return "-" if choice.dollars is None else formatting.dollars(choice.dollars)


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
        curves=list(map(Markup, _curves(answer))),
        sizes=_size_rows(answer),
        batches=_batch_rows(answer),
        others=(("plan", "", "why"), _other_rows(answer)),
        numbers=_NUMBERS,
    )


def _curves(answer: WhatIf) -> list[str]:
    """Draw time and cost by the number of accelerators; nothing for one size."""
    sizes, chosen = answer.sizes, answer.sizes.index(answer.chosen)
    costs = [] if answer.chosen.dollars is None else [size.dollars or 0.0 for size in sizes]
    return scaling_charts([size.accelerators for size in sizes], [size.total_s for size in sizes], costs, chosen)


def _memory_rows(estimate: Estimate, room_bytes: int) -> Iterator[tuple[str, str, float]]:
    """Yield stages with the memory they need; equal neighbours together."""
    held = list(enumerate(estimate.stage_memory_bytes))
    for said, same in groupby(held, key=lambda item: formatting.size(item[1])):
        run = list(same)
        first, last = run[0][0], run[-1][0]
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        yield name if len(held) > 1 else "device", said, 100 * run[0][1] / room_bytes
