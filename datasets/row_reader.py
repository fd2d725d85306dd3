"""Random access to rows: reads only the row groups that are needed, and keeps a bounded part decoded.

Decoded rows are in one array for each column, so that a single `take` gathers any rows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets.data_source import Arrays, Index, Loader, Rows
from trainwright.datasets.sample_order import MEMORY_BYTES

_MAX_THREADS = 4
_MOST_BAD_ROWS = 16  # searched for in a block; if it has more, its unread rows are read on request
_NO_ROWS = np.empty(0, dtype=np.int64)
_DECODE_MEMORY_SHARE = 8  # row groups that threads decode at the same time take at most an eighth of the memory


class RowReader:
    """Gathers rows by number. Safe to call from several threads.

    Args:
        loader: an opened source. Where it has twins, several threads read blocks.
        index: of the source.
        columns: to read.
        blocks: (blocks + 1,) int64, first rows of the ranges that are decoded and kept together, and the number of
            rows; by default the row groups.
        memory_bytes: of decoded blocks in memory; the least recently used is dropped first, the one in use never.
        seed: of the run, for random rows.
    """

    def __init__(
        self,
        loader: Loader,
        index: Index,
        columns: Sequence[str],
        *,
        blocks: Rows | None = None,
        memory_bytes: int = MEMORY_BYTES,
        seed: int = 0,
    ) -> None:
        self._seed, self._epoch = seed, -1
        self._schema = {name: index.schema[name] for name in columns}
        self._groups = groups = np.array([*index.firsts, index.rows], dtype=np.int64)
        self._blocks = groups if blocks is None else blocks
        self._row_bytes = sum(field.row_bytes for field in self._schema.values()) or 1
        if any(field.dtype == np.dtype(object) for field in self._schema.values()):
            self._row_bytes = max(self._row_bytes, index.row_bytes)
        self._fits = index.rows * self._row_bytes <= memory_bytes
        self._slot_rows = int(np.diff(self._blocks).max())
        most_slots = max(memory_bytes // (self._slot_rows * self._row_bytes), 1)
        self._slots = len(self._blocks) - 1 if self._fits else min(most_slots, len(self._blocks) - 1)
        self._free = list(range(self._slots))
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # block: its slot
        self._skip_bad = False  # whether a block with bad rows is kept without them; under the lock
        self._missing = _MissingRows()  # under the lock
        self._shifts = np.zeros(len(self._blocks) - 1, dtype=np.int64)
        self._lock = threading.Lock()
        largest_bytes = int(np.diff(groups).max()) * max(index.row_bytes, 1)
        self._threads = min(memory_bytes // (_DECODE_MEMORY_SHARE * largest_bytes), _MAX_THREADS)
        self._loader = _BlockLoader(loader, groups)
        self._idle = deque([self._loader])
        self._is_table = len(groups) == len(self._blocks) == 2 and not index.groups[0].file

    def gather(self, rows: Rows, epoch: int = 0) -> Arrays:
        """Columns of the rows, in the order asked for: fresh arrays (rows, *shape). Raises DataError.

        Args:
            epoch: for random rows; other rows are the same in each.
        """
        return self._gather(rows, epoch, skip_bad=False)

    def gather_skipping_bad(self, rows: Rows, epoch: int = 0) -> Arrays:
        """As `gather`, except that a bad row raises DataError only if it is requested, not if its block is loaded."""
        return self._gather(rows, epoch, skip_bad=True)

    def gather_alone(self, rows: Rows, epoch: int = 0) -> Arrays:
        """As `gather`, but read only these rows of their blocks, if the source can. No row stays in memory."""
        with self._lock:
            if epoch != self._epoch:
                self._begin(epoch)
            result = self._empty(len(rows))
            self._loader.load_rows(rows, result, np.arange(len(rows)))
            return result

    def _gather(self, rows: Rows, epoch: int, skip_bad: bool) -> Arrays:
        if not self._schema:
            return {}
        with self._lock:
            if epoch != self._epoch:
                self._begin(epoch)
            self._skip_bad = skip_bad
            return self._read(rows)

    def _read(self, rows: Rows) -> Arrays:
        """As `gather`. Missing rows are read first, since they are probably bad and raise an error at once."""
        missing = self._missing.among(rows)
        if not missing.any():
            loaded = self._loaded_rows(rows)
            missing = self._missing.among(rows)
            if not missing.any():
                return loaded
        result = self._empty(len(rows))
        self._loader.load_rows(rows[missing], result, np.flatnonzero(missing))
        for name, array in self._read(rows[~missing]).items():
            result[name][~missing] = array
        return result

    def _loaded_rows(self, rows: Rows) -> Arrays:
        """As `gather`; missing rows are undefined."""
        if self._is_table:
            try:
                return self._take(rows)
            except (DataError, UserCodeError):  # the table is zipped with files, and a row of these is bad
                self._is_table = False
        if self._fits and len(self._slot_of) == self._slots:
            return self._take(rows)
        blocks = np.searchsorted(self._blocks, rows, "right") - 1
        needed = np.flatnonzero(np.bincount(blocks, minlength=1))
        if len(needed) <= self._slots:
            self._keep(needed.tolist())
            return self._take(rows + self._shifts[blocks])
        result = self._empty(len(rows))
        for first in range(0, len(needed), self._slots):  # more blocks than can be kept at a time
            part = needed[first : first + self._slots]
            self._keep(part.tolist())
            selected = np.flatnonzero((blocks >= part[0]) & (blocks <= part[-1]))
            for name, array in self._take(rows[selected] + self._shifts[blocks[selected]]).items():
                result[name][selected] = array
        return result

    @property
    def varying(self) -> bool:
        """Whether loaded rows were random, so that another epoch has other rows."""
        return self._loader.source.varying

    def _begin(self, epoch: int) -> None:
        """Begin an epoch, and drop random rows of the last one."""
        self._epoch = epoch
        if self.varying:
            self._loader.forget()
            while self._slot_of:
                self._drop(*self._slot_of.popitem())
            if self._is_table:
                self.__dict__.pop("_memory", None)
            self._missing = _MissingRows()
        self._loader.source.begin(self._seed, epoch)

    def _take(self, places: Rows) -> Arrays:
        return {name: array.take(places, axis=0) for name, array in self._memory.items()}

    @cached_property
    def _memory(self) -> Arrays:
        """Allocate all slots; unused parts of them take no memory yet. A table in memory is used as it is."""
        if self._is_table:
            return self._loader.source.load(0, list(self._schema))
        rows = int(self._blocks[-1]) if self._fits else self._slots * self._slot_rows
        return self._empty(rows)

    def _empty(self, rows: int) -> Arrays:
        return {name: np.empty((rows, *field.shape), field.dtype) for name, field in self._schema.items()}

    def _size(self, block: int) -> int:
        return int(self._blocks[block + 1] - self._blocks[block])

    def _keep(self, blocks: list[int]) -> None:
        """Load these blocks into memory; there are no more of them than slots."""
        missing = [block for block in blocks if block not in self._slot_of]
        for block in blocks:
            if block in self._slot_of:
                self._slot_of.move_to_end(block)
        while len(self._free) < len(missing):
            self._drop(*self._slot_of.popitem(last=False))
        assert self._memory  # allocated before threads use it
        threads = min(self._threads, len(missing))
        while len(self._idle) < threads and (twin := self._loader.twin()) is not None:
            self._idle.append(twin)
        if min(threads, len(self._idle)) > 1:
            with ThreadPoolExecutor(threads, thread_name_prefix="trainwright-load") as pool:
                list(pool.map(self._load, missing))
        else:
            for block in missing:
                self._load(block)
        for block in blocks:
            self._slot_of.move_to_end(block)

    def _drop(self, block: int, slot: int) -> None:
        self._free.append(slot)
        for array in self._slot(block, slot).values():
            if array.dtype == object:
                array[:] = None

    def _load(self, block: int) -> None:
        """Load a block into a free slot. Runs in several threads; each has a loader of its own."""
        slot, loader = self._free.pop(), self._idle.popleft()
        try:
            first, into = int(self._blocks[block]), self._slot(block, slot)
            if not self._skip_bad:
                loader.load(first, into)
            elif len(missing := loader.load_skipping_bad(first, into, self._missing.of(block))):
                self._missing.set(block, missing)
        except BaseException:
            self._free.append(slot)
            raise
        finally:
            self._idle.append(loader)
        self._shifts[block] = self._first(block, slot) - self._blocks[block]
        self._slot_of[block] = slot

    def _slot(self, block: int, slot: int) -> Arrays:
        first = self._first(block, slot)
        return {name: array[first : first + self._size(block)] for name, array in self._memory.items()}

    def _first(self, block: int, slot: int) -> int:
        """A block's place in memory: its own where all of them fit."""
        return int(self._blocks[block]) if self._fits else slot * self._slot_rows


Gather = Callable[[RowReader, Rows, int], Arrays]  # a method of RowReader that returns rows of an epoch


def read_single_rows(loader: Loader, index: Index, columns: Sequence[str], rows: Rows) -> Arrays:
    """Return rows in the requested order. Only the last row group stays in memory. Raises DataError."""
    fields = {name: index.schema[name] for name in columns}
    result = {name: np.empty((len(rows), *field.shape), field.dtype) for name, field in fields.items()}
    blocks = _BlockLoader(loader, np.array([*index.firsts, index.rows], dtype=np.int64))
    for place, row in enumerate(rows.tolist()):
        blocks.load(row, {name: array[place : place + 1] for name, array in result.items()})
    return result


class _BlockLoader:
    """Loads rows from their row groups into existing arrays. For one thread at a time."""

    def __init__(self, source: Loader, groups: Rows) -> None:
        self.source, self._groups = source, groups
        self._last: tuple[int, list[str], Arrays] = (-1, [], {})

    def twin(self) -> _BlockLoader | None:
        """Return a loader for another thread; None if only one thread may read."""
        twin = self.source.twin()
        return None if twin is None else _BlockLoader(twin, self._groups)

    def load(self, first: int, into: Arrays) -> None:
        """Load rows from `first` on, as many as the arrays have. Raises DataError."""
        stop = first + len(next(iter(into.values())))
        number, done = int(np.searchsorted(self._groups, first, "right")) - 1, first
        while done < stop:
            start, end = int(self._groups[number]), int(self._groups[number + 1])
            rows = range(done - start, min(stop, end) - start)
            part = slice(done - first, done - first + len(rows))
            self._load(number, rows, {name: array[part] for name, array in into.items()})
            if stop >= end:
                self.forget()
            number, done = number + 1, end

    def load_skipping_bad(self, first: int, into: Arrays, missing: Rows) -> Rows:
        """As `load`, but skip rows in `missing` and bad rows, which a binary search finds. Returns the skipped rows."""
        size = len(next(iter(into.values())))
        pending, bad = [np.setdiff1d(np.arange(first, first + size), missing)], [missing]
        while pending and len(bad) <= _MOST_BAD_ROWS:
            rows = pending.pop()
            try:
                if len(rows) == size:
                    self.load(first, into)
                else:
                    self.load_rows(rows, into, rows - first)
            except (DataError, UserCodeError) as error:
                if isinstance(error.__cause__, OSError):
                    raise  # a file that cannot be read has no good row
                if len(rows) == 1:
                    bad.append(rows)
                else:
                    pending += np.array_split(rows, 2)
        return np.concatenate([*bad, *pending])

    def load_rows(self, rows: Rows, into: Arrays, places: Rows) -> None:
        """Load only these rows, if the source can, into places of the arrays. Raises DataError."""
        numbers = np.searchsorted(self._groups, rows, "right") - 1
        for number in np.unique(numbers).tolist():
            selected = np.flatnonzero(numbers == number)
            arrays = self.source.load_rows(number, list(into), rows[selected] - self._groups[number])
            for name, array in arrays.items():
                into[name][places[selected]] = array

    def forget(self) -> None:
        """Drop the row group read last."""
        self._last = (-1, [], {})

    def _load(self, number: int, rows: range, into: Arrays) -> None:
        names = self.source.fill(number, rows, into)
        for name, array in self._group(number, names).items() if names else ():
            into[name][...] = array[rows.start : rows.stop]

    def _group(self, number: int, names: list[str]) -> Arrays:
        """Return a row group; the last one is kept for a neighbouring block that reads its other rows."""
        if self._last[:2] != (number, names):
            self._last = (number, names, self.source.load(number, names))
        return self._last[2]


class _MissingRows:
    """Rows that were not loaded with their damaged blocks. Several threads may set rows of different blocks."""

    def __init__(self) -> None:
        self._by_block: dict[int, Rows] = {}
        self._sorted: Rows | None = _NO_ROWS  # of all blocks; None until it is needed

    def of(self, block: int) -> Rows:
        """Return the rows of a block."""
        return self._by_block.get(block, _NO_ROWS)

    def set(self, block: int, rows: Rows) -> None:
        """Replace the rows of a block."""
        self._by_block[block], self._sorted = rows, None

    def among(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are missing."""
        if self._sorted is None:
            self._sorted = np.sort(np.concatenate([*self._by_block.values()]))
        first, stop = (np.searchsorted(self._sorted, rows, side) for side in ("left", "right"))
        is_missing: npt.NDArray[np.bool_] = first < stop
        return is_missing
