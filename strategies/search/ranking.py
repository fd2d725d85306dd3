"""All plans for a model on a cluster, best first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypedDict

from trainwright.core.cluster import Cluster
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Estimate, Infeasible, Plan
from trainwright.strategies.cost_model.calibration import DEFAULT, Calibration
from trainwright.strategies.cost_model.estimate import estimate, expected
from trainwright.strategies.cost_model.machine import Machine
from trainwright.strategies.cost_model.memory import host_bytes, outbox_bytes, served_bytes, stage_memory
from trainwright.strategies.cost_model.staleness_cost import factors
from trainwright.strategies.cost_model.step_work import refusal, work_of
from trainwright.strategies.search.compatibility import combination, compiled
from trainwright.strategies.search.plan_request import Question
from trainwright.strategies.search.stage_cuts import cuts, entries, severed

USABLE = 0.92  # of a device's memory: the rest is the framework's, and lost between blocks
SURE = 20  # plans that get an interval, beside the best of each strategy
AHEAD = 1.1  # times as quickly to the same loss as all others, before ranks step alone, or stale, that nobody asked for
CONSISTENCIES = ("", "sync", "ssp", "async")  # the simplest first
TIE = 1.02  # times the best step: the simplest of these is chosen


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Plans that fit, best first, and what makes others impossible, the nearest to fitting first.

    By time to the same loss (`Estimate.target_s`), as far as that can be told. Plans whose ranks step alone come last,
    but for those that are far ahead of all others on a cluster for which they are made.
    """

    plans: tuple[Plan, ...]
    misfits: tuple[Infeasible, ...]
    ahead_s: float = 0.0

    @property
    def unasked(self) -> tuple[Plan, ...]:
        """Those that may be chosen where nobody asked for ranks that step alone: these, where they are far ahead."""
        return tuple(plan for plan in self.plans if not steps_alone(plan) or estimate_of(plan).target_s <= self.ahead_s)


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
    return list(ranking(profile, cluster, batch_size=batch_size, precision=precision, calibration=calibration).plans)


def ranking(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch_size: int,
    precision: str,
    calibration: Calibration | None = None,
) -> Ranking:
    """As `rank`, with what does not fit."""
    question = Question(profile=profile, cluster=cluster, batch_size=batch_size, precision=precision)
    return answer(question, calibration)


def answer(question: Question, calibration: Calibration | None = None) -> Ranking:
    """The plans of all strategies for the model's framework; on accelerators, where none fits, those that offload.

    Raises:
        ResourceError: nothing is known of an accelerator.
    """
    sized = _Sized(question, calibration or DEFAULT)
    fitting, misfits = _fitting(sized)
    runs = not question.profile.framework or any(plan.engine and not steps_alone(plan) for plan in fitting)
    if not runs and question.cluster.accelerators and not question.offload:
        offloaded = _fitting(_Sized(replace(question, offload=True), sized.calibration))
        fitting, misfits = fitting + offloaded[0], misfits + offloaded[1]
    ahead_s = _ahead(question, fitting, calibration) if question.cluster.uneven else 0.0
    fitting.sort(key=lambda plan: _order(plan, ahead_s))
    best = {plan.strategy: number for number, plan in reversed([*enumerate(fitting)])}
    for number in {*range(min(SURE, len(fitting))), *best.values()}:
        fitting[number] = sized.sure(fitting[number])
    misfits.sort(key=lambda one: (one.plan is not None and steps_alone(one.plan), one.missing_bytes or math.inf))
    return Ranking(plans=tuple(fitting), misfits=tuple(misfits), ahead_s=ahead_s)


def sure(question: Question, plan: Plan) -> Plan:
    """A plan that was ranked, with the interval of its estimate, which only the first ones have."""
    return _Sized(question, DEFAULT).sure(plan)


def _fitting(sized: _Sized) -> tuple[list[Plan], list[Infeasible]]:
    """What fits and what does not, in the order of the strategies."""
    fitting: list[Plan] = []
    misfits: list[Infeasible] = []
    for item in _proposals(sized.question):
        for found in [item] if isinstance(item, Infeasible) else _variants(sized, item):
            (misfits if isinstance(found, Infeasible) else fitting).append(found)  # type: ignore[arg-type]
    return fitting, misfits


def simplest(plans: Iterable[Plan]) -> Plan:
    """Of plans, best first, the simplest of those that are as good as the first.

    Plans whose updates are stale only where they are far ahead of the same strategy's `sync`.
    """
    found = list(plans)
    fresh = [plan for plan in found if plan.strategy == found[0].strategy and plan.consistency in ("", "sync")]
    if steps_alone(found[0]) and fresh and AHEAD * estimate_of(found[0]).target_s > estimate_of(fresh[0]).target_s:
        found = fresh
    limit = TIE * estimate_of(found[0]).target_s
    tied = [plan for plan in found if plan.topology == found[0].topology and estimate_of(plan).target_s <= limit]
    return min(tied, key=_complexity)


def undivided(plans: Iterable[Plan]) -> list[Plan]:
    """Without those that divide a model, by ZeRO, in stages or by layers, which as many ranks could hold whole.

    Dividing it costs more than the estimate knows: FSDP2's steps on CPUs take 1.3 to 7 times DDP's.
    """
    found = list(plans)
    whole = {plan.mesh.size for plan in found if not divides(plan) and not steps_alone(plan)}
    return [plan for plan in found if not divides(plan) or plan.mesh.size not in whole]


def divides(plan: Plan) -> bool:
    """Whether no rank holds all of the model."""
    return bool(plan.zero) or plan.mesh.pipeline > 1 or plan.mesh.tensor > 1


def estimate_of(plan: Plan) -> Estimate:
    """Of a plan that was ranked."""
    assert plan.estimate is not None, "a ranked plan has an estimate"
    return plan.estimate


def steps_alone(plan: Plan) -> bool:
    """Whether ranks step alone, against servers."""
    return plan.topology == "independent" or plan.servers > 0


def _ahead(question: Question, plans: Iterable[Plan], calibration: Calibration | None) -> float:
    """Seconds to the same loss that ranks which step alone must not take longer than, to be chosen unasked.

    Where accelerators differ, those of one kind that step together are what they are held against too.
    """
    kinds = question.cluster.kinds if len(question.cluster.kinds) > 1 and not question.workers else ()
    found = list(plans)
    for kind in kinds:
        nodes = tuple(node for node in question.cluster.nodes if node.kind == kind)
        found += answer(replace(question, cluster=Cluster(nodes=nodes)), calibration).plans
    together = [plan for plan in found if not steps_alone(plan)]
    runs = [plan for plan in together if plan.engine] or together
    return min((estimate_of(plan).target_s for plan in undivided(runs)), default=0.0) / AHEAD


def _order(plan: Plan, ahead_s: float) -> tuple[bool, float]:
    """Ranks that step alone come last, unless they are as far ahead as this."""
    target_s = estimate_of(plan).target_s
    return steps_alone(plan) and target_s > ahead_s, target_s


def _complexity(plan: Plan) -> tuple[int, ...]:
    """Fewer kinds of parallelism, then less of each that costs something."""
    mesh = plan.mesh
    kinds = sum(degree > 1 for degree in (mesh.pipeline, mesh.data, mesh.shard, mesh.tensor))
    apart = (plan.local_steps, CONSISTENCIES.index(plan.consistency.partition("(")[0]), plan.servers)
    divided = (mesh.pipeline, mesh.tensor, plan.zero)
    return kinds, *apart, *divided, plan.recompute != "none", plan.chunks, plan.accumulation


def _proposals(question: Question) -> Iterator[Plan | Infeasible]:
    """What the strategies propose that have an engine for whose steps the job wants."""
    from trainwright.strategies import strategies_for

    for name, strategy in strategies_for(question.profile.framework).items():
        refused = question.needs_replicas(name)
        if refused is not None:
            yield refused
        elif question.run == "fit" and not hasattr(strategy, "FIT"):
            framework = question.profile.framework
            no_fit = "and it has no such strategy" if framework == "tensorflow" else f"and this model is of {framework}"
            reason = getattr(strategy, "NO_FIT", f'run="fit" is Keras\' own, {no_fit}')
            hint = "leave run= out: trainwright's steps train any model"
            yield Infeasible(strategy=name, reason=reason, hint=hint)
        elif not question.offload or hasattr(strategy, "OFFLOADS"):
            yield from strategy.propose(question)
        else:
            hint = "leave offload out, or use a strategy that divides the model's state"
            yield Infeasible(strategy=name, reason="it keeps the model's state on the device", hint=hint)


Choices = tuple[str, ...]  # of recomputation, from the quickest on


class Numbers(TypedDict):
    """What every estimate is asked with."""

    batch_size: int
    precision: str


class _Sized:
    """A question whose plans are measured against time and memory; what several of them share is found once."""

    def __init__(self, question: Question, calibration: Calibration) -> None:
        self.question, self.calibration = question, calibration
        of_cpus = not question.cluster.accelerators
        self._machine = cache(lambda ranks: Machine.of(question.cluster, ranks if of_cpus else None))
        self._numbers: Numbers = {"batch_size": question.batch_size, "precision": question.precision}

    def machine(self, plan: Plan) -> Machine:
        """That the plan's ranks run on."""
        return self._machine(plan.mesh.size)

    def sized(self, plan: Plan) -> Plan | Infeasible:
        """The plan with its estimate, or why it cannot be."""
        profile, machine = self.question.profile, self.machine(plan)
        reason = refusal(profile, machine, plan, self.question.batch_size) or (plan.engine and combination(plan))
        if self.question.compile == "inductor":
            reason = reason or compiled(plan.recompute, profile.recounted)
        if reason:
            return Infeasible(strategy=plan.strategy, reason=reason[0], hint=reason[1], plan=plan)
        room = USABLE * machine.device.memory_bytes or math.inf
        if plan.mesh.pipeline > 1:
            plan = replace(plan, stages=cuts(profile, machine, plan, room_bytes=room, **self._numbers))
            if plan.engine:
                plan = replace(plan, cuts=entries(profile, plan.stages))
                layer = severed(profile, plan)
                if layer:
                    why = f"the stages cut the block of {layer!r}, which tp={plan.mesh.tensor} divides"
                    return Infeasible(strategy=plan.strategy, reason=why, hint="use fewer stages, or tp=1", plan=plan)
        memory = stage_memory(profile, plan, apart=machine.device.apart, **self._numbers)
        if max(memory) > room:
            return _too_large(plan, memory, room)
        kept = host_bytes(profile, plan, precision=self.question.precision) + outbox_bytes(profile, plan)
        kept += served_bytes(profile, plan, nodes=machine.nodes) // machine.per_node
        missing = kept - machine.host_bytes
        if machine.host_bytes and missing > 0:
            what = f"out of the host's memory by {missing / 2**30:.1f} GiB for each device"
            more = "have more nodes with servers" if plan.servers else "shard over more devices"
            hint = f"{more}, or use nodes with more memory"
            return Infeasible(strategy=plan.strategy, reason=what, hint=hint, plan=plan, missing_bytes=missing)
        work = work_of(profile, machine, plan, **self._numbers)
        terms = expected(work, self.calibration)
        step_s = sum(terms.values())
        found = Estimate(
            step_s=step_s, low_s=step_s, high_s=step_s, terms=terms, stage_memory_bytes=memory,
            device_memory_bytes=machine.device.memory_bytes, factors=factors(work),
        )  # fmt: skip
        return replace(plan, estimate=found)

    def sure(self, plan: Plan) -> Plan:
        """The plan with the interval of its estimate."""
        question = self.question
        found = estimate(question.profile, question.cluster, plan, calibration=self.calibration, **self._numbers)
        return replace(plan, estimate=found)


def _variants(sized: _Sized, plan: Plan) -> Iterator[Plan | Infeasible]:
    """A proposal with every number of micro-batches and recomputation that may be best.

    Computing again is never quicker, so it is looked at only where without it memory does not do.
    """
    counts, choices = _micro_batches(sized.question, plan), _recomputations(sized.question)
    return _staged(sized, plan, counts, choices) if plan.mesh.pipeline > 1 else _plain(sized, plan, counts, choices)


def _plain(sized: _Sized, plan: Plan, counts: Sequence[int], choices: Choices) -> Iterator[Plan | Infeasible]:
    """Without a pipeline fewer micro-batches are never slower, so that the fewest which fit are enough."""
    for recompute in choices:
        found = _first_fitting(sized, (_variant(sized.question, plan, count, recompute) for count in counts))
        if found is not None:
            yield found
        if isinstance(found, Plan):
            counts = counts[: counts.index(found.accumulation)]


def _staged(sized: _Sized, plan: Plan, counts: Sequence[int], choices: Choices) -> Iterator[Plan | Infeasible]:
    """Larger micro-batches never hold less: what does not fit is not asked for again."""
    fits = False
    for count in reversed(counts):
        tried = (_variant(sized.question, plan, count, recompute) for recompute in choices)
        found = _first_fitting(sized, tried)
        if isinstance(found, Plan):
            choices, fits = choices[choices.index(found.recompute) :], True
        if isinstance(found, Plan) or (found is not None and not fits):
            yield found
        if isinstance(found, Infeasible) and found.missing_bytes:
            return


def _variant(question: Question, plan: Plan, count: int, recompute: str) -> Plan:
    profile = question.profile
    can = recompute == "none" or (profile.framework == "torch" and not profile.keras_backend)
    engine = plan.engine if can else ""
    return replace(plan, accumulation=count, recompute=recompute, engine=engine)


def _first_fitting(sized: _Sized, plans: Iterable[Plan]) -> Plan | Infeasible | None:
    """The first that fits, else why the last does not; None where there is none."""
    found: Plan | Infeasible | None = None
    for plan in plans:
        found = sized.sized(plan)
        if isinstance(found, Plan):
            return found
    return found


def _recomputations(question: Question) -> Choices:
    """Attention's scores alone where there are any, and no compiler chooses by itself what it makes again."""
    if "recompute" in question.pins.choices:
        return (question.pins.choices["recompute"],)
    scores = any(layer.scores_numbers for layer in question.profile.layers)
    selective = scores and question.compile != "inductor"
    return ("none", "selective", "full") if selective else ("none", "full")


def _micro_batches(question: Question, plan: Plan) -> list[int]:
    """How many a data rank's share may be divided into: as the job says, or so that they hold powers of two."""
    fixed = question.run == "fit" or question.undeclared or (plan.mesh.pipeline > 1 and not plan.schedule)
    if question.accumulation or fixed:
        return [question.accumulation or 1]
    share = -(-question.batch_size // plan.mesh.data_ranks)
    if "micro_batch" in question.pins.choices:
        return [max(1, -(-share // max(1, question.pins.choices["micro_batch"])))]
    smaller = [2**power for power in range(share.bit_length()) if 2**power < share]
    return [1, *(-(-share // size) for size in reversed(smaller))]


def _too_large(plan: Plan, memory: tuple[int, ...], room: float) -> Infeasible:
    stage = max(range(len(memory)), key=memory.__getitem__)
    missing = int(memory[stage] - room)
    return Infeasible(
        strategy=plan.strategy,
        reason=f"out of memory by {missing / 2**30:.1f} GiB on stage {stage}",
        hint="recompute activations, shard over more devices, or use a smaller micro-batch",
        plan=plan,
        missing_bytes=missing,
    )
