"""A worker's connection to one server: shared memory and a Unix socket on one machine, TCP and two threads elsewhere.

The worker writes a push into its outbox. On one machine the server reads it there, the worker copies pulled parameters
from the server's memory, and the Unix socket carries only the headers of requests and answers. Over TCP a range of the
outbox is sent as soon as it is final, and pulled parameters arrive while the worker computes.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from trainwright.core.topology import Peer
from trainwright.strategies.common import shared_memory
from trainwright.strategies.common.socket_transport import (
    NO_DEADLINE,
    ConnectionCanceller,
    OutgoingBuffers,
    authenticate,
    connect,
    connect_over_tcp,
    connection_lost,
    receive_exactly,
    remaining_s,
    send_available,
    unix_socket_name,
)
from trainwright.strategies.ps.server_connections import FrameHeader, FrameKind

_CHUNK_BYTES = 2**20  # received before a waiting thread is notified
_SENT_BYTES = 8 * 2**20  # likewise, sent


def connect_to_server(peer: Peer, key: bytes, rank: int, until: float, switch: ConnectionCanceller) -> ServerConnection:
    """Connect to a server and do the handshake: over shared memory if it is on this machine, else over TCP.

    Raises PeerLost at the deadline `until` (on the clock of `time.monotonic`), and once the switch is cut.
    """
    name = f"rank {peer.rank}"
    if shared_memory.HAS_SHARED_MEMORY:
        with suppress(OSError):  # it is on another machine, or does not accept Unix sockets
            connection = connect(unix_socket_name(peer.address), until, switch)
            authenticate(connection, key, rank, until)
            return ServerConnection(connection, name)
    return ServerConnection(connect_over_tcp(peer.address, key, rank, until, name, switch), name)


class ServerConnection:
    """A worker's connection to one server, for one thread; `cut` is for any.

    Calls are answered in order, and several may be in flight. All methods raise PeerLost if the connection breaks, and
    at the deadline `until`, on the clock of `time.monotonic`; the connection is unusable then. Over TCP the time to the
    deadline counts anew whenever bytes were sent or received: a large message may take longer on a slow network.

    Attributes:
        peer: the server, in words for errors.
        shared: the server is on this machine, and memory is shared with it.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.shared = connection.family == getattr(socket, "AF_UNIX", None)
        if not self.shared:
            connection.settimeout(None)  # its two threads block in the kernel, which saves a system call for each piece
        self._in, self._out = connection, connection.dup()  # each has a timeout of its own
        self._outbox = memoryview(b"")
        self._final: list[tuple[int, int]] = []
        self._published = memoryview(b"")
        self._awaited: deque[memoryview | None] = deque()
        self._came: deque[_ServerAnswer] = deque()
        self._answer = _ServerAnswer()
        self._news, self._failure = threading.Condition(), OSError("not broken")
        self._moved = 0  # times that bytes were sent or received
        self._broken = False
        self._sent: queue.SimpleQueue[OutgoingBuffers | None] = queue.SimpleQueue()
        self._threads = [] if self.shared else [self._thread(self._send_all), self._thread(self._receive_all)]

    def open_outbox(self, size_bytes: int, until: float) -> memoryview:
        """Return zeroed memory for the next pushes; the server reads the former until its calls are answered."""
        self._final = []
        header = FrameHeader(FrameKind.OUTBOX, size=size_bytes).pack()
        if not self.shared:
            self._outbox = shared_memory.allocate_private(size_bytes)
            self._send([header], until)
            return self._outbox
        region = shared_memory.SharedRegion(size_bytes)
        self._outbox = region.view
        self._send([header], until, region.file)
        region.close()
        return self._outbox

    def ready(self, offset: int, size: int) -> None:
        """Send a range of the outbox now over TCP; it must not change until its call is answered."""
        if not self.shared:
            self._final.append((offset, offset + size))
            self._send_range(offset, offset + size)

    def call(
        self, head: bytes, until: float, *, offset: int = 0, size: int = 0, into: memoryview | None = None
    ) -> None:
        """Send a request.

        Args:
            head: header of the call.
            offset, size: range of the outbox that belongs to the call. It must not change until the answer came; the
                parts that `ready` did not name are sent now.
            into: memory for the answer's bytes, which may be fewer.
        """
        if not self.shared:
            for start, end in self._missing(offset, offset + size):
                self._send_range(start, end)
        self._awaited.append(into)
        self._send([FrameHeader(FrameKind.CALL, len(head), offset, size).pack() + head], until)

    def answer(self, until: float) -> bytes:
        """Return the header of the oldest answer not yet taken; its bytes may still be arriving."""
        if self.shared:
            try:
                self._receive(until)
            except OSError as error:
                raise connection_lost(self.peer, error) from error
        self._wait(lambda: bool(self._came), until)
        self._answer = self._came.popleft()
        return self._answer.head

    def pulled(self, offset: int, size: int, until: float) -> None:
        """Wait until a range of the last taken answer's bytes is in its memory."""
        answer, end = self._answer, offset + size
        if end > answer.size:
            raise ValueError(f"the answer has {answer.size} bytes, not {end}")
        if answer.source is None:
            self._wait(lambda: answer.have >= end, until)
        else:
            assert answer.into is not None, "`_receive` checks it"
            np.copyto(
                np.frombuffer(answer.into[offset:end], np.uint8), np.frombuffer(answer.source[offset:end], np.uint8)
            )

    def cut(self) -> None:
        """End the connection, from any thread: a blocked call of another thread raises."""
        with suppress(OSError):  # it may have ended already
            self._in.shutdown(socket.SHUT_RDWR)
        self._fail(ConnectionError("cut"))

    def close(self) -> None:
        """End the connection and free it. Only from the thread that uses it."""
        self.cut()
        self._sent.put(None)
        for thread in self._threads:
            thread.join()
        self._in.close()
        self._out.close()

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"link to {self.peer}", daemon=True)
        thread.start()
        return thread

    def _missing(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges between start and end that `ready` did not send, and forget those that it did."""
        inside = sorted(done for done in self._final if done[0] < end and done[1] > start)
        self._final = [done for done in self._final if done not in inside]
        for first, last in inside:
            if first > start:
                yield start, first
            start = max(start, last)
        if start < end:
            yield start, end

    def _send_range(self, start: int, end: int) -> None:
        for first in range(start, end, _SENT_BYTES):
            last = min(first + _SENT_BYTES, end)
            header = FrameHeader(FrameKind.RANGE, offset=first, size=last - first).pack()
            self._sent.put(OutgoingBuffers([header, self._outbox[first:last]]))

    def _send(self, buffers: list[bytes], until: float, file: int | None = None) -> None:
        """Send now in shared memory; over TCP the sending thread does it, in order."""
        if self._broken:
            raise connection_lost(self.peer, self._failure) from self._failure
        if not self.shared:
            self._sent.put(OutgoingBuffers(buffers))
            return
        try:
            self._out.settimeout(remaining_s(until))
            send_available(self._out, OutgoingBuffers(buffers, file))
        except OSError as error:
            raise connection_lost(self.peer, error) from error

    def _send_all(self) -> None:
        try:
            while (pieces := self._sent.get()) is not None:
                send_available(self._out, pieces)
                with self._news:
                    self._moved += 1
                    self._news.notify_all()
        except OSError as error:
            self._fail(error)

    def _receive_all(self) -> None:
        try:
            while True:
                self._receive(NO_DEADLINE)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        with self._news:
            if not self._broken:
                self._broken, self._failure = True, error
            self._news.notify_all()

    def _wait(self, there: Callable[[], bool], until: float) -> None:
        silent_s = remaining_s(until)
        with self._news:
            while not (there() or self._broken):
                before = self._moved
                if not self._news.wait_for(lambda: there() or self._broken or self._moved != before, silent_s):  # noqa: B023
                    raise connection_lost(self.peer, TimeoutError())
            if not there():
                raise connection_lost(self.peer, self._failure) from self._failure

    def _receive(self, until: float) -> None:
        """Receive one answer."""
        header, file = _header(self._in, until)
        published = header.kind is FrameKind.PUBLISHED
        if not self._awaited or not (published or header.kind is FrameKind.ANSWER):
            raise ConnectionError("an answer without a call")
        head = memoryview(bytearray(header.head))
        receive_exactly(self._in, head, until)
        answer = _ServerAnswer(bytes(head), self._awaited.popleft(), header.size)
        if published:
            answer.source = self._seen(file, header.size)
        room = 0 if answer.into is None else len(answer.into)
        if header.size > room:
            raise ConnectionError(f"an answer of {header.size} bytes where {room} were expected")
        with self._news:
            self._came.append(answer)
            self._news.notify_all()
        if answer.into is not None and not published:
            self._fill_in(answer, answer.into[: header.size], until)

    def _fill_in(self, answer: _ServerAnswer, into: memoryview, until: float) -> None:
        for start in range(0, len(into), _CHUNK_BYTES):
            stretch = into[start : start + _CHUNK_BYTES]
            receive_exactly(self._in, stretch, until)
            with self._news:
                answer.have = start + len(stretch)
                self._moved += 1
                self._news.notify_all()

    def _seen(self, file: int | None, size: int) -> memoryview:
        """Return the first bytes of the server's published memory, which is new if a descriptor came."""
        if file is not None:
            try:
                self._published = shared_memory.map_descriptor(file, writable=False)
            finally:
                os.close(file)
        if size > len(self._published):
            raise ConnectionError("a range outside the published memory")
        return self._published[:size]


@dataclass(eq=False, slots=True)
class _ServerAnswer:
    """An answer: header, memory for its bytes, their number, those received, or the shared memory with them."""

    head: bytes = b""
    into: memoryview | None = None
    size: int = 0
    have: int = 0
    source: memoryview | None = None


def _header(connection: socket.socket, until: float) -> tuple[FrameHeader, int | None]:
    """Receive the next frame's header, and the descriptor that came with it."""
    first = memoryview(bytearray(FrameHeader.SIZE))
    file = receive_exactly(connection, first, until)
    return FrameHeader.unpack(first), file
