"""Parquet files as a source: their index from their footers, and reading one row group.

pyarrow decodes the levels of a nested column value by value, which takes several times longer than reading the numbers
of a fixed-size list or a tensor. Where a column chunk holds plain numbers and no null, its pages are arrays already,
and any rows of it can be read without those before. All else is left to pyarrow: other encodings, other types, and the
pages in front that refer to a dictionary: writers begin with one and give it up when it grows.
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
_MOST_DICTIONARY_ROWS = 0.5  # of a row group: where more of its rows refer to a dictionary, pyarrow reads all of them


class Footer(NamedTuple):
    """What the footer of a file says."""

    schema: str  # as Arrow IPC, in base64; equal for equal schemas
    rows: list[int]  # of each row group
    # of each column in all row groups, uncompressed, in bytes; empty where no column becomes an object
    sizes: list[int]

    @classmethod
    def of(cls, footer: pq.FileMetaData) -> Footer:
        """What pyarrow has read."""
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
        """Read the footer of every file that the caches do not know. Raises DataError for anything wrong."""
        system, path = resolve_file_system(self.path)
        files = find_files(system, path, self.path, "parquet", _SUFFIXES)
        footers = cached_metadata(
            system, files, reads=("parquet", self.path), read=partial(_footers, system), pack=list, unpack=_unpacked
        )
        schemas = {footer.schema: _schema(footer.schema) for footer in footers}
        schema = schemas[footers[0].schema]
        others = {footer.schema: info.path for info, footer in zip(reversed(files), reversed(footers), strict=True)}
        for other, file in sorted(others.items(), key=lambda item: item[1]):
            _require_same_schema(schema, schemas[other], files[0].path, file, self.columns)
        groups = number_groups(self.path, files, ([RecordRange(0, 0, rows) for rows in each.rows] for each in footers))
        names = select_columns(dict.fromkeys(schema.names), self.columns, files[0].path)
        fields = fields_of({name: schema.field(name).type for name in names}, field_of, files[0].path)
        wanted = {text: [name in fields for name in each.names] for text, each in schemas.items()}
        return file_index(
            files,
            groups,
            fields,
            stored_bytes=sum(sum(compress(footer.sizes, wanted[footer.schema])) for footer in footers),
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
        """A loader of the same for another thread."""
        return ParquetLoader(self._system, self._index)

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Columns of row group `number` of the index; raises DataError that names file, row group, row and column."""
        found = self._arrays(number, columns, None)
        self._table = (-1, None)
        return found

    def load_rows(self, number: int, columns: Sequence[str], rows: Rows) -> Arrays:
        """As `load`, of some rows."""
        return self._arrays(number, columns, rows)

    def _arrays(self, number: int, columns: Sequence[str], rows: Rows | None) -> Arrays:
        """Columns of some rows, or of all. The row group is kept as it was read: bad rows are searched for in it.

        `load` is asked for the columns that `fill` left, and `load_rows` for all: each column is read once.
        """
        kept, table = self._table  # `load` may drop it meanwhile
        if table is None or kept != number:
            self._table, table = (-1, None), None  # its memory is free for the next one
            table = self._loaded(number, columns)
        elif missing := [name for name in columns if name not in table.column_names]:
            found = self._loaded(number, missing)
            for name in missing:
                table = table.append_column(found.field(name), found.column(name))
        self._table = (number, table)
        return table_arrays(table, columns, self._place(number), rows)

    def _place(self, number: int) -> GroupLocation:
        group = self._index.groups[number]
        return GroupLocation(file=group.file, group=group.number, row=group.first - self._firsts[group.file])

    def _loaded(self, number: int, columns: Sequence[str]) -> pa.Table:
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
        """Take some rows of row group `number`, counted within it, from its pages, most of them without pyarrow.

        Returns the names of the columns that are left to `load`; their arrays are undefined.
        """
        group = self._index.groups[number]
        try:
            return [name for name, array in into.items() if not self._filled(group, name, rows, array)]
        except (OSError, pa.ArrowException):  # `load` tries again, and says what is wrong
            self._files.pop(group.file, None)
            return list(into)

    def _filled(self, group: RowGroup, name: str, rows: range, out: npt.NDArray[Any]) -> bool:
        pages, file = self._file(group.file)
        metadata = file.metadata
        if group.number >= metadata.num_row_groups or metadata.row_group(group.number).num_rows != group.rows:
            return False
        at_once = not isinstance(self._system, pafs.LocalFileSystem)
        leading = read_pages(pages, metadata, group.number, name, rows, out, at_once)
        if leading > group.rows * _MOST_DICTIONARY_ROWS:
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
            self._files.pop(group.file, None)  # another attempt opens it anew
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
    """Refuse a file whose columns are not what they were when it was indexed: its numbers would be misread."""
    for name, field in fields.items():
        place = schema.get_field_index(name)
        if place < 0 or _field_or_none(schema.types[place]) != field:
            found = schema.types[place] if place >= 0 else "missing"
            how = f"column {name!r} is {found} and was {field.dtype} of shape {field.shape} when the run began"
            raise changed_error(how, f"{file}, column {name!r}")


def _field_or_none(kind: pa.DataType) -> Field | None:
    """What a column of this type becomes; None where it cannot become an array."""
    try:
        return field_of(kind)
    except (pa.ArrowException, DataError):
        return None


def _footers(system: pafs.FileSystem, files: Sequence[pafs.FileInfo]) -> list[Footer]:
    """Read the footers of files, many at a time: each waits for the store. Those of many files are read on Ray."""
    places = [(info.path, info.size) for info in files]
    return first_pass(partial(read_footer, system), places, threads=min(_FOOTERS, len(files)))


def read_footer(system: pafs.FileSystem, place: tuple[str, int]) -> Footer:
    """Read the footer of a file, given by path and size. Raises DataError."""
    path, size = place

    def read() -> pq.FileMetaData:
        """Given the size, pyarrow makes one request of a store instead of two."""
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
    """A schema from its text."""
    return pa.ipc.read_schema(pa.py_buffer(b64decode(stored, validate=True)))


def _require_same_schema(
    schema: pa.Schema, other: pa.Schema, first: str, file: str, columns: tuple[str, ...] | None
) -> None:
    """Refuse files whose columns differ from those of the first file, or come twice, where they are read."""
    unique_names((name for name in other.names if columns is None or name in columns), file)
    expected = {name: str(schema.field(name).type) for name in columns or schema.names if name in schema.names}
    found = {name: str(other.field(name).type) for name in other.names if columns is None or name in columns}
    for name in sorted({**expected, **found}, key=lambda name: name in expected and name in found):
        if expected.get(name) != found.get(name):
            raise schema_error(name, found.get(name), expected.get(name), file, first)


# --- Numbers straight from the pages of a parquet file ----------------------------------------------------------------


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
        How many of the row group's first rows are not plain numbers: all of them where the column is not suited. Their
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
    """One column of one row group, as its file's footer has it."""

    start: int  # offset of its first page
    stop: int  # offset behind its last page
    values: int  # in it, over all pages
    stored: str  # numpy's name of the type in the file
    codec: str | None  # pyarrow's name of the compression; None for none
    levels: int  # kinds of levels (repetition, definition) in front of the values of a page


class _Page(NamedTuple):
    """A page: where its content is, and what of it are values. `levels_bytes` None: lengths stand in the page."""

    at: int
    size: int
    plain_size: int
    values: int
    plain: bool
    levels_bytes: int | None
    packed: bool


class _UnsupportedPages(Exception):
    """The chunk is none of plain numbers."""


def _chunk_of(metadata: Any, group: int, name: str, values: int, dtype: np.dtype[Any]) -> _Chunk | None:
    """The column `name` of a row group of a file (pyarrow.parquet.FileMetaData).

    None where it does not hold as many numbers as `values`, or numbers that can become `dtype` no other way than by
    taking them as they are or by leaving out leading bytes.
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

    Returns how many of the chunk's first values refer to a dictionary and were left out.

    Raises:
        _UnsupportedPages: a page is not plain or holds a null.
        OSError, pa.ArrowException: the file cannot be read.
    """
    at = leading = 0
    for page in _pages(file, chunk):
        low, high = max(first - at, 0), min(first + len(out) - at, page.values)
        if not page.plain:
            if leading != at:
                raise _UnsupportedPages
            leading += page.values
        elif low < high:
            _read_page(file, chunk, page, low, out[at + low - first : at + high - first])
        at += page.values
    if at != chunk.values:
        raise _UnsupportedPages
    return leading


def _pages(file: pa.NativeFile, chunk: _Chunk) -> Iterator[_Page]:
    at = chunk.start
    while at < chunk.stop:
        header = _ThriftHeader(file.read_at(min(_HEADER_BYTES, chunk.stop - at), at))
        page = _page(header.struct(), header, at)
        yield page
        at = page.at + page.size


def _page(fields: dict[int, Any], header: _ThriftHeader, at: int) -> _Page:
    """Field numbers are those of PageHeader, DataPageHeader and DataPageHeaderV2 in parquet.thrift."""
    try:
        if fields[1] == _DICTIONARY_PAGE:
            return _Page(at + header.at, fields[3], 0, 0, False, 0, False)
        second = fields[1] == _DATA_PAGE_V2
        data = fields[8 if second else 5]
        encoding = data[4 if second else 2]
        levels_bytes = data[5] + data[6] if second else None
        packed = data.get(7, True) if second else True
        page = _Page(at + header.at, fields[3], fields[2], data[1], encoding == _PLAIN, levels_bytes, packed)
        sound = min(page.size, page.plain_size, page.values, page.levels_bytes or 0) >= 0
    except (KeyError, TypeError) as error:  # no page header at all
        raise _UnsupportedPages from error
    if not sound or fields[1] not in (_DATA_PAGE, _DATA_PAGE_V2) or encoding not in (_PLAIN, *_DICTIONARIES):
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
    file.seek(page.at + skip + first * stored.itemsize)
    if file.readinto(into.data.cast("B")) != into.nbytes:
        raise _UnsupportedPages
    if not same:
        np.copyto(out, into, casting="unsafe")


def _decompressed(file: pa.NativeFile, codec: str, page: _Page) -> tuple[pa.NativeFile, _Page]:
    """The content of a page. In the second version the levels stand in front as they are, and are left out."""
    front = page.levels_bytes or 0
    size = page.plain_size - front
    file.seek(page.at + front)
    content = pa.decompress(file.read_buffer(page.size - front), size, codec=codec)
    return pa.BufferReader(content), page._replace(at=0, plain_size=size, levels_bytes=page.levels_bytes and 0)


def _levels_bytes(file: pa.NativeFile, chunk: _Chunk, page: _Page) -> int:
    """Bytes of levels in front of the values; in the first version each kind begins with its length."""
    if page.levels_bytes is not None:
        return page.levels_bytes
    size = 0
    for _ in range(chunk.levels):
        size += 4 + int.from_bytes(file.read_at(4, page.at + size), "little")
    return size


class _ThriftHeader:
    """Reads a struct of Thrift's compact protocol. Raises _UnsupportedPages for what page headers do not have."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self) -> dict[int, Any]:
        """Values by field number."""
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
            self.at += length
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
        if self.at >= len(self._data):
            raise _UnsupportedPages
        self.at += 1
        return self._data[self.at - 1]
