"""Frames between processes over TCP, with a deadline on every wait, and the star that collectives run on."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from tests.support.reference.model import Array
from trainwright.core.errors import PeerLost
from trainwright.core.topology import Address, Group, Peer
from trainwright.strategies.common import socket_transport
from trainwright.strategies.common.socket_transport import LOST_PEER_REMEDY, connection_lost, remaining_s

_HEADER = struct.Struct(">Q")
_COMPLETE = b"complete"


class _PeerLink:
    """A connection to one peer."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket, self.peer = connection, peer
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, payload: bytes, until: float) -> None:
        """Send one frame; `until` is on the clock of `time.monotonic`. Raises PeerLost."""
        try:
            self._socket.settimeout(remaining_s(until))
            self._socket.sendall(_HEADER.pack(len(payload)) + payload)
        except OSError as error:
            raise connection_lost(self.peer, error) from error

    def receive(self, until: float, limit: int | None = None) -> bytes:
        """Receive one frame, of at most `limit` bytes. Raises PeerLost."""
        try:
            (size,) = _HEADER.unpack(self._exactly(_HEADER.size, until))
            if limit is not None and size > limit:
                raise ConnectionError("a frame too long")
            return self._exactly(size, until)
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

    def _exactly(self, size: int, until: float) -> bytes:
        buffer = bytearray(size)
        view, have = memoryview(buffer), 0
        while have < size:
            self._socket.settimeout(remaining_s(until))
            count = self._socket.recv_into(view[have:])
            if not count:
                raise ConnectionError("end of stream")
            have += count
        return bytes(buffer)


class ReservedPort:
    """A listening socket on a port that the system chose; kept from `reserve` on, so that nobody else gets it."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), backlog=128)
        self.address = Address(host=host, port=self._socket.getsockname()[1])

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def accept(self, key: bytes, until: float) -> tuple[int, _PeerLink] | None:
        """Wait for a member, which knows the group's key: its rank and link. None for a stranger. Raises PeerLost."""
        try:
            self._socket.settimeout(remaining_s(until))
            connection, _ = self._socket.accept()
        except OSError as error:
            raise PeerLost("no other rank joined within the deadline", remedy=LOST_PEER_REMEDY) from error
        try:
            rank = socket_transport.authenticate_peer(
                connection, key, min(until, time.monotonic() + socket_transport.HANDSHAKE_S)
            )
        except OSError:
            connection.close()
            return None
        return rank, _PeerLink(connection, f"rank {rank}")

    def cut(self) -> None:
        """Stop listening, from any thread."""
        with suppress(OSError):  # it may be closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and free the port."""
        self._socket.close()


def _connect(peer: Peer, key: bytes, rank: int, until: float) -> _PeerLink:
    """Connect to a peer that has reserved its port, and prove each other by the key. Raises PeerLost."""
    try:
        connection = socket.create_connection((peer.address.host, peer.address.port), remaining_s(until))
    except OSError as error:
        raise PeerLost(f"rank {peer.rank} cannot be reached ({error})", remedy=LOST_PEER_REMEDY) from error
    try:
        socket_transport.authenticate(connection, key, rank, until)
    except OSError as error:
        connection.close()
        raise connection_lost(f"rank {peer.rank}", error) from error
    return _PeerLink(connection, f"rank {peer.rank}")


class StarGroup:
    """All ranks of a group, linked through rank 0. Sums run in rank order, so they repeat bitwise.

    Rank 0 accepts on `port`, the others dial it; `open` returns when all are there.
    """

    def __init__(self, group: Group, port: ReservedPort) -> None:
        self.group, self._port = group, port
        self._links: dict[int, _PeerLink] = {}
        self._end = False

    def open(self) -> None:
        """Meet the others. Raises PeerLost at the deadline."""
        until = self.until()
        if self.group.rank:
            self._add(0, _connect(self.group.peers[0], self.group.key, self.group.rank, until))
            self._links[0].receive(until, len(_COMPLETE))
        else:
            self._gather_members(until)
            for rank in self.others:
                self._links[rank].send(_COMPLETE, until)
        self._port.close()

    @property
    def others(self) -> range:
        """Ranks that rank 0 leads."""
        return range(1, self.group.size)

    def until(self) -> float:
        """The end of a wait that begins now, on the clock of `time.monotonic`."""
        return time.monotonic() + self.group.deadline_s

    def sum(self, vector: Array) -> Array:
        """The sum of all ranks' vectors, the same bits on every rank. Raises PeerLost."""
        until = self.until()
        if self.group.rank:
            self.send(0, vector.tobytes(), until)
            return np.frombuffer(self.receive(0, until), np.float64)
        received = self.gather(until)
        total = vector.copy()
        for rank in self.others:
            total += np.frombuffer(received[rank], np.float64)
        self.broadcast(total.tobytes(), until)
        return total

    def relay(self, source: int, targets: Iterable[int], payload: bytes, until: float) -> bytes:
        """Bring `payload` of `source` to the targets by way of rank 0; every rank calls it.

        Returns what this rank now holds: the payload where it is source or target, else nothing.
        """
        rank, wanted = self.group.rank, set(targets)
        if rank == source and rank:
            self.send(0, payload, until)
        if rank == 0:
            payload = self.receive(source, until) if source else payload
            for target in sorted(wanted - {0, source}):
                self.send(target, payload, until)
        elif rank in wanted - {source}:
            payload = self.receive(0, until)
        return payload if rank in wanted | {source} else b""

    def gather(self, until: float) -> dict[int, bytes]:
        """One frame of every other rank, at rank 0. The first that is lost ends the wait for the others."""
        frames: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for rank in self.others:
                selector.register(self._links[rank], selectors.EVENT_READ, rank)
            while len(frames) < len(self.others):
                ready = selector.select(remaining_s(until))
                if not ready:
                    late = [rank for rank in self.others if rank not in frames]
                    raise PeerLost(f"ranks {late} did not answer within the deadline", remedy=LOST_PEER_REMEDY)
                for key, _ in ready:
                    frames[key.data] = self.receive(key.data, until)
                    selector.unregister(key.fileobj)
        return frames

    def broadcast(self, payload: bytes, until: float) -> None:
        """Send one frame to every other rank, from rank 0."""
        for rank in self.others:
            self.send(rank, payload, until)

    def send(self, rank: int, payload: bytes, until: float) -> None:
        """Send a frame to a rank that this one is linked to."""
        self._links[rank].send(payload, until)

    def receive(self, rank: int, until: float) -> bytes:
        """Receive a frame of a rank that this one is linked to."""
        return self._links[rank].receive(until)

    def cut(self) -> None:
        """End all connections, from any thread: the others notice at once, a blocked call raises."""
        self._end = True
        self._port.cut()
        for link in tuple(self._links.values()):
            link.cut()

    def close(self) -> None:
        """End and free all connections."""
        self._end = True
        self._port.close()
        for link in self._links.values():
            link.close()

    def _gather_members(self, until: float) -> None:
        while len(self._links) < len(self.others):
            joined = self._port.accept(self.group.key, until)
            if joined is None:
                continue
            rank, link = joined
            if rank not in self.others or rank in self._links:
                link.close()
                continue
            self._add(rank, link)

    def _add(self, rank: int, link: _PeerLink) -> None:
        self._links[rank] = link
        if self._end:  # cut by another thread just before
            link.cut()
