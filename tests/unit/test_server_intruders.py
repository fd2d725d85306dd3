"""Who is not a member gets nowhere, and a member that says nonsense loses its connection alone."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.threaded_servers import KEY, STEPS, Cluster, assert_close, cluster
from trainwright.core.errors import PeerLost
from trainwright.core.topology import Address, Generation, Group, Peer
from trainwright.driver.driver_state import GroupMember
from trainwright.driver.dynamic_members import group_for
from trainwright.driver.run_policy import RunPolicy
from trainwright.driver.state_machine import begin_run
from trainwright.strategies.common import shared_memory, socket_transport
from trainwright.strategies.common.socket_transport import (
    ConnectionCanceller,
    SocketListener,
    accept_member,
    join_group,
)
from trainwright.strategies.ps.client_connection import ServerConnection, connect_to_server
from trainwright.strategies.ps.server_connections import FrameHeader, FrameKind
from trainwright.strategies.tensorflow.coordinator_engine import MemberConnection, MemberRegistry, free_address

UNIT: dict[str, Any] = {"worker": "w", "unit": [0, 0, 1], "at": 0}
PUSH: dict[str, Any] = {
    **UNIT, "do": "push", "seen": 0, "weight": 1.0, "keep": False, "sums": [[1.0, 1.0]], "norm": 1.0
}  # fmt: skip
MALFORMED: dict[str, bytes] = {
    "no JSON": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "no call": b"{}",
    "a call of another kind": b'{"do": ["pull"]}',
    "an unknown call": b'{"do": "drop table"}',
    **{
        name: json.dumps(head).encode()
        for name, head in {
            "a pull without fields": {"do": "pull"},
            "a pull of words": {"do": "pull", "needs": "all", "have": [0, 0]},
            "a pull that has a number": {"do": "pull", "needs": 0, "have": 3},
            "a push of nothing": PUSH,
            "a push of an unknown share": {**PUSH, "unit": [0, 99, 1]},
            "a push of a unit that is none": {**PUSH, "unit": [0, 0]},
            "a push of a step that nobody was given": {**PUSH, "unit": [7, 0, 1], "weight": 0.0},
            "a push without sums": {**PUSH, "sums": [], "weight": 0.0},
            "a push of an endless weight": {**PUSH, "weight": float("inf")},
            "a lease for nobody": {"do": "lease", "worker": None, "prefer": 0, "first": 0},
            "done without a push": {"do": "done", **UNIT, "unit": [0, 2, 1]},
            "a worker that hears": {"do": "poll"},
            "a worker that speaks for a server": {"do": "report", "part": [0, -1.0]},
        }.items()
    },
}


@pytest.fixture
def own() -> Iterator[Cluster]:
    with cluster("dividing", 1, 1) as made:
        yield made


def member(own: Cluster, key: bytes = KEY) -> ServerConnection:
    """A connection of rank 1 to the server."""
    return connect_to_server(own.peers[0], key, 1, time.monotonic() + 10.0, ConnectionCanceller())


@pytest.mark.parametrize("said", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("moment", ["before the first step", "while it serves"])
def test_a_malformed_call_ends_its_connection_and_not_the_server(own: Cluster, said: bytes, moment: str) -> None:
    serving = own.serve() if moment == "while it serves" else []
    if serving:
        own.work(own.workers[0], 1).result(30.0)  # a round is given out
    link = member(own)
    link.call(said, time.monotonic() + 10.0)
    with pytest.raises(PeerLost, match="closed the connection"):
        link.answer(time.monotonic() + 10.0)
    link.close()
    serving = serving or own.serve()
    own.work(own.workers[0]).result(30.0)
    assert len(own.reports(serving)) == STEPS
    assert_close(own.parameters(), own.by_hand()[2])


def test_memory_that_is_none_ends_its_connection_and_not_the_server(own: Cluster) -> None:
    link = member(own)
    assert link.shared
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    link._send([FrameHeader(FrameKind.OUTBOX, size=0).pack()], time.monotonic() + 5.0, empty)
    with pytest.raises(PeerLost):
        link.call(b"{}", time.monotonic() + 5.0)
        link.answer(time.monotonic() + 5.0)
    link.close()
    os.close(empty)
    own.run()
    assert_close(own.parameters(), own.by_hand()[2])


@pytest.mark.parametrize("shared", [True, False])
def test_who_knows_the_generation_and_not_its_key_is_not_let_in(
    own: Cluster, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "HAS_SHARED_MEMORY", shared)
    with pytest.raises(PeerLost, match="closed the connection"):
        member(own, b"another key")
    own.run()
    assert_close(own.parameters(), own.by_hand()[2])


def test_a_server_that_does_not_know_the_key_is_told_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(socket_transport.new_nonce() + bytes(socket_transport.MAC_BYTES))
        with pytest.raises(ConnectionError, match="the server does not know the group's key"):
            socket_transport.authenticate(ours, KEY, 1, time.monotonic() + 5.0)


def test_a_group_without_a_key_does_not_form() -> None:
    with pytest.raises(ValueError, match="the group has no key"):
        socket_transport.member_claim(b"", socket_transport.new_nonce(), 1)


def test_each_generation_of_each_driver_has_a_key_that_nothing_shows() -> None:
    first, second = Generation(token=1, number=1), Generation(token=1, number=2)
    ours = RunPolicy.of(workers=2, total_steps=1, steps_per_epoch=1, secret=b"our own secret")
    theirs = ours.with_fields(secret=b"another driver's")
    keys = {ours.world.key_of(first), ours.world.key_of(second), theirs.world.key_of(first)}
    assert len(keys) == 3 and min(map(len, keys)) == 32
    state, _ = begin_run(ours, 0.0)
    group = group_for(state.with_fields(members=(GroupMember(worker=0, slot=0),), generation=second), 0)
    assert group.key == ours.world.key_of(second)
    assert repr(group.key) not in repr(group) and repr(ours.world.secret) not in repr(ours)


def test_a_chief_of_tensorflow_seats_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_transport, "_told", ["127.0.0.1"])
    seats = MemberRegistry()
    peers = tuple(Peer(rank=rank, address=seats.address) for rank in range(2))
    group = Group(generation=Generation(token=1, number=1), rank=0, peers=peers, key=KEY, deadline_s=20.0)
    seats.open(group)
    served: list[Address] = []
    try:
        with socket.create_connection((seats.address.host, seats.address.port)) as noisy:
            noisy.sendall(json.dumps({"rank": 1, "generation": "1.1"}).encode() * 9)
            with pytest.raises(PeerLost, match="the chief closed the connection"):
                MemberConnection(replace(group, rank=1, key=b"another key"), served.append)
            assert served == []
        member = MemberConnection(replace(group, rank=1), served.append)
        assert seats.gather(group, time.monotonic() + 20.0) == {1: served[0]}
        member.leave()
        member._chief.close()
    finally:
        seats.end()


def test_a_port_that_another_process_has_for_now_is_waited_for() -> None:
    """TensorFlow knows a member by its address: the process that replaces another one needs its port."""
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    refused = pytest.raises(PeerLost, match=f"port {port}, by which TensorFlow knows this rank, cannot be bound")
    with refused, free_address("127.0.0.1", port, time.monotonic() + 0.2):
        raise AssertionError("it is taken")
    threading.Timer(0.3, taken.close).start()
    with free_address("127.0.0.1", port, time.monotonic() + 20.0) as address:
        assert address == Address(host="127.0.0.1", port=port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


NO_ADDRESS = {
    "no JSON": b"\xff\xfe",
    "deep": b"[" * 4000,
    "a list": b"[]",
    "no port": b'{"host": "127.0.0.1"}',
    "a port of words": b'{"host": "127.0.0.1", "port": "first"}',
    "an endless port": b'{"host": "127.0.0.1", "port": Infinity}',
    "a port that is none": b'{"host": "127.0.0.1", "port": 70000}',
    "more than an address has": b" " * 5000,
}


@pytest.mark.parametrize("said", NO_ADDRESS.values(), ids=NO_ADDRESS)
def test_a_malformed_address_ends_its_connection_and_not_the_chief(
    said: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket_transport, "_told", ["127.0.0.1"])
    registry = MemberRegistry()
    peers = tuple(Peer(rank=rank, address=registry.address) for rank in range(2))
    group = Group(generation=Generation(token=1, number=1), rank=0, peers=peers, key=KEY, deadline_s=20.0)
    until = time.monotonic() + 20.0
    registry.open(group)
    served: list[Address] = []
    try:
        with caplog.at_level(logging.WARNING):
            link = join_group(registry.address, KEY, 1, until, "the chief")
            link.receive(until)
            link.send(said, until)
            with pytest.raises(PeerLost, match="closed the connection"):
                link.receive(until)
            link.close()
        assert "the chief ends the connection of rank 1: rank 1" in caplog.text
        member = MemberConnection(replace(group, rank=1), served.append)
        assert registry.gather(group, until) == {1: served[0]}
        member.leave()
        member._chief.close()
    finally:
        registry.end()


@pytest.mark.parametrize("said", NO_ADDRESS.values(), ids=NO_ADDRESS)
def test_a_malformed_answer_of_the_chief_is_a_lost_peer(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_transport, "_told", ["127.0.0.1"])
    listener = SocketListener("127.0.0.1", unix=False)
    peers = tuple(Peer(rank=rank, address=listener.address) for rank in range(2))
    group = Group(generation=Generation(token=1, number=1), rank=1, peers=peers, key=KEY, deadline_s=20.0)

    def chief() -> None:
        joined = accept_member(listener, KEY, time.monotonic() + 20.0)
        assert joined is not None
        joined[1].send(said, time.monotonic() + 20.0)
        joined[1].close()

    thread = threading.Thread(target=chief)
    thread.start()
    served: list[Address] = []
    with pytest.raises(PeerLost, match="the chief"):
        MemberConnection(group, served.append)
    assert served == []
    thread.join()
    listener.close()
