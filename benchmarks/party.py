"""Ranks of trainwright's worker in processes of their own, which form a group as the driver would have them do it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import trainwright as tw
from trainwright.core.cluster import Cluster, Node
from trainwright.core.topology import Address, Generation, Group, Peer
from trainwright.driver.messages import ReserveRequest, RestorePlan
from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import plan_for, prepare
from trainwright.worker.worker import Worker
from trainwright.worker.worker_config import WorkerConfig, pickle_job

MEET_S, END_S = 60.0, 10.0
GENERATION = Generation(token=1, number=1)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One rank: its worker, healed and ready to step, where it meets the others, and what was begun before it all."""

    worker: Worker
    rank: int
    barrier: Barrier
    watch: Any

    def meet(self) -> None:
        """Wait for the other ranks."""
        self.barrier.wait(MEET_S)


Act = Callable[[Seat], Any]
Around = Callable[[], AbstractContextManager[Any]]


def machine(cpus: int, memory_bytes: int = 2**33) -> Cluster:
    """This machine as a cluster of one node."""
    return Cluster(nodes=(Node(name="machine", cpus=cpus, memory_bytes=memory_bytes),))


def decided(job: tw.Job, cluster: Cluster) -> Decision:
    """What the planner makes of a job."""
    return plan_for(prepare(job), cluster)


def order_of(job: tw.Job, decision: Decision) -> WorkerConfig:
    """What the driver would give the workers of a job."""
    prepared = prepare(job)
    return WorkerConfig(
        job=pickle_job(job), plan=decision.chosen, storage=job.storage, run=job.name, train=prepared.train
    )


def together(order: WorkerConfig, act: Act, *, around: Around = contextlib.nullcontext) -> list[Any]:
    """What `act` gives on each rank, in order.

    Args:
        around: entered by each process before its worker is made, left after `act`.

    Raises:
        EOFError: a rank has failed; its traceback is on stderr.
    """
    return one_after_another([order], act, around=around)[0]


def one_after_another(
    orders: Sequence[WorkerConfig], act: Act, *, around: Around = contextlib.nullcontext
) -> list[list[Any]]:
    """What `act` gives on each rank for each of the orders, which the same processes carry out."""
    context, most = get_context("spawn"), max(order.plan.workers for order in orders)
    pipes = [context.Pipe() for _ in range(most)]
    barriers = {workers: context.Barrier(workers) for workers in {order.plan.workers for order in orders}}
    processes = [
        context.Process(target=_serve, args=(act, around, rank, far, barriers), daemon=True)
        for rank, (_, far) in enumerate(pipes)
    ]
    for process, (_, far) in zip(processes, pipes, strict=True):
        process.start()
        far.close()
    near = [pipe for pipe, _ in pipes]
    try:
        return [_carried_out(order, near[: order.plan.workers]) for order in orders]
    finally:
        for pipe in near:
            pipe.close()
        for process in processes:
            process.join(END_S)
            process.kill()


def _carried_out(order: WorkerConfig, pipes: Sequence[Connection]) -> list[Any]:
    """Have the ranks carry out an order."""
    for pipe in pipes:
        pipe.send(order)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    return [pipe.recv() for pipe in pipes]


def _serve(act: Act, around: Around, rank: int, pipe: Connection, barriers: Mapping[int, Barrier]) -> None:
    """A process that carries out one order after another."""
    with contextlib.suppress(EOFError):  # there are no more
        while True:
            order: WorkerConfig = pipe.recv()
            with around() as watch:
                pipe.send(_rank(order, act, watch, rank, pipe, barriers[order.plan.workers]))


def _rank(order: WorkerConfig, act: Act, watch: Any, rank: int, pipe: Connection, barrier: Barrier) -> Any:
    """Form the group, stand at step 0, act."""
    worker = Worker(order)
    pipe.send(worker.reserve(ReserveRequest(generation=GENERATION)))
    addresses: list[Address] = pipe.recv()
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(addresses))
    placement = order.plan.placement
    devices = ("cuda:0",) if placement.accelerator == "GPU" else ("cpu",)
    about = {"devices": devices, "threads": placement.threads}
    worker.form(Group(generation=GENERATION, rank=rank, peers=peers, key=b"of this benchmark", **about))
    worker.heal(RestorePlan(step=0, source="initial"))
    found = act(Seat(worker=worker, rank=rank, barrier=barrier, watch=watch))
    barrier.wait(MEET_S)
    worker.leave()
    return found
