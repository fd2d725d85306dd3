"""How tensors get from one stage of a pipeline to another: over sockets on CPUs, over NCCL on GPUs.

A channel goes one way, and gives messages in the order in which they were sent. gloo is not used: when a connection
ends, it reports that only to messages that have not started (gloo/transport/tcp/pair.cc, `signalException`), and a
receive that is half done would wait until the group's deadline. A socket reports it to all, and needs no other thread
to read. The receiver answers each message with a byte: a stage does not end its step before its neighbours have taken
all that it sent. Senders read these answers at the end of a step, so that the system may have no room for all of them
before: an answer waits, and the receiver does not.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work

from trainwright.core.errors import PeerLost
from trainwright.core.topology import Address
from trainwright.strategies.common import shared_memory
from trainwright.strategies.common.socket_transport import (
    HANDSHAKE_S,
    ConnectionCanceller,
    OutgoingBuffers,
    SocketListener,
    authenticate,
    authenticate_peer,
    connect,
    connection_lost,
    receive_available,
    send_available,
    set_keepalive,
    unix_socket_name,
    wait_for,
)

_SIZE = struct.Struct("=Q")  # before each message: its bytes
_TIMEVAL = struct.Struct("@ll")
_BUFFER_BYTES = 4 << 20  # that the system is asked to keep of what was sent
_TAKEN, _MAX_TAKEN = b"t", 4096  # the answer to a message, and how many are read at a time
Waits = list[Callable[[], object]]  # functions that wait for a message; each raises if the other rank is gone


class Channel:
    """Carries tensors from one stage to another. For one thread; `cut` is for any."""

    def send(self, tensors: Sequence[Tensor]) -> Waits:
        """Start to send tensors, which must not change until the returned functions have returned."""
        raise NotImplementedError

    def receive(self, tensors: Sequence[Tensor]) -> Waits:
        """Start to receive into contiguous tensors."""
        raise NotImplementedError

    def read_answers(self) -> None:
        """Read the answers that are there, which makes room for further ones."""

    def send_answers(self) -> None:
        """Send the answers that have waited for room."""

    def cut(self) -> None:
        """End the channel: whoever waits at either end raises."""

    def close(self) -> None:
        """Free the channel."""


class GroupChannel(Channel):
    """A channel over a process group of two ranks, which its owner ends. NCCL knows what was taken."""

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer  # its rank in the world

    def send(self, tensors: Sequence[Tensor]) -> Waits:
        """Start to send tensors."""
        return [_wait_of(distributed.isend(each, self._peer, group=self._group)) for each in tensors]

    def receive(self, tensors: Sequence[Tensor]) -> Waits:
        """Start to receive into tensors."""
        return [_wait_of(distributed.irecv(each, self._peer, group=self._group)) for each in tensors]


class SocketChannel(Channel):
    """One end of a connection that carries tensors one way.

    Args:
        connection: after the handshake.
        peer: the other end, in words for errors.
        deadline_s: seconds for which the other end may be silent.
    """

    def __init__(self, connection: socket.socket, peer: str, deadline_s: float) -> None:
        set_keepalive(connection)
        connection.setblocking(True)
        if connection.family == socket.AF_UNIX:  # TCP's grows by itself, unless it is set
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        # With a timeout of Python's, each receive would look first whether there is something.
        limit = _TIMEVAL.pack(int(deadline_s), int(deadline_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket, self._peer, self._deadline_s = connection, peer, deadline_s
        # Its thread starts with the first message that the system does not take at once.
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage-sender")
        self._last: Future[None] | None = None  # of the sender
        self._expected: deque[Sequence[Tensor]] = deque()
        self._sent = self._taken = 0  # messages sent, and those that were answered
        self._begun = self._ended = 0  # messages to receive, and those received
        self._owed = 0  # of these, those that are not answered yet

    def send(self, tensors: Sequence[Tensor]) -> Waits:
        """Start to send tensors, to wait until the other end has taken them. Raises PeerLost if it is gone."""
        self._sent += 1
        taken = partial(self._await_taken, self._sent)
        size = sum(each.nbytes for each in tensors)
        left = OutgoingBuffers([_SIZE.pack(size), *map(_bytes_of, tensors)])
        if self._last is None or self._last.done():
            if self._last is not None:
                self._last.result()  # nothing may follow a part of a message
            try:
                if send_available(self._socket, left, socket.MSG_DONTWAIT):
                    return [taken]
            except OSError as error:
                raise self._lost(error) from error
        self._last = self._sender.submit(self._send_all, left, tensors)
        return [self._last.result, taken]

    def receive(self, tensors: Sequence[Tensor]) -> Waits:
        """Expect a message of these tensors after those that were expected before."""
        self._expected.append(tensors)
        self._begun += 1
        return [partial(self._receive_until, self._begun)]

    def read_answers(self) -> None:
        """Read the answers that are there. Raises PeerLost if the other end is gone."""
        answers = bytearray(_MAX_TAKEN)
        try:
            with suppress(BlockingIOError):
                while left := min(self._sent - self._taken, _MAX_TAKEN):
                    count = self._socket.recv_into(answers, left, socket.MSG_DONTWAIT)
                    if not count:
                        raise ConnectionResetError("closed")
                    self._taken += count
        except OSError as error:
            raise self._lost(error) from error

    def send_answers(self) -> None:
        """Send the answers that have waited. Raises PeerLost if the other end is gone, or reads none."""
        try:
            while not self._answer():
                wait_for(select.POLLOUT, time.monotonic() + self._deadline_s, self._socket)
        except OSError as error:
            raise self._lost(error) from error

    def cut(self) -> None:
        """End the connection."""
        with suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, also for a thread that sends."""
        self.cut()
        self._sender.shutdown()
        self._socket.close()

    def _lost(self, error: OSError) -> PeerLost:
        """End the connection, on which a message may be half done, and return the error to raise."""
        self.cut()
        return connection_lost(self._peer, error)

    def _send_all(self, left: OutgoingBuffers, held: Sequence[Tensor]) -> None:
        """Send the rest of a message, whose tensors are held meanwhile."""
        try:
            while not send_available(self._socket, left, socket.MSG_DONTWAIT):
                wait_for(select.POLLOUT, time.monotonic() + self._deadline_s, self._socket)
        except OSError as error:
            raise self._lost(error) from error

    def _await_taken(self, number: int) -> None:
        """Wait until messages up to that one, counted from 1, were answered."""
        answers = memoryview(bytearray(_MAX_TAKEN))
        try:
            while self._taken < number:
                self._taken += self._receive(answers[: min(number - self._taken, _MAX_TAKEN)])
        except OSError as error:
            raise self._lost(error) from error

    def _receive_until(self, number: int) -> None:
        """Receive messages up to that one, counted from 1."""
        try:
            while self._ended < number:
                tensors, head = self._expected[0], bytearray(_SIZE.size)
                self._fill(memoryview(head))
                (size,), wanted = _SIZE.unpack(head), sum(each.nbytes for each in tensors)
                if size != wanted:
                    self.cut()
                    raise RuntimeError(f"{self._peer} sent {size} bytes where {wanted} were expected")
                for each in tensors:
                    self._fill(_bytes_of(each))
                self._expected.popleft()
                self._ended += 1
                self._owed += 1
                self._answer()
        except OSError as error:
            raise self._lost(error) from error

    def _answer(self) -> bool:
        """Send as many answers as there is room for; return whether none is left. Raises OSError."""
        with suppress(BlockingIOError):
            while self._owed:
                self._owed -= self._socket.send(_TAKEN * self._owed, socket.MSG_DONTWAIT)
        return not self._owed

    def _fill(self, view: memoryview) -> None:
        while len(view):
            view = view[self._receive(view) :]

    def _receive(self, view: memoryview) -> int:
        count, _ = receive_available(self._socket, view, files=False)
        if not count:
            raise TimeoutError(f"silent for {self._deadline_s:g} s")
        return count


def open_channel(
    address: Address, key: bytes, number: int, until: float, canceller: ConnectionCanceller
) -> socket.socket:
    """Connect to the rank that listens at an address, and say which channel this is. Raises OSError."""
    connection = _connect(address, until, canceller)
    authenticate(connection, key, number, until)
    return connection


def accept_channel(
    listener: SocketListener, key: bytes, until: float, canceller: ConnectionCanceller
) -> tuple[int, socket.socket] | None:
    """Accept a connection: the number of its channel, and the connection; None for a peer without the key.

    Raises OSError at the deadline, and once the listener is cut.
    """
    connection = listener.accept(until)
    try:
        canceller.hold(connection)
        return authenticate_peer(connection, key, min(until, time.monotonic() + HANDSHAKE_S)), connection
    except OSError:
        connection.close()
        return None


def _connect(address: Address, until: float, canceller: ConnectionCanceller) -> socket.socket:
    if shared_memory.HAS_SHARED_MEMORY:
        with suppress(OSError):  # it is on another machine
            return connect(unix_socket_name(address), until, canceller)
    return connect((address.host, address.port), until, canceller)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, which the caller holds.

    Not through numpy, which forbids for good to resize the storage, as FSDP does, and takes no strides of 0.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _wait_of(work: Work | None) -> Callable[[], object]:
    assert work is not None, "this rank is in the group"
    return work.wait
