"""Step time against plain torch.distributed: the same two processes take turns with blocks of both loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from figures import Figure, compare
from peers.plain_ddp import PlainLoop
from problem import BATCH_SIZE, ROWS, THREADS, WORKERS, job
from torch import distributed

from trainwright.core.cluster import Cluster, Node
from trainwright.core.group import Address, Generation, Group, Peer
from trainwright.driver.messages import Heal
from trainwright.prepare import plan_for, prepare
from trainwright.travel import pack
from trainwright.worker import Worker, WorkOrder

BLOCK = 50
NOTE = (
    f"A multilayer perceptron of 0.8 million parameters, AdamW, global batch {BATCH_SIZE}, {WORKERS} processes on one "
    f"machine with {THREADS} thread each, gloo, data in memory. The same two processes hold the same process group, a "
    "DistributedDataParallel loop written by hand and trainwright's worker (its own loop, data stream, engine and "
    f"records, without Ray around it), and take turns with blocks of {BLOCK} steps behind a barrier; every other pair "
    "begins with the other loop. `median step` compares the median step of each block as rank 0 saw it, `whole block` "
    "the wall time of each block."
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rank 0's view of one block."""

    median_s: float
    whole_s: float


def measure(folder: Path, *, quick: bool) -> list[Figure]:
    """The figures of this benchmark."""
    pairs = 8 if quick else 150
    ours, plain = _in_processes(_order(folder, steps=(pairs + 1) * BLOCK), pairs)
    return [
        compare(
            "step_time", "median step, against plain DDP", "ms",
            [1e3 * block.median_s for block in ours], [1e3 * block.median_s for block in plain],
            target=1.05, strict=True,
        ),
        compare(
            "step_time", "whole block per step, against plain DDP", "ms",
            [1e3 * block.whole_s / BLOCK for block in ours], [1e3 * block.whole_s / BLOCK for block in plain],
            target=1.05, strict=True,
        ),
    ]  # fmt: skip


def _order(folder: Path, steps: int) -> WorkOrder:
    """What the driver would give its workers for a job of at least so many steps."""
    wanted = job(folder, epochs=-(-steps * BATCH_SIZE // ROWS), strategy="data_parallel")
    prepared = prepare(wanted)
    machine = Cluster(nodes=(Node(name="machine", cpus=WORKERS, memory_bytes=2**30),))
    plan = plan_for(prepared, machine).chosen
    return WorkOrder(job=pack(wanted), plan=plan, storage=wanted.storage, run=wanted.name, train=prepared.train)


def _in_processes(order: WorkOrder, pairs: int) -> tuple[list[Block], list[Block]]:
    """Both ranks in processes of their own; returns rank 0's blocks of ours and of the plain loop."""
    context = get_context("spawn")
    answers, answering = context.Pipe(duplex=False)
    hears, tells = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_lead, args=(order, pairs, tells, answering), daemon=True),
        context.Process(target=_follow, args=(order, pairs, hears), daemon=True),
    ]
    for rank in ranks:
        rank.start()
    answering.close()
    try:
        ours, plain = answers.recv()  # EOFError when rank 0 has failed; its traceback is on stderr
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    return ours, plain


def _lead(order: WorkOrder, pairs: int, tells: Connection, answers: Connection) -> None:
    """Rank 0."""
    worker = Worker(order)
    address = worker.reserve(Generation(token=1, number=1))
    tells.send(address)
    answers.send(_take_turns(worker, 0, address, pairs))


def _follow(order: WorkOrder, pairs: int, hears: Connection) -> None:
    """Rank 1."""
    _take_turns(Worker(order), 1, hears.recv(), pairs)


def _take_turns(worker: Worker, rank: int, leader: Address, pairs: int) -> tuple[list[Block], list[Block]]:
    """Form the group, then blocks of ours and of the plain loop in turn."""
    peers = tuple(Peer(rank=number, address=leader) for number in range(WORKERS))
    worker.form(Group(generation=Generation(token=1, number=1), rank=rank, peers=peers, threads=THREADS))
    worker.heal(Heal(step=0, source="initial"))
    loops = (OurLoop(worker), PlainLoop(rank))
    for loop in loops:
        loop.run(BLOCK)
    blocks: tuple[list[Block], list[Block]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            blocks[which].append(_block(loops[which].run))
    worker.close()
    return blocks


def _block(run: Callable[[int], list[float]]) -> Block:
    """One block, from a moment at which both ranks are there."""
    distributed.barrier()
    begun = time.perf_counter()
    steps = run(BLOCK)
    return Block(whole_s=time.perf_counter() - begun, median_s=median(steps))


class OurLoop:
    """The worker's own loop, block by block."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step = 0

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps, as the worker records them."""
        before, self._step = self._step, self._step + steps
        self._worker.run(self._step)
        return self._worker.watch(before, 0.0).step_s
