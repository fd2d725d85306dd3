"""The rendezvous epoch that a rank takes part in, and those that are over for it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from trainwright.core.errors import PeerLost
from trainwright.core.topology import Generation


class Interruption:
    """Brings interrupts to the generation that they are for, and to no other.

    The driver's calls and its interrupts are carried out by different threads of this process: an interrupt may come
    before the call that it is for has begun, or when the next generation's has.

    Attributes:
        lock: held while an engine is interrupted; hold it to exchange the engine.
        current: the generation that this rank takes part in, or took part in last.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current = self._over = Generation(token=-1, number=0)

    def enter(self, generation: Generation) -> None:
        """Take part in a generation from now on. Raises PeerLost where it is over already."""
        with self.lock:
            self.current = generation
            if generation <= self._over:
                raise PeerLost(
                    f"generation {generation} was over before this rank had joined it",
                    remedy="look at the rank that failed first",
                )

    def end(self, generation: Generation, interrupt: Callable[[], object]) -> None:
        """A generation is over, and so are those before it: call `interrupt` where this rank takes part in one."""
        with self.lock:
            self._over = max(self._over, generation)
            if self.current <= generation:
                interrupt()


# --- Stack traces for the report of a hang ----------------------------------------------------------------------------


_MAX_STACK_CHARACTERS = 16_000


def thread_stacks(first: int | None = None) -> str:
    """The Python stacks of all threads but the caller's, the most recent call last.

    Args:
        first: ident of the thread to begin with.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    parts = [
        f"thread {names.get(ident, ident)}{' (steps)' if ident == first else ''}:\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: (ident != first, ident))
    ]
    return "\n".join(parts)[:_MAX_STACK_CHARACTERS]


# --- SIGTERM as a preemption notice -----------------------------------------------------------------------------------


_EXIT_CODE = 128 + signal.SIGTERM


class PreemptionNotices:
    """Takes SIGTERM from now on; made in the main thread. The process ends itself `preemption_s` after the first one.

    In Ray's workers the main thread seldom runs Python, so a Python handler would come late: the number of the signal
    is read from the wake-up descriptor instead, which is written to at once.
    """

    def __init__(self, preemption_s: float) -> None:
        self._preemption_s = preemption_s
        self._came = threading.Event()
        self._ends_s = 0.0
        self._ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        self._mouth = mouth  # kept open
        signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        os.register_at_fork(after_in_child=_restore_sigterm)
        threading.Thread(target=self._listen, name="notices", daemon=True).start()

    def _listen(self) -> None:
        while signal.SIGTERM not in self._ear.recv(64):
            pass
        self._ends_s = time.monotonic() + self._preemption_s
        self._came.set()
        threading.Event().wait(self._preemption_s)
        os._exit(_EXIT_CODE)

    def wait(self) -> float:
        """Block until the notice comes; the seconds that are left then."""
        self._came.wait()
        return max(0.0, self._ends_s - time.monotonic())


def _restore_sigterm() -> None:
    """A child that the job forks ends at SIGTERM, and that is no notice to its parent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
