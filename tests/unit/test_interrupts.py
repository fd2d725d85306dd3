"""An interrupt frees a rank whenever it comes: before the call, while the rank connects, and not a call too late."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from tests.support.scripted_engine import PEER, ScriptedEngine, join, restore, scripted, scripted_worker
from tests.support.work_orders import order_of, table_job
from trainwright.core.data import Feed, MetricSums, StepReport
from trainwright.core.errors import HangError, PeerLost
from trainwright.core.topology import Address, Generation, Group, Peer
from trainwright.datasets import table
from trainwright.driver.messages import EvaluateRequest, ReserveRequest, RunRequest
from trainwright.inference import sharded_inference
from trainwright.runtime.worker_actor import WorkerProcess
from trainwright.strategies.common import shared_memory
from trainwright.strategies.common.socket_transport import ConnectionCanceller, SocketListener
from trainwright.strategies.ps import client_connection
from trainwright.strategies.torch.distributed import process_group as groups
from trainwright.strategies.torch.distributed.process_group import ProcessGroupHandle
from trainwright.strategies.torch.engines.parameter_server import ParameterServer
from trainwright.worker.worker import Worker

FIRST, SECOND = Generation(token=1, number=1), Generation(token=1, number=2)
KEY = b"of the first"
FOREVER_S = 120.0  # the group's deadline; what an interrupt frees ends long before
SOON_S = 60.0


# --- the worker -------------------------------------------------------------------------------------------------------


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the scripted engine is called for."""
    calls: list[str] = []
    for verb in ("reserve", "form", "interrupt", "leave"):
        answer = PEER.address if verb == "reserve" else None
        monkeypatch.setattr(ScriptedEngine, verb, lambda *_, verb=verb, answer=answer: (calls.append(verb), answer)[1])
    return calls


@pytest.fixture
def worker(called: list[str], monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker whose engine notes what it is called for."""
    return scripted_worker(monkeypatch, table_job())


def group(generation: Generation) -> Group:
    return Group(generation=generation, rank=0, peers=(PEER,))


def test_an_interrupt_that_overtakes_the_call_it_is_for_counts(worker: Worker, called: list[str]) -> None:
    """The driver calls for `form`, hears of a death and interrupts: the threads of the process may turn that around."""
    worker.reserve(ReserveRequest(generation=FIRST))
    worker.interrupt(FIRST, False)
    with pytest.raises(PeerLost, match=r"rendezvous epoch 1\.1 ended before this rank joined it"):
        worker.form(group(FIRST))
    assert called == ["reserve", "interrupt"], "nothing waits for peers that are gone"
    worker.reserve(ReserveRequest(generation=SECOND))


def test_an_interrupt_of_the_generation_to_come_counts(worker: Worker) -> None:
    worker.reserve(ReserveRequest(generation=FIRST))
    worker.interrupt(SECOND, False)
    with pytest.raises(PeerLost):
        worker.reserve(ReserveRequest(generation=SECOND))


def test_an_interrupt_that_comes_late_leaves_the_next_generation_alone(worker: Worker, called: list[str]) -> None:
    """It would shut the port that the next generation's ranks are to connect to."""
    worker.reserve(ReserveRequest(generation=FIRST))
    worker.reserve(ReserveRequest(generation=SECOND))
    worker.interrupt(FIRST, False)
    assert called == ["reserve", "reserve"]


def test_generations_of_a_driver_that_was_taken_over_from_are_over(worker: Worker, called: list[str]) -> None:
    worker.reserve(ReserveRequest(generation=FIRST))
    worker.renew(scripted(order_of(table_job())), 2)
    with pytest.raises(PeerLost):
        worker.form(group(FIRST))
    worker.reserve(ReserveRequest(generation=Generation(token=2, number=1)))
    assert called == ["reserve", "interrupt", "reserve"]


@pytest.mark.parametrize("ends", ["interrupt", "renew"])
@pytest.mark.parametrize("verb", ["run", "evaluate"])
def test_a_rank_that_waits_for_no_other_ends_between_two_batches(
    monkeypatch: pytest.MonkeyPatch, verb: str, ends: str
) -> None:
    """No collective raises there: alone it would step until the end of its segment, or evaluate all."""
    done: list[int] = []

    def work(engine: object, feed: Feed, *_: object) -> StepReport:
        done.append(feed.step)
        if len(done) == 2:
            worker.interrupt(FIRST, False) if ends == "interrupt" else worker.renew(scripted(order_of(job)), 2)
        return StepReport(step=feed.step + 1, loss=0.0, weight=1.0, learning_rate=0.1)

    monkeypatch.setattr(ScriptedEngine, "train_step", work, raising=False)
    monkeypatch.setattr(ScriptedEngine, "evaluate_step", lambda *given: work(*given) and MetricSums(), raising=False)
    rows = table({"x": np.zeros((8, 2), np.float32), "y": np.zeros(8, np.int64)})
    job = table_job(evaluate=rows, epochs=4)
    worker = scripted_worker(monkeypatch, job)
    join(worker)
    restore(worker)
    with pytest.raises(PeerLost, match=r"rendezvous epoch 1\.1 has ended"):
        worker.run(RunRequest(steps=range(8))) if verb == "run" else worker.evaluate(EvaluateRequest(step=0))
    assert done == [0, 1] and worker.held[1] == (2 if verb == "run" else 0)
    worker.close()


class _Here:
    """What `ShardedModel` needs of Ray, for processes that are threads here."""

    @staticmethod
    def wait(refs: list[Future[Any]], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        done = wait(refs, timeout=timeout).done
        return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]

    @staticmethod
    def get(ref: Future[Any]) -> Any:
        return ref.result()


def test_ranks_that_hang_in_an_evaluation_tell_where_they_stand(
    worker: Worker, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call to each rank is that of a worker's process, which frees the rank and gives its stacks."""
    monkeypatch.setattr(sharded_inference, "ray", _Here)
    worker.reserve(ReserveRequest(generation=Generation(token=sharded_inference.TOKEN, number=3)))
    process: Any = object.__new__(WorkerProcess)
    process._worker, process._refusal = worker, lambda token: None
    together: Any = object.__new__(sharded_inference.ShardedModel)
    with ThreadPoolExecutor(1) as threads:
        remote = SimpleNamespace(remote=lambda *arguments: threads.submit(process.interrupt, *arguments))
        together._number, together._actors, together._nodes = 3, [SimpleNamespace(interrupt=remote)], ["a"]
        with pytest.raises(HangError) as caught:
            together._answers([Future()], 0.0, HangError("the workers did not evaluate"))
    assert caught.value.where == "rank 0, a"
    said = caught.value.detail
    assert said.startswith("stack traces of rank 0:\nthread ") and "thread MainThread" in said and "_explained" in said
    assert called == ["reserve", "interrupt"]


# --- parameter servers ------------------------------------------------------------------------------------------------


class Stopped(ConnectionCanceller):
    """Cut at a moment of connecting: before it, right after the connection is held, or once it is made."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self._moments = ["held", "made"]
        self._moment = moment
        self.greeting = threading.Event()
        if moment == "before":
            self.cut()

    def hold(self, connection: socket.socket) -> None:
        super().hold(connection)
        moment = self._moments.pop(0)
        if moment == self._moment:
            self.cut()
        elif moment == "made":
            self.greeting.set()


@pytest.fixture(params=["shared", "tcp"])
def silent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SocketListener]:
    """A server that listens and lets nobody in, as one that is frozen does."""
    if request.param == "tcp":
        monkeypatch.setattr(shared_memory, "HAS_SHARED_MEMORY", False)
    listener = SocketListener("127.0.0.1")
    yield listener
    listener.close()


@pytest.mark.parametrize("moment", ["before", "held", "made", "greeting"])
def test_connecting_to_a_server_that_says_nothing_can_be_cut_at_any_moment(silent: SocketListener, moment: str) -> None:
    switch = Stopped(moment)
    peer = Peer(rank=0, address=silent.address, role="server")
    with ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(client_connection.connect_to_server, peer, KEY, 1, time.monotonic() + FOREVER_S, switch)
        if moment == "greeting":
            assert switch.greeting.wait(SOON_S)
            switch.cut()
        with pytest.raises(PeerLost):
            dialling.result(SOON_S)


def member(rank: int, silent: SocketListener, engine: ParameterServer) -> Group:
    """A group whose first server says nothing."""
    roles = ("server", "server", "worker")
    address = engine.reserve(roles[rank])
    peers = tuple(
        Peer(rank=other, address=address if other == rank else silent.address, role=role)
        for other, role in enumerate(roles)
    )
    return Group(generation=FIRST, rank=rank, peers=peers, key=KEY, deadline_s=FOREVER_S)


@pytest.mark.parametrize("moment", ["before", "greeting"])
@pytest.mark.parametrize("rank", [1, 2])
def test_servers_and_workers_that_join_are_freed(
    rank: int, moment: str, silent: SocketListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rank` 1 is a server that dials the first one; 2 is a worker, which dials all."""
    dialled, hold = threading.Event(), ConnectionCanceller.hold

    def holding(self: ConnectionCanceller, connection: socket.socket) -> None:
        if self._connection is connection:  # for the second time: it is made
            dialled.set()
        hold(self, connection)

    monkeypatch.setattr(ConnectionCanceller, "hold", holding)
    engine = ParameterServer()
    joining = member(rank, silent, engine)
    with ThreadPoolExecutor(1) as pool:
        if moment == "before":
            engine.interrupt(1.0)
        forming = pool.submit(engine.form, joining)
        if moment == "greeting":
            assert dialled.wait(SOON_S)
            engine.interrupt(1.0)
        with pytest.raises(PeerLost):
            forming.result(SOON_S)
    engine.leave()


def test_the_first_server_s_group_is_over_where_it_was_interrupted_before_it_formed(silent: SocketListener) -> None:
    """Nothing is dialled there: it would serve for ever, on a port that was shut."""
    engine = ParameterServer()
    joining = member(0, silent, engine)
    engine.interrupt(1.0)
    engine.form(joining)
    with pytest.raises(PeerLost, match="has left its group"):
        next(engine.server.serve(0, 1, lambda: False))
    assert engine.server.join(SOON_S)
    engine.leave()
    engine.form(member(0, silent, engine))
    assert not engine.server.join(0.0), "the next group's server serves"
    engine.leave()


# --- process groups ---------------------------------------------------------------------------------------------------


class Told(TCPStore):
    """A store that tells when it is connected to, and when somebody waits at it."""

    connecting, waiting = threading.Event(), threading.Event()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.connecting.set()
        super().__init__(*arguments, **options)

    def wait(self, *arguments: Any) -> None:
        self.waiting.set()
        super().wait(*arguments)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[Told]:
    monkeypatch.setattr(groups, "TCPStore", Told)
    monkeypatch.setattr(Told, "connecting", threading.Event())
    monkeypatch.setattr(Told, "waiting", threading.Event())
    return Told


def pair(rank: int, membership: ProcessGroupHandle, other: Address) -> Group:
    """A group of two, of which this process is one."""
    addresses = [other, other]
    addresses[rank] = membership.reserve()
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(addresses))
    return Group(generation=FIRST, rank=rank, peers=peers, key=KEY, deadline_s=FOREVER_S)


@pytest.fixture(params=["dead", "late"])
def first(request: pytest.FixtureRequest) -> Iterator[Address]:
    """Where rank 0 is to be found, which has died, or has not opened the group's store yet."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address(host="127.0.0.1", port=listening.getsockname()[1])
        if request.param == "dead":
            listening.close()
        yield address


@pytest.mark.parametrize("moment", ["before", "connecting"])
def test_a_rank_that_looks_for_the_first_one_is_freed(moment: str, first: Address, told: type[Told]) -> None:
    """torch itself looks for it until the deadline, again and again."""
    membership = ProcessGroupHandle()
    group = pair(1, membership, first)
    with ThreadPoolExecutor(1) as pool:
        if moment == "before":
            membership.interrupt()
        joining = pool.submit(membership.join, group, torch.device("cpu"))
        if moment == "connecting":
            assert told.connecting.wait(SOON_S)
            membership.interrupt()
        with pytest.raises(PeerLost, match="did not form before it was interrupted"):
            joining.result(SOON_S)
    assert told.connecting.is_set() == (moment == "connecting")


def test_an_interrupt_counts_although_the_store_is_reached_after_it(
    told: type[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had nothing to shut."""
    membership, make, either = ProcessGroupHandle(), Told.__init__, groups.wait

    def interrupted(self: Told, *arguments: Any, **options: Any) -> None:
        membership.interrupt()
        make(self, *arguments, **options)

    monkeypatch.setattr(Told, "__init__", interrupted)
    monkeypatch.setattr(groups, "wait", lambda pending, return_when: either(pending))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(membership.join, pair(0, membership, PEER.address), torch.device("cpu"))
        with pytest.raises(PeerLost, match="did not form before it was interrupted"):
            joining.result(SOON_S)


def test_the_first_rank_is_freed_while_it_waits_for_the_others(told: type[Told]) -> None:
    """And nobody is in gloo's hands before all are there: what gloo waits for cannot be shut."""
    membership = ProcessGroupHandle()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(membership.join, pair(0, membership, PEER.address), torch.device("cpu"))
        assert told.waiting.wait(SOON_S)
        assert not torch.distributed.is_initialized()
        assert membership.interrupt()
        with pytest.raises(PeerLost, match="did not form before it was interrupted"):
            joining.result(SOON_S)
        again = pool.submit(membership.join, pair(0, membership, PEER.address), torch.device("cpu"))
        with pytest.raises(TimeoutError):
            again.result(0.5)
        membership.interrupt()
        with pytest.raises(PeerLost):
            again.result(SOON_S)


def test_a_rank_is_freed_for_which_another_dies_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo waits for it as this constructor does: nothing is there to be shut."""
    inside, over = threading.Event(), threading.Event()

    def unconnected(*_: Any, **__: Any) -> None:
        inside.set()
        over.wait(FOREVER_S)
        raise RuntimeError("gloo/transport/tcp/pair.cc: timed out")

    monkeypatch.setattr(torch.distributed.distributed_c10d, "ProcessGroupGloo", unconnected)
    membership = ProcessGroupHandle()
    alone = Group(generation=FIRST, rank=0, peers=(Peer(rank=0, address=membership.reserve()),), deadline_s=FOREVER_S)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(membership.join, alone, torch.device("cpu"))
        assert inside.wait(SOON_S)
        membership.interrupt()
        try:
            with pytest.raises(PeerLost, match="did not form before it was interrupted"):
                joining.result(SOON_S)
        finally:
            over.set()
    monkeypatch.undo()
    membership.join(replace(alone, peers=(Peer(rank=0, address=membership.reserve()),)), torch.device("cpu"))
    assert torch.distributed.is_initialized(), "the next group forms in the same process"
    membership.leave()
