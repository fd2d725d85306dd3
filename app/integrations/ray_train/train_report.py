"""What Ray Train is told of a run: figures by name, and where the newest checkpoint lies."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from trainwright.core.events import Checkpointed, Evaluated, Event, Failed, Steps

EVERY_S = 10.0  # at least, while there are steps
POINTER = "trainwright.json"
"""The file of a checkpoint of Ray Train's that says where the run's own one lies."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What every rank reports to Ray Train at once.

    Attributes:
        metrics: figures by name.
        pointer: contents of `POINTER`, from rank 0; empty where there is nothing to point at.
    """

    metrics: Mapping[str, float]
    pointer: Mapping[str, str | int] = field(default_factory=dict)


class Teller:
    """A listener that keeps the newest figures: those that nobody has asked for are overwritten, so that none waits.

    Ray Train takes a report about every 2 seconds, and steps may be quicker.

    Args:
        steps_per_epoch: at whose end there is news.
        pointer: makes a pointer of a step and a checkpoint's path below the run.
        every_s: seconds after which steps alone are news.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        steps_per_epoch: int,
        pointer: Callable[[int, str], Mapping[str, str | int]],
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_epoch, self._pointer, self._every_s, self._clock = steps_per_epoch, pointer, every_s, clock
        self._turn = threading.Condition()
        self._metrics: dict[str, float] = {}
        self._newest: Mapping[str, str | int] = {}
        self._due = self._changed = self._ended = self._points = False
        self._told_s = clock()

    def on(self, event: Event) -> None:
        """Take one event."""
        with self._turn:
            match event:
                case Steps() if event.step:
                    self._step(event)
                case Evaluated():
                    self._metrics |= {f"evaluation/{name}": value for name, value in event.metrics.items()}
                    self._changed = self._due = self._points = True
                case Checkpointed():
                    self._newest = self._pointer(event.step, event.path)
                    self._changed = self._due = self._points = True
                case Failed():
                    self._metrics["failures"] = self._metrics.get("failures", 0) + 1
            self._turn.notify_all()

    def close(self) -> None:
        """The run has ended; `end` says it."""

    def end(self, *, silently: bool = False) -> None:
        """There is no more to tell than what is due; with `silently` not even that."""
        with self._turn:
            self._ended, self._due = True, self._changed and not silently
            self._turn.notify_all()

    def news(self) -> Iterator[Report]:
        """Waits for what is to be told; the last one is told at the end."""
        while True:
            with self._turn:
                while not (self._due or self._ended):
                    self._turn.wait(self._every_s if self._changed else None)
                    self._due |= self._changed and self._clock() - self._told_s >= self._every_s
                if not self._due:
                    return
                points = self._points or self._ended
                report = Report(metrics=dict(self._metrics), pointer=self._newest if points else {})
                self._due = self._changed = self._points = False
                self._told_s = self._clock()
            yield report

    def _step(self, event: Steps) -> None:
        """Figures of the newest step; the end of an epoch is news."""
        last = event.step[-1]
        self._due |= last // self._per_epoch > (event.step[0] - 1) // self._per_epoch
        self._changed = True
        figures = {
            "step": last,
            "epoch": math.ceil(last / self._per_epoch),
            "train/loss": event.loss[-1],
            "train/learning_rate": event.learning_rate[-1],
            "speed/samples_per_s": sum(event.samples) / max(sum(event.step_s), 1e-9),
        }
        self._metrics |= {name: value for name, value in figures.items() if math.isfinite(value)}
