"""Two data sets side by side, joined by row number: such as samples, and a teacher's predictions (`tw.predict`).

The rows, row groups and order are those of the first. The column `sample` of the second says which row of the first
each of its rows belongs to; every row has exactly one, or the index is refused. Each keeps its transforms, which see
its own columns alone. They are applied to batches only, so that small stored values are read and kept small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import Arrays, Field, Index, Loader, Rows, Source, hash_parts
from trainwright.datasets.ops.row_transforms import BatchMap, RowMap, Transform, function_name
from trainwright.datasets.row_reader import Gather, RowReader
from trainwright.datasets.sample_order import MEMORY_BYTES

if TYPE_CHECKING:
    from trainwright.datasets.dataset import Dataset

_KEY = "sample"
_MEMORY_SHARE = 4  # of the memory of a reader goes to the second data set's row groups


@dataclass(frozen=True, kw_only=True)
class _ZippedIndex(Index):
    """Index of two data sets side by side."""

    sides: tuple[Index, Index]
    places: Rows | None = None  # (rows,) int64, for each row its place in the second; None where that is the same


@dataclass(frozen=True, kw_only=True)
class _ZippedSource(Source):
    """The rows of `base` in their order, with the columns of `other`, which has a column `sample`."""

    base: Source
    other: Source
    # of the other's columns while transforms run, which see one side only; then `sample` is among them
    prefix: str = ""

    def describe(self) -> str:
        return f"{self.base.describe()}.beside({self.other.describe()})"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return (*self.base.functions, *self.other.functions)

    def index(self) -> _ZippedIndex:
        """Index both and read the column `sample`.

        Raises:
            DataError: there is none, a column is in both, or a row has no other, two of them, or one too many.
        """
        base, other = self.base.index(), self.other.index()
        named = {self.prefix + name: field for name, field in other.schema.items() if self.prefix or name != _KEY}
        _check_names(base.schema, named, self.describe())
        places = self._places(base.rows, other)
        return _ZippedIndex(
            rows=base.rows,
            groups=base.groups,
            schema={**base.schema, **named},
            row_bytes=base.row_bytes + other.row_bytes,
            hash=hash_parts([base.hash, "beside", other.hash]),
            note=base.note,
            sides=(base, other),
            places=places,
        )

    def open(self, index: Index) -> _ZippedLoader:
        assert isinstance(index, _ZippedIndex), "data sets side by side are opened with an index of their own"
        return _ZippedLoader(index, self.base.open(index.sides[0]), _SecondRows(self, index))

    def _places(self, rows: int, other: Index) -> Rows | None:
        """Where each row's other is. Raises DataError where that is not exactly one place."""
        field = other.schema.get(_KEY)
        if field is None or field.shape or field.dtype.kind not in "iu":
            found = "there is no such column" if field is None else f"it is {field.dtype} {list(field.shape)}"
            raise DataError(
                f"the column {_KEY!r} says which row each row belongs to, and {found}",
                where=self.other.describe(),
                remedy=f"give what tw.predict wrote, or add {_KEY!r} with row numbers from 0 on to the files",
            )
        loader = self.other.open(other)
        samples = np.concatenate([loader.load(number, (_KEY,))[_KEY] for number in range(len(other.groups))])
        samples = samples.astype(np.int64, copy=False)
        if len(samples) == rows and bool((samples == np.arange(rows)).all()):
            return None
        self._check_samples(samples, rows, other)
        places = np.empty(rows, dtype=np.int64)
        places[samples] = np.arange(rows)
        return places

    def _check_samples(self, samples: Rows, rows: int, other: Index) -> None:
        strange = np.flatnonzero((samples < 0) | (samples >= rows))
        if len(strange):
            what = f"row {samples[strange[0]]} is none of the {rows} rows of {self.base.describe()}"
            raise self._misfit(what, other, strange[:1])
        counts = np.bincount(samples, minlength=rows)
        if counts.max(initial=0) > 1:
            twice = int(np.argmax(counts > 1))
            raise self._misfit(f"row {twice} comes {counts[twice]} times", other, np.flatnonzero(samples == twice))
        if counts.min(initial=1) < 1:
            lacking = int(np.argmin(counts))
            before = np.flatnonzero(samples == lacking - 1)
            count = int(np.count_nonzero(counts == 0))
            raise self._misfit(f"row {lacking} is missing, and {count} of {rows} in all", other, before)

    def _misfit(self, what: str, other: Index, places: Rows) -> DataError:
        """With the files that hold the rows at these places."""
        numbers = np.searchsorted(np.array(other.firsts), places[:2], "right") - 1
        files = dict.fromkeys(other.groups[number].file for number in numbers.tolist())
        return DataError(
            f"the data sets do not belong together: {what}",
            where=", ".join(filter(None, files)) or self.other.describe(),
            remedy="give the data set that was predicted (.beside first, then split or filter), or predict this one",
        )


class _ZippedLoader(Loader):
    """Loads a row group of the first, and the rows beside it."""

    def __init__(self, index: _ZippedIndex, base: Loader, others: _SecondRows) -> None:
        self._index, self._base, self._others = index, base, others

    def twin(self) -> _ZippedLoader | None:
        base = self._base.twin()
        return None if base is None else _ZippedLoader(self._index, base, self._others)

    @property
    def varying(self) -> bool:
        return self._others.varying or self._base.varying

    def begin(self, seed: int, epoch: int) -> None:
        self._others.seed, self._others.epoch = seed, epoch
        self._base.begin(seed, epoch)

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        return self._zipped(columns, partial(self._base.load, number), self._rows(number), RowReader.gather)

    def load_rows(self, number: int, columns: Sequence[str], rows: Rows) -> Arrays:
        load = partial(self._base.load_rows, number, rows=rows)
        return self._zipped(columns, load, self._rows(number)[rows], RowReader.salvage)

    def _zipped(
        self, columns: Sequence[str], load: Callable[[Sequence[str]], Arrays], rows: Rows, gather: Gather
    ) -> Arrays:
        """Rows with what `load` gives of the first's columns, and `gather` of the second's."""
        schema = self._index.sides[0].schema
        own = [name for name in columns if name in schema]
        found = load(own) if own else {}
        if len(own) < len(columns):
            names = tuple(name for name in columns if name not in schema)
            found = {**found, **self._others.rows_of(rows, names, gather)}
        return {name: found[name] for name in columns}

    def fill(self, number: int, rows: range, into: Arrays) -> list[str]:
        """Some rows of a row group, as the first's loader can read them alone; the names that are left."""
        schema, some = self._index.sides[0].schema, self._rows(number)[rows.start : rows.stop]
        names = tuple(name for name in into if name not in schema)
        for name, array in self._others.rows_of(some, names, RowReader.gather).items() if names else ():
            into[name][...] = array
        own = {name: array for name, array in into.items() if name in schema}
        return self._base.fill(number, rows, own) if own else []

    def _rows(self, number: int) -> Rows:
        group = self._index.groups[number]
        return np.arange(group.first, group.first + group.rows, dtype=np.int64)


class _SecondRows:
    """The rows of the second data set, by those of the first. Safe to use from several threads."""

    def __init__(self, source: _ZippedSource, index: _ZippedIndex) -> None:
        self._source, self._index = source, index
        self._readers: dict[tuple[str, ...], RowReader] = {}
        self.seed, self.epoch = 0, 0

    @property
    def varying(self) -> bool:
        return any(reader.varying for reader in self._readers.values())

    def rows_of(self, rows: Rows, names: tuple[str, ...], gather: Gather) -> Arrays:
        prefix, places = self._source.prefix, rows if self._index.places is None else self._index.places[rows]
        found = gather(self._reader(tuple(name.removeprefix(prefix) for name in names)), places, self.epoch)
        return {prefix + name: array for name, array in found.items()}

    def _reader(self, names: tuple[str, ...]) -> RowReader:
        if names not in self._readers:
            other = self._index.sides[1]
            loader = self._source.other.open(other)
            reader = RowReader(loader, other, names, memory_bytes=MEMORY_BYTES // _MEMORY_SHARE, seed=self.seed)
            self._readers.setdefault(names, reader)
        return self._readers[names]


@dataclass(frozen=True, kw_only=True)
class _SideTransform:
    """A transform of the first or the second data set, which leaves the other's columns as they are."""

    function: Callable[..., Any]
    prefix: str
    second: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", function_name(self.function))  # by which errors call it

    def __call__(self, columns: Mapping[str, Any], *rng: Any) -> Any:
        """Return the columns, or the row, of both data sets, with its own transformed."""
        prefix = self.prefix if self.second else ""
        own = {name: value for name, value in columns.items() if name.startswith(self.prefix) == self.second}
        result = self.function({name.removeprefix(prefix): value for name, value in own.items()}, *rng)
        if not isinstance(result, Mapping):
            return result  # and the error names the function
        made = {prefix + name: value for name, value in result.items()}
        return {**{name: value for name, value in columns.items() if name not in own}, **made}


@dataclass(frozen=True, kw_only=True)
class _MergeColumns:
    """The last transform of zipped data sets: it removes the prefix of the second's columns."""

    prefix: str
    where: str

    def __call__(self, columns: Arrays) -> Arrays:
        """Columns of both, without `sample`. Raises DataError for a name that both have."""
        first = {name: array for name, array in columns.items() if not name.startswith(self.prefix)}
        second = {name.removeprefix(self.prefix): array for name, array in columns.items() if name not in first}
        second.pop(_KEY, None)
        _check_names(first, second, self.where)
        return {**first, **second}


def zip_datasets(first: Dataset, second: Dataset) -> tuple[Source, tuple[Transform, ...]]:
    """Return source and transforms of two data sets side by side; see `Dataset.beside`."""
    if not hasattr(second, "need_rows_by_number"):
        raise DataError(
            f"beside takes a data set, and this is a {type(second).__name__}",
            remedy="give tw.datasets.parquet(...) or tw.datasets.table(...)",
        )
    for dataset in (first, second):
        dataset.need_rows_by_number("beside")
    source = _ZippedSource(base=first.source, other=second.source)
    if not first.transforms and not second.transforms:
        return source, ()
    source = replace(source, prefix=f"beside-{len(first.transforms)}/")  # another prefix where it is called again
    together = _MergeColumns(prefix=source.prefix, where=source.describe())
    return source, (*_side_transforms(first, second, source.prefix), BatchMap(function=together))


def _side_transforms(first: Dataset, second: Dataset, prefix: str) -> Iterator[Transform]:
    for side, dataset in enumerate((first, second)):
        for step in dataset.transforms:
            aside = _SideTransform(function=step.function, prefix=prefix, second=side == 1)
            yield RowMap(function=aside) if isinstance(step, RowMap) else replace(step, function=aside)


def _check_names(first: Mapping[str, Field | npt.NDArray[Any]], second: Mapping[str, Any], where: str) -> None:
    for name in second:
        if name in first:
            raise DataError(
                f"both data sets have a column {name!r}",
                where=where,
                remedy="rename it in one of them with .map_batches, or leave it out of what is kept",
            )
