"""A worker's side of parameter servers: lease units from the first server, pull from all servers and push to all.

A call is sent again over a new connection if one breaks; a server answers a repeated call like the first. A server that
makes a worker wait says so at intervals; a server that is silent for the deadline is lost.

A server keeps a push until its round is applied. If the worker has a second half of its buffer for the next push, the
server uses the push in place and copies nothing.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from trainwright.core.data import MetricSums
from trainwright.core.errors import PeerLost
from trainwright.core.topology import Group, Peer, WorkUnit
from trainwright.strategies.common.shared_memory import allocate_private
from trainwright.strategies.common.socket_transport import ConnectionCanceller
from trainwright.strategies.ps.client_connection import ServerConnection, connect_to_server
from trainwright.strategies.ps.lease_table import Grant
from trainwright.strategies.ps.parameter_shards import ALIGNMENT, ParameterShard

_ATTEMPTS = 3


class ParameterClient:
    """A worker's connections to the servers, for one thread; `cut` is for any.

    All methods raise PeerLost for a server that is lost, or silent for the group's deadline.

    Args:
        group: this process is a worker of it.
        servers: to connect to.
        switch: cuts the connections too, even before they exist.

    Attributes:
        grant: the unit that was leased last.
        memory: by server, its shard as pulled last.
        outbox: by server, the memory of the next push: encoded gradients, then the shard's buffers. A new connection
            has another one with the same content.
    """

    def __init__(self, group: Group, servers: Sequence[Peer], switch: ConnectionCanceller | None = None) -> None:
        self._switch = switch or ConnectionCanceller()
        self.servers = tuple(ServerClient(group, peer, self._switch) for peer in servers)
        self._worker = f"{group.rank}-{uuid.uuid4().hex}"
        self._prefer = group.rank - len(self.servers)
        self.grant: Grant | None = None
        self.memory: tuple[memoryview, ...] = ()

    @property
    def outbox(self) -> tuple[memoryview, ...]:
        """The memory of the next push to each server."""
        return tuple(server.outbox for server in self.servers)

    @property
    def shares(self) -> bool:
        """Whether all servers are on this machine: parameters are then copied from shared memory."""
        return all(server.link.shared for server in self.servers)

    def open(self) -> None:
        """Connect to every server."""
        for server in self.servers:
            server.open()

    def lay(
        self, shards: Sequence[ParameterShard], wire_bytes: Sequence[int], memory: Sequence[memoryview] | None = None
    ) -> None:
        """Allocate the memory for pulls and pushes.

        Args:
            shards: the shards of the servers.
            wire_bytes: by server, size of a push without its buffers.
            memory: by server, where its shard is pulled to; by default new memory.
        """
        self.memory = tuple(memory or (allocate_private(shard.size_bytes) for shard in shards))
        for server, shard, view, size in zip(self.servers, shards, self.memory, wire_bytes, strict=True):
            server.lay(view, size + shard.pulled_bytes - shard.trained_bytes)

    def lease(self, first: int) -> Grant | None:
        """Wait for a unit to compute; None: the segment that starts at step `first` is over."""
        server = self.servers[0]
        server.begin({"do": "lease", "worker": self._worker, "prefer": self._prefer, "first": first})
        answer = server.end()
        if "over" in answer:
            self.grant = None
            return None
        step, share, steps = answer["unit"]
        self.grant = Grant(unit=WorkUnit(step=step, share=share, steps=steps), at=answer["at"], needs=answer["needs"])
        return self.grant

    def pull(self, needs: int = 0, *, wait: bool = True) -> bool:
        """Pull the newest parameters, with the updates of at least `needs` rounds; return whether there are new ones.

        Args:
            needs: see `Grant`.
            wait: until all bytes are in `memory`; else call `pulled` for each range.
        """
        for server in self.servers:
            server.begin({"do": "pull", "needs": needs, "have": server.have})
        for server in self.servers:
            server.take(server.end())
        if wait:
            for index, server in enumerate(self.servers):
                self.pulled(index, 0, server.coming)
        return any(server.coming for server in self.servers)

    def pulled(self, server: int, offset: int, size: int) -> None:
        """Wait until a range of a server's shard is in `memory`, after `pull(wait=False)`."""
        self.servers[server].pulled(offset, size)

    def ready(self, server: int, offset: int, size: int) -> None:
        """Let a range of an outbox be sent now: it does not change until it is pushed."""
        self.servers[server].ready(offset, size)

    def push(
        self,
        *,
        weight: float,
        sums: Sequence[tuple[float, float]],
        norm: float = 0.0,
        logged: Sequence[MetricSums] = (),
    ) -> list[bool]:
        """Push the outboxes as the leased unit's gradients, and return when all servers have them.

        Returns whether each server accepted the push: False if another worker pushed the same unit first.

        Args:
            weight: sum of weights of the unit's samples; with 0 no outbox is sent.
            sums: of each step of the unit: weighted sum of losses, sum of weights.
            norm: of the whole gradient, before clipping.
            logged: of each step of the unit, where values are logged.
        """
        assert self.grant is not None, "lease comes first"
        values = [each.totals for each in logged if each.totals]
        unit, at = self.grant.unit, self.grant.at
        head = {"worker": self._worker, "unit": [unit.step, unit.share, unit.steps], "at": at}
        for number, server in enumerate(self.servers):
            extra = {"sums": list(sums), "norm": norm, "logged": values} if number == 0 else {}
            call = {"do": "push", **head, "seen": server.have[1], "weight": weight, **extra}
            server.begin(call, outbox=bool(weight))
        accepted = [server.pushed(server.end()) and bool(weight) for server in self.servers]
        if len(self.servers) > 1:
            self.servers[0].tell({"do": "done", **head})
        return accepted

    def cut(self) -> None:
        """End all connections, from any thread."""
        self._switch.cut()
        for server in self.servers:
            server.cut()

    def close(self) -> None:
        """End and free all connections."""
        self._switch.cut()
        for server in self.servers:
            server.close()


class ServerClient:
    """A worker's calls to one server."""

    def __init__(self, group: Group, peer: Peer, switch: ConnectionCanceller) -> None:
        self._group, self._peer, self._switch = group, peer, switch
        self._link: ServerConnection | None = None
        self._last_call: tuple[dict[str, Any], bool] = ({}, False)
        self._unread_answers = 0  # calls whose answers are not read yet
        self._partly_sent = False  # a part of the outbox was sent already
        self._view = memoryview(b"")
        self._outbox: SendBuffer | None = None
        self.have: list[int] = [-1, -1]  # filling and version that are in memory
        self.coming = 0  # bytes that the last pull brings

    def open(self) -> None:
        """Connect, and open the outbox if `lay` was called."""
        until = self._deadline()
        self._link = connect_to_server(self._peer, self._group.key, self._group.rank, until, self._switch)
        self._unread_answers = 0
        if self._switch.off:
            self._link.cut()
        if self._outbox is not None:
            self._outbox.reopen(self._open_outbox)

    def lay(self, view: memoryview, outbox_bytes: int) -> None:
        """Set the memory to pull to, and the size of a push."""
        self._view, self.have = view, [-1, -1]
        self._outbox = SendBuffer(self._open_outbox, outbox_bytes)

    @property
    def outbox(self) -> memoryview:
        """The memory of the next push."""
        return memoryview(b"") if self._outbox is None else self._outbox.view

    @property
    def link(self) -> ServerConnection:
        """The connection; `open` comes first."""
        assert self._link is not None, "open comes first"
        return self._link

    def begin(self, head: dict[str, Any], *, outbox: bool = False) -> None:
        """Send a call. If that fails, `end` sends it again."""
        if head["do"] == "push":  # ranges sent already must be pushed, or they would count for the next push
            outbox, self._partly_sent = outbox or self._partly_sent, False
            head["keep"] = self._outbox is not None and self._outbox.keeps
        self._last_call = head, outbox
        try:
            self._call()
        except PeerLost:
            self.link.cut()

    def end(self) -> dict[str, Any]:
        """Return the answer to the call of `begin`."""
        for attempt in range(_ATTEMPTS):
            until = self._deadline()
            try:
                if attempt:
                    self._resend()
                while "wait" in (answer := self._read_answer(until)):
                    until = self._deadline()
                    self._call()
                return answer
            except PeerLost:
                if self._switch.off or attempt == _ATTEMPTS - 1 or time.monotonic() > until:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def tell(self, head: dict[str, Any]) -> None:
        """Send a call that may be lost; its answer is ignored."""
        try:
            self.link.call(json.dumps(head).encode(), self._deadline())
            self._unread_answers += 1
        except PeerLost:
            self.link.cut()  # the next call connects again

    def take(self, answer: dict[str, Any]) -> None:
        """Take the fields of the answer to a pull."""
        self.have, self.coming = answer["have"], answer["size"]
        if self._outbox is not None:
            self._outbox.applied(self.have[1])

    def pushed(self, answer: dict[str, Any]) -> bool:
        """Take the answer to a push; return whether the server accepted it."""
        assert self._outbox is not None, "lay comes first"
        try:
            self._outbox.pushed(self._open_outbox, kept=answer["kept"], copied=answer["copied"])
        except PeerLost:
            self.link.cut()  # the next call connects again
        return bool(answer["taken"])

    def pulled(self, offset: int, size: int) -> None:
        """Wait until a range of the pulled bytes has arrived."""
        size = min(size, self.coming - offset)
        try:
            if size > 0:
                self.link.pulled(offset, size, self._deadline())
        except PeerLost:
            self._repull()
            self.link.pulled(offset, min(size, self.coming - offset), self._deadline())

    def ready(self, offset: int, size: int) -> None:
        """Send a range of the outbox, which does not change until the push."""
        self._partly_sent = True
        assert self._outbox is not None, "lay comes first"
        try:
            self.link.ready(self._outbox.offset + offset, size)
        except PeerLost:
            self.link.cut()  # the push connects again, and sends everything

    def cut(self) -> None:
        """End the connection, from any thread."""
        if self._link is not None:
            self._link.cut()

    def close(self) -> None:
        """End the connection and free it."""
        if self._link is not None:
            self._link.close()

    def _repull(self) -> None:
        """Pull everything again after a connection broke while bytes were arriving."""
        if self._switch.off:
            raise PeerLost(f"the connection to {self.link.peer} was cut")
        self._last_call[0]["have"] = [-1, -1]
        self._resend()
        self.take(self.end())

    def _open_outbox(self, size_bytes: int) -> memoryview:
        return self.link.open_outbox(size_bytes, self._deadline())

    def _resend(self) -> None:
        self.link.close()
        self.open()
        self._call()

    def _call(self) -> None:
        head, outbox = self._last_call
        into = self._view if head["do"] == "pull" else None
        start, size = (self._outbox.offset, self._outbox.size_bytes) if outbox and self._outbox else (0, 0)
        self.link.call(json.dumps(head).encode(), self._deadline(), offset=start, size=size, into=into)

    def _read_answer(self, until: float) -> dict[str, Any]:
        while self._unread_answers:
            self.link.answer(until)
            self._unread_answers -= 1
        answer: dict[str, Any] = json.loads(self.link.answer(until))
        return answer

    def _deadline(self) -> float:
        return time.monotonic() + self._group.deadline_s


# --- Memory of pushes ---------------------------------------------------------------


class SendBuffer:
    """Memory of pushes to one server: for one push, or for two in turn once the server had to copy one.

    Args:
        opened: (bytes) -> zeroed memory that the server can read, in place of the former.
        size_bytes: of a push.
    """

    def __init__(self, opened: Callable[[int], memoryview], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._stride = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        self._updates: list[int | None] = [None]
        self._half = 0
        self._memory = opened(size_bytes)

    @property
    def view(self) -> memoryview:
        """The memory of the next push."""
        return self._memory[self.offset :][: self.size_bytes]

    @property
    def offset(self) -> int:
        """Where the next push begins in the memory that the server reads."""
        return self._half * self._stride

    @property
    def keeps(self) -> bool:
        """Whether the server may use the next push in place: the other half is free for the one after it."""
        return any(update is None for half, update in enumerate(self._updates) if half != self._half)

    def pushed(self, opened: Callable[[int], memoryview], *, kept: int | None, copied: bool) -> None:
        """The server has a push: it uses it in place for update `kept`, has copied it, or does not need it any more."""
        if kept is not None:
            self._updates[self._half] = kept
            self._half = 1 - self._half
        elif copied and len(self._updates) == 1:
            self._memory = opened(self._stride + self.size_bytes)
            self._updates = [None, None]

    def applied(self, version: int) -> None:
        """The server has applied `version` updates: pushes of these may be overwritten."""
        self._updates = [None if update is not None and update < version else update for update in self._updates]

    def reopen(self, opened: Callable[[int], memoryview]) -> None:
        """Move the next push to memory of a new connection; the server still reads the others in the former memory."""
        content, memory = self.view, opened(len(self._memory))  # where that fails, nothing has changed
        self._memory, self._half, self._updates = memory, 0, [None] * len(self._updates)
        self.view[:] = content
