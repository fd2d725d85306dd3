"""All plans for a model on a cluster, best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, chain
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from trainwright.core.cluster import Cluster
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Estimate, InfeasiblePlan, Plan
from trainwright.strategies.cost_model.estimator import estimate, point_estimate
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
    push_buffer_bytes,
    server_bytes,
    stage_memory,
)
from trainwright.strategies.cost_model.plan_constraints import invalid_combination, invalid_compile
from trainwright.strategies.cost_model.stage_partition import MemoryLimit, partition_in_memory
from trainwright.strategies.cost_model.step_time import layer_seconds, send_seconds
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
    strategies = strategies_for(sized.question.profile.framework).values()
    for item in chain.from_iterable(strategy.proposals(sized.question) for strategy in strategies):
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
                layer = _cut_tensor_layer(profile, plan)
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
        return replace(plan, estimate=point_estimate(work, memory, self.calibration))

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


# --- Where a pipeline is cut: the slowest stage as fast as possible, and none over its memory -------------------------


_Sizes = tuple[int, ...]
_FORBIDDEN_CUT_S = 1e6  # over a cut that must not be


def stage_sizes(
    profile: ModelProfile, machine: MachineModel, plan: Plan, *, batch_size: int, precision: str, room_bytes: float
) -> _Sizes:
    """Layers of each stage of a plan, or of each of its chunks.

    A micro-batch's time on the slowest stage, with what is computed again, and its way over the slowest cut are as
    little as can be together. Where that does not fit `room_bytes`, the slowest stage is as quick as can be among the
    divisions that do, by cuts that are no slower if that is possible. Where none does it is the quickest of all:
    `stage_memory` says by how much it does not fit, and where. Chunks are always cut for time: a stage's do not lie
    beside each other. Each stage has a layer that is trained, where there are as many.

    Args:
        profile, batch_size, precision: as for `estimate`.
        machine: that the plan runs on.
        plan: whose own `stages` are not looked at.
        room_bytes: of each device.

    Raises:
        ValueError: there are fewer layers than stages or chunks.
        PlanError: the plan cannot be.
    """
    stages, (_, rows) = plan.sections, plan.micro_batches(batch_size)
    if plan.mesh.pipeline == 1:
        return (len(profile.layers),)
    remote = next_stage_is_remote(machine, plan.mesh)
    step = _MicroBatchStep(
        tensor=plan.mesh.tensor, rows=rows, recompute=plan.recompute, precision=precision, remote=remote
    )
    quickest, limit = _quickest(profile, machine, step, stages)
    if plan.chunks > 1:
        return quickest
    layers = layer_vectors(profile)
    memory = layer_memory(profile, plan, batch_size=batch_size, precision=precision)
    room = _LayerMemoryLimit(memory=memory, order=layers.order, room_bytes=room_bytes)
    if not room.may_do(stages) or memory.of_stages(section_counts(profile, quickest), "", stages).max() <= room_bytes:
        return quickest
    layered = _times(profile, machine, step)
    for most in (limit, float(layered.cut_s.max())):
        found = _partition_below(layered, stages, most, room)
        if found is not None:
            return found[0]
    return quickest


def section_entries(profile: ModelProfile, sizes: _Sizes) -> tuple[str, ...]:
    """Names of the layers with which a pipeline's sections after the first begin, given the sizes of all."""
    return tuple(profile.layers[first].name for first in accumulate(sizes[:-1]))


def _cut_tensor_layer(profile: ModelProfile, plan: Plan) -> str:
    """The layer behind a cut of which tensor parallelism divides what it is given; empty where there is none."""
    names = [layer.name for layer in profile.layers]
    cut = [names.index(name) for name in plan.cuts]
    if plan.mesh.tensor == 1:
        return ""
    return next((names[place] for place in cut if profile.layers[place - 1].leads), "")


@dataclass(frozen=True, kw_only=True)
class _MicroBatchStep:
    """What the time of a micro-batch depends on, beside the model and the machine."""

    tensor: int
    rows: int
    recompute: str
    precision: str
    remote: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class _LayerMemoryLimit:
    """What memory allows, layer by layer."""

    memory: LayerMemory
    order: Indices
    room_bytes: float

    def may_do(self, stages: int) -> bool:
        """Whether an average stage fits: most plans that are too large are told by this."""
        least = self.memory.states + self.memory.flight[-1] * self.memory.kept
        return bool(least[self.order].sum() <= stages * self.room_bytes)

    def of(self, begins: Indices) -> MemoryLimit:
        """For runs of layers, given where each begins."""
        return MemoryLimit(
            fixed_bytes=np.add.reduceat(self.memory.states[self.order], begins).tolist(),
            kept_bytes=np.add.reduceat(self.memory.kept[self.order], begins).tolist(),
            working_bytes=np.maximum.reduceat(self.memory.working[self.order], begins).tolist(),
            in_flight=self.memory.flight.tolist(),
            room_bytes=self.room_bytes,
        )


@lru_cache(maxsize=4096)
def _quickest(profile: ModelProfile, machine: MachineModel, step: _MicroBatchStep, stages: int) -> tuple[_Sizes, float]:
    """Whatever memory says: the least sum of the slowest stage and the slowest cut, and how long a cut may take for it.

    Cuts that are slower than one after the other are allowed, until even the quickest stages could not make up for it.
    """
    layered = _times(profile, machine, step)
    *limits, widest = np.unique(layered.cut_s[:-1]).tolist()
    floor = _partition_below(layered, stages, widest, None)
    assert floor is not None  # only memory can forbid every division
    best, most, least = floor[0], widest, floor[1] + widest
    for limit in limits:
        if limit + floor[1] >= least:
            break
        found = _partition_below(layered, stages, limit, None)
        if found is not None and found[1] + limit < least:
            best, most, least = found[0], limit, found[1] + limit
    return best, most


@dataclass(frozen=True, kw_only=True, eq=False)
class _LayerTimes:
    """Of each layer: seconds of a micro-batch in it and over a cut behind it, and whether it is trained."""

    seconds: Vector
    cut_s: Vector
    trained: npt.NDArray[np.bool_]


@lru_cache(maxsize=1024)
def _times(profile: ModelProfile, machine: MachineModel, step: _MicroBatchStep) -> _LayerTimes:
    """Seconds of a micro-batch, layer by layer."""
    alone = replace(Plan.parse(f"tp={step.tensor}"), micro_batch=step.rows, recompute=step.recompute)
    work = replace(
        compute_step_work(profile, machine, alone, batch_size=step.rows, precision=step.precision), remote=step.remote
    )
    layers = layer_vectors(profile)
    # Dear enough to be avoided wherever there is another cut; where there is none, the plan is refused.
    forbidden = np.array([step.tensor > 1 and layer.leads for layer in profile.layers]) * _FORBIDDEN_CUT_S
    sent = step.rows * NUMBER_BYTES.get(step.precision, 4) * layers.over_cuts() / step.tensor
    return _LayerTimes(
        seconds=layer_seconds(work)[layers.order],
        cut_s=send_seconds(work, sent)[layers.order] + forbidden,
        trained=np.array([layer.trained for layer in profile.layers]),
    )


def _partition_below(
    layered: _LayerTimes, stages: int, limit: float, room: _LayerMemoryLimit | None
) -> tuple[_Sizes, float] | None:
    """The best division of which no cut takes longer than a limit, and its slowest stage; None where there is none.

    A stage without a trained layer has nothing for an optimizer: where one would come of it, the layers between two
    places where a cut may be are joined until each run has one, if there are as many trained layers as stages.
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
    """Where runs of layers begin that have a trained one each."""
    kept = [0]
    for begin in begins[1:].tolist():
        if trained[kept[-1] : begin].any() and trained[begin:].any():
            kept.append(begin)
    return np.array(kept, dtype=np.int64)


def _partition_runs(
    layered: _LayerTimes, begins: npt.NDArray[np.int64], stages: int, room: _LayerMemoryLimit | None
) -> tuple[_Sizes, float] | None:
    """The best division into stages of whole runs of layers, given where each begins."""
    seconds = layered.seconds
    costs = np.add.reduceat(seconds, begins)
    sizes = partition_in_memory(costs.tolist(), stages, room.of(begins) if room else None)
    if sizes is None:
        return None
    firsts = np.cumsum((0, *sizes[:-1]))
    found = np.diff(np.append(begins[firsts], len(seconds)))
    return tuple(found.tolist()), float(np.add.reduceat(costs, firsts).max())


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
