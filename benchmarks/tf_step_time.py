"""Step time against plain MultiWorkerMirroredStrategy: the same two processes take turns with blocks of both loops."""

from __future__ import annotations

from pathlib import Path

import keras_problem
from figures import Figure
from paired_loops import BLOCK, Loop, block_pairs, compare_loops
from problem import THREADS, WORKERS

from trainwright.worker.worker import Worker

NOTE = (
    f"The network, optimizer, batch and data of `step_time` in Keras 3, {WORKERS} processes on one machine with "
    f"{THREADS} thread each, collectives over gRPC. The same two processes hold one MultiWorkerMirroredStrategy, in it "
    "a loop as TensorFlow's tutorial on custom training has it (`tf.function` around `strategy.run`, a distributed "
    "`tf.data` with auto-shard off that is shuffled and prefetched, the loss of a step never read) and trainwright's "
    "worker (its own loop, data stream, engine and records, which reads the loss of each step, without Ray around it); "
    f"they take turns with blocks of {BLOCK} steps behind a barrier, every other pair begins with the other loop. As a "
    "loop by hand may run ahead of its last steps, `whole block`, at whose end it waits for all of them, is what "
    "counts."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    described = {**keras_problem.FIELDS, "strategy": "tf_multi_worker_mirrored"}
    against, pairs = "plain MultiWorkerMirroredStrategy", block_pairs(60, smoke=smoke)
    return compare_loops("tf_step_time", folder, _by_hand, against, pairs, 1.05, **described)


def _by_hand(worker: Worker, _rank: int) -> Loop:
    from peers.plain_mwms import PlainLoop
    from tensorflow import distribute

    engine = worker._engine
    strategy = engine._strategy  # type: ignore[attr-defined]  # a process opens one
    assert isinstance(strategy, distribute.MultiWorkerMirroredStrategy)
    return PlainLoop(strategy).run
