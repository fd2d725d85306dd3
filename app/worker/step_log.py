"""The log of a rank's completed steps and their times; a driver polls it for steps that it does not know."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

from trainwright.core.data import NoiseScale, NoiseScaleAverage, PhaseTimes, StepReport
from trainwright.core.events import Steps

_MAX_RECORDS = 20_000
MEDIAN_STEPS = 20  # steps in the median of this rank's own part


@dataclass(frozen=True, kw_only=True)
class _Record:
    report: StepReport
    samples: int
    step_s: float
    wait_s: float


class StepLog:
    """A bounded queue between the thread that steps and the one that is watched."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._records: deque[_Record] = deque(maxlen=_MAX_RECORDS)
        self._generation = 0
        self._own_s: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def begin(self, generation: int, step: int) -> None:
        """A generation starts at `step`; steps after it that an older one completed will be done again."""
        with self._news:
            self._generation = generation
            self._own_s.clear()
            while self._records and self._records[-1].report.step > step:
                self._records.pop()

    def add(self, report: StepReport, *, samples: int, step_s: float, wait_s: float) -> None:
        """Record one step."""
        with self._news:
            self._records.append(_Record(report=report, samples=samples, step_s=step_s, wait_s=wait_s))
            self._news.notify_all()
        if report.own_s is not None:
            self._own_s.append(wait_s + report.own_s)

    @property
    def newest(self) -> int:
        """The last completed step that is recorded; 0 before there is one."""
        with self._news:
            return self._records[-1].report.step if self._records else 0

    @property
    def own_s(self) -> float | None:
        """Median seconds of this rank's own part of its last steps; None before there are enough, or none is known."""
        return median(self._own_s) if len(self._own_s) == MEDIAN_STEPS else None

    def since(self, after: int, timeout_s: float) -> Steps:
        """Steps after `after`; waits up to `timeout_s` for the first one."""
        with self._news:
            self._news.wait_for(lambda: bool(self._records) and self._records[-1].report.step > after, timeout_s)
            told = [*takewhile(lambda item: item.report.step > after, reversed(self._records))][::-1]
            generation = self._generation
        return Steps(
            generation=generation,
            step=[item.report.step for item in told],
            loss=[item.report.loss for item in told],
            learning_rate=[item.report.learning_rate for item in told],
            gradient_norm=[item.report.gradient_norm for item in told],
            samples=[item.samples for item in told],
            step_s=[item.step_s for item in told],
            wait_s=[item.wait_s for item in told],
        )


# --- Step times and gradient noise ------------------------------------------------------------------------------------


_MAX_TIMED_STEPS = 1_000  # steps in a median, at most
_MIN_TIMED_STEPS = 20


class StepTimer:
    """One thread's. Phases are of one generation, the average of the noise lives as long as the process."""

    def __init__(self) -> None:
        self._average = NoiseScaleAverage()
        self._steps: deque[tuple[Mapping[str, float], float, float]] = deque(
            maxlen=_MAX_TIMED_STEPS
        )  # phases, step_s, wait_s

    def begin(self) -> None:
        """A generation starts."""
        self._steps.clear()

    def add(self, report: StepReport, *, step_s: float, wait_s: float) -> None:
        """Take one step, of which so many seconds waited for data."""
        if report.scatter is not None:
            self._average.add(report.scatter)
        if report.phases is not None:
            self._steps.append((report.phases, step_s, wait_s))

    def phases(self, *, last: bool) -> PhaseTimes | None:
        """Medians since they were told last; None where too few steps were timed, unless they are the run's `last`."""
        if len(self._steps) < (1 if last else _MIN_TIMED_STEPS):
            return None
        names = self._steps[-1][0].keys()
        alike = [row for row in self._steps if row[0].keys() == names]
        medians = {name: median(phases[name] for phases, _, _ in alike) for name in names}
        medians["other"] = median(max(step_s - wait_s - sum(phases.values()), 0.0) for phases, step_s, wait_s in alike)
        self._steps.clear()
        return PhaseTimes(steps=len(alike), data_s=median(wait_s for _, _, wait_s in alike), medians=medians)

    @property
    def sampled(self) -> int:
        """Steps whose gradients were looked at."""
        return self._average.count

    @property
    def noise(self) -> NoiseScale | None:
        """The gradient noise scale; None while it cannot be trusted."""
        return self._average.noise()
