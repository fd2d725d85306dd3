"""SIGTERM to a worker's process, taken as a notice that it will be ended soon: it lives on until then."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

EXIT_CODE = 128 + signal.SIGTERM


class Notices:
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
        os.register_at_fork(after_in_child=_unlearn)
        threading.Thread(target=self._listen, name="notices", daemon=True).start()

    def _listen(self) -> None:
        while signal.SIGTERM not in self._ear.recv(64):
            pass
        self._ends_s = time.monotonic() + self._preemption_s
        self._came.set()
        threading.Event().wait(self._preemption_s)
        os._exit(EXIT_CODE)

    def wait(self) -> float:
        """Block until the notice comes; the seconds that are left then."""
        self._came.wait()
        return max(0.0, self._ends_s - time.monotonic())


def _unlearn() -> None:
    """A child that the job forks ends at SIGTERM, and that is no notice to its parent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
