"""Alternative plans of a run: to measure before the first step, for fewer or more workers, and with less memory.

A plan is a candidate if it needs as many workers as the chosen one and its prediction is below the upper end of that
one's interval; at most `MOST_CANDIDATES`, the best of each strategy. They are measured if that takes at most
`MEASURING_SHARE` of the run. The module is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainwright.core.data import PeakMemory
from trainwright.core.events import Probed
from trainwright.core.job import Job
from trainwright.core.plan import Plan, PlanConstraints
from trainwright.driver.rendezvous import PROBE_SECONDS, PROBE_STEPS
from trainwright.strategies import strategies_for
from trainwright.strategies.cost_model.estimator import Measurement, calibrate, estimate
from trainwright.strategies.search.plan_ranking import (
    TIE_RATIO,
    best_plan,
    estimate_of,
    first_of_strategies,
    plans_within,
    search_plans,
    suggest_changes,
)
from trainwright.strategies.search.plan_request import PlanRequest

MOST_CANDIDATES = 3
MEASURING_SHARE = 0.02
_OF_DEGREES = ("zero", "offload", "sequence", "wire")  # choices that mean nothing under other degrees
_LESS_MEMORY = 0.9  # of the prediction that was too low, at most, of a plan for a device that ran out of memory
_MOST_PLANS = 3  # that are named
_GIB = 2**30
_RENDEZVOUS_S = 4.0  # assumed before the first one: to form a group, build a model and warm it up


def candidate_plans(chosen: Plan, eligible: Iterable[Plan], job: Job) -> tuple[Plan, ...]:
    """Return the plans to measure, the chosen one first; empty where there is no choice, or the job pins it.

    Args:
        eligible: plans that can be carried out, best first.
    """
    if (
        not job.planning.probe
        or job.planning.strategy
        or job.planning.plan
        or job.tensorflow.run != "step"
        or not is_movable(chosen)
        or chosen.workers == 1
    ):
        return ()
    if job.training.compile == "inductor":  # each would be compiled, for minutes
        return ()
    limit_s, found = estimate_of(chosen).high_s, {chosen.strategy: chosen}
    for plan in eligible:
        if is_movable(plan) and plan.workers == chosen.workers and estimate_of(plan).step_s <= limit_s:
            found.setdefault(plan.strategy, plan)
    return tuple(found.values())[:MOST_CANDIDATES] if len(found) > 1 else ()


def is_worth_measuring(plans: Sequence[Plan], steps: int) -> bool:
    """Return whether measuring plans costs little compared with a run of a number of steps."""
    measured_s = sum(
        min((PROBE_STEPS + 2) * estimate_of(plan).step_s, PROBE_SECONDS + 2 * estimate_of(plan).step_s)
        for plan in plans
    )
    return (len(plans) + 1) * _RENDEZVOUS_S + measured_s <= MEASURING_SHARE * steps * estimate_of(plans[0]).step_s


def alternative_plans(job: Job, question: PlanRequest, plans: Sequence[Plan]) -> AlternativePlans | None:
    """Return the alternative layouts of a run; None where its processes cannot work under other plans.

    Args:
        question: of the job on its cluster.
        plans: the chosen one, then those that it is measured against.
    """
    return AlternativePlans(job=job, question=question, plans=tuple(plans)) if _resizable(plans[0]) else None


def is_movable(plan: Plan) -> bool:
    """Return whether a process of this plan can continue under others, for which it builds the model again.

    Not one of Keras, which names variables by how many a process has made: another build's would have other names.
    """
    return _resizable(plan) and not plan.keras_backend


def _resizable(plan: Plan) -> bool:
    """Return whether a process of this plan can get another number of replicas: torch, with one device."""
    torch = plan.strategy in strategies_for("torch") and ".torch." in plan.engine
    return torch and plan.topology == "collective" and plan.devices_per_worker == 1


@dataclass(frozen=True, kw_only=True, eq=False)
class AlternativePlans:
    """Implements the driver's `PlanSelector`."""

    job: Job
    question: PlanRequest
    plans: tuple[Plan, ...]
    _others: dict[int, tuple[Plan | None, str]] = field(default_factory=dict)

    def on(self, available: int, fewest: int) -> Plan | None:
        """Return a plan for `fewest` to `available` workers: the run's plan, smaller if needed, else another."""
        sizes = range(available, fewest - 1, -1)
        own = (_resized(self.plans[0], workers) for workers in sizes)
        other = (self._other(workers)[0] for workers in sizes)
        return next(filter(None, own), None) or next(filter(None, other), None)

    def lacking(self, available: int) -> str:
        """Return why the run's own plan does not fit a number of workers, and why others do not either."""
        plan, reason = self.plans[0], ""
        try:
            plan.resized(available)
        except ValueError as error:
            given = {"plan": self.job.planning.plan, "strategy": self.job.planning.strategy}
            pinned = [f"{name}={value!r}" for name, value in given.items() if value]
            reason = f"{error}" + (f", so that {' and '.join(pinned)} cannot hold" if pinned else "")
            other, lacking = self._other(available)
            reason = reason if other else f"{reason}; {lacking}"
        return reason

    def measured(self, step_s: Mapping[int, float], aside: Mapping[int, str]) -> tuple[AlternativePlans, Probed]:
        """Return the layouts with the best measured of `plans` as the run's, and an event that reports it."""
        question = self.question
        about: dict[str, Any] = {
            "profile": question.profile, "cluster": question.cluster, "batch_size": question.batch_size,
            "precision": question.precision,
        }  # fmt: skip
        calibration = calibrate([Measurement(plan=self.plans[n], step_s=s, **about) for n, s in step_s.items()])
        fitted = [estimate(plan=plan, calibration=calibration, **about) for plan in self.plans]
        best = min(step_s, key=step_s.__getitem__)
        if step_s.get(0, TIE_RATIO * 2 * step_s[best]) <= TIE_RATIO * step_s[best]:
            best = 0  # as good as the quickest, and the simplest
        note = f"measured before the first step: {1e3 * step_s[best]:.3g} ms"
        chosen = replace(self.plans[best], estimate=fitted[best]).noted(note)
        rows = [
            {
                "name": plan.name,
                "predicted_s": estimate_of(plan).step_s,
                "refitted_s": fitted[number].step_s,
                "measured_s": step_s.get(number),
                "note": aside.get(number, "goes on" if number == best else ""),
            }
            for number, plan in enumerate(self.plans)
        ]
        rows.sort(key=lambda row: (row["note"] != "goes on", row["measured_s"] is None, row["measured_s"] or 0.0))
        told = Probed(plan=asdict(chosen), name=chosen.name, rows=rows)
        question = replace(question, calibration=calibration)
        return replace(self, plans=(chosen,), question=question, _others={}), told

    def leaner(self, plan: Plan) -> AlternativePlans | None:
        """Return a selector whose plan, for as many workers, is predicted to need at least a tenth less memory.

        What the job pins holds, but for the degrees and a number of micro-batches above one. The run's own plan is
        searched for all of its workers, so that it fits again when lost ones are back. This selector if its plans need
        so much less already; None if no other plan does.
        """
        room_bytes = int(_LESS_MEMORY * plan.memory_bytes)
        if not room_bytes or 0 < self.question.room_bytes <= room_bytes:
            return self if room_bytes else None
        pins, names = self._demands()[0]
        accumulation, free = self.question.accumulation, {"micro_batch"}
        if self.job.training.local_state:
            accumulation = plan.accumulation  # each micro-batch has its own state
        elif (accumulation or 1) > 1:
            accumulation, free = None, {"micro_batch", "accumulation"}
        pins = replace(pins, choices={name: value for name, value in pins.choices.items() if name not in free})
        own = plan.layout in [each.layout for each in self.plans]
        workers = self.plans[0].workers if own else plan.workers
        question = replace(self.question, room_bytes=room_bytes, accumulation=accumulation)
        found = replace(self, question=question, _others={})
        best, _ = found._best(workers, pins, names, resizable=own and self.plans[0].strategy != "one_device")
        if best is None:
            return None
        found = replace(found, plans=(best,)) if own else replace(found, _others={workers: (best, "")})
        return found if found.on(plan.workers, plan.workers) is not None else None

    def _other(self, workers: int) -> tuple[Plan | None, str]:
        """Return the planner's choice for a number of workers: with the pinned choices where possible, else without."""
        if workers not in self._others:
            best, reason = None, ""
            for pins, names in self._demands():
                best, reason = self._best(workers, pins, names)
                if best is not None:
                    break
            self._others[workers] = (best, "" if best is not None else reason)
        return self._others[workers]

    def _best(
        self, workers: int, pins: PlanConstraints, names: Collection[str], *, resizable: bool = False
    ) -> tuple[Plan | None, str]:
        """Return the best plan of the named strategies for a number of workers, or why there is none.

        Args:
            resizable: the plan may get other numbers of workers later.
        """
        if self.plans[0].keras_backend:
            return None, "a model of Keras keeps its layout: a process cannot build it twice with the same names"
        bound = workers if resizable else None
        asked = replace(self.question, workers=workers, min_workers=bound, max_workers=bound, pins=pins)
        found = search_plans(asked)
        fitting = [
            plan
            for plan in found.plans
            if is_movable(plan) and plan.workers == workers and plan.strategy in names and pins.allow(plan)
        ]
        best = best_plan(asked, replace(found, plans=tuple(fitting)), asynchronous=True)
        if best is not None:
            return replace(best, placement=self.plans[0].placement), ""
        nearest = first_of_strategies(found.misfits).items()
        return None, "; ".join(f"{name}: {misfit.reason}" for name, misfit in nearest)

    def _demands(self) -> list[tuple[PlanConstraints, Collection[str]]]:
        """Return the pinned choices without degrees, then none."""
        known = tuple(strategies_for("torch"))
        pins = self.question.pins
        choices = {name: value for name, value in pins.choices.items() if name not in _OF_DEGREES}
        kept = (
            replace(pins, mesh=None, choices=choices),
            (self.job.planning.strategy,) if self.job.planning.strategy else known,
        )
        free = (PlanConstraints(), known)
        return [kept, free] if choices or self.job.planning.strategy else [free]


def _resized(plan: Plan, workers: int) -> Plan | None:
    if plan.strategy == "one_device" and workers > 1:
        return None
    try:
        return plan.resized(workers)
    except ValueError:
        return None


# --- What to say when a device runs out of memory ---------------------------------------------------------------------


def explain_out_of_memory(
    request: PlanRequest, first: Plan, plan: Plan | None, rank: int, memory: PeakMemory | None
) -> tuple[str, str]:
    """Return what was predicted and used, and what to do, as texts; both empty where nothing was predicted.

    Another plan is named if it is predicted to need a tenth less than the one that failed, however little that was: the
    prediction was too low, so that a comparison with the device's memory says nothing.

    Args:
        request: of the job.
        first: the plan of the run.
        plan: under which the device ran out of memory; None for `first`.
        rank: whose device it was.
        memory: its peak, if it is known.
    """
    failed = plan or first
    if failed.estimate is None or not failed.estimate.stage_memory_bytes:
        return "", ""
    stages = failed.estimate.stage_memory_bytes
    predicted = stages[min(failed.mesh.stage_of(rank * failed.devices_per_worker), len(stages) - 1)]
    figures = f"the plan predicted {predicted / _GIB:.3g} GiB"
    if failed.estimate.device_memory_bytes:
        figures += f" of the device's {failed.estimate.device_memory_bytes / _GIB:.3g} GiB"
    if memory is not None:
        figures += f", and tensors used {memory.allocated_bytes / _GIB:.3g} GiB"
        figures += f" ({memory.reserved_bytes / _GIB:.3g} GiB reserved)" if memory.reserved_bytes else ""
    return figures, _remedy(request, failed, int(_LESS_MEMORY * failed.memory_bytes))


def _remedy(request: PlanRequest, failed: Plan, room_bytes: int) -> str:
    """Name the quickest plans of a few strategies that are predicted to take less memory."""
    found = sorted(plans_within(request, room_bytes), key=lambda plan: estimate_of(plan).step_s)
    if not found:
        others = suggest_changes(request)
        return f"no plan on these nodes needs less memory: {others or 'use a smaller batch_size'}"
    named = [_described(plan, failed) for plan in found[:_MOST_PLANS]]
    return f"a plan that needs less memory: {'; or '.join(named)}"


def _described(plan: Plan, failed: Plan) -> str:
    """Return `strategy="sharded", plan="shard=8" (18 GiB, 1.2 times the step time)`."""
    needs = plan.memory_bytes / _GIB
    times = estimate_of(plan).step_s / estimate_of(failed).step_s
    return f'strategy="{plan.strategy}", plan="{plan.text}" ({needs:.3g} GiB, {times:.2g} times the step time)'
