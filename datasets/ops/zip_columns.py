"""Two data sets side by side, joined by row number: for example samples, and a teacher's predictions (`tw.predict`).

Rows, row groups and order come from the first. The column `sample` of the second has row numbers of the first; each
must occur exactly once. Each data set keeps its transforms, which see only its own columns. They are applied to batches
only, so that the reader's memory holds the small stored values.
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
_MEMORY_SHARE = 4  # the second data set's row groups take at most a quarter of a reader's memory


@dataclass(frozen=True, kw_only=True)
class _ZippedIndex(Index):
    """Index of two data sets side by side."""

    sides: tuple[Index, Index]
    places: Rows | None = None  # (rows,) int64, for each row its row number in the second; None if they are equal


@dataclass(frozen=True, kw_only=True)
class _ZippedSource(Source):
    """The rows of `base` in their order, with the columns of `other`, which has a column `sample`."""

    base: Source
    other: Source
    # of the columns of `other`, `sample` included, until all transforms have run; empty without transforms
    prefix: str = ""

    def describe(self) -> str:
        return f"{self.base.describe()}.beside({self.other.describe()})"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return (*self.base.functions, *self.other.functions)

    def index(self) -> _ZippedIndex:
        """Index both and read the column `sample`.

        Raises:
            DataError: it is missing, both have a column of one name, or the rows do not correspond one to one.
        """
        base, other = self.base.index(), self.other.index()
        fields = {self.prefix + name: field for name, field in other.schema.items() if self.prefix or name != _KEY}
        _check_names(base.schema, fields, self.describe())
        places = self._places(base.rows, other)
        return _ZippedIndex(
            rows=base.rows,
            groups=base.groups,
            schema={**base.schema, **fields},
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
        """Return the row number in `other` of each row. Raises DataError if there is not exactly one."""
        field = other.schema.get(_KEY)
        if field is None or field.shape or field.dtype.kind not in "iu":
            problem = "there is no such column" if field is None else f"it is {field.dtype} {list(field.shape)}"
            raise DataError(
                f"the column {_KEY!r} says which row each row belongs to, and {problem}",
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
        unknown = np.flatnonzero((samples < 0) | (samples >= rows))
        if len(unknown):
            what = f"row {samples[unknown[0]]} is none of the {rows} rows of {self.base.describe()}"
            raise self._misfit(what, other, unknown[:1])
        counts = np.bincount(samples, minlength=rows)
        if counts.max(initial=0) > 1:
            double = int(np.argmax(counts > 1))
            raise self._misfit(f"row {double} comes {counts[double]} times", other, np.flatnonzero(samples == double))
        if counts.min(initial=1) < 1:
            missing = int(np.argmin(counts))
            before = np.flatnonzero(samples == missing - 1)
            count = int(np.count_nonzero(counts == 0))
            raise self._misfit(f"row {missing} is missing, and {count} of {rows} in all", other, before)

    def _misfit(self, what: str, other: Index, places: Rows) -> DataError:
        """Return an error with the files of the rows at these places."""
        numbers = np.searchsorted(np.array(other.firsts), places[:2], "right") - 1
        files = dict.fromkeys(other.groups[number].file for number in numbers.tolist())
        return DataError(
            f"the data sets do not belong together: {what}",
            where=", ".join(filter(None, files)) or self.other.describe(),
            remedy="give the data set that was predicted (.beside first, then split or filter), or predict this one",
        )


class _ZippedLoader(Loader):
    """Loads row groups of the first data set with the matching rows of the second."""

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
        return self._zipped(columns, load, self._rows(number)[rows], RowReader.gather_skipping_bad)

    def _zipped(
        self, columns: Sequence[str], load: Callable[[Sequence[str]], Arrays], rows: Rows, gather: Gather
    ) -> Arrays:
        """Return rows with the first's columns from `load` and the second's from `gather`."""
        schema = self._index.sides[0].schema
        base_names = [name for name in columns if name in schema]
        arrays = load(base_names) if base_names else {}
        if len(base_names) < len(columns):
            names = tuple(name for name in columns if name not in schema)
            arrays = {**arrays, **self._others.rows_of(rows, names, gather)}
        return {name: arrays[name] for name in columns}

    def fill(self, number: int, rows: range, into: Arrays) -> list[str]:
        """As `Loader.fill`, which the first's loader does for its columns."""
        schema, row_numbers = self._index.sides[0].schema, self._rows(number)[rows.start : rows.stop]
        names = tuple(name for name in into if name not in schema)
        for name, array in self._others.rows_of(row_numbers, names, RowReader.gather).items() if names else ():
            into[name][...] = array
        base_arrays = {name: array for name, array in into.items() if name in schema}
        return self._base.fill(number, rows, base_arrays) if base_arrays else []

    def _rows(self, number: int) -> Rows:
        group = self._index.groups[number]
        return np.arange(group.first, group.first + group.rows, dtype=np.int64)


class _SecondRows:
    """Rows of the second data set by row numbers of the first. Safe to use from several threads."""

    def __init__(self, source: _ZippedSource, index: _ZippedIndex) -> None:
        self._source, self._index = source, index
        self._readers: dict[tuple[str, ...], RowReader] = {}
        self.seed, self.epoch = 0, 0

    @property
    def varying(self) -> bool:
        return any(reader.varying for reader in self._readers.values())

    def rows_of(self, rows: Rows, names: tuple[str, ...], gather: Gather) -> Arrays:
        prefix, places = self._source.prefix, rows if self._index.places is None else self._index.places[rows]
        arrays = gather(self._reader(tuple(name.removeprefix(prefix) for name in names)), places, self.epoch)
        return {prefix + name: array for name, array in arrays.items()}

    def _reader(self, names: tuple[str, ...]) -> RowReader:
        if names not in self._readers:
            other = self._index.sides[1]
            loader = self._source.other.open(other)
            reader = RowReader(loader, other, names, memory_bytes=MEMORY_BYTES // _MEMORY_SHARE, seed=self.seed)
            self._readers.setdefault(names, reader)
        return self._readers[names]


@dataclass(frozen=True, kw_only=True)
class _SideTransform:
    """A transform of the first or the second data set, which does not change the other's columns."""

    function: Callable[..., Any]
    prefix: str
    second: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", function_name(self.function))  # its name in errors

    def __call__(self, columns: Mapping[str, Any], *rng: Any) -> Any:
        """Return the columns, or the row, of both data sets, with one side transformed."""
        prefix = self.prefix if self.second else ""
        inputs = {name: value for name, value in columns.items() if name.startswith(self.prefix) == self.second}
        result = self.function({name.removeprefix(prefix): value for name, value in inputs.items()}, *rng)
        if not isinstance(result, Mapping):
            return result  # the caller raises an error with the function's name
        outputs = {prefix + name: value for name, value in result.items()}
        return {**{name: value for name, value in columns.items() if name not in inputs}, **outputs}


@dataclass(frozen=True, kw_only=True)
class _MergeColumns:
    """The last transform of zipped data sets: it removes the prefix of the second's columns."""

    prefix: str
    where: str

    def __call__(self, columns: Arrays) -> Arrays:
        """Return the columns of both, without `sample`. Raises DataError for a name that both have."""
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
    source = replace(source, prefix=f"beside-{len(first.transforms)}/")  # unique if `beside` is called again
    merge = _MergeColumns(prefix=source.prefix, where=source.describe())
    return source, (*_side_transforms(first, second, source.prefix), BatchMap(function=merge))


def _side_transforms(first: Dataset, second: Dataset, prefix: str) -> Iterator[Transform]:
    for side, dataset in enumerate((first, second)):
        for step in dataset.transforms:
            function = _SideTransform(function=step.function, prefix=prefix, second=side == 1)
            yield RowMap(function=function) if isinstance(step, RowMap) else replace(step, function=function)


def _check_names(first: Mapping[str, Field | npt.NDArray[Any]], second: Mapping[str, Any], where: str) -> None:
    for name in second:
        if name in first:
            raise DataError(
                f"both data sets have a column {name!r}",
                where=where,
                remedy="rename it in one of them with .map_batches, or leave it out of what is kept",
            )
