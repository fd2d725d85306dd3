"""What a run's events come to in metrics: pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.core.events import (
    Checkpointed,
    Event,
    Failed,
    Formed,
    Joined,
    Probed,
    Replanned,
    Resized,
    RunEnded,
    RunStarted,
    Steps,
)
from trainwright.reporting.event_messages import Narrator
from trainwright.reporting.plan_view import plan_from
from trainwright.storage.event_folding import Folding

GOODPUT_INTERVAL_S = 10.0  # between sums over all of them, which take milliseconds


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A value of a metric of the catalogue: set for a gauge, added for others. `source` only of recoveries."""

    name: str
    value: float
    source: str = ""


class Readings:
    """Folds one driver's events, which come in order.

    Loss, throughput and waiting are those of the progress bar, goodput is the report's of what this driver did.

    Attributes:
        run, strategy: labels of all readings; empty before the run has started.
    """

    def __init__(self) -> None:
        self.run = self.strategy = ""
        self._narrator, self._folding, self._crew = Narrator(), Folding(), _Crew()
        self._goodput_s = -math.inf

    def take(self, event: Event) -> Iterator[Reading]:
        """What one event changes. Exhaust it before the next."""
        folding = self._folding
        lost, recovered = folding.steps_lost, len(folding.recoveries)
        self._narrator.tell(event)
        folding.add(event)
        self._crew.take(event)
        match event:
            case RunStarted():
                self.run, self.strategy = event.run, str(event.plan.get("strategy", ""))
                yield Reading(name="total_steps", value=event.total_steps)
            case Replanned() | Probed():
                self.strategy = str(event.plan.get("strategy", self.strategy))
            case Steps():
                yield from _of_steps(event)
            case Failed():
                yield Reading(name="failures", value=1)
            case Formed() if len(folding.recoveries) > recovered:
                yield Reading(name="recoveries", value=1, source=event.source)
                yield Reading(name="recovery_seconds", value=event.seconds)
            case Checkpointed():
                yield from _of_checkpoint(event)
        yield Reading(name="steps_lost", value=folding.steps_lost - lost)
        yield from self._gauges(event)

    def _gauges(self, event: Event) -> Iterator[Reading]:
        if isinstance(event, Steps | Formed):
            figures = self._narrator.figures
            yield Reading(name="step", value=figures.step)
            yield Reading(name="loss", value=figures.loss)
            yield Reading(name="samples_per_second", value=figures.samples_per_s)
            yield Reading(name="data_wait_share", value=figures.wait_share)
        if isinstance(event, RunStarted | Formed | Failed | Joined | Resized | Replanned | Probed):
            yield Reading(name="workers", value=self._crew.workers)
            yield Reading(name="workers_wanted", value=self._crew.wanted)
        if isinstance(event, RunEnded) or event.time_s >= self._goodput_s + GOODPUT_INTERVAL_S:
            self._goodput_s = event.time_s
            yield Reading(name="goodput", value=self._folding.totals().goodput)


class _Crew:
    """Who takes part."""

    def __init__(self) -> None:
        self.wanted = self._formed = self._more = 0
        self._down: set[int] = set()

    @property
    def workers(self) -> int:
        """That take part now."""
        return max(self._formed - len(self._down) + self._more, 0)

    def take(self, event: Event) -> None:
        match event:
            case RunStarted() | Probed():
                plan = plan_from(event.plan)
                self.wanted = plan.workers if plan else 0
            case Replanned():
                self.wanted = event.workers
            case Resized():
                self.wanted = max(self.wanted, event.workers)
            case Formed():
                self._formed, self._more, self._down = event.workers, 0, set()
            case Failed() if event.rank >= 0:
                self._down.add(event.rank)
            case Joined():
                self._more += event.rank not in self._down and event.former < 0
                self._down.discard(event.rank)


def _of_steps(event: Steps) -> Iterator[Reading]:
    yield Reading(name="steps", value=len(event.step))
    yield Reading(name="samples", value=sum(event.samples))
    yield Reading(name="data_wait_seconds", value=sum(value for value in event.wait_s if math.isfinite(value)))
    for seconds in event.step_s:
        yield Reading(name="step_seconds", value=seconds)


def _of_checkpoint(event: Checkpointed) -> Iterator[Reading]:
    yield Reading(name="checkpoints", value=1)
    yield Reading(name="checkpoint_bytes", value=event.size_bytes)
    yield Reading(name="checkpoint_seconds", value=event.seconds)
    yield Reading(name="checkpoint_blocked_seconds", value=event.blocked_s)
