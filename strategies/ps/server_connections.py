"""A server's connections: one thread waits on all of them, and no peer can block it.

A worker on the same machine connects over an abstract Unix socket and shares its outbox as memory; other workers
connect over TCP, and a copy of their outbox is filled here as bytes arrive. All sockets are non-blocking.
"""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from trainwright.strategies.common import shared_memory
from trainwright.strategies.common.socket_transport import (
    CLAIM_BYTES,
    HANDSHAKE_S,
    OutgoingBuffers,
    SocketListener,
    new_nonce,
    peer_is_same_user,
    receive_available,
    send_available,
    set_keepalive,
    verify_claim,
)

_MAX_READ_BYTES = 4 * 2**20  # of one connection, before the others get their turn
_LOW_WATER_BYTES = 2**19  # of a long range, before the system reports it as readable
MAX_UNKNOWN_CONNECTIONS = 128  # without a handshake so far; a new one closes the oldest
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
PAUSE_S = 0.5  # without accepting, once the process has no more descriptors
_KEYS = itertools.count()
_MAX_HEAD_BYTES = 64 * 2**20
_MAX_BUFFER_BYTES = 2**48  # of an outbox: no machine has more
_FRAME_HEADER = struct.Struct("!BxxxIQQ")


class FrameKind(IntEnum):
    """The kinds of frames. A worker sends the first three, a server the others."""

    OUTBOX = 1  # pushes lie in an outbox of this size from now on; its memory may come with the frame
    RANGE = 2  # bytes of the outbox
    CALL = 3  # a request, and the range of the outbox that belongs to it
    ANSWER = 4  # to the oldest unanswered call, with its bytes
    PUBLISHED = 5  # as ANSWER, but the bytes are in the published memory, which comes with the frame if it is new


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The first bytes of a frame. `head` bytes follow, then `size` raw bytes for the kinds that have them."""

    kind: FrameKind
    head: int = 0
    offset: int = 0
    size: int = 0

    SIZE = _FRAME_HEADER.size

    def pack(self) -> bytes:
        """Return the bytes to send."""
        return _FRAME_HEADER.pack(self.kind, self.head, self.offset, self.size)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> FrameHeader:
        """Parse received bytes. Raises ConnectionError for bytes that are no header."""
        kind, head, offset, size = _FRAME_HEADER.unpack(data)
        if kind not in FrameKind.__members__.values() or head > _MAX_HEAD_BYTES or offset + size > _MAX_BUFFER_BYTES:
            raise ConnectionError("not a frame header")
        return cls(FrameKind(kind), head, offset, size)


@dataclass(frozen=True, eq=False, slots=True)
class WorkerCall:
    """A worker's request."""

    connection: WorkerConnection  # gets the answer
    head: bytes  # header of the call
    # the complete range of the outbox that belongs to the call. It does not change until the call is answered, and
    # can be read while it is held, even if the worker ends. Never write to it.
    payload: memoryview


@dataclass(frozen=True, eq=False, slots=True)
class WorkerDisconnected:
    """A worker's connection ended: it left, was lost, or stood still in the middle of a frame until the deadline."""

    connection: WorkerConnection


class WorkerConnection:
    """A worker's connection, at the server.

    Attributes:
        rank: of the worker; -1 before the handshake.
        key: number of this connection; a rank that connects again gets another.
        shared: the worker is on this machine, and shares memory.
    """

    def __init__(self, connection: socket.socket, owner: WorkerConnections) -> None:
        connection.setblocking(False)
        set_keepalive(connection)
        self._socket, self._owner = connection, owner
        self.rank, self.key = -1, next(_KEYS)
        self.shared = connection.family == getattr(socket, "AF_UNIX", None)
        self.moved, self.ended = time.monotonic(), False
        self._outbox = memoryview(b"")
        self._known: shared_memory.SharedRegion | None = None  # the published memory that the worker has mapped
        self._sending = threading.Lock()
        self._out: deque[OutgoingBuffers] = deque()
        self._want, self._have, self._least = memoryview(bytearray(CLAIM_BYTES)), 0, 1
        self._then: Callable[[], WorkerCall | None] = self._claim_came
        self._header, self._file = FrameHeader(FrameKind.CALL), -1
        self._challenge = new_nonce()
        self._send([self._challenge])

    def answer(self, head: bytes, *buffers: bytes | memoryview) -> None:
        """Answer the connection's oldest call, from any thread. Buffers are not copied: they must not change.

        A connection that has ended drops the answer: `WorkerDisconnected` reports its end.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        header = FrameHeader(FrameKind.ANSWER, len(head), 0, sum(map(len, views)))
        self._send([header.pack() + head, *views])

    def answer_published(self, head: bytes, size: int) -> None:
        """Answer with the first bytes of the published memory. In shared memory only their number is sent.

        Over TCP it is sent from there while it may change: the worker can then get parts of a later update.
        """
        region = self._owner.published
        assert region is not None and size <= region.size_bytes, "publish comes first"
        if not self.shared:
            self.answer(head, region.view[:size])
            return
        file = None
        if region is not self._known:
            self._known, file = region, region.file
        self._send([FrameHeader(FrameKind.PUBLISHED, len(head), size=size).pack() + head], file)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._out)

    def until(self, deadline_s: float) -> float | None:
        """Return when it must have made progress, on the clock of `time.monotonic`; None while it is idle."""
        if self.rank < 0:
            return self.moved + min(HANDSHAKE_S, deadline_s)
        return self.moved + deadline_s if self._out or self._have or self._then != self._header_came else None

    def flush(self) -> None:
        """Send what the socket takes now, from any thread."""
        with self._sending, suppress(OSError):  # the connection ended, which the waiting thread sees as well
            while self._out and not self.ended:
                unsent = self._out[0].left
                complete = send_available(self._socket, self._out[0])
                self.moved = time.monotonic() if self._out[0].left < unsent else self.moved
                if not complete:
                    return
                self._out.popleft()

    def receive(self) -> list[WorkerCall]:
        """Receive what has arrived; return the complete calls. `ended` is set at the end and on errors."""
        calls: list[WorkerCall] = []
        total, size = 0, 1
        try:
            while total < _MAX_READ_BYTES and size:
                if self._have < len(self._want):
                    total += (size := self._some())
                if self._have == len(self._want):
                    call = self._then()
                    calls += [call] if call else []
        except OSError:
            self.ended = True
        return calls

    def cut(self) -> None:
        """End the connection, from any thread."""
        self.ended = True
        with suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End and free the connection; a call's payload keeps its memory alive."""
        self.cut()
        with self._sending:
            self._out.clear()
            self._socket.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._outbox = memoryview(b"")

    def _send(self, buffers: list[bytes | memoryview], file: int | None = None) -> None:
        with self._sending:
            if not self._out:
                self.moved = time.monotonic()
            self._out.append(OutgoingBuffers(buffers, file))
        self.flush()
        if self._out:
            self._owner.look()

    def _some(self) -> int:
        """Receive into the wanted memory; return 0 if nothing has arrived."""
        header = self._then == self._header_came
        count, file = receive_available(self._socket, self._want[self._have :], files=self.shared and header)
        if file is not None:
            if self._file >= 0:
                os.close(self._file)
            self._file = file
        self._have += count
        self.moved = time.monotonic() if count and self.rank >= 0 else self.moved  # a stranger gains no time
        self._gather()
        return count

    def _gather(self) -> None:
        """Let many bytes of a long range arrive before the system reports them: each report costs a system call."""
        least = _LOW_WATER_BYTES if len(self._want) - self._have >= _LOW_WATER_BYTES else 1
        if least != self._least and not self.shared:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def _wanting(self, into: memoryview, then: Callable[[], WorkerCall | None]) -> None:
        self._want, self._have, self._then = into, 0, then
        self._gather()

    def _header_came(self) -> WorkerCall | None:
        header = self._header = FrameHeader.unpack(self._want)
        if header.kind in (FrameKind.RANGE, FrameKind.CALL) and header.offset + header.size > len(self._outbox):
            raise ConnectionError("a range outside the outbox")
        if header.kind is FrameKind.RANGE:
            self._wanting(self._outbox[header.offset : header.offset + header.size], self._range_came)
        else:
            self._wanting(memoryview(bytearray(header.head)), self._head_came)
        return None

    def _range_came(self) -> WorkerCall | None:
        self._wanting(memoryview(bytearray(FrameHeader.SIZE)), self._header_came)
        return None

    def _head_came(self) -> WorkerCall | None:
        head, header = bytes(self._want), self._header
        self._range_came()
        if header.kind is FrameKind.CALL:
            return WorkerCall(self, head, self._outbox[header.offset : header.offset + header.size])
        if header.kind is FrameKind.OUTBOX:
            self._take_outbox(header.size)
        else:
            raise ConnectionError("a frame that only servers send")
        return None

    def _claim_came(self) -> None:
        rank, proof = verify_claim(self._owner.key, self._challenge, self._want)
        if self.shared and not peer_is_same_user(self._socket):
            raise ConnectionError("the worker runs as another user")
        self.rank = rank
        self._wanting(memoryview(bytearray(FrameHeader.SIZE)), self._header_came)
        self._send([proof])

    def _take_outbox(self, size: int) -> None:
        """Map the worker's memory if it came with the frame, else allocate as much here."""
        if not self.shared:
            self._outbox = shared_memory.allocate_private(size)
            return
        if self._file < 0:
            raise ConnectionError("an outbox without memory")
        try:
            self._outbox = shared_memory.map_descriptor(
                self._file, size, writable=True
            )  # torch warns of memory that is not
        finally:
            os.close(self._file)
            self._file = -1


class WorkerConnections:
    """All workers' connections to one server, in one rendezvous epoch.

    Methods are for the owner's thread, except `wake`, `look`, `cut` and a connection's `answer`, which are for any.

    Args:
        listener: closed with it.
        key: of the group, for the handshake.
        deadline_s: within which a connection must make progress in the middle of a frame, in either direction.
    """

    def __init__(self, listener: SocketListener, key: bytes, *, deadline_s: float) -> None:
        self.key, self.ended = key, False
        self._called = False  # `wake` was called
        self.published: shared_memory.SharedRegion | None = None
        self._listener, self._deadline_s = listener, deadline_s
        self._connections: set[WorkerConnection] = set()
        self._closed_until: float | None = None  # no connection is accepted before
        self._selector = selectors.DefaultSelector()
        self._woken, self._waking = socket.socketpair()
        for waiting in (*listener.sockets, self._woken, self._waking):
            waiting.setblocking(False)
        for waiting in (*listener.sockets, self._woken):
            self._selector.register(waiting, selectors.EVENT_READ)

    def publish(self, region: shared_memory.SharedRegion) -> None:
        """Set the memory that pulls are answered from."""
        self.published = region

    def wait(self, until: float) -> list[WorkerCall | WorkerDisconnected]:
        """Wait for calls and ended connections, until the deadline `until`; `wake` and `cut` let it return at once."""
        while not self.ended:
            ready = self._selector.select(max(0.0, min(self._watch(), until) - time.monotonic()))
            events: list[WorkerCall | WorkerDisconnected] = []
            woken = False
            for key, mask in ready:
                if isinstance(key.fileobj, WorkerConnection):
                    events += self._handle_events(key.fileobj, mask) if key.fileobj in self._connections else []
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    if self._called:  # not cleared where it was not seen
                        woken, self._called = True, False
                else:
                    self._admit(key.fileobj)
            events += self._dismiss_overdue()
            if events or woken or time.monotonic() >= until:
                return events
        return []

    def wake(self) -> None:
        """Let `wait` return, from any thread."""
        self._called = True
        self.look()

    def look(self) -> None:
        """Let `wait` see that a connection has bytes to send, from any thread."""
        with suppress(OSError):  # it is full or closed: `wait` continues in both cases
            self._waking.send(b"\0")

    def cut(self) -> None:
        """End everything, from any thread."""
        self.ended = True
        self._listener.cut()
        for connection in tuple(self._connections):
            connection.cut()
        self.wake()

    def close(self) -> None:
        """End and free everything."""
        self.cut()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._selector.close()
        self._listener.close()
        self._woken.close()
        self._waking.close()

    def _watch(self) -> float:
        """Register the connections that wait to send, and the listeners; return the first deadline."""
        deadline = float("inf")
        for connection in self._connections:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.pending else 0)
            if self._selector.get_key(connection).events != events:
                self._selector.modify(connection, events)
            deadline = min(deadline, connection.until(self._deadline_s) or deadline)
        if self._closed_until is not None and time.monotonic() >= self._closed_until:
            self._closed_until = None
            for listening in self._listener.sockets:
                self._selector.register(listening, selectors.EVENT_READ)
        return deadline if self._closed_until is None else min(deadline, self._closed_until)

    def _admit(self, listening: object) -> None:
        assert isinstance(listening, socket.socket), "only sockets listen"
        try:
            accepted, _ = listening.accept()
        except OSError as error:  # the peer hung up, the listener was cut, or there are no descriptors
            if error.errno in _NO_DESCRIPTORS and not self._dismiss_oldest():
                self._pause()
            return
        if sum(connection.rank < 0 for connection in self._connections) >= MAX_UNKNOWN_CONNECTIONS:
            self._dismiss_oldest()
        connection = WorkerConnection(accepted, self)
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _dismiss_oldest(self) -> bool:
        """End the oldest connection without a handshake; return False if there is none."""
        oldest = min(
            (connection for connection in self._connections if connection.rank < 0),
            key=lambda connection: connection.key,
            default=None,
        )
        if oldest is not None:
            self._dismiss(oldest)
        return oldest is not None

    def _pause(self) -> None:
        """Accept no connections for a while, to avoid repeated failures."""
        if self._closed_until is None:
            self._closed_until = time.monotonic() + PAUSE_S
            for listening in self._listener.sockets:
                self._selector.unregister(listening)

    def _handle_events(self, connection: WorkerConnection, mask: int) -> list[WorkerCall | WorkerDisconnected]:
        calls: list[WorkerCall | WorkerDisconnected] = []
        if mask & selectors.EVENT_WRITE:
            connection.flush()
        if mask & selectors.EVENT_READ:
            calls += connection.receive()
        return calls + self._dismiss(connection) if connection.ended else calls

    def _dismiss_overdue(self) -> list[WorkerCall | WorkerDisconnected]:
        now_s = time.monotonic()
        overdue = [each for each in self._connections if (each.until(self._deadline_s) or now_s) < now_s]
        return [event for connection in overdue for event in self._dismiss(connection)]

    def _dismiss(self, connection: WorkerConnection) -> list[WorkerCall | WorkerDisconnected]:
        self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()
        return [WorkerDisconnected(connection)] if connection.rank >= 0 else []
