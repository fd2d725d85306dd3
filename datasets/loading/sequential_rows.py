"""Rows by number from a source that gives them one after the other: read in passes, each from a row on.

A reader keeps the last few blocks of a pass. A row before them, or of another epoch, restarts the pass at that row.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import Arrays, Field, Index, RowAccess, RowGroup, Rows, hash_parts

Blocks = Generator[Arrays, None, None]
"""Blocks of consecutive rows. Closing it ends what the pass runs: threads, processes, iterators."""
SAMPLED_ROWS = 64  # that are read twice, to see whether a source repeats itself
NOT_REPLAYABLE = "rows can count twice or never, since replayable=False says that it gives others each time"


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """The rows of a pass that a process reads: of each `total` consecutive ones, `count` from the `first` on.

    A row has a place in its part: 0 for the part's first row, and so on.
    """

    first: int = 0
    count: int = 1
    total: int = 1

    def has(self, rows: Rows) -> bool:
        """Whether all rows are in this part."""
        return bool(((rows - self.first) % self.total < self.count).all())

    def places(self, rows: Rows) -> Rows:
        """Places of rows of this part."""
        return rows // self.total * self.count + rows % self.total - self.first

    def row(self, place: int) -> int:
        """The row at a place."""
        return place // self.count * self.total + self.first + place % self.count


ALL_ROWS = RowPart()


class SequentialRows(RowAccess):
    """Reads one pass after the other. Safe to use from several threads, which then wait for each other.

    Args:
        open_pass: (epoch, place) -> the blocks of the part's rows of a pass, from a place on. It is closed before
            another is opened.
        index: of the source.
        columns: to read; blocks may have others too.
        where: the source, for errors.
        part: the rows that the blocks have.
        what: names the source in errors.
        exact: whether a pass must end after the last row of the index; otherwise its further rows are left out.
        aligned: a pass starts at a multiple of so many places, for rows that are not asked for in their order.
        remedy: what to do where a pass has fewer or more rows.
    """

    def __init__(
        self,
        open_pass: Callable[[int, int], Blocks],
        index: Index,
        columns: Sequence[str],
        *,
        where: str,
        part: RowPart = ALL_ROWS,
        what: str = "the pipeline",
        exact: bool = False,
        aligned: int = 1,
        remedy: str = "give it as many rows in each epoch, or pass the number as rows=",
    ) -> None:
        self.part = part
        self._open, self._rows, self._where, self._what = open_pass, index.rows, where, what
        self._exact, self._aligned, self._remedy = exact, aligned, remedy
        self._fields = {name: index.schema[name] for name in columns}
        self._lock = threading.Lock()
        self._epoch = -1
        self._blocks: Blocks | None = None
        self._kept: list[Arrays] = []
        self._first = self._next = 0  # place of the first row kept, and the place after the last

    def gather(self, rows: Rows, epoch: int = 0) -> Arrays:
        """Columns of the rows of a pass, in the order asked for: fresh arrays (rows, *shape).

        Raises:
            DataError: the pass ended before a row, or goes on after the last row of the index. Also what the blocks
                raise.
        """
        places = self.part.places(rows)
        if not len(rows) or not self._fields:
            return take_rows([], places, self._fields)
        low, high = int(places.min()), int(places.max()) + 1
        with self._lock:
            if self._blocks is None or epoch != self._epoch or low < self._first:
                self._begin(epoch, low - low % self._aligned)
            while self._next < high:
                self._read(low)
            if self._exact and self.part.row(self._next) >= self._rows:
                self._check_end()
            firsts = self._first + np.cumsum([0, *map(block_rows, self._kept[:-1])])
            return take_rows([*zip(firsts.tolist(), self._kept, strict=True)], places, self._fields)

    def _begin(self, epoch: int, place: int) -> None:
        blocks, self._blocks, self._kept = self._blocks, None, []
        if blocks is not None:
            blocks.close()
        self._blocks = self._open(epoch, place)
        self._epoch, self._first, self._next = epoch, place, place

    def _read(self, wanted: int) -> None:
        """Read another block; blocks that end before the row wanted are dropped, except the last of them."""
        block = self._next_block()
        if block is None:
            raise DataError(
                f"{self._what} ended before row {self.part.row(self._next)} of {self._rows}",
                where=f"{self._where}, epoch {self._epoch}",
                remedy=self._remedy,
            )
        self._kept.append(block)
        self._next += block_rows(block)
        while len(self._kept) > 1 and self._first + sum(map(block_rows, self._kept[:2])) <= wanted:
            self._first += block_rows(self._kept.pop(0))

    def _next_block(self) -> Arrays | None:
        """The next block; None at the end. A pass that failed is opened anew the next time."""
        assert self._blocks is not None, "a pass was begun"
        try:
            return next(self._blocks, None)
        except BaseException:
            self._blocks = None
            raise

    def _check_end(self) -> None:
        if self.part.row(self._next - 1) >= self._rows or self._next_block() is not None:
            raise DataError(
                f"{self._what} goes on after its {self._rows} rows",
                where=f"{self._where}, epoch {self._epoch}",
                remedy=self._remedy,
            )


class PartRows(RowAccess):
    """Reads the rows of a part, and all rows if others are asked for too, such as another rank's unit."""

    def __init__(self, own: SequentialRows, whole: SequentialRows) -> None:
        self._own, self._whole = own, whole

    def gather(self, rows: Rows, epoch: int = 0) -> Arrays:
        """Columns of the rows of a pass, in the order asked for: fresh arrays (rows, *shape). Raises DataError."""
        return (self._own if self._own.part.has(rows) else self._whole).gather(rows, epoch)


def pass_index(
    where: str, schema: Mapping[str, Field], rows: int, first: Arrays, digest: str, *, call: str = "", weight: str = ""
) -> Index:
    """Return the index of a source whose rows come in passes.

    Args:
        where: the source, for errors.
        schema: its columns.
        rows: of a pass.
        first: the first rows.
        digest: of the first rows, for the hash; empty where they may differ.
        call: also for the hash.
        weight: see `Index`.
    """
    named = sorted((name, field.dtype.str, field.shape) for name, field in schema.items())
    return Index(
        rows=rows,
        groups=(RowGroup(file=where, number=0, rows=rows, first=0),),
        schema=schema,
        row_bytes=max(sum(map(_size_bytes, first.values())) // block_rows(first), 1),
        hash=hash_parts([*filter(None, [call]), rows, *named, digest]),
        in_order=True,
        weight=weight,
    )


def _size_bytes(array: npt.NDArray[Any]) -> int:
    """Size of a column; of an object, that of its text or bytes."""
    if array.dtype != np.dtype(object):
        return array.nbytes
    return sum(len(value) if isinstance(value, str | bytes) else np.asarray(value).nbytes for value in array)


def check_pass_rows(rows: int | None, where: str) -> None:
    """Raise DataError for `rows=` that is not a number of rows."""
    if rows is not None and rows < 1:
        raise DataError(f"rows={rows} is not a length of a pass", where=where, remedy="give 1 or more")


def refuse_pass_rows(rows: int | None, where: str) -> None:
    """Raise DataError for `rows=` of a data set that is not read in passes."""
    if rows is not None:
        raise DataError(
            "rows= is for what is read in passes, and this data set has rows by number",
            where=where,
            remedy="leave it out, and use epoch_samples= of the job for shorter epochs",
        )


def take_rows(blocks: Sequence[tuple[int, Arrays]], places: Rows, fields: Mapping[str, Field]) -> Arrays:
    """Return rows of blocks, each given with the place of its first row, in order: fresh arrays (places, *shape)."""
    found = {name: np.empty((len(places), *field.shape), field.dtype) for name, field in fields.items()}
    which = np.searchsorted([first for first, _ in blocks], places, "right") - 1
    for number in np.unique(which).tolist() if found else ():
        chosen, (first, block) = which == number, blocks[number]
        for name, array in found.items():
            array[chosen] = block[name][places[chosen] - first]
    return found


def takes_epoch(make: Callable[..., Any], *others: str) -> bool:
    """Whether a function has a parameter `epoch`, or one besides these others that must be given."""
    parameters = [each for name, each in inspect.signature(make).parameters.items() if name not in others]
    required = [each for each in parameters if each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD]
    return bool(required) or any(each.name == "epoch" for each in parameters)


def block_rows(block: Mapping[str, Sized]) -> int:
    """Rows of a block."""
    return len(next(iter(block.values())))
