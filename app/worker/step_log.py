"""Completed steps of one rank: the driver asks for those it does not know, and so may one after it."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

from trainwright.core.data import StepReport
from trainwright.core.events import Steps

KEPT = 20_000
RECENT = 20  # steps in the median of this rank's own part


@dataclass(frozen=True, kw_only=True)
class _Record:
    report: StepReport
    samples: int
    step_s: float
    wait_s: float


class StepRecords:
    """A bounded queue between the thread that steps and the one that is watched."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._records: deque[_Record] = deque(maxlen=KEPT)
        self._generation = 0
        self._own_s: deque[float] = deque(maxlen=RECENT)

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
        return median(self._own_s) if len(self._own_s) == RECENT else None

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
