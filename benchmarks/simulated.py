"""`trainwright simulate` against what it simulates: plain processes whose units wait for a time that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from figures import Figure, Ratio
from local_servers import CLASSES, HIDDEN, RunMeasurement, RunServers, RunSettings, server_processes

from trainwright.core.data import Columns
from trainwright.core.topology import Consistency
from trainwright.simulator.event_simulator import Scenario, Simulation, SimulationResult

RULES = ("sync", "sync(backup=1)", "ssp(3)", "async")
WORKERS, SHARE, STEPS, PAUSE_S, SLOWER, TIMES, NEAR = 4, 64, 60, 0.06, 5, 3, 1.15
PARAMETERS = 28 * 28 * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
BYTES_PER_S, LATENCY_S = 2e9, 1e-4  # of shared memory: of no weight here
NOTE = (
    f"One server and {WORKERS} workers as plain processes of one thread, of the torch engine on shared memory, a "
    f"network of two layers, {STEPS} steps; each unit waits {1e3 * PAUSE_S:g} ms in place of a device's work, in half "
    f"of the runs one worker's {SLOWER} times as long. The simulation is told how long a unit takes a worker that is "
    "alone and how that varies, and from a run of its own how much of it lies between a push and the next pull. "
    f"`trainwright` is simulated, `peer` measured, a median of {TIMES} runs; the ratio is the larger over the smaller. "
    "Staleness is a mean, in updates for async, else in steps."
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A consistency, by how much the last worker is slower, and the steps of a run."""

    rule: str
    slower: float
    steps: int

    @property
    def told(self) -> str:
        """In words."""
        slow = f"one of {WORKERS} {self.slower:g} times slower" if self.slower > 1 else "equal workers"
        return f"{self.rule}, {slow}"

    def measured(self, run: RunServers) -> RunMeasurement:
        """By processes."""
        pauses_s = (*[PAUSE_S] * (WORKERS - 1), self.slower * PAUSE_S)
        return run(
            RunSettings(workers=WORKERS, share=SHARE, steps=self.steps, consistency=self.rule, pauses_s=pauses_s)
        )

    def simulated(self, alone: RunMeasurement, between_s: float) -> SimulationResult:
        """By `trainwright simulate`, where a usual worker does a unit as one that was alone did."""
        unit_s = float(np.mean(alone.steps_s)) - between_s
        low, high = np.percentile(np.log(alone.steps_s), (16, 84))  # what is rare would hide how regular they are
        slow = (1 + (self.slower - 1) * PAUSE_S / unit_s,) if self.slower > 1 else ()
        scenario = Scenario(
            consistency=Consistency.parse(self.rule), workers=WORKERS, servers=1, parameter_bytes=4 * PARAMETERS,
            batch_size=SHARE * WORKERS, steps=self.steps, compute_s=unit_s, spread=float(high - low) / 2,
            between_s=between_s, slow=slow, worker_bytes_per_s=BYTES_PER_S, server_bytes_per_s=BYTES_PER_S,
            latency_s=LATENCY_S,
        )  # fmt: skip
        return Simulation(scenario, learn=False).run()


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    steps, rules, times = (10, RULES[::3], 1) if smoke else (STEPS, RULES, TIMES)
    data = _data(steps)
    figures = []
    with server_processes(data, data, count=1 + WORKERS) as run:
        alone = run(_short(1, steps))
        crowd = run(_short(WORKERS, steps))
        for slower in (1.0, float(SLOWER)):
            for rule in rules:
                case = Case(rule=rule, slower=slower, steps=steps)
                runs = [case.measured(run) for _ in range(times)]
                figures += _figures(case, runs, case.simulated(alone, crowd.between_s))
    return figures


def _short(workers: int, steps: int) -> RunSettings:
    """Half as many steps of so many equal workers, which wait for nobody."""
    pauses_s = (PAUSE_S,) * workers
    return RunSettings(workers=workers, share=SHARE, steps=steps // 2, consistency="async", pauses_s=pauses_s)


def _figures(case: Case, runs: Sequence[RunMeasurement], simulated: SimulationResult) -> list[Figure]:
    """Throughput and staleness."""
    steps_s = [run.samples_s / (SHARE * WORKERS) for run in runs]
    off = [max(simulated.steps_per_s / one, one / simulated.steps_per_s) for one in steps_s]
    return [
        Figure(
            benchmark="simulated", what=f"{case.told}: throughput", unit="steps/s", ours=simulated.steps_per_s,
            peer=float(np.median(steps_s)), pairs=len(runs), target=NEAR,
            ratio=Ratio(median=float(np.median(off)), low=min(off), high=max(off)),
        ),
        Figure(
            benchmark="simulated", what=f"{case.told}: staleness", unit="", ours=simulated.staleness.mean,
            peer=float(np.median([run.staleness.mean for run in runs])), pairs=len(runs), count=True,
        ),
    ]  # fmt: skip


def _data(steps: int) -> Columns:
    """Noise; nothing is learnt."""
    random = np.random.default_rng(0)
    rows = SHARE * WORKERS * steps
    images = random.standard_normal((rows, 28, 28), dtype=np.float32)
    return {"image": images, "label": random.integers(0, CLASSES, rows)}
