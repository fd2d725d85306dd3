"""Which workers of a run are forked by the fork servers of their nodes.

A run has a fork server started on each of its nodes. It stays for runs that come, whose drivers find its command in the
key-value store of the cluster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import ray
from ray.exceptions import RayActorError

from trainwright.core.plan import Plan
from trainwright.ray_cluster import ray_compat
from trainwright.runtime import fork_server
from trainwright.runtime.takeover import DriverLease

_AFTER_S = 5.0  # from the start of a node's first worker to that of its fork server
_SWITCH = "TRAINWRIGHT_FORK_SERVER"  # environment variable of the driver: `off`, or `on` for accelerators too
_ENGINES = "trainwright.strategies."
_HARMLESS = {"_ray_commit", "config", "env_vars", "excludes", "py_modules", "worker_process_setup_hook", "working_dir"}
# What Ray imports beside itself in a worker.
_RAYS = (
    *("aiohttp", "filelock", "google.protobuf", "jsonschema", "msgpack", "packaging.version", "psutil"),
    *("pyarrow", "requests", "yaml"),
)


class ForkedWorkers:
    """The fork servers of the nodes of a run. For the driver's thread.

    Args:
        plan: of the run.
        on_answer: has a function called with the answer to a remote call.
        later: has a function called after some seconds.
        lease: of the driver.
        note: tells the user something.
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
        self._on = usable and _is_forkable(plan, os.environ.get(_SWITCH, ""))
        self._asked: set[str] = set()
        self._commands = ray_compat.published(self._kind) if self._on else {}

    @property
    def _kind(self) -> str:
        return f"{self._module}/{self._threads}"

    @cached_property
    def _nodes_at_first(self) -> set[str]:
        listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return {node["NodeID"] for node in listed if node["Alive"] and node["Resources"].get("CPU")}

    def options(self, node_id: str | None) -> dict[str, Any]:
        """Return Ray's options for a worker that is forked on this node; none where it is started as any other.

        Args:
            node_id: None for a worker that Ray may place on any node.
        """
        if not self._on or len({*self._commands.values()}) != 1:
            return {}  # none, or nodes whose Pythons are in different places: Ray may move a worker to another node
        nodes = {node_id} if node_id else self._nodes_at_first
        command = next(iter(self._commands.values()))
        return {"runtime_env": {"py_executable": command}} if nodes <= self._commands.keys() else {}

    def start_server(self, node_id: str, actor: Any, *, then: Callable[[], None] = lambda: None) -> None:
        """Have a worker start the fork server of its node unless there is one; `then` comes after that, or without."""
        if not self._on or actor is None:
            then()
            return

        def started(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self.started(node_id, done.result())
            elif not isinstance(error, RayActorError):
                self.failed(f"no fork server was started: {error}")
            then()

        self._on_answer(actor.start_fork_server.remote(self._module, self._threads, self._lease.token), started)

    def start_server_later(self, node_id: str, find_actor: Callable[[], Any]) -> None:
        """Start the fork server of a node where a worker has started, once; training comes first."""
        if node_id not in self._asked:
            self._asked.add(node_id)
            self._later(_AFTER_S, lambda: self.start_server(node_id, find_actor()))

    def started(self, node_id: str, command: str) -> None:
        """Note the command of a node's fork server."""
        if command and self._commands.get(node_id) != command:
            self._commands[node_id] = command
            ray_compat.publish(self._kind, node_id, command)

    def failed(self, cause: str) -> None:
        """Fork no more workers in this run, because one did not start, or no fork server."""
        if self._on:
            self._on = False
            self._note(f"workers are no longer forked, each imports by itself: {cause}")


def start_fork_server(module: str, threads: int) -> str:
    """Start the fork server of this node for workers like this process, unless there is one; return its command."""
    environment, kind = fork_server.initial_environment(), f"{module}/{threads}"
    node_id = ray.get_runtime_context().get_node_id()
    modules = [module, "trainwright.worker.worker", *(name for name in _RAYS if find_spec(name.partition(".")[0]))]
    own = {"KERAS_BACKEND": "tensorflow"} if module.startswith(f"{_ENGINES}tensorflow.") else {}
    fork_server.start(
        fork_server.socket_name(node_id, kind, environment), modules,
        {"OMP_NUM_THREADS": str(threads), **environment, **own}, until=int(environment["RAY_RAYLET_PID"]),
    )  # fmt: skip
    return fork_server.order_command(kind)


def _is_forkable(plan: Plan, switch: str) -> bool:
    """Whether the workers of a plan may be forked: not those with accelerators, for which nobody has tried it."""
    framework = plan.engine.removeprefix(_ENGINES).partition(".")[0]
    if sys.platform != "linux" or switch == "off" or not plan.engine.startswith(_ENGINES):
        return False
    if (plan.placement.accelerators and switch != "on") or (
        framework == "tensorflow" and plan.keras_backend not in ("", framework)
    ):
        return False
    return _is_plain(ray.get_runtime_context().runtime_env)


def _is_plain(runtime_env: Mapping[str, Any]) -> bool:
    """Whether this Python, and no other one, is started in a runtime environment."""
    return set(runtime_env) <= _HARMLESS
