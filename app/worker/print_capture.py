"""Capture what a job's functions print, until the driver polls it.

They go on to Ray's log files as before. What a job prints faster than anybody reads is left out, and counted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from trainwright.core.errors import escape_control_characters
from trainwright.core.redaction import redact

BURST_LINES, _LINES_PER_S = 300, 10.0  # lines at once, and in the long run
MAX_LINES = 1000  # lines that nobody has asked for, the newest
MAX_LINE_LENGTH = 2000  # letters of a line
_RAY_MARKERS = (":actor_name:", ":task_name:", ":job_id:")  # lines that Ray itself writes into its log files


class PrintCapture:
    """A text stream before another one, which remembers the lines that pass. All methods may be called at any time.

    Args:
        behind: the stream that everything is passed on to.
        clock: seconds that only grow.
    """

    def __init__(self, behind: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._behind, self._clock = behind, clock
        self._news = threading.Condition()
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._open = ""  # of a line that is not ended yet
        self._left_out = 0
        self._allowed, self._allowed_s = float(BURST_LINES), clock()

    @classmethod
    def installed(cls) -> PrintCapture:
        """The one that is this process's standard output, from now on."""
        if not isinstance(sys.stdout, cls):
            sys.stdout = cls(sys.stdout)
        found: PrintCapture = sys.stdout
        return found

    def write(self, text: str) -> int:
        """Pass text on, and keep its lines; of one that is written over (`\\r`), what stands there in the end."""
        written: int = self._behind.write(text)
        with self._news:
            *ended, self._open = (self._open + text).split("\n")
            self._open = self._open[-MAX_LINE_LENGTH:]
            for line in ended:
                self._add(line.rstrip("\r").rpartition("\r")[2])
            if ended:
                self._news.notify_all()
        return written

    def _add(self, line: str) -> None:
        if line.startswith(_RAY_MARKERS):
            return
        now = self._clock()
        self._allowed = min(self._allowed + (now - self._allowed_s) * _LINES_PER_S, float(BURST_LINES))
        self._allowed_s = now
        if self._allowed < 1.0:
            self._left_out += 1
            return
        self._allowed -= 1.0
        self._tell_left_out()
        self._lines.append(line)

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._lines.append(f"... {self._left_out:,} lines are left out here; Ray's log of this process has them")
            self._left_out = 0

    def take(self, timeout_s: float) -> list[str]:
        """Lines since the last call, printable and without secrets; waits up to `timeout_s` for the first one."""
        with self._news:
            self._news.wait_for(lambda: bool(self._lines), timeout_s)
            if not timeout_s:
                self._tell_left_out()
            taken, self._lines = self._lines, deque(maxlen=MAX_LINES)
        return [escape_control_characters(redact(line[:MAX_LINE_LENGTH])) for line in taken]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)
