"""Parquet files as a source: index their footers, and read row groups.

pyarrow decodes the levels of a nested column value by value, which takes several times longer than reading the numbers
of a fixed-size list or a tensor. The pages of a column chunk with plain numbers and no null are arrays already, and any
rows of it can be read without the rows before. pyarrow reads everything else: other encodings, other types, and leading
pages with a dictionary encoding, which writers give up when the dictionary grows.
Formats: parquet.apache.org/docs/file-format/data-pages and Thrift's compact protocol.
"""

from __future__ import annotations

import sys
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import (
    Arrays,
    Field,
    Index,
    Loader,
    RowGroup,
    Rows,
    Source,
    field_of,
    select_columns,
    to_array,
    unique_names,
)
from trainwright.datasets.formats.file_system import changed_error, find_files, resolve_file_system, retry_transient
from trainwright.datasets.formats.scanned_files import (
    GroupLocation,
    RecordRange,
    fields_of,
    file_index,
    number_groups,
    schema_error,
    table_arrays,
)
from trainwright.datasets.metadata_cache import cached_metadata, first_pass

__all__ = ["ParquetLoader", "ParquetSource"]

_SUFFIXES = (".parquet", ".parq", ".pq")
_OPEN_FILES = 16
_FOOTERS = 64  # read at a time
_MAX_DICTIONARY_SHARE = 0.5  # of a row group's rows; if more rows refer to a dictionary, pyarrow reads all rows


class Footer(NamedTuple):
    """The metadata of a file that its index needs, from the footer."""

    schema: str  # as Arrow IPC, in base64; equal for equal schemas
    rows: list[int]  # of each row group
    # of each column in all row groups, uncompressed, in bytes; empty if no column becomes an object
    sizes: list[int]

    @classmethod
    def of(cls, footer: pq.FileMetaData) -> Footer:
        """Return the metadata of a footer that pyarrow has read."""
        schema = footer.schema.to_arrow_schema().remove_metadata()
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        sizes: dict[str, int] = {}
        if any((field := _field_or_none(kind)) is None or field.dtype == np.dtype(object) for kind in schema.types):
            sizes = dict.fromkeys(schema.names, 0)
            for group in groups:
                for chunk in map(group.column, range(group.num_columns)):
                    top = chunk.path_in_schema.partition(".")[0]
                    if top in sizes:
                        sizes[top] += chunk.total_uncompressed_size
        text = b64encode(schema.serialize()).decode()
        return cls(text, [group.num_rows for group in groups], [sizes[name] for name in schema.names if name in sizes])


@dataclass(frozen=True, kw_only=True)
class ParquetSource(Source):
    """Parquet files."""

    path: str  # a file, a folder (searched recursively) or a glob (`*`, `?`, `**`); absolute, or a URI of pyarrow.fs
    columns: tuple[str, ...] | None = None  # read only these; None reads all

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"parquet({self.path!r})"

    def index(self) -> Index:
        """Read the footers that are not cached. Raises DataError for any problem of the files."""
        system, path = resolve_file_system(self.path)
        files = find_files(system, path, self.path, "parquet", _SUFFIXES)
        footers = cached_metadata(
            system, files, reads=("parquet", self.path), read=partial(_footers, system), pack=list, unpack=_unpacked
        )
        schemas = {footer.schema: _schema(footer.schema) for footer in footers}
        schema = schemas[footers[0].schema]
        others = {footer.schema: info.path for info, footer in zip(reversed(files), reversed(footers), strict=True)}
        for encoded, file in sorted(others.items(), key=lambda item: item[1]):
            _require_same_schema(schema, schemas[encoded], files[0].path, file, self.columns)
        groups = number_groups(self.path, files, ([RecordRange(0, 0, rows) for rows in each.rows] for each in footers))
        names = select_columns(dict.fromkeys(schema.names), self.columns, files[0].path)
        fields = fields_of({name: schema.field(name).type for name in names}, field_of, files[0].path)
        is_read = {text: [name in fields for name in each.names] for text, each in schemas.items()}
        return file_index(
            files,
            groups,
            fields,
            stored_bytes=sum(sum(compress(footer.sizes, is_read[footer.schema])) for footer in footers),
            hashed=(
                *((group.number, group.rows) for group in groups),
                *((name, field.dtype.str, field.shape) for name, field in sorted(fields.items())),
            ),
        )

    def open(self, index: Index) -> ParquetLoader:
        """A loader for one process."""
        return ParquetLoader(resolve_file_system(self.path)[0], index)


class ParquetLoader(Loader):
    """Reads row groups; keeps a few files open."""

    def __init__(self, system: pafs.FileSystem, index: Index) -> None:
        self._system, self._index = system, index
        self._files: OrderedDict[str, tuple[pa.NativeFile, pq.ParquetFile]] = OrderedDict()
        self._table: tuple[int, pa.Table | None] = (-1, None)  # a damaged row group, of the columns read so far
        self._firsts: dict[str, int] = {}
        for group in index.groups:
            self._firsts.setdefault(group.file, group.first)

    def twin(self) -> ParquetLoader:
        """Return a loader of the same files for another thread."""
        return ParquetLoader(self._system, self._index)

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Return columns of row group `number`. Raises DataError with file, row group, row and column."""
        arrays = self._arrays(number, columns, None)
        self._table = (-1, None)
        return arrays

    def load_rows(self, number: int, columns: Sequence[str], rows: Rows) -> Arrays:
        """As `load`, of some rows."""
        return self._arrays(number, columns, rows)

    def _arrays(self, number: int, columns: Sequence[str], rows: Rows | None) -> Arrays:
        """Return columns of some rows, or of all. The table of the row group is kept for the search for bad rows.

        `load` gets the columns that `fill` did not read, and `load_rows` all columns: each column is read once.
        """
        loaded_number, table = self._table  # `load` may drop it meanwhile
        if table is None or loaded_number != number:
            self._table, table = (-1, None), None  # its memory is free for the next one
            table = self._read_table(number, columns)
        elif missing := [name for name in columns if name not in table.column_names]:
            missing_table = self._read_table(number, missing)
            for name in missing:
                table = table.append_column(missing_table.field(name), missing_table.column(name))
        self._table = (number, table)
        return table_arrays(table, columns, self._place(number), rows)

    def _place(self, number: int) -> GroupLocation:
        group = self._index.groups[number]
        return GroupLocation(file=group.file, group=group.number, row=group.first - self._firsts[group.file])

    def _read_table(self, number: int, columns: Sequence[str]) -> pa.Table:
        group, where = self._index.groups[number], self._place(number).at()
        try:
            table = retry_transient(lambda: self._read(group, columns), where)
        except (OSError, pa.ArrowException, IndexError) as error:
            raise DataError(
                f"a row group cannot be read: {error}", where=where, remedy="write the file again, or leave it out"
            ) from error
        if table.num_rows != group.rows:
            how = f"the row group has {table.num_rows} rows and had {group.rows} when the run began"
            raise changed_error(how, where)
        select_columns(dict.fromkeys(table.column_names), columns, where)
        return table

    def fill(self, number: int, rows: range, into: Arrays) -> list[str]:
        """Read some rows of row group `number`, counted within it, from its pages, most of them without pyarrow.

        Returns the columns that `load` must still read; their arrays are undefined.
        """
        group = self._index.groups[number]
        try:
            return [name for name, array in into.items() if not self._filled(group, name, rows, array)]
        except (OSError, pa.ArrowException):  # `load` tries again, and reports the error
            self._files.pop(group.file, None)
            return list(into)

    def _filled(self, group: RowGroup, name: str, rows: range, out: npt.NDArray[Any]) -> bool:
        pages, file = self._file(group.file)
        metadata = file.metadata
        if group.number >= metadata.num_row_groups or metadata.row_group(group.number).num_rows != group.rows:
            return False
        at_once = not isinstance(self._system, pafs.LocalFileSystem)
        leading = read_pages(pages, metadata, group.number, name, rows, out, at_once)
        if leading > group.rows * _MAX_DICTIONARY_SHARE:
            return False
        if leading > rows.start:
            batch = next(file.iter_batches(leading, row_groups=[group.number], columns=[name], use_threads=False))
            where = f"{group.file}, row group {group.number}, column {name!r}"
            first = to_array(pa.chunked_array([batch.column(0)]), where)[rows.start :]
            out[: len(first)] = first[: len(out)]
        return True

    def _read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        try:
            return self._file(group.file)[1].read_row_group(group.number, columns=list(columns), use_threads=False)
        except OSError:
            self._files.pop(group.file, None)  # another attempt opens it again
            raise

    def _file(self, path: str) -> tuple[pa.NativeFile, pq.ParquetFile]:
        """Return a file, opened once for its pages and for pyarrow's reader."""
        if path not in self._files:
            while len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)[1][0].close()
            pages = self._system.open_input_file(path)
            file = pq.ParquetFile(pages)
            _require_unchanged(file.schema_arrow, self._index.schema, path)
            self._files[path] = pages, file
        self._files.move_to_end(path)
        return self._files[path]


def _require_unchanged(schema: pa.Schema, fields: Mapping[str, Field], file: str) -> None:
    """Raise DataError if columns of a file have changed since it was indexed: its numbers would be misread."""
    for name, field in fields.items():
        place = schema.get_field_index(name)
        if place < 0 or _field_or_none(schema.types[place]) != field:
            actual = schema.types[place] if place >= 0 else "missing"
            how = f"column {name!r} is {actual} and was {field.dtype} of shape {field.shape} when the run began"
            raise changed_error(how, f"{file}, column {name!r}")


def _field_or_none(kind: pa.DataType) -> Field | None:
    """Return the field of a column of this type; None if it cannot become an array."""
    try:
        return field_of(kind)
    except (pa.ArrowException, DataError):
        return None


def _footers(system: pafs.FileSystem, files: Sequence[pafs.FileInfo]) -> list[Footer]:
    """Read the footers of files, many at a time, since each waits for the store; with many files on Ray."""
    places = [(info.path, info.size) for info in files]
    return first_pass(partial(read_footer, system), places, threads=min(_FOOTERS, len(files)))


def read_footer(system: pafs.FileSystem, place: tuple[str, int]) -> Footer:
    """Read the footer of a file, given by path and size. Raises DataError."""
    path, size = place

    def read() -> pq.FileMetaData:
        """With the size, pyarrow sends one request to a store instead of two."""
        from pyarrow.dataset import ParquetFileFormat  # imports pandas, which takes a worker a tenth of its start

        return ParquetFileFormat().make_fragment(path, filesystem=system, file_size=size).metadata

    try:
        return Footer.of(retry_transient(read, path))
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"the file is not a whole parquet file: {error}",
            where=f"{path}, {size} bytes",
            remedy="write it again, or leave it out",
        ) from error


def _unpacked(stored: Any) -> Footer:
    schema, rows, sizes = stored
    _schema(schema)
    return Footer(schema, [int(count) for count in rows], [int(size) for size in sizes])


@lru_cache(maxsize=64)
def _schema(stored: str) -> pa.Schema:
    """Return a schema from its base64 text."""
    return pa.ipc.read_schema(pa.py_buffer(b64decode(stored, validate=True)))


def _require_same_schema(
    schema: pa.Schema, other: pa.Schema, first: str, file: str, columns: tuple[str, ...] | None
) -> None:
    """Raise DataError for a column to read that differs from the first file, or comes twice."""
    unique_names((name for name in other.names if columns is None or name in columns), file)
    expected = {name: str(schema.field(name).type) for name in columns or schema.names if name in schema.names}
    actual = {name: str(other.field(name).type) for name in other.names if columns is None or name in columns}
    for name in sorted({**expected, **actual}, key=lambda name: name in expected and name in actual):
        if expected.get(name) != actual.get(name):
            raise schema_error(name, actual.get(name), expected.get(name), file, first)


# --- Read numbers from the pages of a parquet file --------------------------------------------------------------------


_PHYSICAL_TYPES = {"FLOAT": "f4", "DOUBLE": "f8", "INT32": "i4", "INT64": "i8"}
_CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "ZSTD": "zstd", "GZIP": "gzip", "BROTLI": "brotli"}
_PLAIN, _DICTIONARIES = 0, (2, 8)
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_HEADER_BYTES = 512


def read_pages(
    file: pa.NativeFile, metadata: Any, group: int, name: str, rows: range, out: npt.NDArray[Any], at_once: bool
) -> int:
    """Read some rows of a column into `out` from the pages of a file.

    Args:
        file: to read from.
        metadata: its pyarrow.parquet.FileMetaData.
        group: number of the row group in the file.
        name: of the column.
        rows: to read, counted within the row group.
        out: (len(rows), *shape), contiguous.
        at_once: whether to read all pages of the column in one request.

    Returns:
        The number of leading rows of the row group that are not plain numbers: all rows for an unsuited column. Their
        places in `out` are undefined.

    Raises:
        OSError, pa.ArrowException: the file cannot be read.
    """
    width, every = max(out[:1].size, 1), metadata.row_group(group).num_rows
    chunk = _chunk_of(metadata, group, name, width * every, out.dtype)
    if chunk is None:
        return int(every)
    if at_once:
        content = file.read_at(chunk.stop - chunk.start, chunk.start)
        file, chunk = pa.BufferReader(content), chunk._replace(start=0, stop=len(content))
    try:
        return -(-_fill_chunk(file, chunk, rows.start * width, out.reshape(-1)) // width)
    except _UnsupportedPages:
        return int(every)


class _Chunk(NamedTuple):
    """One column of one row group, from the footer of its file."""

    start: int  # offset of its first page
    stop: int  # offset behind its last page
    values: int  # in it, over all pages
    stored: str  # numpy's name of the type in the file
    codec: str | None  # pyarrow's name of the compression; None for none
    levels: int  # kinds of levels (repetition, definition) in front of the values of a page


class _Page(NamedTuple):
    """A page: its content and values. With `levels_bytes` None, the page has the lengths of its levels."""

    offset: int
    size: int
    plain_size: int
    values: int
    plain: bool
    levels_bytes: int | None
    packed: bool


class _UnsupportedPages(Exception):
    """The chunk is not all plain numbers."""


def _chunk_of(metadata: Any, group: int, name: str, values: int, dtype: np.dtype[Any]) -> _Chunk | None:
    """Return the column `name` of a row group of a file (pyarrow.parquet.FileMetaData).

    Returns None unless it has `values` numbers that become `dtype` unchanged, or by dropping leading bytes.
    """
    row_group = metadata.row_group(group)
    paths = (metadata.schema.column(leaf).path for leaf in range(row_group.num_columns))
    leaves = [leaf for leaf, path in enumerate(paths) if path.partition(".")[0] == name]
    if len(leaves) != 1 or sys.byteorder != "little":
        return None
    column, schema = row_group.column(leaves[0]), metadata.schema.column(leaves[0])
    stored = _PHYSICAL_TYPES.get(column.physical_type, "")
    suited = dtype.str[1:] == stored if dtype.kind == "f" else stored[:1] == "i" and dtype.kind in "iu"
    if not suited or column.num_values != values or column.compression not in _CODECS:
        return None
    start = column.dictionary_page_offset or column.data_page_offset
    return _Chunk(
        start=start,
        stop=start + column.total_compressed_size,
        values=values,
        stored=stored,
        codec=_CODECS[column.compression],
        levels=(schema.max_repetition_level > 0) + (schema.max_definition_level > 0),
    )


def _fill_chunk(file: pa.NativeFile, chunk: _Chunk, first: int, out: npt.NDArray[Any]) -> int:
    """Read values `first`... of a chunk into `out`, one-dimensional and contiguous.

    Returns the number of leading values that refer to a dictionary and were skipped.

    Raises:
        _UnsupportedPages: a page is not plain or holds a null.
        OSError, pa.ArrowException: the file cannot be read.
    """
    position = leading = 0
    for page in _pages(file, chunk):
        low, high = max(first - position, 0), min(first + len(out) - position, page.values)
        if not page.plain:
            if leading != position:
                raise _UnsupportedPages
            leading += page.values
        elif low < high:
            _read_page(file, chunk, page, low, out[position + low - first : position + high - first])
        position += page.values
    if position != chunk.values:
        raise _UnsupportedPages
    return leading


def _pages(file: pa.NativeFile, chunk: _Chunk) -> Iterator[_Page]:
    offset = chunk.start
    while offset < chunk.stop:
        header = _ThriftHeader(file.read_at(min(_HEADER_BYTES, chunk.stop - offset), offset))
        page = _page(header.struct(), header, offset)
        yield page
        offset = page.offset + page.size


def _page(fields: dict[int, Any], header: _ThriftHeader, offset: int) -> _Page:
    """Return the page of a header. Field numbers are from PageHeader, DataPageHeader(V2) in parquet.thrift."""
    try:
        if fields[1] == _DICTIONARY_PAGE:
            return _Page(offset + header.position, fields[3], 0, 0, False, 0, False)
        second = fields[1] == _DATA_PAGE_V2
        data = fields[8 if second else 5]
        encoding = data[4 if second else 2]
        levels_bytes = data[5] + data[6] if second else None
        packed = data.get(7, True) if second else True
        page = _Page(offset + header.position, fields[3], fields[2], data[1], encoding == _PLAIN, levels_bytes, packed)
        is_valid = min(page.size, page.plain_size, page.values, page.levels_bytes or 0) >= 0
    except (KeyError, TypeError) as error:  # no page header at all
        raise _UnsupportedPages from error
    if not is_valid or fields[1] not in (_DATA_PAGE, _DATA_PAGE_V2) or encoding not in (_PLAIN, *_DICTIONARIES):
        raise _UnsupportedPages
    return page


def _read_page(file: pa.NativeFile, chunk: _Chunk, page: _Page, first: int, out: npt.NDArray[Any]) -> None:
    """Read values `first`... of a page."""
    if chunk.codec is not None and page.packed:
        file, page = _decompressed(file, chunk.codec, page)
    stored, skip = np.dtype(chunk.stored), _levels_bytes(file, chunk, page)
    if page.plain_size - skip != page.values * stored.itemsize:
        raise _UnsupportedPages  # a null has levels and no value
    same = out.dtype.itemsize == stored.itemsize
    into = out if same else np.empty(len(out), stored)
    file.seek(page.offset + skip + first * stored.itemsize)
    if file.readinto(into.data.cast("B")) != into.nbytes:
        raise _UnsupportedPages
    if not same:
        np.copyto(out, into, casting="unsafe")


def _decompressed(file: pa.NativeFile, codec: str, page: _Page) -> tuple[pa.NativeFile, _Page]:
    """Return the content of a page. Version 2 has uncompressed levels in front, which are dropped."""
    levels = page.levels_bytes or 0
    size = page.plain_size - levels
    file.seek(page.offset + levels)
    content = pa.decompress(file.read_buffer(page.size - levels), size, codec=codec)
    return pa.BufferReader(content), page._replace(offset=0, plain_size=size, levels_bytes=page.levels_bytes and 0)


def _levels_bytes(file: pa.NativeFile, chunk: _Chunk, page: _Page) -> int:
    """Return the bytes of levels in front of the values; in version 1 each kind begins with its length."""
    if page.levels_bytes is not None:
        return page.levels_bytes
    size = 0
    for _ in range(chunk.levels):
        size += 4 + int.from_bytes(file.read_at(4, page.offset + size), "little")
    return size


class _ThriftHeader:
    """Reads a struct of Thrift's compact protocol. Raises _UnsupportedPages for types that page headers do not use."""

    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def struct(self) -> dict[int, Any]:
        """Return values by field number."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 8:  # text or bytes: a minimum or maximum
            length = self._number()
            self.position += length
            return None
        if kind == 12:
            return self.struct()
        raise _UnsupportedPages

    def _signed(self) -> int:
        number = self._number()
        return (number >> 1) ^ -(number & 1)

    def _number(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    def _byte(self) -> int:
        if self.position >= len(self._data):
            raise _UnsupportedPages
        self.position += 1
        return self._data[self.position - 1]
