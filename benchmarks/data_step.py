"""Step time of the demo's network: fed by the stream, shuffled, against the same batches from memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from feeds import ONE_RANK
from figures import Figure, compare

import trainwright as tw
from trainwright.core.cluster import Cluster, Node
from trainwright.core.data import Feed
from trainwright.core.engine import Engine
from trainwright.core.group import Generation, Group, Peer
from trainwright.datasets.fashion_mnist import Splits
from trainwright.datasets.stream import Stream
from trainwright.jobfile import load_job
from trainwright.prepare import plan_for, prepare
from trainwright.strategies import engine_class

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "fashion_mnist.py"
ROWS, GROUP_ROWS, BLOCK, THREADS = 60_000, 1250, 60, 2
NOTE = (
    f"The job of examples/fashion_mnist.py over {ROWS:,} images of the same size and row groups, made here so that "
    f"nothing is fetched: one process, {THREADS} threads, its batch of 256, shuffled. The same engine takes turns with "
    f"blocks of {BLOCK} steps: fed by the stream, which begins to read when the block begins and ends with it, so that "
    f"all reading falls into the block, and fed with the first {BLOCK} of these batches, held in memory. The first "
    "pair, in which the images are decoded, is not counted."
)


def measure(folder: Path, *, quick: bool) -> list[Figure]:
    """The figures of this benchmark."""
    loops = Loops(_job(folder))
    pairs = 3 if quick else 12
    streamed, held = [], []
    for pair in range(pairs + 1):
        turns = [(loops.streamed, streamed), (loops.held, held)]
        for turn, seconds in turns if pair % 2 == 0 else turns[::-1]:
            seconds.append(1e3 * turn() / BLOCK)
    what = "demo's network, fed by the stream, against memory"
    return [compare("data_step", what, "ms", streamed[1:], held[1:], target=1.05)]


class Loops:
    """One engine, and two ways to feed it. Each gives the seconds of a block."""

    def __init__(self, job: tw.Job) -> None:
        prepared = prepare(job)
        plan = plan_for(prepared, Cluster(nodes=(Node(name="machine", cpus=THREADS, memory_bytes=2**30),))).chosen
        self._engine: Engine = engine_class(plan)()
        generation = Generation(token=1, number=1)
        peer = Peer(rank=0, address=self._engine.reserve(generation, "worker"))
        self._engine.form(Group(generation=generation, rank=0, peers=(peer,), threads=THREADS))
        self._stream = Stream(
            job.train, prepared.train, batch_size=job.batch_size, epochs=job.epochs, seed=job.seed,
            shuffle=job.shuffle, columns=job.columns, feeding=ONE_RANK,
        )  # fmt: skip
        self._engine.build(job.model_spec(self._stream.total_steps), plan)
        self._engine.warm(self._stream.warm_feed())
        with self._stream.feeds() as feeds:
            self._held = list(islice(feeds, BLOCK))
        self._step = 0

    def streamed(self) -> float:
        """The next steps of the stream."""
        begun = time.perf_counter()
        with self._stream.feeds(self._step) as feeds:
            self._train(islice(feeds, BLOCK))
        self._step += BLOCK
        return time.perf_counter() - begun

    def held(self) -> float:
        """The first steps once more."""
        begun = time.perf_counter()
        self._train(self._held)
        return time.perf_counter() - begun

    def _train(self, feeds: Iterable[Feed]) -> None:
        for feed in feeds:
            self._engine.train_step(feed)


def _job(folder: Path) -> tw.Job:
    """The demo's job, with enough epochs, over images made here."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, 28, 28), dtype=np.uint8)
    table = pa.table(
        {
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
            "label": rng.integers(0, 10, ROWS),
            "id": np.arange(ROWS),
        }
    )
    pq.write_table(table, folder / "train.parquet", row_group_size=GROUP_ROWS)
    splits = Splits(train=str(folder / "train.parquet"), test=str(folder / "train.parquet"))
    setattr(tw.datasets, "fashion_mnist", lambda *_: splits)  # noqa: B010  # what the example calls
    return load_job(str(EXAMPLE)).replace(strategy="one_device", workers=1, epochs=8, storage=str(folder / "runs"))
