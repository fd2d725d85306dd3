"""Step time of our worker against a loop written by hand: the same two processes take turns with blocks of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, compare
from problem import BATCH_SIZE, ROWS, THREADS, WORKERS, job

from trainwright.core.cluster import Cluster, Node
from trainwright.core.group import Address, Generation, Group, Peer
from trainwright.driver.messages import Heal
from trainwright.prepare import plan_for, prepare
from trainwright.travel import pack
from trainwright.worker import Worker, WorkOrder

BLOCK, MEET_S = 50, 60.0
GENERATION = Generation(token=1, number=1)
Loop = Callable[[int], list[float]]  # (steps) -> seconds of each


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rank 0's view of one block."""

    median_s: float
    whole_s: float


def duel(
    name: str, folder: Path, by_hand: Callable[[Worker, int], Loop], against: str, *, pairs: int, **fields: Any
) -> list[Figure]:
    """The figures: our worker against `by_hand(worker, rank)`, which is called once the worker has formed its group.

    Args:
        pairs: of blocks.
        fields: of the job.
    """
    ours, plain = _in_processes(_order(folder, (pairs + 1) * BLOCK, fields), by_hand, pairs)
    return [
        compare(
            name, f"median step, against {against}", "ms",
            [1e3 * block.median_s for block in ours], [1e3 * block.median_s for block in plain],
            target=1.05, strict=True,
        ),
        compare(
            name, f"whole block per step, against {against}", "ms",
            [1e3 * block.whole_s / BLOCK for block in ours], [1e3 * block.whole_s / BLOCK for block in plain],
            target=1.05, strict=True,
        ),
    ]  # fmt: skip


def _order(folder: Path, steps: int, fields: dict[str, Any]) -> WorkOrder:
    """What the driver would give its workers for a job of at least so many steps."""
    wanted = job(folder, epochs=-(-steps * BATCH_SIZE // ROWS), **fields)
    prepared = prepare(wanted)
    machine = Cluster(nodes=(Node(name="machine", cpus=WORKERS, memory_bytes=2**30),))
    plan = plan_for(prepared, machine).chosen
    return WorkOrder(job=pack(wanted), plan=plan, storage=wanted.storage, run=wanted.name, train=prepared.train)


def _in_processes(
    order: WorkOrder, by_hand: Callable[[Worker, int], Loop], pairs: int
) -> tuple[list[Block], list[Block]]:
    """Both ranks in processes of their own; returns rank 0's blocks of ours and of the plain loop."""
    context = get_context("spawn")
    answers, answering = context.Pipe(duplex=False)
    near, far = context.Pipe()
    barrier = context.Barrier(WORKERS)
    ranks = [
        context.Process(target=_rank, args=(order, by_hand, pairs, rank, barrier, pipe, answering), daemon=True)
        for rank, pipe in enumerate((near, far))
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


def _rank(
    order: WorkOrder,
    by_hand: Callable[[Worker, int], Loop],
    pairs: int,
    rank: int,
    barrier: Barrier,
    other: Connection,
    answers: Connection,
) -> None:
    """Form the group, then blocks of ours and of the plain loop in turn."""
    worker = Worker(order)
    own = worker.reserve(GENERATION)
    other.send(own)
    theirs: Address = other.recv()
    peers = tuple(Peer(rank=n, address=at) for n, at in enumerate((own, theirs) if rank == 0 else (theirs, own)))
    worker.form(Group(generation=GENERATION, rank=rank, peers=peers, threads=THREADS))
    worker.heal(Heal(step=0, source="initial"))
    loops = (OurLoop(worker).run, by_hand(worker, rank))
    for loop in loops:
        loop(BLOCK)
    blocks: tuple[list[Block], list[Block]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            barrier.wait(MEET_S)
            blocks[which].append(_block(loops[which]))
    barrier.wait(MEET_S)
    worker.close()
    if rank == 0:
        answers.send(blocks)


def _block(run: Loop) -> Block:
    """One block, from a moment at which both ranks are there."""
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
