"""Sockets between the processes of a group, and the address at which other nodes reach this process.

A connection begins with a handshake by the group's key (HMAC-SHA256), before anything else is read from it:

    server -> member   a nonce
    member -> server   its rank, a nonce of its own, MAC("member", both nonces, rank)
    server -> member   MAC("server", both nonces, rank)

Each message has a fixed size, and nothing in it is used before its MAC is verified. A listener on the network does not
learn the key, and no message is valid in another connection. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import array
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from trainwright.core.errors import PeerLost
from trainwright.core.topology import Address
from trainwright.strategies.common import shared_memory

LOOPBACK = "127.0.0.1"
_ATTEMPTS = 16  # ports that are tried
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFMTU, _INTERFACE_UP = 0x8913, 0x8915, 0x8921, 0x1  # <linux/sockios.h>, <net/if.h>
_told: list[str] = []


def set_own_host(host: str) -> None:
    """Set the address of this process, for hosts whose default route leads out by another one."""
    _told[:] = [host]


def own_host() -> str:
    """Return the address that was set, else the one of the default route; loopback without a network."""
    if _told:
        return _told[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): picks a route, sends nothing
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def network_interfaces() -> Iterator[tuple[str, str, int]]:
    """Yield name, address and MTU of each network interface that is up and has an IPv4 address; for Linux alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags, address, mtu = (
                    fcntl.ioctl(probe.fileno(), what, request) for what in (_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFMTU)
                )
            except OSError:
                continue  # without an IPv4 address
            if struct.unpack_from("H", flags, 16)[0] & _INTERFACE_UP:
                yield name, socket.inet_ntoa(address[20:24]), struct.unpack_from("i", mtu, 16)[0]


def bind_socket(host: str, port: int = 0, *, shared: bool = False) -> socket.socket:
    """Return a bound TCP socket; by default the system chooses the port. Raises OSError.

    It is bound to all interfaces if the address is not this machine's, but that of a router which forwards to it.

    Args:
        shared: let a server with SO_REUSEADDR, as those of gRPC, bind the same port while this socket keeps it from
            all others. Never listen on such a socket.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made


def bind_with_loopback(host: str) -> tuple[socket.socket, socket.socket]:
    """Return sockets at one port of an address and of loopback, for servers that both can reach.

    Both are one socket if the first covers loopback. Raises OSError if no port is free at both.
    """
    for attempt in reversed(range(_ATTEMPTS)):
        outer = bind_socket(host)
        address, port = outer.getsockname()
        if address in (LOOPBACK, "0.0.0.0"):
            return outer, outer
        try:
            return outer, bind_socket(LOOPBACK, port)
        except OSError:
            outer.close()
            if not attempt:
                raise
    raise AssertionError("the last attempt returns or raises")


NO_DEADLINE = float("inf")
LOST_PEER_REMEDY = "look at the rank that failed first"
_BACKLOG = 512  # connections that wait to be accepted
_MAX_BUFFERS = 64  # buffers in one call; the system takes 1024
_MAX_TIMEOUT_S = 1e6  # the longest timeout that a socket takes
_LENGTH = struct.Struct(">Q")  # before each message of a FramedConnection


def remaining_s(until: float) -> float:
    """Return the seconds left until a deadline on the clock of `time.monotonic`.

    It is never zero: a call that is late still takes the bytes that have arrived.
    """
    return min(max(until - time.monotonic(), 1e-3), _MAX_TIMEOUT_S)


def connection_lost(peer: str, error: OSError) -> PeerLost:
    """Return the error for a connection that broke or missed its deadline."""
    late = isinstance(error, TimeoutError)
    what = "did not answer within the deadline" if late else f"closed the connection ({error})"
    return PeerLost(f"{peer} {what}", remedy=LOST_PEER_REMEDY)


def set_keepalive(connection: socket.socket, *, idle_s: int = 30, interval_s: int = 10, probes: int = 6) -> None:
    """Let TCP send small messages at once, and notice a dead machine after `idle_s` + `probes` x `interval_s` seconds.

    Unix sockets need neither.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", idle_s), ("TCP_KEEPINTVL", interval_s), ("TCP_KEEPCNT", probes)):
        if hasattr(socket, name):
            with suppress(OSError):  # the system has the name but not the option
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wait_for(event: int, until: float, *of: socket.socket) -> socket.socket:
    """Wait for an event of `select.poll` on one of several sockets, or for its end, and return that one.

    Raises TimeoutError at a deadline on the clock of `time.monotonic` (NO_DEADLINE is none), OSError if one is closed.
    """
    poll, sockets = select.poll(), {each.fileno(): each for each in of}
    if -1 in sockets:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    for descriptor in sockets:
        poll.register(descriptor, event)
    ready = poll.poll(None if until == NO_DEADLINE else 1000 * remaining_s(until))
    if not ready:
        raise TimeoutError("timed out")
    return sockets[ready[0][0]]


class SocketListener:
    """A listening TCP socket on a port that the system chose and, on Linux, a Unix socket beside it.

    Args:
        host: address to listen on.
        unix: listen on the Unix socket too. Its name follows from host and port; it is abstract, not a file.
    """

    def __init__(self, host: str, *, unix: bool = True) -> None:
        self.tcp = bind_socket(host)
        self.tcp.listen(_BACKLOG)
        self.address = Address(host=host, port=self.tcp.getsockname()[1])
        self.local: socket.socket | None = None
        if unix and shared_memory.HAS_SHARED_MEMORY:
            self.local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self.local.bind(unix_socket_name(self.address))
                self.local.listen(_BACKLOG)
            except OSError:  # another process has that name: all connections come over TCP
                self.local.close()
                self.local = None

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The sockets that listen."""
        return (self.tcp,) if self.local is None else (self.tcp, self.local)

    def accept(self, until: float) -> socket.socket:
        """Wait for the next connection. Raises OSError at a deadline and after `cut`; NO_DEADLINE is none."""
        ready = wait_for(select.POLLIN, until, *self.sockets)
        return ready.accept()[0]

    def cut(self) -> None:
        """Stop listening, from any thread: a blocked `accept` raises."""
        for listening in self.sockets:
            with suppress(OSError):  # it may be closed already
                listening.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and free port and name."""
        for listening in self.sockets:
            listening.close()


class ConnectionCanceller:
    """Lets any thread end the connection that one thread opens; later ones are refused.

    Attributes:
        off: `cut` was called.
    """

    def __init__(self) -> None:
        self.off = False
        self._connection: socket.socket | None = None

    def hold(self, connection: socket.socket) -> None:
        """Let `cut` end this connection. Call it before and after connecting. Raises OSError after `cut`."""
        self._connection = connection
        if self.off:  # read last, as `cut` sets it first: one of the two threads sees the other
            raise ConnectionAbortedError("cut")

    def cut(self) -> None:
        """End the connection, and refuse others, from any thread."""
        self.off = True
        if self._connection is not None:
            with suppress(OSError):  # it is not connected yet, or has ended
                self._connection.shutdown(socket.SHUT_RDWR)


def connect(
    address: str | tuple[str, int], until: float, canceller: ConnectionCanceller | None = None
) -> socket.socket:
    """Connect over TCP, or to a Unix socket of this user by its name. Raises OSError."""
    local = isinstance(address, str)
    connection = socket.socket(socket.AF_UNIX if local else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if canceller is not None:
            canceller.hold(connection)
        connection.settimeout(remaining_s(until))
        connection.connect(address)
        if canceller is not None:
            canceller.hold(connection)
        if local and not peer_is_same_user(connection):
            raise ConnectionError("the server runs as another user")
        set_keepalive(connection)
    except OSError:
        connection.close()
        raise
    return connection


def unix_socket_name(address: Address) -> str:
    """Return the name of the abstract Unix socket that belongs to a TCP address.

    Both belong to one network namespace, where one server alone has the address: a process that finds the name is on
    that server's machine. Another user may take the name; `peer_is_same_user` detects that.
    """
    return f"\0trainwright/{address.host}/{address.port}"


def peer_is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this process's user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


# --- Bytes ------------------------------------------------------------------------------------------------------------


class OutgoingBuffers:
    """Buffers to send one after the other, and a file descriptor that goes with the first byte."""

    def __init__(self, buffers: Sequence[bytes | memoryview], file: int | None = None) -> None:
        self.views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        self.file = file

    @property
    def left(self) -> int:
        """Bytes still to send."""
        return sum(map(len, self.views))

    def sent(self, count: int) -> None:
        """Drop the next `count` bytes, which the socket has taken."""
        self.file = None
        done = 0
        while done < len(self.views) and count >= len(self.views[done]):
            count -= len(self.views[done])
            done += 1
        del self.views[:done]
        if count:
            self.views[0] = self.views[0][count:]


def send_available(connection: socket.socket, pieces: OutgoingBuffers, flags: int = 0) -> bool:
    """Send what the socket takes now; return whether that was all. Raises OSError except BlockingIOError.

    The socket must not block, by itself or by the flags.
    """
    while pieces.views:
        files = [] if pieces.file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pieces.file]))]
        try:
            pieces.sent(connection.sendmsg(pieces.views[:_MAX_BUFFERS], files, flags))
        except BlockingIOError:
            return False
    return True


def receive_available(connection: socket.socket, into: memoryview, *, files: bool) -> tuple[int, int | None]:
    """Receive what has arrived: the number of bytes (0: none now), and the file descriptor that came with them.

    Raises OSError, also at the end of the stream.
    """
    try:
        if not files:
            count, found = connection.recv_into(into, 0, socket.MSG_WAITALL), None
        else:
            count, ancillary, _, _ = connection.recvmsg_into([into], socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
            rights = (data for *kind, data in ancillary if kind == [socket.SOL_SOCKET, socket.SCM_RIGHTS])
            found = next((array.array("i", data[:4])[0] for data in rights), None)
    except BlockingIOError:
        return 0, None
    if not count:
        raise ConnectionError("end of stream")
    return count, found


def receive_exactly(connection: socket.socket, into: memoryview, until: float) -> int | None:
    """Fill `into`; return the file descriptor that came with the bytes of a Unix socket, if any.

    `until` is on the clock of `time.monotonic`; with NO_DEADLINE the socket's own timeout stays. Raises OSError.
    """
    files = connection.family == getattr(socket, "AF_UNIX", None)
    found = None
    while len(into):
        if until != NO_DEADLINE:
            connection.settimeout(remaining_s(until))
        count, file = receive_available(connection, into, files=files)
        found = file if found is None else found
        into = into[count:]
    return found


# --- The handshake ----------------------------------------------------------------------------------------------------


NONCE_BYTES = MAC_BYTES = 32
HANDSHAKE_S = 5.0  # for a member to answer the nonce
_CLAIM_FORMAT = struct.Struct(f"!I{NONCE_BYTES}s{MAC_BYTES}s")
CLAIM_BYTES = _CLAIM_FORMAT.size


def new_nonce() -> bytes:
    """Return the random bytes that a server sends first over each connection."""
    return secrets.token_bytes(NONCE_BYTES)


def member_claim(key: bytes, challenge: bytes, rank: int) -> tuple[bytes, bytes]:
    """Return a member's message of `CLAIM_BYTES`, and the answer that only a server with the key can give."""
    own = new_nonce()
    said = _CLAIM_FORMAT.pack(rank, own, _mac(key, b"member", challenge, own, rank))
    return said, _mac(key, b"server", challenge, own, rank)


def verify_claim(key: bytes, challenge: bytes, said: bytes | bytearray | memoryview) -> tuple[int, bytes]:
    """Return the rank of the member that sent a claim, and the server's answer.

    Raises ConnectionError for a claim made without the key.
    """
    rank, other, mac = _CLAIM_FORMAT.unpack(said)
    if not hmac.compare_digest(mac, _mac(key, b"member", challenge, other, rank)):
        raise ConnectionError("the peer does not know the group's key")
    return int(rank), _mac(key, b"server", challenge, other, rank)


def authenticate(connection: socket.socket, key: bytes, rank: int, until: float) -> None:
    """Do the member's side over a blocking socket; `until` is on the clock of `time.monotonic`.

    Raises OSError with the socket closed.
    """
    try:
        said, expected = member_claim(key, _received(connection, NONCE_BYTES, until), rank)
        connection.sendall(said)
        if not hmac.compare_digest(_received(connection, MAC_BYTES, until), expected):
            raise ConnectionError("the server does not know the group's key")
    except OSError:
        connection.close()
        raise


def connect_over_tcp(
    address: Address, key: bytes, rank: int, until: float, peer: str, canceller: ConnectionCanceller | None = None
) -> socket.socket:
    """Connect to a member that listens at an address, and do the handshake as `rank`. Raises PeerLost."""
    try:
        connection = connect((address.host, address.port), until, canceller)
    except OSError as error:
        raise PeerLost(f"{peer} cannot be reached ({error})", remedy=LOST_PEER_REMEDY) from error
    try:
        authenticate(connection, key, rank, until)
    except OSError as error:
        raise connection_lost(peer, error) from error
    return connection


def authenticate_peer(connection: socket.socket, key: bytes, until: float) -> int:
    """Do the server's side over a blocking socket, and return the member's rank. Raises OSError."""
    challenge = new_nonce()
    connection.settimeout(remaining_s(until))
    connection.sendall(challenge)
    rank, proof = verify_claim(key, challenge, _received(connection, CLAIM_BYTES, until))
    connection.sendall(proof)
    return rank


def _mac(key: bytes, role: bytes, challenge: bytes, other: bytes, rank: int) -> bytes:
    if not key:
        raise ValueError("the group has no key: give all ranks of a Group the same one")
    return hmac.digest(key, role + challenge + other + struct.pack("!I", rank), hashlib.sha256)


def _received(connection: socket.socket, size: int, until: float) -> bytes:
    data = bytearray(size)
    receive_exactly(connection, memoryview(data), until)
    return bytes(data)


# --- Messages between two members of a group --------------------------------------------------------------------------


class FramedConnection:
    """A connection to one peer that carries whole messages, each after its length.

    Args:
        connection: after the handshake.
        peer: the other end, in words for errors.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket, self.peer = connection, peer
        set_keepalive(connection, idle_s=10, interval_s=5, probes=4)  # a dead host is noticed within half a minute

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, payload: bytes, until: float) -> None:
        """Send one message; `until` is on the clock of `time.monotonic`. Raises PeerLost."""
        try:
            self._socket.settimeout(remaining_s(until))
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise connection_lost(self.peer, error) from error

    def receive(self, until: float, limit: int | None = None) -> bytes:
        """Receive one message, of at most `limit` bytes. Raises PeerLost."""
        try:
            self._socket.settimeout(None if until == NO_DEADLINE else remaining_s(until))
            (size,) = _LENGTH.unpack(_received(self._socket, _LENGTH.size, until))
            if limit is not None and size > limit:
                raise ConnectionError(f"a message of {size} bytes, at most {limit} are allowed")
            return _received(self._socket, size, until)
        except OSError as error:
            raise connection_lost(self.peer, error) from error

    def cut(self) -> None:
        """End the connection, from any thread: a blocked call of another thread raises."""
        with suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and free it. Only from the thread that uses it."""
        self.cut()
        self._socket.close()


def accept_member(listener: SocketListener, key: bytes, until: float) -> tuple[int, FramedConnection] | None:
    """Wait for a connection and its handshake: the member's rank and connection; None for a peer without the key.

    Raises OSError at the deadline, and once the listener is cut.
    """
    connection = listener.accept(until)
    try:
        rank = authenticate_peer(connection, key, min(until, time.monotonic() + HANDSHAKE_S))
    except OSError:
        connection.close()
        return None
    return rank, FramedConnection(connection, f"rank {rank}")


def join_group(address: Address, key: bytes, rank: int, until: float, peer: str) -> FramedConnection:
    """Connect to a member that listens at an address, and do the handshake as `rank`. Raises PeerLost."""
    return FramedConnection(connect_over_tcp(address, key, rank, until, peer), peer)
