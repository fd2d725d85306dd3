"""Columns: from Arrow to numpy arrays whose first dimension is rows, and what a column of a data set looks like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainwright.core.errors import DataError, nearest

Arrays = dict[str, npt.NDArray[Any]]
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


class Field(NamedTuple):
    """A column as arrays show it: element type, and shape of one row (() for a scalar)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Size of one row; of an object, its reference only."""
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=np.int64))


def field_of(kind: pa.DataType) -> Field:
    """What a column of this Arrow type becomes."""
    value, shape = _tensor(kind)
    if pa.types.is_dictionary(value):
        value = value.value_type
    return Field(pa.array([], value).to_numpy(zero_copy_only=False).dtype, shape)


def to_array(column: pa.ChunkedArray, where: str) -> npt.NDArray[Any]:
    """An Arrow column as an array (rows, *shape), without a copy where the memory allows.

    Fixed-shape tensors and fixed-size lists become dimensions; text, bytes, lists and structs become objects.
    Raises DataError, naming `where`, for nulls, those within lists and dictionaries included.
    """
    flat: pa.Array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # this copies even one
    rows, (_, shape) = len(flat), _tensor(flat.type)
    if isinstance(flat, pa.ExtensionArray):
        flat = flat.storage
    _no_nulls(flat, where)
    while pa.types.is_fixed_size_list(flat.type):
        flat = flat.flatten()
    if pa.types.is_dictionary(flat.type):
        flat = flat.dictionary_decode()
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(rows, *shape)


def stack(values: list[Any], what: str) -> npt.NDArray[Any]:
    """One value a row as one array (rows, *shape). Raises DataError, naming `what`, where shapes or types differ."""
    try:
        arrays = [np.asarray(value) for value in values]
    except (ValueError, TypeError) as error:
        raise DataError(f"{what} makes no array: {error}", remedy="give every row one shape, or pad it") from error
    first = arrays[0]
    if first.dtype.kind in "OUS":
        column = np.empty(len(values), dtype=object)
        column[:] = values
        return column
    for array in arrays:
        if array.shape != first.shape or array.dtype != first.dtype:
            raise DataError(
                f"{what} is {first.dtype} of shape {first.shape} in one row and {array.dtype} of shape {array.shape} "
                "in another",
                remedy="give every row the same type and shape: convert, crop, resize or pad",
            )
    return np.stack(arrays)


def select(columns: Mapping[str, Any], names: Iterable[str] | None, where: str = "") -> tuple[str, ...]:
    """The names asked for, all of them for None; raises DataError with the nearest name for one that is missing."""
    chosen = tuple(columns) if names is None else tuple(names)
    for name in chosen:
        if name not in columns:
            raise DataError(f"there is no column {name!r}", where=where, remedy=nearest(name, columns))
    return chosen


def _tensor(kind: pa.DataType) -> tuple[pa.DataType, tuple[int, ...]]:
    """Value type and shape of one row."""
    shape: tuple[int, ...] = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation is not None and list(kind.permutation) != sorted(kind.permutation):
            raise DataError(
                f"the tensors of {kind} are not in row-major order", remedy="write them without a permutation"
            )
        return kind.value_type, tuple(kind.shape)
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while pa.types.is_fixed_size_list(kind):
        shape, kind = (*shape, kind.list_size), kind.value_type
    return kind, shape


def _no_nulls(array: pa.Array, where: str) -> None:
    """Refuse nulls at any depth of lists, and those that a dictionary holds."""
    if array.null_count:
        raise DataError(
            f"{array.null_count} of {len(array)} values are null",
            where=where,
            remedy="drop or fill them before training; nulls have no meaning as numbers",
        )
    if any(is_list(array.type) for is_list in _LISTS):
        _no_nulls(array.flatten(), where)
    elif pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        _no_nulls(array.dictionary_decode(), where)
