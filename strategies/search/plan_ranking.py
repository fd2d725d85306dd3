"""Rank all plans for a model on a cluster, and divide the layers of pipelines into stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, chain, filterfalse, product
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from trainwright.core.cluster import Cluster
from trainwright.core.errors import PlanError
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Estimate, InfeasiblePlan, Mesh, Plan, WorkerResources
from trainwright.strategies.cost_model.estimator import (
    INTERVAL_DEVIATIONS,
    estimate,
    layer_seconds,
    point_estimate,
    send_seconds,
)
from trainwright.strategies.cost_model.machine_model import (
    DEFAULT,
    Calibration,
    MachineModel,
    Vector,
    next_stage_is_remote,
)
from trainwright.strategies.cost_model.memory_estimate import (
    LayerMemory,
    host_bytes,
    layer_memory,
    stage_memory,
)
from trainwright.strategies.cost_model.plan_constraints import check_request, invalid_combination, invalid_compile
from trainwright.strategies.cost_model.stage_partition import MemoryLimit, partition_in_memory
from trainwright.strategies.cost_model.step_work import (
    NUMBER_BYTES,
    Indices,
    compute_step_work,
    invalid_plan,
    layer_vectors,
    section_counts,
)
from trainwright.strategies.search.plan_request import PlanRequest
from trainwright.strategies.search.registry import strategies_for

USABLE = 0.92  # of a device's memory; the framework and fragmentation take the rest
_INTERVAL_PLANS = 20  # plans that get an interval, beside the best of each strategy
_REQUIRED_SPEEDUP = 1.1  # to the same loss, for asynchronous or stale training that the job does not ask for
_CONSISTENCIES = ("", "sync", "ssp", "async")  # the simplest first
TIE_RATIO = 1.02  # times the best step: the simplest of these is chosen

_SomePlan = TypeVar("_SomePlan", Plan, InfeasiblePlan)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Plans that fit, best first, and plans that do not, the nearest to fitting first.

    Plans are ordered by the time to the same loss (`Estimate.target_s`). Asynchronous plans come last, except those at
    `ahead_s` or below, which are far ahead of all others on an uneven cluster.
    """

    plans: tuple[Plan, ...]
    misfits: tuple[InfeasiblePlan, ...]
    ahead_s: float = 0.0

    @property
    def unasked(self) -> tuple[Plan, ...]:
        """Plans for jobs that do not ask for asynchronous training: such plans only where they are far ahead."""
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
    """Return the plans that fit: the one that `fit` would choose, then the others, best first.

    The first ones have an estimate with an interval.

    Args:
        profile, cluster, batch_size, precision, calibration: as for `estimate`.

    Raises:
        ResourceError: an accelerator is missing from the built-in table.
        PlanError: no plan fits; it names what comes nearest.
    """
    question = PlanRequest(
        profile=profile, cluster=cluster, batch_size=batch_size, precision=precision, calibration=calibration or DEFAULT
    )
    ranking = search_plans(question)
    best = best_plan(question, ranking)
    if best is None:
        raise nothing_fits(question, ranking)
    return [best, *(plan for plan in ranking.plans if plan.text != best.text)]


def best_plan(question: PlanRequest, ranking: Ranking, *, asynchronous: bool = False) -> Plan | None:
    """Return the plan to take of a ranking, with its interval; None where there is none.

    `fit`, `plan --cluster` and `rank` take this one.

    Args:
        asynchronous: the job asks for workers that step asynchronously; else they are taken where they are far ahead.
    """
    plans = ranking.plans if asynchronous else ranking.unasked
    return _with_interval(question, simplest_plan(_without_needless_division(plans))) if plans else None


def nothing_fits(question: PlanRequest, ranking: Ranking) -> PlanError:
    """Return the error that no plan fits a cluster, with the nearest and the least change."""
    nearest = ranking.misfits[0]
    name = f"{nearest.strategy}, plan={nearest.plan.text!r}" if nearest.plan else nearest.strategy
    problem = f"no plan fits {question.cluster}; the nearest, {name}: {nearest.reason}"
    return PlanError(problem, where="cluster", remedy=suggest_changes(question) or nearest.hint)


def search_plans(question: PlanRequest) -> Ranking:
    """Return the plans of all strategies for the model's framework; where none fits, those that offload too.

    Raises:
        ResourceError: an accelerator is missing from the built-in table.
        PlanError: the batch is no whole number of samples, or the precision is unknown.
    """
    check_request(question.batch_size, question.precision)
    fitting, misfits = _fitting(question)
    if all(map(is_asynchronous, fitting)) and question.cluster.accelerators and not question.offload:
        offloaded = _fitting(replace(question, offload=True))
        fitting, misfits = fitting + offloaded[0], misfits + offloaded[1]
    ahead_s = _speedup_limit(question, fitting) if question.cluster.uneven else 0.0
    fitting.sort(key=lambda plan: estimate_of(plan).target_s)
    fitting.sort(key=lambda plan: is_asynchronous(plan) and estimate_of(plan).target_s > ahead_s)
    best = {plan.strategy: number for number, plan in reversed([*enumerate(fitting)])}
    for number in {*range(min(_INTERVAL_PLANS, len(fitting))), *best.values()}:
        fitting[number] = _with_interval(question, fitting[number])
    misfits.sort(key=lambda one: (one.plan is not None and is_asynchronous(one.plan), one.missing_bytes or math.inf))
    return Ranking(plans=tuple(fitting), misfits=tuple(misfits), ahead_s=ahead_s)


def _with_interval(question: PlanRequest, plan: Plan) -> Plan:
    """Return a ranked plan with the interval of its estimate, which only the first ones have."""
    full_estimate = estimate(
        question.profile, question.cluster, plan, batch_size=question.batch_size, precision=question.precision,
        calibration=question.calibration,
    )  # fmt: skip
    return replace(plan, estimate=full_estimate)


def _fitting(question: PlanRequest) -> tuple[list[Plan], list[InfeasiblePlan]]:
    """Return the plans that fit and those that do not, in the order of the strategies."""
    sizer = _PlanSizer(question)
    fitting: list[Plan] = []
    misfits: list[InfeasiblePlan] = []
    strategies = strategies_for(question.profile.framework).values()
    for item in chain.from_iterable(strategy.proposals(question) for strategy in strategies):
        for variant in [item] if isinstance(item, InfeasiblePlan) else _variants(sizer, item):
            (misfits if isinstance(variant, InfeasiblePlan) else fitting).append(variant)  # type: ignore[arg-type]
    return fitting, misfits


def simplest_plan(plans: Iterable[Plan]) -> Plan:
    """Return the simplest of the plans that are about as fast as the first; plans come best first.

    A plan with stale updates is chosen only where it is far ahead of the same strategy's `sync`.
    """
    ranked = list(plans)
    synchronous = [plan for plan in ranked if plan.strategy == ranked[0].strategy and plan.consistency in ("", "sync")]
    if (
        is_asynchronous(ranked[0])
        and synchronous
        and _REQUIRED_SPEEDUP * estimate_of(ranked[0]).target_s > estimate_of(synchronous[0]).target_s
    ):
        ranked = synchronous
    limit = TIE_RATIO * estimate_of(ranked[0]).target_s
    tied = [plan for plan in ranked if plan.topology == ranked[0].topology and estimate_of(plan).target_s <= limit]
    return min(tied, key=_complexity)


def _without_needless_division(plans: Iterable[Plan]) -> list[Plan]:
    """Leave out plans that divide the model although as many ranks, or fewer, could each hold all of it.

    On CPUs dividing costs more than the estimate says: FSDP2's steps take 1.3 to 7 times as long as DDP's there. On
    accelerators a plan stays that is predicted quicker by more than a standard deviation of the estimates.
    """
    ranked = list(plans)
    ratio = max((one.high_s / one.step_s for one in map(estimate_of, ranked)), default=1.0) ** (1 / INTERVAL_DEVIATIONS)
    undivided_s: dict[int, float] = {}
    for plan in ranked:
        if not is_model_parallel(plan) and not is_asynchronous(plan):
            size, target_s = plan.mesh.size, estimate_of(plan).target_s
            undivided_s[size] = min(target_s, undivided_s.get(size, target_s))

    def is_needed(plan: Plan) -> bool:
        best_s = min((target_s for size, target_s in undivided_s.items() if size <= plan.mesh.size), default=math.inf)
        if not is_model_parallel(plan) or best_s == math.inf:
            return True
        return ratio * estimate_of(plan).target_s < best_s and plan.placement.accelerators > 0

    return list(filter(is_needed, ranked))


def first_of_strategies(plans: Iterable[_SomePlan]) -> dict[str, _SomePlan]:
    """Return the first plan of each strategy, by the strategy's name."""
    first_plans: dict[str, _SomePlan] = {}
    for plan in plans:
        first_plans.setdefault(plan.strategy, plan)
    return first_plans


def is_model_parallel(plan: Plan) -> bool:
    """Return whether no rank holds all of the model."""
    return bool(plan.zero) or plan.mesh.pipeline > 1 or plan.mesh.tensor > 1


def estimate_of(plan: Plan) -> Estimate:
    """Return the estimate of a ranked plan."""
    assert plan.estimate is not None, "a ranked plan has an estimate"
    return plan.estimate


def is_asynchronous(plan: Plan) -> bool:
    """Return whether ranks step asynchronously, against servers."""
    return plan.topology == "independent" or plan.servers > 0


def _speedup_limit(question: PlanRequest, plans: Iterable[Plan]) -> float:
    """Return the most seconds to the same loss for asynchronous plans of jobs that do not ask for them.

    Where accelerators differ, synchronous plans on those of one kind are compared too.
    """
    kinds = question.cluster.kinds if len(question.cluster.kinds) > 1 and not question.workers else ()
    candidates = list(plans)
    for kind in kinds:
        nodes = tuple(node for node in question.cluster.nodes if node.kind == kind)
        candidates += search_plans(replace(question, cluster=Cluster(nodes=nodes))).plans
    synchronous = [plan for plan in candidates if not is_asynchronous(plan)]
    return min((estimate_of(plan).target_s for plan in _without_needless_division(synchronous)), default=0.0) / (
        _REQUIRED_SPEEDUP
    )


def _complexity(plan: Plan) -> tuple[int, ...]:
    """Return the sort key by complexity: the kinds of parallelism, then the degree of each costly one."""
    mesh = plan.mesh
    kinds = sum(degree > 1 for degree in (mesh.pipeline, mesh.data, mesh.shard, mesh.tensor))
    asynchrony = (plan.local_steps, _CONSISTENCIES.index(plan.consistency.partition("(")[0]), plan.servers)
    division = (mesh.pipeline, mesh.tensor, plan.zero)
    return kinds, *asynchrony, *division, plan.recompute != "none", plan.chunks, plan.accumulation


_MemoryChoices = tuple[tuple[str, bool], ...]  # recomputation and sequence parallelism, from the quickest on


class _PlanSizer:
    """Estimates time and memory of a request's plans; values that plans share are computed once."""

    def __init__(self, question: PlanRequest) -> None:
        self.question = question
        of_cpus = not question.cluster.accelerators
        self._machine = cache(
            lambda ranks: MachineModel.of(question.cluster, ranks if of_cpus else None, question.threads or 0)
        )

    def sized(self, plan: Plan) -> Plan | InfeasiblePlan:
        """Return the plan with its estimate, or why it is impossible."""
        profile, machine = self.question.profile, self._machine(plan.mesh.size)
        reason = invalid_plan(profile, machine, plan) or invalid_combination(plan)
        if self.question.compile == "inductor":
            reason = reason or invalid_compile(plan.recompute, profile.recounted)
        if plan.recompute != "none" and not _recomputes(profile):
            reason = f"recompute={plan.recompute} is for torch models", "leave it out"
        if reason:
            return InfeasiblePlan(strategy=plan.strategy, reason=reason[0], hint=reason[1], plan=plan)
        room = min(USABLE * machine.device.memory_bytes or math.inf, self.question.room_bytes or math.inf)
        if plan.mesh.pipeline > 1:
            sizes = stage_sizes(profile, machine, plan, room_bytes=room)
            plan = replace(plan, stages=sizes, cuts=section_entries(profile, sizes))
            layer = _cut_tensor_layer(profile, plan)
            if layer:
                cause = f"the stages cut the block of {layer!r}, which tp={plan.mesh.tensor} divides"
                return InfeasiblePlan(strategy=plan.strategy, reason=cause, hint="use fewer stages, or tp=1", plan=plan)
        memory = stage_memory(profile, plan, apart=machine.device.apart)
        if max(memory) > room:
            return _out_of_memory(plan, memory, room)
        missing = host_bytes(profile, plan, machine) - machine.host_bytes
        if machine.host_bytes and missing > 0:
            shortage = f"out of the host's memory by {missing / 2**30:.1f} GiB for each device"
            change = "have more nodes with servers" if plan.servers else "shard over more devices"
            hint = f"{change}, or use nodes with more memory"
            return InfeasiblePlan(strategy=plan.strategy, reason=shortage, hint=hint, plan=plan, missing_bytes=missing)
        work = compute_step_work(profile, machine, plan)
        return replace(plan, estimate=point_estimate(work, memory, self.question.calibration))


def _variants(sized: _PlanSizer, plan: Plan) -> Iterator[Plan | InfeasiblePlan]:
    """Yield a proposal with every number of micro-batches and every way to save memory that may be best.

    Recomputation and sequence parallelism are never faster, so they are tried only where memory does not suffice.
    """
    counts, choices = _micro_batches(sized.question, plan), _memory_choices(sized.question, plan.mesh.tensor)
    return (
        _pipeline_variants(sized, plan, counts, choices)
        if plan.mesh.pipeline > 1
        else _unstaged_variants(sized, plan, counts, choices)
    )


def _unstaged_variants(
    sized: _PlanSizer, plan: Plan, counts: Sequence[int], choices: _MemoryChoices
) -> Iterator[Plan | InfeasiblePlan]:
    """Yield the fewest micro-batches that fit, for each choice: without a pipeline fewer are never slower."""
    for choice in choices:
        variant = _first_fitting(sized, (_variant(plan, count, choice) for count in counts))
        if variant is not None:
            yield variant
        if isinstance(variant, Plan):
            counts = counts[: counts.index(variant.accumulation)]


def _pipeline_variants(
    sized: _PlanSizer, plan: Plan, counts: Sequence[int], choices: _MemoryChoices
) -> Iterator[Plan | InfeasiblePlan]:
    """Yield pipelines from the smallest micro-batches on, until larger ones do not fit."""
    fits = False
    for count in reversed(counts):
        variant = _first_fitting(sized, (_variant(plan, count, choice) for choice in choices))
        if isinstance(variant, Plan):
            choices, fits = choices[choices.index((variant.recompute, variant.sequence)) :], True
        if isinstance(variant, Plan) or (variant is not None and not fits):
            yield variant
        if isinstance(variant, InfeasiblePlan) and variant.missing_bytes:
            return


def _variant(plan: Plan, count: int, choice: tuple[str, bool]) -> Plan:
    return replace(plan, accumulation=count, recompute=choice[0], sequence=choice[1])


def _recomputes(profile: ModelProfile) -> bool:
    """Return whether an engine can recompute activations of a model."""
    return profile.framework in ("", "torch") and not profile.keras_backend


def _first_fitting(sized: _PlanSizer, plans: Iterable[Plan]) -> Plan | InfeasiblePlan | None:
    """Return the first plan that fits, else the last misfit; None without plans."""
    plan_or_misfit: Plan | InfeasiblePlan | None = None
    for plan in plans:
        plan_or_misfit = sized.sized(plan)
        if isinstance(plan_or_misfit, Plan):
            return plan_or_misfit
    return plan_or_misfit


def _memory_choices(question: PlanRequest, tensor: int) -> _MemoryChoices:
    """Return the choices to try. Only tensor-parallel ranks can divide tokens between their layers."""
    pins, profile = question.pins.choices, question.profile
    sequences: tuple[bool, ...] = (False,)
    if tensor > 1 and "sequence" in pins:
        sequences = (bool(pins["sequence"]),)
    elif tensor > 1 and profile.divides_tokens and profile.tokens >= tensor:
        sequences = (False, True)
    return tuple(product(_recomputations(question), sequences))


def _recomputations(question: PlanRequest) -> tuple[str, ...]:
    """Return the recomputations to try; `selective` only for models with attention scores, without inductor."""
    if "recompute" in question.pins.choices:
        return (question.pins.choices["recompute"],)
    if not _recomputes(question.profile):
        return ("none",)
    scores = any(layer.scores_numbers for layer in question.profile.layers)
    selective = scores and question.compile != "inductor"
    return ("none", "selective", "full") if selective else ("none", "full")


def _micro_batches(question: PlanRequest, plan: Plan) -> list[int]:
    """Return the numbers of micro-batches to try: as the job says, or such that they hold powers of two."""
    fixed = question.run == "fit" or question.undeclared or (plan.mesh.pipeline > 1 and not plan.schedule)
    if question.accumulation or fixed:
        return [question.accumulation or 1]
    share = -(-question.batch_size // plan.mesh.data_ranks)
    if "micro_batch" in question.pins.choices:
        return [max(1, -(-share // max(1, question.pins.choices["micro_batch"])))]
    smaller = [2**power for power in range(share.bit_length()) if 2**power < share]
    counts = [1, *(-(-share // size) for size in reversed(smaller))]
    if plan.schedule == "interleaved":  # which needs multiples of the stages
        stages = plan.mesh.pipeline
        return sorted({count for each in counts if (count := stages * -(-each // stages)) <= share})
    # With one micro-batch, FSDP2 divides the gradients of ZeRO-1 as it does those of ZeRO-2.
    return counts[1:] if plan.zero == 1 and plan.mesh.pipeline == 1 and "zero" not in question.pins.choices else counts


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


# --- Where a pipeline is cut: the slowest stage as fast as possible, and none over its memory -------------------------


_Sizes = tuple[int, ...]
_FORBIDDEN_CUT_S = 1e6  # over a cut that must not be


def stage_sizes(profile: ModelProfile, machine: MachineModel, plan: Plan, *, room_bytes: float) -> _Sizes:
    """Return the number of layers of each stage of a plan, or of each of its chunks.

    It minimizes a micro-batch's time on the slowest stage, recomputation included, plus its time over the slowest cut.
    Where that does not fit `room_bytes`, it is the division with the fastest slowest stage among those that fit, with
    cuts that are no slower if possible. Where none fits, it is the fastest of all, and `stage_memory` says where and by
    how much it does not fit. Chunks are always cut for time, since the chunks of a stage are not adjacent. Each stage
    has a trained layer, if there are enough.

    Args:
        profile: of the model.
        machine: devices of the plan.
        plan: its own `stages` are ignored.
        room_bytes: usable memory of each device.

    Raises:
        ValueError: there are fewer layers than stages or chunks.
    """
    stages, (_, rows) = plan.sections, plan.micro_batches(plan.batch_size)
    if plan.mesh.pipeline == 1:
        return (len(profile.layers),)
    one_stage = Plan(
        strategy="", engine="", mesh=Mesh(tensor=plan.mesh.tensor), batch_size=rows,
        placement=WorkerResources(cpus=1.0), recompute=plan.recompute, precision=plan.precision,
    )  # fmt: skip
    layered = _times(profile, machine, one_stage, remote=next_stage_is_remote(machine, plan.mesh))
    quickest, limit = _quickest(layered, stages)
    if plan.chunks > 1:
        return quickest
    layers = layer_vectors(profile)
    memory = layer_memory(profile, plan)
    room = _LayerMemoryLimit(memory=memory, order=layers.order, room_bytes=room_bytes)
    if not room.may_do(stages) or memory.of_stages(section_counts(profile, quickest), "", stages).max() <= room_bytes:
        return quickest
    for cut_limit in (limit, float(layered.cut_s.max())):
        partition = _partition_below(layered, stages, cut_limit, room)
        if partition is not None:
            return partition[0]
    return quickest


def section_entries(profile: ModelProfile, sizes: _Sizes) -> tuple[str, ...]:
    """Return the names of the first layers of a pipeline's sections after the first, given the sizes of all."""
    return tuple(profile.layers[first].name for first in accumulate(sizes[:-1]))


def _cut_tensor_layer(profile: ModelProfile, plan: Plan) -> str:
    """Return the layer behind a cut whose input is divided by tensor parallelism; empty without one."""
    names = [layer.name for layer in profile.layers]
    cut = [names.index(name) for name in plan.cuts]
    if plan.mesh.tensor == 1:
        return ""
    return next((names[place] for place in cut if profile.layers[place - 1].leads), "")


@dataclass(frozen=True, kw_only=True, eq=False)
class _LayerMemoryLimit:
    """The memory of each layer, and of a stage."""

    memory: LayerMemory
    order: Indices
    room_bytes: float

    def may_do(self, stages: int) -> bool:
        """Return whether an average stage fits; this excludes most plans that are too large."""
        least = self.memory.states + self.memory.flight[-1] * self.memory.kept
        return bool(least[self.order].sum() <= stages * self.room_bytes)

    def of(self, begins: Indices) -> MemoryLimit:
        """Return the limit for groups of layers, given the first layer of each."""
        return MemoryLimit(
            fixed_bytes=np.add.reduceat(self.memory.states[self.order], begins).tolist(),
            kept_bytes=np.add.reduceat(self.memory.kept[self.order], begins).tolist(),
            working_bytes=np.maximum.reduceat(self.memory.working[self.order], begins).tolist(),
            in_flight=self.memory.flight.tolist(),
            room_bytes=self.room_bytes,
        )


@lru_cache(maxsize=4096)
def _quickest(layered: _LayerTimes, stages: int) -> tuple[_Sizes, float]:
    """Return the sizes with the least sum of slowest stage and slowest cut, whatever the memory, and that cut's time.

    Slower and slower cuts are allowed, until even the fastest stages could not make up for them.
    """
    *limits, widest = np.unique(layered.cut_s[:-1]).tolist()
    floor = _partition_below(layered, stages, widest, None)
    assert floor is not None  # only memory can forbid every division
    best, cut_limit, least_s = floor[0], widest, floor[1] + widest
    for limit in limits:
        if limit + floor[1] >= least_s:
            break
        partition = _partition_below(layered, stages, limit, None)
        if partition is not None and partition[1] + limit < least_s:
            best, cut_limit, least_s = partition[0], limit, partition[1] + limit
    return best, cut_limit


@dataclass(frozen=True, kw_only=True, eq=False)
class _LayerTimes:
    """Seconds of a micro-batch in each layer and over a cut behind it, and whether the layer is trained."""

    seconds: Vector
    cut_s: Vector
    trained: npt.NDArray[np.bool_]


@lru_cache(maxsize=1024)
def _times(profile: ModelProfile, machine: MachineModel, micro_batch: Plan, *, remote: bool) -> _LayerTimes:
    """Return the times of a micro-batch by layer.

    Args:
        micro_batch: a plan of one stage whose batch it is.
        remote: whether the next stage is on another node.
    """
    work = replace(compute_step_work(profile, machine, micro_batch), remote=remote)
    layers = layer_vectors(profile)
    # So expensive that another cut is taken where there is one; otherwise the plan is refused.
    forbidden = np.array([micro_batch.mesh.tensor > 1 and layer.leads for layer in profile.layers]) * _FORBIDDEN_CUT_S
    width = NUMBER_BYTES.get(micro_batch.precision, 4)
    sent = micro_batch.batch_size * width * layers.over_cuts() / micro_batch.mesh.tensor
    return _LayerTimes(
        seconds=layer_seconds(work)[layers.order],
        cut_s=send_seconds(work, sent)[layers.order] + forbidden,
        trained=np.array([layer.trained for layer in profile.layers]),
    )


def _partition_below(
    layered: _LayerTimes, stages: int, limit: float, room: _LayerMemoryLimit | None
) -> tuple[_Sizes, float] | None:
    """Return the best division without cuts above a limit, and the seconds of its slowest stage; None without one.

    A stage without a trained layer has nothing to optimize. If there are enough trained layers, such divisions are
    avoided: groups of layers between possible cuts are joined until each has a trained one.
    """
    begins = np.concatenate(([0], np.flatnonzero(layered.cut_s[:-1] <= limit) + 1))
    if len(begins) < stages:
        return None
    found = _partition_runs(layered, begins, stages, room)
    if found is None or layered.trained.sum() < stages:
        return found
    if np.logical_or.reduceat(layered.trained, np.cumsum((0, *found[0][:-1]))).all():
        return found
    joined = _trained_runs(layered.trained, begins)
    return _partition_runs(layered, joined, stages, room) if len(joined) >= stages else None


def _trained_runs(trained: npt.NDArray[np.bool_], begins: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the first layers of groups that have a trained layer each."""
    firsts = [0]
    for begin in begins[1:].tolist():
        if trained[firsts[-1] : begin].any() and trained[begin:].any():
            firsts.append(begin)
    return np.array(firsts, dtype=np.int64)


def _partition_runs(
    layered: _LayerTimes, begins: npt.NDArray[np.int64], stages: int, room: _LayerMemoryLimit | None
) -> tuple[_Sizes, float] | None:
    """Return the best division into stages of whole groups of layers, given the first layer of each group."""
    seconds = layered.seconds
    costs = np.add.reduceat(seconds, begins)
    sizes = partition_in_memory(costs.tolist(), stages, room.of(begins) if room else None)
    if sizes is None:
        return None
    firsts = np.cumsum((0, *sizes[:-1]))
    layer_counts = np.diff(np.append(begins[firsts], len(seconds)))
    return tuple(layer_counts.tolist()), float(np.add.reduceat(costs, firsts).max())


# --- The least changes after which a plan fits ------------------------------------------------------------------------


_MAX_NODE_FACTOR = 256  # times the nodes
_MAX_DEVICES = 16_384  # looked at


def plans_within(question: PlanRequest, room_bytes: int) -> list[Plan]:
    """Return the best synchronous plan of each strategy that fits some device memory, without the pinned choices."""
    plans = search_plans(replace(question.free, room_bytes=room_bytes)).plans
    return list(first_of_strategies(filterfalse(is_asynchronous, plans)).values())


def suggest_changes(
    question: PlanRequest, suited: Callable[[Plan], bool] = lambda plan: not is_asynchronous(plan)
) -> str:
    """Return the least change of each kind after which a suited plan fits, as text; empty where there is none."""
    changes = [*_offloaded(question, suited), *_smaller_batch(question, suited), *_more_nodes(question, suited)]
    return ", or ".join(changes)


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
            added = devices * (times - 1)
            kind = " and ".join(filter(None, cluster.kinds)) or cluster.accelerator or "CPU slots"
            yield f"use {added} {kind} more"
            return
        times *= 2


def _fits(question: PlanRequest, suited: Callable[[Plan], bool]) -> bool:
    return any(suited(plan) for plan in search_plans(question).plans)
