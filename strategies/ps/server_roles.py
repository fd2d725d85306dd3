"""The first server: it keeps the book, closes rounds, and tells the other servers and the caller."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.core.data import StepReport
from trainwright.core.errors import PeerLost
from trainwright.core.topology import Group, Peer, StalenessCounts, WorkUnit
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY, ConnectionCanceller, SocketListener
from trainwright.strategies.ps.client_connection import ServerConnection, connect_to_server
from trainwright.strategies.ps.lease_table import ClosedRound, LeaseTable
from trainwright.strategies.ps.server_connections import WorkerConnection
from trainwright.strategies.ps.shard_server import (
    CallHeader,
    KeptPush,
    ShardServer,
    clipping_factor,
    require,
    send_answer,
    unit_from_header,
)
from trainwright.strategies.ps.update_admission import RoundUpdate, UpdateAdmission

_STOP_POLL_S = 0.05  # between two looks at the wish to stop


@dataclass(frozen=True, kw_only=True)
class _IdleWorker:
    """A worker that waits for a unit of the segment that begins at step `first`."""

    line: WorkerConnection
    prefer: int
    first: int
    since_s: float


@dataclass(frozen=True, kw_only=True)
class _FollowerPoll:
    """Another server that waits for what happens after the events it has heard."""

    line: WorkerConnection
    heard: int
    since_s: float


@dataclass(frozen=True, kw_only=True)
class _UnitSums:
    """What a worker said of a unit."""

    sums: Sequence[tuple[float, float]]
    weight: float
    norm: float


class LeadServer(ShardServer):
    """The first server.

    Attributes:
        serving: `serve` is under way.
    """

    def __init__(
        self, listener: SocketListener, group: Group, servers: Sequence[Peer], switch: ConnectionCanceller | None = None
    ) -> None:
        super().__init__(listener, group, servers, switch)
        self._book: LeaseTable | None = None
        self._others = {peer.rank for peer in servers} - {group.rank}
        self._idle: dict[str, _IdleWorker] = {}
        self._lines_of: dict[str, WorkerConnection] = {}  # by worker
        self._told: dict[tuple[int, WorkUnit], _UnitSums] = {}
        self.serving = self._ending = False
        self._opened: set[int] = set()  # other servers in this segment
        self._standing: set[int] = set()  # that have ended it
        self._alive_s: dict[int, float] = {}
        self._events: list[dict[str, Any]] = []  # that not all other servers have heard
        self._forgotten = 0  # events before those
        self._ears: dict[int, _FollowerPoll] = {}
        self._heard: dict[int, int] = {}
        self._norms: dict[int, dict[int, float]] = {}  # by round and server, squared
        self._norm: dict[int, float] = {}  # by round
        self._again = 0
        more = {"lease": self._lease, "done": self._done, "hear": self._hear, "say": self._say}
        self._handlers.update(more)
        self._thread.start()

    def serve(self, start: int, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """Each step's report, when it is complete."""
        self._start(start, until)
        stopped = False
        while True:
            news = self._next_news()
            if not stopped and (stopped := wish()):
                self._stop()
            match news:
                case StepReport() as report:
                    yield replace(report, wish=stopped and report.step == self.book.until)
                case "over":
                    return
                case Exception() as error:
                    raise error

    def staleness(self) -> StalenessCounts:
        """Of what was applied here since this was asked last."""
        with self.lock:
            again = 0 if self._book is None else self._book.again
            before, self._again = self._again, again
            return replace(super().staleness(), again=again - before)

    def _next_news(self) -> StepReport | Exception | str | None:
        """A report, an error, `over`; None where there was nothing for a while."""
        try:
            news = self._news.get(timeout=_STOP_POLL_S)
        except queue.Empty:
            return None
        return "over" if news is None else news

    def _start(self, start: int, until: int) -> None:
        with self.lock:
            self._begin(start)
            self.book.extend(until)
            self._alive_s = dict.fromkeys(self._others, time.monotonic())
            self.serving, self._ending = True, False
        self._lines.wake()

    def _anew(self, start: int) -> None:
        rules = self.rules
        self._book = LeaseTable(
            shares=rules.shares, start=start, consistency=rules.consistency, local_steps=rules.local_steps
        )
        self._again, self._told, self._norms, self._norm = 0, {}, {}, {}

    def _stop(self) -> None:
        with self.lock:
            self.book.stop()
        self._lines.wake()

    @property
    def book(self) -> LeaseTable:
        """The leases; `serve` comes first."""
        assert self._book is not None, "serve comes first"
        return self._book

    # --- of the thread ---

    def _next_s(self) -> float:
        due_s = super()._next_s()
        if self._giving and self._idle:
            return min(due_s, self.book.due_s() or due_s)
        return due_s

    @property
    def _giving(self) -> bool:
        """Whether units may be given: all servers are in this segment, and it goes on."""
        return self.serving and not self._ending and self._opened == self._others

    def _turn(self, now_s: float) -> None:
        if self._book is not None:
            for closing in self._book.closings():
                self._close(closing)
        super()._turn(now_s)
        if self.serving:
            self._look_after_servers(now_s)
            self._end_segment()
        self._give_out(now_s)
        self._answer_ears(now_s)

    def _gone(self, line: WorkerConnection) -> None:
        if line.rank in self._others:
            raise PeerLost(f"rank {line.rank}, a server, closed the connection", remedy=LOST_PEER_REMEDY)
        for worker in [worker for worker, own in self._lines_of.items() if own is line]:
            del self._lines_of[worker]
            self._idle.pop(worker, None)
            if self._book is not None:
                self._book.lost(worker)

    def _look_after_servers(self, now_s: float) -> None:
        silent = sorted(rank for rank, heard_s in self._alive_s.items() if now_s - heard_s > self._group.deadline_s)
        if silent:
            raise PeerLost(f"servers {silent} did not answer within the deadline", remedy=LOST_PEER_REMEDY)

    # --- workers ---

    def _lease(self, line: WorkerConnection, head: CallHeader, _: memoryview) -> None:
        worker = head["worker"]
        self._lines_of[worker] = line
        self._idle.pop(worker, None)  # it asks again, and goes to the end of the queue
        if self._book is not None:
            self._book.release(worker)
        self._idle[worker] = _IdleWorker(
            line=line, prefer=head["prefer"], first=head["first"], since_s=time.monotonic()
        )

    def _done(self, line: WorkerConnection, head: CallHeader, _: memoryview) -> None:
        at, unit = head["at"], unit_from_header(head)
        told = self._book is not None and ((at, unit) in self._told or not self._book.wants(unit, at))
        require(told, f"{unit} of round {at} is done, and nothing of it was pushed here")
        send_answer(line)
        self.book.done(head["worker"], unit, at, time.monotonic())

    def _checked(self, head: CallHeader, payload: memoryview) -> UpdateAdmission[KeptPush]:
        gate, unit = super()._checked(head, payload), unit_from_header(head)
        require(self.book.knows(unit, head["at"]), f"{unit} was not given out for round {head['at']}")
        told = "norm" in head and len(head.get("sums", ())) == unit.steps
        require(told, "a push to the first server without the sums of each step, or without a norm")
        return gate

    def _pushed(self, head: CallHeader, *, counted: bool) -> None:
        if counted:
            key = head["at"], unit_from_header(head)
            self._told[key] = _UnitSums(sums=head["sums"], weight=head["weight"], norm=head["norm"])
        if not self._others:
            self.book.done(head["worker"], unit_from_header(head), head["at"], time.monotonic())

    def _give_out(self, now_s: float) -> None:
        """Answer workers that wait: with a unit, or that their segment is over, or that they go on waiting."""
        for worker, idle in list(self._idle.items()):
            if idle.first < self.step:
                send_answer(idle.line, over=True)
                del self._idle[worker]
        if self._giving:
            self._grant(now_s)
        for worker, idle in list(self._idle.items()):
            if now_s - idle.since_s > self._patience_s:
                send_answer(idle.line, wait=True)
                del self._idle[worker]

    def _grant(self, now_s: float) -> None:
        """The longest waiting first, for as long as there is something for anybody."""
        while (worker := self.book.first(self._idle, now_s)) is not None:
            idle = self._idle.pop(worker)
            grant = self.book.lease(worker, idle.prefer, now_s)
            assert grant is not None, "it is the first to whom something is given"
            send_answer(idle.line, unit=list(grant.unit), at=grant.at, needs=grant.needs)

    # --- rounds ---

    def _close(self, closing: ClosedRound) -> None:
        """A round is closed: its update is made on all servers; in `async` those of its units have been."""
        if not self.rules.consistency.waits:
            self._report(closing)
            return
        self.gate.close(closing)
        units = [[unit.step, unit.share, unit.steps] for unit in closing.units]
        self._say_to_others(close={"at": closing.at, "step": closing.step, "steps": closing.steps, "units": units})

    def _applied(self, update: RoundUpdate[KeptPush]) -> None:
        self._report(update.closing)

    def _tell_norm(self, at: int, norm2: float) -> None:
        self._add_norm(at, self._group.rank, norm2)

    def _add_norm(self, at: int, rank: int, norm2: float) -> None:
        """A server's part of a round's squared norm; the last lets all servers go on."""
        parts = self._norms.setdefault(at, {})
        parts[rank] = norm2
        if len(parts) < len(self._servers):
            return
        del self._norms[at]
        norm = self._norm[at] = math.sqrt(sum(parts[rank] for rank in sorted(parts)))
        assert self.rules.clip_norm is not None, "else nobody would have asked"
        factor = self._factors[at] = clipping_factor(norm, self.rules.clip_norm)
        self._say_to_others(clip={"at": at, "factor": factor})

    def _report(self, closing: ClosedRound) -> None:
        """Report each step of a round over all its units."""
        told = [self._told.pop((closing.at, unit)) for unit in closing.units]
        for key in [key for key in self._told if key[0] == closing.at and self.rules.consistency.backup]:
            del self._told[key]
        for number in range(closing.steps):
            loss = sum(one.sums[number][0] for one in told)
            weight = sum(one.sums[number][1] for one in told)
            self._news.put(
                StepReport(
                    step=closing.step + number + 1,
                    loss=loss / weight if weight > 0 else 0.0,
                    weight=weight,
                    learning_rate=self.bank.rate(closing.step + number),
                    gradient_norm=self._norm_of(closing.at, told),
                )
            )
        self._norm.pop(closing.at, None)

    def _norm_of(self, at: int, told: Sequence[_UnitSums]) -> float | None:
        """A round's gradient norm; where each worker clips its own, their mean."""
        if self.rules.clip_norm is None:
            return None
        if self.rules.clips:
            return self._norm[at]
        weight = sum(one.weight for one in told)
        return sum(one.norm * one.weight for one in told) / weight if weight > 0 else 0.0

    def _end_segment(self) -> None:
        """Once all steps are complete here the other servers are told; once they stand there too, it has ended."""
        book = self.book
        if self._giving and book.over and not self.gate.behind:
            self._ending = True
            self._opened, self._standing = set(), set()
            self._say_to_others(over=book.step)
        if self._ending and self._standing == self._others:
            self.serving = self._ending = False
            self.step, self.sound = book.step, True
            self._news.put(None)

    # --- other servers ---

    def _say_to_others(self, **event: object) -> None:
        if self._others:
            self._events.append(event)

    def _hear(self, line: WorkerConnection, head: CallHeader, _: memoryview) -> None:
        """Another server waits for what comes after the events that it has heard."""
        self._require_server(line)
        known = 0 <= head["heard"] - self._forgotten <= len(self._events)
        require(known, f"event {head['heard']} is not one of those that are kept")
        now = time.monotonic()
        self._alive_s[line.rank], self._heard[line.rank] = now, head["heard"]
        self._ears[line.rank] = _FollowerPoll(line=line, heard=head["heard"], since_s=now)
        if len(self._heard) == len(self._others):
            least = min(self._heard.values())
            del self._events[: least - self._forgotten]
            self._forgotten = least

    def _answer_ears(self, now_s: float) -> None:
        for rank, ear in list(self._ears.items()):
            events = self._events[ear.heard - self._forgotten :]
            if events or now_s - ear.since_s > self._patience_s:
                send_answer(ear.line, events=events)
                del self._ears[rank]

    def _say(self, line: WorkerConnection, head: CallHeader, _: memoryview) -> None:
        """Another server says that it is in this segment, that it has ended it, or its part of a norm."""
        self._require_server(line)
        require("part" not in head or self.rules.clips, "a part of a norm, where nothing is clipped")
        send_answer(line)
        self._alive_s[line.rank] = time.monotonic()
        match head:
            case {"opens": _}:
                self._opened.add(line.rank)
            case {"stands": _}:
                self._standing.add(line.rank)
            case {"part": [at, norm2]}:
                self._add_norm(at, line.rank, norm2)

    def _require_server(self, line: WorkerConnection) -> None:
        require(line.rank in self._others, "a call that servers alone make")


# --- The servers after the first --------------------------------------------------------------------------------------


class FollowerServer(ShardServer):
    """A server after the first.

    Raises PeerLost where the first cannot be reached within the group's deadline, or once the switch is cut.
    """

    def __init__(
        self, listener: SocketListener, group: Group, servers: Sequence[Peer], switch: ConnectionCanceller | None = None
    ) -> None:
        super().__init__(listener, group, servers, switch)
        self._mouth_lock = threading.Lock()
        self._links: list[ServerConnection] = []
        self._thread.start()
        try:
            self._links += [self._dialled(), self._dialled()]
        except BaseException:
            super().close()
            raise
        self._ear, self._mouth = self._links
        self._listener = threading.Thread(target=self._listen, name=f"ear of rank {group.rank}", daemon=True)
        self._listener.start()

    def serve(self, start: int, until: int, wish: Callable[[], bool]) -> Iterator[StepReport]:
        """No report: the first server gives those."""
        with self.lock:
            self._begin(start)
        self._say(opens=until)
        news = self._news.get()
        if isinstance(news, Exception):
            raise news
        yield from ()

    def join(self, deadline_s: float) -> bool:
        """Whether both threads have ended within the deadline."""
        until = time.monotonic() + deadline_s
        self._listener.join(deadline_s)
        return super().join(max(0.0, until - time.monotonic())) and not self._listener.is_alive()

    def close(self) -> None:
        """End and free everything."""
        super().close()
        self._listener.join()
        self._mouth.close()

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._switch.cut()
        for link in tuple(self._links):
            link.cut()

    def _dialled(self) -> ServerConnection:
        return connect_to_server(self._servers[0], self._group.key, self._group.rank, self._until(), self._switch)

    def _until(self) -> float:
        return time.monotonic() + self._group.deadline_s

    def _listen(self) -> None:
        """Hear what the first server says, until the connection ends."""
        heard = 0
        try:
            while not self._lines.ended:
                until = self._until()
                self._ear.call(json.dumps({"do": "hear", "heard": heard}).encode(), until)
                events = json.loads(self._ear.answer(until))["events"]
                for event in events:
                    self._follow(event)
                heard += len(events)
                with self.lock:  # a server that is stuck must not say that it lives
                    self._apply_due()
                self._lines.wake()  # pulls may have waited for the update
        except Exception as error:
            self._fail(error)
        finally:
            self._ear.close()

    def _follow(self, event: dict[str, Any]) -> None:
        match event:
            case {"close": told}:
                units = tuple(WorkUnit(step=step, share=share, steps=steps) for step, share, steps in told["units"])
                closing = ClosedRound(at=told["at"], step=told["step"], steps=told["steps"], units=units)
                with self.lock:
                    self.gate.close(closing)
            case {"clip": told}:
                with self.lock:
                    self._factors[told["at"]] = told["factor"]
            case {"over": step}:
                with self.lock:
                    self._apply_due()
                    self.step, self.sound = step, True
                self._say(stands=step)
                self._news.put(None)

    def _tell_norm(self, at: int, norm2: float) -> None:
        self._say(part=[at, norm2])

    def _say(self, **said: object) -> None:
        """Tell the first server something; it answers at once."""
        with self._mouth_lock:
            until = self._until()
            self._mouth.call(json.dumps({"do": "say", **said}).encode(), until)
            self._mouth.answer(until)
