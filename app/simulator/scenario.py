"""The input and the outcome of a simulation: workers, servers, links, times, failures, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainwright.core.errors import PlanError
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer, StalenessCounts


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A hypothetical cluster and its work.

    Attributes:
        consistency: how far workers may be apart.
        workers, servers: how many.
        parameter_bytes: of the model.
        batch_size: global, in samples.
        steps: global ones.
        compute_s: that a unit of one step takes a worker of usual speed.
        spread: standard deviation of the logarithm of each unit's own time.
        between_s: that a worker takes from a push to its next pull beside messages: to have its next batch.
        unequal: of each worker's usual time.
        slow: worker numbers from 0 on, as many as there are factors by which they take longer.
        worker_bytes_per_s, server_bytes_per_s: of their links, one direction.
        latency_s: of a message, one way.
        update_bytes_per_s: of a server's memory, in its updates.
        failures_per_hour: deaths of each worker; it is back after `recover_s`.
        server_failures_per_hour: deaths of each server; all go back to their last copy, and on after `recover_s`.
        recover_s: see there.
        copy_s: between two copies of the servers' state.
        wire, local_steps, outer: as in `Job`.
        seed: of everything random.
    """

    consistency: Consistency = field(default_factory=Consistency)
    workers: int = 8
    servers: int = 1
    parameter_bytes: float = 1e8
    batch_size: int = 512
    steps: int = 200
    compute_s: float = 0.1
    spread: float = 0.05
    between_s: float = 0.0
    unequal: float = 0.0
    slow: tuple[float, ...] = ()
    worker_bytes_per_s: float = 1.25e9
    server_bytes_per_s: float = 1.25e9
    latency_s: float = 2e-4
    update_bytes_per_s: float = 1e10
    failures_per_hour: float = 0.0
    server_failures_per_hour: float = 0.0
    recover_s: float = 30.0
    copy_s: float = 10.0
    wire: GradientCompression = field(default_factory=GradientCompression)
    local_steps: int = 1
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values. Raises PlanError for values that make no sense."""
        for name in ("workers", "servers", "parameter_bytes", "batch_size", "steps", "compute_s", "local_steps"):
            if getattr(self, name) <= 0:
                raise PlanError(f"{name}={getattr(self, name)} must be above 0", where=name, remedy="give another")
        if self.batch_size < self.workers:
            what = f"batch_size={self.batch_size} is smaller than the {self.workers} workers"
            raise PlanError(what, where="batch_size", remedy=f"give {self.workers} or more")
        if self.consistency.backup >= self.workers:
            what = f"{self.consistency} waits for none of {self.workers} workers"
            raise PlanError(what, where="consistency", remedy="give fewer backup workers")
        if len(self.slow) > self.workers:
            what = f"{len(self.slow)} of {self.workers} workers cannot be slow"
            raise PlanError(what, where="slow", remedy="give fewer, or more workers")

    @property
    def shard_bytes(self) -> float:
        """Bytes of the parameters on each server."""
        return self.parameter_bytes / self.servers

    @property
    def update_s(self) -> float:
        """Seconds of an update on a server: Adam reads and writes 28 bytes for each 4 of a parameter."""
        return 7 * self.shard_bytes / self.update_bytes_per_s

    @property
    def added_s(self) -> float:
        """Seconds to add a push to others on a server: two reads and a write."""
        return 3 * self.shard_bytes / self.update_bytes_per_s


# --- Outcome ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
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
    staleness: StalenessCounts
    lost: tuple[int, int] = (0, 0)
    curve: tuple[tuple[float, int, tuple[float, ...]], ...] = ()
    rates: tuple[float, ...] = ()

    @property
    def steps_per_s(self) -> float:
        """Global steps."""
        return self.scenario.steps / self.seconds

    @property
    def waited(self) -> float:
        """Waiting share of the workers' time."""
        return self.waited_s / (self.seconds * self.scenario.workers)

    @property
    def best(self) -> int:
        """Index of the learning rate with the least final loss; the largest rate without learning."""
        last = self.curve[-1][2] if self.curve else (0.0,)
        return min(range(len(last)), key=lambda number: (not last[number] < float("inf"), last[number]))

    @property
    def losses(self) -> list[tuple[float, float]]:
        """Seconds and loss, at the best learning rate."""
        return [(seconds, losses[self.best]) for seconds, _, losses in self.curve]

    def reaches(self, loss: float) -> float | None:
        """Return the seconds to a loss at the fastest learning rate; None if it is never reached."""
        return next((seconds for seconds, _, losses in self.curve if min(losses) <= loss), None)


def staleness_percentile(staleness: StalenessCounts, part: float) -> int:
    """Return the staleness that a share of the pushes does not exceed; 0 without pushes."""
    total, seen = sum(staleness.counts.values()), 0
    for age, count in sorted(staleness.counts.items()):
        seen += count
        if seen >= part * total:
            return age
    return 0


def fewest_servers(outcomes: Sequence[SimulationResult], gain: float = 1.05) -> Mapping[str, int]:
    """Return by consistency the fewest servers whose time is within a factor of the fastest."""
    found: dict[str, int] = {}
    for name in dict.fromkeys(str(one.scenario.consistency) for one in outcomes):
        mine = [one for one in outcomes if str(one.scenario.consistency) == name]
        most = max(one.steps_per_s for one in mine)
        found[name] = min(one.scenario.servers for one in mine if gain * one.steps_per_s >= most)
    return found
