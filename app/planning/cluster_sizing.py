"""What to rent for a job: the best plan at each size of a cluster, how long it takes, what it costs, and which to take.

Steps to a target by batch size as in McCandlish et al. (2018): S = S_min (1 + B_crit / B), so that batches far above
the critical one take no fewer steps. Failures as in Young (1974).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainwright.core.accelerators import accelerator
from trainwright.core.cluster import Cluster
from trainwright.core.errors import PlanError, ResourceError, nearest
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Infeasible, Plan
from trainwright.reporting.plan_view import misfit_name
from trainwright.strategies.search.plan_request import Question
from trainwright.strategies.search.ranking import TIE, Ranking, answer, estimate_of, simplest
from trainwright.strategies.search.remedies import remedies

Aim = Literal["fastest", "cheapest", "smallest"]
Price = Literal["on-demand", "spot"] | float
AIMS: Mapping[Aim, str] = {
    "fastest": "least time",
    "cheapest": "least dollars for the run",
    "smallest": "fewest accelerators on which the model fits",
}
COPY_BYTES_PER_S = 10e9  # of a device's state to its host, for a checkpoint: assumed
RECOVER_S = 60.0  # from a failure to the next step, beside what is done again: assumed


@dataclass(frozen=True, kw_only=True)
class Wishes:
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
    aim: Aim = "fastest"
    price: Price = "on-demand"
    mtbf_hours: float | None = None
    critical_batch: float | None = None
    batch_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises PlanError for what makes no sense."""
        if self.aim not in AIMS:
            raise PlanError(f"{self.aim!r} is no aim", where="for", remedy=nearest(self.aim, AIMS))
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
class Goodput:
    """What failures leave of the time.

    Attributes:
        share: of the time in steps that count.
        interval_s: between checkpoints, the best by Young (1974).
    """

    share: float
    interval_s: float


@dataclass(frozen=True, kw_only=True)
class Choice:
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
    goodput: Goodput | None
    total_s: float
    dollars_an_hour: float | None
    dollars: float | None


@dataclass(frozen=True, kw_only=True)
class Unfit:
    """A size at which no plan fits, and what comes nearest."""

    accelerators: int
    nearest: Infeasible


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found.

    Attributes:
        chosen: the best by the aim.
        ranking: all plans at its size, with its batch.
        sizes: the best of each size with the chosen batch, by accelerators.
        unfit: sizes at which nothing fits, likewise.
        batches: the best of each batch size by the aim, by batch size.
    """

    chosen: Choice
    ranking: Ranking
    sizes: tuple[Choice, ...]
    unfit: tuple[Unfit, ...]
    batches: tuple[Choice, ...]


def compare(profile: ModelProfile, cluster: Cluster, wishes: Wishes) -> Comparison:
    """Look at 1, 2, 4 ... accelerators of a node, 1, 2, 4 ... nodes and all, with each batch size.

    Raises:
        ResourceError: the cluster has no accelerator, one that is not in the table, or the cheapest has no price.
        PlanError: the model fits nowhere, or its batch leaves no plan; names what comes nearest.
    """
    if not cluster.accelerators:
        raise ResourceError("a cluster of CPUs has no data sheet", where="cluster", remedy="leave cluster= out")
    if wishes.aim == "cheapest" and _dollars(cluster, wishes.price) is None:
        remedy = "give dollars an hour of one accelerator: price=2.50"
        raise ResourceError(f"no {wishes.price} price is known of {' or '.join(cluster.kinds)}", remedy=remedy)
    sizes = every_size(cluster)
    batch_sizes = dict.fromkeys((wishes.batch_size, *wishes.batch_sizes))
    looked = {batch_size: _looked(profile, sizes, wishes, batch_size) for batch_size in batch_sizes}
    best = [best_of(choices, wishes.aim) for choices in map(_choices, looked.values()) if choices]
    if not best:
        raise _nowhere(_asked(profile, cluster, wishes, wishes.batch_size), looked[wishes.batch_size])
    chosen = best_of(best, wishes.aim)
    found = looked[chosen.batch_size]
    return Comparison(
        chosen=chosen,
        ranking=next(ranking for choice, ranking in found if choice is chosen),
        sizes=tuple(_choices(found)),
        unfit=tuple(choice for choice, _ in found if isinstance(choice, Unfit)),
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


def best_of(choices: Sequence[Choice], aim: Aim) -> Choice:
    """By the aim; of those as quick the smallest, of those as cheap the quickest."""
    if aim == "smallest":
        return min(choices, key=lambda choice: (choice.accelerators, choice.total_s))
    if aim == "fastest":
        limit = TIE * min(choice.total_s for choice in choices)
        tied = [choice for choice in choices if choice.total_s <= limit]
        return min(tied, key=lambda choice: (choice.accelerators, choice.total_s))
    limit = TIE * min(choice.dollars or 0.0 for choice in choices)
    return min((choice for choice in choices if (choice.dollars or 0.0) <= limit), key=lambda choice: choice.total_s)


_Found = tuple[Choice | Unfit, Ranking]


def _looked(profile: ModelProfile, sizes: Sequence[Cluster], wishes: Wishes, batch_size: int) -> list[_Found]:
    """What is best at each size; for the smallest, sizes between the last that is too small and the next too."""
    found = {place: _best(profile, sizes[place], wishes, batch_size) for place in doubling(sizes)}
    if wishes.aim == "smallest":
        fits = min((place for place, (best, _) in found.items() if isinstance(best, Choice)), default=0)
        below = max((place for place in found if place < fits), default=-1)
        while fits - below > 1:
            middle = (below + fits) // 2
            found[middle] = _best(profile, sizes[middle], wishes, batch_size)
            below, fits = (below, middle) if isinstance(found[middle][0], Choice) else (middle, fits)
    return [found[place] for place in sorted(found)]


def _choices(found: Sequence[_Found]) -> list[Choice]:
    return [choice for choice, _ in found if isinstance(choice, Choice)]


def _best(profile: ModelProfile, cluster: Cluster, wishes: Wishes, batch_size: int) -> _Found:
    """On all accelerators of a cluster; the ranking has the simplest of its best plans in front."""
    found = answer(_asked(profile, cluster, wishes, batch_size))
    if not found.plans:
        return Unfit(accelerators=cluster.accelerators, nearest=found.misfits[0]), found
    plan, steps = simplest(found.plans), wishes.steps_with(batch_size)
    found = replace(found, plans=(plan, *(other for other in found.plans if other is not plan)))
    goodput = _goodput(plan, cluster.accelerators, wishes.mtbf_hours) if wishes.mtbf_hours else None
    total_s = steps * estimate_of(plan).target_s / (goodput.share if goodput else 1.0)
    dollars = _dollars(cluster, wishes.price)
    choice = Choice(
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


def _asked(profile: ModelProfile, cluster: Cluster, wishes: Wishes, batch_size: int) -> Question:
    return Question(profile=profile, cluster=cluster, batch_size=batch_size, precision=wishes.precision)


def _nowhere(question: Question, found: Sequence[_Found]) -> PlanError:
    last = [best.nearest for best, _ in found if isinstance(best, Unfit)][-1]
    what = f"no plan fits {question.cluster}; the nearest, {misfit_name(last)}: {last.reason}"
    return PlanError(what, where="cluster", remedy=remedies(question) or last.hint)


def _goodput(plan: Plan, devices: int, mtbf_hours: float) -> Goodput:
    """By Young (1974): C / tau + tau / (2 M) + R / M of the time are lost, least at tau = sqrt(2 C M)."""
    failure_s = mtbf_hours * 3600 / devices
    copy_s = max(estimate_of(plan).stage_memory_bytes) / COPY_BYTES_PER_S
    interval_s = math.sqrt(2 * copy_s * failure_s)
    lost = copy_s / interval_s + interval_s / (2 * failure_s) + RECOVER_S / failure_s
    return Goodput(share=max(1 - lost, 0.01), interval_s=interval_s)


def _dollars(cluster: Cluster, price: Price) -> float | None:
    """An hour of all accelerators."""
    if isinstance(price, int | float):
        return price * cluster.accelerators
    total = 0.0
    for kind in cluster.kinds:
        device = accelerator(kind)
        each = device and (device.spot_price if price == "spot" else device.price)
        if not each:
            return None
        total += each * sum(node.accelerators for node in cluster.nodes if node.kind == kind)
    return total
