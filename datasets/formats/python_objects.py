"""Python objects as data sources: map-style torch and Hugging Face data sets. Duck-typed; no framework is imported.

An object is pickled with the job, and every worker asks its own copy for rows by number. Row groups are ranges of rows
that are asked for together.

The global generators are seeded by (seed, epoch, row) before each row, so that a row has the same values in every
process and after a restart, and others in the next epoch. They are locked meanwhile and restored afterwards, because a
step in another thread draws from them too. So rows that draw are not computed while a step runs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainwright.core import random_state
from trainwright.core.data import fold_seed
from trainwright.core.errors import DataError, user_code
from trainwright.datasets.data_source import (
    Arrays,
    Field,
    Index,
    Loader,
    Rows,
    Source,
    even_groups,
    hash_parts,
    object_array,
    require_no_nulls,
    select_columns,
    to_array,
)

_Values = Mapping[str, Sequence[Any] | npt.NDArray[Any]]

_SAMPLE_ROWS = 8
_GROUP_BYTES, _GROUP_ROWS, _GROUPS = 1 << 20, 4096, 120
_OBJECT = Field(np.dtype(object), ())


@dataclass(frozen=True, kw_only=True, eq=False)
class ObjectSource(Source):
    """Rows of an object by number.

    Args:
        access: to the object.
        name: of its type.
        call: the function that made the source.
        replayable, ragged: see `from_torch`.
        ordered: whether rows keep their order.
        plan_note: see `Source`.
    """

    access: SampleAccess | ArrowAccess
    name: str
    call: str
    replayable: bool = True
    ragged: tuple[str, ...] = ()
    ordered: bool = False
    plan_note: str = ""

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"{self.call}({self.name})"

    def index(self) -> Index:
        """Read a few rows twice. Raises DataError if there are none, or if the values differ."""
        rows = len(self.access)
        if not rows:
            raise DataError("the data set has no rows", where=self.describe(), remedy="give one with at least one row")
        picks = sorted({rows * part // _SAMPLE_ROWS for part in range(_SAMPLE_ROWS)} | {rows - 1})
        samples, again = ([self.access.fetch(range(row, row + 1), _RowRandomness()) for row in picks] for _ in range(2))
        if self.replayable and hash_values(samples) != hash_values(again):
            raise DataError(
                "the data set gives other values each time it is asked for the same row",
                where=self.describe(),
                remedy="draw random numbers from the global generators of torch, NumPy or Python, which are seeded for "
                "each row, or in .map(f), where f(row, rng) draws from rng; with replayable=False a recovered run "
                "repeats the rows and not their values",
            )
        fields = {name: field_of_rows(name, samples, self.describe(), self.ragged) for name in samples[0]}
        row_bytes = max(sum(_size(values[0]) for row in samples for values in row.values()) // len(samples), 1)
        content = hash_values(samples) if self.replayable else ""
        schema = sorted((name, field.dtype.str, field.shape) for name, field in fields.items())
        return Index(
            rows=rows,
            groups=even_groups(self.name, rows, group_rows(rows, row_bytes)),
            schema=fields,
            row_bytes=row_bytes,
            hash=hash_parts([self.name, rows, *schema, content]),
            in_order=self.ordered,
        )

    def open(self, index: Index) -> _ObjectLoader:
        """A loader for one process."""
        return _ObjectLoader(self.access, index, drawn=not self.replayable)


class _ObjectLoader(Loader):
    """Loads row groups. `drawn`: rows differ between epochs."""

    def __init__(self, access: SampleAccess | ArrowAccess, index: Index, drawn: bool = False) -> None:
        self._access, self._index = access, index
        self._randomness = _RowRandomness()
        self._randomness.drawn = drawn

    @property
    def varying(self) -> bool:
        return self._randomness.drawn

    def begin(self, seed: int, epoch: int) -> None:
        self._randomness.seed, self._randomness.epoch = seed, epoch

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        group = self._index.groups[number]
        return self._read(number, columns, range(group.first, group.first + group.rows))

    def load_rows(self, number: int, columns: Sequence[str], rows: Rows) -> Arrays:
        return self._read(number, columns, (rows + self._index.groups[number].first).tolist())

    def _read(self, number: int, columns: Sequence[str], rows: Sequence[int]) -> Arrays:
        group = self._index.groups[number]
        where = f"{group.file}, row group {number}"
        if len(self._access) != self._index.rows:
            raise DataError(
                f"the data set has {len(self._access)} rows and had {self._index.rows} when the run began",
                where=group.file,
                remedy="give the job a data set that does not change",
            )
        values = self._access.fetch(rows, self._randomness)
        select_columns(values, columns, where)
        return {name: to_column(name, values[name], self._index.schema[name], group.file, rows) for name in columns}


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleAccess:
    """Fetches `dataset[row]`, or `dataset.__getitems__(rows)` where there is one; `columns` as in `from_torch`."""

    dataset: Any
    columns: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, rows: Sequence[int], randomness: _RowRandomness) -> _Values:
        """Lists of values. Raises UserCodeError where the object raises, DataError where rows are named differently."""
        samples = randomness.fetch(rows, self._sample, self._samples if self._many is not None else None)
        named = [sample_arrays(sample, self.columns, f"row {row}") for row, sample in zip(rows, samples, strict=True)]
        require_same_names(named, f"rows {rows[0]} to {rows[-1]} of {type(self.dataset).__name__}")
        return {name: [sample[name] for sample in named] for name in named[0]}

    @property
    def _many(self) -> Any:
        return getattr(self.dataset, "__getitems__", None)

    def _sample(self, row: int) -> Any:
        if self._many is not None:
            return self._samples([row])[0]
        with self._user_code(f"row {row}"):
            return self.dataset[row]

    def _samples(self, rows: Sequence[int]) -> list[Any]:
        where = f"rows {rows[0]} to {rows[-1]}"
        with self._user_code(where):
            samples = list(self._many(list(rows)))
        if len(samples) != len(rows):
            raise DataError(
                f"__getitems__ gave {len(samples)} samples for {len(rows)} rows",
                where=where,
                remedy="return one for each",
            )
        return samples

    def _user_code(self, where: str) -> AbstractContextManager[None]:
        kind = type(self.dataset).__name__
        return user_code(f"the data set {kind}", f"correct {kind}, or the row that it was asked for", where)


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrowAccess:
    """`dataset[start:stop]` as an Arrow table."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, rows: Sequence[int], randomness: _RowRandomness) -> _Values:
        """Arrays; nothing of them is random. Raises DataError for nulls and for what Arrow cannot read."""
        where = f"rows {rows[0]} to {rows[-1]}"
        try:
            table = self.dataset[rows.start : rows.stop] if isinstance(rows, range) else self.dataset[rows]
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"the data set cannot be read: {error}", where=where, remedy="load it again on every node"
            ) from error
        return {name: arrow_array(table.column(name), f"{where}, column {name!r}") for name in table.column_names}


def arrow_array(column: pa.ChunkedArray, where: str) -> npt.NDArray[Any]:
    """An Arrow column as an array, the tensor types of Hugging Face and Ray included; DataError for nulls."""
    kind = column.type
    if not isinstance(kind, pa.BaseExtensionType) or isinstance(kind, pa.FixedShapeTensorType):
        return to_array(column, where)
    flat = column.combine_chunks()
    require_no_nulls(flat, where)
    return np.asarray(flat.to_numpy(zero_copy_only=False))


def group_rows(rows: int, row_bytes: int) -> int:
    """Return the rows of a row group: about 1 MiB, and few enough that many workers get some."""
    return max(min(_GROUP_BYTES // max(row_bytes, 1), _GROUP_ROWS, max(rows // _GROUPS, 16)), 1)


def sample_arrays(sample: Any, columns: Sequence[str] | None, where: str) -> dict[str, Any]:
    """Return the values of a sample by column name, as arrays. Raises DataError."""
    named = named_values(sample, columns, where)
    return {name: to_array_of(value, f"{where}, column {name!r}") for name, value in named.items()}


def named_values(sample: Any, columns: Sequence[str] | None, where: str) -> Mapping[str, Any]:
    """Return a sample as values by column name. Raises DataError for another number of names."""
    if isinstance(sample, Mapping):
        values_by_name = {str(key): value for key, value in sample.items()}
        return {name: values_by_name[name] for name in select_columns(values_by_name, columns, where)}
    several = isinstance(sample, tuple) or (isinstance(sample, list) and columns is not None and len(columns) > 1)
    values = tuple(sample) if several else (sample,)
    names = columns or getattr(sample, "_fields", None) or tuple(map(str, range(len(values))))
    if len(names) != len(values):
        raise DataError(
            f"a sample has {len(values)} values and columns= names {len(names)}: {', '.join(names)}",
            where=where,
            remedy="name each value of a sample",
        )
    return dict(zip(names, values, strict=True))


def field_of_rows(name: str, samples: Sequence[_Values], where: str, ragged: Sequence[str]) -> Field:
    """Return the common dtype and shape of sampled rows; objects if only the lengths differ, or may differ.

    Raises DataError.
    """
    select_columns(samples[0], ragged, f"{where}, ragged=")
    where = f"{where}, column {name!r}"
    require_same_names(samples, where)
    fields = {_field_of(sample[name]) for sample in samples}
    if len(fields) > 1 and len({(field.dtype, len(field.shape)) for field in fields}) > 1:
        raise DataError(
            f"the column is {' and '.join(sorted(map(str, fields)))} in different rows",
            where=where,
            remedy="give every row the same type and the same number of dimensions",
        )
    return fields.pop() if len(fields) == 1 and name not in ragged else _OBJECT


def to_array_of(value: Any, where: str) -> Any:
    """Return a tensor of any framework, an image or a number as an array; text, bytes and dicts unchanged."""
    if value is None:
        raise DataError("the value is None", where=where, remedy="drop or fill it before training")
    if isinstance(value, str | bytes | Mapping):
        return value
    try:
        for step in ("detach", "cpu", "numpy"):
            if callable(getattr(value, step, None)):
                value = getattr(value, step)()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"a {type(value).__name__} cannot become an array: {error}",
            where=where,
            remedy="return numpy arrays, or tensors of a type that numpy has",
        ) from error
    return value if array.dtype.kind in "OUS" else array


def _field_of(values: Sequence[Any] | npt.NDArray[Any]) -> Field:
    """Return the field of a column by its first row."""
    first = values if isinstance(values, np.ndarray) else np.asarray(values[0])[None]
    return _OBJECT if first.dtype.kind in "OUS" else Field(first.dtype, first.shape[1:])


def to_column(
    name: str, values: Sequence[Any] | npt.NDArray[Any], field: Field, where: str, rows: Iterable[int]
) -> npt.NDArray[Any]:
    """Return the values of rows as an array. Raises DataError, naming the row, if one has another type or shape."""
    if field == _OBJECT:
        return object_array(values)
    if isinstance(values, np.ndarray) and values.dtype == field.dtype and values.shape[1:] == field.shape:
        return values
    for row, value in zip(rows, values, strict=False):
        if _field_of([value]) != field:
            raise DataError(
                f"the column is {_field_of([value])} here and {field} in the rows looked at first",
                where=f"{where}, row {row}, column {name!r}",
                remedy="give every row the same type and shape: convert, crop, resize or pad; or, if pad= or collate= "
                f"of the job makes lengths equal, from_torch(..., ragged=({name!r},))",
            )
    return np.stack(list(values))


def require_same_names(samples: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise DataError if a sample has other columns than the first."""
    for sample in samples:
        if sample.keys() != samples[0].keys():
            raise DataError(
                f"a sample has the columns {', '.join(sorted(sample))} and another {', '.join(sorted(samples[0]))}",
                where=where,
                remedy="give every row the same columns",
            )


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray | np.generic):
        return int(value.nbytes)
    return len(value) if isinstance(value, str | bytes) else 64


def hash_values(samples: Iterable[_Values]) -> str:
    """SHA-256 over the content of sampled rows."""
    sums = hashlib.sha256()
    for sample in samples:
        for name, values in sorted(sample.items()):
            array = np.asarray(values[0])
            sums.update(f"{name} {Field(array.dtype, array.shape)}\n".encode())
            sums.update(repr(values[0]).encode() if array.dtype.kind in "OUS" else array.tobytes())
    return sums.hexdigest()


def hash_block(block: Arrays) -> str:
    """SHA-256 over all rows of a block."""
    rows = len(next(iter(block.values())))
    return hash_values({name: array[row : row + 1] for name, array in block.items()} for row in range(rows))


# --- Random numbers of rows whose code draws from the global generators, as torch's data sets do ----------------------


LOCKED_S = 0.02  # after which a step can take the generators


class _RowRandomness:
    """Fetches rows, with the global generators seeded for each row. `drawn`: a row has used them."""

    def __init__(self) -> None:
        self.seed = self.epoch = 0
        self.drawn = False

    def fetch(
        self,
        rows: Sequence[int],
        fetch: Callable[[int], Any],
        fetch_all: Callable[[Sequence[int]], list[Any]] | None = None,
    ) -> list[Any]:
        """Return `fetch` of each row, or `fetch_all` of all rows if none draws a random number."""
        values: list[Any] = []
        while len(values) < len(rows):
            with random_state.GENERATORS_LOCK, random_state.preserve_generators():
                values += self._fetch_some(rows[len(values) :], fetch, fetch_all)
        return values

    def _fetch_some(
        self, rows: Sequence[int], fetch: Callable[[int], Any], fetch_all: Callable[[Sequence[int]], list[Any]] | None
    ) -> list[Any]:
        """Compute rows for about LOCKED_S, one at least."""
        deadline_s = time.monotonic() + LOCKED_S
        if not self.drawn:
            random_state.seed_generators(0)
            before = random_state.generator_states()
            values = fetch_all(rows) if fetch_all else _fetch_until(deadline_s, rows, fetch)
            if random_state.generator_states() == before:
                return values
            self.drawn = True
        return _fetch_until(deadline_s, rows, lambda row: self._fetch_seeded(row, fetch))

    def _fetch_seeded(self, row: int, fetch: Callable[[int], Any]) -> Any:
        random_state.seed_generators(fold_seed(self.seed, self.epoch, row))
        return fetch(row)


def _fetch_until(deadline_s: float, rows: Sequence[int], fetch: Callable[[int], Any]) -> list[Any]:
    """Return `fetch` of the rows until a time, of one row at least."""
    values = []
    for row in rows:
        values.append(fetch(row))
        if time.monotonic() > deadline_s:
            break
    return values
