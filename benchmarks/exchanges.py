"""Ways of pushing gradients to servers and pulling parameters, all held by the same processes, which take turns.

Every way does the same work: a worker has a gradient in memory of its own, each push is an update of all parameters by
SGD on the servers, and the worker then gets the new parameters into memory of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from peers.gloo_parameter_server import GlooServer, GlooWorker, join
from processes import share_messages, start_processes
from torch import nn
from torch.nn import functional

from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.topology import Address, Generation, Group, Peer
from trainwright.strategies.common import shared_memory
from trainwright.strategies.ps.parameter_client import ParameterClient
from trainwright.strategies.ps.parameter_shards import ParameterShard
from trainwright.strategies.torch.engines.parameter_server import ParameterServer
from trainwright.strategies.torch.ps.gradient_compression import GradientLayout
from trainwright.strategies.torch.ps.shard_store import server_shards

SERVERS, WORKERS, RATE = 2, 2, 0.1
WAYS = {
    "shared": {"consistency": "async"},
    "sync": {"consistency": "sync"},
    "tcp": {"consistency": "async"},
    "fp16": {"consistency": "async", "wire": "fp16"},
}  # ours: fields of their plans
GENERATION, DEADLINE_S, MEET_S = Generation(token=1, number=1), 60.0, 120.0
Floats = npt.NDArray[np.float32]


class Turn(Protocol):
    """One process's part of a way. `steps` are those of each worker, `meet` is called when it is ready to begin."""

    def __call__(self, steps: int, meet: Callable[[], None]) -> tuple[float, float]:
        """When it began and ended."""


def build(layers: int) -> nn.Module:
    """So many layers of a million parameters each."""
    return nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(layers)))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain: all parameters, one pass."""
    return torch.optim.SGD(parameters, lr=RATE)


class OurServer:
    """Servers of trainwright's torch engine, which serve one segment a turn."""

    def __init__(self, way: str) -> None:
        self._engine, self._way, self._until = ParameterServer(), way, 0

    def reserve(self) -> Address:
        """Some ways are not to go through shared memory."""
        shares = shared_memory.HAS_SHARED_MEMORY
        shared_memory.HAS_SHARED_MEMORY = shares and self._way in ("shared", "sync")
        try:
            return self._engine.reserve("server")
        finally:
            shared_memory.HAS_SHARED_MEMORY = shares

    def form(self, group: Group, spec: ModelSpec, plan: Plan) -> None:
        """Join the other server, with the shard that it was dealt."""
        self._engine.form(group)
        self._engine.build(spec, plan)
        self._engine.transfer(())

    def __call__(self, steps: int, meet: Callable[[], None]) -> tuple[float, float]:
        """Serve so many steps more."""
        self._until += steps
        meet()
        for _ in self._engine.serve(self._until, lambda: False):
            pass
        return 0.0, 0.0

    def close(self) -> None:
        """End it."""
        self._engine.leave()


class OurWorker:
    """A worker of ours without a model to run: lease, pull, write each layer's gradient into the outbox, push."""

    def __init__(
        self, group: Group, plan: Plan, shards: Sequence[ParameterShard], gradient: Floats, own: Floats
    ) -> None:
        self._forms = [GradientLayout(shard, plan.wire) for shard in shards]
        self._slots = [slot for shard in shards for slot in shard.slots]
        self._servers = [server for server, shard in enumerate(shards) for _ in shard.slots]
        ends = np.cumsum([slot.size // 4 for slot in self._slots])[:-1]
        self._gradients = [torch.from_numpy(part) for part in np.split(gradient, ends)]
        sizes = np.cumsum([shard.trained_bytes // 4 for shard in shards])[:-1]
        memory = [memoryview(part).cast("B") for part in np.split(own, sizes)]
        self._clients = ParameterClient(group, group.peers[:SERVERS])
        self._clients.open()
        self._first = self._until = 0
        self._clients.lay(shards, [form.size_bytes for form in self._forms], memory)

    def __call__(self, steps: int, meet: Callable[[], None]) -> tuple[float, float]:
        """Until the servers have all steps; the end is that of its last push."""
        clients = self._clients
        self._first, self._until = self._until, self._until + steps
        meet()
        begun = ended = time.perf_counter()
        while (grant := clients.lease(self._first)) is not None:
            clients.pull(grant.needs)
            self._write(clients)
            clients.push(weight=1.0, sums=[(1.0, 1.0)])
            ended = time.perf_counter()
        return begun, ended

    def _write(self, clients: ParameterClient) -> None:
        outbox = clients.outbox
        for server, slot, gradient in zip(self._servers, self._slots, self._gradients, strict=True):
            form = self._forms[server]
            form.write(outbox[server], slot.name, gradient)
            clients.ready(server, form.places[slot.name].offset, form.places[slot.name].size)

    def close(self) -> None:
        """End it."""
        self._clients.close()


class Copying:
    """The limit: as many bytes copied to memory of another's, and from there, as a push and a pull have."""

    def __init__(self, gradient: Floats, own: Floats) -> None:
        self._gradient, self._own = gradient, own
        self._there, self._here = np.ones_like(gradient), np.ones_like(own)

    def __call__(self, steps: int, meet: Callable[[], None]) -> tuple[float, float]:
        """Two copies a step."""
        meet()
        begun = time.perf_counter()
        for _ in range(steps):
            np.copyto(self._there, self._gradient)
            np.copyto(self._own, self._here)
        return begun, time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """Our ways that are measured, and the layers of a million parameters that the model has."""

    layers: int
    ways: tuple[str, ...]
    folder: str

    @property
    def spec(self) -> ModelSpec:
        """Of the job: only the optimizer is ever used."""
        return ModelSpec(
            model=partial(build, self.layers), loss=functional.cross_entropy, optimizer=sgd, total_steps=10**9,
            inputs=("x",), targets=("y",),
        )  # fmt: skip

    def plan(self, way: str) -> Plan:
        """Of one of our ways."""
        return Plan(
            strategy="parameter_server", engine="", mesh=Mesh(data=WORKERS), batch_size=WORKERS,
            placement=WorkerResources(cpus=1), servers=SERVERS, **WAYS[way],
        )  # fmt: skip

    @property
    def shards(self) -> tuple[ParameterShard, ...]:
        """What each server holds."""
        return server_shards(self.spec, self.plan("shared"), build(self.layers), "")


@contextlib.contextmanager
def start_exchanges(settings: ExchangeSettings) -> Iterator[Callable[[str, int], float]]:
    """Start servers and workers; yield a function (way, steps) -> seconds for each push and pull.

    The function raises EOFError when a process has failed; its traceback is on stderr.
    """
    barrier = get_context("spawn").Barrier(SERVERS + WORKERS)
    members = (partial(_member, rank, settings, barrier) for rank in range(SERVERS + WORKERS))
    with start_processes(*members) as pipes:
        share_messages(pipes)
        for pipe in pipes:
            pipe.recv()
        yield partial(_turn, pipes)


def _turn(pipes: Sequence[Connection], way: str, steps: int) -> float:
    for pipe in pipes:
        pipe.send((way, steps))
    spans = [pipe.recv() for pipe in pipes][SERVERS:]
    return float(max(end for _, end in spans) - min(begin for begin, _ in spans)) / (steps * WORKERS)


def _member(rank: int, settings: ExchangeSettings, barrier: Barrier, pipe: Connection) -> None:
    """One process: a server or a worker of every way."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        turns = (_server if rank < SERVERS else _worker)(rank, settings, pipe, stack)
        join(rank, SERVERS + WORKERS, f"{settings.folder}/rendezvous")
        pipe.send("ready")
        while True:
            way, steps = pipe.recv()
            pipe.send(turns[way](steps, lambda: barrier.wait(MEET_S)))


def _server(rank: int, settings: ExchangeSettings, pipe: Connection, stack: contextlib.ExitStack) -> dict[str, Turn]:
    servers = {way: OurServer(way) for way in settings.ways}
    pipe.send({way: server.reserve() for way, server in servers.items()})
    addresses = pipe.recv()
    for way, server in servers.items():
        stack.callback(server.close)
        server.form(_group(rank, way, addresses), settings.spec, settings.plan(way))
    return {"copy": _idle, "gloo": GlooServer(settings.shards[rank].trained_bytes // 4, WORKERS, RATE), **servers}


def _worker(rank: int, settings: ExchangeSettings, pipe: Connection, stack: contextlib.ExitStack) -> dict[str, Turn]:
    pipe.send({})
    addresses, dealt = pipe.recv(), settings.shards
    gradient, own = np.ones(settings.layers * 10**6, np.float32), np.zeros(settings.layers * 10**6, np.float32)
    ends = [shard.trained_bytes // 4 for shard in dealt][:-1]
    by_gloo = GlooWorker(*(torch.from_numpy(whole).tensor_split(ends) for whole in (gradient, own)))
    turns: dict[str, Turn] = {"copy": Copying(gradient, own), "gloo": by_gloo}
    for way in settings.ways:
        turns[way] = worker = OurWorker(_group(rank, way, addresses), settings.plan(way), dealt, gradient, own)
        stack.callback(worker.close)
    return turns


def _idle(steps: int, meet: Callable[[], None]) -> tuple[float, float]:
    """A server's part of a way without servers."""
    meet()
    return 0.0, 0.0


def _group(rank: int, way: str, addresses: Sequence[Mapping[str, Address]]) -> Group:
    nowhere = Address(host="127.0.0.1", port=0)
    peers = tuple(
        Peer(rank=number, address=found.get(way, nowhere), role="server" if number < SERVERS else "worker")
        for number, found in enumerate(addresses)
    )
    return Group(generation=GENERATION, rank=rank, peers=peers, key=b"of this benchmark", deadline_s=DEADLINE_S)
