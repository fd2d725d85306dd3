"""The star of connections that the collective reference engines run on, with a deadline on every wait."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable

import numpy as np

from tests.support.reference.model import Array
from trainwright.core.errors import PeerLost
from trainwright.core.topology import Group
from trainwright.strategies.common.socket_transport import (
    LOST_PEER_REMEDY,
    FramedConnection,
    SocketListener,
    accept_member,
    join_group,
    remaining_s,
)

_COMPLETE = b"complete"


class StarGroup:
    """All ranks of a group, linked through rank 0. Sums run in rank order, so they repeat bitwise.

    Rank 0 accepts on `port`, the others dial it; `open` returns when all are there.
    """

    def __init__(self, group: Group, port: SocketListener) -> None:
        self.group, self._port = group, port
        self._links: dict[int, FramedConnection] = {}
        self._end = False

    def open(self) -> None:
        """Meet the others. Raises PeerLost at the deadline."""
        until = self.until()
        if self.group.rank:
            chief = self.group.peers[0].address
            self._add(0, join_group(chief, self.group.key, self.group.rank, until, "rank 0"))
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
            try:
                joined = accept_member(self._port, self.group.key, until)
            except OSError as error:
                raise PeerLost("no other rank joined within the deadline", remedy=LOST_PEER_REMEDY) from error
            if joined is None:
                continue
            rank, link = joined
            if rank not in self.others or rank in self._links:
                link.close()
                continue
            self._add(rank, link)

    def _add(self, rank: int, link: FramedConnection) -> None:
        self._links[rank] = link
        if self._end:  # cut by another thread just before
            link.cut()
