"""A parameter server: a thread that answers pulls and pushes while the process does other work.

`ShardServer` has what all servers share; `server_roles` has the first server, which leases units, and the others. No
worker can block a server: a call that cannot be answered yet is parked, and its worker is told at intervals to keep
waiting, so that both sides know that the other is alive.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.core.data import StepReport
from trainwright.core.errors import PeerLost
from trainwright.core.topology import Group, Peer, StalenessCounts
from trainwright.strategies.common.shared_memory import SharedRegion
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY, ConnectionCanceller, SocketListener
from trainwright.strategies.ps.call_headers import (
    CallHeader,
    MalformedCallError,
    PullCall,
    PushCall,
    parse_header,
    require,
)
from trainwright.strategies.ps.parameter_shards import ShardStore
from trainwright.strategies.ps.server_connections import (
    WorkerCall,
    WorkerConnection,
    WorkerConnections,
    WorkerDisconnected,
)
from trainwright.strategies.ps.update_applier import KeptPush, RoundUpdate, ServerConfig, UpdateApplier

_log = logging.getLogger(__name__)
_WAIT_NOTICES = 4  # times within the deadline that a waiting worker is told to keep waiting


@dataclass(frozen=True, kw_only=True)
class _WaitingPull:
    connection: WorkerConnection
    head: PullCall
    since_s: float


class _PullQueue:
    """Answers pulls from the shard's memory, and parks those whose updates are not applied yet.

    Args:
        updates: the server's.
        group: of the server.
    """

    def __init__(self, updates: UpdateApplier, group: Group) -> None:
        self._updates, self._group = updates, group
        self._filling = 0  # how often the memory got another state
        self._waiting: list[_WaitingPull] = []

    def invalidate(self) -> None:
        """The shard holds another state: workers pull everything again."""
        self._filling += 1

    def pull(self, connection: WorkerConnection, head: PullCall) -> None:
        """Answer a pull now or later."""
        self._answer(_WaitingPull(connection=connection, head=head, since_s=time.monotonic()))

    def forget(self, connection: WorkerConnection) -> None:
        """Drop the pulls of a connection that ended."""
        self._waiting = [pull for pull in self._waiting if pull.connection is not connection]

    def answer_waiting(self, now_s: float) -> None:
        """Answer the parked pulls that can be answered, and tell workers that wait for long to keep waiting."""
        waiting, self._waiting = self._waiting, []
        for pull in waiting:
            if now_s - pull.since_s > wait_notice_s(self._group):
                send_answer(pull.connection, wait=True)
            else:
                self._answer(pull)

    def _answer(self, pull: _WaitingPull) -> None:
        version = self._updates.version
        if not self._updates.opened or version < pull.head.needs:
            self._waiting.append(pull)
            return
        have, shard = (self._filling, version), self._updates.store.shard
        if pull.head.have == have:
            send_answer(pull.connection, have=have, size=0)
            return
        size = shard.pulled_bytes if pull.head.have[0] == self._filling else shard.size_bytes
        pull.connection.answer_published(json.dumps({"have": have, "size": size}).encode(), size)


class ShardServer:
    """A server.

    Args:
        listener: closed with it.
        group: the group that it serves.
        servers: all servers, in the order of ranks.
        switch: cut already if the group ended before this server exists.

    Attributes:
        lock: hold it to read or write the shard from another thread.
        step: completed steps, as of the last `serve` that started or ended.
        updates: what is applied to the shard.
    """

    def __init__(
        self, listener: SocketListener, group: Group, servers: Sequence[Peer], switch: ConnectionCanceller | None = None
    ) -> None:
        self.lock = threading.RLock()
        self.step = 0
        self.updates = UpdateApplier(self._send_norm)
        self._switch = switch or ConnectionCanceller()
        self._group, self._servers = group, tuple(servers)
        self._connections = WorkerConnections(listener, group.key, deadline_s=group.deadline_s)
        self._pulls = _PullQueue(self.updates, group)
        self._region: SharedRegion | None = None
        self._news: queue.SimpleQueue[StepReport | Exception | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._handlers: dict[type[CallHeader], Callable[[WorkerConnection, Any, memoryview], object]] = {
            PullCall: lambda connection, head, _: self._pulls.pull(connection, head),
            PushCall: self._push,
        }
        self._name = f"server rank {group.rank}"
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)

    def open(self, store: ShardStore, config: ServerConfig) -> None:
        """Publish a shard: workers can pull it from now on."""
        with self.lock:
            self._region = SharedRegion(store.shard.size_bytes)
            store.attach(self._region.view)
            self._connections.publish(self._region)
            self.updates.open(store, config)
            self._pulls.invalidate()
        self._connections.wake()

    def renewed(self) -> None:
        """The shard holds another, sound state: what workers pulled before is out of date."""
        with self.lock:
            self._pulls.invalidate()
            self.updates.sound = True

    def serve(self, start: int, until: int, stop_requested: Callable[[], bool]) -> Iterator[StepReport]:
        """Let the workers take the steps from `start` on and before `until`, see `core.engine.IndependentEngine`.

        Raises:
            PeerLost: another server is lost or silent, or `cut` was called.
            UserCodeError: of the shard's optimizer.
        """
        raise NotImplementedError

    def staleness(self) -> StalenessCounts:
        """Return the staleness of the updates applied here since the last call."""
        with self.lock:
            return self.updates.staleness()

    def check(self) -> None:
        """Raise the failure of this server's thread, unless another server was lost."""
        if self._failure is not None and not isinstance(self._failure, PeerLost):
            raise self._failure

    def cut(self) -> None:
        """End all connections, from any thread: `serve` raises."""
        self._fail(PeerLost(f"rank {self._group.rank} has left its group", remedy=LOST_PEER_REMEDY))

    def join(self, deadline_s: float) -> bool:
        """Return whether the thread has ended within the deadline, after `cut`."""
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End and free everything; the shard keeps its memory."""
        self.cut()
        self._thread.join()
        if self._region is not None:
            self._region.close()

    # --- in the server's thread ---

    def _run(self) -> None:
        try:
            while not self._connections.ended:
                events = self._connections.wait(self._next_s())
                with self.lock:
                    for event in events:
                        self._handle(event)
                    self._turn(time.monotonic())
        except Exception as error:
            self._fail(error)
        finally:
            self._connections.close()

    def _next_s(self) -> float:
        """Return when to look again if no event comes."""
        return time.monotonic() + wait_notice_s(self._group) / 2

    def _handle(self, event: WorkerCall | WorkerDisconnected) -> None:
        if isinstance(event, WorkerDisconnected):
            self._pulls.forget(event.connection)
            self._disconnected(event.connection)
            return
        try:
            head = parse_header(event.head)
            require(type(head) in self._handlers, f"only the first server answers {head.do!r}")
            self._handlers[type(head)](event.connection, head, event.payload)
        except MalformedCallError as error:
            _log.warning(
                "%s ends the connection of rank %d: malformed call: %s", self._name, event.connection.rank, error
            )
            event.connection.cut()

    def _disconnected(self, connection: WorkerConnection) -> None:
        """A connection ended."""

    def _turn(self, now_s: float) -> None:
        """After the events: apply the updates that are due, and answer the pulls that waited for them."""
        for update in self.updates.apply_due():
            self._applied(update)
        self._pulls.answer_waiting(now_s)

    def _push(self, connection: WorkerConnection, head: PushCall, payload: memoryview) -> bool:
        """Answer a push; return whether it is the first of its unit."""
        answer, counted = self.updates.push(head, payload)
        send_answer(connection, **answer)
        return counted

    def _applied(self, update: RoundUpdate[KeptPush]) -> None:
        """A round's update is in the parameters."""

    def _send_norm(self, at: int, norm2: float) -> None:
        """Tell the first server this server's part of a round's squared norm."""
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        """Keep the first failure, and end everything here, so that the other members notice."""
        if self._failure is None:
            self._failure = error
            self._news.put(error)
        self._connections.cut()

    def _start_segment(self, start: int) -> None:
        """Start serving at a step. Unless it continues the last segment, versions and rounds count from 0 again."""
        if self._failure is not None:
            raise self._failure
        if not self.updates.started or self.step != start:
            self.updates.restart()
            self._pulls.invalidate()
            self._restarted(start)
        self.step, self.updates.sound = start, True

    def _restarted(self, start: int) -> None:
        """Versions and rounds count from 0 again."""


def wait_notice_s(group: Group) -> float:
    """Return the time after which a waiting worker is told to keep waiting."""
    return group.deadline_s / _WAIT_NOTICES


def send_answer(connection: WorkerConnection, **fields: object) -> None:
    """Answer a call with a few fields."""
    connection.answer(json.dumps(fields).encode())
