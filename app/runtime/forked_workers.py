"""Which workers of a run are forked by the fork servers of their nodes.

A run has a fork server started on each of its nodes. It stays for runs that come, whose drivers find its command in the
key-value store of the cluster.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from trainwright.core.plan import Plan
from trainwright.ray_cluster import ray_compat
from trainwright.runtime import fork_server
from trainwright.runtime.takeover import DriverLease

_AFTER_S = 5.0  # from the start of a node's first worker to that of its fork server
_READY_S = 60.0  # for a fork server to import
_STARTED_S = 30.0  # for a forked worker; a standby waits that long for a fork server
_JOBS_IDLE_S = 30.0  # of one whose environment no later job has, since Ray unpacked the job's folder for it
_RESERVED = "CREATED"  # state of a placement group whose resources are there
_SWITCH = "TRAINWRIGHT_FORK_SERVER"  # environment variable of the driver: `off`, or `on` for accelerators too
_ENGINES = "trainwright.strategies."
_UNPACKED = {"working_dir", "py_modules"}
_HARMLESS = {*_UNPACKED, "_ray_commit", "config", "env_vars", "excludes"}  # parts of an environment of this Python
_SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"  # by which Ray would end a fork server
_held: dict[str, socket.socket] = {}  # what keeps the fork servers that this process needs, by their names
# What Ray imports beside itself in a worker.
_RAY_MODULES = (
    *("aiohttp", "filelock", "google.protobuf", "jsonschema", "msgpack", "packaging.version", "psutil"),
    *("pyarrow", "requests", "yaml"),
)


class ForkedWorkers:
    """The fork servers of the nodes of a run. For the driver's thread.

    Args:
        on_answer: has a function called with the answer to a remote call.
        later: has a function called after some seconds.
        usable: whether Ray starts the workers.
    """

    def __init__(
        self,
        plan: Plan,
        on_answer: Callable[[Any, Callable[[Future[Any]], None]], object],
        later: Callable[[float, Callable[[], None]], object],
        lease: DriverLease,
        note: Callable[[str], None],
        *,
        usable: bool,
    ) -> None:
        self._module, self._threads = plan.engine.partition(":")[0], max(int(plan.placement.cpus), 1)
        self._on_answer, self._later, self._lease, self._note = on_answer, later, lease, note
        self._enabled = usable and _is_forkable(plan, os.environ.get(_SWITCH, ""))
        self._command = fork_server.worker_command(f"{self._module}/{self._threads}")
        self._requested_nodes: set[str] = set()
        self._nodes = ray_compat.published(self._command) if self._enabled else set[str]()

    @cached_property
    def _nodes_at_first(self) -> set[str]:
        listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return {node["NodeID"] for node in listed if node["Alive"] and node["Resources"].get("CPU")}

    def options(self, node_id: str | None) -> dict[str, Any]:
        """Return Ray's options for a worker that is forked on this node; none for a worker that is not forked.

        Args:
            node_id: None for a worker that Ray may place on any node.
        """
        nodes = {node_id} if node_id else self._nodes_at_first if self._nodes else {""}
        return {"runtime_env": {"py_executable": self._command}} if self._enabled and nodes <= self._nodes else {}

    def watch(
        self, actor: Any, group: PlacementGroup, is_wanted: Callable[[], bool], start_again: Callable[[], None]
    ) -> None:
        """Start a forked worker again without a fork, if it is not up in time: Ray would fork it again and again.

        Args:
            actor: of the worker.
            group: the resources that it waits for.
            is_wanted: whether `actor` is still the worker's actor.
            start_again: starts the worker again.
        """
        up: list[Any] = []

        def answered(done: Future[Any]) -> None:
            up.append(done)
            if done.exception() is not None and is_wanted():
                self.failed(f"one that was forked did not start: {done.exception()}")

        def look() -> None:
            if up or not is_wanted():
                return
            if placement_group_table(group)["state"] != _RESERVED:
                self._later(_STARTED_S, look)
            else:
                self.failed(f"one that was forked did not start within {_STARTED_S:g} s")
                with suppress(RayError):
                    ray.kill(actor, no_restart=True)
                start_again()

        self._on_answer(actor.keep_alive.remote(), answered)
        self._later(_STARTED_S, look)

    def start_server(self, node_id: str, actor: Any, *, then: Callable[[], None] = lambda: None) -> None:
        """Have a worker start the fork server of its node unless there is one; call `then` afterwards in any case."""
        if not self._enabled or actor is None:
            then()
            return
        waiting = [then]

        def proceed() -> None:
            if waiting:
                waiting.pop()()

        def started(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self.started(node_id, done.result())
            elif not isinstance(error, RayActorError):
                self.failed(f"no fork server was started: {error}")
            proceed()

        self._on_answer(actor.start_fork_server.remote(self._module, self._threads, self._lease.token), started)
        self._later(_STARTED_S, proceed)  # the worker may be frozen

    def start_server_later(self, node_id: str, find_actor: Callable[[], Any]) -> None:
        """Start the fork server of a node where a worker has started, once; training comes first."""
        if node_id not in self._requested_nodes:
            self._requested_nodes.add(node_id)
            self._later(_AFTER_S, lambda: self.start_server(node_id, find_actor()))

    def started(self, node_id: str, command: str) -> None:
        """Note that a node has a fork server. Do not use it if its Python has another path than this one."""
        if command == self._command:
            self._nodes.add(node_id)

    def failed(self, cause: str) -> None:
        """Fork no more workers in this run, because a worker or a fork server did not start; later runs try again."""
        if self._enabled:
            self._enabled = False
            for node_id in self._nodes:
                ray_compat.retract(self._command, node_id)
            self._note(f"workers are no longer forked; each one imports its modules itself: {cause}")


def start_fork_server(module: str, threads: int) -> str:
    """Start the fork server of this node for workers like this process, unless there is one, and wait for its imports.

    The server stays while this process lives, and some time after.

    Returns:
        The command that starts workers from it; empty where there can be none.

    Raises:
        OSError: it did not start, or could not import.
    """
    environment, kind, context = fork_server.initial_environment(), f"{module}/{threads}", ray.get_runtime_context()
    if "RAY_RAYLET_PID" not in environment or environment.get(_SUBREAPER, "").lower() in ("1", "true"):
        return ""
    name = fork_server.socket_name(context.get_node_id(), kind, environment)
    engine_variables = {"KERAS_BACKEND": "tensorflow"} if module.startswith(f"{_ENGINES}tensorflow.") else {}
    start = partial(
        fork_server.start, name, [module, "trainwright.worker.worker", fork_server.OPTIONAL, *_RAY_MODULES],
        {"OMP_NUM_THREADS": str(threads), **environment, **engine_variables}, until=int(environment["RAY_RAYLET_PID"]),
        idle_s=_JOBS_IDLE_S if context.runtime_env.keys() & _UNPACKED else fork_server.IDLE_S,
    )  # fmt: skip
    command = fork_server.worker_command(kind)

    def hold_server() -> None:
        _held[name] = start()
        ray_compat.publish(command, context.get_node_id())  # before it is ready: requests wait, this process may end
        fork_server.await_ready(_held[name], _READY_S)

    try:
        hold_server()
    except ConnectionError:  # an earlier server has just noticed a changed file, and serves no more
        hold_server()
    return command


def _is_forkable(plan: Plan, switch: str) -> bool:
    """Whether the workers of a plan may be forked: not with accelerators, for which forks are untested."""
    framework = plan.engine.removeprefix(_ENGINES).partition(".")[0]
    if sys.platform != "linux" or switch == "off" or not plan.engine.startswith(_ENGINES):
        return False
    if (plan.placement.accelerators and switch != "on") or (
        framework == "tensorflow" and plan.keras_backend not in ("", framework)
    ):
        return False
    return set(ray.get_runtime_context().runtime_env) <= _HARMLESS
