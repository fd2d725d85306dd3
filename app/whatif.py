"""A job on a cluster that is not there: the best plan, how long it takes, what it costs, and why not another."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright import words
from trainwright.core.accelerators import accelerator
from trainwright.core.cluster import Cluster
from trainwright.core.errors import PlanError, ResourceError
from trainwright.core.plan import Estimate, Mesh, Plan
from trainwright.core.profile import ModelProfile
from trainwright.planview import estimate_table
from trainwright.strategies.ranking import Misfit, ranking

Price = Literal["on-demand", "spot"]
COPY_BYTES_PER_S = 10e9  # of a device's state to its host, for a checkpoint: assumed
RECOVER_S = 60.0  # from a failure to the next step, beside what is done again: assumed
OTHERS = 6
TIE = 1.02  # times the best step: the simplest of these is chosen


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What failures leave of the time.

    Attributes:
        share: of the time in steps that count.
        interval_s: between checkpoints, the best by Young (1974).
    """

    share: float
    interval_s: float


@dataclass(frozen=True, kw_only=True, repr=False)
class WhatIf:
    """The answer. Prints as a table.

    Attributes:
        profile, cluster: what was asked about.
        batch_size: global.
        steps: of the whole run.
        plans: that fit, best first; of those that are as good, the simplest comes first.
        misfits: that do not, the nearest to fitting first.
        dollars_an_hour: of all accelerators; None where the table has no price.
        price: which one.
        goodput: None where no mean time between failures was given.
    """

    profile: ModelProfile
    cluster: Cluster
    batch_size: int
    steps: int
    plans: tuple[Plan, ...]
    misfits: tuple[Misfit, ...]
    dollars_an_hour: float | None
    price: Price
    goodput: Goodput | None

    @property
    def total_s(self) -> float:
        """Seconds of the run with the best plan, failures included."""
        return self.steps * estimate_of(self.plans[0]).step_s / (self.goodput.share if self.goodput else 1.0)

    def __repr__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=110, color_system=None, force_terminal=False, force_jupyter=False)
        console.print(what_if_table(self))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def what_if(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch_size: int,
    precision: str,
    steps: int,
    price: Price = "on-demand",
    mtbf_hours: float | None = None,
) -> WhatIf:
    """Rank all plans for a cluster with accelerators.

    Args:
        steps: of the whole run.
        price: on demand, or of machines that may be taken back.
        mtbf_hours: mean time between failures of one accelerator, with all that belongs to it.

    Raises:
        ResourceError: the cluster has no accelerator, or one that is not in the table.
        PlanError: the model fits nowhere, or its batch leaves no plan; names what comes nearest.
    """
    if not cluster.accelerators:
        raise ResourceError("a cluster of CPUs has no data sheet", where="cluster", remedy="leave --cluster out")
    found = ranking(profile, cluster, batch_size=batch_size, precision=precision)
    if not found.plans:
        nearest = found.misfits[0]
        raise PlanError(
            f"no plan fits {cluster}; the nearest, {name_of(nearest.plan)}: {nearest.reason}",
            where="cluster",
            remedy=nearest.hint,
        )
    plans = _simplest_first(found.plans)
    goodput = _goodput(plans[0], cluster.accelerators, mtbf_hours) if mtbf_hours else None
    return WhatIf(
        profile=profile,
        cluster=cluster,
        batch_size=batch_size,
        steps=steps,
        plans=plans,
        misfits=found.misfits,
        dollars_an_hour=_dollars(cluster, price),
        price=price,
        goodput=goodput,
    )


def what_if_table(answer: WhatIf) -> RenderableType:
    """The answer for the terminal."""
    best = answer.plans[0]
    estimate = estimate_of(best)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(answer, best, estimate):
        facts.add_row(name, Text(value))
    others = Table(title="Not chosen", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for heading in ("plan", "", "why"):
        others.add_column(heading, header_style="dim", overflow="fold")
    for row in _others(answer):
        others.add_row(*map(Text, row))
    head = Text.assemble(
        ("Plan  ", "bold"), (f"{name_of(best)}, est. {words.duration(estimate.step_s)}/step", "bold green")
    )
    return Group(head, *(Padding(part, (1, 0, 0, 2)) for part in (facts, estimate_table(estimate), others)))


def name_of(plan: Plan) -> str:
    """Degrees and choices in words: `pipeline 8 x data 16 (ZeRO-1) x tensor 8, micro-batch 2, 1f1b, recompute full`."""
    zero = f" (ZeRO-{plan.zero})" if plan.zero else ""
    mesh: Mesh = plan.mesh
    degrees = [
        f"pipeline {mesh.pipeline}" if mesh.pipeline > 1 else "",
        f"data {mesh.data}" if mesh.data > 1 else "",
        f"shard {mesh.shard}{zero}" if mesh.shard > 1 else "",
        f"tensor {mesh.tensor}" if mesh.tensor > 1 else "",
    ]
    parts = [" x ".join(filter(None, degrees)) or "one device", f"micro-batch {plan.micro_batch}", plan.schedule]
    return ", ".join(filter(None, [*parts, "" if plan.recompute == "none" else f"recompute {plan.recompute}"]))


def estimate_of(plan: Plan) -> Estimate:
    """Of a plan that was ranked."""
    assert plan.estimate is not None
    return plan.estimate


def _simplest_first(plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """With the simplest of the best in front."""
    limit = TIE * estimate_of(plans[0]).step_s
    tied = [plan for plan in plans if estimate_of(plan).step_s <= limit]
    chosen = min(tied, key=_complexity)
    return (chosen, *(plan for plan in plans if plan is not chosen))


def _complexity(plan: Plan) -> tuple[int, ...]:
    """Fewer kinds of parallelism, then less of each that costs something."""
    mesh = plan.mesh
    kinds = sum(degree > 1 for degree in (mesh.pipeline, mesh.data, mesh.shard, mesh.tensor))
    return kinds, mesh.pipeline, mesh.tensor, plan.zero, plan.recompute != "none"


def _facts(answer: WhatIf, best: Plan, estimate: Estimate) -> list[tuple[str, str]]:
    device = accelerator(answer.cluster.kinds[0])
    assert device is not None
    parameters = words.count(answer.profile.parameters, "parameter")
    rows = [
        ("model", f"{parameters}, batch {answer.batch_size}, {best.precision}"),
        ("cluster", f"{answer.cluster}; nothing of it was asked or measured"),
        ("step, predicted", f"{words.duration(estimate.step_s)} ({words.duration(estimate.low_s)} to "
         f"{words.duration(estimate.high_s)}, nine of ten)"),
        ("memory by stage", f"{_memory(estimate)} of {words.size(device.memory_bytes)}"),
    ]  # fmt: skip
    if best.stages:
        rows.append(("layers by stage", _runs(best.stages)))
    rows.append((f"all {answer.steps:,} steps", words.duration(answer.total_s)))
    if answer.goodput:
        every = words.duration(answer.goodput.interval_s)
        rows.append(("goodput", f"{words.share(answer.goodput.share)} with a checkpoint every {every}"))
    if answer.dollars_an_hour is not None:
        total = answer.dollars_an_hour * answer.total_s / 3600
        rows.append(("cost", f"${answer.dollars_an_hour:,.2f} an hour ({answer.price}, list), ${total:,.2f} in all"))
    if answer.profile.untraced:
        stopped = f"tracing the model raised {answer.profile.untraced}"
        rows.append(("note", f"{stopped}: activations are not counted, operations are two a parameter and token"))
    if not best.engine:
        rows.append(("note", "trainwright has no engine for this plan yet"))
    return rows


def _others(answer: WhatIf) -> list[tuple[str, str, str]]:
    """The best of each other kind, and the nearest misses."""
    best = estimate_of(answer.plans[0]).step_s
    shown = {answer.plans[0].strategy}
    rows = []
    for plan in answer.plans:
        if plan.strategy not in shown:
            shown.add(plan.strategy)
            ratio = estimate_of(plan).step_s / best
            rows.append((name_of(plan), "slower", f"predicted {ratio:.2f} times the step time"))
    for misfit in answer.misfits:
        if misfit.plan.strategy not in shown:
            shown.add(misfit.plan.strategy)
            rows.append((name_of(misfit.plan), "not possible", f"{misfit.reason}; {misfit.hint}"))
    return rows[:OTHERS]


def _memory(estimate: Estimate) -> str:
    low, high = min(estimate.stage_memory_bytes), max(estimate.stage_memory_bytes)
    return words.size(high) if low == high else f"{words.size(low)} to {words.size(high)}"


def _runs(stages: Iterable[int]) -> str:
    """`4, 6 x 3, 5`: equal neighbours together."""
    runs: list[list[int]] = []
    for size in stages:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return ", ".join(f"{size} x {count}" if count > 1 else str(size) for size, count in runs)


def _goodput(plan: Plan, devices: int, mtbf_hours: float) -> Goodput:
    """By Young (1974): C / tau + tau / (2 M) + R / M of the time are lost, least at tau = sqrt(2 C M)."""
    failure_s = mtbf_hours * 3600 / devices
    copy_s = max(estimate_of(plan).stage_memory_bytes) / COPY_BYTES_PER_S
    interval_s = math.sqrt(2 * copy_s * failure_s)
    lost = copy_s / interval_s + interval_s / (2 * failure_s) + RECOVER_S / failure_s
    return Goodput(share=max(1 - lost, 0.01), interval_s=interval_s)


def _dollars(cluster: Cluster, price: Price) -> float | None:
    total = 0.0
    for node in cluster.nodes:
        device = accelerator(node.kind)
        each = device and (device.spot_price if price == "spot" else device.price)
        if node.accelerators and not each:
            return None
        total += node.accelerators * (each or 0.0)
    return total
