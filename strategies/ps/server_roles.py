"""The two roles of parameter servers: the first one leases units and closes rounds, the others follow its events."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.core.data import MetricSums, StepReport, clipping_factor
from trainwright.core.errors import NonFiniteLoss, PeerLost
from trainwright.core.topology import Group, Peer, StalenessCounts, WorkUnit
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY, ConnectionCanceller, SocketListener
from trainwright.strategies.ps.call_headers import DoneCall, LeaseCall, PollCall, PushCall, ReportCall, require
from trainwright.strategies.ps.client_connection import ServerConnection, connect_to_server
from trainwright.strategies.ps.lease_table import ClosedRound, LeaseTable
from trainwright.strategies.ps.server_connections import WorkerConnection
from trainwright.strategies.ps.shard_server import ShardServer, send_answer, wait_notice_s
from trainwright.strategies.ps.update_applier import KeptPush, RoundUpdate, ServerConfig

_STOP_POLL_S = 0.05  # between two looks at the request to stop


class LeadServer(ShardServer):
    """The first server: it also leases units to workers, closes rounds, and reports steps.

    Attributes:
        serving: `serve` is running.
    """

    def __init__(
        self, listener: SocketListener, group: Group, servers: Sequence[Peer], switch: ConnectionCanceller | None = None
    ) -> None:
        super().__init__(listener, group, servers, switch)
        self._followers = _FollowerEvents(group, servers)
        self._leases = _LeaseDispatcher(group)
        self._reports = _RoundReports(len(self._servers))
        self.serving = self._ending = False
        self._again = 0  # units leased again, as of the last `staleness`
        self._handlers |= {
            LeaseCall: lambda connection, head, _: self._leases.request(connection, head),
            DoneCall: self._done,
            PollCall: lambda connection, head, _: self._followers.poll(connection),
            ReportCall: self._follower_reports,
        }
        self._thread.start()

    def serve(self, start: int, until: int, stop_requested: Callable[[], bool]) -> Iterator[StepReport]:
        """Yield each step's report, when it is complete."""
        self._start(start, until)
        stopped = False
        while True:
            news = self._next_news()
            if not stopped and (stopped := stop_requested()):
                self._stop()
            match news:
                case StepReport() as report:
                    yield replace(report, stop_requested=stopped and report.step == self._leases.table.until)
                case "over":
                    return
                case Exception() as error:
                    raise error

    def staleness(self) -> StalenessCounts:
        """Return the staleness of the updates applied here since the last call."""
        with self.lock:
            again = self._leases.table.again if self._leases.started else 0
            before, self._again = self._again, again
            return replace(super().staleness(), again=again - before)

    def _next_news(self) -> StepReport | Exception | str | None:
        """Return a report, an error or `over`; None if there was nothing for a while."""
        try:
            news = self._news.get(timeout=_STOP_POLL_S)
        except queue.Empty:
            return None
        return "over" if news is None else news

    def _start(self, start: int, until: int) -> None:
        with self.lock:
            self._start_segment(start)
            self._leases.table.extend(until)
            self._followers.start_segment()
            self.serving, self._ending = True, False
        self._connections.wake()

    def _restarted(self, start: int) -> None:
        config = self.updates.config
        table = LeaseTable(
            shares=config.shares, start=start, consistency=config.consistency, local_steps=config.local_steps
        )
        self._leases.start(table)
        self._reports.restart()
        self._again = 0

    def _stop(self) -> None:
        with self.lock:
            self._leases.table.stop()
        self._connections.wake()

    # --- in the server's thread ---

    def _next_s(self) -> float:
        due_s = super()._next_s()
        return min(due_s, self._leases.due_s() or due_s) if self._leasing else due_s

    @property
    def _leasing(self) -> bool:
        """Whether units may be leased: all servers are in this segment, and it is not ending."""
        return self.serving and not self._ending and self._followers.opened == self._followers.ranks

    def _turn(self, now_s: float) -> None:
        if self._leases.started:
            for closing in self._leases.table.closings():
                self._close(closing)
        super()._turn(now_s)
        if self.serving:
            self._followers.check_alive(now_s)
            self._end_segment()
        self._leases.answer(now_s, self.step, leasing=self._leasing)
        self._followers.answer_polls(now_s)

    def _disconnected(self, connection: WorkerConnection) -> None:
        if connection.rank in self._followers.ranks:
            raise PeerLost(f"rank {connection.rank}, a server, closed the connection", remedy=LOST_PEER_REMEDY)
        self._leases.disconnected(connection)

    def _done(self, connection: WorkerConnection, head: DoneCall, _: memoryview) -> None:
        """A worker has pushed a unit to all servers."""
        at, unit = head.at, head.work_unit
        pushed = self._leases.started and (self._reports.has_unit(at, unit) or not self._leases.table.wants(unit, at))
        require(pushed, f"{unit} of round {at} is done, but was not pushed to the first server")
        send_answer(connection)
        self._leases.table.done(head.worker, unit, at, time.monotonic())

    def _push(self, connection: WorkerConnection, head: PushCall, payload: memoryview) -> bool:
        unit = head.work_unit
        require(self._leases.started, "a push before any step was given out")
        require(self._leases.table.knows(unit, head.at), f"{unit} was not leased for round {head.at}")
        complete = head.norm is not None and len(head.sums) == unit.steps and len(head.logged) in (0, unit.steps)
        require(complete, "a push to the first server without a norm or without the sums of each step")
        counted = super()._push(connection, head, payload)
        if counted:
            self._reports.add_unit(head)
        if not self._followers.ranks:
            self._leases.table.done(head.worker, unit, head.at, time.monotonic())
        return counted

    def _close(self, closing: ClosedRound) -> None:
        """Let all servers make the update of a closed round; in `async` they have its units already."""
        if not self.updates.config.consistency.waits:
            self._report(closing)
            return
        self.updates.admission.close(closing)
        units = [[unit.step, unit.share, unit.steps] for unit in closing.units]
        self._followers.publish(close={"at": closing.at, "step": closing.step, "steps": closing.steps, "units": units})

    def _applied(self, update: RoundUpdate[KeptPush]) -> None:
        self._report(update.closing)

    def _report(self, closing: ClosedRound) -> None:
        for report in self._reports.report(closing, self.updates.config, self.updates.store.rate):
            self._news.put(report)

    def _send_norm(self, at: int, norm2: float) -> None:
        self._add_norm(at, self._group.rank, norm2)

    def _add_norm(self, at: int, rank: int, norm2: float) -> None:
        """Take a server's part of a round's norm; the last part lets all servers apply the round."""
        factor = self._reports.add_norm(at, rank, norm2, self.updates.config)
        if factor is not None:
            self.updates.set_clip_factor(at, factor)
            self._followers.publish(clip={"at": at, "factor": factor})

    def _end_segment(self) -> None:
        """End the segment on the other servers once its steps are complete here, then here."""
        table = self._leases.table
        if self._leasing and table.over and not self.updates.admission.behind:
            self._ending = True
            self.updates.apply_gathered()
            self._followers.end_segment(table.step)
        if self._ending and self._followers.ended == self._followers.ranks:
            self.serving = self._ending = False
            self.step, self.updates.sound = table.step, True
            self._news.put(None)

    def _follower_reports(self, connection: WorkerConnection, head: ReportCall, _: memoryview) -> None:
        """Another server has begun or ended this segment, or sends its part of a norm."""
        require(connection.rank in self._followers.ranks, "only servers make this call")
        require(head.part is None or self.updates.config.clips, "a part of a norm, but nothing is clipped")
        send_answer(connection)
        self._followers.alive(connection)
        if head.opens is not None:
            self._followers.opened.add(connection.rank)
        elif head.ends is not None:
            self._followers.ended.add(connection.rank)
        elif head.part is not None:
            at, norm2 = head.part
            self._add_norm(at, connection.rank, norm2)


# --- The servers after the first --------------------------------------------------------------------------------------


class FollowerServer(ShardServer):
    """A server after the first: it polls the first one for events, and reports to it.

    Raises PeerLost if the first server cannot be reached within the group's deadline, or once the switch is cut.
    """

    def __init__(
        self, listener: SocketListener, group: Group, servers: Sequence[Peer], switch: ConnectionCanceller | None = None
    ) -> None:
        super().__init__(listener, group, servers, switch)
        self._report_lock = threading.Lock()
        self._links: list[ServerConnection] = []
        self._thread.start()
        try:
            self._links += [self._connect(), self._connect()]
        except BaseException:
            super().close()
            raise
        self._event_link, self._report_link = self._links
        self._poller = threading.Thread(target=self._poll_events, name=f"events of rank {group.rank}", daemon=True)
        self._poller.start()

    def serve(self, start: int, until: int, stop_requested: Callable[[], bool]) -> Iterator[StepReport]:
        """Yield no report: the first server yields all of them."""
        with self.lock:
            self._start_segment(start)
        self._report(opens=until)
        news = self._news.get()
        if isinstance(news, Exception):
            raise news
        yield from ()

    def join(self, deadline_s: float) -> bool:
        """Return whether both threads have ended within the deadline."""
        until = time.monotonic() + deadline_s
        self._poller.join(deadline_s)
        return super().join(max(0.0, until - time.monotonic())) and not self._poller.is_alive()

    def close(self) -> None:
        """End and free everything."""
        super().close()
        self._poller.join()
        self._report_link.close()

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._switch.cut()
        for link in tuple(self._links):
            link.cut()

    def _connect(self) -> ServerConnection:
        return connect_to_server(self._servers[0], self._group.key, self._group.rank, self._until(), self._switch)

    def _until(self) -> float:
        return time.monotonic() + self._group.deadline_s

    def _poll_events(self) -> None:
        """Receive events of the first server, until the connection ends."""
        try:
            while not self._connections.ended:
                until = self._until()
                self._event_link.call(b'{"do": "poll"}', until)
                for event in json.loads(self._event_link.answer(until))["events"]:
                    self._follow(event)
                with self.lock:  # a server that is stuck must not seem alive
                    self._apply_due()
                self._connections.wake()  # pulls may have waited for the update
        except Exception as error:
            self._fail(error)
        finally:
            self._event_link.close()

    def _follow(self, event: dict[str, Any]) -> None:
        match event:
            case {"close": fields}:
                units = tuple(WorkUnit(step=step, share=share, steps=steps) for step, share, steps in fields["units"])
                closing = ClosedRound(at=fields["at"], step=fields["step"], steps=fields["steps"], units=units)
                with self.lock:
                    self.updates.admission.close(closing)
            case {"clip": fields}:
                with self.lock:
                    self.updates.set_clip_factor(fields["at"], fields["factor"])
            case {"over": step}:
                with self.lock:
                    self._apply_due()
                    self.updates.apply_gathered()
                    self.step, self.updates.sound = step, True
                self._report(ends=step)
                self._news.put(None)

    def _apply_due(self) -> None:
        for _ in self.updates.apply_due():
            pass

    def _send_norm(self, at: int, norm2: float) -> None:
        self._report(part=[at, norm2])

    def _report(self, **fields: object) -> None:
        """Send a report to the first server, which answers at once."""
        with self._report_lock:
            until = self._until()
            self._report_link.call(json.dumps({"do": "report", **fields}).encode(), until)
            self._report_link.answer(until)


# --- Parts of the first server ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _IdleWorker:
    """A worker that waits for a unit of the segment that begins at step `first`."""

    connection: WorkerConnection
    prefer: int
    first: int
    since_s: float


class _LeaseDispatcher:
    """Answers the workers' requests for units from the lease table: with a unit, or to keep waiting."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._table: LeaseTable | None = None
        self._idle: dict[str, _IdleWorker] = {}  # by worker, the longest waiting first
        self._connections: dict[str, WorkerConnection] = {}  # by worker

    def start(self, table: LeaseTable) -> None:
        """Lease from another table; workers that wait stay."""
        self._table = table

    @property
    def started(self) -> bool:
        """Whether there is a table."""
        return self._table is not None

    @property
    def table(self) -> LeaseTable:
        """The leases; call `start` first."""
        assert self._table is not None, "start comes first"
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


class _FollowerEvents:
    """Queues of events for the other servers, each of which polls for its own.

    Attributes:
        ranks: of the other servers. One that is silent for the group's deadline is lost.
        opened: those that have begun this segment.
        ended: those that have ended it.
    """

    def __init__(self, group: Group, servers: Iterable[Peer]) -> None:
        self._group = group
        self.ranks = frozenset(peer.rank for peer in servers) - {group.rank}
        self.opened: set[int] = set()
        self.ended: set[int] = set()
        self._alive_s: dict[int, float] = {}
        self._events: dict[int, list[dict[str, Any]]] = {rank: [] for rank in self.ranks}  # not yet sent
        self._polls: dict[int, tuple[WorkerConnection, float]] = {}  # that wait, and since when

    def start_segment(self) -> None:
        """Count the silence of servers from now on."""
        self._alive_s = dict.fromkeys(self.ranks, time.monotonic())

    def end_segment(self, step: int) -> None:
        """Tell all servers that the segment is over, and wait for them to end it."""
        self.opened, self.ended = set(), set()
        self.publish(over=step)

    def publish(self, **event: object) -> None:
        """Send an event to all other servers."""
        for events in self._events.values():
            events.append(event)

    def alive(self, connection: WorkerConnection) -> None:
        """A call came over a connection. Raises MalformedCallError unless another server made it."""
        require(connection.rank in self.ranks, "only servers make this call")
        self._alive_s[connection.rank] = time.monotonic()

    def poll(self, connection: WorkerConnection) -> None:
        """Another server waits for events."""
        self.alive(connection)
        self._polls[connection.rank] = connection, time.monotonic()

    def answer_polls(self, now_s: float) -> None:
        """Answer the servers for which there are events, and those that have waited for long."""
        for rank, (connection, since_s) in list(self._polls.items()):
            if self._events[rank] or now_s - since_s > wait_notice_s(self._group):
                send_answer(connection, events=self._events[rank])
                self._events[rank] = []
                del self._polls[rank]

    def check_alive(self, now_s: float) -> None:
        """Raise PeerLost for servers that were silent for longer than the deadline."""
        silent = sorted(rank for rank, called_s in self._alive_s.items() if now_s - called_s > self._group.deadline_s)
        if silent:
            raise PeerLost(f"servers {silent} did not answer within the deadline", remedy=LOST_PEER_REMEDY)


class _RoundReports:
    """Step reports, from the sums that workers push with their units and the gradient norms of rounds.

    Args:
        servers: number of servers, each of which has a part of a round's norm.
    """

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._pushes: dict[tuple[int, WorkUnit], PushCall] = {}  # by round and unit, the first one
        self._parts: dict[int, dict[int, float]] = {}  # by round and server, squared norms
        self._norms: dict[int, float] = {}  # by round

    def restart(self) -> None:
        """Forget all rounds."""
        self._pushes, self._parts, self._norms = {}, {}, {}

    def add_unit(self, head: PushCall) -> None:
        """Take the sums of a unit from its first push."""
        self._pushes[head.at, head.work_unit] = head

    def has_unit(self, at: int, unit: WorkUnit) -> bool:
        """Whether the sums of a unit are here."""
        return (at, unit) in self._pushes

    def add_norm(self, at: int, rank: int, norm2: float, config: ServerConfig) -> float | None:
        """Take a server's part of a round's squared norm; with the last one, return the round's clipping factor.

        Raises NonFiniteLoss.
        """
        parts = self._parts.setdefault(at, {})
        parts[rank] = norm2
        if len(parts) < self._servers:
            return None
        del self._parts[at]
        norm = self._norms[at] = math.sqrt(sum(parts[rank] for rank in sorted(parts)))
        assert config.clip_norm is not None, "servers send norms only where they clip"
        if not math.isfinite(norm):
            raise NonFiniteLoss("the gradients of a step are finite, but their mean is not; nothing of it was applied")
        return clipping_factor(norm, config.clip_norm)

    def report(self, closing: ClosedRound, config: ServerConfig, rate: Callable[[int], float]) -> Iterator[StepReport]:
        """Yield the report of each step of a round, over all its units. `rate` is (step) -> learning rate."""
        units = [self._pushes.pop((closing.at, unit)) for unit in closing.units]
        if config.consistency.backup:
            self._pushes = {key: head for key, head in self._pushes.items() if key[0] != closing.at}
        norm = self._norm_of(closing.at, units, config)
        for number in range(closing.steps):
            loss = sum(one.sums[number][0] for one in units)
            weight = sum(one.sums[number][1] for one in units)
            yield StepReport(
                step=closing.step + number + 1,
                loss=loss / weight if weight > 0 else 0.0,
                weight=weight,
                learning_rate=rate(closing.step + number),
                gradient_norm=norm,
                logged=sum((MetricSums(totals=one.logged[number]) for one in units if one.logged), MetricSums()),
            )

    def _norm_of(self, at: int, units: Sequence[PushCall], config: ServerConfig) -> float | None:
        """Return a round's gradient norm; if each worker clips its own gradient, their mean."""
        if config.clip_norm is None:
            return None
        if config.clips:
            return self._norms.pop(at)
        weight = sum(one.weight for one in units)
        return sum((one.norm or 0.0) * one.weight for one in units) / weight if weight > 0 else 0.0
