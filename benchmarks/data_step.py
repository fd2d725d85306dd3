"""Step time of the demo's network: fed by the stream, shuffled, against the same batches from memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from fashion_table import sample_data, write_splits
from figures import Figure, compare
from processes import Rounds, run_interleaved
from rank_streams import ONE_RANK

import trainwright as tw
from trainwright.core.cluster import Cluster, Node
from trainwright.core.data import Feed
from trainwright.core.engine import Engine
from trainwright.core.topology import Generation, Group, Peer
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.planning.job_file import load_job
from trainwright.planning.job_preparation import plan_for, prepare
from trainwright.strategies import engine_class

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "fashion_mnist.py"
ROWS, BLOCK, BATCH_SIZE, THREADS = 60_000, 60, 256, 2
NOTE = (
    f"The job of examples/fashion_mnist.py over {ROWS:,} images of the same size and row groups, made here so that "
    f"nothing is fetched: one process, {THREADS} threads, its batch of {BATCH_SIZE}, shuffled. The same engine takes "
    f"turns with blocks of {BLOCK} steps: fed by the stream, which begins to read when the block begins and ends with "
    f"it, so that all reading falls into the block, and fed with the first {BLOCK} of these batches, held in memory. "
    "The first pair, in which the images are decoded, is not counted."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    pairs, block, rows = (1, 4, 2 * 4 * BATCH_SIZE) if smoke else (12, BLOCK, ROWS)
    loops = Loops(_job(folder, rows), block)
    found = run_interleaved({"streamed": loops.streamed, "held": loops.held}, Rounds(counted=pairs))
    streamed, held = ([1e3 * seconds / block for seconds in found[name]] for name in found)
    what = "demo's network, fed by the stream, against memory"
    return [compare("data_step", what, "ms", streamed, held, target=1.05)]


class Loops:
    """One engine, and two ways to feed it. Each gives the seconds of a block of so many steps."""

    def __init__(self, job: tw.Job, block: int) -> None:
        self._block = block
        prepared = prepare(job)
        plan = plan_for(prepared, Cluster(nodes=(Node(name="machine", cpus=THREADS, memory_bytes=2**30),))).chosen
        self._engine: Engine = engine_class(plan)()
        generation = Generation(token=1, number=1)
        peer = Peer(rank=0, address=self._engine.reserve("worker"))
        self._engine.form(Group(generation=generation, rank=0, peers=(peer,), threads=THREADS))
        self._stream = BatchLoader(
            job.train, prepared.train, batch_size=job.batch_size, epochs=job.epochs, seed=job.training.seed,
            shuffle=job.data.shuffle, columns=job.columns, feeding=ONE_RANK,
        )  # fmt: skip
        self._engine.build(job.model_spec(self._stream.schedule.total_steps), plan)
        self._engine.warm(self._stream.warm_feed())
        with self._stream.feeds() as feeds:
            self._held = list(islice(feeds, block))
        self._step = 0

    def streamed(self) -> float:
        """The next steps of the stream."""
        begun = time.perf_counter()
        with self._stream.feeds(self._step) as feeds:
            self._train(islice(feeds, self._block))
        self._step += self._block
        return time.perf_counter() - begun

    def held(self) -> float:
        """The first steps once more."""
        begun = time.perf_counter()
        self._train(self._held)
        return time.perf_counter() - begun

    def _train(self, feeds: Iterable[Feed]) -> None:
        for feed in feeds:
            self._engine.train_step(feed)


def _job(folder: Path, rows: int) -> tw.Job:
    """The demo's job, with enough epochs, over images made here."""
    splits = write_splits(folder / "images", rows, 1)
    sample_data.fashion_mnist = lambda *_: splits  # what the example calls
    return load_job(str(EXAMPLE)).replace(strategy="one_device", workers=1, epochs=8, storage=str(folder / "runs"))
