"""Compute the order of samples: which row is at which position of an epoch, and which rank reads it.

The rows are cut into C lanes: contiguous ranges of rows, the same in every epoch. (seed, epoch) determines the order of
the windows of each lane and the permutation of the rows inside each window. Position i of the epoch is the next row of
lane i mod C, so the samples of a global batch do not depend on the number of workers. Consecutive lanes are far apart
in storage, so that even a batch smaller than C has rows from all of it. Permutations are sorts of SplitMix64 keys
(Steele, Lea and Flood, 2014): they are the same on every machine and with every version of numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import fold_seed
from trainwright.core.errors import DataError

if TYPE_CHECKING:
    from trainwright.datasets.data_source import Arrays, Rows


MEMORY_BYTES = 512 << 20  # of decoded rows that one reader may hold
MAX_PASSES = 1 << 20  # repeats of a row in an epoch of a sampler or a mixture, each with its own random numbers
HIGHLY_COMPOSITE = (1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840)
_FEW_LANES, _MANY_LANES = 24, 120
_GOLDEN = 0.6180339887498949
_LANE_ROWS = 16  # shorter lanes hardly shuffle
_WINDOW_ROWS = (1024, 65536)
_SORTED_ROWS = 1 << 21  # rows whose permutation is in memory at a time, over all lanes


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """How the rows are cut; a pure function of the index of a data set."""

    rows: int  # of the data set
    # C, the number of lanes: contiguous row ranges. Lane l is range l * stride mod C in storage; the first rows % C
    # lanes are one row longer.
    count: int = 1
    window: int = 1 << 16  # the most rows that are permuted together
    # first row of each row group, ascending; windows start there if possible
    groups: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not (1 <= self.count <= self.rows and self.window >= 1):
            raise ValueError(f"{self.count} lanes and windows of {self.window} rows cannot hold {self.rows} rows")

    @property
    def stride(self) -> int:
        """A number coprime to C near its golden section, whose multiples spread most evenly."""
        return min(
            (step for step in range(1, self.count + 1) if gcd(step, self.count) == 1),
            key=lambda step: abs(step - _GOLDEN * self.count),
        )

    @cached_property
    def starts(self) -> Rows:
        """First row of each lane: (count,) int64."""
        lanes = np.arange(self.count, dtype=np.int64)
        sizes, ranges = self.rows // self.count + (lanes < self.rows % self.count), lanes * self.stride % self.count
        stored = np.empty_like(sizes)
        stored[ranges] = sizes
        return (np.cumsum(stored) - stored)[ranges]

    @cached_property
    def edges(self) -> Rows:
        """First row of each window, over all lanes, ascending, and the number of rows: (windows + 1,) int64."""
        groups = np.asarray(self.groups, dtype=np.int64)
        firsts: list[int] = []
        for start, stop in pairwise([*sorted(self.starts.tolist()), self.rows]):
            inner = groups[np.searchsorted(groups, start, "right") : np.searchsorted(groups, stop, "left")]
            firsts.extend(_windows(start, stop, inner.tolist(), self.window))
        return np.array([*firsts, self.rows], dtype=np.int64)


def choose_lanes(
    rows: int,
    row_bytes: int,
    *,
    groups: tuple[int, ...] = (0,),
    window: int | None = None,
) -> Lanes:
    """Lanes for a data set, from its index alone.

    With many row groups there are no more lanes than row groups, so that two workers rarely read the same row group.
    With few row groups, data that fits a reader's memory gets many lanes, which divide evenly among almost any number
    of workers. Larger data gets only so many lanes that one window of each fits into memory.

    Args:
        rows: of the data set.
        row_bytes: decoded size of a row.
        groups: first row of each row group.
        window: rows that are permuted together; by default a row group, or what memory allows.
    """
    row_bytes = max(row_bytes, 1)
    fits = rows * row_bytes <= MEMORY_BYTES
    preferred_count = len(groups) if len(groups) >= _FEW_LANES else _MANY_LANES if fits else _FEW_LANES
    if fits:
        count = _composite(min(preferred_count, rows // _LANE_ROWS))
        return Lanes(rows=rows, count=count, window=window or -(-rows // count), groups=groups)
    if window is None:
        largest = max(stop - start for start, stop in pairwise([*groups, rows]))
        window = min(max(largest, _WINDOW_ROWS[0]), _WINDOW_ROWS[1], max(MEMORY_BYTES // (_FEW_LANES * row_bytes), 1))
    room = min(MEMORY_BYTES // (window * row_bytes), _SORTED_ROWS // window, rows // _LANE_ROWS)
    return Lanes(rows=rows, count=_composite(min(room, preferred_count)), window=window, groups=groups)


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The order of every epoch. Rows at any positions are computed directly; one window a lane is in memory."""

    lanes: Lanes  # how the rows are cut
    seed: int = 0  # of the shuffle
    shuffle: bool = True  # False: position i is row i, and rank i mod total reads it
    in_order: bool = False  # whether the windows keep their order, and only the rows inside them are shuffled

    def rows_of(self, epoch: int, start: int, stop: int) -> Rows:
        """Rows at positions start..stop of an epoch, in position order: (stop - start,) int64."""
        return self.rows_at(epoch, np.arange(start, stop, dtype=np.int64))

    def rows_at(self, epoch: int, positions: Rows) -> Rows:
        """Rows at any positions of an epoch, in the order asked for: (positions,) int64."""
        if not self.shuffle:
            return positions.copy()
        count = self.lanes.count
        slots = self.lanes.starts[positions % count] + positions // count
        firsts, windows = self._sequences(epoch)
        places = np.searchsorted(firsts, slots, "right") - 1
        rows = np.empty_like(positions)
        for place, selected in _grouped(places):
            window = int(windows[place])
            rows[selected] = self.lanes.edges[window] + self._inside(epoch, window)[slots[selected] - firsts[place]]
        return rows

    def share(self, epoch: int, start: int, stop: int, rank: int, total: int) -> tuple[Rows, Rows]:
        """Return the share of data rank `rank` of `total` in positions start..stop, in order: (positions, rows)."""
        positions = np.arange(start, stop, dtype=np.int64)
        if total > 1:
            positions = positions[self.owners(positions, total) == rank]
        return positions, self.rows_at(epoch, positions)

    def owners(self, positions: Rows, total: int) -> Rows:
        """The data rank of each position.

        Lane l belongs to rank l mod total; with more ranks than lanes, to ranks l, l + C, l + 2C... in turn.
        """
        count = self.lanes.count
        if not self.shuffle:
            return positions % total
        lanes = positions % count
        if total <= count:
            return lanes % total
        return lanes + count * (positions // count % ((total - lanes + count - 1) // count))

    def stand_in(self, position: int, rank: int, total: int) -> int:
        """Return the position of a real sample for a rank whose share of the batch at `position` is empty.

        It is the rank's last position before the batch, else its next position, else the batch's first position.
        """
        span = max(total, self.lanes.count * -(-total // self.lanes.count))
        around = np.arange(max(0, position - span), min(self.lanes.rows, position + span), dtype=np.int64)
        own_positions = around[self.owners(around, total) == rank]
        before = own_positions[own_positions < position]
        return int(before[-1] if len(before) else own_positions[0] if len(own_positions) else position)

    def largest_share(self, total: int, batch_size: int) -> int:
        """Return the least upper bound of the rows that one of `total` ranks gets of a batch."""
        count = self.lanes.count
        if not self.shuffle:
            return -(-batch_size // total)
        if total > count:
            turns = -(-batch_size // count)
            return -(-turns // (total // count))
        turns, remainder = divmod(batch_size, count)
        lanes = -(-count // total)
        return turns * lanes + min(lanes, -(-remainder // total) + (1 if remainder and count % total else 0))

    @cached_property
    def _sequences(self) -> Any:
        return lru_cache(maxsize=4)(self._sequence)

    @cached_property
    def _inside(self) -> Any:
        return lru_cache(maxsize=2 * self.lanes.count + 2)(self._permutation)

    def _sequence(self, epoch: int) -> tuple[Rows, Rows]:
        """Return the windows in the order of an epoch, lane by lane in storage: (first slots, window numbers)."""
        edges = self.lanes.edges
        ranges = np.searchsorted(np.sort(self.lanes.starts), edges[:-1], "right")
        keys = np.arange(len(edges) - 1) if self.in_order else _keys(fold_seed(self.seed, epoch), len(edges) - 1)
        windows = np.lexsort((keys, ranges))
        sizes = np.diff(edges)[windows]
        return np.cumsum(sizes) - sizes, windows

    def _permutation(self, epoch: int, window: int) -> npt.NDArray[np.int32]:
        """Order of the rows inside a window."""
        size = int(self.lanes.edges[window + 1] - self.lanes.edges[window])
        return np.argsort(_keys(fold_seed(self.seed, epoch, window), size), kind="stable").astype(np.int32)

    def __getstate__(self) -> dict[str, Any]:
        return {"lanes": self.lanes, "seed": self.seed, "shuffle": self.shuffle, "in_order": self.in_order}


def _grouped(labels: Rows) -> Iterator[tuple[int, Rows]]:
    """Yield each distinct label, ascending, with its indices."""
    order = np.argsort(labels, kind="stable")
    unique_labels, counts = np.unique(labels, return_counts=True)
    stops = np.cumsum(counts)
    for label, start, stop in zip(unique_labels.tolist(), stops - counts, stops, strict=True):
        yield label, order[start:stop]


def _composite(limit: int) -> int:
    return max(number for number in HIGHLY_COMPOSITE if number <= max(limit, 1))


def _windows(start: int, stop: int, inner: list[int], window: int) -> list[int]:
    """Return the first rows of a lane's windows: small neighbouring row groups are joined, large ones split evenly."""
    firsts: list[int] = []
    opened = last = start
    for bound in (*inner, stop):
        if bound - opened > window:
            if last > opened:
                firsts.append(opened)
            opened = last
            if bound - opened > window:
                pieces = -(-(bound - opened) // window)
                firsts.extend(opened + (bound - opened) * piece // pieces for piece in range(pieces))
                opened = bound
        last = bound
    return [*firsts, opened] if stop > opened else firsts


def _keys(base: int, count: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 outputs 1..count from the state `base`; all different."""
    return split_mix(np.arange(1, count + 1, dtype=np.uint64), base)


def split_mix(numbers: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Return outputs of SplitMix64 (Steele, Lea and Flood, 2014) by their numbers in the sequence of a seed."""
    state = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


# --- From order to steps ----------------------------------------------------------------------------------------------


def steps_per_epoch(rows: int, batch_size: int, drop_last: bool, epoch_samples: int | None = None) -> int:
    """Steps of an epoch of `rows` samples, or of `epoch_samples`; a short last batch counts unless it is dropped."""
    samples = rows if epoch_samples is None else epoch_samples
    return samples // batch_size if drop_last else -(-samples // batch_size)


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The samples of one data rank in some steps that begin in one pass over the data."""

    steps: range  # the global steps
    passes: Rows  # (rows,) int64, the pass of each sample: the pass in which the steps begin, or a later one
    samples: Rows  # (rows,) int64, row numbers in position order; a step without a sample of this rank has one stand-in
    bounds: Rows  # (len(steps) + 1,) int64; step i has samples bounds[i]..bounds[i + 1]
    real: npt.NDArray[np.bool_]  # (len(steps),) bool; False where the step's only sample is a stand-in of weight 0
    # (rows,) bool; False for a sample that cannot be read, which has weight 0. None if all can be read.
    good: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """The steps of a run over one data set; pure, and the same for any number of data ranks."""

    order: SampleOrder  # of the samples
    batch_size: int  # global, in samples
    epochs: int = 1  # of the run; each is a pass over the data, unless `epoch_samples` says otherwise
    drop_last: bool = False  # leave out the short last batch of each epoch
    # samples of a virtual epoch, whose length is independent of the data. The passes follow each other, so that a batch
    # may hold the last samples of one pass and the first of the next.
    epoch_samples: int | None = None

    def __post_init__(self) -> None:
        if not self.steps_per_epoch:
            raise DataError(
                f"an epoch has {self._epoch_rows} rows, less than a batch of {self.batch_size}, "
                "and drop_last leaves them out",
                remedy=f"set batch_size to {self._epoch_rows} or less, or drop_last=False",
            )

    @property
    def rows(self) -> int:
        """Rows of the data set."""
        return self.order.lanes.rows

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, virtual or not."""
        return steps_per_epoch(self.rows, self.batch_size, self.drop_last, self.epoch_samples)

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        return self.steps_per_epoch * self.epochs

    @property
    def passes(self) -> int:
        """Passes over the data that the run begins."""
        last = self.total_steps - 1
        return -(-(self._place(last) + self.size(last)) // self.rows)

    @property
    def _epoch_rows(self) -> int:
        return self.rows if self.epoch_samples is None else self.epoch_samples

    def _place(self, step: int) -> int:
        """Samples before those of a step, over all epochs and passes."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self._epoch_rows + within * self.batch_size

    def size(self, step: int) -> int:
        """Real samples in the global batch of a step."""
        return min(self.batch_size, self._epoch_rows - step % self.steps_per_epoch * self.batch_size)

    def samples(self, step: int) -> Rows:
        """Row numbers of the global batch of a step, in the order of their positions: (size,) int64."""
        return self.share(range(step, step + 1), 0, 1).samples

    def largest_share(self, total: int) -> int:
        """Return an upper bound of the rows that one of `total` data ranks gets of a batch."""
        most, size = self.order.largest_share, self.batch_size
        if self.epoch_samples is None:
            return most(total, min(size, self.rows))
        if size > self.rows:
            return (size // self.rows + 2) * most(total, self.rows)
        return max(most(total, head) + most(total, size - head) for head in range(size))

    def chunk(self, step: int, length: int) -> range:
        """The chunk of up to `length` steps that holds `step`.

        Chunks lie on a fixed grid within the steps of an epoch that begin in one pass.
        """
        epoch_first = step - step % self.steps_per_epoch
        offset = self._place(epoch_first)
        number = self._place(step) // self.rows
        first = epoch_first + max(-(-(number * self.rows - offset) // self.batch_size), 0)
        stop = epoch_first + min(-(-((number + 1) * self.rows - offset) // self.batch_size), self.steps_per_epoch)
        start = step - (step - first) % length
        return range(start, min(start + length, stop, self.total_steps))

    def share_rows(self, steps: range, total: int) -> Rows:
        """Rows, stand-ins included, of each data rank's share of `steps`, which begin in one pass: (total,) int64.

        It costs less than one `share`, since no permutation is computed.
        """
        start, stop = self._place(steps.start), self._place(steps[-1]) + self.size(steps[-1])
        places = np.arange(start, stop, dtype=np.int64)
        cells = (places - start) // self.batch_size * total + self.order.owners(places % self.rows, total)
        counts = np.bincount(cells, minlength=len(steps) * total).reshape(len(steps), total)
        rows: Rows = np.maximum(counts, 1).sum(axis=0, dtype=np.int64)
        return rows

    def share(self, steps: range, rank: int, total: int) -> RankShare:
        """Return the share of data rank `rank` of `total` in `steps`, which all begin in one pass."""
        start, stop = self._place(steps.start), self._place(steps[-1]) + self.size(steps[-1])
        number, end = start // self.rows, (start // self.rows + 1) * self.rows
        starts = start + np.arange(len(steps) + 1, dtype=np.int64) * self.batch_size
        later = range(end // self.rows, -(-stop // self.rows))  # passes; several where a batch holds the data twice
        parts = [(number, start, min(stop, end)), *((later_pass, later_pass * self.rows, stop) for later_pass in later)]
        shares = [self._part(*part, rank, total) for part in parts]
        places, samples = (np.concatenate(arrays) for arrays in zip(*shares, strict=True))
        bounds = np.searchsorted(places, starts).astype(np.int64)
        real = np.diff(bounds) > 0
        if not real.all():
            empty = np.flatnonzero(~real)
            stand_ins = [self.order.stand_in(int(starts[step]) - number * self.rows, rank, total) for step in empty]
            fill = self.order.rows_at(number, np.array(stand_ins, dtype=np.int64))
            samples, places = (np.insert(into, bounds[empty], of) for into, of in ((samples, fill), (places, start)))
            bounds = bounds + np.concatenate([[0], np.cumsum(~real)])
        return RankShare(steps=steps, passes=places // self.rows, samples=samples, bounds=bounds, real=real)

    def _part(self, number: int, start: int, stop: int, rank: int, total: int) -> tuple[Rows, Rows]:
        """Return a data rank's places and rows between two places, cut at the end of pass `number`."""
        first = number * self.rows
        positions, rows = self.order.share(number, start - first, min(stop - first, self.rows), rank, total)
        return positions + first, rows


def apply_by_pass(passes: Rows, compute: Callable[[npt.NDArray[np.bool_], int], Arrays]) -> Arrays:
    """Call compute(mask, number) for the rows of each pass, and return all rows in their original order.

    Args:
        passes: (rows,) int64, the pass of each row, in any order.
        compute: returns as many rows as are True in `mask`, by column name.
    """
    numbers = np.unique(passes).tolist() or [0]
    results = [(mask := passes == number, compute(mask, number)) for number in numbers]
    if len(results) == 1:
        return results[0][1]
    order = np.argsort(np.concatenate([np.flatnonzero(mask) for mask, _ in results]), kind="stable")
    return {name: np.concatenate([arrays[name] for _, arrays in results])[order] for name in results[0][1]}
