"""Sockets of workers and servers: names, options, who listens, and the two calls that move bytes, with a descriptor
beside them.

    server -> member   a nonce
    member -> server   its rank, a nonce of its own, MAC("member", both nonces, rank)
    server -> member   MAC("server", both nonces, rank)

Each message has a fixed size, and nothing in it is used before its MAC is verified. Nobody learns the key by listening,
and no message is of use in another connection. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from trainwright.core.errors import PeerLost
from trainwright.core.topology import Address
from trainwright.strategies.common import shared_memory
from trainwright.strategies.common.host_address import bind_socket

_MAX_BUFFERS = 64  # buffers in one call; the system takes 1024
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a dead machine is noticed after 90 s


class SocketListener:
    """A server's place to be reached at, over TCP on a port that the system chose and, on Linux, over a Unix socket.

    Args:
        host: address to listen on. The Unix socket's name follows from it and the port; it is abstract, no file.
    """

    def __init__(self, host: str) -> None:
        self.tcp = bind_socket(host)
        self.tcp.listen(512)
        self.address = Address(host=host, port=self.tcp.getsockname()[1])
        self.local: socket.socket | None = None
        if shared_memory.HAS_SHARED_MEMORY:
            self.local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self.local.bind(unix_socket_name(self.address))
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


class ConnectionCanceller:
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


class OutgoingBuffers:
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


def send_available(connection: socket.socket, pieces: OutgoingBuffers) -> bool:
    """Send what the socket takes; whether that was all. Raises OSError, BlockingIOError excepted."""
    while pieces.views:
        files = [] if pieces.file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pieces.file]))]
        try:
            pieces.sent(connection.sendmsg(pieces.views[:_MAX_BUFFERS], files))
        except BlockingIOError:
            return False
    return True


def receive_available(connection: socket.socket, into: memoryview, *, files: bool) -> tuple[int, int | None]:
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


def unix_socket_name(address: Address) -> str:
    """The abstract Unix socket that belongs to a TCP address.

    Both belong to one network namespace, in which the address is one server's alone: who finds the name is on that
    server's machine. Another user may take it; `peer_is_same_user` shows that.
    """
    return f"\0trainwright/{address.host}/{address.port}"


def peer_is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of this process's user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def set_keepalive(connection: socket.socket) -> None:
    """Frames leave at once; an end that fell silent for good is noticed."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            with suppress(OSError):  # a system that has the name and not the option
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _first(beside: Sequence[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return array.array("i", data[:4])[0]
    return None


# --- What goes over a connection after the handshake ------------------------------------------------------------------


_MAX_HEAD_BYTES = 64 * 2**20
_MAX_BUFFER_BYTES = 2**48  # of an outbox: no machine has more
LOST_PEER_REMEDY = "the first rank that failed says why"
_FRAME_HEADER = struct.Struct("!BxxxIQQ")
_MAX_TIMEOUT_S = 1e6  # what a socket takes as a timeout


class FrameKind(IntEnum):
    """What a frame is. A worker sends the first three, a server the others."""

    OUTBOX = 1  # from now on pushes lie in an outbox of so many bytes; its memory may come with the frame
    RANGE = 2  # bytes of the outbox
    CALL = 3  # a request, and the range of the outbox that belongs to it
    ANSWER = 4  # to the oldest call not answered yet, with its bytes
    PUBLISHED = 5  # as ANSWER, but the bytes stand in the published memory, which comes with the frame where it is new


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The first bytes of a frame. What follows: `head` bytes, then `size` raw ones where the kind has such."""

    kind: FrameKind
    head: int = 0
    offset: int = 0
    size: int = 0

    SIZE = _FRAME_HEADER.size

    def pack(self) -> bytes:
        """As sent."""
        return _FRAME_HEADER.pack(self.kind, self.head, self.offset, self.size)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> FrameHeader:
        """As received. Raises ConnectionError where it cannot be one."""
        kind, head, offset, size = _FRAME_HEADER.unpack(data)
        if kind not in FrameKind.__members__.values() or head > _MAX_HEAD_BYTES or offset + size > _MAX_BUFFER_BYTES:
            raise ConnectionError("no frame of ours")
        return cls(FrameKind(kind), head, offset, size)


def remaining_s(until: float) -> float:
    """Seconds left on the clock of `time.monotonic`, never none: a call that is late still takes what is there."""
    return min(max(until - time.monotonic(), 1e-3), _MAX_TIMEOUT_S)


def connection_lost(peer: str, error: OSError) -> PeerLost:
    """The error of a connection that broke, or was too slow."""
    late = isinstance(error, TimeoutError)
    what = "did not answer within the deadline" if late else f"closed the connection ({error})"
    return PeerLost(f"{peer} {what}", remedy=LOST_PEER_REMEDY)


# --- Prove membership of a group by its key (HMAC-SHA256) before anything else is said over a connection --------------


NONCE_BYTES = MAC_BYTES = 32
HANDSHAKE_S = 5.0  # for a member to answer the nonce
_CLAIM_FORMAT = struct.Struct(f"!I{NONCE_BYTES}s{MAC_BYTES}s")
CLAIM_BYTES = _CLAIM_FORMAT.size


def new_nonce() -> bytes:
    """What a server sends first over each connection."""
    return secrets.token_bytes(NONCE_BYTES)


def member_claim(key: bytes, challenge: bytes, rank: int) -> tuple[bytes, bytes]:
    """A member's message of `CLAIM_BYTES`, and the answer that only a server with the key can give to it."""
    own = new_nonce()
    said = _CLAIM_FORMAT.pack(rank, own, _mac(key, b"member", challenge, own, rank))
    return said, _mac(key, b"server", challenge, own, rank)


def verify_claim(key: bytes, challenge: bytes, said: bytes | bytearray | memoryview) -> tuple[int, bytes]:
    """The rank of the member that sent a claim, and the server's answer. Raises ConnectionError for a stranger's."""
    rank, other, mac = _CLAIM_FORMAT.unpack(said)
    if not hmac.compare_digest(mac, _mac(key, b"member", challenge, other, rank)):
        raise ConnectionError("the peer does not know the group's key")
    return int(rank), _mac(key, b"server", challenge, other, rank)


def authenticate(connection: socket.socket, key: bytes, rank: int, until: float) -> None:
    """The member's side, over a socket that blocks; `until` is on the clock of `time.monotonic`. Raises OSError."""
    said, expected = member_claim(key, _receive_exactly(connection, NONCE_BYTES, until), rank)
    connection.sendall(said)
    if not hmac.compare_digest(_receive_exactly(connection, MAC_BYTES, until), expected):
        raise ConnectionError("the server does not know the group's key")


def authenticate_peer(connection: socket.socket, key: bytes, until: float) -> int:
    """The server's side of the same: the member's rank. Raises OSError."""
    challenge = new_nonce()
    connection.settimeout(remaining_s(until))
    connection.sendall(challenge)
    rank, proof = verify_claim(key, challenge, _receive_exactly(connection, CLAIM_BYTES, until))
    connection.sendall(proof)
    return rank


def _mac(key: bytes, role: bytes, challenge: bytes, other: bytes, rank: int) -> bytes:
    if not key:
        raise ValueError("the group has no key: whoever makes a Group of several ranks gives all of them the same one")
    return hmac.digest(key, role + challenge + other + struct.pack("!I", rank), hashlib.sha256)


def _receive_exactly(connection: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(remaining_s(until))
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("end of stream")
        data += piece
    return data
