"""The driver's queue of events, with alarms: one thread waits, any thread puts."""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections.abc import Callable

from trainwright.driver.messages import Expired, Happening, SetTimer

Item = Happening | Callable[[], None]


class EventQueue:
    """Events, and calls that the waiting thread is to make. All but `put` are for that thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._timers: dict[str, int] = {}

    def put(self, item: Item) -> None:
        """Add an event or a call; from any thread."""
        self._queue.put(item)

    def wait(self) -> Item:
        """Wait for the next item, or for the next alarm."""
        timeout = max(0.0, self._alarms[0][0] - time.monotonic()) if self._alarms else None
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return heapq.heappop(self._alarms)[2]

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Have a call made after so many seconds."""
        heapq.heappush(self._alarms, (time.monotonic() + after_s, next(self._count), action))

    def set_timer(self, timer: SetTimer) -> None:
        """Put Expired when the timer runs out; replaces the timer of that name."""
        self._timers[timer.name] = timer.number

        def expire() -> None:
            if self._timers.get(timer.name) == timer.number:
                del self._timers[timer.name]
                self.put(Expired(name=timer.name, number=timer.number))

        self.later(timer.after_s, expire)

    def cancel_timer(self, name: str) -> None:
        """Forget a timer."""
        self._timers.pop(name, None)
