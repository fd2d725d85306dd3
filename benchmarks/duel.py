"""Step time of our worker against a loop written by hand: the same two processes take turns with blocks of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, compare
from party import Seat, decided, machine, order_of, together
from problem import BATCH_SIZE, ROWS, WORKERS, job

from trainwright.driver.messages import RunRequest
from trainwright.worker.worker import Worker
from trainwright.worker.worker_config import WorkerConfig

BLOCK, SMOKE_BLOCK = 25, 3
Loop = Callable[[int], list[float]]  # (steps) -> seconds of each


@dataclass(frozen=True, kw_only=True)
class Turns:
    """How many pairs of blocks are measured, and the steps of a block."""

    pairs: int
    steps: int

    @property
    def total(self) -> int:
        """Steps of each loop, those of the block that warms up included."""
        return (self.pairs + 1) * self.steps


def turns_of(pairs: int, *, smoke: bool) -> Turns:
    """So many pairs of blocks; in a smoke run one, of short blocks."""
    return Turns(pairs=1, steps=SMOKE_BLOCK) if smoke else Turns(pairs=pairs, steps=BLOCK)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rank 0's view of one block."""

    median_s: float
    whole_s: float


def duel(
    name: str, folder: Path, by_hand: Callable[[Worker, int], Loop], against: str, turns: Turns, **fields: Any
) -> list[Figure]:
    """The figures: our worker against `by_hand(worker, rank)`, which is called once the worker has formed its group.

    Args:
        turns: what is measured.
        fields: of the job.
    """
    order = order_for(folder, turns.total, fields)
    ours, plain = together(order, partial(blocks, by_hand=by_hand, turns=turns))[0]
    medians = [[1e3 * block.median_s for block in each] for each in (ours, plain)]
    wholes = [[1e3 * block.whole_s / turns.steps for block in each] for each in (ours, plain)]
    return [
        compare(name, f"median step, against {against}", "ms", *medians, target=1.05, strict=True),
        compare(name, f"whole block per step, against {against}", "ms", *wholes, target=1.05, strict=True),
    ]


def order_for(folder: Path, steps: int, fields: dict[str, Any]) -> WorkerConfig:
    """What the driver would give its workers for a job of at least so many steps."""
    wanted = job(folder, epochs=-(-steps * BATCH_SIZE // ROWS), **fields)
    return order_of(wanted, decided(wanted, machine(WORKERS, memory_bytes=2**30)))


def blocks(seat: Seat, by_hand: Callable[[Worker, int], Loop], turns: Turns) -> tuple[list[Block], list[Block]]:
    """Blocks of ours and of the plain loop in turn."""
    loops = (OurLoop(seat.worker).run, by_hand(seat.worker, seat.rank))
    for loop in loops:
        loop(turns.steps)
    found: tuple[list[Block], list[Block]] = ([], [])
    for pair in range(turns.pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seat.meet()
            found[which].append(_block(loops[which], turns.steps))
    return found


def _block(run: Loop, steps: int) -> Block:
    """One block, from a moment at which both ranks are there."""
    begun = time.perf_counter()
    seconds = run(steps)
    return Block(whole_s=time.perf_counter() - begun, median_s=median(seconds))


class OurLoop:
    """The worker's own loop, block by block."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step = 0

    def run(self, steps: int) -> list[float]:
        """Seconds of each of so many steps, as the worker records them."""
        before, self._step = self._step, self._step + steps
        self._worker.run(RunRequest(steps=range(before, self._step)))
        return self._worker.watch(before, 0.0).step_s
