"""Ctrl-C and SIGTERM as wishes to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

FIRST = "stopping after this step, with a checkpoint; a second signal stops at once, without it"
SECOND = "stopping at once, without a checkpoint"
_STDERR = 2


class Stoppable(Protocol):
    """What can be asked to end."""

    def stop(self, now: bool = False) -> None:
        """Ask for the end."""


class Stops:
    """Which signals came. `last` is the number of the newest one, 0 for none."""

    def __init__(self, run: Stoppable) -> None:
        self._run = run
        self.last = 0

    def take(self, number: int, _frame: FrameType | None) -> None:
        """First a checkpoint, then no more waiting; what is done is said at once."""
        self._run.stop(now=self.last != 0)
        told, self.last = SECOND if self.last else FIRST, number
        with contextlib.suppress(OSError):  # the terminal may be gone: that is why the signal came
            os.write(_STDERR, f"\n{told}\n".encode())  # a print may be what was interrupted


@contextlib.contextmanager
def stopping(run: Stoppable) -> Iterator[Stops]:
    """Within it, SIGINT and SIGTERM stop the run; afterwards they are what they were.

    Outside the main thread Python delivers no signals, and this does nothing.
    """
    stops = Stops(run)
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    before = {number: signal.signal(number, stops.take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
