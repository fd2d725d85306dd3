"""What a simulation came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.core.staleness import Staleness
from trainwright.simulator.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of one scenario, in virtual seconds.

    Attributes:
        scenario: that was simulated.
        seconds: until the last step was applied.
        computed_s: that workers computed, all together, whatever became of it.
        waited_s: that workers waited for others: for units and for parameters as fresh as they must be.
        busy: part of the time that the busiest of a server's link in, link out and memory was at work.
        busiest: which of these that was: `link in`, `link out` or `memory`.
        staleness: of what was applied.
        lost: workers' deaths; servers' deaths.
        curve: (seconds, step, loss at each of `rates`), at most some hundred.
        rates: learning rates that were tried.
    """

    scenario: Scenario
    seconds: float
    computed_s: float
    waited_s: float
    busy: float
    busiest: str
    staleness: Staleness
    lost: tuple[int, int] = (0, 0)
    curve: tuple[tuple[float, int, tuple[float, ...]], ...] = ()
    rates: tuple[float, ...] = ()

    @property
    def steps_per_s(self) -> float:
        """Global steps."""
        return self.scenario.steps / self.seconds

    @property
    def waited(self) -> float:
        """Part of the workers' time."""
        return self.waited_s / (self.seconds * self.scenario.workers)

    @property
    def best(self) -> int:
        """The learning rate with the least loss at the end, by its number; the largest where nothing was learnt."""
        last = self.curve[-1][2] if self.curve else (0.0,)
        return min(range(len(last)), key=lambda number: (not last[number] < float("inf"), last[number]))

    @property
    def losses(self) -> list[tuple[float, float]]:
        """Seconds and loss, at the best learning rate."""
        return [(seconds, losses[self.best]) for seconds, _, losses in self.curve]

    def reaches(self, loss: float) -> float | None:
        """Seconds to the first time that the loss is as low, at whichever learning rate is quickest; None if never."""
        return next((seconds for seconds, _, losses in self.curve if min(losses) <= loss), None)


def percentile(staleness: Staleness, part: float) -> int:
    """The staleness that so great a part of the pushes does not exceed; 0 where nothing was applied."""
    total, seen = sum(staleness.counts.values()), 0
    for age, count in sorted(staleness.counts.items()):
        seen += count
        if seen >= part * total:
            return age
    return 0


def paying(outcomes: Sequence[Outcome], gain: float = 1.05) -> Mapping[str, int]:
    """By consistency, the fewest servers that are within a factor of the quickest number."""
    found: dict[str, int] = {}
    for name in dict.fromkeys(str(one.scenario.consistency) for one in outcomes):
        mine = [one for one in outcomes if str(one.scenario.consistency) == name]
        most = max(one.steps_per_s for one in mine)
        found[name] = min(one.scenario.servers for one in mine if gain * one.steps_per_s >= most)
    return found
