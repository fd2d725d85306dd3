"""Splits: parts of a data set that never change, by a stable hash of the row number or of a key column.

The side of a row depends only on the seed and its number (or key). So appended rows do not move earlier rows, and no
list of rows is stored: a split has the row groups of the whole data set, each with fewer rows, which keeps reading
local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import fold_seed
from trainwright.core.errors import DataError, nearest
from trainwright.datasets.data_source import Arrays, Index, Loader, PassResult, RowGroup, Rows, Source, hash_parts
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.sample_order import split_mix

_Mask = npt.NDArray[np.bool_]
_Keys = npt.NDArray[np.uint64]

_PIECE_ROWS = 1 << 20  # hashed at a time


@dataclass(frozen=True, kw_only=True)
class HashSplit:
    """Assigns rows or keys to the sides of a split by hash; pure."""

    shares: tuple[float, ...]  # of each side, in order; their sum is 1
    seed: int = 0  # of the hash

    def rows(self, first: int, stop: int) -> npt.NDArray[np.int8]:
        """Return the side of each row number first..stop: (stop - first,) int8."""
        return self.sides(np.arange(first, stop, dtype=np.uint64))

    def sides(self, keys: _Keys) -> npt.NDArray[np.int8]:
        """Return the side of each key: (keys,) int8. SplitMix64 spreads keys over [0, 1)."""
        spread = (split_mix(keys, fold_seed(self.seed)) >> np.uint64(11)) * 2.0**-53
        return np.searchsorted(np.cumsum(self.shares)[:-1], spread, side="right").astype(np.int8)


def hash_keys(values: npt.NDArray[Any]) -> _Keys | None:
    """Return a number for each value, equal for equal values in every process; None if values cannot be keys.

    Integers of any width, booleans and times count by value, floats by value in float64, text and bytes by BLAKE2b.
    """
    if values.ndim != 1:
        return None
    if values.dtype.kind in "iubmM":
        return values.astype(np.int64).view(np.uint64)
    if values.dtype.kind == "f":
        return (values.astype(np.float64) + 0.0).view(np.uint64)
    if not all(isinstance(value, str | bytes) for value in values):
        return None
    keys: dict[str | bytes, int] = {}
    for value in values:
        if value not in keys:
            text = value.encode() if isinstance(value, str) else value
            keys[value] = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    return np.array([keys[value] for value in values], dtype=np.uint64)


@dataclass(frozen=True, kw_only=True)
class SplitIndex(Index):
    """Index of one side of a split by key."""

    # for each row group of this side, a bit for each row of the original row group: set if it is on this side
    marks: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class _SplitSource(Source):
    """Side number `side` of a split, by the key column `by` or, if that is None, by row number.

    The splits of one call share `sides`: the side of every row by key, which needs one pass.
    """

    whole: Source
    names: tuple[str, ...]
    side: int
    cut: HashSplit
    by: str | None = None
    sides: PassResult = field(default_factory=PassResult)

    def describe(self) -> str:
        shares = zip(self.names, self.cut.shares, strict=True)
        words = ", ".join(f"{name} {share:g}" for name, share in shares)
        key = f", by={self.by!r}" if self.by is not None else ""
        return f"split({self.whole.describe()}, {words}{key})[{self.names[self.side]!r}]"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return self.whole.functions

    def index(self) -> Index:
        """Hash every row number, or read the key column once. Raises DataError if no row is on this side."""
        whole = self.whole.index()
        groups: list[RowGroup] = []
        marks: list[bytes] = []
        first = 0
        for number, mask in enumerate(self._masks(whole)):
            rows = int(np.count_nonzero(mask))
            if rows:
                groups.append(replace(whole.groups[number], number=number, rows=rows, first=first))
                marks.append(np.packbits(mask).tobytes() if self.by is not None else b"")
                first += rows
        if not groups:
            raise DataError(
                f"the split {self.names[self.side]!r} has none of {whole.rows} rows",
                where=self.describe(),
                remedy="give it a larger share, another seed=, or split by a key of more values",
            )
        settings = (self.names, self.cut.shares, self.side, self.cut.seed, self.by)
        return SplitIndex(
            rows=first,
            groups=tuple(groups),
            schema=whole.schema,
            row_bytes=whole.row_bytes,
            hash=hash_parts([whole.hash, *settings, *(mark.hex() for mark in marks)]),
            base=whole,
            marks=tuple(marks),
        )

    def open(self, index: Index) -> _SplitLoader:
        assert isinstance(index, SplitIndex) and index.base is not None, "a split is opened with an index of its own"
        return _SplitLoader(self, index, self.whole.open(index.base))

    def _masks(self, whole: Index) -> Iterable[_Mask]:
        """Return for each original row group a mask of its rows on this side."""
        if (column := self.by) is None:
            return (self.mask(group) for group in whole.groups)
        return (sides == self.side for sides in self.sides.get(whole, lambda: self._read_sides(whole, column)))

    def mask(self, group: RowGroup) -> _Mask:
        """Return a mask of the rows of an original row group that are on this side, by row number."""
        starts = range(group.first, group.first + group.rows, _PIECE_ROWS)
        stop = group.first + group.rows
        pieces = [self.cut.rows(start, min(start + _PIECE_ROWS, stop)) == self.side for start in starts]
        return np.concatenate(pieces)

    def _read_sides(self, whole: Index, column: str) -> tuple[npt.NDArray[np.int8], ...]:
        if column not in whole.schema:
            raise DataError(
                f"there is no column {column!r} to split by",
                where=self.whole.describe(),
                remedy=f"{nearest(column, whole.schema)} It must be a column of the source, before any .map",
            )
        loader = self.whole.open(whole)
        return tuple(self._sides_of(loader, number, group, column) for number, group in enumerate(whole.groups))

    def _sides_of(self, loader: Loader, number: int, group: RowGroup, column: str) -> npt.NDArray[np.int8]:
        values = loader.load(number, (column,))[column]
        keys = hash_keys(values)
        if keys is None:
            raise DataError(
                f"the values of {column!r}, {values.dtype} of shape {values.shape[1:]}, are not keys",
                where=f"{group.file}, row group {group.number}",
                remedy="split by a column of numbers, text or bytes, one for each row",
            )
        return self.cut.sides(keys)


class _SplitLoader(Loader):
    """Loads original row groups and keeps the rows of one side."""

    def __init__(self, source: _SplitSource, index: SplitIndex, loader: Loader) -> None:
        self._source, self._index, self._loader = source, index, loader

    def begin(self, seed: int, epoch: int) -> None:
        self._loader.begin(seed, epoch)

    def twin(self) -> _SplitLoader | None:
        twin = self._loader.twin()
        return None if twin is None else _SplitLoader(self._source, self._index, twin)

    @property
    def varying(self) -> bool:
        return self._loader.varying

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        origin, mask = self._side(number)
        return {name: array[mask] for name, array in self._loader.load(origin, columns).items()}

    def load_rows(self, number: int, columns: Sequence[str], rows: Rows) -> Arrays:
        origin, mask = self._side(number)
        return self._loader.load_rows(origin, columns, np.flatnonzero(mask)[rows])

    def _side(self, number: int) -> tuple[int, npt.NDArray[np.bool_]]:
        """Return the number of the original row group, and a mask of its rows on this side."""
        origin = self._index.groups[number].number
        assert self._index.base is not None
        group = self._index.base.groups[origin]
        if self._source.by is None:
            return origin, self._source.mask(group)
        bits = np.frombuffer(self._index.marks[number], dtype=np.uint8)
        return origin, np.unpackbits(bits, count=group.rows).view(np.bool_)


def split(dataset: Dataset, shares: Mapping[str, float], *, by: str | None = None, seed: int = 0) -> dict[str, Dataset]:
    """Split a data set into disjoint parts that together have all rows.

    A hash assigns each row to a part, so that the shares are met on average: of n rows, a share p gets n p rows with a
    standard deviation of sqrt(n p (1 - p)). Appended rows do not move other rows. Each part keeps the transforms.

    Args:
        dataset: to split; the rows are those of its source, filters and packing included.
        shares: above 0, by name, with a sum of 1.
        by: a key column of the source (numbers, text or bytes): rows with the same key are in the same part. Indexing
            the parts reads this column once; each row then takes one bit.
        seed: of the hash.

    Raises:
        DataError: the shares are wrong; when a part is read: it has no rows, or there is no such column of keys.
    """
    dataset.need_rows_by_number("split")
    for name, share in shares.items():
        if not (share > 0 and math.isfinite(share)):
            raise DataError(f"the share {share} of {name!r} is not positive", remedy="leave the part out")
    if not math.isclose(math.fsum(shares.values()), 1.0, abs_tol=1e-9):
        words = " + ".join(f"{share:g}" for share in shares.values()) or "0"
        raise DataError(
            f"the shares {words} are not 1 together", remedy='give shares such as {"train": 0.9, "test": 0.1}'
        )
    if len(shares) > 127:
        raise DataError(f"{len(shares)} parts are too many", remedy="give at most 127")
    names, cut, sides = tuple(shares), HashSplit(shares=tuple(shares.values()), seed=seed), PassResult()
    return {
        name: replace(
            dataset, source=_SplitSource(whole=dataset.source, names=names, side=side, cut=cut, by=by, sides=sides)
        )
        for side, name in enumerate(names)
    }
