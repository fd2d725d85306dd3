"""A worker's side: it leases units of the first server, pulls parameters of all and pushes to all.

Whatever is asked is asked again over a new connection where one breaks; a server answers what it has done already
alike. A server that makes a worker wait says so now and then; one that says nothing within the deadline is lost.

A server keeps a push until its round is applied. It may leave it where it lies, and copy nothing, where the worker has
another half to write the next one into.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from trainwright.core.errors import PeerLost
from trainwright.core.topology import Group, Peer, WorkUnit
from trainwright.strategies.common.shared_memory import allocate_private
from trainwright.strategies.common.socket_transport import ConnectionCanceller
from trainwright.strategies.ps.client_connection import ServerConnection, connect_to_server
from trainwright.strategies.ps.lease_table import Grant
from trainwright.strategies.ps.parameter_shards import ALIGNMENT, ParameterShard

_ATTEMPTS = 3


class ParameterClient:
    """A worker's connections to the servers. One thread calls; `cut` is for any.

    Raises PeerLost from everything where a server is gone, or silent for the group's deadline.

    Args:
        group: of which this process is a worker.
        servers: to connect to.
        switch: to cut the connections by before there are any; by default only `cut` does.

    Attributes:
        grant: the unit that was leased last.
        memory: by server, its shard's region as pulled last.
        outbox: by server, what is pushed: the payload in the plan's wire form, then the shard's buffers. A connection
            that had to be made again comes with another, of the same content.
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
        """What is pushed to each server."""
        return tuple(server.outbox for server in self.servers)

    @property
    def shares(self) -> bool:
        """Whether all servers are on this machine: what is pulled is copied, and nothing comes by itself."""
        return all(server.link.shared for server in self.servers)

    def open(self) -> None:
        """Reach every server."""
        for server in self.servers:
            server.open()

    def lay(
        self, shards: Sequence[ParameterShard], wire_bytes: Sequence[int], memory: Sequence[memoryview] | None = None
    ) -> None:
        """Make room.

        Args:
            shards: the servers'.
            wire_bytes: by server, of a push without its buffers.
            memory: by server, where to pull its region to; by default own memory.
        """
        self.memory = tuple(memory or (allocate_private(shard.size_bytes) for shard in shards))
        for server, shard, view, size in zip(self.servers, shards, self.memory, wire_bytes, strict=True):
            server.lay(view, size + shard.pulled_bytes - shard.trained_bytes)

    def lease(self, first: int) -> Grant | None:
        """What to compute next; waits while nothing may be begun. None: the segment from step `first` on is over."""
        said = self.servers[0].ask({"do": "lease", "worker": self._worker, "prefer": self._prefer, "first": first})
        if "over" in said:
            self.grant = None
            return None
        step, share, steps = said["unit"]
        self.grant = Grant(unit=WorkUnit(step=step, share=share, steps=steps), at=said["at"], needs=said["needs"])
        return self.grant

    def pull(self, needs: int = 0, *, wait: bool = True) -> bool:
        """The newest parameters, which hold the updates of `needs` rounds at least; False where none are new.

        Args:
            needs: see `Grant`.
            wait: until all bytes are in `memory`; else `pulled` waits for some.
        """
        for server in self.servers:
            server.begin({"do": "pull", "worker": self._worker, "needs": needs, "have": server.have})
        for server in self.servers:
            server.take(server.end())
        if wait:
            for index, server in enumerate(self.servers):
                self.pulled(index, 0, server.coming)
        return any(server.coming for server in self.servers)

    @property
    def left_out(self) -> list[tuple[int, int, WorkUnit]]:
        """By server and round, units whose push it took, and whose round then went on without them: of the last pull.

        They are handed out again: what was pushed for them does not count. It may tell of one twice.
        """
        return [(index, at, unit) for index, server in enumerate(self.servers) for at, unit in server.left_out]

    @property
    def versions(self) -> tuple[int, ...]:
        """By server, updates that what was pulled last holds."""
        return tuple(server.version for server in self.servers)

    def pulled(self, server: int, offset: int, size: int) -> None:
        """Wait until this range of a server's region is in `memory`, after `pull(wait=False)`."""
        self.servers[server].pulled(offset, size)

    def ready(self, server: int, offset: int, size: int) -> None:
        """A range of an outbox is final until it is pushed, and may leave now."""
        self.servers[server].ready(offset, size)

    def push(self, *, weight: float, sums: Sequence[tuple[float, float]], norm: float = 0.0) -> list[bool]:
        """Push the outboxes as what the leased unit came to; returns when all servers have it.

        By server, whether it took the outbox: False where another worker's push of the same unit came first.

        Args:
            weight: sum of weights of the unit's samples; with 0 no outbox is sent.
            sums: of each step of the unit: weighted sum of losses, sum of weights.
            norm: of the whole gradient, before it was clipped.
        """
        assert self.grant is not None, "lease comes first"
        head = {"worker": self._worker, **_unit_fields(self.grant)}
        for number, server in enumerate(self.servers):
            more = {"sums": list(sums), "norm": norm} if number == 0 else {}
            whole = bool(weight)
            server.begin({"do": "push", **head, "seen": server.version, "weight": weight, **more}, outbox=whole)
        taken = [server.pushed(server.end(), self.grant.at) and bool(weight) for server in self.servers]
        if len(self.servers) > 1:
            self.servers[0].tell({"do": "done", **head})
        return taken

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
    """One server, as a worker sees it."""

    def __init__(self, group: Group, peer: Peer, switch: ConnectionCanceller) -> None:
        self._group, self._peer, self._switch = group, peer, switch
        self._link: ServerConnection | None = None
        self._asked: tuple[dict[str, Any], bool] = ({}, False)
        self._told = 0  # calls whose answers nobody waits for
        self._leaving = False  # some of the outbox was made ready
        self._view = memoryview(b"")
        self._outbox: SendBuffer | None = None
        self.have: list[int] = [-1, -1]  # what is in memory: of which filling of the region, after how many updates
        self.version = 0
        self.left_out: list[tuple[int, WorkUnit]] = []
        self.coming = 0  # bytes that the last pull brings

    def open(self) -> None:
        """Connect, and open the outbox where one is laid."""
        until = self._until()
        self._link = connect_to_server(self._peer, self._group.key, self._group.rank, until, self._switch)
        self._told = 0
        if self._switch.off:
            self._link.cut()
        if self._outbox is not None:
            self._outbox.reopen(self._opened)

    def lay(self, view: memoryview, outbox_bytes: int) -> None:
        """Where to pull to, and how much is pushed at once."""
        self._view, self.have = view, [-1, -1]
        self._outbox = SendBuffer(self._opened, outbox_bytes)

    @property
    def outbox(self) -> memoryview:
        """What is pushed next."""
        return memoryview(b"") if self._outbox is None else self._outbox.view

    @property
    def link(self) -> ServerConnection:
        """The connection; `open` comes first."""
        assert self._link is not None, "open comes first"
        return self._link

    def ask(self, head: dict[str, Any]) -> dict[str, Any]:
        """A call and its answer."""
        self.begin(head)
        return self.end()

    def begin(self, head: dict[str, Any], *, outbox: bool = False) -> None:
        """Send a call; one that cannot be sent is sent again by `end`."""
        if head["do"] == "push":  # what was made ready must be pushed, or it would count as the next push's
            outbox, self._leaving = outbox or self._leaving, False
            head["keep"] = self._outbox is not None and self._outbox.keeps
        self._asked = head, outbox
        try:
            self._call()
        except PeerLost:
            self.link.cut()

    def end(self) -> dict[str, Any]:
        """The answer to what `begin` sent."""
        for attempt in range(_ATTEMPTS):
            until = self._until()
            try:
                if attempt:
                    self._again()
                while "wait" in (said := self._answer(until)):
                    until = self._until()
                    self._call()
                return said
            except PeerLost:
                if self._switch.off or attempt == _ATTEMPTS - 1 or time.monotonic() > until:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def tell(self, head: dict[str, Any]) -> None:
        """A call whose answer says nothing, and that may be lost."""
        try:
            self.link.call(json.dumps(head).encode(), self._until())
            self._told += 1
        except PeerLost:
            self.link.cut()  # the next call makes it anew

    def take(self, said: dict[str, Any]) -> None:
        """What the answer to a pull says of what it brings."""
        self.have, self.version, self.coming = said["have"], said["version"], said["size"]
        self.left_out = [(at, WorkUnit(*unit)) for at, *unit in said["left_out"]]
        if self._outbox is not None:
            self._outbox.applied(self.version)

    def pushed(self, said: dict[str, Any], at: int) -> bool:
        """What the answer to a push says of where it is now; whether it was taken."""
        assert self._outbox is not None, "lay comes first"
        try:
            self._outbox.pushed(self._opened, at, kept=said["kept"], copied=said["copied"])
        except PeerLost:
            self.link.cut()  # the next call makes it anew
        return bool(said["taken"])

    def pulled(self, offset: int, size: int) -> None:
        """Wait until a range of what is pulled is there."""
        size = min(size, self.coming - offset)
        try:
            if size > 0:
                self.link.pulled(offset, size, self._until())
        except PeerLost:
            self._repull()
            self.link.pulled(offset, min(size, self.coming - offset), self._until())

    def ready(self, offset: int, size: int) -> None:
        """A range of the outbox is final."""
        self._leaving = True
        assert self._outbox is not None, "lay comes first"
        try:
            self.link.ready(self._outbox.offset + offset, size)
        except PeerLost:
            self.link.cut()  # the push makes it anew, and sends all

    def cut(self) -> None:
        """End the connection, from any thread."""
        if self._link is not None:
            self._link.cut()

    def close(self) -> None:
        """End and free it."""
        if self._link is not None:
            self._link.close()

    def _repull(self) -> None:
        """A connection broke while bytes were on their way: all that was new comes again."""
        if self._switch.off:
            raise PeerLost(f"{self.link.peer} is let go")
        self._asked[0]["have"] = [-1, -1]
        self._again()
        self.take(self.end())

    def _opened(self, size_bytes: int) -> memoryview:
        return self.link.open_outbox(size_bytes, self._until())

    def _again(self) -> None:
        self.link.close()
        self.open()
        self._call()

    def _call(self) -> None:
        head, outbox = self._asked
        into = self._view if head["do"] == "pull" else None
        start, size = (self._outbox.offset, self._outbox.size_bytes) if outbox and self._outbox else (0, 0)
        self.link.call(json.dumps(head).encode(), self._until(), offset=start, size=size, into=into)

    def _answer(self, until: float) -> dict[str, Any]:
        while self._told:
            self.link.answer(until)
            self._told -= 1
        said: dict[str, Any] = json.loads(self.link.answer(until))
        return said

    def _until(self) -> float:
        return time.monotonic() + self._group.deadline_s


def _unit_fields(grant: Grant) -> dict[str, Any]:
    unit = grant.unit
    return {"unit": [unit.step, unit.share, unit.steps], "at": grant.at}


# --- Where a worker writes what it pushes to one server ---------------------------------------------------------------


class SendBuffer:
    """One push's memory, or two halves in turn once a server had to copy.

    Args:
        opened: makes zeroed memory of so many bytes that the server gets to see, instead of what was before.
        size_bytes: of a push.
    """

    def __init__(self, opened: Callable[[int], memoryview], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._stride = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        self._held: list[int | None] = [None]
        self._half = 0
        self._memory = opened(size_bytes)

    @property
    def view(self) -> memoryview:
        """The next push."""
        return self._memory[self.offset :][: self.size_bytes]

    @property
    def offset(self) -> int:
        """Where that begins in the memory that the server sees."""
        return self._half * self._stride

    @property
    def keeps(self) -> bool:
        """Whether the server may leave the next push where it lies: there is room for the one after it."""
        return any(held is None for half, held in enumerate(self._held) if half != self._half)

    def pushed(self, opened: Callable[[int], memoryview], at: int, *, kept: bool, copied: bool) -> None:
        """The server has a push of round `at`, and left it where it lies, copied it, or needs it no more."""
        if kept:
            self._held[self._half] = at
            self._half = 1 - self._half
        elif copied and len(self._held) == 1:
            self._memory = opened(self._stride + self.size_bytes)
            self._held = [None, None]

    def applied(self, version: int) -> None:
        """The server says that it has applied so many rounds."""
        self._held = [None if held is not None and held < version else held for held in self._held]

    def reopen(self, opened: Callable[[int], memoryview]) -> None:
        """The connection is a new one: the next push is written there, others lie where the server knows them."""
        before, self._half = self.view, 0
        self._held = [None] * len(self._held)
        self._memory = opened(len(self._memory))
        self.view[:] = before
