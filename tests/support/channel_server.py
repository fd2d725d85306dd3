"""A parameter server that publishes known bytes, and the workers that join it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from trainwright.core.topology import Peer
from trainwright.strategies.common import shared_memory, socket_transport
from trainwright.strategies.common.shared_memory import SharedRegion
from trainwright.strategies.ps.client_connection import ServerConnection, connect_to_server
from trainwright.strategies.ps.server_connections import (
    WorkerCall,
    WorkerConnection,
    WorkerConnections,
    WorkerDisconnected,
)

FIRST, SECOND = b"the key of the first generation", b"the key of the second"
PLACES = ("shared", "tcp")


class Server:
    """Lines with a region of the bytes 0, 1, 2 ... and what the tests want of them."""

    def __init__(self, place: str, deadline_s: float = 10.0, size: int = 4096) -> None:
        listener = _listener(place)
        self.lines = WorkerConnections(listener, FIRST, deadline_s=deadline_s)
        self.peer = Peer(rank=0, address=listener.address, role="server")
        self.region = SharedRegion(size)
        np.frombuffer(self.region.view, np.uint8)[:] = np.resize(np.arange(251, dtype=np.uint8), size)
        self.lines.publish(self.region)

    def next(self, within_s: float = 5.0) -> WorkerCall | WorkerDisconnected:
        """The next event, which must be the only one."""
        events = self.lines.wait(time.monotonic() + within_s)
        assert len(events) == 1, events
        return events[0]

    def quiet(self, for_s: float = 0.05) -> bool:
        """Whether nothing comes; what can be sent and received meanwhile is."""
        return not self.lines.wait(time.monotonic() + for_s)

    def call(self) -> WorkerCall:
        """The next event, which must be a call."""
        event = self.next()
        assert isinstance(event, WorkerCall)
        return event

    def gone(self) -> WorkerConnection:
        """The next event, which must be an end."""
        event = self.next()
        assert isinstance(event, WorkerDisconnected)
        return event.connection


def _listener(place: str) -> socket_transport.SocketListener:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "HAS_SHARED_MEMORY", place == "shared")
        return socket_transport.SocketListener("127.0.0.1")


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def serving(place: str, **options: float) -> Iterator[Server]:
    server = Server(place, **options)
    try:
        yield server
    finally:
        server.lines.close()
        server.region.close()


@contextmanager
def joined(server: Server, rank: int = 1) -> Iterator[ServerConnection]:
    """A worker that has been let in."""
    with ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(
            connect_to_server, server.peer, FIRST, rank, soon(), socket_transport.ConnectionCanceller()
        )
        while not dialling.done():
            assert server.quiet(0.005)
        link = dialling.result()
    try:
        yield link
    finally:
        link.close()
