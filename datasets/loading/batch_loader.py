"""The batches of a worker: the feeds of its steps, from any step on, read ahead in a thread."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Batch, Feed, FeedAssignment, PrefetchDepth, zero_weight
from trainwright.core.errors import DataError, UserCodeError
from trainwright.core.topology import WorkUnit
from trainwright.datasets.data_source import Arrays, Index, RowAccess, Rows, content_bytes
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.loading.bad_samples import SkippingReader
from trainwright.datasets.ops.row_transforms import Counters
from trainwright.datasets.row_reader import RowReader
from trainwright.datasets.sample_order import (
    MEMORY_BYTES,
    Lanes,
    RankShare,
    SampleOrder,
    StepSchedule,
    apply_by_pass,
    choose_lanes,
)

__all__ = ["BatchLoader", "Feeds", "Fetcher", "make_schedule"]

_AHEAD_BYTES = 128 << 20
_CHUNK_ROWS, _CHUNK_BYTES, _CHUNK_STEPS = 4096, 8 << 20, 64
_WARM_ROWS = 8  # rows that a heavy transform computes for the throwaway step


_Shares = Mapping[int, tuple[RankShare, Arrays]]
"""By data rank, its share of some steps and the columns of the share's rows."""


class Fetcher(Protocol):
    """Gives transformed shares that another process computes, such as Ray Data."""

    def fetch(self, step: int, rank: int, total: int) -> tuple[range, Arrays]:
        """Columns of a data rank's share of the chunk of steps that holds `step`, and that chunk. Has a deadline."""


class Feeds(Iterator[Feed]):
    """Feeds of consecutive steps, which a thread reads ahead. Close it, or use it in a `with`."""

    def __init__(self, chunks: Iterator[list[Feed]]) -> None:
        self._largest = PrefetchDepth(chunks=0, chunk_steps=0, chunk_bytes=0)
        self._chunks = ReadAhead(chunks, name="trainwright-feeds", size_of=_size, memory_bytes=_AHEAD_BYTES)
        self._ready: Iterator[Feed] = iter(())

    @property
    def prefetch(self) -> PrefetchDepth:
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


class BatchLoader:
    """Reads the feeds of one actor over a whole run.

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
        columns: that the feeds have; by default all.
        window: rows that are permuted together; by default chosen from the index.
        fetcher: gives the transformed shares of heavy data sets; without it, all is computed here.
        rows: gives the rows of the source; by default they are read here.
        row: a row of the data set, repeated in full and warm feeds where a transform is slow to open.
        salvage: skips samples that cannot be read; without it, they end the run.

    Attributes:
        schedule: the steps of the run and their samples.
        feeding: data ranks of this actor.

    Raises:
        DataError: the data is missing or empty, has no such column, or gives no step.
    """

    def __init__(
        self,
        dataset: Dataset,
        index: Index | None = None,
        *,
        batch_size: int,
        feeding: FeedAssignment,
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
        rows: RowAccess | None = None,
        row: Batch | None = None,
        salvage: SkippingReader | None = None,
    ) -> None:
        index = index or dataset.index()
        self._fetcher, self.feeding, self._salvage = fetcher, feeding, salvage
        self._row = row
        self._columns = None if columns is None else tuple(columns)
        self.schedule = make_schedule(
            index, batch_size=batch_size, epochs=epochs, seed=seed, shuffle=shuffle, drop_last=drop_last,
            epoch_samples=epoch_samples, window=window,
        )  # fmt: skip
        largest = self.schedule.largest_share(feeding.total)
        self._accumulation = accumulation
        self._fill_rows = -(-largest // accumulation) if static_shapes else None
        reader = rows or make_reader(dataset, index, self._columns, self.schedule.order, feeding)
        self._rows = TransformedRows(dataset, reader, self._columns, seed=self.schedule.order.seed, salvage=salvage)
        self._chunk_steps = chunk_steps(batch_size * len(feeding.data_ranks) / feeding.total, index.row_bytes)

    def feed(self, step: int, share: int) -> Feed:
        """The feed of one step for any one data rank, read now."""
        ranks = range(share, share + 1)
        _, shares = self._shares(step, ranks, 1)
        return self._assembled(step, ranks, shares)

    def feeds(self, start_step: int = 0) -> Feeds:
        """Feeds of the steps from `start_step` to the end of the last epoch. Reading begins at once."""
        return Feeds(self._chunks(start_step))

    def warm_feed(self, step: int = 0, avoid: Collection[int] = ()) -> Feed:
        """As `full_feed`, with all samples of weight 0."""
        return zero_weight(self.full_feed(step, avoid))

    def full_feed(self, step: int = 0, avoid: Collection[int] = ()) -> Feed:
        """A feed of the shape of an ordinary step, of real samples.

        Args:
            step: about where the feeds will start, so that what is read for it is of use to them.
            avoid: steps whose samples are not to be used.
        """
        full = self.schedule.size(step) == self.schedule.batch_size
        start = step if full else step - step % self.schedule.steps_per_epoch
        if start in avoid:
            others = itertools.chain(range(start + 1, self.schedule.total_steps), range(start))
            alike = (other for other in others if self.schedule.size(other) == self.schedule.size(start))
            start = next((other for other in alike if other not in avoid), start)
        steps = range(start, start + 1)
        shares: dict[int, tuple[RankShare, Arrays]] = {}
        for rank in self.feeding.data_ranks:
            share = self.schedule.share(steps, rank, self.feeding.total)
            if self._row is not None:
                back = np.zeros(len(share.samples), dtype=np.int64)
                shares[rank] = share, {name: array[back] for name, array in self._row.columns.items()}
                continue
            few = np.minimum(np.arange(len(share.samples)), _WARM_ROWS - 1 if self._fetcher else len(share.samples))
            distinct, back = np.unique(few, return_inverse=True)
            columns, _ = self._read(share.samples[distinct], share.passes[distinct])
            shares[rank] = share, {name: array[back] for name, array in columns.items()}
        return self._assembled(start, self.feeding.data_ranks, shares)

    def _chunks(self, step: int) -> Iterator[list[Feed]]:
        while step < self.schedule.total_steps:
            steps, shares = self._shares(step, self.feeding.data_ranks, self._chunk_steps)
            yield [self._assembled(number, self.feeding.data_ranks, shares) for number in steps]
            step = steps.stop

    def _shares(self, step: int, ranks: range, length: int) -> tuple[range, _Shares]:
        """The shares of some data ranks in a chunk of steps that begins here, of `length` where they are read here."""
        if self._fetcher is None:
            return self._computed(step, ranks, length)
        try:
            return self._fetched(self._fetcher, step, ranks)
        except (DataError, UserCodeError):
            if self._salvage is None:
                raise
            return self._computed(step, ranks, length)  # finds out which samples it was

    def _computed(self, step: int, ranks: range, length: int) -> tuple[range, _Shares]:
        """Read and transform the shares of these data ranks together."""
        steps = range(step, self.schedule.chunk(step, length).stop)
        shares = [self.schedule.share(steps, rank, self.feeding.total) for rank in ranks]
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

    def _fetched(self, fetcher: Fetcher, step: int, ranks: range) -> tuple[range, _Shares]:
        """Fetch the shares of these data ranks."""
        chunk = range(step, self.schedule.total_steps)
        shares: dict[int, tuple[RankShare, Arrays]] = {}
        for rank in ranks:
            chunk, columns = fetcher.fetch(step, rank, self.feeding.total)
            shares[rank] = self.schedule.share(chunk, rank, self.feeding.total), columns
        if not shares:
            chunk = self.schedule.chunk(step, self._chunk_steps)
        return range(step, chunk.stop), shares

    def _assembled(self, step: int, ranks: range, shares: _Shares) -> Feed:
        """The feed of one step for these data ranks, from their shares that hold the step."""
        return Feed(
            step=step,
            parts=tuple(self._micro_batches(step, *shares[rank]) for rank in ranks),
            data_ranks=ranks,
            total=self.feeding.total,
            rows=self.schedule.size(step),
        )

    def _micro_batches(self, step: int, share: RankShare, columns: Arrays) -> tuple[Batch, ...]:
        """A step's rows cut into micro-batches as evenly as possible, in position order."""
        at = step - share.steps.start
        first, last = int(share.bounds[at]), int(share.bounds[at + 1])
        real = last - first if share.real[at] else 0
        cuts = [first + real * part // self._accumulation for part in range(self._accumulation + 1)]
        return tuple(self._batch(share, columns, low, high, first) for low, high in pairwise(cuts))

    def _batch(self, share: RankShare, columns: Arrays, low: int, high: int, first: int) -> Batch:
        """Rows low..high; the step's first row, with weight 0, where there are none."""
        real = high - low
        if not real:
            low, high = first, first + 1
        weights = np.ones(real) if share.good is None else share.good[low:high].astype(np.float64)
        batch = Batch(
            columns={name: array[low:high] for name, array in columns.items()},
            weights=weights if real else np.zeros(1),
            samples=share.samples[low:high],
        )
        return batch if self._fill_rows in (None, batch.rows) else _pad_batch(batch, self._fill_rows)

    def _read(self, samples: Rows, passes: Rows) -> tuple[Arrays, npt.NDArray[np.bool_] | None]:
        """Transformed rows, each of its pass, and which of them are good; None where all are."""
        good = np.ones(len(samples), dtype=np.bool_)

        def compute(which: npt.NDArray[np.bool_], number: int) -> Arrays:
            columns, good[which] = self._rows.read(samples[which], number)
            return columns

        return apply_by_pass(passes, compute), None if self._salvage is None else good


class TransformedRows:
    """Rows of a data set by number, transformed. For one thread.

    Args:
        dataset: that they are of.
        rows: of its source.
        columns: to return; None for all.
        seed: of the transforms.
        salvage: skips rows that cannot be read; without it, they raise an error.
    """

    def __init__(
        self,
        dataset: Dataset,
        rows: RowAccess,
        columns: tuple[str, ...] | None,
        *,
        seed: int,
        salvage: SkippingReader | None,
    ) -> None:
        self._dataset, self._columns, self._seed, self._salvage = dataset, columns, seed, salvage
        self._gather = rows.salvage if salvage is not None and isinstance(rows, RowReader) else rows.gather

    def read(self, samples: Rows, epoch: int = 0) -> tuple[Arrays, npt.NDArray[np.bool_]]:
        """Return rows of an epoch, and which of them are good; a bad row holds a copy of a good one.

        Raises:
            DataError, UserCodeError: an error of the data or its transforms.
        """
        counters = Counters(seed=self._seed, epoch=epoch)

        def read(wanted: Rows) -> Arrays:
            return self._dataset.transform(self._gather(wanted, epoch), wanted, counters, self._columns)

        if self._salvage is None:
            return read(samples), np.ones(len(samples), dtype=np.bool_)
        return self._salvage.read(read, samples, epoch)


def make_schedule(
    index: Index,
    *,
    batch_size: int,
    epochs: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    epoch_samples: int | None = None,
    window: int | None = None,
) -> StepSchedule:
    """The steps of a run, from the index alone: the same in every process.

    Raises:
        DataError: there is no step, or the data has batches of another size.
    """
    if index.batch_size not in (0, batch_size):
        raise DataError(
            f"the data is in batches of {index.batch_size} rows of similar length, and batch_size={batch_size}",
            where="bucketed",
            remedy=f"give the job's to the data: .bucketed(..., {batch_size})",
        )
    in_windows = index.in_order and index.window > 0
    if in_windows:
        lanes = Lanes(rows=index.rows, window=min(window or index.window, index.window))
    else:
        lanes = choose_lanes(index.rows, index.row_bytes, groups=index.firsts, window=window)
    shuffle = shuffle and (in_windows or not (index.in_order or index.batch_size))
    order = SampleOrder(lanes=lanes, seed=seed, shuffle=shuffle, in_order=in_windows)
    return StepSchedule(
        order=order, batch_size=batch_size, epochs=epochs, drop_last=drop_last, epoch_samples=epoch_samples
    )


def make_reader(
    dataset: Dataset,
    index: Index,
    columns: tuple[str, ...] | None,
    order: SampleOrder,
    feeding: FeedAssignment | None = None,
) -> RowAccess:
    """A reader that keeps whole row groups where all of them fit the memory, and windows otherwise."""
    fits = index.rows * index.row_bytes <= MEMORY_BYTES or not index.groups[0].file
    return dataset.reader(index, columns, None if fits else order.lanes.edges, MEMORY_BYTES, order.seed, feeding)


def _size(chunk: list[Feed]) -> int:
    """Bytes of the columns of some feeds."""
    return sum(
        content_bytes(array)
        for feed in chunk
        for part in feed.parts
        for batch in part
        for array in batch.columns.values()
    )


def chunk_steps(rows: float, row_bytes: int) -> int:
    """Steps to read at once, for `rows` rows a step: enough to be quick, few enough to be small."""
    most = min(_CHUNK_ROWS, _CHUNK_BYTES // max(row_bytes, 1))
    return int(min(max(most // max(rows, 1), 1), _CHUNK_STEPS))


def _pad_batch(batch: Batch, rows: int) -> Batch:
    """Repeat the first row, with weight 0, up to `rows` rows."""
    take = np.concatenate([np.arange(batch.rows), np.zeros(rows - batch.rows, dtype=np.int64)])
    return Batch(
        columns={name: array[take] for name, array in batch.columns.items()},
        weights=np.concatenate([batch.weights, np.zeros(rows - batch.rows)]),
        samples=batch.samples[take],
    )


class Lookahead:
    """Feeds in order. Each refers to the following ones whose steps may begin before its own ends.

    Args:
        feeds: in the order of steps.
        ahead: how many steps may begin early.
        apart: steps that begin after the end of the step before, and end before the next begins.
    """

    def __init__(self, feeds: Iterator[Feed], ahead: int, apart: Container[int]) -> None:
        self._feeds, self._ahead, self._apart = feeds, ahead, apart
        self._read: deque[Feed] = deque()

    def next(self, until: int) -> Feed:
        """Return the next step's feed. No step from `until` on begins early."""
        read = self._read
        if not read:
            read.append(next(self._feeds))
        while len(read) <= self._ahead and read[-1].step + 1 < until:
            if any(step in self._apart for step in (read[-1].step, read[-1].step + 1)):
                break
            read.append(next(self._feeds))
        following: Feed | None = None
        for feed in reversed(read):
            following = feed if following is None else replace(feed, following=following)
        assert following is not None, "the next one is among them"
        read.popleft()
        return following


# --- Feeds of asynchronous workers ------------------------------------------------------------------------------------


_MAX_SKIPPED_STEPS = 64  # of its own share that others did: read and dropped; after more of them, reading starts again


class LeasedFeeds:
    """Feeds of the units that one asynchronous worker leases. Close it, or use it in a `with`.

    Args:
        stream: of the worker's own shares, usually one.
        others: opens a stream of the same data for other shares, when the first is needed.
    """

    def __init__(self, stream: BatchLoader, others: Callable[[], BatchLoader]) -> None:
        self._stream, self._open = stream, others
        self._others: BatchLoader | None = None
        self._ahead: tuple[int, Feeds] | None = None  # the next step, and the feeds from there on

    def feeds(self, unit: WorkUnit) -> Iterator[Feed]:
        """The feeds of the unit's steps, in order."""
        for step in range(unit.step, unit.step + unit.steps):
            yield self._own(step) if unit.share in self._stream.feeding.data_ranks else self._other(step, unit.share)

    @property
    def prefetch(self) -> PrefetchDepth | None:
        """How far the own share is read ahead by now; None before it is."""
        return self._ahead[1].prefetch if self._ahead else None

    def close(self) -> None:
        """Read no further ahead. Safe to call twice."""
        if self._ahead is not None:
            self._ahead[1].close()
        self._ahead = None

    def __enter__(self) -> LeasedFeeds:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own(self, step: int) -> Feed:
        if self._ahead is not None and step < self._ahead[0]:
            return self._other(step, self._stream.feeding.data_ranks.start)  # it is leased a second time
        if self._ahead is None or step - self._ahead[0] > _MAX_SKIPPED_STEPS:
            self.close()
            self._ahead = step, self._stream.feeds(step)
        first, feeds = self._ahead
        self._ahead = step + 1, feeds
        for _ in range(first, step):
            next(feeds)
        return next(feeds)

    def _other(self, step: int, share: int) -> Feed:
        if self._others is None:
            self._others = self._open()
        return self._others.feed(step, share)


# --- Read ahead in a background thread --------------------------------------------------------------------------------


_Item = TypeVar("_Item")
_JOIN_S = 30.0


class ReadAhead(Generic[_Item], Iterator[_Item]):
    """Runs an iterator in a thread of its own, up to `depth` items ahead.

    Its exception is raised in the consumer, after the items before it. `close` ends the thread; so does the end of the
    last reference to the object.

    Args:
        items: to run.
        depth: items ahead, at first.
        name: of the thread.
        size_of: bytes of an item. With it, the depth tunes itself as tf.data's prefetch does: it doubles when the
            consumer finds nothing ready though the depth was reached before.
        memory_bytes: that the items ahead may take; the depth does not grow beyond.
    """

    def __init__(
        self,
        items: Iterator[_Item],
        *,
        depth: int = 2,
        name: str = "read-ahead",
        size_of: Callable[[_Item], int] | None = None,
        memory_bytes: int = 64 << 20,
    ) -> None:
        self._shared = _Shared[_Item](depth, size_of, memory_bytes)
        self._thread = threading.Thread(target=_produce, args=(items, self._shared), name=name, daemon=True)
        self._thread.start()

    def __next__(self) -> _Item:
        return self._shared.take()

    @property
    def depth(self) -> int:
        """Items ahead, as chosen so far."""
        return self._shared.depth

    def close(self) -> None:
        """End the thread: at once, or when the current read returns. Safe to call twice."""
        self._shared.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def __del__(self) -> None:
        self._shared.stop()


class _Shared(Generic[_Item]):
    """The state that both threads share; it holds no reference to the consumer's side."""

    def __init__(self, depth: int, size_of: Callable[[_Item], int] | None, memory_bytes: int) -> None:
        self.depth = depth
        self._size_of, self._memory_bytes = size_of, memory_bytes
        self._largest_bytes = 0
        self._filled = False
        self._ready: deque[_Item] = deque()
        self._change = threading.Condition()
        self._stopped = self._ended = False
        self._error: BaseException | None = None

    def put(self, item: _Item) -> bool:
        """Wait for room. False: the consumer is gone."""
        with self._change:
            self._change.wait_for(lambda: self._stopped or len(self._ready) < self.depth)
            self._ready.append(item)
            self._filled |= len(self._ready) == self.depth
            self._largest_bytes = max(self._largest_bytes, self._size_of(item) if self._size_of else 0)
            self._change.notify_all()
            return not self._stopped

    def end(self, error: BaseException | None) -> None:
        """No more items come."""
        with self._change:
            self._ended, self._error = True, error
            self._change.notify_all()

    def take(self) -> _Item:
        """The next item; raises what the iterator raised, or StopIteration."""
        with self._change:
            if not self._ready:
                self._deepen()
            self._change.wait_for(lambda: self._stopped or self._ended or bool(self._ready))
            if self._ready and not self._stopped:
                item = self._ready.popleft()
                self._change.notify_all()
                return item
        if self._error is not None and not self._stopped:
            raise self._error
        raise StopIteration

    def _deepen(self) -> None:
        """Double the depth, where the consumer finds nothing ready though the depth was reached before."""
        if self._size_of and self._filled and 2 * self.depth * self._largest_bytes <= self._memory_bytes:
            self.depth *= 2
            self._filled = False

    def stop(self) -> None:
        """The consumer wants no more."""
        with self._change:
            self._stopped = True
            self._ready.clear()
            self._change.notify_all()


def _produce(items: Iterator[_Item], shared: _Shared[_Item]) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not shared.put(item):
                break
    except BaseException as raised:  # the consumer raises it
        error = raised
    finally:
        shared.end(error)
