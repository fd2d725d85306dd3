"""Read the batches of a worker ahead in a thread: the feeds of its steps, from any step on."""

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
    """Fetches transformed shares that another process computes, such as Ray Data."""

    def fetch(self, step: int, rank: int, total: int) -> tuple[range, Arrays]:
        """Return the chunk of steps with `step`, and the columns of a data rank's share of it. Has a deadline."""


class Feeds(Iterator[Feed]):
    """Feeds of consecutive steps, which a thread reads ahead. Close it, or use it in a `with`."""

    def __init__(self, chunks: Iterator[list[Feed]]) -> None:
        self._largest = PrefetchDepth(chunks=0, chunk_steps=0, chunk_bytes=0)
        self._chunks = ReadAhead(chunks, name="trainwright-feeds", size_of=_size, memory_bytes=_AHEAD_BYTES)
        self._ready: Iterator[Feed] = iter(())

    @property
    def prefetch(self) -> PrefetchDepth:
        """Current depth of the read-ahead."""
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
        index: of the data set at the start of the run; by default the data set is indexed now.
        batch_size: global, in samples.
        epochs: of the run; each is a pass over the data, unless `epoch_samples` says otherwise.
        seed: of the order and of the transforms.
        shuffle: whether the order changes with each epoch; otherwise rows come as they are stored.
        drop_last: leave out the short last batch of each epoch.
        epoch_samples: samples of a virtual epoch.
        feeding: data ranks of this actor; it may have none.
        accumulation: micro-batches of each data rank in one step.
        static_shapes: fill every micro-batch to one size with repeats of weight 0.
        columns: of the feeds; by default all.
        window: rows that are permuted together; by default chosen from the index.
        fetcher: fetches the transformed shares of heavy data sets; without it, this process computes all shares.
        rows: reader of the source's rows; by default a new one.
        row: a row of the data set, repeated in full and warm feeds if a transform is slow to open.
        skipper: skips samples that cannot be read; without it, they end the run.

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
        skipper: SkippingReader | None = None,
    ) -> None:
        index = index or dataset.index()
        self._fetcher, self.feeding, self._skipper = fetcher, feeding, skipper
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
        self._rows = TransformedRows(dataset, reader, self._columns, seed=self.schedule.order.seed, skipper=skipper)
        self._chunk_steps = chunk_steps(batch_size * len(feeding.data_ranks) / feeding.total, index.row_bytes)

    def feed(self, step: int, share: int) -> Feed:
        """Read the feed of one step for any one data rank."""
        ranks = range(share, share + 1)
        _, shares = self._shares(step, ranks, 1)
        return self._assembled(step, ranks, shares)

    def feeds(self, start_step: int = 0) -> Feeds:
        """Return the feeds from `start_step` to the end of the last epoch. Reading starts at once."""
        return Feeds(self._chunks(start_step))

    def warm_feed(self, step: int = 0, avoid: Collection[int] = ()) -> Feed:
        """As `full_feed`, with all samples of weight 0."""
        return zero_weight(self.full_feed(step, avoid))

    def full_feed(self, step: int = 0, avoid: Collection[int] = ()) -> Feed:
        """Return a feed of real samples with the shape of an ordinary step.

        Args:
            step: near the first step of the later feeds, which can then use the loaded row groups.
            avoid: steps whose samples must not be used.
        """
        full = self.schedule.size(step) == self.schedule.batch_size
        start = step if full else step - step % self.schedule.steps_per_epoch
        if start in avoid:
            others = itertools.chain(range(start + 1, self.schedule.total_steps), range(start))
            same_size = (other for other in others if self.schedule.size(other) == self.schedule.size(start))
            start = next((other for other in same_size if other not in avoid), start)
        steps = range(start, start + 1)
        shares: dict[int, tuple[RankShare, Arrays]] = {}
        for rank in self.feeding.data_ranks:
            share = self.schedule.share(steps, rank, self.feeding.total)
            if self._row is not None:
                row_of_sample = np.zeros(len(share.samples), dtype=np.int64)
                shares[rank] = share, {name: array[row_of_sample] for name, array in self._row.columns.items()}
                continue
            rows = np.minimum(np.arange(len(share.samples)), _WARM_ROWS - 1 if self._fetcher else len(share.samples))
            distinct, row_of_sample = np.unique(rows, return_inverse=True)
            columns, _ = self._read(share.samples[distinct], share.passes[distinct])
            shares[rank] = share, {name: array[row_of_sample] for name, array in columns.items()}
        return self._assembled(start, self.feeding.data_ranks, shares)

    def _chunks(self, step: int) -> Iterator[list[Feed]]:
        while step < self.schedule.total_steps:
            steps, shares = self._shares(step, self.feeding.data_ranks, self._chunk_steps)
            yield [self._assembled(number, self.feeding.data_ranks, shares) for number in steps]
            step = steps.stop

    def _shares(self, step: int, ranks: range, length: int) -> tuple[range, _Shares]:
        """Return the shares of data ranks in the chunk from `step` on, of `length` steps unless it is fetched."""
        if self._fetcher is None:
            return self._computed(step, ranks, length)
        try:
            return self._fetched(self._fetcher, step, ranks)
        except (DataError, UserCodeError):
            if self._skipper is None:
                raise
            return self._computed(step, ranks, length)  # identifies the bad samples

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
        """Return the feed of one step for these data ranks, from their shares of its chunk."""
        return Feed(
            step=step,
            parts=tuple(self._micro_batches(step, *shares[rank]) for rank in ranks),
            data_ranks=ranks,
            total=self.feeding.total,
            rows=self.schedule.size(step),
        )

    def _micro_batches(self, step: int, share: RankShare, columns: Arrays) -> tuple[Batch, ...]:
        """Split a step's rows into micro-batches as evenly as possible, in position order."""
        place = step - share.steps.start
        first, last = int(share.bounds[place]), int(share.bounds[place + 1])
        real = last - first if share.real[place] else 0
        cuts = [first + real * part // self._accumulation for part in range(self._accumulation + 1)]
        return tuple(self._batch(share, columns, low, high, first) for low, high in pairwise(cuts))

    def _batch(self, share: RankShare, columns: Arrays, low: int, high: int, first: int) -> Batch:
        """Return rows low..high as a batch; an empty range gives the step's first row with weight 0."""
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
        """Return the transformed rows, each from its pass, and a mask of the good ones; None if none is skipped."""
        good = np.ones(len(samples), dtype=np.bool_)

        def compute(mask: npt.NDArray[np.bool_], number: int) -> Arrays:
            columns, good[mask] = self._rows.read(samples[mask], number)
            return columns

        return apply_by_pass(passes, compute), None if self._skipper is None else good


class TransformedRows:
    """Rows of a data set by number, transformed. For one thread.

    Args:
        dataset: whose transforms are applied.
        rows: reader of its source.
        columns: to return; None for all.
        seed: of the transforms.
        skipper: skips rows that cannot be read; without it, they raise an error.
    """

    def __init__(
        self,
        dataset: Dataset,
        rows: RowAccess,
        columns: tuple[str, ...] | None,
        *,
        seed: int,
        skipper: SkippingReader | None,
    ) -> None:
        self._dataset, self._columns, self._seed, self._skipper = dataset, columns, seed, skipper
        skips = skipper is not None
        self._gather = rows.gather_skipping_bad if skips and isinstance(rows, RowReader) else rows.gather

    def read(self, samples: Rows, epoch: int = 0) -> tuple[Arrays, npt.NDArray[np.bool_]]:
        """Return rows of an epoch, and a mask of the good rows; a bad row is replaced by a copy of a good one.

        Raises:
            DataError, UserCodeError: an error of the data or its transforms.
        """
        counters = Counters(seed=self._seed, epoch=epoch)

        def read(rows: Rows) -> Arrays:
            return self._dataset.transform(self._gather(rows, epoch), rows, counters, self._columns)

        if self._skipper is None:
            return read(samples), np.ones(len(samples), dtype=np.bool_)
        return self._skipper.read(read, samples, epoch)


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
            remedy=f"give the job's batch_size to the data: .bucketed(..., {batch_size})",
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
    """Return a reader that keeps whole row groups if all of them fit the memory, else windows."""
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
    """Return the number of steps to read at once for `rows` rows a step, within limits of rows and bytes."""
    max_rows = min(_CHUNK_ROWS, _CHUNK_BYTES // max(row_bytes, 1))
    return int(min(max(max_rows // max(rows, 1), 1), _CHUNK_STEPS))


def _pad_batch(batch: Batch, rows: int) -> Batch:
    """Repeat the first row, with weight 0, up to `rows` rows."""
    places = np.concatenate([np.arange(batch.rows), np.zeros(rows - batch.rows, dtype=np.int64)])
    return Batch(
        columns={name: array[places] for name, array in batch.columns.items()},
        weights=np.concatenate([batch.weights, np.zeros(rows - batch.rows)]),
        samples=batch.samples[places],
    )


class Lookahead:
    """Feeds in order. Each feed has references to later feeds whose steps may begin before its own step ends.

    Args:
        feeds: in the order of steps.
        ahead: how many steps may begin early.
        serial_steps: steps that begin after the end of the step before, and end before the next begins.
    """

    def __init__(self, feeds: Iterator[Feed], ahead: int, serial_steps: Container[int]) -> None:
        self._feeds, self._ahead, self._serial_steps = feeds, ahead, serial_steps
        self._read: deque[Feed] = deque()

    def next(self, stop_step: int) -> Feed:
        """Return the next step's feed. No step from `until` on begins early."""
        read = self._read
        if not read:
            read.append(next(self._feeds))
        while len(read) <= self._ahead and read[-1].step + 1 < stop_step:
            if any(step in self._serial_steps for step in (read[-1].step, read[-1].step + 1)):
                break
            read.append(next(self._feeds))
        following: Feed | None = None
        for feed in reversed(read):
            following = feed if following is None else replace(feed, following=following)
        assert following is not None, "the next one is among them"
        read.popleft()
        return following


# --- Feeds of asynchronous workers ------------------------------------------------------------------------------------


_MAX_SKIPPED_STEPS = 64  # of its own share that others computed: read and dropped; beyond, the read-ahead restarts


class LeasedFeeds:
    """Feeds of the units that one asynchronous worker leases. Close it, or use it in a `with`.

    Args:
        stream: of the worker's own shares, usually one.
        open_others: opens a stream of the same data for other shares, once one is needed.
    """

    def __init__(self, stream: BatchLoader, open_others: Callable[[], BatchLoader]) -> None:
        self._stream, self._open = stream, open_others
        self._others: BatchLoader | None = None
        self._ahead: tuple[int, Feeds] | None = None  # the next step, and the feeds from that step on

    def feeds(self, unit: WorkUnit) -> Iterator[Feed]:
        """The feeds of the unit's steps, in order."""
        is_own = unit.share in self._stream.feeding.data_ranks
        for step in range(unit.step, unit.step + unit.steps):
            yield self._own_feed(step) if is_own else self._leased_feed(step, unit.share)

    @property
    def prefetch(self) -> PrefetchDepth | None:
        """Current depth of the read-ahead of the own share; None before it starts."""
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

    def _own_feed(self, step: int) -> Feed:
        if self._ahead is not None and step < self._ahead[0]:
            return self._leased_feed(step, self._stream.feeding.data_ranks.start)  # it is leased a second time
        if self._ahead is None or step - self._ahead[0] > _MAX_SKIPPED_STEPS:
            self.close()
            self._ahead = step, self._stream.feeds(step)
        first, feeds = self._ahead
        self._ahead = step + 1, feeds
        for _ in range(first, step):
            next(feeds)
        return next(feeds)

    def _leased_feed(self, step: int, share: int) -> Feed:
        if self._others is None:
            self._others = self._open()
        return self._others.feed(step, share)


# --- Read ahead in a background thread --------------------------------------------------------------------------------


_Item = TypeVar("_Item")
_JOIN_S = 30.0


class ReadAhead(Generic[_Item], Iterator[_Item]):
    """Runs an iterator in a thread of its own, up to `depth` items ahead.

    The consumer gets the earlier items, then the iterator's exception. `close` ends the thread, and so does garbage
    collection of the object.

    Args:
        items: to run.
        depth: items ahead, at first.
        name: of the thread.
        size_of: bytes of an item. With it, the depth is tuned as in tf.data's prefetch: it doubles when the queue is
            empty after it was full.
        memory_bytes: limit of the items ahead, for that growth.
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
        """Current limit of items ahead."""
        return self._shared.depth

    def close(self) -> None:
        """End the thread: at once, or when the current read returns. Safe to call twice."""
        self._shared.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def __del__(self) -> None:
        self._shared.stop()


class _Shared(Generic[_Item]):
    """The state that both threads share. It has no reference to `ReadAhead`, which can thus be garbage-collected."""

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
        """Wait for space and add an item. Returns False after `stop`."""
        with self._change:
            self._change.wait_for(lambda: self._stopped or len(self._ready) < self.depth)
            self._ready.append(item)
            self._filled |= len(self._ready) == self.depth
            self._largest_bytes = max(self._largest_bytes, self._size_of(item) if self._size_of else 0)
            self._change.notify_all()
            return not self._stopped

    def end(self, error: BaseException | None) -> None:
        """Mark the end of the items, or the error of the iterator."""
        with self._change:
            self._ended, self._error = True, error
            self._change.notify_all()

    def take(self) -> _Item:
        """Return the next item. Raises the iterator's exception, or StopIteration."""
        with self._change:
            if not self._ready:
                self._double_depth()
            self._change.wait_for(lambda: self._stopped or self._ended or bool(self._ready))
            if self._ready and not self._stopped:
                item = self._ready.popleft()
                self._change.notify_all()
                return item
        if self._error is not None and not self._stopped:
            raise self._error
        raise StopIteration

    def _double_depth(self) -> None:
        """Double the depth if the queue is empty after it was full, within the memory limit."""
        if self._size_of and self._filled and 2 * self.depth * self._largest_bytes <= self._memory_bytes:
            self.depth *= 2
            self._filled = False

    def stop(self) -> None:
        """Drop all items and end the producer."""
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
