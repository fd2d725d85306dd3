"""The index of a data set: how many rows, in which row groups of which files, with which columns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainwright.datasets.formats.arrow_columns import Arrays, Field


@dataclass(frozen=True, kw_only=True)
class Group:
    """One row group.

    Attributes:
        file: path of its file, as the file system names it; empty in memory.
        number: of the row group within the file.
        rows: in it.
        first: row number of its first row in the data set.
        start: first byte of its rows in the file, where a first pass found it; in a compressed file, once unpacked.
        stop: the byte after its last.
    """

    file: str
    number: int
    rows: int
    first: int
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a data set holds. Picklable; the order of samples is a function of it and of the seed.

    Attributes:
        rows: of all groups.
        groups: in row order.
        schema: columns of the source, before any transform.
        row_bytes: mean decoded size of a row.
        hash: SHA-256 (hexadecimal) over all of it; another hash means that the data was changed.
        base: of derived rows, the index of those that they come from.
        traits: by column, what a first pass found out and the source's own loader needs; the schema follows from it.
        sizes: by file, its bytes at the time; empty where they are not compared.
        weight: column that the source gives as the samples' weights; empty for none.
        in_order: whether rows come one after the other only, in an order of their own.
    """

    rows: int
    groups: tuple[Group, ...]
    schema: Mapping[str, Field]
    row_bytes: int
    hash: str
    base: Index | None = None
    traits: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    in_order: bool = False
    weight: str = ""

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """First row of each row group."""
        return tuple(group.first for group in self.groups)


class Loader(Protocol):
    """An opened source."""

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Columns of row group `number` of the index; raises DataError that names file, row group and column."""


class Rowwise(Protocol):
    """What gives rows by number to a stream."""

    def gather(self, rows: npt.NDArray[np.int64], epoch: int = 0) -> Arrays:
        """Columns of the rows, in the order asked for: fresh arrays (rows, *shape). Raises DataError.

        Args:
            epoch: the pass that they are of, for sources whose rows are not the same in each.
        """


class Source(Protocol):
    """Where rows come from. Lazy and picklable."""

    def index(self) -> Index:
        """Look at the source; where its files have no index of their own, in a first pass over all of them.

        Raises DataError for anything wrong.
        """

    def open(self, index: Index) -> Loader:
        """A loader for one process."""

    def describe(self) -> str:
        """As the user wrote it, in short."""


def digest(parts: Iterable[object]) -> str:
    """SHA-256 over the text of the parts, in order."""
    sums = hashlib.sha256()
    for part in parts:
        sums.update(f"{part}\n".encode())
    return sums.hexdigest()
