"""Run the ranks of a job as local processes, without Ray and without a driver.

Each process makes trainwright's worker, joins the process group as the driver would request it, and runs a function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

from processes import share_messages, start_processes

import trainwright as tw
from trainwright.core.cluster import Cluster, Node
from trainwright.core.frameworks import keep_freed_memory
from trainwright.core.topology import Address, Generation, Group, Peer
from trainwright.driver.messages import ReserveRequest, RestorePlan
from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import plan_for, prepare
from trainwright.worker.worker import Worker
from trainwright.worker.worker_config import WorkerConfig, pickle_job

BARRIER_S = 60.0
GENERATION = Generation(token=1, number=1)


@dataclass(frozen=True, kw_only=True)
class LocalRank:
    """One rank of a job in a process of its own.

    Attributes:
        worker: in its process group, with the state of step 0, ready to run.
        rank: in the process group.
        barrier: that all ranks share.
        context_value: what the context gave that the process entered before it made the worker.
    """

    worker: Worker
    rank: int
    barrier: Barrier
    context_value: Any

    def wait_for_others(self) -> None:
        """Wait at the barrier for the other ranks."""
        self.barrier.wait(BARRIER_S)


RankWork = Callable[[LocalRank], Any]
ContextFactory = Callable[[], AbstractContextManager[Any]]


def one_node_cluster(cpus: int, memory_bytes: int = 2**33) -> Cluster:
    """Return a cluster of one node."""
    return Cluster(nodes=(Node(name="machine", cpus=cpus, memory_bytes=memory_bytes),))


def choose_plan(job: tw.Job, cluster: Cluster) -> Decision:
    """Return the planner's decision for a job on a cluster."""
    return plan_for(prepare(job), cluster)


def worker_config_of(job: tw.Job, decision: Decision) -> WorkerConfig:
    """Return the configuration that the driver would send to the workers of a job."""
    prepared = prepare(job)
    return WorkerConfig(
        job=pickle_job(job), plan=decision.chosen, storage=job.storage, run=job.name, train=prepared.train
    )


def run_ranks(config: WorkerConfig, work: RankWork) -> list[Any]:
    """Run `work` on each rank of a job, and return the results by rank.

    Args:
        config: of the workers.
        work: called in each process with its rank. Picklable.

    Raises:
        EOFError: a rank has failed; its traceback is on stderr.
    """
    return run_ranks_for_each([config], work)[0]


def run_ranks_for_each(
    configs: Sequence[WorkerConfig], work: RankWork, *, context: ContextFactory = contextlib.nullcontext
) -> list[list[Any]]:
    """Run `work` as `run_ranks` does for one configuration after another, in the same processes.

    Args:
        configs: of the workers.
        work: as for `run_ranks`.
        context: entered by each process before it makes a worker, left after `work`.

    Returns:
        The results by configuration, then by rank.
    """
    sizes = {config.plan.workers for config in configs}
    barriers = {workers: get_context("spawn").Barrier(workers) for workers in sizes}
    with start_processes(*(partial(_serve, work, context, rank, barriers) for rank in range(max(sizes)))) as pipes:
        return [_run_config(config, pipes[: config.plan.workers]) for config in configs]


def _run_config(config: WorkerConfig, pipes: Sequence[Connection]) -> list[Any]:
    """Send a configuration to its ranks and their addresses to all of them, and return their results."""
    for pipe in pipes:
        pipe.send(config)
    share_messages(pipes)
    return [pipe.recv() for pipe in pipes]


def _serve(
    work: RankWork, context: ContextFactory, rank: int, barriers: Mapping[int, Barrier], pipe: Connection
) -> None:
    """Run one configuration after another, until the pipe is closed. Memory is kept as in a worker's actor."""
    keep_freed_memory()
    while True:
        config: WorkerConfig = pipe.recv()
        with context() as context_value:
            pipe.send(_run_rank(config, work, context_value, rank, pipe, barriers[config.plan.workers]))


def _run_rank(
    config: WorkerConfig, work: RankWork, context_value: Any, rank: int, pipe: Connection, barrier: Barrier
) -> Any:
    """Join the process group, initialize the state of step 0, and run `work`."""
    worker = Worker(config)
    pipe.send(worker.reserve(ReserveRequest(generation=GENERATION)))
    addresses: list[Address] = pipe.recv()
    peers = tuple(Peer(rank=number, address=address) for number, address in enumerate(addresses))
    placement = config.plan.placement
    devices = ("cuda:0",) if placement.accelerator == "GPU" else ("cpu",)
    group = Group(
        generation=GENERATION, rank=rank, peers=peers, key=b"of this benchmark", devices=devices,
        threads=placement.threads,
    )  # fmt: skip
    worker.form(group)
    worker.restore(RestorePlan(step=0, source="initial"))
    result = work(LocalRank(worker=worker, rank=rank, barrier=barrier, context_value=context_value))
    barrier.wait(BARRIER_S)
    worker.leave()
    return result
