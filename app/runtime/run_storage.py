"""Writes to the run log on a thread of their own, so that a slow store does not stop the driver."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from trainwright.core import formatting
from trainwright.core.errors import FencedError, RunConflict, TrainwrightError
from trainwright.driver import messages as m
from trainwright.runtime.event_queue import EventQueue
from trainwright.storage.run_store import RunStore

OVERDUE_S = 120.0  # of a write that is not answered, before the user is told


class RunStorage:
    """Commits checkpoints and releases the lease on a thread of its own; each write ends with an event.

    Args:
        ledger: the run's log.
        queue: that gets the events.
        uri: of the store, for messages.
        note: tells the user something.
    """

    def __init__(self, ledger: RunStore, queue: EventQueue, *, uri: str, note: Callable[[str], None]) -> None:
        self._ledger, self._queue, self._uri, self._note = ledger, queue, uri, note
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="log")

    def submit(self, action: Callable[[], m.DriverEvent]) -> Future[None]:
        """Run an action and put its event; an error loses the lease."""

        def run() -> None:
            try:
                self._queue.put(action())
            except TrainwrightError as error:
                if isinstance(error, RunConflict):
                    self._queue.fence(error)
                else:
                    self._queue.put(m.LeaseLost(error=error))
            except Exception as error:  # it would vanish in the thread, and the driver would wait forever
                told = TrainwrightError(f"{type(error).__name__}: {error}", detail=traceback.format_exc())
                self._queue.put(m.LeaseLost(error=told))

        return self._pool.submit(run)

    def commit(self, effect: m.CommitCheckpoint) -> None:
        """Commit a checkpoint."""
        committed = self.submit(lambda: self._commit(effect))
        self.watch(f"the driver commits the checkpoint of step {effect.step}", committed)

    def _commit(self, effect: m.CommitCheckpoint) -> m.DriverEvent:
        try:
            return self._ledger.commit(effect)
        except FencedError:
            raise
        except TrainwrightError as error:
            return m.CommitFailed(step=effect.step, error=error)

    def release(self, effect: m.ReleaseLease) -> None:
        """Release the lease."""
        self.submit(lambda: self._release(effect))

    def _release(self, effect: m.ReleaseLease) -> m.DriverEvent:
        self._ledger.release(effect)
        return m.LeaseReleased()

    def watch(self, what: str, answer: Future[Any], waited_s: float = 0.0) -> None:
        """Tell the user of a write that hangs, ever less often: a network folder may never answer nor fail."""
        after_s = max(OVERDUE_S, waited_s)

        def look() -> None:
            if answer.done():
                return
            self._note(
                f"{what} for {formatting.duration(waited_s + after_s)} by now: the store at {self._uri} "
                "does not answer. Training goes on; no newer checkpoint is written before it does"
            )
            self.watch(what, answer, waited_s + after_s)

        self._queue.later(after_s, look)

    def close(self) -> None:
        """Start no more writes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
