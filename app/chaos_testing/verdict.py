"""Two runs compared, and what each fault has cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trainwright.chaos_testing.fault_catalogue import CATALOGUE
from trainwright.chaos_testing.fault_injector import Given
from trainwright.chaos_testing.run_observer import Course
from trainwright.core.events import CheckpointSkipped, Event, Failed, Formed, RunStarted, Steps
from trainwright.reporting import formatting
from trainwright.reporting.history import History

_SHOWN_FILES = 4
_DRIVERS = {fault.name for fault in CATALOGUE if fault.target == "driver"}


@dataclass(frozen=True, kw_only=True)
class Final:
    """The newest checkpoint of a run: its step, and the checksum of each file by name."""

    step: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one fault has cost.

    Attributes:
        detection_s: from the fault to the first news of a failure; None where there was none.
        recovery_s: from there (for a driver from its death) until the run could step again; None where it went on.
        steps_lost: completed steps that were done again.
        source: where the state came from: `replica`, `checkpoint`, `initial`; empty where it went on.
        checkpoints_skipped: that did not become durable.
    """

    given: Given
    detection_s: float | None = None
    recovery_s: float | None = None
    steps_lost: int = 0
    source: str = ""
    checkpoints_skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
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
    costs: tuple[Cost, ...] = ()
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


def differences(
    unbroken: Course, final: Final, other: Course, other_final: Final
) -> tuple[tuple[str, ...], int | None]:
    """What differs, in words, and the first step whose loss does.

    Every execution of a step counts, those that were lost and done again too.
    """
    if other.error:
        return (f"the run failed: {other.error}",), None
    found = []
    expected = dict(executed(unbroken.events))
    wrong = sorted({step for step, loss in executed(other.events) if not _same(expected.get(step), loss)})
    missing = sorted(set(expected) - {step for step, _ in executed(other.events)})
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


def executed(events: Iterable[Event]) -> Iterator[tuple[int, float]]:
    """Each execution of a step, with its loss."""
    for event in events:
        if isinstance(event, Steps):
            yield from zip(event.step, event.loss, strict=True)


def _same(one: float | None, other: float) -> bool:
    """Bitwise, but that one NaN is as good as another."""
    return one is not None and (one == other or (math.isnan(one) and math.isnan(other)))


def costs(course: Course) -> tuple[Cost, ...]:
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


def _cost(given: Given, since: Sequence[Event], events: Iterable[Event]) -> Cost:
    failed = next((event for event in since if isinstance(event, Failed)), None)
    formed = [event for event in since if isinstance(event, Formed)]
    driver = any(isinstance(event, RunStarted) for event in since)
    stopped_s = given.time_s if driver or failed is None else failed.time_s
    lost = sum(event.steps_lost for event in formed)
    if driver and formed:
        done = max((step for event in events if event.time_s < formed[0].time_s for step in _steps(event)), default=0)
        lost += max(done - formed[0].step, 0)
    return Cost(
        given=given,
        detection_s=failed.time_s - given.time_s if failed is not None and not driver else None,
        recovery_s=formed[-1].time_s - stopped_s if formed and (driver or failed is not None) else None,
        steps_lost=lost,
        source=formed[-1].source if formed else "",
        checkpoints_skipped=sum(isinstance(event, CheckpointSkipped) for event in since),
    )


def _steps(event: Event) -> list[int]:
    return event.step if isinstance(event, Steps) else []


def history_of(course: Course) -> History:
    """The course as a history."""
    return History.fold(course.events, owner_alive=False)


def elapsed_s(course: Course) -> float:
    """From the first event to the last, the time without a driver included."""
    return course.events[-1].time_s - course.events[0].time_s if course.events else 0.0


def goodput(course: Course) -> float:
    """Share of that time that went into computing steps that count; NaN where there is none."""
    seconds = elapsed_s(course)
    return history_of(course).totals.computing_s / seconds if seconds > 0 else math.nan


def pace_s(course: Course) -> float:
    """The longest time from one piece of news of steps to the next, once steps were running."""
    times = [event.time_s for event in course.events if isinstance(event, Steps)]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)
