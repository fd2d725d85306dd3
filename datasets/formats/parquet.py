"""Parquet files as a source: their index from their footers, and reading one row group."""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from trainwright.core.errors import DataError
from trainwright.datasets.formats.arrow_columns import Arrays, Field, field_of, select, to_array
from trainwright.datasets.formats.file_metadata import metadata_of
from trainwright.datasets.formats.in_memory import distinct
from trainwright.datasets.formats.parquet_pages import PageReader
from trainwright.datasets.formats.paths import absolute, common_folder, find, system_of
from trainwright.datasets.formats.retry import retrying
from trainwright.datasets.formats.scanned_files import Place, table_arrays
from trainwright.datasets.index import Group, Index, digest

__all__ = ["ParquetLoader", "ParquetSource", "absolute"]

_SUFFIXES = (".parquet", ".parq", ".pq")
_OPEN_FILES = 16
_FOOTERS = 64  # read at a time
_FORMAT = pads.ParquetFileFormat()
_LEADING = 0.5  # of a row group: where more of its rows refer to a dictionary, pyarrow reads all of them


class Footer(NamedTuple):
    """What the footer of a file says.

    Attributes:
        schema: as Arrow IPC, in base64; equal for equal schemas.
        rows: of each row group.
        sizes: of each column in all row groups, uncompressed, in bytes; empty where no column becomes an object.
    """

    schema: str
    rows: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, footer: pq.FileMetaData) -> Footer:
        """What pyarrow has read."""
        schema = footer.schema.to_arrow_schema().remove_metadata()
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        sizes: dict[str, int] = {}
        if any((field := _field(kind)) is None or field.dtype == np.dtype(object) for kind in schema.types):
            sizes = dict.fromkeys(schema.names, 0)
            for group in groups:
                for chunk in map(group.column, range(group.num_columns)):
                    top = chunk.path_in_schema.partition(".")[0]
                    if top in sizes:
                        sizes[top] += chunk.total_uncompressed_size
        text = b64encode(schema.serialize()).decode()
        return cls(text, [group.num_rows for group in groups], [sizes[name] for name in schema.names if name in sizes])


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
        """Read the footer of every file that the caches do not know. Raises DataError for anything wrong."""
        system, path = system_of(self.path)
        files = find(system, path, self.path, "parquet", _SUFFIXES)
        footers = metadata_of(
            system, files, reads=("parquet", self.path), read=partial(_footers, system), pack=list, unpack=_unpacked
        )
        schemas = {footer.schema: _schema(footer.schema) for footer in footers}
        schema = schemas[footers[0].schema]
        others = {footer.schema: info.path for info, footer in zip(reversed(files), reversed(footers), strict=True)}
        for other, file in sorted(others.items(), key=lambda item: item[1]):
            _same_schema(schema, schemas[other], files[0].path, file, self.columns)
        groups = _groups(files, footers)
        if not groups:
            raise DataError("the data has no rows", where=self.path, remedy="write some rows, or name another path")
        fields = _fields(schema, self.columns, files[0].path)
        rows = groups[-1].first + groups[-1].rows
        return Index(
            rows=rows,
            groups=groups,
            schema=fields,
            row_bytes=_row_bytes(schemas, footers, fields, rows),
            hash=_hash(files, groups, fields),
        )

    def open(self, index: Index) -> ParquetLoader:
        """A loader for one process."""
        return ParquetLoader(system_of(self.path)[0], index)


class ParquetLoader:
    """Reads row groups; keeps a few files open. For one thread at a time."""

    def __init__(self, system: pafs.FileSystem, index: Index) -> None:
        self._system, self._index = system, index
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self._pages = PageReader(system)
        self._firsts: dict[str, int] = {}
        for group in index.groups:
            self._firsts.setdefault(group.file, group.first)

    def twin(self) -> ParquetLoader:
        """A loader of the same for another thread."""
        return ParquetLoader(self._system, self._index)

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Columns of row group `number` of the index; raises DataError that names file, row group, row and column."""
        group = self._index.groups[number]
        place = Place(file=group.file, group=group.number, row=group.first - self._firsts[group.file])
        where = place.at()
        try:
            table = retrying(lambda: self._read(group, columns), where)
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
        return table_arrays(table, columns, place)

    def fill(self, number: int, rows: range, into: Arrays) -> list[str]:
        """Take some rows of row group `number`, counted within it, from its pages, most of them without pyarrow.

        Returns the names of the columns that are left to `load`; their arrays are undefined.
        """
        group = self._index.groups[number]
        try:
            return [name for name, array in into.items() if not self._filled(group, name, rows, array)]
        except (OSError, pa.ArrowException):  # `load` tries again, and says what is wrong
            return list(into)

    def _filled(self, group: Group, name: str, rows: range, out: npt.NDArray[Any]) -> bool:
        file = self._file(group.file)
        metadata = file.metadata
        if group.number >= metadata.num_row_groups or metadata.row_group(group.number).num_rows != group.rows:
            return False
        leading = self._pages.fill(group.file, metadata, group.number, name, rows, out)
        if leading > group.rows * _LEADING:
            return False
        if leading > rows.start:
            batch = next(file.iter_batches(leading, row_groups=[group.number], columns=[name], use_threads=False))
            where = f"{group.file}, row group {group.number}, column {name!r}"
            first = to_array(pa.chunked_array([batch.column(0)]), where)[rows.start :]
            out[: len(first)] = first[: len(out)]
        return True

    def _read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        try:
            return self._file(group.file).read_row_group(group.number, columns=list(columns), use_threads=False)
        except OSError:
            self._files.pop(group.file, None)  # another attempt opens it anew
            raise

    def _file(self, path: str) -> pq.ParquetFile:
        if path not in self._files:
            while len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)[1].close(force=True)
            file = pq.ParquetFile(path, filesystem=self._system, memory_map=True)
            _unchanged(file.schema_arrow, self._index.schema, path)
            self._files[path] = file
        self._files.move_to_end(path)
        return self._files[path]


def _unchanged(schema: pa.Schema, fields: Mapping[str, Field], file: str) -> None:
    """Refuse a file whose columns are not what they were when it was indexed: its numbers would be misread."""
    for name, field in fields.items():
        place = schema.get_field_index(name)
        if place < 0 or _field(schema.types[place]) != field:
            raise DataError(
                f"the file changed: column {name!r} is {schema.types[place] if place >= 0 else 'missing'} "
                f"and was {field.dtype} of shape {field.shape} when the run began",
                where=f"{file}, column {name!r}",
                remedy="keep the data as it is while a run reads it",
            )


def _field(kind: pa.DataType) -> Field | None:
    """What a column of this type becomes; None where it cannot become an array."""
    try:
        return field_of(kind)
    except (pa.ArrowException, DataError):
        return None


def _footers(system: pafs.FileSystem, files: list[pafs.FileInfo]) -> list[Footer]:
    """Read the footers of files, many at a time: each waits for the store, not for this machine."""
    pool = ThreadPoolExecutor(min(_FOOTERS, len(files)), thread_name_prefix="trainwright-footer")
    try:
        return list(pool.map(partial(read_footer, system), files))
    finally:
        pool.shutdown(cancel_futures=True)


def read_footer(system: pafs.FileSystem, info: pafs.FileInfo) -> Footer:
    def read() -> pq.FileMetaData:
        """Given the size, pyarrow makes one request of a store instead of two."""
        return _FORMAT.make_fragment(info.path, filesystem=system, file_size=info.size).metadata

    try:
        return Footer.of(retrying(read, info.path))
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"the file is no whole parquet file: {error}",
            where=f"{info.path}, {info.size} bytes",
            remedy="write it anew, or leave it out",
        ) from error


def _unpacked(stored: Any) -> Footer:
    schema, rows, sizes = stored
    _schema(schema)
    return Footer(schema, [int(count) for count in rows], [int(size) for size in sizes])


@lru_cache(maxsize=64)
def _schema(stored: str) -> pa.Schema:
    """A schema from its text."""
    return pa.ipc.read_schema(pa.py_buffer(b64decode(stored, validate=True)))


def _same_schema(schema: pa.Schema, other: pa.Schema, first: str, file: str, columns: tuple[str, ...] | None) -> None:
    """Refuse files whose columns differ from those of the first file, or come twice, where they are read."""
    distinct((name for name in other.names if columns is None or name in columns), file)
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


def _groups(files: list[pafs.FileInfo], footers: list[Footer]) -> tuple[Group, ...]:
    groups: list[Group] = []
    first = 0
    for info, footer in zip(files, footers, strict=True):
        for number, rows in enumerate(footer.rows):
            if rows:
                groups.append(Group(file=info.path, number=number, rows=rows, first=first))
            first += rows
    return tuple(groups)


def _row_bytes(schemas: Mapping[str, pa.Schema], footers: list[Footer], fields: dict[str, Field], rows: int) -> int:
    """Decoded size of a row; objects are charged with their size in the files."""
    known = sum(field.row_bytes for field in fields.values())
    if not any(field.dtype == np.dtype(object) for field in fields.values()):
        return known
    read = {stored: [name in fields for name in schema.names] for stored, schema in schemas.items()}
    stored = sum(sum(compress(footer.sizes, read[footer.schema])) for footer in footers)
    return max(known, stored // rows)


def _hash(files: list[pafs.FileInfo], groups: tuple[Group, ...], fields: dict[str, Field]) -> str:
    """The same wherever the files lie: names within the common folder, sizes, row groups and columns."""
    folder = common_folder([info.path for info in files])
    return digest(
        [
            *((os.path.relpath(info.path, folder or "."), info.size) for info in files),
            *((group.number, group.rows) for group in groups),
            *((name, field.dtype.str, field.shape) for name, field in sorted(fields.items())),
        ]
    )
