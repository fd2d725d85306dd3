"""Delivery inside a worker: the feeds of every step from any step on, read ahead of the consumer."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Batch, Cursor, Feed, Feeding, Prefetch
from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.arrow_columns import Arrays
from trainwright.datasets.index import Index, Rowwise
from trainwright.datasets.loading.bad_samples import Salvage
from trainwright.datasets.loading.batches import Assembly, Shares, weightless
from trainwright.datasets.loading.prefetch import ReadAhead
from trainwright.datasets.ops.transforms import Counters
from trainwright.datasets.sampling.sampler import MEMORY_BYTES, Order, Rows, choose_lanes
from trainwright.datasets.sampling.step_schedule import Schedule, Share, by_pass

__all__ = ["Feeds", "Fetcher", "Stream", "schedule_of"]

AHEAD_BYTES = 128 << 20
_CHUNK_ROWS, _CHUNK_BYTES, _CHUNK_STEPS = 4096, 8 << 20, 64
_WARM_ROWS = 8  # rows that a heavy transform computes for the throwaway step


class Fetcher(Protocol):
    """Where transformed shares come from when they are not computed here, such as Ray Data."""

    def fetch(self, step: int, rank: int, total: int) -> tuple[range, Arrays]:
        """Columns of a data rank's share of the chunk of steps that holds `step`, and that chunk. Has a deadline."""


class Feeds(Iterator[Feed]):
    """Feeds of consecutive steps. Close it, or use it in a `with`: a thread reads ahead of it, as far as it has to.

    Args:
        chunks: feeds that are read together.
        memory_bytes: that may be ready ahead.
    """

    def __init__(self, chunks: Iterator[list[Feed]], memory_bytes: int = AHEAD_BYTES) -> None:
        self._largest = Prefetch(chunks=0, chunk_steps=0, chunk_bytes=0)
        self._chunks = ReadAhead(chunks, name="trainwright-feeds", size_of=_size, memory_bytes=memory_bytes)
        self._ready: Iterator[Feed] = iter(())

    @property
    def prefetch(self) -> Prefetch:
        """How far it reads ahead by now."""
        return replace(self._largest, chunks=self._chunks.depth)

    def __next__(self) -> Feed:
        while True:
            for feed in self._ready:
                return feed
            chunk = next(self._chunks)
            self._largest = replace(
                self._largest,
                chunk_steps=max(self._largest.chunk_steps, len(chunk)),
                chunk_bytes=max(self._largest.chunk_bytes, _size(chunk)),
            )
            self._ready = iter(chunk)

    def close(self) -> None:
        """End the reading thread. Safe to call twice."""
        self._chunks.close()
        self._ready = iter(())

    def __enter__(self) -> Feeds:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """The feeds of one actor over a whole run.

    Args:
        dataset: to read.
        index: of the data set, as the run began with it; by default it is looked up now.
        batch_size: global, in samples.
        epochs: of the run; each is a pass over the data, unless `epoch_samples` says otherwise.
        seed: of the order and of the transforms.
        shuffle: whether the order changes with each epoch; otherwise rows come as they are stored.
        drop_last: leave out the short last batch of each epoch.
        epoch_samples: samples of a virtual epoch.
        feeding: data ranks of this actor; it may have none.
        accumulation: micro-batches of each data rank in one step.
        static_shapes: fill every micro-batch to one size with repeats of weight 0.
        columns: to give; by default all.
        window: rows that are permuted together; by default chosen from the index.
        fetcher: gives the transformed shares of heavy data sets; without it, all is computed here.
        row: of the data set, of which full and warm feeds are made where a transform is slow to open.
        memory_bytes: decoded data that may be kept.
        salvage: goes on without samples that cannot be read; without it, they end the run.

    Raises:
        DataError: the data is missing, empty or lacks a column, or gives no step.
    """

    def __init__(
        self,
        dataset: Dataset,
        index: Index | None = None,
        *,
        batch_size: int,
        feeding: Feeding,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        epoch_samples: int | None = None,
        accumulation: int = 1,
        static_shapes: bool = False,
        columns: Iterable[str] | None = None,
        window: int | None = None,
        fetcher: Fetcher | None = None,
        row: Batch | None = None,
        memory_bytes: int = MEMORY_BYTES,
        salvage: Salvage | None = None,
    ) -> None:
        index = index or dataset.index()
        self._dataset, self._fetcher, self._feeding, self._salvage = dataset, fetcher, feeding, salvage
        self._row = row
        self._columns = None if columns is None else tuple(columns)
        self._schedule = schedule_of(
            index, batch_size=batch_size, epochs=epochs, seed=seed, shuffle=shuffle, drop_last=drop_last,
            epoch_samples=epoch_samples, window=window,
        )  # fmt: skip
        largest = self._schedule.largest_share(feeding.total)
        self._assembly = Assembly(
            schedule=self._schedule,
            feeding=feeding,
            accumulation=accumulation,
            rows=-(-largest // accumulation) if static_shapes else None,
        )
        self._reader = reader_of(dataset, index, self._columns, self._schedule.order, memory_bytes)
        self._chunk_steps = chunk_steps(batch_size * len(feeding.data_ranks) / feeding.total, index.row_bytes)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        return self._schedule.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        return self._schedule.total_steps

    @property
    def order(self) -> Order:
        """The order of the samples."""
        return self._schedule.order

    def cursor(self, step: int) -> Cursor:
        """Where the batch of global step `step` starts."""
        return self._schedule.cursor(step)

    @property
    def feeding(self) -> Feeding:
        """Which shares this actor has."""
        return self._feeding

    def size(self, step: int) -> int:
        """Real samples in the global batch of a step."""
        return self._schedule.size(step)

    def samples(self, step: int) -> Rows:
        """Row numbers of the global batch of a step, in the order of their positions."""
        return self._schedule.samples(step)

    def feed(self, step: int, share: int) -> Feed:
        """The feed of one step for any one data rank, read now."""
        ranks = range(share, share + 1)
        _, shares = self._shares(step, ranks, 1)
        return replace(self._assembly, feeding=replace(self._feeding, data_ranks=ranks)).feed(step, shares)

    def feeds(self, start_step: int = 0) -> Feeds:
        """Feeds of the steps from `start_step` to the end of the last epoch. Reading begins at once."""
        return Feeds(self._chunks(start_step))

    def warm_feed(self, step: int = 0, avoid: Collection[int] = ()) -> Feed:
        """As `full_feed`, with all samples of weight 0."""
        return weightless(self.full_feed(step, avoid))

    def full_feed(self, step: int = 0, avoid: Collection[int] = ()) -> Feed:
        """A feed of the shape of an ordinary step, of real samples.

        Args:
            step: about where the feeds will start, so that what is read for it is of use to them.
            avoid: steps whose samples are not to be used.
        """
        full = self._schedule.size(step) == self._schedule.batch_size
        start = step if full else step - step % self._schedule.steps_per_epoch
        if start in avoid:
            others = itertools.chain(range(start + 1, self.total_steps), range(start))
            alike = (other for other in others if self._schedule.size(other) == self._schedule.size(start))
            start = next((other for other in alike if other not in avoid), start)
        steps = range(start, start + 1)
        shares: dict[int, tuple[Share, Arrays]] = {}
        for rank in self._feeding.data_ranks:
            share = self._schedule.share(steps, rank, self._feeding.total)
            if self._row is not None:
                back = np.zeros(len(share.samples), dtype=np.int64)
                shares[rank] = share, {name: array[back] for name, array in self._row.columns.items()}
                continue
            few = np.minimum(np.arange(len(share.samples)), _WARM_ROWS - 1 if self._fetcher else len(share.samples))
            distinct, back = np.unique(few, return_inverse=True)
            columns, _ = self._read(share.samples[distinct], share.passes[distinct])
            shares[rank] = share, {name: array[back] for name, array in columns.items()}
        return self._assembly.feed(start, shares)

    def _chunks(self, step: int) -> Iterator[list[Feed]]:
        while step < self.total_steps:
            steps, shares = self._shares(step, self._feeding.data_ranks, self._chunk_steps)
            yield [self._assembly.feed(number, shares) for number in steps]
            step = steps.stop

    def _shares(self, step: int, ranks: range, length: int) -> tuple[range, Shares]:
        """The shares of some data ranks in a chunk of steps that begins here, of `length` where they are read here."""
        if self._fetcher is None:
            return self._computed(step, ranks, length)
        try:
            return self._fetched(self._fetcher, step, ranks)
        except (DataError, UserCodeError):
            if self._salvage is None:
                raise
            return self._computed(step, ranks, length)  # finds out which samples it was

    def _computed(self, step: int, ranks: range, length: int) -> tuple[range, Shares]:
        """Read and transform the shares of these data ranks together."""
        steps = range(step, self._schedule.chunk(step, length).stop)
        shares = [self._schedule.share(steps, rank, self._feeding.total) for rank in ranks]
        if not shares:
            return steps, {}
        samples = np.concatenate([share.samples for share in shares])
        passes = np.concatenate([share.passes for share in shares])
        columns, good = self._read(samples, passes)
        ends = np.cumsum([len(share.samples) for share in shares])
        parts = [slice(int(end) - len(share.samples), int(end)) for share, end in zip(shares, ends, strict=True)]
        return steps, {
            rank: (
                share if good is None else replace(share, good=good[part]),
                {name: array[part] for name, array in columns.items()},
            )
            for rank, share, part in zip(ranks, shares, parts, strict=True)
        }

    def _fetched(self, fetcher: Fetcher, step: int, ranks: range) -> tuple[range, Shares]:
        """Fetch the shares of these data ranks."""
        chunk = range(step, self.total_steps)
        shares: dict[int, tuple[Share, Arrays]] = {}
        for rank in ranks:
            chunk, columns = fetcher.fetch(step, rank, self._feeding.total)
            shares[rank] = self._schedule.share(chunk, rank, self._feeding.total), columns
        if not shares:
            chunk = self._schedule.chunk(step, self._chunk_steps)
        return range(step, chunk.stop), shares

    def _read(self, samples: Rows, passes: Rows) -> tuple[Arrays, npt.NDArray[np.bool_] | None]:
        """Transformed rows, each of its pass, and which of them are good; None where all are."""
        good = np.ones(len(samples), dtype=np.bool_)

        def compute(which: npt.NDArray[np.bool_], number: int) -> Arrays:
            counters = Counters(seed=self._schedule.order.seed, epoch=number)

            def read(wanted: Rows) -> Arrays:
                return self._dataset.transform(self._reader.gather(wanted, number), wanted, counters, self._columns)

            if self._salvage is None:
                return read(samples[which])
            columns, good[which] = self._salvage.read(read, samples[which])
            return columns

        return by_pass(passes, compute), None if self._salvage is None else good


def schedule_of(
    index: Index,
    *,
    batch_size: int,
    epochs: int,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    epoch_samples: int | None = None,
    window: int | None = None,
) -> Schedule:
    """The steps of a run, from the index alone: the same in every process. Raises DataError where there is no step."""
    lanes = choose_lanes(index.rows, index.row_bytes, groups=index.firsts, window=window)
    order = Order(lanes=lanes, seed=seed, shuffle=shuffle and not index.in_order)
    return Schedule(order=order, batch_size=batch_size, epochs=epochs, drop_last=drop_last, epoch_samples=epoch_samples)


def reader_of(
    dataset: Dataset, index: Index, columns: tuple[str, ...] | None, order: Order, memory_bytes: int = MEMORY_BYTES
) -> Rowwise:
    """A reader that keeps whole row groups where all of them fit the memory, and windows otherwise."""
    fits = index.rows * index.row_bytes <= memory_bytes or not index.groups[0].file
    return dataset.reader(index, columns, None if fits else order.lanes.edges, memory_bytes, order.seed)


def _size(chunk: list[Feed]) -> int:
    """Bytes of the columns of some feeds; of objects, their references only."""
    return sum(
        array.nbytes for feed in chunk for part in feed.parts for batch in part for array in batch.columns.values()
    )


def chunk_steps(rows: float, row_bytes: int) -> int:
    """Steps to read at once, for `rows` rows a step: enough to be quick, few enough to be small."""
    most = min(_CHUNK_ROWS, _CHUNK_BYTES // max(row_bytes, 1))
    return int(min(max(most // max(rows, 1), 1), _CHUNK_STEPS))
