"""Workers and a server over shared memory and over TCP, in threads of one process, and one that is killed."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.channel_server import FIRST, PLACES, SECOND, joined, serving, soon
from trainwright.core.errors import PeerLost
from trainwright.strategies.common import shared_memory, socket_transport
from trainwright.strategies.common.shared_memory import SharedRegion
from trainwright.strategies.ps import client_connection
from trainwright.strategies.ps.client_connection import connect_to_server
from trainwright.strategies.ps.server_connections import FrameHeader, FrameKind, WorkerCall, WorkerDisconnected

BIG = 24 * 2**20  # more than the buffers of a connection hold


def test_a_port_is_kept_for_a_server_of_grpc_until_it_has_it() -> None:
    with socket_transport.bind_socket("", shared=True) as held, socket.socket() as other, socket.socket() as server:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen()
        held.close()
        with socket.create_connection(("127.0.0.1", port), 5.0) as client, server.accept()[0] as accepted:
            assert accepted.getpeername() == client.getsockname()


@pytest.mark.parametrize("place", PLACES)
def test_a_push_arrives_whole_and_a_pull_lands_where_it_is_wanted(place: str) -> None:
    with serving(place) as server, joined(server) as link:
        assert link.shared == (place == "shared")
        outbox = link.open_outbox(3000, soon())
        outbox[:] = pushed = np.random.default_rng(0).bytes(3000)
        link.ready(500, 100)
        link.call(b"push", soon(), offset=8, size=2000)
        call = server.call()
        assert (call.head, bytes(call.payload), call.connection.rank) == (b"push", pushed[8:2008], 1)
        call.connection.answer(b"done")
        assert link.answer(soon()) == b"done"
        into = memoryview(bytearray(100))
        link.call(b"pull", soon(), into=into)
        server.call().connection.answer_published(b"here", 100)
        assert link.answer(soon()) == b"here"
        for start in range(0, 100, 25):
            link.pulled(start, 25, soon())
            assert bytes(into[start : start + 25]) == bytes(server.region.view[start : start + 25])
        with pytest.raises(ValueError, match="100 bytes"):
            link.pulled(50, 51, soon())


@pytest.mark.parametrize("place", PLACES)
def test_calls_are_answered_in_their_order_also_with_bytes(place: str) -> None:
    with serving(place) as server, joined(server) as link:
        rooms = [memoryview(bytearray(8)) for _ in range(3)]
        for number, room in enumerate(rooms):
            link.call(bytes([number]), soon(), into=room)
        calls: list[WorkerCall] = []
        while len(calls) < 3:
            calls += [event for event in server.lines.wait(soon()) if isinstance(event, WorkerCall)]
        assert [call.head for call in calls] == [b"\0", b"\1", b"\2"]
        for call in calls:
            call.connection.answer(call.head, b"x" * 3, memoryview(bytes([65 + call.head[0]])), b"")
        for number, room in enumerate(rooms):
            assert link.answer(soon()) == bytes([number])
            link.pulled(0, 4, soon())
            assert bytes(room) == b"xxx" + bytes([65 + number]) + bytes(4)


@pytest.mark.parametrize("place", PLACES)
def test_shared_memory_is_handed_over_anew_when_it_changes(place: str) -> None:
    with serving(place) as server, joined(server) as link:
        other = SharedRegion(50)
        other.view[:] = b"b" * 50
        for region, expected in ((server.region, bytes(range(10))), (other, b"b" * 10), (other, b"b" * 10)):
            server.lines.publish(region)
            into = memoryview(bytearray(10))
            link.call(b"pull", soon(), into=into)
            server.call().connection.answer_published(b"", 10)
            link.answer(soon())
            link.pulled(0, 10, soon())
            assert bytes(into) == expected


def test_any_ranges_made_ready_in_any_order_come_to_the_whole() -> None:
    with serving("tcp") as server, joined(server) as link:
        outbox = link.open_outbox(64, soon())

        @settings(max_examples=40)
        @given(
            ranges=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 20)), max_size=5),
            start=st.integers(0, 63), size=st.integers(0, 64), seed=st.integers(0, 9),
        )  # fmt: skip
        def check(ranges: list[tuple[int, int]], start: int, size: int, seed: int) -> None:
            size = min(size, 64 - start)
            outbox[:] = pushed = np.random.default_rng(seed).bytes(64)
            for offset, length in ranges:
                link.ready(offset, min(length, 64 - offset))
            link.call(b"", soon(), offset=start, size=size)
            call = server.call()
            assert bytes(call.payload) == pushed[start : start + size]
            call.connection.answer(b"")
            link.answer(soon())
            link.call(b"", soon(), offset=0, size=64)  # what was ready and not pushed is final until here
            server.call().connection.answer(b"")
            link.answer(soon())

        check()


@pytest.mark.parametrize("place", PLACES)
def test_an_older_generation_is_refused(place: str) -> None:
    with serving(place) as server, ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(
            connect_to_server, server.peer, SECOND, 1, soon(), socket_transport.ConnectionCanceller()
        )
        while not dialling.done():
            assert server.quiet(0.005)
        with pytest.raises(PeerLost, match="rank 0 closed the connection"):
            dialling.result()
        assert all(each.rank < 0 for each in server.lines._connections)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 9,
        socket_transport.member_claim(SECOND, socket_transport.new_nonce(), 1)[0],
        socket_transport.member_claim(FIRST, socket_transport.new_nonce(), 1)[0],
        FrameHeader(FrameKind.CALL, 99).pack(),  # and then nothing
    ],
    ids=["another protocol", "another key", "a replayed claim", "half a claim"],
)
def test_strangers_are_sent_away_and_keep_nobody_waiting(said: bytes) -> None:
    with serving("tcp", deadline_s=0.1) as server:
        address = (server.peer.address.host, server.peer.address.port)
        with socket.create_connection(address) as stranger, joined(server) as link:
            stranger.recv(socket_transport.NONCE_BYTES)
            stranger.sendall(said)
            link.call(b"hi", soon())
            assert server.call().head == b"hi"
            stranger.settimeout(0.01)
            while True:
                assert server.quiet(0.02)
                try:
                    assert stranger.recv(1) == b""
                except TimeoutError:
                    continue
                except ConnectionResetError:
                    pass
                break


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_frozen_in_the_middle_of_a_frame_stops_nobody_and_is_dropped(place: str) -> None:
    with serving(place, deadline_s=0.2) as server, joined(server, 1) as frozen, joined(server, 2) as link:
        frozen._out.sendall(FrameHeader(FrameKind.CALL, 100).pack()[:7])
        for _ in range(3):
            link.call(b"hi", soon())
            call = server.call()
            assert call.connection.rank == 2
            call.connection.answer(b"ho")
            assert link.answer(soon()) == b"ho"
        assert server.gone().rank == 1
        with pytest.raises(PeerLost):
            frozen.answer(soon())
        assert server.quiet(0.3), "who only computes is not dropped"


def test_a_worker_that_does_not_read_stops_nobody_and_is_dropped() -> None:
    with serving("tcp", deadline_s=0.3, size=BIG) as server, joined(server, 2) as link:
        frozen = socket.create_connection((server.peer.address.host, server.peer.address.port))
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(socket_transport.authenticate, frozen, FIRST, 1, soon())
            while not joining.done():
                assert server.quiet(0.005)
        frozen.sendall(FrameHeader(FrameKind.CALL, 0).pack())
        line = server.call().connection
        begun = time.monotonic()
        line.answer_published(b"", BIG)
        assert time.monotonic() < begun + 0.2
        link.call(b"hi", soon())
        assert server.call().connection.rank == 2
        assert server.gone().rank == 1
        frozen.close()


def test_the_first_layers_are_there_while_the_others_are_on_their_way() -> None:
    with serving("tcp", size=BIG) as server, joined(server) as link:
        into = memoryview(bytearray(BIG))
        link.call(b"pull", soon(), into=into)
        line = server.call().connection
        line._send([FrameHeader(FrameKind.ANSWER, size=BIG).pack(), server.region.view[: 2**20]])
        assert server.quiet()
        link.answer(soon())
        link.pulled(0, 2**20, soon())
        assert bytes(into[: 2**20]) == bytes(server.region.view[: 2**20])
        with pytest.raises(PeerLost, match="deadline"):  # the rest is not sent yet
            link.pulled(0, BIG, soon(0.05))
        line._send([server.region.view[2**20 :]])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(link.pulled, 0, BIG, soon())
            while not waiting.done():
                assert server.quiet(0.01)
            waiting.result()
        assert into == server.region.view


def test_of_a_worker_killed_in_the_middle_of_its_push_nothing_counts_but_what_rang() -> None:
    code = (
        "import sys, time\n"
        "from trainwright.core.topology import Address, Peer\n"
        "from trainwright.strategies.common.socket_transport import ConnectionCanceller\n"
        "from trainwright.strategies.ps.client_connection import connect_to_server\n"
        "peer = Peer(rank=0, address=Address(host='127.0.0.1', port=int(sys.argv[1])))\n"
        "until = time.monotonic() + 60\n"
        "link = connect_to_server(peer, b'the key of the first generation', 1, until, ConnectionCanceller())\n"
        "outbox = link.open_outbox(100, until)\n"
        "outbox[:50] = b'a' * 50\n"
        "link.call(b'push', until, size=50)\n"
        "outbox[50:70] = b'b' * 20\n"
        "link.call(b'kill me', until)\n"
        "link.answer(until)\n"
    )
    with serving("shared") as server:
        worker = subprocess.Popen([sys.executable, "-c", code, str(server.peer.address.port)])
        events = server.lines.wait(soon(60))
        while len(events) < 2:
            events += server.lines.wait(soon(60))
        assert [event.head for event in events if isinstance(event, WorkerCall)] == [b"push", b"kill me"]
        payload = events[0].payload
        worker.kill()
        worker.wait()
        line = server.gone()
        assert line is events[0].connection
        line.answer(b"too late")
        assert bytes(payload) == b"a" * 50
        with joined(server) as again:
            assert bytes(again.open_outbox(100, soon())) == bytes(100)
            again.call(b"push", soon(), size=100)
            call = server.call()
            assert call.connection.key != line.key
            assert bytes(call.payload) == bytes(100)
            assert bytes(payload) == b"a" * 50


@pytest.mark.parametrize("place", PLACES)
def test_what_a_dead_server_published_can_be_read_and_its_end_is_told(place: str) -> None:
    with serving(place) as server, joined(server) as link:
        into = memoryview(bytearray(64))
        link.call(b"pull", soon(), into=into)
        server.call().connection.answer_published(b"", 64)
        link.answer(soon())
        link.pulled(0, 1, soon())
        server.lines.close()
        server.region.close()
        del server.region
        link.pulled(0, 64, soon())
        assert bytes(into) == bytes(range(64))
        with pytest.raises(PeerLost, match="rank 0"):
            link.answer(soon())
        with pytest.raises(PeerLost, match="rank 0"):
            link.call(b"", soon())
            link.answer(soon())
        server.region = SharedRegion(1)


@pytest.mark.parametrize("place", PLACES)
def test_cut_ends_waits_at_both_ends(place: str) -> None:
    with serving(place) as server, joined(server) as link, ThreadPoolExecutor(2) as pool:
        link.call(b"never answered", soon())
        server.call()
        answer = pool.submit(link.answer, soon(30))
        events = pool.submit(server.lines.wait, soon(30))
        threading.Timer(0.05, link.cut).start()
        with pytest.raises(PeerLost):
            answer.result(5)
        assert [type(event) for event in events.result(5)] == [WorkerDisconnected]
        events = pool.submit(server.lines.wait, soon(30))
        server.lines.wake()
        assert events.result(5) == []
        events = pool.submit(server.lines.wait, soon(30))
        server.lines.cut()
        assert events.result(5) == []
        with pytest.raises(PeerLost):
            connect_to_server(server.peer, FIRST, 1, soon(0.5), socket_transport.ConnectionCanceller())


@pytest.mark.parametrize("place", PLACES)
def test_a_late_answer_is_a_lost_peer(place: str) -> None:
    with serving(place) as server, joined(server) as link:
        link.call(b"", soon())
        with pytest.raises(PeerLost, match="rank 0 did not answer within the deadline"):
            link.answer(soon(0.05))


def test_a_transfer_that_goes_on_may_take_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a thousand workers gives each of them little of its bandwidth."""
    receive, send = client_connection.receive_exactly, client_connection.send_available
    monkeypatch.setattr(client_connection, "_SENT_BYTES", 2**20)
    with serving("tcp") as server, joined(server) as link, ThreadPoolExecutor(1) as pool:
        link.open_outbox(BIG, soon())

        def slow_receive(*arguments: Any) -> Any:
            time.sleep(0.04)
            return receive(*arguments)

        def slow_send(*arguments: Any) -> Any:
            time.sleep(0.04)
            return send(*arguments)

        monkeypatch.setattr(client_connection, "send_available", slow_send)
        begun, pushed = time.monotonic(), pool.submit(server.call)
        link.call(b"push", soon(), offset=0, size=BIG)
        done = pool.submit(lambda: pushed.result().connection.answer(b"done"))
        assert link.answer(soon(0.5)) == b"done" and time.monotonic() - begun > 0.9
        done.result()
        monkeypatch.setattr(client_connection, "receive_exactly", slow_receive)
        into = memoryview(bytearray(BIG))
        link.call(b"pull", soon(), into=into)
        over = threading.Event()

        def serve() -> None:
            server.call().connection.answer(b"here", memoryview(bytes(BIG)))
            while not over.is_set():
                server.lines.wait(soon(0.05))

        pulled = pool.submit(serve)
        assert link.answer(soon()) == b"here"
        begun = time.monotonic()
        link.pulled(0, BIG, soon(0.5))
        assert time.monotonic() - begun > 0.7
        over.set()
        pulled.result()


@pytest.mark.parametrize("place", PLACES)
def test_an_answer_larger_than_its_room_is_refused(place: str) -> None:
    with serving(place) as server, joined(server) as link:
        link.call(b"", soon(), into=memoryview(bytearray(3)))
        server.call().connection.answer(b"", b"four")
        with pytest.raises(PeerLost, match="4 bytes where 3"):
            link.answer(soon())


@pytest.mark.parametrize("place", PLACES)
def test_an_outbox_beyond_all_memory_ends_the_line_alone(place: str) -> None:
    with serving(place) as server, joined(server, 1) as wrong, joined(server, 2) as link:
        wrong._out.sendall(FrameHeader(FrameKind.OUTBOX, size=2**63).pack())
        assert server.gone().rank == 1
        link.call(b"hi", soon())
        assert server.call().head == b"hi"


@pytest.mark.parametrize("place", PLACES)
def test_a_range_outside_the_outbox_ends_the_line(place: str) -> None:
    with serving(place) as server, joined(server) as link:
        link.open_outbox(10, soon())
        link._out.sendall(FrameHeader(FrameKind.CALL, 0, 5, 6).pack())
        assert server.gone().rank == 1


def test_workers_may_read_published_memory_and_neither_write_nor_shrink_it() -> None:
    region = SharedRegion(100)
    assert region.file is not None
    with pytest.raises(TypeError):
        shared_memory.map_descriptor(region.file, writable=False)[0] = 1
    with pytest.raises(PermissionError):
        __import__("os").ftruncate(region.file, 10)
    with pytest.raises(ConnectionError, match="smaller"):
        shared_memory.map_descriptor(region.file, 101, writable=False)
    region.close()
