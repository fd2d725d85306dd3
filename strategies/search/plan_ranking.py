"""All plans for a model on a cluster, best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypedDict

from trainwright.core.cluster import Cluster
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Estimate, InfeasiblePlan, Plan
from trainwright.strategies.cost_model.estimator import estimate, expected_terms
from trainwright.strategies.cost_model.machine_model import DEFAULT, Calibration, MachineModel
from trainwright.strategies.cost_model.memory_estimate import host_bytes, push_buffer_bytes, server_bytes, stage_memory
from trainwright.strategies.cost_model.plan_constraints import invalid_combination, invalid_compile
from trainwright.strategies.cost_model.step_time import convergence_factors
from trainwright.strategies.cost_model.step_work import compute_step_work, invalid_plan
from trainwright.strategies.search.plan_request import PlanRequest
from trainwright.strategies.search.registry import strategies_for
from trainwright.strategies.search.stage_cuts import cut_tensor_layer, section_entries, stage_sizes

USABLE = 0.92  # of a device's memory: the rest is the framework's, and lost between blocks
_INTERVAL_PLANS = 20  # plans that get an interval, beside the best of each strategy
_REQUIRED_SPEEDUP = (
    1.1  # times as quickly to the same loss as all others, before ranks step alone, or stale, that nobody asked for
)
_CONSISTENCIES = ("", "sync", "ssp", "async")  # the simplest first
TIE_RATIO = 1.02  # times the best step: the simplest of these is chosen


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Plans that fit, best first, and what makes others impossible, the nearest to fitting first.

    By time to the same loss (`Estimate.target_s`), as far as that can be told. Plans whose ranks step alone come last,
    but for those that are far ahead of all others on a cluster for which they are made.
    """

    plans: tuple[Plan, ...]
    misfits: tuple[InfeasiblePlan, ...]
    ahead_s: float = 0.0

    @property
    def unasked(self) -> tuple[Plan, ...]:
        """Those that may be chosen where nobody asked for ranks that step alone: these, where they are far ahead."""
        return tuple(
            plan for plan in self.plans if not is_asynchronous(plan) or estimate_of(plan).target_s <= self.ahead_s
        )


def rank(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch_size: int,
    precision: str,
    calibration: Calibration | None = None,
) -> list[Plan]:
    """The plans that fit, by predicted step, best first; the first ones have an estimate with an interval.

    Args:
        profile, cluster, batch_size, precision, calibration: as for `estimate`.

    Raises:
        ResourceError: nothing is known of an accelerator.
    """
    question = PlanRequest(profile=profile, cluster=cluster, batch_size=batch_size, precision=precision)
    return list(search_plans(question, calibration).plans)


def search_plans(question: PlanRequest, calibration: Calibration | None = None) -> Ranking:
    """The plans of all strategies for the model's framework; on accelerators, where none fits, those that offload.

    Raises:
        ResourceError: nothing is known of an accelerator.
    """
    sized = _PlanSizer(question, calibration or DEFAULT)
    fitting, misfits = _fitting(sized)
    runs = not question.profile.framework or any(plan.engine and not is_asynchronous(plan) for plan in fitting)
    if not runs and question.cluster.accelerators and not question.offload:
        offloaded = _fitting(_PlanSizer(replace(question, offload=True), sized.calibration))
        fitting, misfits = fitting + offloaded[0], misfits + offloaded[1]
    ahead_s = _speedup_limit(question, fitting, calibration) if question.cluster.uneven else 0.0
    fitting.sort(key=lambda plan: _order(plan, ahead_s))
    best = {plan.strategy: number for number, plan in reversed([*enumerate(fitting)])}
    for number in {*range(min(_INTERVAL_PLANS, len(fitting))), *best.values()}:
        fitting[number] = sized.sure(fitting[number])
    misfits.sort(key=lambda one: (one.plan is not None and is_asynchronous(one.plan), one.missing_bytes or math.inf))
    return Ranking(plans=tuple(fitting), misfits=tuple(misfits), ahead_s=ahead_s)


def with_interval(question: PlanRequest, plan: Plan) -> Plan:
    """A plan that was ranked, with the interval of its estimate, which only the first ones have."""
    return _PlanSizer(question, DEFAULT).sure(plan)


def _fitting(sized: _PlanSizer) -> tuple[list[Plan], list[InfeasiblePlan]]:
    """What fits and what does not, in the order of the strategies."""
    fitting: list[Plan] = []
    misfits: list[InfeasiblePlan] = []
    for item in _proposals(sized.question):
        for found in [item] if isinstance(item, InfeasiblePlan) else _variants(sized, item):
            (misfits if isinstance(found, InfeasiblePlan) else fitting).append(found)  # type: ignore[arg-type]
    return fitting, misfits


def simplest_plan(plans: Iterable[Plan]) -> Plan:
    """Of plans, best first, the simplest of those that are as good as the first.

    Plans whose updates are stale only where they are far ahead of the same strategy's `sync`.
    """
    found = list(plans)
    fresh = [plan for plan in found if plan.strategy == found[0].strategy and plan.consistency in ("", "sync")]
    if (
        is_asynchronous(found[0])
        and fresh
        and _REQUIRED_SPEEDUP * estimate_of(found[0]).target_s > estimate_of(fresh[0]).target_s
    ):
        found = fresh
    limit = TIE_RATIO * estimate_of(found[0]).target_s
    tied = [plan for plan in found if plan.topology == found[0].topology and estimate_of(plan).target_s <= limit]
    return min(tied, key=_complexity)


def without_model_parallel(plans: Iterable[Plan]) -> list[Plan]:
    """Without those that divide a model, by ZeRO, in stages or by layers, which as many ranks could hold whole.

    Dividing it costs more than the estimate knows: FSDP2's steps on CPUs take 1.3 to 7 times DDP's.
    """
    found = list(plans)
    whole = {plan.mesh.size for plan in found if not is_model_parallel(plan) and not is_asynchronous(plan)}
    return [plan for plan in found if not is_model_parallel(plan) or plan.mesh.size not in whole]


def is_model_parallel(plan: Plan) -> bool:
    """Whether no rank holds all of the model."""
    return bool(plan.zero) or plan.mesh.pipeline > 1 or plan.mesh.tensor > 1


def estimate_of(plan: Plan) -> Estimate:
    """Of a plan that was ranked."""
    assert plan.estimate is not None, "a ranked plan has an estimate"
    return plan.estimate


def is_asynchronous(plan: Plan) -> bool:
    """Whether ranks step alone, against servers."""
    return plan.topology == "independent" or plan.servers > 0


def _speedup_limit(question: PlanRequest, plans: Iterable[Plan], calibration: Calibration | None) -> float:
    """Seconds to the same loss that ranks which step alone must not take longer than, to be chosen unasked.

    Where accelerators differ, those of one kind that step together are what they are held against too.
    """
    kinds = question.cluster.kinds if len(question.cluster.kinds) > 1 and not question.workers else ()
    found = list(plans)
    for kind in kinds:
        nodes = tuple(node for node in question.cluster.nodes if node.kind == kind)
        found += search_plans(replace(question, cluster=Cluster(nodes=nodes)), calibration).plans
    together = [plan for plan in found if not is_asynchronous(plan)]
    runs = [plan for plan in together if plan.engine] or together
    return min((estimate_of(plan).target_s for plan in without_model_parallel(runs)), default=0.0) / _REQUIRED_SPEEDUP


def _order(plan: Plan, ahead_s: float) -> tuple[bool, float]:
    """Ranks that step alone come last, unless they are as far ahead as this."""
    target_s = estimate_of(plan).target_s
    return is_asynchronous(plan) and target_s > ahead_s, target_s


def _complexity(plan: Plan) -> tuple[int, ...]:
    """Fewer kinds of parallelism, then less of each that costs something."""
    mesh = plan.mesh
    kinds = sum(degree > 1 for degree in (mesh.pipeline, mesh.data, mesh.shard, mesh.tensor))
    apart = (plan.local_steps, _CONSISTENCIES.index(plan.consistency.partition("(")[0]), plan.servers)
    divided = (mesh.pipeline, mesh.tensor, plan.zero)
    return kinds, *apart, *divided, plan.recompute != "none", plan.chunks, plan.accumulation


def _proposals(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """Yield what the strategies for the model's framework propose."""
    for name, strategy in strategies_for(question.profile.framework).items():
        refused = question.refuse_divided_model(name)
        if refused is not None:
            yield refused
        elif question.run == "fit" and not strategy.fit:
            framework = question.profile.framework
            no_fit = "and it has no such strategy" if framework == "tensorflow" else f"and this model is of {framework}"
            reason = strategy.no_fit or f'run="fit" is Keras\' own, {no_fit}'
            yield strategy.refusal(reason, "leave run= out: trainwright's steps train any model")
        elif not question.offload or strategy.offloads:
            yield from strategy.proposals(question)
        else:
            hint = "leave offload out, or use a strategy that divides the model's state"
            yield strategy.refusal("it keeps the model's state on the device", hint)


_RecomputeChoices = tuple[str, ...]  # of recomputation, from the quickest on


class _EstimateOptions(TypedDict):
    """What every estimate is asked with."""

    batch_size: int
    precision: str


class _PlanSizer:
    """A question whose plans are measured against time and memory; what several of them share is found once."""

    def __init__(self, question: PlanRequest, calibration: Calibration) -> None:
        self.question, self.calibration = question, calibration
        of_cpus = not question.cluster.accelerators
        self._machine = cache(lambda ranks: MachineModel.of(question.cluster, ranks if of_cpus else None))
        self._numbers: _EstimateOptions = {"batch_size": question.batch_size, "precision": question.precision}

    def machine(self, plan: Plan) -> MachineModel:
        """That the plan's ranks run on."""
        return self._machine(plan.mesh.size)

    def sized(self, plan: Plan) -> Plan | InfeasiblePlan:
        """The plan with its estimate, or why it cannot be."""
        profile, machine = self.question.profile, self.machine(plan)
        reason = invalid_plan(profile, machine, plan, self.question.batch_size) or (
            plan.engine and invalid_combination(plan)
        )
        if self.question.compile == "inductor":
            reason = reason or invalid_compile(plan.recompute, profile.recounted)
        if reason:
            return InfeasiblePlan(strategy=plan.strategy, reason=reason[0], hint=reason[1], plan=plan)
        room = USABLE * machine.device.memory_bytes or math.inf
        if plan.mesh.pipeline > 1:
            plan = replace(plan, stages=stage_sizes(profile, machine, plan, room_bytes=room, **self._numbers))
            if plan.engine:
                plan = replace(plan, cuts=section_entries(profile, plan.stages))
                layer = cut_tensor_layer(profile, plan)
                if layer:
                    why = f"the stages cut the block of {layer!r}, which tp={plan.mesh.tensor} divides"
                    return InfeasiblePlan(
                        strategy=plan.strategy, reason=why, hint="use fewer stages, or tp=1", plan=plan
                    )
        memory = stage_memory(profile, plan, apart=machine.device.apart, **self._numbers)
        if max(memory) > room:
            return _out_of_memory(plan, memory, room)
        kept = host_bytes(profile, plan, precision=self.question.precision) + push_buffer_bytes(profile, plan)
        kept += server_bytes(profile, plan, nodes=machine.nodes) // machine.per_node
        missing = kept - machine.host_bytes
        if machine.host_bytes and missing > 0:
            what = f"out of the host's memory by {missing / 2**30:.1f} GiB for each device"
            more = "have more nodes with servers" if plan.servers else "shard over more devices"
            hint = f"{more}, or use nodes with more memory"
            return InfeasiblePlan(strategy=plan.strategy, reason=what, hint=hint, plan=plan, missing_bytes=missing)
        work = compute_step_work(profile, machine, plan, **self._numbers)
        terms = expected_terms(work, self.calibration)
        step_s = sum(terms.values())
        found = Estimate(
            step_s=step_s, low_s=step_s, high_s=step_s, terms=terms, stage_memory_bytes=memory,
            device_memory_bytes=machine.device.memory_bytes, factors=convergence_factors(work),
        )  # fmt: skip
        return replace(plan, estimate=found)

    def sure(self, plan: Plan) -> Plan:
        """The plan with the interval of its estimate."""
        question = self.question
        found = estimate(question.profile, question.cluster, plan, calibration=self.calibration, **self._numbers)
        return replace(plan, estimate=found)


def _variants(sized: _PlanSizer, plan: Plan) -> Iterator[Plan | InfeasiblePlan]:
    """A proposal with every number of micro-batches and recomputation that may be best.

    Computing again is never quicker, so it is looked at only where without it memory does not do.
    """
    counts, choices = _micro_batches(sized.question, plan), _recomputations(sized.question)
    return (
        _pipeline_variants(sized, plan, counts, choices)
        if plan.mesh.pipeline > 1
        else _unstaged_variants(sized, plan, counts, choices)
    )


def _unstaged_variants(
    sized: _PlanSizer, plan: Plan, counts: Sequence[int], choices: _RecomputeChoices
) -> Iterator[Plan | InfeasiblePlan]:
    """Without a pipeline fewer micro-batches are never slower, so that the fewest which fit are enough."""
    for recompute in choices:
        found = _first_fitting(sized, (_variant(sized.question, plan, count, recompute) for count in counts))
        if found is not None:
            yield found
        if isinstance(found, Plan):
            counts = counts[: counts.index(found.accumulation)]


def _pipeline_variants(
    sized: _PlanSizer, plan: Plan, counts: Sequence[int], choices: _RecomputeChoices
) -> Iterator[Plan | InfeasiblePlan]:
    """Larger micro-batches never hold less: what does not fit is not asked for again."""
    fits = False
    for count in reversed(counts):
        tried = (_variant(sized.question, plan, count, recompute) for recompute in choices)
        found = _first_fitting(sized, tried)
        if isinstance(found, Plan):
            choices, fits = choices[choices.index(found.recompute) :], True
        if isinstance(found, Plan) or (found is not None and not fits):
            yield found
        if isinstance(found, InfeasiblePlan) and found.missing_bytes:
            return


def _variant(question: PlanRequest, plan: Plan, count: int, recompute: str) -> Plan:
    profile = question.profile
    can = recompute == "none" or (profile.framework == "torch" and not profile.keras_backend)
    engine = plan.engine if can else ""
    return replace(plan, accumulation=count, recompute=recompute, engine=engine)


def _first_fitting(sized: _PlanSizer, plans: Iterable[Plan]) -> Plan | InfeasiblePlan | None:
    """The first that fits, else why the last does not; None where there is none."""
    found: Plan | InfeasiblePlan | None = None
    for plan in plans:
        found = sized.sized(plan)
        if isinstance(found, Plan):
            return found
    return found


def _recomputations(question: PlanRequest) -> _RecomputeChoices:
    """Attention's scores alone where there are any, and no compiler chooses by itself what it makes again."""
    if "recompute" in question.pins.choices:
        return (question.pins.choices["recompute"],)
    scores = any(layer.scores_numbers for layer in question.profile.layers)
    selective = scores and question.compile != "inductor"
    return ("none", "selective", "full") if selective else ("none", "full")


def _micro_batches(question: PlanRequest, plan: Plan) -> list[int]:
    """How many a data rank's share may be divided into: as the job says, or so that they hold powers of two."""
    fixed = question.run == "fit" or question.undeclared or (plan.mesh.pipeline > 1 and not plan.schedule)
    if question.accumulation or fixed:
        return [question.accumulation or 1]
    share = -(-question.batch_size // plan.mesh.data_ranks)
    if "micro_batch" in question.pins.choices:
        return [max(1, -(-share // max(1, question.pins.choices["micro_batch"])))]
    smaller = [2**power for power in range(share.bit_length()) if 2**power < share]
    return [1, *(-(-share // size) for size in reversed(smaller))]


def _out_of_memory(plan: Plan, memory: tuple[int, ...], room: float) -> InfeasiblePlan:
    stage = max(range(len(memory)), key=memory.__getitem__)
    missing = int(memory[stage] - room)
    return InfeasiblePlan(
        strategy=plan.strategy,
        reason=f"out of memory by {missing / 2**30:.1f} GiB on stage {stage}",
        hint="recompute activations, shard over more devices, or use a smaller micro-batch",
        plan=plan,
        missing_bytes=missing,
    )


# --- The nearest things that would fit, where nothing does ------------------------------------------------------------


_MAX_NODE_FACTOR = 256  # times the nodes
_MAX_DEVICES = 16_384  # looked at


def is_synchronous(plan: Plan) -> bool:
    """Whether all ranks step together."""
    return plan.topology != "independent"


def suggest_changes(question: PlanRequest, suited: Callable[[Plan], bool] = is_synchronous) -> str:
    """The least change of each kind after which some plan that is suited fits, in words; empty where there is none."""
    found = [*_offloaded(question, suited), *_smaller_batch(question, suited), *_more_nodes(question, suited)]
    return ", or ".join(found)


def _offloaded(question: PlanRequest, suited: Callable[[Plan], bool]) -> Iterator[str]:
    if question.cluster.accelerators and not question.offload:
        best = next(filter(suited, search_plans(replace(question, offload=True)).plans), None)
        if best is not None:
            yield f"keep the model's state in host memory: plan={best.text!r}"


def _smaller_batch(question: PlanRequest, suited: Callable[[Plan], bool]) -> Iterator[str]:
    size = question.batch_size // 2
    while size:
        if _fits(replace(question, batch_size=size), suited):
            yield f"use batch_size={size}"
            return
        size //= 2


def _more_nodes(question: PlanRequest, suited: Callable[[Plan], bool]) -> Iterator[str]:
    cluster, times = question.cluster, 2
    devices = cluster.accelerators or cluster.slots
    while times <= _MAX_NODE_FACTOR and devices * times <= _MAX_DEVICES and not question.workers:
        larger = Cluster(nodes=cluster.nodes * times)
        if _fits(replace(question, cluster=larger), suited):
            more = devices * (times - 1)
            kind = " and ".join(filter(None, cluster.kinds)) or cluster.accelerator or "CPU slots"
            yield f"use {more} {kind} more"
            return
        times *= 2


def _fits(question: PlanRequest, suited: Callable[[Plan], bool]) -> bool:
    return any(suited(plan) for plan in search_plans(question).plans)
