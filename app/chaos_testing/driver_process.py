"""A driver process as its observer holds it: its events as they happen, its end, its death by our hand."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainwright.core.events import Event, from_json

SUBJECT = "trainwright.chaos_testing.driver_main"
END_S = 30.0  # for a driver that is asked to end
_TAIL_BYTES = 4_000


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The driver process is gone.

    Attributes:
        code: exit code; negative for a signal.
        killed: by the observer, or stopped by it for another to take the run over.
    """

    code: int
    killed: bool


class Driver:
    """One process of `subject`; events come out of `next` in order, `Ended` as the last.

    Args:
        order: the file that `subject.write_order` has written.
        environment: variables beside this process's own.

    Attributes:
        said: file of what it wrote to its output.
        killed: by `kill`.
        stalled_s: when it was stopped, seconds since the epoch; None where it was not.
    """

    def __init__(self, order: Path, environment: Mapping[str, str]) -> None:
        self.said = order.with_suffix(".log")
        self.killed = False
        self.stalled_s: float | None = None
        self._queue: queue.SimpleQueue[Event | Ended] = queue.SimpleQueue()
        reading, writing = os.pipe()
        with self.said.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", SUBJECT, str(order), str(writing)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writing,), start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        os.close(writing)
        self._thread = threading.Thread(target=self._read, args=(reading,), name="trainwright-events", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _read(self, pipe: int) -> None:
        with os.fdopen(pipe, encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # the last line of a killed driver may be torn
                    self._queue.put(from_json(line))
        code = self._process.wait()
        self._queue.put(Ended(code=code, killed=self.killed))

    def next(self, timeout_s: float) -> Event | Ended | None:
        """The next event; None when there is none in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def kill(self) -> None:
        """SIGKILL."""
        self.killed = True
        self._process.kill()

    def stall(self) -> None:
        """SIGSTOP."""
        self.stalled_s = time.time()
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it if it is there still: first kindly, so that its workers end with it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self.wake()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._process.kill()
        self._process.wait()
        self._thread.join(END_S)

    def last_words(self) -> str:
        """The end of what it has said."""
        return self.said.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
