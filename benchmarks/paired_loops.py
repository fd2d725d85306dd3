"""Compare the step time of trainwright's worker with that of another loop: the same processes run both in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, compare
from local_ranks import LocalRank, choose_plan, one_node_cluster, run_ranks, worker_config_of
from problem import BATCH_SIZE, ROWS, WORKERS, job
from processes import Rounds, run_interleaved

from trainwright.driver.messages import RunRequest
from trainwright.worker.worker import Worker
from trainwright.worker.worker_config import WorkerConfig

BLOCK, SMOKE_BLOCK = 25, 3
Loop = Callable[[int], list[float]]  # (steps) -> seconds of each
PeerFactory = Callable[[Worker, int], Loop]  # (worker, rank) -> the loop that the worker is compared with


@dataclass(frozen=True, kw_only=True)
class BlockPairs:
    """How many pairs of blocks are measured, one block of each loop, and the steps of a block."""

    count: int
    block_steps: int

    @property
    def total_steps(self) -> int:
        """Steps of each loop, including its warm-up block."""
        return (self.count + 1) * self.block_steps


def block_pairs(count: int, *, smoke: bool) -> BlockPairs:
    """Return so many pairs of blocks; in a smoke run, one pair of short blocks."""
    return BlockPairs(count=1, block_steps=SMOKE_BLOCK) if smoke else BlockPairs(count=count, block_steps=BLOCK)


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Median step and wall time of one block, as its rank measured them."""

    median_s: float
    whole_s: float


def compare_loops(
    name: str, folder: Path, make_peer: PeerFactory, against: str, pairs: BlockPairs, target: float, **fields: Any
) -> list[Figure]:
    """Measure the worker's loop and the peer's in turn, and return the figures of rank 0.

    Args:
        name: of the benchmark.
        make_peer: called with the worker and its rank, once the worker has joined its process group.
        against: the peer's name in the figures.
        pairs: the blocks to measure.
        target: the upper end of both ratios' intervals is to be at most this.
        fields: of the job.
    """
    config = worker_config_for(folder, pairs.total_steps, fields)
    ours, peers = run_ranks(config, partial(measure_blocks, make_peer=make_peer, pairs=pairs))[0]
    medians = [[1e3 * block.median_s for block in blocks] for blocks in (ours, peers)]
    wholes = [[1e3 * block.whole_s / pairs.block_steps for block in blocks] for blocks in (ours, peers)]
    return [
        compare(name, f"median step, against {against}", "ms", *medians, target=target, strict=True),
        compare(name, f"whole block per step, against {against}", "ms", *wholes, target=target, strict=True),
    ]


def worker_config_for(folder: Path, steps: int, fields: dict[str, Any]) -> WorkerConfig:
    """Return the configuration of the workers of a job of at least so many steps, as the driver would make it."""
    wanted = job(folder, epochs=-(-steps * BATCH_SIZE // ROWS), **fields)
    return worker_config_of(wanted, choose_plan(wanted, one_node_cluster(WORKERS, memory_bytes=2**30)))


def measure_blocks(
    local_rank: LocalRank, make_peer: PeerFactory, pairs: BlockPairs
) -> tuple[list[BlockTimes], list[BlockTimes]]:
    """Run blocks of the worker's loop and of the peer's in turn on one rank, and return the times of each loop."""
    loops = {"worker": WorkerLoop(local_rank.worker).run, "peer": make_peer(local_rank.worker, local_rank.rank)}
    turns = {name: partial(_time_block, local_rank, loop, pairs.block_steps) for name, loop in loops.items()}
    found = run_interleaved(turns, Rounds(counted=pairs.count))
    return found["worker"], found["peer"]


def _time_block(local_rank: LocalRank, run: Loop, steps: int) -> BlockTimes:
    """Run one block, which all ranks begin together."""
    local_rank.wait_for_others()
    begun = time.perf_counter()
    seconds = run(steps)
    return BlockTimes(whole_s=time.perf_counter() - begun, median_s=median(seconds))


class WorkerLoop:
    """The worker's own training loop, run block by block."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step = 0

    def run(self, steps: int) -> list[float]:
        """Run so many steps, and return the seconds of each as the worker records them."""
        before, self._step = self._step, self._step + steps
        self._worker.run(RunRequest(steps=range(before, self._step)))
        return self._worker.watch(before, 0.0).step_s
