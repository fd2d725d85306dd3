"""Propose, rank, explain. Pure: needs neither Ray nor a framework."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from trainwright.core.accelerators import accelerator
from trainwright.core.cluster import Cluster
from trainwright.core.errors import PlanError, ResourceError, nearest
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Infeasible, Plan, Rejected
from trainwright.core.plan_spec import Pins
from trainwright.planning.replanning import contenders
from trainwright.reporting.plan_charts import timeline_svg
from trainwright.reporting.plan_view import compared, plan_html, plan_text
from trainwright.strategies import STRATEGIES, strategies_for
from trainwright.strategies.search.plan_request import Question, room_of
from trainwright.strategies.search.ranking import (
    Ranking,
    answer,
    divides,
    estimate_of,
    simplest,
    steps_alone,
    sure,
    undivided,
)
from trainwright.strategies.search.remedies import remedies

NO_ENGINE = "trainwright has no engine for it yet"
WORTH_SAYING = 1.1  # times as fast as what is pinned


@dataclass(frozen=True, kw_only=True, repr=False)
class Decision:
    """The chosen plan and the others, with reasons. Prints as a table, shows as HTML in a notebook.

    Attributes:
        chosen: the plan.
        rejected: the best of each other strategy.
        infeasible: what makes the rest impossible.
        profile: of the model, divided by layers as the job says.
        cluster: what there is.
        used: the part of it that the job may use.
        contenders: plans that are measured before the first step, the chosen one first; empty where none are.
    """

    chosen: Plan
    rejected: tuple[Rejected, ...]
    infeasible: tuple[Infeasible, ...]
    profile: ModelProfile
    cluster: Cluster
    used: Cluster
    contenders: tuple[Plan, ...] = ()

    @property
    def timeline(self) -> str:
        """One step of the chosen plan as it is expected, as SVG; empty where there is none that all take together."""
        return "" if steps_alone(self.chosen) else timeline_svg(self.profile, self.used, self.chosen)

    def __repr__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)


def choose(profile: ModelProfile, cluster: Cluster, job: Job) -> Decision:
    """The best plan for this job on this cluster.

    Raises:
        ResourceError: the job asks for more than the cluster has.
        PlanError: no strategy can run the job, or what is pinned cannot.
    """
    if job.precision == "fp16" and profile.framework == "tensorflow":
        raise PlanError('precision="fp16" is for models of torch', where="precision", remedy='use precision="bf16"')
    allowed, unknown = _known(usable(cluster, job))
    question = Question.of(job, profile, allowed)
    names = _names(job, profile.framework, question.pins)
    pins, found = question.pins, answer(question)
    apart = job.strategy is not None or asks_alone(pins)
    plans = found.plans if apart else found.unasked
    eligible = [plan for plan in plans if plan.engine and plan.strategy in names and pins.allow(plan)]
    if not eligible:
        raise _nothing(question, found, names)
    chosen = sure(question, simplest(undivided(eligible)))
    job.check_plan(chosen)
    own = (*_untraced(profile), *unknown, *_shared(allowed, chosen), *_stale(eligible, chosen))
    notes = (*own, *_not_the_best(question, job, chosen), *_better_alone(question, chosen))
    rejected = tuple(_reject(plan, chosen, names, pins) for plan in _others(found.plans, chosen))
    planned = {plan.strategy for plan in found.plans}
    return Decision(
        chosen=replace(chosen, notes=(*chosen.notes, *notes)),
        rejected=rejected,
        infeasible=tuple(_nearest(found.misfits, planned)),
        profile=question.profile,
        cluster=cluster,
        used=allowed,
        contenders=contenders(chosen, eligible, job),
    )


def asks_alone(pins: Pins) -> bool:
    """Whether what is pinned is for ranks that step alone; `sync` is done by all."""
    served = {"servers", "wire", "local_steps"} & pins.choices.keys()
    return bool(served) or pins.choices.get("consistency", "sync") != "sync"


def _untraced(profile: ModelProfile) -> tuple[str, ...]:
    """That the model's operations are not known."""
    what = f"tracing the model raised {profile.untraced}: activations are not counted, operations are guessed"
    return (what,) if profile.untraced else ()


def _shared(cluster: Cluster, chosen: Plan) -> Iterator[str]:
    """That CPUs of larger nodes are left over, and that servers take some of what workers have."""
    if cluster.accelerators:
        return
    least, most = (pick(node.cpus for node in cluster.nodes) for pick in (min, max))
    if least < most and chosen.workers > 1:
        yield f"nodes have {least:g} to {most:g} CPUs: each worker has as many as those of the smallest node"
    if chosen.topology == "independent":
        yield "servers compute on the workers' CPUs, which is not predicted: on a small machine a step takes longer"


def _stale(eligible: Iterable[Plan], chosen: Plan) -> tuple[str, ...]:
    """Which consistency was chosen where the job says none, and why."""
    if chosen.topology != "independent":
        return ()
    target_s: dict[str, float] = {}
    for plan in eligible:
        if plan.strategy == chosen.strategy:
            target_s.setdefault(plan.consistency, estimate_of(plan).target_s)
    best = min(target_s, key=target_s.__getitem__)
    if "sync" not in target_s or best == "sync":
        return ()
    ratio = f"{target_s['sync'] / target_s[best]:.2f} times as quick to the same loss as sync"
    if chosen.consistency == "sync":
        return (f"{best} is predicted {ratio}: too little to give up what equals one device; consistency= asks for it",)
    return (f"{chosen.consistency} was chosen, since it is predicted {ratio}; consistency='sync' equals one device",)


def _names(job: Job, framework: str, pins: Pins) -> Collection[str]:
    """The strategies that the job allows."""
    if job.strategy is None:
        return tuple(name for name in STRATEGIES)
    if job.strategy not in STRATEGIES:
        raise PlanError(f"strategy={job.strategy!r} is not known", remedy=nearest(job.strategy, STRATEGIES))
    suited = strategies_for(framework)
    if job.strategy not in suited:
        others = ", ".join(name for name in STRATEGIES[job.strategy].FRAMEWORKS if name != "reference")
        raise PlanError(
            f"strategy={job.strategy!r} is for models of {others}, and this one is of {framework}",
            remedy=f"use {', '.join(suited)}",
        )
    if asks_alone(pins) and not hasattr(STRATEGIES[job.strategy], "ALONE"):
        others = " or ".join(name for name, module in suited.items() if hasattr(module, "ALONE"))
        raise PlanError(
            f"{pins} is for workers that step alone, and strategy={job.strategy!r} has them step together",
            where="strategy",
            remedy=f"use {others or 'a model of torch'}, or leave that out",
        )
    return (job.strategy,)


def usable(cluster: Cluster, job: Job) -> Cluster:
    """The part of the cluster that the job may use. Raises ResourceError for a demand that it can never meet."""
    wanted = job.accelerator.upper()
    if wanted in ("GPU", "TPU"):
        cluster = cluster.only(wanted)
        if not cluster.accelerators:
            raise ResourceError(
                f"needs {job.workers or 1} {wanted}, the cluster has 0",
                where="accelerator",
                remedy="set accelerator='cpu'",
            )
    elif wanted == "CPU":
        cluster = cluster.without_accelerators()
    elif cluster.accelerators:
        cluster = cluster.only(cluster.accelerator)  # a head without any is no place for a worker
    room = room_of(cluster)
    needed = job.min_workers or job.workers
    if needed and needed > room:
        what = cluster.accelerator or "CPU slots"
        raise ResourceError(
            f"needs {needed} {what}, the cluster has {room}", where="workers", remedy=f"set workers={room}"
        )
    return cluster


def _known(cluster: Cluster) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with what nothing is known of as an accelerator without a name, and a note on each."""
    unknown = [kind for kind in cluster.kinds if accelerator(kind) is None]
    nodes = tuple(replace(node, kind="" if node.kind in unknown else node.kind) for node in cluster.nodes)
    notes = tuple(
        f"nothing is known of the accelerator {kind or 'of this cluster'}: its speed is assumed, its memory is not "
        "looked at; trainwright probe measures it"
        for kind in unknown
    )
    return Cluster(nodes=nodes), notes


def _nothing(question: Question, found: Ranking, names: Collection[str]) -> PlanError:
    """Why no plan can run the job, and what would."""
    pins = question.pins
    misfits = sorted(found.misfits, key=lambda item: item.plan is None or not pins.allow(item.plan))  # asked for: first
    reasons = [f"{item.strategy}: {item.reason} ({item.hint})" for item in _nearest(misfits) if item.strategy in names]
    asked = sorted((plan for plan in found.plans if plan.strategy in names), key=lambda plan: not pins.allow(plan))
    for plan in {plan.strategy: plan for plan in reversed(asked)}.values():
        reasons.append(f"{plan.strategy}: {NO_ENGINE if pins.allow(plan) else f'does not match {pins}'}")
    change = "change what a reason above names"
    if any(item.missing_bytes for item in found.misfits if item.strategy in names):
        found_way = remedies(question, lambda plan: bool(plan.engine) and plan.strategy in names and pins.allow(plan))
        change = found_way or change
    return PlanError("no plan can run this job", where="; ".join(reasons), remedy=change)


def _not_the_best(question: Question, job: Job, chosen: Plan) -> tuple[str, ...]:
    """That what the job pins is not the best, and by how much."""
    names = ("strategy", "plan", "workers", "accumulation", "consistency")
    pinned = {name: getattr(job, name) for name in names}
    given = ", ".join(f"{name}={value!r}" for name, value in pinned.items() if value is not None)
    if not given or question.elastic or question.devices:
        return ()
    free = [plan for plan in answer(question.free).unasked if plan.engine]
    best = simplest(undivided(free)) if free else chosen
    ratio = estimate_of(chosen).target_s / estimate_of(best).target_s
    if ratio < WORTH_SAYING:
        return ()
    return (f"without {given}, {best.strategy} on {best.workers} workers is predicted {ratio:.1f} times as fast",)


def _better_alone(question: Question, chosen: Plan) -> tuple[str, ...]:
    """That the accelerators of one kind alone would be quicker than all, which wait for the slowest."""
    kinds = question.cluster.kinds
    steps = {}
    for kind in kinds if len(kinds) > 1 and not question.workers else ():
        nodes = tuple(node for node in question.cluster.nodes if node.kind == kind)
        alone = [plan for plan in answer(replace(question, cluster=Cluster(nodes=nodes))).unasked if plan.engine]
        if alone:
            steps[kind] = estimate_of(simplest(undivided(alone))).target_s
    best = min(steps, key=steps.__getitem__, default="")
    if not best or WORTH_SAYING * steps[best] > estimate_of(chosen).target_s:
        return ()
    ratio = estimate_of(chosen).target_s / steps[best]
    why = "the slowest add little" if steps_alone(chosen) else "all accelerators wait for the slowest"
    return (f"{why}: the {best} alone are predicted {ratio:.1f} times as fast",)


def _others(plans: Iterable[Plan], chosen: Plan) -> list[Plan]:
    """The best of each other strategy, and of the chosen one's what would be quicker."""
    limit = estimate_of(chosen).target_s
    found = [plan for plan in _best(plans) if plan.strategy != chosen.strategy]
    quicker = [plan for plan in plans if plan.strategy == chosen.strategy and estimate_of(plan).target_s < limit]
    return [*found, *(plan for plan in quicker[:1] if plan.workers != chosen.workers or plan.engine == "")]


def _best(plans: Iterable[Plan]) -> list[Plan]:
    """The first plan of each strategy; one that can be carried out, where there is one."""
    found: dict[str, Plan] = {}
    for plan in plans:
        known = found.setdefault(plan.strategy, plan)
        if plan.engine and not known.engine:
            found[plan.strategy] = plan
    return list(found.values())


def _nearest(misfits: Iterable[Infeasible], but: Collection[str] = ()) -> list[Infeasible]:
    """What comes nearest to fitting of each strategy that has no plan."""
    found: dict[str, Infeasible] = {}
    for item in misfits:
        if item.strategy not in but:
            found.setdefault(item.strategy, item)
    return list(found.values())


def _reject(plan: Plan, chosen: Plan, names: Collection[str], pins: Pins) -> Rejected:
    ratio = estimate_of(plan).target_s / estimate_of(chosen).target_s
    if plan.strategy not in names or not pins.allow(plan):
        said = f", though predicted {1 / ratio:.1f} times as fast" if 1 / ratio >= WORTH_SAYING else ""
        return Rejected(plan=plan, reason=f"{chosen.strategy} is pinned{said}")
    reason = compared(plan, chosen)
    if plan.engine and divides(plan) and not divides(chosen):
        reason += "; a model is divided unmeasured where it does not fit otherwise: it takes longer than predicted"
    if plan.engine and steps_alone(plan) and not steps_alone(chosen):
        reason += "; workers step alone unasked where nodes differ, may be taken back or are far apart"
    return Rejected(plan=plan, reason=reason if plan.engine else f"{reason}; {NO_ENGINE}")
