"""Signals to processes wherever they are: never to another process that has taken the number of a dead one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any, cast

from trainwright.chaos_testing.run_state import Process
from trainwright.core.errors import ResourceError
from trainwright.storage.run_owner import started_ticks

_REMOTE_S = 30.0  # for a task on another node


def send(pid: int, started: int, number: int) -> bool:
    """Send a signal to the process that started then; False when it is gone. Number 0 only asks."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not started or started_ticks(pid) != started:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _started_of(pid: int) -> int:
    return started_ticks(pid) or 0


def _key(process: Process) -> tuple[str, int]:
    """Which process it is, whatever rank it holds."""
    return process.node, process.pid


class Hands:
    """Reaches processes of this machine directly, and others through a Ray task on their node.

    Args:
        here: name of this machine, as its workers tell it.
    """

    def __init__(self, here: str = "") -> None:
        self._here = here or socket.gethostname()
        self._met: dict[tuple[str, int], Process] = {}
        self._started: dict[tuple[str, int], Any] = {}  # ticks, or the reference of a task that asks for them

    def meet(self, process: Process) -> None:
        """Remember which process this is, while it surely lives."""
        here = process.node == self._here
        started = _started_of(process.pid) if here else self._task(process, _started_of, process.pid)
        self._met[_key(process)], self._started[_key(process)] = process, started

    def send(self, process: Process, number: int) -> bool:
        """Send a signal; False when the process is gone, or was never met."""
        started = self._ticks(process)
        if process.node == self._here:
            return send(process.pid, started, number)
        return bool(self._result(self._task(process, send, process.pid, started, number), process))

    def lives(self, process: Process) -> bool:
        """Whether the process is there."""
        return self.send(process, 0)

    def met(self) -> tuple[Process, ...]:
        """All that were met."""
        return tuple(self._met.values())

    def _ticks(self, process: Process) -> int:
        known = self._started.get(_key(process), 0)
        if not isinstance(known, int):
            known = self._started[_key(process)] = self._result(known, process)
        return cast(int, known)

    def _task(self, process: Process, function: Callable[..., Any], *arguments: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        ids = [node["NodeID"] for node in listed if node["Alive"] and node["NodeManagerHostname"] == process.node]
        if not ids:
            return 0  # the node is gone, and the process with it
        spot = NodeAffinitySchedulingStrategy(ids[0], soft=False)
        return ray.remote(function).options(num_cpus=0, scheduling_strategy=spot).remote(*arguments)

    def _result(self, reference: Any, process: Process) -> Any:
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
