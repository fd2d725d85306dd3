"""Signals that a process under test sends itself."""

from __future__ import annotations

import signal
import threading


def signal_self(number: int) -> None:
    """Send a signal to this thread, so that it ends or stops the process here.

    Linux gives a signal for a process to any thread: with SIGSTOP the sender would go on until that thread runs.
    """
    signal.pthread_kill(threading.get_ident(), number)
