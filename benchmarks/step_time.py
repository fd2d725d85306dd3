"""Step time against plain torch.distributed: the same two processes take turns with blocks of both loops."""

from __future__ import annotations

from pathlib import Path

from figures import Figure
from paired_loops import BLOCK, Loop, block_pairs, compare_loops
from peers.plain_loops import data_parallel_loop
from problem import BATCH_SIZE, THREADS, WORKERS

from trainwright.worker.worker import Worker

NOTE = (
    f"A multilayer perceptron of 0.8 million parameters, AdamW, global batch {BATCH_SIZE}, {WORKERS} processes on one "
    f"machine with {THREADS} thread each, gloo, data in memory. The same two processes hold the same process group, a "
    "DistributedDataParallel loop written by hand and trainwright's worker (its own loop, data stream, engine and "
    f"records, without Ray around it), and take turns with blocks of {BLOCK} steps behind a barrier; every other pair "
    "begins with the other loop. `median step` compares the median step of each block as rank 0 saw it, `whole block` "
    "the wall time of each block. At the end of each block trainwright compares the replicas, as it does before each "
    "checkpoint: about 6 ms here, half of a step, in every 25."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    pairs = block_pairs(150, smoke=smoke)
    return compare_loops("step_time", folder, _by_hand, "plain DDP", pairs, 1.01, strategy="data_parallel")


def _by_hand(_worker: Worker, rank: int) -> Loop:
    return data_parallel_loop(rank).run
