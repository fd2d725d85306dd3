"""The driver's queue of events, with timers and answers of remote calls."""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from trainwright.core.errors import FencedError, TrainwrightError
from trainwright.driver.messages import CallFailure, DriverEvent, LeaseLost, SetTimer, TimerExpired
from trainwright.runtime.takeover import DriverLease

_QueueItem = DriverEvent | Callable[[], None]


class EventQueue:
    """The driver's events, timers, and calls that its thread makes. All methods but `put` are for that thread.

    Args:
        lease: of the driver. Once it is lost, `next` returns LeaseLost only.
    """

    def __init__(self, lease: DriverLease) -> None:
        self._lease = lease
        self._queue: queue.SimpleQueue[_QueueItem] = queue.SimpleQueue()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._timers: dict[str, int] = {}

    def put(self, item: _QueueItem) -> None:
        """Add an event or a call; from any thread."""
        self._queue.put(item)

    def next(self) -> DriverEvent:
        """Wait for the next event; a timer that runs out is one."""
        while True:
            item = self._wait()
            if not self._lease.check():
                assert self._lease.lost is not None, "a lease that may not be used is lost"
                return LeaseLost(error=self._lease.lost)
            if not callable(item):
                return item
            item()

    def then(self, ref: Any, action: Callable[[Future[Any]], None]) -> Future[Any]:
        """Call `action` with the answer to a remote call, unless it says that another driver has the process."""
        answer: Future[Any] = ref.future()
        answer.add_done_callback(lambda done: self.put(lambda: self._settle(done, action)))
        return answer

    def _settle(self, done: Future[Any], action: Callable[[Future[Any]], None]) -> None:
        refused = done.result() if done.exception() is None else None
        if isinstance(refused, CallFailure) and isinstance(refused.error, FencedError):
            self.fence(refused.error)
        else:
            action(done)

    def fence(self, error: TrainwrightError) -> None:
        """Give up the lease, because another driver has the run; from any thread."""
        self._lease.lose(error)
        self.put(lambda: None)  # wakes up `next`

    def _wait(self) -> _QueueItem:
        timeout = max(0.0, self._alarms[0][0] - time.monotonic()) if self._alarms else None
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return heapq.heappop(self._alarms)[2]

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Make a call after some seconds."""
        heapq.heappush(self._alarms, (time.monotonic() + after_s, next(self._count), action))

    def set_timer(self, timer: SetTimer) -> None:
        """Put TimerExpired when the timer runs out; replaces the timer of that name."""
        self._timers[timer.name] = timer.number

        def expire() -> None:
            if self._timers.get(timer.name) == timer.number:
                del self._timers[timer.name]
                self.put(TimerExpired(name=timer.name, number=timer.number))

        self.later(timer.after_s, expire)

    def cancel_timer(self, name: str) -> None:
        """Forget a timer."""
        self._timers.pop(name, None)
