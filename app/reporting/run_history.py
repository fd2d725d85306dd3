"""The history of a run for reports, views and `Run`: read from storage or from events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from trainwright.core import formatting
from trainwright.core.data import LEAST_NOISE_SAMPLES, STEP_PHASES, NoiseScale, PhaseTimes, merge_phase_times
from trainwright.core.events import (
    Evaluated,
    Event,
)
from trainwright.core.metric_goals import best_evaluation
from trainwright.core.plan import Estimate, Plan
from trainwright.reporting.utilization import UtilizationMeter
from trainwright.storage.event_files import EventReader, SummaryReader
from trainwright.storage.object_store import Store
from trainwright.storage.run_log import LogEntry, RunLog, owner_alive
from trainwright.storage.run_summary import (
    STATE_BY_OUTCOME,
    RunState,
    RunSummary,
    StepRecord,
    StepTable,
    TimeTotals,
    epoch_of,
    noise_of,
)

if TYPE_CHECKING:
    import pandas


_STEP_COLUMNS = (
    "step", "epoch", "loss", "learning_rate", "gradient_norm", "samples_per_s", "wait_share", "generation",
)  # fmt: skip
TIME_LABELS = {
    "computing": "computing steps", "data": "waiting for data", "start": "start-up", "evaluation": "evaluation",
    "checkpoint": "checkpoints", "recovery": "recovery and repeated steps", "other": "other",
}  # fmt: skip
"""Parts of `TimeTotals` in words."""
_TABLE_COLUMNS = ("step", "epoch", "loss", "learning_rate", "gradient_norm", "generation")


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What reports and views need to know of a run: the summary of its events, its state, and figures of both.

    Attributes:
        summary: of all events of the run. It must not change after the history was made.
        state: of the run, by its events and its log.
    """

    summary: RunSummary = field(default_factory=RunSummary)
    state: RunState = "running"

    @classmethod
    def fold(cls, events: Iterable[Event], *, owner_alive: bool = True) -> RunHistory:
        """Summarize events, given in order.

        Args:
            owner_alive: whether the driver lives; tells a running driver from one that was killed.
        """
        summary = RunSummary()
        for event in events:
            summary.add(event)
        return cls(summary=summary, state=summary.state(owner_alive))

    @cached_property
    def records(self) -> tuple[StepRecord, ...]:
        """The last record of each step, in order.

        Steps lost in a failure are missing until they are repeated. A run of more than some thousand steps has its
        older steps merged (see `StepTable`); `read_steps` returns each of them.
        """
        return self.summary.steps.records

    @cached_property
    def evaluated(self) -> tuple[Evaluated, ...]:
        """The last evaluation of each step, in order."""
        return self.summary.ordered_evaluations

    @property
    def best(self) -> tuple[str, Evaluated] | None:
        """The goal `best=` of the run and its best evaluation; None without either."""
        goal = self.summary.start.job.get("best", "")
        best = best_evaluation(goal, self.evaluated) if goal not in ("", "None") else None
        return None if best is None else (goal, best)

    @cached_property
    def totals(self) -> TimeTotals:
        """Where the time of all sessions went."""
        return self.summary.totals()

    @property
    def error(self) -> str:
        """The error that ended the run; empty where there is none."""
        return self.summary.end.error if self.summary.end else ""

    @property
    def reason(self) -> str:
        """Why the run ended before its last step; empty if it did not."""
        return self.summary.end.reason if self.summary.end else ""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the newest evaluation; empty before the first."""
        return dict(self.evaluated[-1].metrics) if self.evaluated else {}

    @property
    def loss(self) -> float:
        """Training loss of the last step; NaN before the first."""
        return self.records[-1].loss if self.records else math.nan

    @property
    def samples_per_s(self) -> float:
        """Throughput of all steps that count; NaN before the first."""
        seconds = sum(record.step_s for record in self.records)
        return sum(record.samples for record in self.records) / seconds if seconds > 0 else math.nan

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the steps since the newest rendezvous, 0 to 1; NaN where it is not known."""
        newest = [each for each in self.records if each.generation == self.records[-1].generation]
        seconds = sum(record.step_s for record in newest)
        samples = sum(record.samples for record in newest)
        return UtilizationMeter.of(self.summary).at(samples / seconds) if seconds > 0 else math.nan

    @property
    def wait_share(self) -> float:
        """Share of the steps' time that waited for data, 0 to 1; NaN where no step reports it."""
        told = [record for record in self.records if math.isfinite(record.wait_s)]
        seconds = sum(record.step_s for record in told)
        return sum(record.wait_s for record in told) / seconds if seconds > 0 else math.nan

    @property
    def median_step_s(self) -> float:
        """Median duration of a step; NaN before the first."""
        ordered = sorted((record.typical_s, record.count) for record in self.records)
        half, passed = sum(count for _, count in ordered) // 2, 0
        for seconds, count in ordered:
            passed += count
            if passed > half:
                return seconds
        return math.nan

    @property
    def phases(self) -> PhaseTimes | None:
        """Median seconds of the phases of a step with the newest number of workers; None where none were timed."""
        alike = [item for item in self.summary.measured if item.workers == self.summary.measured[-1].workers]
        return merge_phase_times(
            [PhaseTimes(steps=item.steps, medians=item.phases, data_s=item.data_s) for item in alike]
        )

    @property
    def noise(self) -> tuple[int, NoiseScale] | None:
        """The newest known gradient noise scale and its step; None where it was never known."""
        found = ((event.step, noise_of(event)) for event in reversed(self.summary.measured))
        return next(((step, noise) for step, noise in found if noise is not None), None)

    @cached_property
    def evaluations(self) -> pandas.DataFrame:
        """One row for each evaluation: step, epoch, each metric by name, seconds."""
        import pandas

        names = sorted({name for evaluation in self.evaluated for name in evaluation.metrics})
        columns: dict[str, list[float]] = {
            "step": [e.step for e in self.evaluated],
            "epoch": [epoch_of(e.step, self.summary.start.steps_per_epoch) for e in self.evaluated],
            **{name: [e.metrics.get(name, math.nan) for e in self.evaluated] for name in names},
            "seconds": [e.seconds for e in self.evaluated],
        }
        return pandas.DataFrame(columns)


def read_history(store: Store, run: str) -> RunHistory:
    """Read the history of a run from storage. Raises StorageError."""
    return HistoryReader(store, run).read()


class HistoryReader:
    """Reads the history of a run from storage. Call `read` again for a newer one: each event is read once."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._reader = SummaryReader(store, run)
        self._history, self._covered = RunHistory(), dict[int, int]()

    def read(self) -> RunHistory:
        """Return the history so far, the same object while nothing is new. Raises StorageError.

        It is valid until the next call.
        """
        head = RunLog(self._store, self._run).head()
        alive = owner_alive(self._store, self._run, head)
        summary = self._reader.read()
        state, covered = state_of(summary, head, alive), dict(self._reader.covered)
        if (summary, state, covered) != (self._history.summary, self._history.state, self._covered):
            self._history, self._covered = RunHistory(summary=summary, state=state), covered
        return self._history


def state_of(summary: RunSummary, head: LogEntry | None, owner_alive: bool) -> RunState:
    """Return the state of a run by its events, or by its log where the log is newer.

    Args:
        owner_alive: whether the driver of this entry is alive.
    """
    state: RunState | None = None
    if head is not None and not head.owned:
        state = STATE_BY_OUTCOME.get(head.outcome)
    elif head is not None and head.token > summary.start.token:
        state = "running" if owner_alive else "interrupted"  # a new driver that has not written events yet
    return state or summary.state(owner_alive)


def read_steps(store: Store, run: str) -> pandas.DataFrame:
    """Read one row for each completed step, with `_STEP_COLUMNS` and logged values, from all events of a run.

    Raises StorageError.
    """
    summary = RunSummary(most_rows=None)
    for event in EventReader(store, run).read():
        summary.add(event)
    return _step_frame(summary.steps)


def _step_frame(table: StepTable) -> pandas.DataFrame:
    """Return the table as a frame with `_STEP_COLUMNS`, and a column for each logged value."""
    import numpy
    import pandas

    columns = {name: numpy.array(table.column(name)) for name in ("samples", "step_s", "wait_s", *_TABLE_COLUMNS)}
    took = columns["step_s"] > 0
    for name, upper, other in (("samples_per_s", "samples", math.nan), ("wait_share", "wait_s", 0.0)):
        columns[name] = numpy.full(len(table), other)
        numpy.divide(columns[upper], columns["step_s"], out=columns[name], where=took)
    logged = {name: numpy.array(values) for name, values in table.logged.items()}
    return pandas.DataFrame({**columns, **logged}, columns=[*_STEP_COLUMNS, *logged])


# --- The predicted and the measured step, in the smallest parts that both can distinguish -----------------------------


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
    """One part of a step. Its seconds are None where they were not predicted, or not measured."""

    name: str  # the predicted terms and the measured phases of this part
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
