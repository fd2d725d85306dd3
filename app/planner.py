"""Propose, rank, explain. Pure: needs neither Ray nor a framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

from trainwright.core.cluster import Cluster
from trainwright.core.errors import PlanError, ResourceError, nearest
from trainwright.core.job import Job
from trainwright.core.plan import Infeasible, Plan, Rejected
from trainwright.core.profile import ModelProfile
from trainwright.planview import plan_html, plan_text
from trainwright.strategies import STRATEGIES
from trainwright.strategies.costs import room_of


@dataclass(frozen=True, kw_only=True, repr=False)
class Decision:
    """The chosen plan and the others, with reasons. Prints as a table, shows as HTML in a notebook."""

    chosen: Plan
    rejected: tuple[Rejected, ...]
    infeasible: tuple[Infeasible, ...]
    profile: ModelProfile
    cluster: Cluster

    def __repr__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)


def choose(profile: ModelProfile, cluster: Cluster, job: Job) -> Decision:
    """The best plan for this job on this cluster.

    Raises:
        ResourceError: the job asks for more than the cluster has.
        PlanError: no strategy can run the job, or the pinned one cannot.
    """
    allowed = usable(cluster, job)
    names = _names(job, profile.framework)
    suited = {name: strategy for name, strategy in STRATEGIES.items() if profile.framework in strategy.ENGINES}
    proposals = {name: _proposal(name, strategy, profile, allowed, job) for name, strategy in suited.items()}
    infeasible = tuple(item for item in proposals.values() if isinstance(item, Infeasible))
    backend = profile.keras_backend
    plans = {name: replace(item, keras_backend=backend) for name, item in proposals.items() if isinstance(item, Plan)}
    eligible = sorted((plan for name, plan in plans.items() if name in names), key=_predicted_s)
    if not eligible:
        reasons = "; ".join(f"{item.strategy}: {item.reason} ({item.hint})" for item in infeasible)
        raise PlanError("no plan can run this job", where=reasons, remedy="change what a reason above names")
    chosen = eligible[0]
    job.check_plan(chosen)
    rejected = tuple(_reject(plan, chosen, names) for plan in plans.values() if plan is not chosen)
    return Decision(chosen=chosen, rejected=rejected, infeasible=infeasible, profile=profile, cluster=cluster)


def _proposal(name: str, strategy: ModuleType, profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """What a strategy proposes, if it has an engine for whose steps the job wants."""
    if job.run == "fit" and not hasattr(strategy, "FIT"):
        reason = getattr(strategy, "NO_FIT", f'run="fit" is Keras\' own, and this model is of {profile.framework}')
        return Infeasible(strategy=name, reason=reason, hint="leave run= out: trainwright's steps train any model")
    proposal: Plan | Infeasible = strategy.propose(profile, cluster, job)
    return proposal


def _names(job: Job, framework: str) -> tuple[str, ...]:
    """The strategies that the job allows."""
    if job.strategy is None:
        return tuple(STRATEGIES)
    if job.strategy not in STRATEGIES:
        raise PlanError(f"strategy={job.strategy!r} is not known", remedy=nearest(job.strategy, STRATEGIES))
    if framework not in STRATEGIES[job.strategy].ENGINES:
        suited = [name for name, strategy in STRATEGIES.items() if framework in strategy.ENGINES]
        others = ", ".join(name for name in STRATEGIES[job.strategy].ENGINES if name != "reference")
        raise PlanError(
            f"strategy={job.strategy!r} is for models of {others}, and this one is of {framework}",
            remedy=f"use {', '.join(suited)}",
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


def _predicted_s(plan: Plan) -> float:
    return plan.estimate.step_s if plan.estimate else float("inf")


def _reject(plan: Plan, chosen: Plan, names: tuple[str, ...]) -> Rejected:
    if plan.strategy not in names:
        slower = _predicted_s(chosen) / _predicted_s(plan)
        said = f", though predicted {slower:.1f} times faster" if slower > 1 else ""
        return Rejected(plan=plan, reason=f"{chosen.strategy} is pinned{said}")
    ratio = _predicted_s(plan) / _predicted_s(chosen)
    return Rejected(plan=plan, reason=f"predicted {ratio:.2f} times the step time of {chosen.strategy}")
