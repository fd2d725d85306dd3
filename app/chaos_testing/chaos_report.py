"""Two runs compared, and what each fault has cost. Pure.

Keys: {job, seed, passed, agrees, verdict, differences, since_step, repeatable, steps, steps_lost, faults: [{fault,
time_s, step, whom, detection_s, recovery_s, steps_lost, source, checkpoints_skipped}], missed, leftovers, changed,
goodput, unbroken_goodput, seconds, unbroken_seconds, kept}. Times are seconds since the epoch, durations seconds; what
is not known is null.
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
from trainwright.reporting.run_history import RunHistory

_SHOWN_FILES = 4
_DRIVERS = {fault.name for fault in CATALOGUE if fault.target == "driver"}


@dataclass(frozen=True, kw_only=True)
class FinalCheckpoint:
    """The newest checkpoint of a run: its step, and the checksum of each file by name."""

    step: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FaultCost:
    """What one fault has cost.

    Attributes:
        detection_s: from the fault to the first news of a failure; None where there was none.
        recovery_s: from there (for a driver from its death) until the run could step again; None where it went on.
        steps_lost: completed steps that were done again.
        source: where the state came from: `replica`, `checkpoint`, `initial`; empty where it went on.
        checkpoints_skipped: that did not become durable.
    """

    given: InjectedFault
    detection_s: float | None = None
    recovery_s: float | None = None
    steps_lost: int = 0
    source: str = ""
    checkpoints_skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """What came of a job under faults. True where it passed.

    Attributes:
        differences: from the unbroken run, in words; empty where there is none.
        since_step: the first step whose loss differs; None where none does.
        repeatable: whether two unbroken runs agree; None where that was not asked.
        costs: of each fault given, in order.
        missed: faults that found no moment.
        leftovers: of the run under faults, that outlived it.
        changed: what was changed of the job for this, in words.
        goodput: share of the time that went into computing steps that count; of the unbroken run as well.
        seconds: from the first event of the run to the last; of the unbroken run as well.
        kept: where the runs are; empty where they were deleted.
    """

    job: str
    seed: int
    steps: int
    differences: tuple[str, ...] = ()
    since_step: int | None = None
    repeatable: bool | None = None
    costs: tuple[FaultCost, ...] = ()
    missed: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    goodput: float = math.nan
    unbroken_goodput: float = math.nan
    seconds: float = 0.0
    unbroken_seconds: float = 0.0
    kept: str = ""

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def passed(self) -> bool:
        """Whether at least one fault was given, nothing differs and nothing is left over."""
        return self.agrees and not self.leftovers and bool(self.costs)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def sentence(self) -> str:
        """All of it in one sentence."""
        after = f"after {formatting.count(len(self.costs), 'fault')}"
        if not self.costs:
            return "no fault was given: the run was over before the first; give it more steps, such as --set epochs=..."
        if self.repeatable is False:
            return f"{after} the run differs, but so do two unbroken runs: the job itself is not repeatable"
        if not self.agrees:
            since = f" since step {self.since_step}" if self.since_step is not None else ""
            return f"{after} the run differs from the unbroken one{since}"
        if self.leftovers:
            return f"{after} the run agrees bitwise with the unbroken one, but left something behind"
        return f"{after} the run agrees bitwise with the unbroken one"


def compare_runs(
    unbroken: ObservedRun, final: FinalCheckpoint, other: ObservedRun, other_final: FinalCheckpoint
) -> tuple[tuple[str, ...], int | None]:
    """What differs, in words, and the first step whose loss does.

    Every execution of a step counts, those that were lost and done again too.
    """
    if other.error:
        return (f"the run failed: {other.error}",), None
    found = []
    expected = dict(_executed_steps(unbroken.events))
    wrong = sorted(
        {step for step, loss in _executed_steps(other.events) if not _equal_losses(expected.get(step), loss)}
    )
    missing = sorted(set(expected) - {step for step, _ in _executed_steps(other.events)})
    if wrong:
        found.append(f"the loss differs in {formatting.count(len(wrong), 'step')}, first in step {wrong[0]}")
    if missing:
        found.append(f"{formatting.count(len(missing), 'step')} were not seen, first step {missing[0]}")
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
    """Each execution of a step, with its loss."""
    for event in events:
        if isinstance(event, Steps):
            yield from zip(event.step, event.loss, strict=True)


def _equal_losses(one: float | None, other: float) -> bool:
    """Bitwise, but that one NaN is as good as another."""
    return one is not None and (one == other or (math.isnan(one) and math.isnan(other)))


def fault_costs(course: ObservedRun) -> tuple[FaultCost, ...]:
    """What each fault has cost: what happened from it to the next one; that of a driver lasts through the new start."""
    until_s = []
    for place, given in enumerate(course.given):
        again = given.fault in _DRIVERS
        later = [other for other in course.given[place + 1 :] if not (again and other.fault == "start")]
        until_s.append(later[0].time_s if later else math.inf)
    return tuple(
        _cost(given, [event for event in course.events if given.time_s <= event.time_s < end_s], course.events)
        for given, end_s in zip(course.given, until_s, strict=True)
    )


def _cost(given: InjectedFault, since: Sequence[Event], events: Iterable[Event]) -> FaultCost:
    failed = next((event for event in since if isinstance(event, Failed)), None)
    formed = [event for event in since if isinstance(event, Formed)]
    driver = any(isinstance(event, RunStarted) for event in since)
    stopped_s = given.time_s if driver or failed is None else failed.time_s
    lost = sum(event.steps_lost for event in formed)
    if driver and formed:
        done = max((step for event in events if event.time_s < formed[0].time_s for step in _steps(event)), default=0)
        lost += max(done - formed[0].step, 0)
    return FaultCost(
        given=given,
        detection_s=failed.time_s - given.time_s if failed is not None and not driver else None,
        recovery_s=formed[-1].time_s - stopped_s if formed and (driver or failed is not None) else None,
        steps_lost=lost,
        source=formed[-1].source if formed else "",
        checkpoints_skipped=sum(isinstance(event, CheckpointSkipped) for event in since),
    )


def _steps(event: Event) -> list[int]:
    return event.step if isinstance(event, Steps) else []


def run_history(course: ObservedRun) -> RunHistory:
    """The course as a history."""
    return RunHistory.fold(course.events, owner_alive=False)


def elapsed_s(course: ObservedRun) -> float:
    """From the first event to the last, the time without a driver included."""
    return course.events[-1].time_s - course.events[0].time_s if course.events else 0.0


def goodput(course: ObservedRun) -> float:
    """Share of that time that went into computing steps that count; NaN where there is none."""
    seconds = elapsed_s(course)
    return run_history(course).totals.computing_s / seconds if seconds > 0 else math.nan


def longest_step_gap_s(course: ObservedRun) -> float:
    """The longest time from one piece of news of steps to the next, once steps were running."""
    times = [event.time_s for event in course.events if isinstance(event, Steps)]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


# --- A verdict as JSON-able data and for the terminal -----------------------------------------------------------------


def as_data(verdict: ChaosReport) -> dict[str, Any]:
    """The verdict as JSON-able data."""
    return {
        "job": verdict.job,
        "seed": verdict.seed,
        "passed": verdict.passed,
        "agrees": verdict.agrees,
        "verdict": verdict.sentence,
        "differences": list(verdict.differences),
        "since_step": verdict.since_step,
        "repeatable": verdict.repeatable,
        "steps": verdict.steps,
        "steps_lost": sum(cost.steps_lost for cost in verdict.costs),
        "faults": [_fault_data(cost) for cost in verdict.costs],
        "missed": list(verdict.missed),
        "leftovers": list(verdict.leftovers),
        "changed": list(verdict.changed),
        "goodput": _finite(verdict.goodput),
        "unbroken_goodput": _finite(verdict.unbroken_goodput),
        "seconds": verdict.seconds,
        "unbroken_seconds": verdict.unbroken_seconds,
        "kept": verdict.kept,
    }


def _fault_data(cost: FaultCost) -> dict[str, Any]:
    return {
        "fault": cost.given.fault,
        "time_s": cost.given.time_s,
        "step": cost.given.step,
        "whom": list(cost.given.whom),
        "detection_s": cost.detection_s,
        "recovery_s": cost.recovery_s,
        "steps_lost": cost.steps_lost,
        "source": cost.source,
        "checkpoints_skipped": cost.checkpoints_skipped,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def as_table(verdict: ChaosReport) -> RenderableType:
    """The verdict for the terminal."""
    head = Text(verdict.sentence, style="bold green" if verdict.passed else "bold red")
    parts: list[RenderableType] = [head]
    parts += [Text(f"  {line}", style="red") for line in (*verdict.differences, *verdict.leftovers)]
    if verdict.costs:
        parts.append(Padding(_cost_table(verdict), (1, 0, 0, 2)))
    parts.append(Padding(_fact_table(verdict), (1, 0, 0, 2)))
    return Group(*parts)


def _cost_table(verdict: ChaosReport) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("fault", "step", "noticed after", "recovery", "steps lost", "state from"):
        right = name in ("step", "noticed after", "recovery", "steps lost")
        table.add_column(name, no_wrap=True, justify="right" if right else "left")
    table.add_column("struck", overflow="fold")
    for cost in verdict.costs:
        table.add_row(
            cost.given.fault, f"{cost.given.step:,}", _seconds(cost.detection_s), _seconds(cost.recovery_s),
            f"{cost.steps_lost:,}", cost.source or "-", Text("\n".join(cost.given.whom)),
        )  # fmt: skip
    return table


def _seconds(seconds: float | None) -> str:
    return formatting.duration(seconds) if seconds is not None else "-"


def _fact_table(verdict: ChaosReport) -> Table:
    table = Table.grid(padding=(0, 2))
    skipped = sum(cost.checkpoints_skipped for cost in verdict.costs)
    repeats = {True: "two unbroken runs agree", False: "two unbroken runs differ", None: ""}[verdict.repeatable]
    rows = [
        ("goodput", f"{formatting.percent(verdict.goodput)}, unbroken {formatting.percent(verdict.unbroken_goodput)}"),
        ("time", f"{formatting.duration(verdict.seconds)}, unbroken {formatting.duration(verdict.unbroken_seconds)}"),
        ("checkpoints", f"{skipped} did not become durable" if skipped else ""),
        ("repeatable", repeats),
        ("not given", ", ".join(verdict.missed)),
        ("changed", f"{', '.join(verdict.changed)} for the run under faults" if verdict.changed else ""),
        ("runs", verdict.kept),
        ("seed", str(verdict.seed)),
    ]
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(name, Text(value))
    return table
