"""Workers that wait for units at the first server: who gets the next unit, and who is told to keep waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trainwright.core.topology import Group
from trainwright.strategies.ps.call_headers import LeaseCall
from trainwright.strategies.ps.lease_table import LeaseTable
from trainwright.strategies.ps.server_connections import WorkerConnection
from trainwright.strategies.ps.shard_server import send_answer, wait_notice_s


@dataclass(frozen=True, kw_only=True)
class _IdleWorker:
    """A worker that waits for a unit of the segment that begins at step `first`."""

    connection: WorkerConnection
    prefer: int
    first: int
    since_s: float


class LeaseDispatcher:
    """Answers the workers' requests for units from the lease table.

    Args:
        group: of the server.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._table: LeaseTable | None = None
        self._idle: dict[str, _IdleWorker] = {}  # by worker, the longest waiting first
        self._connections: dict[str, WorkerConnection] = {}  # by worker

    def restart(self, table: LeaseTable) -> None:
        """Lease from another table; workers that wait stay."""
        self._table = table

    @property
    def started(self) -> bool:
        """Whether there is a table."""
        return self._table is not None

    @property
    def table(self) -> LeaseTable:
        """The leases; call `restart` first."""
        assert self._table is not None, "restart comes first"
        return self._table

    def request(self, connection: WorkerConnection, head: LeaseCall) -> None:
        """A worker has nothing to do. One that asks again goes to the end of the queue."""
        worker = head.worker
        self._connections[worker] = connection
        self._idle.pop(worker, None)
        if self._table is not None:
            self._table.release(worker)
        self._idle[worker] = _IdleWorker(
            connection=connection, prefer=head.prefer, first=head.first, since_s=time.monotonic()
        )

    def disconnected(self, connection: WorkerConnection) -> None:
        """Lease the units of the connection's workers to others."""
        for worker in [worker for worker, own in self._connections.items() if own is connection]:
            del self._connections[worker]
            self._idle.pop(worker, None)
            if self._table is not None:
                self._table.lost(worker)

    def due_s(self) -> float | None:
        """Return when a waiting worker can get a unit although nothing happens; None: never."""
        return self.table.due_s() if self._idle else None

    def answer(self, now_s: float, step: int, *, leasing: bool) -> None:
        """Answer waiting workers: with a unit, with the end of their segment, or with the advice to keep waiting.

        Args:
            now_s: time, on the clock of `time.monotonic`.
            step: first step of this segment: workers of an earlier one are told that it is over.
            leasing: units may be leased now.
        """
        for worker, idle in list(self._idle.items()):
            if idle.first < step:
                send_answer(idle.connection, over=True)
                del self._idle[worker]
        if leasing:
            self._lease(now_s)
        for worker, idle in list(self._idle.items()):
            if now_s - idle.since_s > wait_notice_s(self._group):
                send_answer(idle.connection, wait=True)
                del self._idle[worker]

    def _lease(self, now_s: float) -> None:
        """Lease units, to the longest waiting worker first, while there is a unit for any of them."""
        while (worker := self.table.first(self._idle, now_s)) is not None:
            idle = self._idle.pop(worker)
            grant = self.table.lease(worker, idle.prefer, now_s)
            assert grant is not None, "`first` returns a worker that gets a unit"
            send_answer(idle.connection, unit=list(grant.unit), at=grant.at, needs=grant.needs)
