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

from trainwright.worker import Worker
from trainwright.workorder import WorkOrder

BLOCK = 25
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
    order = order_for(folder, (pairs + 1) * BLOCK, fields)
    ours, plain = together(order, partial(blocks, by_hand=by_hand, pairs=pairs))[0]
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


def order_for(folder: Path, steps: int, fields: dict[str, Any]) -> WorkOrder:
    """What the driver would give its workers for a job of at least so many steps."""
    wanted = job(folder, epochs=-(-steps * BATCH_SIZE // ROWS), **fields)
    return order_of(wanted, decided(wanted, machine(WORKERS, memory_bytes=2**30)))


def blocks(seat: Seat, by_hand: Callable[[Worker, int], Loop], pairs: int) -> tuple[list[Block], list[Block]]:
    """Blocks of ours and of the plain loop in turn."""
    loops = (OurLoop(seat.worker).run, by_hand(seat.worker, seat.rank))
    for loop in loops:
        loop(BLOCK)
    found: tuple[list[Block], list[Block]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seat.meet()
            found[which].append(_block(loops[which]))
    return found


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
        self._worker.run(range(before, self._step))
        return self._worker.watch(before, 0.0).step_s
