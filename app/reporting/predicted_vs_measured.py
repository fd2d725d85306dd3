"""The predicted and the measured step of a plan, compared in the smallest parts that both can distinguish."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainwright.core import formatting
from trainwright.core.data import LEAST_NOISE_SAMPLES, STEP_PHASES, PhaseTimes
from trainwright.core.plan import Estimate, Plan
from trainwright.reporting.run_history import RunHistory

_WHERE: Mapping[str, frozenset[str]] = {
    "recompute": frozenset({"backward"}),
    "gradients": frozenset({"wait"}),
    "bubble": frozenset({"wait"}),
    "transfers": frozenset({"wait"}),
    "stragglers": frozenset({"wait"}),
    "servers": frozenset({"wait"}),
    "optimizer": frozenset({"optimizer"}),
    "other": frozenset({"other"}),
}
_ANYWHERE = frozenset({"forward", "backward"})  # compute, and communication during it


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """One part of a step. Its seconds are None where they were not predicted, or not measured.

    Attributes:
        name: the predicted terms and the measured phases of this part.
    """

    name: str
    predicted_s: float | None = None
    measured_s: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted divided by measured."""
        if self.predicted_s is None or not self.measured_s:
            return None
        return self.predicted_s / self.measured_s

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return name, predicted, measured, ratio and note as texts."""
        seconds = [
            formatting.duration(math.nan if value is None else value) for value in (self.predicted_s, self.measured_s)
        ]
        return self.name, *seconds, "-" if self.ratio is None else f"{self.ratio:.2f}", self.note  # type: ignore[return-value]


def compare_step(estimate: Estimate | None, phases: PhaseTimes, step_s: float) -> list[StepPart]:
    """Return the parts of a step in order, then waiting for data, then the whole step.

    A term may be spread over several phases, and a phase may have several terms; what cannot be separated is one part.

    Args:
        step_s: median of the measured steps.
    """
    terms = estimate.terms if estimate else {}
    spread = {name: _WHERE.get(name, _ANYWHERE) for name in terms}
    held = {phase: frozenset(phase.split("+")) for phase in phases.medians}
    rows = []
    for places in _connected_phases([*spread.values(), *held.values()]):
        foretold = [name for name, where in spread.items() if where <= places]
        timed = [phase for phase, where in held.items() if where <= places]
        rows.append(
            StepPart(
                name=_name(foretold, timed),
                predicted_s=sum(terms[name] for name in foretold) if foretold else None,
                measured_s=sum(phases.medians[phase] for phase in timed) if timed else None,
                note=_parts({name: terms[name] for name in foretold}, phases.medians, timed),
            )
        )
    rows.append(StepPart(name="waiting for data", measured_s=phases.data_s))
    return [*rows, _whole(estimate, step_s)]


def step_parts(history: RunHistory, plan: Plan | None) -> list[StepPart]:
    """Return the parts of a run's steps; empty where no phase was timed."""
    phases = history.phases
    return compare_step(plan.estimate if plan else None, phases, history.median_step_s) if phases else []


def _connected_phases(sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Merge the sets that share a phase; return them in the order of the step."""
    found: list[frozenset[str]] = []
    for one in sets:
        meeting = [other for other in found if one & other]
        found = [other for other in found if not one & other] + [one.union(*meeting)]
    return sorted(found, key=lambda places: min(STEP_PHASES.index(place) for place in places))


def _name(terms: list[str], phases: list[str]) -> str:
    if not terms:
        return ", ".join(phases)
    return " + ".join(name.replace("_", " ") for name in terms) + (", exposed" if phases == ["wait"] else "")


def _parts(terms: Mapping[str, float], medians: Mapping[str, float], timed: list[str]) -> str:
    """Return the seconds of the terms and phases of a part that has several."""
    notes = []
    if len(terms) > 1:
        notes.append(
            "predicted " + ", ".join(f"{n.replace('_', ' ')} {formatting.duration(s)}" for n, s in terms.items())
        )
    if len(timed) > 1 or (timed and "+" in timed[0]):
        notes.append(
            "measured "
            + ", ".join(f"{phase.replace('+', ' + ')} {formatting.duration(medians[phase])}" for phase in timed)
        )
    return "; ".join(notes)


def _whole(estimate: Estimate | None, step_s: float) -> StepPart:
    if estimate is None:
        return StepPart(name="step", measured_s=step_s)
    inside = "within" if estimate.low_s <= step_s <= estimate.high_s else "outside"
    interval = f"{formatting.duration(estimate.low_s)} to {formatting.duration(estimate.high_s)}"
    return StepPart(
        name="step",
        predicted_s=estimate.step_s,
        measured_s=step_s,
        note=f"measured {inside} the predicted interval, {interval}",
    )


def noise_text(history: RunHistory, plan: Plan | None) -> str:
    """Return the gradient noise scale or why it is unknown; empty before anything was measured."""
    summary = history.summary
    if not summary.measured:
        return ""
    if history.noise is not None:
        step, noise = history.noise
        since = "" if summary.measured[-1].noise else "; the estimates since then vary too much"
        return (
            f"{noise.text} at step {step:,}{since} ({noise.count:,} steps were sampled; a batch has {noise.batch:,.0f})"
        )
    if plan is not None and plan.servers:
        return ""  # no process has both the gradients of all shares of a step and their sum
    sampled = summary.measured[-1].sampled
    if plan is not None and plan.mesh.data_ranks * plan.micro_batches(plan.batch_size)[0] == 1:
        return "cannot be measured: the batch is not divided; accumulation=2 divides it"
    if not sampled:
        return "not known: no step was sampled"
    if sampled < LEAST_NOISE_SAMPLES:
        return f"not known: {sampled} steps were sampled, {LEAST_NOISE_SAMPLES} are needed"
    return f"not known: the estimates of {sampled:,} steps vary too much"
