"""Strangers who connect to a server in numbers, and a server that has no descriptor left."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

import pytest

from tests.support.channel_server import PLACES, joined, serving, soon
from trainwright.strategies.common.socket_transport import NONCE_BYTES
from trainwright.strategies.ps import server_connections


def test_of_many_strangers_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connections, "MAX_UNKNOWN_CONNECTIONS", 3)
    with serving("tcp") as server, ExitStack() as stack:
        address = (server.peer.address.host, server.peer.address.port)
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(6)]
        while gone(strangers) < 3:
            assert server.quiet(0.005)
        with joined(server) as link:
            link.call(b"hi", soon())
            assert server.call().head == b"hi"
        assert gone(strangers) == 4


def gone(strangers: Sequence[socket.socket]) -> int:
    """How many were sent away: the oldest."""
    ended = []
    for stranger in strangers:
        stranger.setblocking(False)
        try:
            ended.append(end_of(stranger))
        except BlockingIOError:
            ended.append(False)
    assert ended == sorted(ended, reverse=True)
    return sum(ended)


def end_of(stranger: socket.socket) -> bool:
    """Read what the server says first to everybody, to the end of the stream."""
    while stranger.recv(NONCE_BYTES):
        pass
    return True


@pytest.mark.parametrize("place", PLACES)
def test_a_process_without_descriptors_makes_room_or_waits_and_never_spins(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connections, "PAUSE_S", 0.2)
    accept, tried = socket.socket.accept, list[float]()

    def full(self: socket.socket) -> tuple[socket.socket, object]:
        if len(tried) < 3:
            tried.append(time.monotonic())
            raise OSError(errno.EMFILE, "too many open files")
        return accept(self)

    with serving(place) as server, joined(server) as link:
        address = (server.peer.address.host, server.peer.address.port)
        with socket.create_connection(address) as stranger:
            while not select.select([stranger], [], [], 0)[0]:  # the server greets everybody that it accepts
                assert server.quiet(0.005)
            monkeypatch.setattr(socket.socket, "accept", full)
            with joined(server, 2) as second:
                stranger.settimeout(10)
                assert end_of(stranger)
                for one in (link, second):
                    one.call(b"hi", soon())
                    assert server.call().head == b"hi"
        apart = [after - before for before, after in pairwise(tried)]
        assert len(tried) == 3 and apart[0] < 0.2 <= apart[1], "a stranger made room, then none was left"
