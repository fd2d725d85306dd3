"""Tables in memory as a source: arrays by name, a pandas DataFrame or an Arrow table."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainwright.core.errors import DataError
from trainwright.datasets.formats.arrow_columns import Arrays, Field, to_array
from trainwright.datasets.index import Group, Index, digest


@dataclass(frozen=True, kw_only=True, eq=False)
class TableSource:
    """Arrays in memory, of one length; they travel with the job. Made by `arrays_of`."""

    arrays: Arrays

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"table({', '.join(self.arrays)})"

    def index(self) -> Index:
        """Count the rows and sum the bytes."""
        rows = len(next(iter(self.arrays.values())))
        fields = {name: Field(array.dtype, array.shape[1:]) for name, array in self.arrays.items()}
        return Index(
            rows=rows,
            groups=(Group(file="", number=0, rows=rows, first=0),),
            schema=fields,
            row_bytes=sum(field.row_bytes for field in fields.values()),
            hash=digest((name, self.arrays[name].dtype.str, _sum(self.arrays[name])) for name in sorted(self.arrays)),
        )

    def open(self, index: Index) -> TableLoader:
        """A loader for one process."""
        return TableLoader(self.arrays)


class TableLoader:
    """Gives the arrays themselves."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """All rows of the columns; there is one group only."""
        return {name: self._arrays[name] for name in columns}


def arrays_of(data: Any) -> Arrays:
    """Arrays of one length from a mapping, a pandas DataFrame or an Arrow table; DataError for anything else."""
    if isinstance(data, pa.Table):
        arrays = {name: to_array(data.column(name), f"column {name!r}") for name in distinct(data.column_names)}
    elif isinstance(data, Mapping):
        pairs = zip(distinct(data), data.values(), strict=True)
        arrays = {name: _array(value, f"column {name!r}") for name, value in pairs}
    elif hasattr(data, "columns") and hasattr(data, "to_numpy"):
        pairs = zip(distinct(data.columns), data.columns, strict=True)
        arrays = {name: _series(data[key], f"column {name!r}") for name, key in pairs}
    else:
        raise DataError(
            f"a {type(data).__name__} is no table",
            remedy="give a dict of arrays, a pandas DataFrame or a pyarrow.Table",
        )
    lengths = {name: len(array) for name, array in arrays.items()}
    if not lengths or not max(lengths.values()):
        raise DataError("the table has no rows", remedy="give at least one column with at least one row")
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name!r} {count}" for name, count in lengths.items())
        raise DataError(f"the columns differ in length: {counts}", remedy="give every column the same number of rows")
    return arrays


def distinct(names: Iterable[Any], where: str = "") -> list[str]:
    """Names of columns as text; raises DataError, naming `where`, for one that comes twice."""
    texts = [str(name) for name in names]
    for name, count in Counter(texts).items():
        if count > 1:
            raise DataError(f"column {name!r} comes twice", where=where, remedy="give every column its own name")
    return texts


def _array(value: Any, where: str) -> npt.NDArray[Any]:
    array = _converted(value, where)
    if not array.ndim:
        raise DataError("the column is a single value", where=where, remedy="give one value for each row")
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.dtype == object and any(value is None for value in array.flat):
        raise DataError("some values are None", where=where, remedy="drop or fill them before training")
    return array


def _converted(value: Any, where: str) -> npt.NDArray[Any]:
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise DataError("masked values have no meaning", where=where, remedy="fill or drop them before training")
    try:
        return np.asarray(value)
    except ValueError as error:
        ragged = _ragged(value)
        if ragged is not None:
            return ragged
        raise DataError(f"the values make no array: {error}", where=where, remedy="give every row one shape") from error
    except (RuntimeError, TypeError) as error:  # of tensors that track gradients, are bfloat16 or lie on a device
        raise DataError(
            f"the values make no array: {error}",
            where=where,
            remedy="give a tensor that numpy can hold: .detach(), .cpu(), and .float() for bfloat16",
        ) from error


def _ragged(value: Any) -> npt.NDArray[Any] | None:
    """Rows that differ in length as an array of arrays, which `pad=` or `collate=` of a job brings to one shape."""
    try:
        rows = [np.asarray(row) for row in value]
    except ValueError:
        return None
    array = np.empty(len(rows), dtype=object)
    for place, row in enumerate(rows):
        array[place] = row
    return array


def _series(series: Any, where: str) -> npt.NDArray[Any]:
    """A pandas column. NaN in a float column is a number like any other; elsewhere a missing value is refused."""
    floats = isinstance(series.dtype, np.dtype) and series.dtype.kind == "f"
    missing = 0 if floats else int(series.isna().sum())
    if missing:
        raise DataError(f"{missing} of {len(series)} values are missing", where=where, remedy="drop or fill them")
    values = series.to_numpy()
    if values.dtype == object and hasattr(series.dtype, "numpy_dtype"):
        values = values.astype(series.dtype.numpy_dtype)
    return _array(values, where)


def _sum(array: npt.NDArray[Any]) -> str:
    """SHA-256 over shape and content."""
    sums = hashlib.sha256(repr(array.shape).encode())
    if array.dtype != object:
        sums.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)  # such as data[:, 0] is strided
        return sums.hexdigest()
    for item in array.reshape(-1):  # repr shortens long arrays
        sums.update(f"{item.dtype.str}{_sum(item)}".encode() if isinstance(item, np.ndarray) else repr(item).encode())
    return sums.hexdigest()
