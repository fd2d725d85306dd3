"""Events that wait for the store, within bounds: where they are too many, records of steps grow sparse."""

from __future__ import annotations

from collections.abc import Iterable

from trainwright.core.events import CheckpointSkipped, Event, Measured, Prefetched, Printed, Stacks, Steps, Waiting

MOST_STEPS, MOST_LESSER = 100_000, 10_000
_LESSER = (CheckpointSkipped, Measured, Prefetched, Printed, Stacks, Waiting)  # a later one, or a log, says as much
_BLOCK = 1_000  # records of one event


class Backlog:
    """A list of events. One thread at a time.

    Records of steps (about 300 bytes each) are thinned when there are more than `most_steps`: every second one goes,
    the older ones again each time. Of events that matter less, the older half goes when there are more than
    `most_lesser`. All others are kept: there are few in any outage.

    Attributes:
        items: in the order they were added.
        steps_dropped: records of steps that went, since the last `take`.
        lesser_dropped: other events that went, since the last `take`.
    """

    def __init__(self, *, most_steps: int = MOST_STEPS, most_lesser: int = MOST_LESSER) -> None:
        self._most_steps, self._most_lesser = most_steps, most_lesser
        self._steps = self._lesser = 0
        self.items: list[Event] = []
        self.steps_dropped = self.lesser_dropped = 0

    @property
    def dropping(self) -> bool:
        """Whether any went."""
        return bool(self.steps_dropped or self.lesser_dropped)

    def add(self, event: Event) -> None:
        """One more event; drops older ones where that is needed."""
        self.items.append(event)
        if isinstance(event, Steps):
            self._steps += len(event.step)
            if self._steps > self._most_steps:
                self._thin()
        elif isinstance(event, _LESSER):
            self._lesser += 1
            if self._lesser > self._most_lesser:
                self._drop_lesser()

    def take(self) -> list[Event]:
        """All events, which are no longer here."""
        taken, self.items = self.items, []
        self._steps = self._lesser = self.steps_dropped = self.lesser_dropped = 0
        return taken

    def _thin(self) -> None:
        self.items = thinned(self.items)
        left = sum(len(item.step) for item in self.items if isinstance(item, Steps))
        self.steps_dropped += self._steps - left
        self._steps = left

    def _drop_lesser(self) -> None:
        places = [place for place, item in enumerate(self.items) if isinstance(item, _LESSER)]
        gone = set(places[: len(places) // 2])
        self.items = [item for place, item in enumerate(self.items) if place not in gone]
        self.lesser_dropped += len(gone)
        self._lesser -= len(gone)


def thinned(events: Iterable[Event]) -> list[Event]:
    """The same events with every second record of steps, the newest one included, in few events."""
    found: list[Event] = []
    odd = False  # whether the record before was dropped, from the newest one back
    for event in reversed(list(events)):
        if not isinstance(event, Steps):
            found.append(event)
            continue
        kept = event.every_second(last=not odd)
        odd = odd ^ (len(event.step) % 2 == 1)
        if not kept.step:
            continue
        newer = found[-1] if found else None
        if isinstance(newer, Steps) and newer.generation == kept.generation and len(newer.step) < _BLOCK:
            found[-1] = kept.followed_by(newer)
        else:
            found.append(kept)
    return found[::-1]
