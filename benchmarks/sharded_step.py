"""The step of sharded data parallelism against plain FSDP2: the same two processes take turns with both loops."""

from __future__ import annotations

from pathlib import Path

from figures import Figure
from paired_loops import BLOCK, Loop, block_pairs, compare_loops
from peers.plain_loops import sharded_loop
from problem import BATCH_SIZE, THREADS

from trainwright.worker.worker import Worker

NOTE = (
    f"The network, optimizer, batch of {BATCH_SIZE} and data of `step_time`, every linear layer and the model divided "
    f"over two processes on one machine with {THREADS} thread each (ZeRO-3), gloo. The same two processes hold the "
    "same process group, a loop by hand around torch's fully_shard and trainwright's worker (its own loop, data "
    f"stream, engine and records, without Ray around it), and take turns with blocks of {BLOCK} steps behind a "
    "barrier; every other pair begins with the other loop."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    pairs = block_pairs(60, smoke=smoke)
    return compare_loops("sharded_step", folder, _by_hand, "FSDP2", pairs, 1.02, plan="fsdp=2")


def _by_hand(_worker: Worker, rank: int) -> Loop:
    return sharded_loop(rank).run
