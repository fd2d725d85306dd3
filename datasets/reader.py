"""Random access to rows: only the row groups that are needed are read, and a bounded part stays decoded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from trainwright.datasets.columns import Arrays
from trainwright.datasets.index import Index, Loader
from trainwright.datasets.order import MEMORY_BYTES, Rows, grouped


class Reader:
    """Gathers rows by number. Safe to call from several threads.

    Args:
        loader: an opened source.
        index: of the source.
        columns: to read.
        blocks: (blocks + 1,) int64, first rows of the ranges that are decoded and kept together, and the number of
            rows; by default the row groups.
        memory_bytes: decoded blocks kept, the least recently used going first; the one in use is always kept.
    """

    def __init__(
        self,
        loader: Loader,
        index: Index,
        columns: Sequence[str],
        *,
        blocks: Rows | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._loader, self._columns, self._memory_bytes = loader, tuple(columns), memory_bytes
        self._groups = np.array([*index.firsts, index.rows], dtype=np.int64)
        self._blocks = self._groups if blocks is None else blocks
        self._schema = {name: index.schema[name] for name in self._columns}
        self._kept: OrderedDict[int, Arrays] = OrderedDict()
        self._last: tuple[int, Arrays] = (-1, {})
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def gather(self, rows: Rows) -> Arrays:
        """Columns of the rows, in the order asked for: fresh arrays (rows, *shape). Raises DataError."""
        if not self._columns:
            return {}
        with self._lock:
            if len(self._blocks) == 2:
                return {name: array.take(rows, axis=0) for name, array in self._block(0).items()}
            return self._from_blocks(rows)

    def _from_blocks(self, rows: Rows) -> Arrays:
        result = {name: np.empty((len(rows), *field.shape), field.dtype) for name, field in self._schema.items()}
        for block, chosen in grouped(np.searchsorted(self._blocks, rows, "right") - 1):
            local = rows[chosen] - self._blocks[block]
            for name, array in self._block(block).items():
                result[name][chosen] = array.take(local, axis=0)
        return result

    def _block(self, block: int) -> Arrays:
        if block in self._kept:
            self._kept.move_to_end(block)
            return self._kept[block]
        arrays = self._decode(int(self._blocks[block]), int(self._blocks[block + 1]))
        self._kept[block] = arrays
        self._kept_bytes += _size(arrays)
        while self._kept_bytes > self._memory_bytes and len(self._kept) > 1:
            self._kept_bytes -= _size(self._kept.popitem(last=False)[1])
        return arrays

    def _decode(self, start: int, stop: int) -> Arrays:
        """Rows start..stop from the row groups that hold them."""
        first = int(np.searchsorted(self._groups, start, "right")) - 1
        after = int(np.searchsorted(self._groups, stop, "left"))
        pieces: list[Arrays] = []
        for number in range(first, after):
            low = max(start - int(self._groups[number]), 0)
            high = min(stop, int(self._groups[number + 1])) - int(self._groups[number])
            group = self._group(number)
            whole = high - low == int(self._groups[number + 1] - self._groups[number])
            pieces.append(group if whole else {name: array[low:high].copy() for name, array in group.items()})
        if len(pieces) == 1:
            return pieces[0]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in self._columns}

    def _group(self, number: int) -> Arrays:
        """The row group last read is kept, as neighbouring blocks share it."""
        if self._last[0] != number:
            self._last = (number, self._loader.load(number, self._columns))
        return self._last[1]


def _size(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
