"""How the driver learns that workers will be ended: SIGTERM to a process, notices of the cloud, nodes that Ray drains.

One worker of each node asks the cloud's metadata service, for all workers there. When it has ended, another one asks.
The driver itself asks Ray about draining nodes.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from ray.exceptions import RayTaskError

from trainwright.driver.messages import PreemptionNoticed
from trainwright.ray_cluster.ray_compat import draining_nodes
from trainwright.runtime.takeover import DriverLease
from trainwright.worker.cloud_notices import POLL_S, NodeNotice

_SWITCH = "TRAINWRIGHT_CLOUD_NOTICES"  # environment variable of the driver; with `off`, no metadata service is asked
_END_S = 10.0  # for a question to Ray that is under way


class _EventSink(Protocol):
    def put(self, item: Any) -> None: ...

    def then(self, ref: Any, action: Callable[[Future[Any]], None]) -> Future[Any]: ...


class PreemptionWatcher:
    """Puts PreemptionNoticed for workers that will be ended, and reports other notices. For the driver's thread.

    Args:
        nodes: name and Ray's id of each worker's node.
        avoid: excludes a node, by Ray's id, from new placements; None if another library owns the nodes and gets their
            notices itself.
    """

    def __init__(
        self,
        actors: Mapping[int, Any],
        nodes: Mapping[int, tuple[str, str]],
        queue: _EventSink,
        lease: DriverLease,
        *,
        avoid: Callable[[str], None] | None,
        note: Callable[[str], None],
    ) -> None:
        self._actors, self._nodes, self._queue, self._lease = actors, nodes, queue, lease
        self._avoid, self._note = avoid, note
        self._asks_cloud = avoid is not None and os.environ.get(_SWITCH, "") != "off"
        self._askers: dict[str, int] = {}  # the worker that asks the cloud, by node
        self._reported_keys: defaultdict[str, set[str]] = defaultdict(set)  # keys of notices, by node
        # by node, notices with an end: the end on the clock of `time.monotonic`, and the newest worker at that time
        self._ends: defaultdict[str, list[tuple[NodeNotice, float, int]]] = defaultdict(list)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch_drains, name="trainwright-drains", daemon=True)

    def watch(self, worker: int) -> None:
        """Watch a worker that is up; a notice may have come for its node while it started.

        A worker that was placed there after the notice, since no other node has room, stays until the end.
        """
        call = self._actors[worker].notice.remote(self._lease.token)
        self._queue.then(call, lambda answer: self._on_sigterm(worker, answer))
        node = self._nodes[worker][1]
        for notice, end_s, newest in self._ends[node]:
            if worker <= newest and (left_s := end_s - time.monotonic()) > 0.0:
                self._queue.put(PreemptionNoticed(worker=worker, left_s=left_s, why=notice.text))
        if self._asks_cloud and node not in self._askers:
            self._ask_cloud(node, worker)
        if self._avoid is not None and self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """End the watch, before the connection to Ray ends."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _on_sigterm(self, worker: int, answer: Future[Any]) -> None:
        if answer.exception() is None:  # else the worker has ended, which is reported by another call
            self._queue.put(PreemptionNoticed(worker=worker, left_s=answer.result()))

    # --- the cloud ----------------------------------------------------------------------------------------

    def _ask_cloud(self, node: str, worker: int) -> None:
        self._askers[node] = worker
        call = self._actors[worker].node_notice.remote(frozenset(self._reported_keys[node]), self._lease.token)
        self._queue.then(call, lambda answer: self._on_answer(node, worker, answer))

    def _on_answer(self, node: str, worker: int, answer: Future[Any]) -> None:
        error = answer.exception()
        if isinstance(error, RayTaskError):  # another worker would fail too
            self._note(f"preemption notices of the cloud cannot be read on {self._nodes[worker][0]}: {error.cause}")
        elif error is not None:  # it has ended
            del self._askers[node]
            successor = next((other for other in self._workers(node) if other != worker), None)
            if successor is not None:
                self._ask_cloud(node, successor)
        elif answer.result() is not None:  # None: the node is no machine of a cloud, so that no worker asks there again
            self._report_notice(node, answer.result())
            if worker in self._actors:
                self._ask_cloud(node, worker)
            else:
                del self._askers[node]

    # --- Ray ----------------------------------------------------------------------------------------------

    def _watch_drains(self) -> None:
        reported = ""
        while not self._closed.wait(POLL_S):
            try:
                for node, deadline_s in draining_nodes().items():
                    left_s = max(0.0, deadline_s - time.time()) if deadline_s else math.inf
                    notice = NodeNotice(key="drain", text="Ray drains its node", left_s=left_s)
                    self._queue.put(partial(self._report_notice, node, notice))
                reported = ""
            except Exception as error:  # Ray's own errors have no common class; the next question may succeed
                text = f"cannot read which nodes Ray drains: {type(error).__name__}: {error}"
                if text != reported:
                    self._queue.put(partial(self._note, text))
                reported = text

    # --- both ---------------------------------------------------------------------------------------------

    def _workers(self, node: str) -> list[int]:
        return [worker for worker in self._actors if worker in self._nodes and self._nodes[worker][1] == node]

    def _report_notice(self, node: str, notice: NodeNotice) -> None:
        """Report a notice once."""
        workers = self._workers(node)
        if not workers or notice.key in self._reported_keys[node]:
            return
        self._reported_keys[node].add(notice.key)
        if notice.avoid and self._avoid is not None:
            self._avoid(node)
        if notice.left_s is None:
            self._note(f"{self._nodes[workers[0]][0]}: {notice.text}")
            return
        self._ends[node].append((notice, time.monotonic() + notice.left_s, max(self._actors)))
        for worker in workers:
            self._queue.put(PreemptionNoticed(worker=worker, left_s=notice.left_s, why=notice.text))
