"""A driver process as its observer holds it: its events as they happen, its end, its death by our hand."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trainwright.chaos_testing.fault_schedule import ObservedWorker
from trainwright.core.errors import ResourceError
from trainwright.core.events import Event, from_json
from trainwright.storage.run_owner import process_start_ticks

_DRIVER_MODULE = "trainwright.chaos_testing.driver_main"
_EXIT_TIMEOUT_S = 30.0  # for a driver that is asked to end
_TAIL_BYTES = 4_000


@dataclass(frozen=True, kw_only=True)
class DriverExit:
    """The driver process is gone.

    Attributes:
        code: exit code; negative for a signal.
        killed: by the observer, or stopped by it for another to take the run over.
    """

    code: int
    killed: bool


class ObservedDriver:
    """One process of `subject`; events come out of `next` in order, `DriverExit` as the last.

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
        self._queue: queue.SimpleQueue[Event | DriverExit] = queue.SimpleQueue()
        reading, writing = os.pipe()
        with self.said.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _DRIVER_MODULE, str(order), str(writing)],
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
        self._queue.put(DriverExit(code=code, killed=self.killed))

    def next(self, timeout_s: float) -> Event | DriverExit | None:
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
                self._process.wait(_EXIT_TIMEOUT_S)
            self._process.kill()
        self._process.wait()
        self._thread.join(_EXIT_TIMEOUT_S)

    def last_words(self) -> str:
        """The end of what it has said."""
        return self.said.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()


# --- Signals to processes wherever they are ---------------------------------------------------------------------------


_REMOTE_S = 30.0  # for a task on another node


def send_signal(pid: int, started: int, number: int) -> bool:
    """Send a signal to the process that started then; False when it is gone. Number 0 only asks."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not started or process_start_ticks(pid) != started:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _started_of(pid: int) -> int:
    return process_start_ticks(pid) or 0


def _key(process: ObservedWorker) -> tuple[str, int]:
    """Which process it is, whatever rank it holds."""
    return process.node, process.pid


class ProcessSignaller:
    """Reaches processes of this machine directly, and others through a Ray task on their node.

    Args:
        here: name of this machine, as its workers tell it.
    """

    def __init__(self, here: str = "") -> None:
        self._here = here or socket.gethostname()
        self._met: dict[tuple[str, int], ObservedWorker] = {}
        self._started: dict[tuple[str, int], Any] = {}  # ticks, or the reference of a task that asks for them

    def meet(self, process: ObservedWorker) -> None:
        """Remember which process this is, while it surely lives."""
        here = process.node == self._here
        started = _started_of(process.pid) if here else self._task(process, _started_of, process.pid)
        self._met[_key(process)], self._started[_key(process)] = process, started

    def send(self, process: ObservedWorker, number: int) -> bool:
        """Send a signal; False when the process is gone, or was never met."""
        started = self._ticks(process)
        if process.node == self._here:
            return send_signal(process.pid, started, number)
        return bool(self._result(self._task(process, send_signal, process.pid, started, number), process))

    def lives(self, process: ObservedWorker) -> bool:
        """Whether the process is there."""
        return self.send(process, 0)

    def met(self) -> tuple[ObservedWorker, ...]:
        """All that were met."""
        return tuple(self._met.values())

    def _ticks(self, process: ObservedWorker) -> int:
        known = self._started.get(_key(process), 0)
        if not isinstance(known, int):
            known = self._started[_key(process)] = self._result(known, process)
        return cast(int, known)

    def _task(self, process: ObservedWorker, function: Callable[..., Any], *arguments: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        ids = [node["NodeID"] for node in listed if node["Alive"] and node["NodeManagerHostname"] == process.node]
        if not ids:
            return 0  # the node is gone, and the process with it
        spot = NodeAffinitySchedulingStrategy(ids[0], soft=False)
        return ray.remote(function).options(num_cpus=0, scheduling_strategy=spot).remote(*arguments)

    def _result(self, reference: Any, process: ObservedWorker) -> Any:
        import ray

        if isinstance(reference, int):
            return reference
        try:
            return ray.get(reference, timeout=_REMOTE_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ResourceError(
                f"{process} cannot be reached: no task ran there within {_REMOTE_S:g} s",
                where=process.node,
                remedy="free a little memory on the node, or look at its health",
            ) from error
        except (ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError, ray.exceptions.TaskUnschedulableError):
            return 0  # the node is gone meanwhile, and the process with it
