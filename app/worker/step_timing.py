"""What one rank measures of its steps beside their records: the time of their phases, and their gradient's noise."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from trainwright.core.data import StepReport
from trainwright.core.gradient_noise import Noise, NoiseAverage
from trainwright.core.step_phases import Phases

_KEPT = 1_000  # steps in a median, at most
_LEAST = 20


class Meter:
    """One thread's. Phases are of one generation, the average of the noise lives as long as the process."""

    def __init__(self) -> None:
        self._average = NoiseAverage()
        self._steps: deque[tuple[Mapping[str, float], float, float]] = deque(maxlen=_KEPT)  # phases, step_s, wait_s

    def begin(self) -> None:
        """A generation starts."""
        self._steps.clear()

    def add(self, report: StepReport, *, step_s: float, wait_s: float) -> None:
        """Take one step, of which so many seconds waited for data."""
        if report.scatter is not None:
            self._average.add(report.scatter)
        if report.phases is not None:
            self._steps.append((report.phases, step_s, wait_s))

    def phases(self, *, last: bool) -> Phases | None:
        """Medians since they were told last; None where too few steps were timed, unless they are the run's `last`."""
        if len(self._steps) < (1 if last else _LEAST):
            return None
        names = self._steps[-1][0].keys()
        alike = [row for row in self._steps if row[0].keys() == names]
        medians = {name: median(phases[name] for phases, _, _ in alike) for name in names}
        medians["other"] = median(max(step_s - wait_s - sum(phases.values()), 0.0) for phases, step_s, wait_s in alike)
        self._steps.clear()
        return Phases(steps=len(alike), data_s=median(wait_s for _, _, wait_s in alike), medians=medians)

    @property
    def sampled(self) -> int:
        """Steps whose gradients were looked at."""
        return self._average.count

    @property
    def noise(self) -> Noise | None:
        """The gradient noise scale; None while it cannot be trusted."""
        return self._average.noise()
