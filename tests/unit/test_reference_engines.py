"""The reference engines' connections and topologies, in threads of one process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.reference.collective import Reference
from tests.support.reference.model import LossWithGradient, Mlp, Sgd, cross_entropy
from tests.support.reference.reference_engine import ReferenceEngine
from tests.support.reference.star_transport import StarGroup
from trainwright.core.data import Batch, Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import CheckpointError, JobError, NonFiniteLoss, PeerLost, TrainwrightError
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import Address, Generation, Group, Peer
from trainwright.strategies.common.socket_transport import SocketListener

FIRST = Generation(token=1, number=1)
PLAN = Plan(strategy="test", engine="", mesh=Mesh(), batch_size=6, placement=WorkerResources(cpus=1))
SPEC = ModelSpec(
    model=lambda: Mlp((3, 4, 2)),
    loss=cross_entropy,
    optimizer=lambda parameters: Sgd(learning_rate=0.1, momentum=0.9),
    total_steps=10,
    inputs=("x",),
    targets=("y",),
)


def batch(rows: int = 6, start: int = 100) -> Batch:
    random = np.random.default_rng(rows)
    data = {"x": random.normal(size=(rows, 3)), "y": random.integers(0, 2, rows)}
    return Batch(columns=data, weights=np.ones(rows), samples=np.arange(start, start + rows))


def feed(*batches: Batch, step: int = 0, ranks: range = range(1)) -> Feed:
    return Feed(step=step, parts=(batches,) * len(ranks), data_ranks=ranks, total=len(ranks), rows=6)


# --- connections ------------------------------------------------------------------------------------------


def test_sums_are_the_same_bits_everywhere_in_rank_order() -> None:
    vectors = [np.array([1e16, 0.1]), np.array([1.0, 0.2]), np.array([-1e16, 0.3])]
    with stars(3) as group:
        sums = together(
            *(lambda star=star, vector=vector: star.sum(vector) for star, vector in zip(group, vectors, strict=True))
        )
    assert {one.tobytes() for one in sums} == {((vectors[0] + vectors[1]) + vectors[2]).tobytes()}


def test_a_closed_peer_is_noticed_although_another_is_slow() -> None:
    with stars(3, deadline_s=20.0) as group:
        start = time.monotonic()
        group[2].close()
        with pytest.raises(PeerLost, match="rank 2"):
            group[0].gather(group[0].until())
    assert time.monotonic() - start < 5


def test_a_silent_peer_is_lost_at_the_deadline() -> None:
    with stars(2, deadline_s=0.3) as group, pytest.raises(PeerLost, match=r"\[1\] did not answer"):
        group[0].sum(np.zeros(1))


def test_strangers_and_older_generations_are_not_let_in() -> None:
    port = SocketListener("127.0.0.1", unix=False)
    address = (port.address.host, port.address.port)
    with socket.create_connection(address) as silent, socket.create_connection(address) as noisy:
        silent.shutdown(socket.SHUT_WR)
        noisy.sendall(b"GET / HTTP/1.0\r\n\r\n" * 9)
        old = _star(1, [port.address] * 2, Generation(token=1, number=0))
        new, root = _star(1, [port.address] * 2, FIRST), StarGroup(_group(0, [port.address] * 2, FIRST), port)
        outcomes = together(root.open, lambda: _raised(old.open), new.open)
        assert isinstance(outcomes[1], PeerLost)
        sums = together(lambda: root.sum(np.ones(1)), lambda: new.sum(np.ones(1)))
    for star in (root, old, new):
        star.close()
    assert [one.tolist() for one in sums] == [[2.0], [2.0]]


def test_a_group_that_does_not_fill_is_given_up() -> None:
    port = SocketListener("127.0.0.1", unix=False)
    star = StarGroup(_group(0, [port.address] * 2, FIRST, deadline_s=0.2), port)
    with pytest.raises(PeerLost, match="joined"):
        star.open()
    star.close()


def test_interrupt_frees_a_rank_that_waits_for_others() -> None:
    engine = Reference(host="127.0.0.1")
    address = engine.reserve("worker")
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(_raised, lambda: engine.form(_group(0, [address] * 2, FIRST, deadline_s=30.0)))
        while engine._connections is None:
            time.sleep(0.01)
        assert engine.interrupt(10.0)
        assert isinstance(forming.result(10.0), PeerLost)
    engine.leave()


def test_a_dead_address_is_lost_at_once() -> None:
    gone = SocketListener("127.0.0.1", unix=False)
    gone.close()
    star = _star(1, [gone.address] * 2, FIRST)
    with pytest.raises(PeerLost, match="cannot be reached"):
        star.open()
    star.close()


# --- engines ----------------------------------------------------------------------------------------------


def test_an_infinite_gradient_of_a_finite_loss_is_not_applied() -> None:
    engine = alone(replace(SPEC, loss=lambda o, t: LossWithGradient(o[:, 0], np.full_like(o, np.inf))))
    with np.errstate(invalid="ignore"), pytest.raises(NonFiniteLoss, match="gradient of step 1"):
        engine.train_step(feed(batch()))
    assert engine.snapshot().step == 0 and engine.state.step is None


def test_an_error_in_a_step_frees_the_other_ranks_before_anyone_leaves() -> None:
    engines = formed(Reference, 2)
    bad = replace(batch(), columns={"y": batch().columns["y"]})
    start = time.monotonic()
    waiting, failing = together(
        lambda: _raised(lambda: engines[0].train_step(feed(batch()))),
        lambda: _raised(lambda: engines[1].train_step(feed(bad))),
    )
    assert isinstance(waiting, PeerLost) and isinstance(failing, JobError)
    assert time.monotonic() - start < 5, "that was the deadline"
    for engine in engines:
        engine.leave()


def test_the_core_must_feed_the_next_step() -> None:
    engine = alone()
    engine.train_step(feed(batch()))
    with pytest.raises(TrainwrightError, match=r"fed step 0 .* standing at step 1"):
        engine.train_step(feed(batch()))


def test_a_checkpoint_without_or_with_damaged_files_is_refused() -> None:
    engine = alone()
    for files, words in (({}, "no state"), ({"state.npz": b"torn"}, "cannot be read")):
        with pytest.raises(CheckpointError, match=words):
            engine.load(_Files(files))


# --- helpers ----------------------------------------------------------------------------------------------


class _Files:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    weights_only = False

    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def read(self, name: str) -> bytes:
        return self.files[name]

    def stream(self, name: str) -> Iterator[memoryview]:
        yield memoryview(self.read(name))


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60.0) for future in [pool.submit(call) for call in calls]]


@contextmanager
def stars(size: int, deadline_s: float = 10.0) -> Iterator[list[StarGroup]]:
    """A formed group."""
    ports = [SocketListener("127.0.0.1", unix=False) for _ in range(size)]
    addresses = [port.address for port in ports]
    group = [StarGroup(_group(rank, addresses, FIRST, deadline_s), port) for rank, port in enumerate(ports)]
    together(*(star.open for star in group))
    try:
        yield group
    finally:
        for star in group:
            star.close()


def formed(kind: type[ReferenceEngine], size: int) -> list[Any]:
    """Engines of a formed group, built."""
    engines: list[Any] = [kind(host="127.0.0.1") for _ in range(size)]
    addresses = [engine.reserve("worker") for engine in engines]
    together(*(lambda e=engine, r=rank: e.form(_group(r, addresses, FIRST)) for rank, engine in enumerate(engines)))
    for engine in engines:
        engine.build(SPEC, PLAN)
    return engines


def alone(spec: ModelSpec = SPEC) -> Reference:
    """One rank, built."""
    engine = Reference(host="127.0.0.1")
    engine.form(_group(0, [engine.reserve("worker")], FIRST))
    engine.build(spec, PLAN)
    return engine


def _star(rank: int, addresses: Sequence[Address], generation: Generation) -> StarGroup:
    return StarGroup(_group(rank, addresses, generation), SocketListener("127.0.0.1", unix=False))


def _group(rank: int, addresses: Sequence[Address], generation: Generation, deadline_s: float = 10.0) -> Group:
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(addresses))
    return Group(generation=generation, rank=rank, peers=peers, key=str(generation).encode(), deadline_s=deadline_s)


def _raised(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except TrainwrightError as error:
        return error
    return None
