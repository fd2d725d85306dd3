"""Rows by number from a source that yields them one after the other, in passes that can start at any row.

A reader keeps the last few blocks of a pass. An earlier row, or one of another epoch, starts a new pass at that row.
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
"""Blocks of consecutive rows. Closing it ends the threads, processes and iterators of the pass."""
SAMPLED_ROWS = 64  # that are read twice, to check whether a source yields the same rows again
NOT_REPLAYABLE = "rows can count twice or never, since replayable=False says that it gives others each time"


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """The rows of a pass that a process reads: `count` rows from `first` on, of each `total` consecutive rows.

    The place of a row is its number within the part, from 0 on.
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
        open_pass: (epoch, place) -> blocks of the part's rows of a pass, from a place on. They are closed before
            another pass is opened.
        index: of the source.
        columns: to read; blocks may have others too.
        where: the source, for errors.
        part: rows of the blocks.
        what: names the source in errors.
        exact: whether a pass must end after the last row of the index; otherwise further rows are ignored.
        aligned: a pass starts at a multiple of this number of places, for rows that are requested out of order.
        remedy: of the error for a pass with fewer or more rows.
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
        self._recent: list[Arrays] = []
        self._first = self._next = 0  # place of the first row kept, and the place after the last

    def gather(self, rows: Rows, epoch: int = 0) -> Arrays:
        """Return columns of the rows of a pass, in the requested order: fresh arrays (rows, *shape).

        Raises:
            DataError: the pass ends before a row, or continues after the last row of the index. Errors of the blocks
                are raised too.
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
            firsts = self._first + np.cumsum([0, *map(block_rows, self._recent[:-1])])
            return take_rows([*zip(firsts.tolist(), self._recent, strict=True)], places, self._fields)

    def _begin(self, epoch: int, place: int) -> None:
        blocks, self._blocks, self._recent = self._blocks, None, []
        if blocks is not None:
            blocks.close()
        self._blocks = self._open(epoch, place)
        self._epoch, self._first, self._next = epoch, place, place

    def _read(self, first_needed: int) -> None:
        """Read a block, and drop blocks that end before the first place needed, except the last one."""
        block = self._next_block()
        if block is None:
            raise DataError(
                f"{self._what} ended before row {self.part.row(self._next)} of {self._rows}",
                where=f"{self._where}, epoch {self._epoch}",
                remedy=self._remedy,
            )
        self._recent.append(block)
        self._next += block_rows(block)
        while len(self._recent) > 1 and self._first + sum(map(block_rows, self._recent[:2])) <= first_needed:
            self._first += block_rows(self._recent.pop(0))

    def _next_block(self) -> Arrays | None:
        """Return the next block; None at the end. After an error, the next call of `gather` opens a new pass."""
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
    """Reads rows from the reader of a part, or from the reader of all rows for others, such as another rank's unit."""

    def __init__(self, part_rows: SequentialRows, all_rows: SequentialRows) -> None:
        self._part_rows, self._all_rows = part_rows, all_rows

    def gather(self, rows: Rows, epoch: int = 0) -> Arrays:
        """Return columns of the rows of a pass, in the requested order: fresh arrays (rows, *shape)."""
        return (self._part_rows if self._part_rows.part.has(rows) else self._all_rows).gather(rows, epoch)


def pass_index(
    where: str, schema: Mapping[str, Field], rows: int, first: Arrays, digest: str, *, call: str = "", weight: str = ""
) -> Index:
    """Return the index of a source whose rows come in passes.

    Args:
        where: the source, for errors.
        schema: its columns.
        rows: of a pass.
        first: the first rows.
        digest: of the first rows, for the hash; empty if they can differ between passes.
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
    """Size of a column, with the texts, bytes or arrays of objects."""
    if array.dtype != np.dtype(object):
        return array.nbytes
    return sum(len(value) if isinstance(value, str | bytes) else np.asarray(value).nbytes for value in array)


def check_pass_rows(rows: int | None, where: str) -> None:
    """Raise DataError if `rows=` is not positive."""
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
    """Return rows of ordered blocks, each with the place of its first row: fresh arrays (places, *shape)."""
    result = {name: np.empty((len(places), *field.shape), field.dtype) for name, field in fields.items()}
    block_of_place = np.searchsorted([first for first, _ in blocks], places, "right") - 1
    for number in np.unique(block_of_place).tolist() if result else ():
        selected, (first, block) = block_of_place == number, blocks[number]
        for name, array in result.items():
            array[selected] = block[name][places[selected] - first]
    return result


def takes_epoch(make: Callable[..., Any], *others: str) -> bool:
    """Return whether a function has a parameter `epoch`, or a required one that is not among `others`."""
    parameters = [item for name, item in inspect.signature(make).parameters.items() if name not in others]
    required = [item for item in parameters if item.default is item.empty and item.kind <= item.POSITIONAL_OR_KEYWORD]
    return bool(required) or any(item.name == "epoch" for item in parameters)


def block_rows(block: Mapping[str, Sized]) -> int:
    """Rows of a block."""
    return len(next(iter(block.values())))
