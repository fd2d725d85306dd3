"""The two roles of parameter servers: the first one leases units and closes rounds, the others follow its events."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from trainwright.core.data import StepReport
from trainwright.core.errors import PeerLost
from trainwright.core.topology import Group, Peer, StalenessCounts, WorkUnit
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY, ConnectionCanceller, SocketListener
from trainwright.strategies.ps.call_headers import DoneCall, LeaseCall, PollCall, PushCall, ReportCall, require
from trainwright.strategies.ps.client_connection import ServerConnection, connect_to_server
from trainwright.strategies.ps.follower_events import FollowerEvents
from trainwright.strategies.ps.lease_dispatcher import LeaseDispatcher
from trainwright.strategies.ps.lease_table import ClosedRound, LeaseTable
from trainwright.strategies.ps.round_reports import RoundReports
from trainwright.strategies.ps.server_connections import WorkerConnection
from trainwright.strategies.ps.shard_server import ShardServer, send_answer
from trainwright.strategies.ps.update_admission import RoundUpdate
from trainwright.strategies.ps.update_applier import KeptPush

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
        self._followers = FollowerEvents(group, servers)
        self._leases = LeaseDispatcher(group)
        self._reports = RoundReports(len(self._servers))
        self.serving = self._ending = False
        self._again = 0  # units leased again, as of the last `staleness`
        self._handlers |= {
            LeaseCall: lambda connection, head, _: self._leases.request(connection, head),
            DoneCall: self._done,
            PollCall: lambda connection, head, _: self._followers.poll(connection, head),
            ReportCall: self._follower_reports,
        }
        self._thread.start()

    def serve(self, start: int, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """Yield each step's report, when it is complete."""
        self._start(start, until)
        stopped = False
        while True:
            news = self._next_news()
            if not stopped and (stopped := wish()):
                self._stop()
            match news:
                case StepReport() as report:
                    yield replace(report, wish=stopped and report.step == self._leases.table.until)
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
        self._leases.restart(table)
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
        return self.serving and not self._ending and self._followers.all_opened

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
        complete = head.norm is not None and len(head.sums) == unit.steps
        require(complete, "a push to the first server without a norm or without the sums of each step")
        counted = super()._push(connection, head, payload)
        if counted:
            self._reports.add_unit(head)
        if not self._followers.ranks:
            self._leases.table.done(head.worker, unit, head.at, time.monotonic())
        return counted

    def _close(self, closing: ClosedRound) -> None:
        """Let all servers make the update of a closed round; in `async` its units have been applied already."""
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
            self._followers.end_segment(table.step)
        if self._ending and self._followers.all_ended:
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
            self._followers.opened(connection.rank)
        elif head.ends is not None:
            self._followers.ended(connection.rank)
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

    def serve(self, start: int, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
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
        received = 0
        try:
            while not self._connections.ended:
                until = self._until()
                self._event_link.call(json.dumps({"do": "poll", "received": received}).encode(), until)
                events = json.loads(self._event_link.answer(until))["events"]
                for event in events:
                    self._follow(event)
                received += len(events)
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
