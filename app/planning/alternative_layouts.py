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
_DEGREE_CHOICES = ("zero", "offload", "sequence", "wire")  # choices that mean nothing under other degrees
_MEMORY_RATIO = 0.9  # most predicted memory of a next plan, as a share of the failed plan's prediction
_LISTED_PLANS = 3  # most plans that an error names
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
    limit_s, first_of = estimate_of(chosen).high_s, {chosen.strategy: chosen}
    for plan in eligible:
        if is_movable(plan) and plan.workers == chosen.workers and estimate_of(plan).step_s <= limit_s:
            first_of.setdefault(plan.strategy, plan)
    return tuple(first_of.values())[:MOST_CANDIDATES] if len(first_of) > 1 else ()


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

    A Keras model is not movable: Keras numbers the variables of a process, so a second build has other names.
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
        resized_plans = (_resized(self.plans[0], workers) for workers in sizes)
        other_plans = (self._other(workers)[0] for workers in sizes)
        return next(filter(None, resized_plans), None) or next(filter(None, other_plans), None)

    def lacking(self, available: int) -> str:
        """Return why the run's own plan does not fit a number of workers, and why others do not either."""
        plan, reason = self.plans[0], ""
        try:
            plan.resized(available)
        except ValueError as error:
            options = {"plan": self.job.planning.plan, "strategy": self.job.planning.strategy}
            pinned = [f"{name}={value!r}" for name, value in options.items() if value]
            reason = f"{error}" + (f", so that {' and '.join(pinned)} cannot hold" if pinned else "")
            plan_found, other_reason = self._other(available)
            reason = reason if plan_found else f"{reason}; {other_reason}"
        return reason

    def measured(self, step_s: Mapping[int, float], aside: Mapping[int, str]) -> tuple[AlternativePlans, Probed]:
        """Return the layouts with the fastest measured plan as the run's plan, and an event that reports it."""
        question = self.question
        common: dict[str, Any] = {
            "profile": question.profile, "cluster": question.cluster, "batch_size": question.batch_size,
            "precision": question.precision,
        }  # fmt: skip
        calibration = calibrate([Measurement(plan=self.plans[n], step_s=s, **common) for n, s in step_s.items()])
        fitted = [estimate(plan=plan, calibration=calibration, **common) for plan in self.plans]
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
        event = Probed(plan=asdict(chosen), name=chosen.name, rows=rows)
        question = replace(question, calibration=calibration)
        return replace(self, plans=(chosen,), question=question, _others={}), event

    def leaner(self, plan: Plan) -> AlternativePlans | None:
        """Return a selector whose plan, for as many workers, is predicted to need at least a tenth less memory.

        The pinned choices hold, except degrees and a number of micro-batches above one. The run's own plan is searched
        for all of its workers, so that it fits again when lost workers are back. Return this selector if its plans
        already need a tenth less, and None if no other plan does.
        """
        room_bytes = int(_MEMORY_RATIO * plan.memory_bytes)
        if not room_bytes or 0 < self.question.room_bytes <= room_bytes:
            return self if room_bytes else None
        pins, names = self._constraints()[0]
        accumulation, unpinned = self.question.accumulation, {"micro_batch"}
        if self.job.training.local_state:
            accumulation = plan.accumulation  # each micro-batch has its own state
        elif (accumulation or 1) > 1:
            accumulation, unpinned = None, {"micro_batch", "accumulation"}
        pins = replace(pins, choices={name: value for name, value in pins.choices.items() if name not in unpinned})
        is_run_plan = plan.layout in [each.layout for each in self.plans]
        workers = self.plans[0].workers if is_run_plan else plan.workers
        question = replace(self.question, room_bytes=room_bytes, accumulation=accumulation)
        selector = replace(self, question=question, _others={})
        best, _ = selector._best(workers, pins, names, resizable=is_run_plan and self.plans[0].strategy != "one_device")
        if best is None:
            return None
        selector = replace(selector, plans=(best,)) if is_run_plan else replace(selector, _others={workers: (best, "")})
        return selector if selector.on(plan.workers, plan.workers) is not None else None

    def _other(self, workers: int) -> tuple[Plan | None, str]:
        """Return the planner's choice for a number of workers: with the pinned choices where possible, else without."""
        if workers not in self._others:
            best, reason = None, ""
            for pins, names in self._constraints():
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
        question = replace(self.question, workers=workers, min_workers=bound, max_workers=bound, pins=pins)
        ranking = search_plans(question)
        fitting = [
            plan
            for plan in ranking.plans
            if is_movable(plan) and plan.workers == workers and plan.strategy in names and pins.allow(plan)
        ]
        best = best_plan(question, replace(ranking, plans=tuple(fitting)), asynchronous=True)
        if best is not None:
            return replace(best, placement=self.plans[0].placement), ""
        nearest = first_of_strategies(ranking.misfits).items()
        return None, "; ".join(f"{name}: {misfit.reason}" for name, misfit in nearest)

    def _constraints(self) -> list[tuple[PlanConstraints, Collection[str]]]:
        """Return the pinned choices without degrees, then none."""
        strategies = tuple(strategies_for("torch"))
        pins = self.question.pins
        choices = {name: value for name, value in pins.choices.items() if name not in _DEGREE_CHOICES}
        pinned = (
            replace(pins, mesh=None, choices=choices),
            (self.job.planning.strategy,) if self.job.planning.strategy else strategies,
        )
        free = (PlanConstraints(), strategies)
        return [pinned, free] if choices or self.job.planning.strategy else [free]


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
    """Return predicted and used memory, and a remedy, as texts; both are empty without a prediction.

    The remedy names plans that are predicted to need a tenth less than the failed plan. The prediction was too low, so
    it cannot be compared with the device's memory.

    Args:
        request: of the job.
        first: the plan of the run.
        plan: the plan under which the device ran out of memory; None for `first`.
        rank: the rank of the device.
        memory: the peak of the device's memory; None if unknown.
    """
    failed_plan = plan or first
    if failed_plan.estimate is None or not failed_plan.estimate.stage_memory_bytes:
        return "", ""
    stages = failed_plan.estimate.stage_memory_bytes
    predicted_bytes = stages[min(failed_plan.mesh.stage_of(rank * failed_plan.devices_per_worker), len(stages) - 1)]
    figures = f"the plan predicted {predicted_bytes / _GIB:.3g} GiB"
    if failed_plan.estimate.device_memory_bytes:
        figures += f" of the device's {failed_plan.estimate.device_memory_bytes / _GIB:.3g} GiB"
    if memory is not None:
        figures += f", and tensors used {memory.allocated_bytes / _GIB:.3g} GiB"
        figures += f" ({memory.reserved_bytes / _GIB:.3g} GiB reserved)" if memory.reserved_bytes else ""
    return figures, _remedy(request, failed_plan, int(_MEMORY_RATIO * failed_plan.memory_bytes))


def _remedy(request: PlanRequest, failed: Plan, room_bytes: int) -> str:
    """Name the quickest plans of a few strategies that are predicted to take less memory."""
    plans = sorted(plans_within(request, room_bytes), key=lambda plan: estimate_of(plan).step_s)
    if not plans:
        changes = suggest_changes(request)
        return f"no plan on these nodes needs less memory: {changes or 'use a smaller batch_size'}"
    texts = [_plan_text(plan, failed) for plan in plans[:_LISTED_PLANS]]
    return f"a plan that needs less memory: {'; or '.join(texts)}"


def _plan_text(plan: Plan, failed: Plan) -> str:
    """Return `strategy="sharded", plan="shard=8" (18 GiB, 1.2 times the step time)`."""
    memory_gib = plan.memory_bytes / _GIB
    ratio = estimate_of(plan).step_s / estimate_of(failed).step_s
    return f'strategy="{plan.strategy}", plan="{plan.text}" ({memory_gib:.3g} GiB, {ratio:.2g} times the step time)'
