"""Parquet shards of a good size, in a folder that appears whole."""

from __future__ import annotations

import json
import math
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import Arrays
from trainwright.datasets.formats.file_system import absolute_path, resolve_file_system

SHARD_BYTES, _GROUP_BYTES = 128 << 20, 12 << 20
_SUCCESS_FILE = "_SUCCESS"
_WRITING = "_writing-"


@dataclass(frozen=True, kw_only=True)
class WrittenShards:
    """What was written."""

    folder: str  # where
    rows: int  # in all files
    files: int  # of them
    groups: int  # row groups in all files
    size_bytes: int  # of all files


def group_rows(row_bytes: float, group_bytes: int = _GROUP_BYTES) -> int:
    """Return the rows of a row group of about `group_bytes`, from the decoded size of a row."""
    return max(round(group_bytes / max(row_bytes, 1e-9)), 1)


def shard_rows(group: int, stored_row_bytes: float, shard_bytes: int, rows: int | None = None) -> int:
    """Return the rows of a file: whole row groups of about `shard_bytes`; files are equal if `rows` is known.

    Args:
        group: rows of a row group.
        stored_row_bytes: size of a row in a file, measured on the first row group.
        shard_bytes: target size of a file.
        rows: of the whole data set.
    """
    target_rows = shard_bytes / max(stored_row_bytes, 1e-9)
    if rows is not None:
        target_rows = rows / max(round(rows / target_rows), 1)
    groups = round(target_rows / group) if rows is None else math.ceil(target_rows / group)
    return group * max(groups, 1)


def write_shards(
    batches: Iterable[Arrays],
    out: str,
    *,
    rows: int | None = None,
    rows_per_group: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> WrittenShards:
    """Write batches of columns as parquet files with zstd; rows of more dimensions become fixed-shape tensors.

    A local folder is renamed once it is complete. On an object store the files are written under another name and
    moved, `_SUCCESS` last: a listing before that can show some of them.

    Args:
        batches: arrays (rows, *shape) by column name, the same columns each time.
        out: folder or URI, which must be missing or empty.
        rows: of all batches together, if known.
        rows_per_group: by default about 12 MiB of decoded data.
        shard_bytes: size of a file, about.

    Raises:
        DataError: `out` is not empty, there is no row, or a column has no Arrow type.
    """
    require_empty_target(out)
    with _staging_folder(out) as (system, folder):
        tables = _row_groups(batches, rows_per_group)
        written = replace(_write_files(tables, system, folder, rows, shard_bytes), folder=out)
        if not written.rows:
            raise DataError("there is no row to write", where=out, remedy="give a source with rows")
        with system.open_output_stream(f"{folder}/{_SUCCESS_FILE}") as file:
            file.write(json.dumps(asdict(written)).encode())
    return written


def require_empty_target(out: str) -> None:
    """Raise DataError if `out` is a file, or a folder with files."""
    system, root = _place(out)
    target = system.get_file_info(root)
    if target.type == pafs.FileType.NotFound:
        return
    if target.type == pafs.FileType.File:
        raise DataError("a file has this name", where=out, remedy="name a folder that does not exist yet")
    entries = system.get_file_info(pafs.FileSelector(root))
    names = [info.base_name for info in entries if not info.base_name.startswith(_WRITING)]
    if names:
        raise DataError(
            f"the folder is not empty: it holds {names[0]!r}{' and more' if len(names) > 1 else ''}",
            where=out,
            remedy="name a folder that does not exist yet, or delete this one",
        )


def is_complete(out: str) -> bool:
    """Return whether `write_shards` has completed a folder."""
    system, root = _place(out)
    return bool(system.get_file_info(f"{root}/{_SUCCESS_FILE}").type == pafs.FileType.File)


def _row_groups(batches: Iterable[Arrays], group: int | None) -> Iterator[pa.Table]:
    """Split batches into tables of `group` rows, or of about 12 MiB if that is None. The last one is shorter."""
    schema: pa.Schema | None = None
    pending: list[pa.Table] = []
    for batch in batches:
        table = _to_table(batch, schema)
        schema = table.schema
        pending.append(table)
        rows, size_bytes = (sum(getattr(item, name) for item in pending) for name in ("num_rows", "nbytes"))
        if group is None and size_bytes >= _GROUP_BYTES:
            group = group_rows(size_bytes / rows)
        if group is not None and rows >= group:
            joined, stop = pa.concat_tables(pending), rows - rows % group
            yield from (joined.slice(start, group) for start in range(0, stop, group))
            pending = [joined.slice(stop)] if stop < rows else []
    if any(table.num_rows for table in pending):
        yield pa.concat_tables(pending)


def _write_files(
    tables: Iterator[pa.Table], system: pafs.FileSystem, folder: str, total: int | None, shard_bytes: int
) -> WrittenShards:
    """Write each table as a row group; a file ends once it is large enough."""
    rows = files = groups = size_bytes = shard = 0
    for first in tables:
        table: pa.Table | None = first
        in_file = 0
        with system.open_output_stream(f"{folder}/part-{files:05d}.parquet") as sink:
            with pq.ParquetWriter(sink, first.schema, compression="zstd") as writer:
                while table is not None:
                    writer.write_table(table, row_group_size=table.num_rows)
                    groups, in_file = groups + 1, in_file + table.num_rows
                    shard = shard or shard_rows(table.num_rows, sink.tell() / table.num_rows, shard_bytes, total)
                    table = next(tables, None) if in_file < shard else None
            size_bytes += sink.tell()
        rows, files = rows + in_file, files + 1
    return WrittenShards(folder=folder, rows=rows, files=files, groups=groups, size_bytes=size_bytes)


@contextmanager
def _staging_folder(out: str) -> Iterator[tuple[pafs.FileSystem, str]]:
    """Yield a folder to write into, which is renamed to `out` after the block, or deleted after an error."""
    system, root = _place(out)
    if isinstance(system, pafs.LocalFileSystem):
        target = Path(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}{_WRITING}", dir=target.parent) as folder:
            staging = Path(folder) / target.name
            staging.mkdir()
            yield system, str(staging)
            try:
                staging.rename(target)
            except OSError as error:
                raise DataError(
                    f"the finished folder cannot take its name: {error}",
                    where=str(target),
                    remedy="name a folder that nothing else writes into",
                ) from error
        return
    folder = f"{root}/{_WRITING}{uuid.uuid4().hex[:8]}"
    system.create_dir(folder, recursive=True)
    try:
        yield system, folder
        names = [info.base_name for info in system.get_file_info(pafs.FileSelector(folder))]
        for name in sorted(names, key=lambda name: (name == _SUCCESS_FILE, name)):
            system.move(f"{folder}/{name}", f"{root}/{name}")
    finally:
        system.delete_dir(folder)


def _place(out: str) -> tuple[pafs.FileSystem, str]:
    system, root = resolve_file_system(absolute_path(out))
    return system, root.rstrip("/")


def _to_table(columns: Arrays, schema: pa.Schema | None = None) -> pa.Table:
    """Return columns as an Arrow table, with the types of `schema` unless it is None. Raises DataError."""
    if schema is not None and set(columns) != set(schema.names):
        raise DataError(
            f"the columns are {', '.join(sorted(columns))} here and {', '.join(sorted(schema.names))} before",
            remedy="give every row the same columns",
        )
    names = list(columns) if schema is None else schema.names
    kinds = {name: None if schema is None else schema.field(name).type for name in names}
    return pa.table({name: _to_arrow(columns[name], kinds[name], name) for name in names})


def _to_arrow(array: npt.NDArray[Any], kind: pa.DataType | None, name: str) -> pa.Array:
    try:
        objects = array.dtype == np.dtype(object) and array.ndim == 1
        rows = list(array) if objects else []
        new = next(_new_keys(pa.infer_type(rows), kind), "") if kind is not None and "struct<" in str(kind) else ""
        column = pa.array(rows, type=kind) if objects else tensor_column(array)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"the column has no type in parquet: {error}",
            where=f"column {name!r}",
            remedy="make it numbers, text, bytes or lists of one type; give images one size, or keep them encoded",
        ) from error
    if new:  # Arrow leaves out the values of keys that the type does not have
        raise DataError(
            f"a row has the key {new!r}, which the rows before do not have",
            where=f"column {name!r}",
            remedy="give all rows the same keys in a .map, with None where there is no value",
        )
    if pa.types.is_null(column.type) or (kind is not None and column.type != kind):
        raise DataError(
            f"the column is {column.type} here" + (f" and {kind} before" if kind is not None else ""),
            where=f"column {name!r}",
            remedy="give every row a value of the same type and shape",
        )
    return column


def _new_keys(kind: pa.DataType, expected: pa.DataType, within: str = "") -> Iterator[str]:
    """Yield the keys of nested objects that the expected type does not have, such as `user.name`."""
    if pa.types.is_list(kind) and pa.types.is_list(expected):
        yield from _new_keys(kind.value_type, expected.value_type, within)
    elif pa.types.is_struct(kind) and pa.types.is_struct(expected):
        names = {field.name for field in expected}
        for field in kind:
            key = f"{within}.{field.name}" if within else field.name
            if field.name in names:
                yield from _new_keys(field.type, expected.field(field.name).type, key)
            else:
                yield key


def tensor_column(array: npt.NDArray[Any]) -> pa.Array:
    """Return numbers (rows,) as an Arrow array, and (rows, *shape) as fixed-shape tensors."""
    shape = array.shape[1:]
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if not shape:
        return flat
    storage = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape)))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, shape), storage)
