"""Choose the plan for a job on a cluster, and explain why the other plans were not chosen.

The module also writes plans to files, reads them back, and decides how many nodes an autoscaling cluster must start. It
needs neither Ray nor a framework.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright.core import formatting
from trainwright.core.cluster import ANY_KIND, RAY_RESOURCES, Cluster, Node, find_accelerator
from trainwright.core.errors import JobError, PlanError, ResourceError, nearest
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.core.peer_options import PEER_STRATEGIES
from trainwright.core.plan import Plan, PlanConstraints, RejectedPlan
from trainwright.planning.alternative_layouts import candidate_plans
from trainwright.planning.decision import Decision, compare_plans
from trainwright.strategies import STRATEGIES, strategies_for
from trainwright.strategies.search.plan_ranking import (
    Ranking,
    best_plan,
    estimate_of,
    first_of_strategies,
    is_asynchronous,
    is_model_parallel,
    search_plans,
    suggest_changes,
)
from trainwright.strategies.search.plan_request import PlanRequest, worker_capacity

_NOTED_SPEEDUP = 1.1  # over the pinned choices, from which on a note names the faster plan


def choose(profile: ModelProfile, cluster: Cluster, job: Job) -> Decision:
    """Choose the best plan for a job on a cluster.

    Raises:
        JobError: the job's strategy is unknown.
        ResourceError: the job asks for more than the cluster has.
        PlanError: no strategy can run the job, or the pinned choices cannot.
    """
    if job.training.precision == "fp16" and profile.framework == "tensorflow":
        raise PlanError('precision="fp16" is for models of torch', where="precision", remedy='use precision="bf16"')
    usable = usable_cluster(cluster, job)
    allowed, unknown = _without_unknown_kinds(usable)
    question = replace(PlanRequest.of(job, profile, allowed), kind=pinned_kind(job, usable))
    names = _allowed_strategies(job, profile.framework, question.pins)
    pins, ranked = question.pins, search_plans(question)
    async_ok = job.planning.strategy is not None or _asks_async(pins)
    eligible = [
        plan for plan in (ranked.plans if async_ok else ranked.unasked) if plan.strategy in names and pins.allow(plan)
    ]
    chosen = best_plan(question, replace(ranked, plans=tuple(eligible)), asynchronous=True)
    if chosen is None:
        raise _no_plan_error(question, ranked, names)
    job.check_plan(chosen)
    notes = (
        *_profile_notes(profile, job), *unknown, *_cpu_notes(allowed, chosen), *_consistency_notes(eligible, chosen),
        *_note_better_unpinned(question, job, chosen), *_note_better_kind(question, chosen),
    )  # fmt: skip
    rejected = tuple(_reject(plan, chosen, names, pins) for plan in _compared_plans(ranked.plans, chosen))
    fitting, misfit_of = first_of_strategies(ranked.plans), first_of_strategies(ranked.misfits)
    return Decision(
        chosen=chosen.noted(*notes),
        rejected=rejected,
        infeasible=tuple(misfit for name, misfit in misfit_of.items() if name not in fitting),
        profile=question.profile,
        cluster=cluster,
        used=allowed,
        contenders=candidate_plans(chosen, eligible, job),
    )


def _asks_async(pins: PlanConstraints) -> bool:
    """Return whether the pinned choices need asynchronous workers; `sync` works without them."""
    async_choices = {"servers", "local_steps", *(() if pins.reduces_in_half else ("wire",))} & pins.choices.keys()
    return bool(async_choices) or pins.choices.get("consistency", "sync") != "sync"


def _profile_notes(profile: ModelProfile, job: Job) -> Iterator[str]:
    """Note unknown operations, an optimizer of 16-bit parameters, and modules that are in evaluation mode."""
    if profile.untraced:
        yield f"tracing the model raised {profile.untraced}: activations are not counted, operations are guessed"
    if profile.narrow and job.training.precision == "fp32":
        why = "small updates are lost in 16 bits"
        yield f'parameter {profile.narrow!r} is stored in 16 bits; {why}: precision="bf16" keeps such ones in float32'
    if profile.evaluating:
        first, *omitted = profile.evaluating
        more = f" and {len(omitted)} more dropouts and batch norms" if omitted else ""
        yield (
            f"in evaluation mode while the model trains: module {first!r}{more}; call train() on the model in model(), "
            "unless that is meant"
        )


def _cpu_notes(cluster: Cluster, chosen: Plan) -> Iterator[str]:
    """Note unused CPUs of larger nodes, and that servers share the workers' CPUs."""
    if cluster.accelerators:
        return
    least, most = (pick(node.cpus for node in cluster.nodes) for pick in (min, max))
    if least < most and chosen.workers > 1:
        yield f"nodes have {least:g} to {most:g} CPUs: each worker has as many as those of the smallest node"
    if chosen.topology == "independent":
        yield "servers compute on the workers' CPUs, which is not predicted: on a small machine a step takes longer"


def _consistency_notes(eligible: Iterable[Plan], chosen: Plan) -> tuple[str, ...]:
    """Note which consistency was chosen for a job that names none, and why."""
    if chosen.topology != "independent":
        return ()
    target_s_of: dict[str, float] = {}
    for plan in eligible:
        if plan.strategy == chosen.strategy:
            target_s_of.setdefault(plan.consistency, estimate_of(plan).target_s)
    best = min(target_s_of, key=target_s_of.__getitem__)
    if "sync" not in target_s_of or best == "sync":
        return ()
    ratio = f"{target_s_of['sync'] / target_s_of[best]:.2f} times as quick to the same loss as sync"
    if chosen.consistency == "sync":
        return (f"{best} is predicted {ratio}: too little to give up what equals one device; consistency= asks for it",)
    return (f"{chosen.consistency} was chosen, since it is predicted {ratio}; consistency='sync' equals one device",)


def _allowed_strategies(job: Job, framework: str, pins: PlanConstraints) -> Collection[str]:
    """Return the strategies that the job allows."""
    strategy = job.planning.strategy
    if strategy is None:
        return tuple(name for name in STRATEGIES)
    if strategy not in STRATEGIES:
        equivalent = PEER_STRATEGIES.get(strategy.lower())
        advice = f"use {equivalent}" if equivalent else nearest(strategy, STRATEGIES)
        raise JobError([f"strategy={strategy!r} is unknown: {advice}"])
    suited = strategies_for(framework)
    if strategy not in suited:
        options = ", ".join(STRATEGIES[strategy].engines)
        raise PlanError(
            f"strategy={strategy!r} is for models of {options}, and this one is of {framework}",
            remedy=f"use {', '.join(suited)}",
        )
    if _asks_async(pins) and not STRATEGIES[strategy].asynchronous:
        options = " or ".join(name for name, other in suited.items() if other.asynchronous)
        if strategy == "sharded" and pins.choices.get("wire") == "bf16":
            options = f"plan=, such as plan='dp=2,zero=2,wire=bf16', for gradients reduced in bf16; or {options}"
        raise PlanError(
            f"{pins} is for asynchronous workers, and the workers of strategy={strategy!r} are synchronous",
            where="strategy",
            remedy=f"use {options or 'a model of torch'}, or leave that out",
        )
    return (strategy,)


def usable_cluster(cluster: Cluster, job: Job) -> Cluster:
    """Return the part of the cluster that the job may use. Raises ResourceError for more workers than it can hold."""
    requested = job.scaling.accelerator.upper()
    if requested not in ANY_KIND:
        matching = cluster.of_kind(job.scaling.accelerator)
        if not matching.nodes:
            kinds = ", ".join(kind for kind in cluster.kinds if kind) or "no accelerator whose model is known"
            raise ResourceError(
                f"accelerator={job.scaling.accelerator!r}: the cluster has {kinds}",
                where="accelerator",
                remedy="name one of these, or use auto, gpu, tpu or cpu",
            )
        if len(matching.kinds) > 1:
            raise ResourceError(
                f"accelerator={job.scaling.accelerator!r}: nodes have it as {' and as '.join(matching.kinds)}",
                where="accelerator",
                remedy="Ray places workers by one name: start the nodes with the same resource accelerator_type:NAME",
            )
        cluster = matching
    elif requested in ("GPU", "TPU"):
        cluster = cluster.only(requested)
        if not cluster.accelerators:
            raise ResourceError(
                f"needs {job.scaling.workers or 1} {requested}, the cluster has 0",
                where="accelerator",
                remedy="set accelerator='cpu'",
            )
    elif requested == "CPU":
        cluster = cluster.without_accelerators()
    elif cluster.accelerators:
        cluster = cluster.only(cluster.accelerator)  # without the head node, where it has none
    slots = worker_capacity(cluster)
    needed = job.scaling.min_workers or job.scaling.workers
    if needed and needed > slots:
        resource = cluster.accelerator or "CPU slots"
        raise ResourceError(
            f"needs {needed} {resource}, the cluster has {slots}", where="workers", remedy=f"set workers={slots}"
        )
    return cluster


def pinned_kind(job: Job, usable: Cluster) -> str:
    """Return Ray's name of the accelerator model that the job asks for; empty if any model will do."""
    return "" if job.scaling.accelerator.upper() in ANY_KIND else usable.kinds[0]


def _without_unknown_kinds(cluster: Cluster) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster without the names of unknown accelerators, and a note on each of them."""
    unknown_kinds = [kind for kind in cluster.kinds if find_accelerator(kind) is None]
    nodes = tuple(replace(node, kind="" if node.kind in unknown_kinds else node.kind) for node in cluster.nodes)
    notes = tuple(
        f"the accelerator {kind or 'of this cluster'} is missing from the built-in table: its speed is assumed, and "
        "its memory is not checked; trainwright probe measures it"
        for kind in unknown_kinds
    )
    return Cluster(nodes=nodes), notes


def _no_plan_error(question: PlanRequest, ranked: Ranking, names: Collection[str]) -> PlanError:
    """Return the error that no plan can run the job, with reasons and a remedy."""
    pins = question.pins
    misfits = sorted(ranked.misfits, key=lambda item: item.plan is None or not pins.allow(item.plan))  # pinned first
    nearest_misfits = first_of_strategies(misfits).values()
    reasons = [f"{item.strategy}: {item.reason} ({item.hint})" for item in nearest_misfits if item.strategy in names]
    reasons += [f"{name}: does not match {pins}" for name in first_of_strategies(ranked.plans) if name in names]
    remedy = "change what a reason above names"
    if any(item.missing_bytes for item in ranked.misfits if item.strategy in names):
        suggestion = suggest_changes(question, lambda plan: plan.strategy in names and pins.allow(plan))
        remedy = suggestion or remedy
    return PlanError("no plan can run this job", where="; ".join(reasons), remedy=remedy)


def _note_better_unpinned(question: PlanRequest, job: Job, chosen: Plan) -> tuple[str, ...]:
    """Note that the pinned choices are not the best, and by how much."""
    names = ("strategy", "plan", "workers", "accumulation", "consistency")
    pinned = {name: job.get(name) for name in names}
    pinned_text = ", ".join(f"{name}={value!r}" for name, value in pinned.items() if value is not None)
    if not pinned_text or question.elastic or question.devices:
        return ()
    best = best_plan(question.free, search_plans(question.free)) or chosen
    ratio = estimate_of(chosen).target_s / estimate_of(best).target_s
    if ratio < _NOTED_SPEEDUP:
        return ()
    workers = formatting.count(best.workers, "worker")
    return (f"without {pinned_text}, {best.strategy} on {workers} is predicted {ratio:.1f} times as fast",)


def _note_better_kind(question: PlanRequest, chosen: Plan) -> tuple[str, ...]:
    """Note that one kind of accelerators alone would be faster than all kinds, which wait for the slowest."""
    kinds = question.cluster.kinds
    target_s_of = {}
    for kind in kinds if len(kinds) > 1 and not question.workers else ():
        nodes = tuple(node for node in question.cluster.nodes if node.kind == kind)
        one_kind = replace(question, cluster=Cluster(nodes=nodes))
        plan = best_plan(one_kind, search_plans(one_kind))
        if plan is not None:
            target_s_of[kind] = estimate_of(plan).target_s
    best = min(target_s_of, key=target_s_of.__getitem__, default="")
    if not best or _NOTED_SPEEDUP * target_s_of[best] > estimate_of(chosen).target_s:
        return ()
    ratio = estimate_of(chosen).target_s / target_s_of[best]
    why = "the slowest add little" if is_asynchronous(chosen) else "all accelerators wait for the slowest"
    return (f"{why}: the {best} alone are predicted {ratio:.1f} times as fast; accelerator={best!r} uses these",)


def _compared_plans(plans: Iterable[Plan], chosen: Plan) -> list[Plan]:
    """Return the best plan of each other strategy, and a faster plan of the chosen strategy."""
    limit = estimate_of(chosen).target_s
    first_plans = [plan for plan in first_of_strategies(plans).values() if plan.strategy != chosen.strategy]
    faster = [plan for plan in plans if plan.strategy == chosen.strategy and estimate_of(plan).target_s < limit]
    return [*first_plans, *(plan for plan in faster[:1] if plan.workers != chosen.workers)]


def _reject(plan: Plan, chosen: Plan, names: Collection[str], pins: PlanConstraints) -> RejectedPlan:
    ratio = estimate_of(plan).target_s / estimate_of(chosen).target_s
    if plan.strategy not in names or not pins.allow(plan):
        comparison = f"; this one is predicted {1 / ratio:.1f} times as fast" if 1 / ratio >= _NOTED_SPEEDUP else ""
        return RejectedPlan(plan=plan, reason=f"{chosen.strategy} is pinned{comparison}")
    reason = compare_plans(plan, chosen)
    if is_model_parallel(plan) and not is_model_parallel(chosen):
        reason += (
            "; without a measurement, a model that fits is divided only on accelerators, and where that is far quicker"
        )
    if is_asynchronous(plan) and not is_asynchronous(chosen):
        reason += (
            "; parameter servers and workers that do not wait for each other are chosen only where nodes differ, are "
            "preemptible or far apart"
        )
    return RejectedPlan(plan=plan, reason=reason)


# --- Plans in files ---------------------------------------------------------------------------------------------------


_PLAN_SUFFIX = ".json"
_PLAN_VERSION = 1


def write_plan(path: str, decision: Decision) -> None:
    """Write the chosen plan; `Job(plan=path)` asks for it again.

    Raises:
        PlanError: the file cannot be written.
    """
    if not path.endswith(_PLAN_SUFFIX):
        raise PlanError(
            f"the name of a plan file must end in {_PLAN_SUFFIX}",
            where=path,
            remedy=f"write {Path(path).stem}{_PLAN_SUFFIX}",
        )
    chosen = decision.chosen
    facts = {
        "trainwright_plan": _PLAN_VERSION,
        "strategy": chosen.strategy,
        "plan": chosen.text,
        "model": _model_facts(decision.profile),
        "cluster": _cluster_facts(decision.cluster),
        "batch_size": chosen.batch_size,
        "precision": chosen.precision,
        "step_s": chosen.estimate.step_s if chosen.estimate else None,
    }
    try:
        Path(path).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"the plan cannot be written: {error.strerror}", where=path, remedy="give another --out"
        ) from None


def apply_plan_file(job: Job, profile: ModelProfile, cluster: Cluster) -> Job:
    """Return the job with the plan of its file pinned; a job that names no file stays as it is.

    Raises:
        PlanError: the file cannot be read, or its plan was made for another model, cluster, batch or precision.
    """
    if job.planning.plan is None or not job.planning.plan.endswith(_PLAN_SUFFIX):
        return job
    facts = _read_plan(job.planning.plan)
    current_facts = {
        "model": _model_facts(profile),
        "cluster": _cluster_facts(cluster),
        "batch_size": job.batch_size,
        "precision": job.training.precision,
    }
    differences = [
        f"{name}: {_fact_text(facts[name])} in the file, {_fact_text(value)} now"
        for name, value in current_facts.items()
        if facts[name] != value
    ]
    if differences:
        raise PlanError(
            f"the plan was made for another job or cluster: {'; '.join(differences)}",
            where=job.planning.plan,
            remedy=f"write it again with trainwright plan --out {job.planning.plan}, or set plan={facts['plan']!r}",
        )
    return job.replace(plan=facts["plan"], strategy=facts["strategy"])


def _read_plan(path: str) -> dict[str, Any]:
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"the plan cannot be read: {error.strerror}", where=path, remedy="give the path of a plan file"
        ) from None
    except ValueError as error:
        raise PlanError(
            f"the file is not JSON: {error}", where=path, remedy="write it with trainwright plan --out"
        ) from None
    fields = {"strategy", "plan", "model", "cluster", "batch_size", "precision"}
    if not isinstance(facts, dict) or facts.get("trainwright_plan") != _PLAN_VERSION or not fields <= facts.keys():
        raise PlanError(
            "the file has no plan of this version", where=path, remedy="write it with trainwright plan --out"
        )
    return facts


def _model_facts(profile: ModelProfile) -> dict[str, Any]:
    layers = [(layer.parameters, layer.flops, layer.output_numbers) for layer in profile.layers]
    return {
        "parameters": profile.parameters,
        "framework": profile.framework,
        "fingerprint": hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:16],
    }


def _cluster_facts(cluster: Cluster) -> dict[str, Any]:
    """Return the facts of a cluster that a plan depends on; its machines may be replaced by equal ones."""
    nodes = sorted([node.cpus, node.accelerators, node.kind] for node in cluster.nodes)
    return {"nodes": len(nodes), "cpus": cluster.cpus, "accelerators": cluster.accelerators, "each": nodes}


def _fact_text(value: Any) -> str:
    """Return a fact as text, without the long list of nodes."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{name} {item}" for name, item in value.items() if name != "each")


# --- How many nodes a cluster starts for a job ------------------------------------------------------------------------


def expansions(cluster: Cluster, job: Job) -> Iterator[Cluster]:
    """Yield the running nodes plus the fewest that the job's first workers need; then larger clusters.

    The planner takes the first cluster with a plan, so that a model that does not fit gets more nodes. An elastic job
    starts with its `min_workers`, and grows when more nodes have joined.
    """
    cluster, step = grow_to_slots(cluster, job, _first_slots(job)), 1
    yield cluster
    while cluster.possible:
        cluster, step = cluster.grown(step), 2 * step
        yield cluster


def grow_to_slots(cluster: Cluster, job: Job, slots: int) -> Cluster:
    """Add the fewest possible nodes that give a number of slots to the running ones, or else all possible nodes."""
    kind = accelerator_kind(cluster, job)
    cluster = replace(cluster, possible=usable_nodes(cluster, kind))
    return cluster.grown(nodes_needed(cluster, kind, slots))


def accelerator_kind(cluster: Cluster, job: Job) -> str:
    """Return the accelerator that the job names, else a running one, else one to start; "" for CPUs."""
    requested = job.scaling.accelerator.upper()
    if requested not in ANY_KIND:
        return Cluster(nodes=(*cluster.nodes, *cluster.possible)).of_kind(job.scaling.accelerator).accelerator
    if requested != "AUTO":
        return "" if requested == "CPU" else requested
    kinds = {node.accelerator for node in cluster.possible}
    return cluster.accelerator or next((name for name in RAY_RESOURCES if name in kinds), "")


def usable_nodes(cluster: Cluster, kind: str) -> tuple[Node, ...]:
    """Return the usable possible nodes; for CPUs, nodes with accelerators come last."""
    if not kind:
        return tuple(sorted(cluster.possible, key=lambda node: node.accelerators > 0))
    return tuple(node for node in cluster.possible if node.accelerator == kind)


def nodes_needed(cluster: Cluster, kind: str, slots: int) -> int:
    """Return how many possible nodes must start for a number of slots of a kind; all if they are too few."""
    most = len(cluster.possible)
    for number in range(most):
        grown = cluster.grown(number)
        usable = grown.only(kind) if kind else grown.without_accelerators()
        if usable.slots >= slots:
            return number
    return most


def growth_notes(cluster: Cluster, job: Job) -> Iterator[str]:
    """Yield notes on nodes that must start for the plan, and on further nodes that could start."""
    if cluster.unseen:
        yield f"the plan uses only running nodes: {cluster.unseen}"
    if cluster.coming:
        yield f"{_count_nodes(cluster.coming)} to be started first, which can take minutes and cost money"
    possible = usable_nodes(cluster, accelerator_kind(cluster, job))
    if possible and not (job.scaling.workers or job.scaling.elastic or job.planning.plan):
        more = _count_nodes(possible)
        yield f"the cluster can start {more} more: workers= asks for them, max_workers= grows into them"


def _first_slots(job: Job) -> int:
    """Return how many worker slots the job starts with."""
    plan = job.planning.plan
    pins = PlanConstraints.parse(plan) if plan and not plan.endswith(_PLAN_SUFFIX) else None
    workers = job.scaling.min_workers or job.scaling.workers
    if not workers and pins is not None and pins.mesh:
        return pins.mesh.size
    return (workers or 1) * (job.tensorflow.devices or 1)


def _count_nodes(nodes: tuple[Node, ...]) -> str:
    """Return a text such as `2 nodes (gpu), 1 node (cpu)`."""
    counts = Counter(node.name.rpartition("#")[0] for node in nodes)
    return ", ".join(f"{count} node{'s' if count != 1 else ''} ({name})" for name, count in counts.items())
