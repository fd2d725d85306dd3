"""Control the processes of an observed run: start the driver, read its events, and send signals to processes."""

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
_EXIT_TIMEOUT_S = 30.0  # for a driver to end after SIGTERM
_TAIL_BYTES = 4_000


@dataclass(frozen=True, kw_only=True)
class DriverExit:
    """End of a driver process.

    Attributes:
        code: exit code; negative for a signal.
        killed: whether the observer killed it, or paused it so that another driver takes over.
    """

    code: int
    killed: bool


class ObservedDriver:
    """A process of `driver_main`. `next` returns its events in order, and `DriverExit` at the end.

    Args:
        job_file: written by `experiment.write_job_file`.
        environment: additional variables of the process.

    Attributes:
        log_file: its output.
        killed: whether `kill` was called.
        paused_s: when it was paused, seconds since the epoch; None if it was not.
    """

    def __init__(self, job_file: Path, environment: Mapping[str, str]) -> None:
        self.log_file = job_file.with_suffix(".log")
        self.killed = False
        self.paused_s: float | None = None
        self._queue: queue.SimpleQueue[Event | DriverExit] = queue.SimpleQueue()
        reading, writing = os.pipe()
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _DRIVER_MODULE, str(job_file), str(writing)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writing,), start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        os.close(writing)
        self._thread = threading.Thread(target=self._read, args=(reading,), name="trainwright-events", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return the process ID."""
        return self._process.pid

    def _read(self, pipe: int) -> None:
        with os.fdopen(pipe, encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # the last line of a killed driver may be torn
                    self._queue.put(from_json(line))
        code = self._process.wait()
        self._queue.put(DriverExit(code=code, killed=self.killed))

    def next(self, timeout_s: float) -> Event | DriverExit | None:
        """Return the next event; None if there is none in time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def kill(self) -> None:
        """Send SIGKILL."""
        self.killed = True
        self._process.kill()

    def pause(self) -> None:
        """Send SIGSTOP."""
        self.paused_s = time.time()
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process if it still runs: first with SIGTERM, so that its workers end too."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self.resume()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_TIMEOUT_S)
            self._process.kill()
        self._process.wait()
        self._thread.join(_EXIT_TIMEOUT_S)

    def log_tail(self) -> str:
        """Return the end of its output."""
        return self.log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()


# --- Signals to processes on any node ---------------------------------------------------------------------------------


_REMOTE_S = 30.0  # for a task on another node


def send_signal(pid: int, started: int, number: int) -> bool:
    """Send a signal to a process; return False if it has ended. Number 0 only asks.

    Args:
        pid: of the process.
        started: its start time in clock ticks, which tells it from a later process with the same ID.
        number: of the signal.
    """
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
    """Return the identity of the process, whatever its rank."""
    return process.node, process.pid


class ProcessSignaller:
    """Sends signals to processes: on this machine directly, on other nodes through a Ray task.

    Args:
        here: host name of this machine, as its workers report it.
    """

    def __init__(self, here: str = "") -> None:
        self._here = here or socket.gethostname()
        self._registered: dict[tuple[str, int], ObservedWorker] = {}
        self._started: dict[tuple[str, int], Any] = {}  # ticks, or the reference of a task that returns them

    def register(self, process: ObservedWorker) -> None:
        """Remember the start time of a process while it is known to run."""
        here = process.node == self._here
        started = _started_of(process.pid) if here else self._task(process, _started_of, process.pid)
        self._registered[_key(process)], self._started[_key(process)] = process, started

    def send(self, process: ObservedWorker, number: int) -> bool:
        """Send a signal; return False if the process has ended or was not registered."""
        started = self._ticks(process)
        if process.node == self._here:
            return send_signal(process.pid, started, number)
        return bool(self._result(self._task(process, send_signal, process.pid, started, number), process))

    def is_alive(self, process: ObservedWorker) -> bool:
        """Return whether the process runs."""
        return self.send(process, 0)

    def registered(self) -> tuple[ObservedWorker, ...]:
        """Return all registered processes."""
        return tuple(self._registered.values())

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
            return 0  # the node is lost, and the process with it
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
                remedy="free memory on the node, or check its health",
            ) from error
        except (ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError, ray.exceptions.TaskUnschedulableError):
            return 0  # the node was lost meanwhile, and the process with it
