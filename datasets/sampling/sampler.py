"""The order of samples, as arithmetic: which row stands at which position of an epoch, and whose it is.

The rows are cut into C canonical lanes, the same in every epoch. By (seed, epoch) the windows of each lane come in a
new order and the rows inside each window are permuted. Position i of the epoch is the next row of lane i mod C, so
which samples make up a global batch does not depend on the number of workers. Lanes that follow each other lie far
apart in storage, so that a batch smaller than C is spread over all of it too. Permutations are sorts of SplitMix64
keys (Steele, Lea and Flood, 2014): they are the same on every machine and with every version of numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import fold

Rows = npt.NDArray[np.int64]

MEMORY_BYTES = 512 << 20
HIGHLY_COMPOSITE = (1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840)
_FEW_LANES, _MANY_LANES = 24, 120
_GOLDEN = 0.6180339887498949
_LANE_ROWS = 16  # shorter lanes mix nothing
_WINDOW_ROWS = (1024, 65536)
_SORTED_ROWS = 1 << 21  # rows whose permutation is held at a time, over all lanes


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """How the rows are cut; a pure function of the index of a data set.

    Attributes:
        rows: of the data set.
        count: C, the number of lanes: contiguous row ranges. Lane l is range l * stride mod C in storage; the first
            rows % C lanes are one row longer.
        window: rows that are permuted together, at most.
        groups: first row of each row group, ascending; windows are cut there where that is possible.
    """

    rows: int
    count: int = 1
    window: int = 1 << 16
    groups: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not (1 <= self.count <= self.rows and self.window >= 1):
            raise ValueError(f"{self.count} lanes and windows of {self.window} rows cannot hold {self.rows} rows")

    @property
    def stride(self) -> int:
        """Prime to C and near the golden section of it, whose multiples spread most evenly."""
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
    memory_bytes: int = MEMORY_BYTES,
) -> Lanes:
    """Lanes for a data set, from its index alone.

    With many row groups there are no more lanes than row groups, so that few row groups are read by two workers. With
    few, data that fits a reader's memory gets many lanes, which deal evenly to almost any number of workers. Where it
    does not fit, there are no more lanes than can each keep one window in memory.

    Args:
        rows: of the data set.
        row_bytes: decoded size of a row.
        groups: first row of each row group.
        window: rows that are permuted together; by default a row group, or what memory allows.
        memory_bytes: what one reader may hold.
    """
    row_bytes = max(row_bytes, 1)
    fits = rows * row_bytes <= memory_bytes
    wanted = len(groups) if len(groups) >= _FEW_LANES else _MANY_LANES if fits else _FEW_LANES
    if fits:
        count = _composite(min(wanted, rows // _LANE_ROWS))
        return Lanes(rows=rows, count=count, window=window or -(-rows // count), groups=groups)
    if window is None:
        largest = max(stop - start for start, stop in pairwise([*groups, rows]))
        window = min(max(largest, _WINDOW_ROWS[0]), _WINDOW_ROWS[1], max(memory_bytes // (_FEW_LANES * row_bytes), 1))
    room = min(memory_bytes // (window * row_bytes), _SORTED_ROWS // window, rows // _LANE_ROWS)
    return Lanes(rows=rows, count=_composite(min(room, wanted)), window=window, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of every epoch. Any range of positions is computed directly, in the memory of a window for each lane.

    Attributes:
        lanes: how the rows are cut.
        seed: of the shuffle.
        shuffle: False gives row i at position i, dealt to the ranks in turn.
    """

    lanes: Lanes
    seed: int = 0
    shuffle: bool = True

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
        which = np.searchsorted(firsts, slots, "right") - 1
        rows = np.empty_like(positions)
        for turn, chosen in grouped(which):
            window = int(windows[turn])
            rows[chosen] = self.lanes.edges[window] + self._inside(epoch, window)[slots[chosen] - firsts[turn]]
        return rows

    def share(self, epoch: int, start: int, stop: int, rank: int, total: int) -> tuple[Rows, Rows]:
        """What data rank `rank` of `total` gets of positions start..stop: (positions, rows), in position order."""
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
        """The position of a real sample for a rank whose share of the batch at `position` is empty.

        It is the rank's own last position before, or else its next; the batch's first where the rank has none at all.
        """
        span = max(total, self.lanes.count * -(-total // self.lanes.count))
        around = np.arange(max(0, position - span), min(self.lanes.rows, position + span), dtype=np.int64)
        own = around[self.owners(around, total) == rank]
        before = own[own < position]
        return int(before[-1] if len(before) else own[0] if len(own) else position)

    def largest_share(self, total: int, batch_size: int) -> int:
        """An upper bound, reached by some batches, of what one of `total` ranks gets of a batch."""
        count = self.lanes.count
        if not self.shuffle:
            return -(-batch_size // total)
        if total > count:
            turns = -(-batch_size // count)
            return -(-turns // (total // count))
        turns, rest = divmod(batch_size, count)
        lanes = -(-count // total)
        return turns * lanes + min(lanes, -(-rest // total) + (1 if rest and count % total else 0))

    def imbalance(self, total: int, batch_size: int) -> float:
        """Largest share of a batch over the mean share: 1.0 is even, 1.25 makes a step a quarter longer."""
        return self.largest_share(total, batch_size) * total / batch_size

    @cached_property
    def _sequences(self) -> Any:
        return lru_cache(maxsize=4)(self._sequence)

    @cached_property
    def _inside(self) -> Any:
        return lru_cache(maxsize=2 * self.lanes.count + 2)(self._permutation)

    def _sequence(self, epoch: int) -> tuple[Rows, Rows]:
        """Windows in the order of an epoch, lane after lane in storage: (the slot each begins at, its number)."""
        edges = self.lanes.edges
        ranges = np.searchsorted(np.sort(self.lanes.starts), edges[:-1], "right")
        windows = np.lexsort((_keys(fold(self.seed, epoch), len(edges) - 1), ranges))
        sizes = np.diff(edges)[windows]
        return np.cumsum(sizes) - sizes, windows

    def _permutation(self, epoch: int, window: int) -> npt.NDArray[np.int32]:
        """Order of the rows inside a window."""
        size = int(self.lanes.edges[window + 1] - self.lanes.edges[window])
        return np.argsort(_keys(fold(self.seed, epoch, window), size), kind="stable").astype(np.int32)

    def __getstate__(self) -> dict[str, Any]:
        return {"lanes": self.lanes, "seed": self.seed, "shuffle": self.shuffle}


def grouped(labels: Rows) -> Iterator[tuple[int, Rows]]:
    """Each different label, ascending, with the indices where it stands."""
    order = np.argsort(labels, kind="stable")
    found, counts = np.unique(labels, return_counts=True)
    stops = np.cumsum(counts)
    for label, start, stop in zip(found.tolist(), stops - counts, stops, strict=True):
        yield label, order[start:stop]


def _composite(limit: int) -> int:
    return max(number for number in HIGHLY_COMPOSITE if number <= max(limit, 1))


def _windows(start: int, stop: int, inner: list[int], window: int) -> list[int]:
    """First rows of one lane's windows: neighbouring row groups are joined, and larger ones split evenly."""
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
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(base)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
