"""Combine data sets: mix them by weights that hold in every prefix, or concatenate them.

A fixed sequence with a short period determines the part of row i of a mixture: each part's rows are due in windows as
wide as the inverse of its weight, and the row whose window ends first comes first (Pfair scheduling: Baruah, Cohen,
Plaxton and Varvel, 1996). So every prefix has each part's weight within one row. The rows of a part keep their order,
start at a row that depends on the seed, and repeat after the last row. The sample order shuffles the mixture's rows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import fold_seed
from trainwright.core.errors import DataError, nearest
from trainwright.datasets.data_source import (
    Arrays,
    Field,
    Index,
    Loader,
    RowGroup,
    Rows,
    Source,
    even_groups,
    hash_parts,
    require_same_fields,
    schema_of,
)
from trainwright.datasets.dataset import Dataset, transformed_fields
from trainwright.datasets.ops.row_transforms import Counters
from trainwright.datasets.row_reader import Gather, RowReader
from trainwright.datasets.sample_order import MAX_PASSES, MEMORY_BYTES, apply_by_pass

_TAG = "source"
_PERIOD = 1 << 14  # longest period; weights that need a longer one are rounded
_GROUP_BYTES, _GROUP_ROWS = 16 << 20, 1024


@dataclass(frozen=True, kw_only=True)
class MixPattern:
    """The sequence of parts, which repeats; pure."""

    counts: tuple[int, ...]  # rows of each part in one period, at least 1 each

    @property
    def period(self) -> int:
        """Rows after which the sequence begins again."""
        return sum(self.counts)

    def at(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return the part of each row of the mixture, and its row number within the part."""
        periods, slot = np.divmod(rows, self.period)
        parts = self._parts[slot]
        return parts, periods * np.array(self.counts, dtype=np.int64)[parts] + self._ranks[slot]

    def position(self, part: int, number: int) -> int:
        """Return the row of the mixture that is row `number` of a part."""
        periods, rank = divmod(number, self.counts[part])
        return periods * self.period + int(np.flatnonzero(self._parts == part)[rank])

    @cached_property
    def _parts(self) -> Rows:
        return _sequence(self.counts)

    @cached_property
    def _ranks(self) -> Rows:
        ranks = np.empty(self.period, dtype=np.int64)
        for part, count in enumerate(self.counts):
            ranks[self._parts == part] = np.arange(count)
        return ranks


@dataclass(frozen=True, kw_only=True)
class _Consecutive:
    """Parts one after the other; pure."""

    sizes: tuple[int, ...]  # rows of each part

    def at(self, rows: Rows) -> tuple[Rows, Rows]:
        """As `MixPattern.at`."""
        sizes = np.array(self.sizes, dtype=np.int64)
        ends = np.cumsum(sizes)
        parts = np.searchsorted(ends, rows, side="right")
        return parts, rows - (ends - sizes)[parts]


def pattern_of(weights: Sequence[float]) -> MixPattern:
    """Return the pattern with these weights and the shortest period; weights may be rounded to 1 in 16,384."""
    shares = np.array(weights, dtype=np.float64) / math.fsum(weights)
    periods = np.arange(len(shares), _PERIOD + 1, dtype=np.float64)[:, None]
    exact = np.all(np.abs(np.rint(periods * shares) - periods * shares) < 1e-9 * periods, axis=1)
    exact &= np.all(np.rint(periods * shares) >= 1, axis=1)
    if exact.any():
        counts = np.rint(periods[int(np.argmax(exact))] * shares)
    else:
        counts = np.maximum(np.rint(shares * _PERIOD), 1)
    return MixPattern(counts=tuple(int(count) for count in counts))


def largest_single_pass(pattern: MixPattern, sizes: Sequence[int]) -> int:
    """Return the most rows of a mixture without a repeated row, after which a part has no unused row."""
    return min(pattern.position(part, size) for part, size in enumerate(sizes))


@lru_cache(maxsize=8)
def _sequence(counts: tuple[int, ...]) -> Rows:
    """Return the part of each slot of a period: among the released parts, the one with the earliest deadline."""
    period = sum(counts)
    waiting = [(0, -(-period // count), part, 0) for part, count in enumerate(counts)]  # release, deadline, part, rank
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    parts = np.empty(period, dtype=np.int64)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, deadline, part, rank = heapq.heappop(waiting)
            heapq.heappush(ready, (deadline, part, rank))
        _, part, rank = heapq.heappop(ready)
        parts[slot] = part
        if rank + 1 < counts[part]:
            release, deadline = (rank + 1) * period // counts[part], -(-(rank + 2) * period // counts[part])
            heapq.heappush(waiting, (release, deadline, part, rank + 1))
    return parts


@dataclass(frozen=True, kw_only=True)
class _MixedIndex(Index):
    """Index of combined data sets, with the indexes of the parts in order."""

    parts: tuple[Index, ...]
    pattern: MixPattern | _Consecutive


@dataclass(frozen=True, kw_only=True)
class _MixedSource(Source):
    """Rows of several named data sets in the order of a pattern. `mix` explains the other fields."""

    parts: tuple[tuple[str, Dataset], ...]
    pattern: MixPattern | None  # None for one part after the other
    rows: int | None = None
    seed: int = 0
    tag: bool = False

    def describe(self) -> str:
        if self.pattern is None:
            return f"concat({', '.join(repr(dataset) for _, dataset in self.parts)})"
        shares = zip(self.parts, self.pattern.counts, strict=True)
        return f"mix({', '.join(f'{count} {name}: {dataset!r}' for (name, dataset), count in shares)})"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return tuple(function for _, dataset in self.parts for function in dataset.functions)

    def index(self) -> _MixedIndex:
        """Index every part and compare their columns; with transforms, a row of each is read."""
        parts = tuple(dataset.index() for _, dataset in self.parts)
        schema, sizes = self._schema(parts), tuple(part.rows for part in parts)
        rows = self.rows or (sum(sizes) if self.pattern is None else largest_single_pass(self.pattern, sizes))
        counts = sizes if self.pattern is None else self.pattern.counts
        shares = np.array(counts) / sum(counts)
        row_bytes = int(max(np.dot(shares, [part.row_bytes for part in parts]), 1))
        settings = ("concat",) if self.pattern is None else (self.pattern.counts, rows, self.seed, self.tag)
        return _MixedIndex(
            rows=rows,
            groups=_joined_groups(parts) if self.pattern is None else _mixed_groups(parts, shares, rows, row_bytes),
            schema=schema,
            row_bytes=row_bytes,
            hash=hash_parts(
                [*settings, *((name, part.hash) for (name, _), part in zip(self.parts, parts, strict=True))]
            ),
            note="" if self.pattern is None or self.rows is not None else self._unused_note(self.pattern, sizes, rows),
            parts=parts,
            pattern=self.pattern or _Consecutive(sizes=sizes),
        )

    def _unused_note(self, pattern: MixPattern, sizes: Sequence[int], rows: int) -> str:
        """Return a note on the rows that no epoch uses; empty if all are used."""
        periods, remainder = divmod(rows, pattern.period)
        parts, _ = pattern.at(np.arange(remainder))
        used_counts = periods * np.array(pattern.counts) + np.bincount(parts, minlength=len(sizes))
        left = [
            f"{size - used:,} of {size:,} rows of {name!r}"
            for (name, _), size, used in zip(self.parts, sizes, used_counts.tolist(), strict=True)
            if used < size
        ]
        if not left:
            return ""
        most = max(pattern.position(part, size - 1) for part, size in enumerate(sizes)) + 1
        return f"a mixture, and {' and '.join(left)} are in no epoch: mix(..., rows={most}) has each row at least once"

    def open(self, index: Index) -> _MixedLoader:
        assert isinstance(index, _MixedIndex), "a mixture is opened with an index of its own"
        return _MixedLoader(self, index)

    def _schema(self, indexes: tuple[Index, ...]) -> Mapping[str, Field]:
        names = [name for name, _ in self.parts]
        schemas = [transformed_fields(dataset, index) for (_, dataset), index in zip(self.parts, indexes, strict=True)]
        remedy = "bring the parts to the same columns, types and shapes with .map before mixing or joining"
        for name, fields in zip(names, schemas, strict=True):
            require_same_fields(fields, schemas[0], repr(names[0]), f"part {name!r} of {self.describe()}", remedy)
        if self.tag and _TAG in schemas[0]:
            raise DataError(
                f"the parts have a column {_TAG!r} already",
                where=self.describe(),
                remedy="rename it with .map_batches, or leave tag=False",
            )
        return {**schemas[0], _TAG: Field(np.dtype(np.int64), ())} if self.tag else schemas[0]


def _mixed_groups(
    parts: Sequence[Index], shares: npt.NDArray[np.float64], rows: int, row_bytes: int
) -> tuple[RowGroup, ...]:
    """Return row groups of a mixture that take about a row group of each part."""
    pairs = zip(parts, shares, strict=True)
    in_files = (group.rows / share for part, share in pairs for group in part.groups if group.file)
    return even_groups("mixture", rows, max(min(int(max(in_files, default=0)), _GROUP_BYTES // row_bytes), _GROUP_ROWS))


def _joined_groups(parts: Sequence[Index]) -> tuple[RowGroup, ...]:
    """Return the row groups of parts that come one after the other."""
    firsts = np.cumsum([0, *(part.rows for part in parts[:-1])]).tolist()
    return tuple(
        replace(group, file=group.file or "concat", first=first + group.first)
        for first, part in zip(firsts, parts, strict=True)
        for group in part.groups
    )


class _MixedLoader(Loader):
    """Gathers the rows of each part and puts them in the order of the mixture."""

    def __init__(self, source: _MixedSource, index: _MixedIndex) -> None:
        self._source, self._index, self._where = source, index, source.describe()
        self._readers: dict[tuple[int, tuple[str, ...]], RowReader] = {}
        self._epoch = 0

    @property
    def varying(self) -> bool:
        return any(reader.varying for reader in self._readers.values())

    def begin(self, seed: int, epoch: int) -> None:
        """Begin an epoch of a run, to which later loads belong; the mixture has its own seed."""
        self._epoch = epoch

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        group = self._index.groups[number]
        rows = np.arange(group.first, group.first + group.rows, dtype=np.int64)
        return self._mixed(rows, columns, RowReader.gather)

    def load_rows(self, number: int, columns: Sequence[str], rows: Rows) -> Arrays:
        return self._mixed(self._index.groups[number].first + rows, columns, RowReader.gather_alone)

    def _mixed(self, rows: Rows, columns: Sequence[str], gather: Gather) -> Arrays:
        parts, numbers = self._index.pattern.at(rows)
        names = tuple(name for name in columns if not (self._source.tag and name == _TAG))
        result: Arrays = {
            name: np.empty((len(rows), *self._index.schema[name].shape), self._index.schema[name].dtype)
            for name in names
        }
        for part in np.unique(parts).tolist():
            positions = np.flatnonzero(parts == part)
            arrays = self._rows(part, numbers[positions], names, gather)
            where = f"part {self._source.parts[part][0]!r} of {self._where}"
            require_same_fields(schema_of(arrays), schema_of(result), "the first row", where)
            for name, array in arrays.items():
                result[name][positions] = array
        return {name: result.get(name, parts) for name in columns}

    def _rows(self, part: int, numbers: Rows, columns: tuple[str, ...], gather: Gather) -> Arrays:
        """Return transformed rows of a part; `numbers` count repeats, and each pass over the part is an epoch."""
        dataset, index = self._source.parts[part][1], self._index.parts[part]
        start = fold_seed(self._source.seed, part) % index.rows if self._source.seed else 0
        passes, rows = np.divmod(numbers + start, index.rows)

        def compute(mask: npt.NDArray[np.bool_], number: int) -> Arrays:
            counters = Counters(seed=self._source.seed, epoch=number)
            gathered = gather(self._reader(part, columns), rows[mask], self._epoch * MAX_PASSES + number)
            return dataset.transform(gathered, rows[mask], counters, columns)

        return apply_by_pass(passes, compute)

    def _reader(self, part: int, columns: tuple[str, ...]) -> RowReader:
        if (part, columns) not in self._readers:
            dataset, index = self._source.parts[part][1], self._index.parts[part]
            self._readers[part, columns] = RowReader(
                dataset.source.open(index), index, dataset.source_columns(index, columns),
                memory_bytes=MEMORY_BYTES // (4 * len(self._source.parts)), seed=self._source.seed,
            )  # fmt: skip
        return self._readers[part, columns]


def mix(
    parts: Mapping[str, Dataset],
    weights: Mapping[str, float] | None = None,
    *,
    rows: int | None = None,
    seed: int = 0,
    tag: bool = False,
) -> Dataset:
    """Mix data sets, so that every prefix of the rows has each part's weight within one row.

    Each epoch has the same first rows of the mixture. A note of the plan says how many rows of large parts no epoch
    uses. Give `rows` for a longer epoch; the job's `epoch_samples=` then keeps checkpoints and evaluations as frequent
    as before. Transforms of the parts are applied here, with randomness from (seed, pass over the part, row) and not
    from the epoch: augmentation that must differ between epochs belongs in a `.map` of the mixture.

    Args:
        parts: data sets by name, of the same columns after their transforms.
        weights: positive, by name; only their ratios count. They are exact if whole numbers with a sum of at most
            16,384 have the same ratios, else rounded. By default all are equal.
        rows: of an epoch; a part starts again after its last row. By default the most rows without a repeated one.
        seed: determines the first row of each part; 0 starts at row 0.
        tag: add an int64 column `source`: the number of the part, in the order given.

    Raises:
        DataError: weights that are missing, unknown or not positive, or a part with a transform that runs on Ray Data.
    """
    if rows is not None and rows < 1:
        raise DataError(f"rows={rows} is not a length of an epoch", remedy="give 1 or more, or leave it out")
    _check_parts("mix", parts)
    weight_of = dict.fromkeys(parts, 1.0) if weights is None else dict(weights)
    _check_weights(parts, weight_of)
    pattern = pattern_of([weight_of[name] for name in parts])
    return Dataset(source=_MixedSource(parts=tuple(parts.items()), pattern=pattern, rows=rows, seed=seed, tag=tag))


def concat(*parts: Dataset) -> Dataset:
    """Concatenate data sets: the rows of the first, then the rows of the second, and so on.

    Use it for all folds but one, or for data in several places. `shuffle` of the job shuffles all rows together.
    Transforms of the parts are applied here, with randomness from the row and not from the epoch: augmentation that
    must differ between epochs belongs in a `.map` of the result.

    Args:
        parts: data sets of the same columns after their transforms.

    Raises:
        DataError: no parts, one without rows by number, or one with a transform that runs on Ray Data.
    """
    named = {str(number): part for number, part in enumerate(parts)}
    _check_parts("concat", named)
    return Dataset(source=_MixedSource(parts=tuple(named.items()), pattern=None))


def _check_parts(word: str, parts: Mapping[str, Dataset]) -> None:
    """Raise DataError for parts that cannot be read by row number."""
    if not parts:
        raise DataError(f"there is nothing to {word}", remedy="give at least one data set")
    for name, dataset in parts.items():
        dataset.need_rows_by_number(word)
        if dataset.heavy:
            raise DataError(
                f"{word} has a part with a transform that runs on Ray Data",
                where=f"part {name!r}: {dataset!r}",
                remedy=f"{word} first and call .map_batches(f, cpus=...) on all, or write the part as parquet once",
            )


def _check_weights(parts: Iterable[str], weights: Mapping[str, float]) -> None:
    names = list(parts)
    for name in (*names, *weights):
        if name not in weights:
            raise DataError(f"part {name!r} has no weight", where="weights=", remedy="give one for each part")
        if name not in names:
            raise DataError(f"there is no part {name!r}", where="weights=", remedy=nearest(name, names))
        if not (weights[name] > 0 and math.isfinite(weights[name])):
            raise DataError(
                f"the weight {weights[name]} of {name!r} is not positive",
                where="weights=",
                remedy="leave the part out, or give it a weight above 0",
            )
