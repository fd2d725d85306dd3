"""gloo's sockets are found through its epoll instances, and ended so that no write fails before gloo sees the end."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from trainwright.strategies.torch.distributed import process_group


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = stack.enter_context(socket.create_connection(listening.getsockname()))
        other, _ = listening.accept()
        yield one, stack.enter_context(other)


def test_what_gloo_watches_is_shut_for_reading_and_can_still_be_written(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """A write that fails is a collective that hangs: gloo forgets it when it ends the connection."""
    own, peer = ends
    before = process_group.epoll_instances()
    with select.epoll() as loop:
        os.set_inheritable(loop.fileno(), True)  # gloo's own have no close-on-exec flag, by which they are found
        assert process_group.epoll_instances() - before == {loop.fileno()}
        loop.register(own, select.EPOLLIN)
        assert not loop.poll(0)
        assert process_group.shut_connections(process_group.epoll_instances() - before) == 1
        assert loop.poll(5.0), "gloo is woken"
    own.settimeout(5.0)
    assert own.recv(1) == b"", "and reads the end"
    own.sendall(b"said before the end was seen")
    assert peer.recv(100) == b"said before the end was seen"


def test_a_connection_to_the_store_is_shut_both_ways(ends: tuple[socket.socket, socket.socket]) -> None:
    own, peer = ends
    assert process_group.shut_port_connections(peer.getsockname()[1]) >= 1
    own.settimeout(5.0)
    assert own.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        own.sendall(b"too late")
