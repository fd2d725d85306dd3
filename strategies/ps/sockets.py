"""Sockets of workers and servers: names, options, who listens, and the two calls that move bytes, with a descriptor
beside them.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from trainwright.core.group import Address
from trainwright.strategies.common.host_address import bound
from trainwright.strategies.ps import shared_memory

_ONCE = 64  # buffers in one call; the system takes 1024
_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a dead machine is noticed after 90 s


class Listener:
    """A server's place to be reached at, over TCP on a port that the system chose and, on Linux, over a Unix socket.

    Args:
        host: address to listen on. The Unix socket's name follows from it and the port; it is abstract, no file.
    """

    def __init__(self, host: str) -> None:
        self.tcp = bound(host)
        self.tcp.listen(512)
        self.address = Address(host=host, port=self.tcp.getsockname()[1])
        self.local: socket.socket | None = None
        if shared_memory.SHARES:
            self.local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self.local.bind(local_name(self.address))
                self.local.listen(512)
            except OSError:  # somebody has that name: everybody comes over TCP
                self.local.close()
                self.local = None

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """Those that listen."""
        return (self.tcp,) if self.local is None else (self.tcp, self.local)

    def cut(self) -> None:
        """Stop listening, from any thread."""
        for listening in self.sockets:
            with suppress(OSError):  # it may be closed already
                listening.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and free port and name."""
        for listening in self.sockets:
            listening.close()


class Switch:
    """Ends what one thread connects to, from any thread; what it would connect to after that is refused.

    Attributes:
        off: `cut` was called.
    """

    def __init__(self) -> None:
        self.off = False
        self._connection: socket.socket | None = None

    def hold(self, connection: socket.socket) -> None:
        """Let `cut` end this connection. Call it before and after connecting. Raises OSError where it is off."""
        self._connection = connection
        if self.off:  # looked at last, as `cut` sets it first: one of the two sees the other
            raise ConnectionAbortedError("cut")

    def cut(self) -> None:
        """End the connection, and refuse others, from any thread."""
        self.off = True
        if self._connection is not None:
            with suppress(OSError):  # it is not connected yet, or has ended
                self._connection.shutdown(socket.SHUT_RDWR)


class Pieces:
    """Bytes to send one after the other, as far as they have gone, and a descriptor that goes with the first."""

    def __init__(self, buffers: Sequence[bytes | memoryview], file: int | None = None) -> None:
        self.views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        self.file = file

    @property
    def left(self) -> int:
        """Bytes that have not gone."""
        return sum(map(len, self.views))

    def sent(self, count: int) -> None:
        """So many bytes more are gone."""
        self.file = None
        done = 0
        while done < len(self.views) and count >= len(self.views[done]):
            count -= len(self.views[done])
            done += 1
        del self.views[:done]
        if count:
            self.views[0] = self.views[0][count:]


def send_some(connection: socket.socket, pieces: Pieces) -> bool:
    """Send what the socket takes; whether that was all. Raises OSError, BlockingIOError excepted."""
    while pieces.views:
        files = [] if pieces.file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pieces.file]))]
        try:
            pieces.sent(connection.sendmsg(pieces.views[:_ONCE], files))
        except BlockingIOError:
            return False
    return True


def receive_some(connection: socket.socket, into: memoryview, *, files: bool) -> tuple[int, int | None]:
    """What is there: how many bytes came (0: none now), and the descriptor beside them. Raises OSError at the end."""
    try:
        if not files:
            count, found = connection.recv_into(into, 0, socket.MSG_WAITALL), None
        else:
            count, beside, _, _ = connection.recvmsg_into([into], socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
            found = _first(beside)
    except BlockingIOError:
        return 0, None
    if not count:
        raise ConnectionError("end of stream")
    return count, found


def local_name(address: Address) -> str:
    """The abstract Unix socket that belongs to a TCP address.

    Both belong to one network namespace, in which the address is one server's alone: who finds the name is on that
    server's machine. Another user may take it; `same_user` shows that.
    """
    return f"\0trainwright/{address.host}/{address.port}"


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of this process's user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def tune(connection: socket.socket) -> None:
    """Frames leave at once; an end that fell silent for good is noticed."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):
            with suppress(OSError):  # a system that has the name and not the option
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _first(beside: Sequence[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return array.array("i", data[:4])[0]
    return None
