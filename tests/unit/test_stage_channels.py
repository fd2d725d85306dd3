"""Channels between stages on CPUs: what was sent is received, in order, and an end is noticed at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trainwright.core.errors import PeerLost
from trainwright.strategies.common.socket_transport import HANDSHAKE_S, ConnectionCanceller, SocketListener, connect
from trainwright.strategies.torch.pipeline import stage_channels
from trainwright.strategies.torch.pipeline.stage_channels import SocketChannel

KEY = b"of these tests"
SOON_S = 20.0  # far below the deadline
DEADLINE_S = 120.0
LARGE = 6_000_000  # floats: more than sockets hold


def connected(listener: SocketListener, number: int = 7) -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection."""
    until = time.monotonic() + SOON_S
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(stage_channels.open_channel, listener.address, KEY, number, until, ConnectionCanceller())
        found = stage_channels.accept_channel(listener, KEY, until, ConnectionCanceller())
        assert found is not None and found[0] == number
        return opened.result(), found[1]


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[SocketListener]:
    made = SocketListener("127.0.0.1", unix=request.param == "unix")
    yield made
    made.close()


@pytest.fixture
def ends(listener: SocketListener) -> Iterator[tuple[SocketChannel, SocketChannel]]:
    source, target = connected(listener)
    assert (source.family == socket.AF_INET) == (listener.local is None)
    made = SocketChannel(source, "rank 1", DEADLINE_S), SocketChannel(target, "rank 0", DEADLINE_S)
    yield made
    for each in made:
        each.close()


def test_tensors_arrive_as_they_were_in_their_order(ends: tuple[SocketChannel, SocketChannel]) -> None:
    source, target = ends
    sent = [
        [torch.randn(3, 5, dtype=torch.bfloat16), torch.tensor(2.5)],
        [torch.tensor([True, False]), torch.empty(0, 4), torch.randn(2, dtype=torch.complex64)],
        [torch.arange(7)],
    ]
    received = [[torch.empty_like(each) for each in message] for message in sent]
    waits = [target.receive(message) for message in received]
    taken = [wait for message in sent for wait in source.send(message)]
    assert len(taken) == len(sent), "the system takes small messages at once"
    for wait in (*waits[2], *waits[0], *waits[1], *reversed(taken)):  # in any order
        wait()
    for before, after in zip(sent, received, strict=True):
        assert all(map(torch.equal, before, after))


def test_two_that_send_before_they_receive_do_not_wait_for_each_other(listener: SocketListener) -> None:
    there, back = connected(listener), connected(listener)
    ways = [[SocketChannel(end, "the other", DEADLINE_S) for end in pair] for pair in (there, back)]
    value = torch.arange(LARGE, dtype=torch.float32)
    sends = [ways[0][0].send([value]), ways[0][0].send([value + 1]), ways[1][0].send([-value])]
    received = [torch.empty(LARGE) for _ in sends]
    waits = [
        *ways[0][1].receive([received[0]]), *ways[0][1].receive([received[1]]), *ways[1][1].receive([received[2]])
    ]  # fmt: skip
    for wait in (*waits, *(wait for each in sends for wait in each)):
        wait()
    for found, wanted in zip(received, (value, value + 1, -value), strict=True):
        assert torch.equal(found, wanted)
    assert len(sends[0]) == 2 and len(ways[0][0].send([torch.ones(3)])) == 1, "afterwards messages go at once again"
    for each in (*ways[0], *ways[1]):
        each.close()


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
def test_more_answers_than_the_system_keeps_hold_nobody_up(unix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many micro-batches: both stages send all, receive all, and end the step as `StageLinks.settle` does."""
    monkeypatch.setattr(stage_channels, "_BUFFER_BYTES", 4096)
    count, listener = 3000, SocketListener("127.0.0.1", unix=unix)
    there, back = (
        [SocketChannel(end, "the other", SOON_S) for end in connected(listener, number)] for number in range(2)
    )
    values = [torch.tensor([float(number)]) for number in range(count)]

    def step(out: SocketChannel, into: SocketChannel, *, first: bool) -> list[torch.Tensor]:
        received = [torch.empty(1) for _ in range(count)]
        waits = [wait for each in received for wait in into.receive([each])]
        sent = [wait for each in values for wait in out.send([each])] if first else []
        for wait in waits:
            wait()
        sent += [] if first else [wait for each in values for wait in out.send([each])]
        for channel in (out, into):
            channel.read_answers()
        for channel in (out, into):
            channel.send_answers()
        for wait in sent:
            wait()
        return received

    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            halves = [
                pool.submit(step, there[0], back[1], first=True), pool.submit(step, back[0], there[1], first=False)
            ]  # fmt: skip
            for half in halves:
                assert torch.equal(torch.cat(half.result(3 * SOON_S)), torch.cat(values))
    for each in (*there, *back):
        each.close()
    listener.close()


def test_the_end_of_the_sender_within_a_message_is_noticed(ends: tuple[SocketChannel, SocketChannel]) -> None:
    source, target = ends
    sent, _ = source.send([torch.ones(LARGE)])
    source.cut()
    begun = time.monotonic()
    (wait,) = target.receive([torch.empty(LARGE)])
    with pytest.raises(PeerLost, match="rank 0 closed the connection"):
        wait()
    with pytest.raises(PeerLost, match="rank 1 closed the connection"):
        sent()
    with pytest.raises(PeerLost, match="rank 1 closed the connection"):
        source.send([torch.ones(1)])
    assert time.monotonic() - begun < SOON_S


def test_the_end_of_the_receiver_within_a_message_is_noticed(ends: tuple[SocketChannel, SocketChannel]) -> None:
    source, target = ends
    sent, taken = source.send([torch.ones(LARGE)])
    target.close()
    begun = time.monotonic()
    for wait in (sent, taken):
        with pytest.raises(PeerLost, match="rank 1 closed the connection"):
            wait()
    assert time.monotonic() - begun < SOON_S


def test_a_message_that_was_not_taken_is_not_sent(ends: tuple[SocketChannel, SocketChannel]) -> None:
    """A stage must not end a step whose gradient its neighbour, which failed, has not received."""
    source, target = ends
    sends = [source.send([torch.ones(2)]) for _ in range(2)]
    (wait,) = target.receive([torch.empty(2)])
    wait()
    (first,), (second,) = sends
    first()
    target.close()
    with pytest.raises(PeerLost, match="rank 1 closed the connection"):
        second()


def test_another_thread_ends_a_wait(ends: tuple[SocketChannel, SocketChannel]) -> None:
    _, target = ends
    (wait,) = target.receive([torch.empty(4)])
    threading.Timer(0.2, target.cut).start()
    begun = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 closed the connection"):
        wait()
    assert time.monotonic() - begun < SOON_S


def test_silence_beyond_the_deadline_is_an_error(listener: SocketListener) -> None:
    source, target, third, fourth = (
        SocketChannel(end, "the other", 0.3) for _ in range(2) for end in connected(listener)
    )
    (wait,) = target.receive([torch.empty(4)])
    with pytest.raises(PeerLost, match="the other did not answer within the deadline"):
        wait()
    sent, _ = third.send([torch.ones(LARGE)])
    with pytest.raises(PeerLost, match="the other did not answer within the deadline"):
        sent()
    for each in (source, target, third, fourth):
        each.close()


def test_a_message_of_another_size_is_an_error(ends: tuple[SocketChannel, SocketChannel]) -> None:
    source, target = ends
    source.send([torch.ones(3)])
    (wait,) = target.receive([torch.empty(4)])
    with pytest.raises(RuntimeError, match="rank 0 sent 12 bytes where 16 were expected"):
        wait()


def test_tensors_of_any_stride_are_sent_and_their_storage_can_be_resized(
    ends: tuple[SocketChannel, SocketChannel],
) -> None:
    """Of one row, views with strides of another size count as contiguous; FSDP frees parameters by resizing them."""
    source, target = ends
    base = torch.arange(8.0).reshape(1, 8)
    sent = [base[:, 0], torch.tensor(3.0).expand(1), base.t()[:1, :1]]
    received = [torch.empty(each.shape) for each in sent]
    (taken,) = source.send(sent)
    (wait,) = target.receive(received)
    wait()
    taken()
    assert all(map(torch.equal, sent, received))
    for each in (base, *received):
        each.untyped_storage().resize_(0)


def test_nothing_follows_a_part_of_a_message(listener: SocketListener) -> None:
    """A receiver that stood still finds an end, not the next message within the one before."""
    source, target = (SocketChannel(end, "the other", 0.3) for end in connected(listener))
    sends = [source.send([torch.ones(LARGE)]) for _ in range(2)]
    for waits in sends:
        with pytest.raises(PeerLost):
            waits[0]()
    with pytest.raises(PeerLost):
        source.send([torch.ones(1)])
    received = torch.zeros(LARGE)
    (wait,) = target.receive([received])
    with pytest.raises(PeerLost, match="closed the connection"):
        wait()
    for each in (source, target):
        each.close()


def test_a_silent_peer_does_not_hold_up_an_interrupt(listener: SocketListener) -> None:
    canceller, begun = ConnectionCanceller(), time.monotonic()
    with socket.create_connection((listener.address.host, listener.address.port), SOON_S):
        threading.Timer(0.3, canceller.cut).start()
        assert stage_channels.accept_channel(listener, KEY, begun + DEADLINE_S, canceller) is None
    assert time.monotonic() - begun < HANDSHAKE_S


def test_who_does_not_know_the_key_is_not_accepted(listener: SocketListener) -> None:
    until = time.monotonic() + SOON_S
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(
            stage_channels.open_channel, listener.address, b"another key", 0, until, ConnectionCanceller()
        )
        assert stage_channels.accept_channel(listener, KEY, until, ConnectionCanceller()) is None
        with pytest.raises(OSError, match=r"end of stream|reset"):
            stranger.result()


def test_one_who_waits_for_a_connection_is_cut(listener: SocketListener) -> None:
    threading.Timer(0.2, listener.cut).start()
    begun = time.monotonic()
    with pytest.raises(OSError):
        stage_channels.accept_channel(listener, KEY, begun + DEADLINE_S, ConnectionCanceller())
    assert time.monotonic() - begun < SOON_S
    with pytest.raises(OSError):
        connect((listener.address.host, listener.address.port), time.monotonic() + SOON_S)
