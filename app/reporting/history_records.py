"""What a run's history is made of: steps, sessions, recoveries, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trainwright.core.events import Failed, Formed, Measured, Stale
from trainwright.core.gradient_noise import Noise
from trainwright.core.staleness import Staleness
from trainwright.reporting import formatting


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One completed step, or in a long run several older ones: then sums of samples and seconds, and means.

    Attributes:
        step: from 1, this one included; of several, the last.
        epoch: from 1.
        generation: number of the formation that made it, within its driver.
        gradient_norm: global norm before clipping; None when the job does not clip.
        samples: real samples in the global batch.
        step_s: the whole step; `wait_s` of it waited for data, NaN where that is not told (`core.events.Steps`).
        count: of the steps.
        typical_s: seconds of one of them, for medians.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    samples: int
    step_s: float
    wait_s: float
    generation: int
    count: int
    typical_s: float

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batch by seconds of the step; NaN where the step took no time."""
        return self.samples / self.step_s if self.step_s > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class Session:
    """One driver's life: from the time it took the run until it let go, or until its last event."""

    token: int
    started_s: float
    ended_s: float
    outcome: str = ""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The group formed again after a failure. `failure` is the first cause, None where it was not told."""

    formed: Formed
    failure: Failed | None = None


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Where the time of all sessions went, in seconds. The parts add up to `wall_s`.

    Attributes:
        wall_s: sessions together; time between two sessions is not counted.
        computing_s: steps that count, without their waiting for data where that is told.
        data_s: waiting for data in steps that count.
        start_s: from taking the run to the first step being possible, in every session.
        recovery_s: from each failure to the group being formed again, and steps that had to be done again.
        checkpoint_s: what the steps lost to checkpoints and copies in memory.
        evaluation_s: evaluations.
        other_s: the rest.
    """

    wall_s: float = 0.0
    computing_s: float = 0.0
    data_s: float = 0.0
    start_s: float = 0.0
    recovery_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0
    other_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of the time spent computing steps that count; NaN before any time passed."""
        return self.computing_s / self.wall_s if self.wall_s > 0 else math.nan


def noise_of(event: Measured) -> Noise | None:
    """The noise scale that an event tells; None where it was not known."""
    if not event.noise:
        return None
    told = dict(event.noise)
    return Noise(count=int(told.pop("count")), **told)


def staleness_of(events: Iterable[Stale]) -> Staleness:
    """How stale what was pushed was, over all of them."""
    whole = Staleness()
    for event in events:
        counts = {int(age): int(count) for age, count in event.counts}
        unit: Literal["updates", "steps"] = "steps" if event.unit == "steps" else "updates"
        whole += Staleness(counts=counts, unit=unit, dropped=event.dropped, again=event.again)
    return whole


def staleness_text(staleness: Staleness) -> str:
    """`mean 6.8 updates, at most 19; 3 pushes dropped, 2 units handed out again`; empty where nothing was pushed."""
    if not staleness.counts:
        return ""
    most = max(staleness.counts)
    return (
        f"mean {staleness.mean:.1f} {staleness.unit}, at most {most}; "
        f"{staleness.dropped:,} {'push' if staleness.dropped == 1 else 'pushes'} dropped, "
        f"{formatting.count(staleness.again, 'unit')} handed out again"
    )
