"""The report of a chaos test: two runs compared, the cost of each fault, and the result as JSON and as a table.

Keys of the JSON: {job, seed, passed, agrees, verdict, differences, since_step, repeatable, steps, steps_lost, faults:
[{fault, time_s, step, whom, detection_s, recovery_s, steps_lost, source, checkpoints_skipped}], missed, leftovers,
changed, goodput, unbroken_goodput, seconds, unbroken_seconds, kept}. Times are seconds since the epoch, durations are
seconds, and unknown values are null. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.chaos_testing.fault_schedule import CATALOGUE
from trainwright.chaos_testing.run_observer import InjectedFault, ObservedRun
from trainwright.core import formatting
from trainwright.core.events import CheckpointSkipped, Event, Failed, Formed, RunStarted, Steps
from trainwright.reporting.plan_view import facts_table
from trainwright.reporting.run_history import RunHistory

_SHOWN_FILES = 4
_DRIVERS = {fault.name for fault in CATALOGUE if fault.target == "driver"}


@dataclass(frozen=True, kw_only=True)
class FinalCheckpoint:
    """The newest checkpoint of a run: its step, and the checksums of its files by name."""

    step: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FaultCost:
    """The cost of one fault."""

    injected: InjectedFault
    detection_s: float | None = None  # time from the fault to the first failure event; None if there was none
    # time from there, for a driver from its death, until the run could step again; None without recovery
    recovery_s: float | None = None
    steps_lost: int = 0  # completed steps that were repeated
    source: str = ""  # where the state came from: `replica`, `checkpoint` or `initial`; empty without recovery
    checkpoints_skipped: int = 0  # number of checkpoints that did not become durable


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """Result of a chaos test. It is true if the test passed."""

    job: str
    seed: int  # of the schedule of faults
    steps: int
    differences: tuple[str, ...] = ()  # differences from the uninterrupted run, in words
    since_step: int | None = None  # the first step whose loss differs; None if none does
    repeatable: bool | None = None  # whether two uninterrupted runs agree; None if not tried
    costs: tuple[FaultCost, ...] = ()
    missed: tuple[str, ...] = ()  # faults that were not injected before the run ended
    leaks: tuple[str, ...] = ()  # processes, shared memory and actors that outlived the run under faults
    changed: tuple[str, ...] = ()  # fields of the job that were changed for the run under faults, in words
    goodput: float = math.nan  # share of the time under faults that computed steps that count
    unbroken_goodput: float = math.nan  # the same of the uninterrupted run
    seconds: float = 0.0  # time from the first event of the run under faults to the last
    unbroken_seconds: float = 0.0  # the same of the uninterrupted run
    storage: str = ""  # where the runs are; empty if they were deleted

    @property
    def agrees(self) -> bool:
        """Return whether the runs agree."""
        return not self.differences

    @property
    def passed(self) -> bool:
        """Return whether at least one fault was injected, the runs agree and nothing leaked."""
        return self.agrees and not self.leaks and bool(self.costs)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def summary(self) -> str:
        """Return the result in one sentence."""
        after = f"after {formatting.count(len(self.costs), 'fault')}"
        if not self.costs:
            return "no fault was injected: the run ended before the first; set more steps, such as --set epochs=..."
        if self.repeatable is False:
            return f"{after} the run differs, but so do two uninterrupted runs: the job itself is not repeatable"
        if not self.agrees:
            since = f" since step {self.since_step}" if self.since_step is not None else ""
            return f"{after} the run differs from the uninterrupted one{since}"
        leaked = ", but leaked resources" if self.leaks else ""
        return f"{after} the run agrees bitwise with the uninterrupted one{leaked}"


def compare_runs(
    reference: ObservedRun, final: FinalCheckpoint, other: ObservedRun, other_final: FinalCheckpoint
) -> tuple[tuple[str, ...], int | None]:
    """Return the differences of a run from a reference run in words, and the first step whose loss differs.

    Every execution of a step is compared, also those of repeated steps.
    """
    if other.error:
        return (f"the run failed: {other.error}",), None
    found = []
    expected = dict(_executed_steps(reference.events))
    executed = list(_executed_steps(other.events))
    wrong = sorted({step for step, loss in executed if not _equal_losses(expected.get(step), loss)})
    missing = sorted(set(expected) - {step for step, _ in executed})
    if wrong:
        found.append(f"the loss differs in {formatting.count(len(wrong), 'step')}, first in step {wrong[0]}")
    if missing:
        found.append(f"{formatting.count(len(missing), 'step')} are missing, first step {missing[0]}")
    if final.step != other_final.step:
        found.append(f"the newest checkpoint is of step {other_final.step}, not {final.step}")
    names = sorted(set(final.files) | set(other_final.files))
    files = [name for name in names if final.files.get(name) != other_final.files.get(name)]
    if files and final.step == other_final.step:
        more = f" and {len(files) - _SHOWN_FILES} more" if len(files) > _SHOWN_FILES else ""
        found.append(f"files of the last checkpoint differ: {', '.join(files[:_SHOWN_FILES])}{more}")
    sizes = sorted({event.workers for event in other.events if isinstance(event, Formed)})
    if found and len(sizes) > 1:
        found.append(f"it ran with {' and '.join(map(str, sizes))} workers, whose sums round differently")
    return tuple(found), wrong[0] if wrong else None


def _executed_steps(events: Iterable[Event]) -> Iterator[tuple[int, float]]:
    """Yield each executed step with its loss."""
    for event in events:
        if isinstance(event, Steps):
            yield from zip(event.step, event.loss, strict=True)


def _equal_losses(one: float | None, other: float) -> bool:
    """Return whether two losses are equal; all NaNs are equal."""
    return one is not None and (one == other or (math.isnan(one) and math.isnan(other)))


def fault_costs(run: ObservedRun) -> tuple[FaultCost, ...]:
    """Return the cost of each fault: of the events until the next fault, for a driver through the new start."""
    until_s = []
    for place, given in enumerate(run.injected):
        again = given.fault in _DRIVERS
        later = [other for other in run.injected[place + 1 :] if not (again and other.fault == "start")]
        until_s.append(later[0].time_s if later else math.inf)
    return tuple(
        _cost(given, [event for event in run.events if given.time_s <= event.time_s < end_s], run.events)
        for given, end_s in zip(run.injected, until_s, strict=True)
    )


def _cost(injected: InjectedFault, since: Sequence[Event], events: Iterable[Event]) -> FaultCost:
    failed = next((event for event in since if isinstance(event, Failed)), None)
    formed = [event for event in since if isinstance(event, Formed)]
    driver = any(isinstance(event, RunStarted) for event in since)
    stopped_s = injected.time_s if driver or failed is None else failed.time_s
    lost = sum(event.steps_lost for event in formed)
    if driver and formed:
        before = (event for event in events if event.time_s < formed[0].time_s)
        done = max((step for step, _ in _executed_steps(before)), default=0)
        lost += max(done - formed[0].step, 0)
    return FaultCost(
        injected=injected,
        detection_s=failed.time_s - injected.time_s if failed is not None and not driver else None,
        recovery_s=formed[-1].time_s - stopped_s if formed and (driver or failed is not None) else None,
        steps_lost=lost,
        source=formed[-1].source if formed else "",
        checkpoints_skipped=sum(isinstance(event, CheckpointSkipped) for event in since),
    )


def run_history(run: ObservedRun) -> RunHistory:
    """Return the history that the run's events describe."""
    return RunHistory.fold(run.events, owner_alive=False)


def elapsed_s(run: ObservedRun) -> float:
    """Return the time from the first event to the last, including time without a driver."""
    return run.events[-1].time_s - run.events[0].time_s if run.events else 0.0


def goodput(run: ObservedRun) -> float:
    """Return the share of the elapsed time that computed steps that count; NaN without events."""
    seconds = elapsed_s(run)
    return run_history(run).totals.computing_s / seconds if seconds > 0 else math.nan


def longest_step_gap_s(run: ObservedRun) -> float:
    """Return the longest time between two events of completed steps."""
    times = [event.time_s for event in run.events if isinstance(event, Steps)]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


# --- The report as JSON and as a table --------------------------------------------------------------------------------


def as_data(report: ChaosReport) -> dict[str, Any]:
    """Return the report as data for JSON."""
    return {
        "job": report.job,
        "seed": report.seed,
        "passed": report.passed,
        "agrees": report.agrees,
        "verdict": report.summary,
        "differences": list(report.differences),
        "since_step": report.since_step,
        "repeatable": report.repeatable,
        "steps": report.steps,
        "steps_lost": sum(cost.steps_lost for cost in report.costs),
        "faults": [_fault_data(cost) for cost in report.costs],
        "missed": list(report.missed),
        "leftovers": list(report.leaks),
        "changed": list(report.changed),
        "goodput": formatting.finite(report.goodput),
        "unbroken_goodput": formatting.finite(report.unbroken_goodput),
        "seconds": report.seconds,
        "unbroken_seconds": report.unbroken_seconds,
        "kept": report.storage,
    }


def _fault_data(cost: FaultCost) -> dict[str, Any]:
    return {
        "fault": cost.injected.fault,
        "time_s": cost.injected.time_s,
        "step": cost.injected.step,
        "whom": list(cost.injected.targets),
        "detection_s": cost.detection_s,
        "recovery_s": cost.recovery_s,
        "steps_lost": cost.steps_lost,
        "source": cost.source,
        "checkpoints_skipped": cost.checkpoints_skipped,
    }


def as_table(report: ChaosReport) -> RenderableType:
    """Return the report as a table for the terminal."""
    head = Text(report.summary, style="bold green" if report.passed else "bold red")
    parts: list[RenderableType] = [head]
    parts += [Text(f"  {line}", style="red") for line in (*report.differences, *report.leaks)]
    if report.costs:
        parts.append(Padding(_cost_table(report), (1, 0, 0, 2)))
    parts.append(Padding(_fact_table(report), (1, 0, 0, 2)))
    return Group(*parts)


def _cost_table(report: ChaosReport) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("fault", "step", "noticed after", "recovery", "steps lost", "state from"):
        right = name in ("step", "noticed after", "recovery", "steps lost")
        table.add_column(name, no_wrap=True, justify="right" if right else "left")
    table.add_column("target", overflow="fold")
    for cost in report.costs:
        table.add_row(
            cost.injected.fault, f"{cost.injected.step:,}", _seconds(cost.detection_s), _seconds(cost.recovery_s),
            f"{cost.steps_lost:,}", cost.source or "-", Text("\n".join(cost.injected.targets)),
        )  # fmt: skip
    return table


def _seconds(seconds: float | None) -> str:
    return formatting.duration(seconds) if seconds is not None else "-"


def _fact_table(report: ChaosReport) -> Table:
    skipped = sum(cost.checkpoints_skipped for cost in report.costs)
    repeats = {True: "two uninterrupted runs agree", False: "two uninterrupted runs differ", None: ""}
    goodputs = [formatting.percent(share) for share in (report.goodput, report.unbroken_goodput)]
    times = [formatting.duration(seconds) for seconds in (report.seconds, report.unbroken_seconds)]
    rows = [
        ("goodput", f"{goodputs[0]}, uninterrupted {goodputs[1]}"),
        ("time", f"{times[0]}, uninterrupted {times[1]}"),
        ("checkpoints", f"{skipped} did not become durable" if skipped else ""),
        ("repeatable", repeats[report.repeatable]),
        ("not injected", ", ".join(report.missed)),
        ("changed", f"{', '.join(report.changed)} for the run under faults" if report.changed else ""),
        ("runs", report.storage),
        ("seed", str(report.seed)),
    ]
    return facts_table([(name, value) for name, value in rows if value])
