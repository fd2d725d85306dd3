"""What one rank measures of its steps beside their records: the time of their phases, and their gradient's noise."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from trainwright.core.data import StepReport
from trainwright.core.noise import Noise, NoiseAverage
from trainwright.core.phases import Phases

_KEPT = 1_000  # steps in a median, at most
_LEAST = 20


class Meter:
    """One thread's. Phases are of one generation, the average of the noise lives as long as the process."""

    def __init__(self) -> None:
        self._average = NoiseAverage()
        self._rows: deque[Mapping[str, float]] = deque(maxlen=_KEPT)  # seconds by phase, with those of `data`

    def begin(self) -> None:
        """A generation starts."""
        self._rows.clear()

    def add(self, report: StepReport, *, step_s: float, wait_s: float) -> None:
        """Take one step, of which so many seconds waited for data."""
        if report.scatter is not None:
            self._average.add(report.scatter)
        if report.phases is not None:
            other_s = step_s - wait_s - sum(report.phases.values())
            self._rows.append({**report.phases, "other": max(other_s, 0.0), "data": wait_s})

    def phases(self, *, last: bool) -> Phases | None:
        """Medians since they were told last; None where too few steps were timed, unless they are the run's `last`."""
        if len(self._rows) < (1 if last else _LEAST):
            return None
        names = self._rows[-1].keys()
        rows = [row for row in self._rows if row.keys() == names]
        medians = {name: median(row[name] for row in rows) for name in names}
        self._rows.clear()
        return Phases(steps=len(rows), data_s=medians.pop("data"), medians=medians)

    @property
    def sampled(self) -> int:
        """Steps whose gradients were looked at."""
        return self._average.count

    @property
    def noise(self) -> Noise | None:
        """The gradient noise scale; None while it cannot be trusted."""
        return self._average.noise()
