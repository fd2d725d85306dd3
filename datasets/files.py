"""Parquet files as a source: finding them, their index, and reading one row group."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from trainwright.core.errors import DataError
from trainwright.datasets.columns import Arrays, Field, field_of, select, to_array
from trainwright.datasets.index import Group, Index, digest

_SUFFIXES = (".parquet", ".parq", ".pq")
_OPEN_FILES = 16


@dataclass(frozen=True, kw_only=True)
class ParquetSource:
    """Parquet files.

    Attributes:
        path: a file, a folder (searched recursively) or a glob (`*`, `?`, `**`); absolute, or a URI of pyarrow.fs.
        columns: read only these; None reads all.
    """

    path: str
    columns: tuple[str, ...] | None = None

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"parquet({self.path!r})"

    def index(self) -> Index:
        """Read the footer of every file."""
        system, path = _system(self.path)
        files = _find(system, path, self.path)
        footers = [_footer(system, info) for info in files]
        schema = footers[0].schema.to_arrow_schema()
        for info, footer in zip(files, footers, strict=True):
            _same_schema(schema, footer.schema.to_arrow_schema(), files[0].path, info.path, self.columns)
        groups = _groups(files, footers)
        if not groups:
            raise DataError("the data has no rows", where=self.path, remedy="write some rows, or name another path")
        fields = _fields(schema, self.columns, files[0].path)
        rows = groups[-1].first + groups[-1].rows
        return Index(
            rows=rows,
            groups=groups,
            schema=fields,
            row_bytes=_row_bytes(footers, fields, rows),
            hash=_hash(files, groups, fields),
        )

    def open(self, index: Index) -> ParquetLoader:
        """A loader for one process."""
        return ParquetLoader(_system(self.path)[0], index)


class ParquetLoader:
    """Reads row groups; keeps a few files open. For one thread at a time."""

    def __init__(self, system: pafs.FileSystem, index: Index) -> None:
        self._system, self._index = system, index
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Columns of row group `number` of the index; raises DataError that names file, row group and column."""
        group = self._index.groups[number]
        where = f"{group.file}, row group {group.number}"
        try:
            table = self._file(group.file).read_row_group(group.number, columns=list(columns), use_threads=False)
        except (OSError, pa.ArrowException, IndexError) as error:
            raise DataError(
                f"a row group cannot be read: {error}", where=where, remedy="write the file anew, or leave it out"
            ) from error
        if table.num_rows != group.rows:
            raise DataError(
                f"the file changed: the row group has {table.num_rows} rows and had {group.rows} when the run began",
                where=where,
                remedy="keep the data as it is while a run reads it",
            )
        select(dict.fromkeys(table.column_names), columns, where)
        return {name: to_array(table.column(name), f"{where}, column {name!r}") for name in columns}

    def _file(self, path: str) -> pq.ParquetFile:
        if path not in self._files:
            while len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)[1].close(force=True)
            self._files[path] = pq.ParquetFile(path, filesystem=self._system, memory_map=True)
        self._files.move_to_end(path)
        return self._files[path]


def absolute(path: str | os.PathLike[str]) -> str:
    """A local path made absolute, so that it means the same in a worker; a URI as it is."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _system(path: str) -> tuple[pafs.FileSystem, str]:
    if "://" not in path:
        return pafs.LocalFileSystem(), path
    base = re.split(r"[*?\[]", path, maxsplit=1)[0]
    try:
        system, root = pafs.FileSystem.from_uri(base)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"the address is not understood: {error}", where=path, remedy="use s3, gs or abfs") from error
    pattern = path[len(base) :]
    return system, f"{root}/{pattern}" if pattern and base.endswith("/") and not root.endswith("/") else root + pattern


def _find(system: pafs.FileSystem, path: str, shown: str) -> list[pafs.FileInfo]:
    """The files, sorted by path."""
    base = re.split(r"[*?\[]", path, maxsplit=1)[0]
    pattern = path if base != path else None
    base = base.rpartition("/")[0] or "/" if pattern else base
    try:
        found = system.get_file_info(base)
        if found.type == pafs.FileType.Directory:
            listed = system.get_file_info(pafs.FileSelector(base, recursive=True))
        else:
            listed = [found] if found.type == pafs.FileType.File else []
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the data cannot be listed: {error}", where=shown, remedy="check path and rights") from error
    if found.type == pafs.FileType.NotFound:
        raise DataError("there is nothing at this path", where=shown, remedy="check the path, or fetch the data first")
    if found.type == pafs.FileType.File and not pattern:
        return [found]
    chosen = [info for info in listed if info.type == pafs.FileType.File and _wanted(info.path, base, pattern)]
    if not chosen:
        raise DataError(
            f"no parquet file is here, among {len(listed)} entries" if listed else "the folder is empty",
            where=shown,
            remedy=f"name a folder or glob with files that end in {', '.join(_SUFFIXES)}",
        )
    return sorted(chosen, key=lambda info: str(info.path))


def _wanted(path: str, base: str, pattern: str | None) -> bool:
    if pattern is not None:
        return _glob(pattern).fullmatch(path) is not None
    parts = PurePosixPath(path[len(base) :].lstrip("/")).parts
    return path.endswith(_SUFFIXES) and not any(part.startswith(("_", ".")) for part in parts)


def _glob(pattern: str) -> re.Pattern[str]:
    """`**/` any folders, `*` and `?` within one name, `[...]` one of some characters."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return re.compile("".join(words.get(part, part if part.startswith("[") else re.escape(part)) for part in parts))


def _footer(system: pafs.FileSystem, info: pafs.FileInfo) -> pq.FileMetaData:
    try:
        with system.open_input_file(info.path) as file:
            return pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"the file is no whole parquet file: {error}",
            where=f"{info.path}, {info.size} bytes",
            remedy="write it anew, or leave it out",
        ) from error


def _same_schema(schema: pa.Schema, other: pa.Schema, first: str, file: str, columns: tuple[str, ...] | None) -> None:
    """Refuse files whose columns differ from those of the first file, where they are read."""
    expected = {name: str(schema.field(name).type) for name in columns or schema.names if name in schema.names}
    found = {name: str(other.field(name).type) for name in other.names if columns is None or name in columns}
    for name in sorted({**expected, **found}, key=lambda name: name in expected and name in found):
        if expected.get(name) != found.get(name):
            raise DataError(
                f"column {name!r} is {found.get(name, 'missing')} here and {expected.get(name, 'missing')} in {first}",
                where=f"{file}, column {name!r}",
                remedy="write all files with one schema, or read other columns with columns=",
            )


def _fields(schema: pa.Schema, columns: tuple[str, ...] | None, file: str) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for name in select(dict.fromkeys(schema.names), columns, file):
        try:
            fields[name] = field_of(schema.field(name).type)
        except (pa.ArrowException, DataError) as error:
            raise DataError(
                f"the type {schema.field(name).type} cannot become an array: {error}",
                where=f"{file}, column {name!r}",
                remedy="write it as another type, or read other columns with columns=",
            ) from error
    return fields


def _groups(files: list[pafs.FileInfo], footers: list[pq.FileMetaData]) -> tuple[Group, ...]:
    groups: list[Group] = []
    first = 0
    for info, footer in zip(files, footers, strict=True):
        for number in range(footer.num_row_groups):
            rows = footer.row_group(number).num_rows
            if rows:
                groups.append(Group(file=info.path, number=number, rows=rows, first=first))
            first += rows
    return tuple(groups)


def _row_bytes(footers: list[pq.FileMetaData], fields: dict[str, Field], rows: int) -> int:
    """Decoded size of a row; objects are charged with their size in the files."""
    known = sum(field.row_bytes for field in fields.values())
    if not any(field.dtype == np.dtype(object) for field in fields.values()):
        return known
    stored = 0
    for footer in footers:
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            chunks: Any = (group.column(column) for column in range(group.num_columns))
            stored += sum(chunk.total_uncompressed_size for chunk in chunks if _top(chunk.path_in_schema) in fields)
    return max(known, stored // rows)


def _top(path: str) -> str:
    return path.partition(".")[0]


def _hash(files: list[pafs.FileInfo], groups: tuple[Group, ...], fields: dict[str, Field]) -> str:
    """The same wherever the files lie: names within the common folder, sizes, row groups and columns."""
    folder = os.path.commonpath([os.path.dirname(info.path) for info in files]) if files else ""
    return digest(
        [
            *((os.path.relpath(info.path, folder or "."), info.size) for info in files),
            *((group.number, group.rows) for group in groups),
            *((name, field.dtype.str, field.shape) for name, field in sorted(fields.items())),
        ]
    )
