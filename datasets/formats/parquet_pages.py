"""Numbers straight from the pages of a parquet file.

pyarrow decodes the levels of a nested column value by value, which takes several times longer than reading the numbers
of a fixed-size list or a tensor. Where a column chunk holds plain numbers and no null, its pages are arrays already,
and any rows of it can be read without those before. All else is left to pyarrow: other encodings, other types, and the
pages in front that refer to a dictionary: writers begin with one and give it up when it grows.
Formats: parquet.apache.org/docs/file-format/data-pages and Thrift's compact protocol.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.fs as pafs

_STORED = {"FLOAT": "f4", "DOUBLE": "f8", "INT32": "i4", "INT64": "i8"}
_CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "ZSTD": "zstd", "GZIP": "gzip", "BROTLI": "brotli"}
_PLAIN, _DICTIONARIES = 0, (2, 8)
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_HEADER_BYTES = 512
_OPEN_FILES = 16


class PageReader:
    """Reads numbers from the pages of files; keeps a few files open. For one thread at a time."""

    def __init__(self, system: pafs.FileSystem) -> None:
        self._system, self._local = system, isinstance(system, pafs.LocalFileSystem)
        self._files: OrderedDict[str, pa.NativeFile] = OrderedDict()

    def fill(self, path: str, metadata: Any, group: int, name: str, rows: range, out: npt.NDArray[Any]) -> int:
        """Read some rows of a column into `out`.

        Args:
            path: of the file.
            metadata: its pyarrow.parquet.FileMetaData.
            group: number of the row group in the file.
            name: of the column.
            rows: to read, counted within the row group.
            out: (len(rows), *shape), contiguous.

        Returns:
            How many of the row group's first rows are not plain numbers: all of them where the column is not suited or
            the file cannot be read. Their places in `out` are undefined.
        """
        width, every = max(out[:1].size, 1), metadata.row_group(group).num_rows
        chunk = chunk_of(metadata, group, name, width * every, out.dtype)
        if chunk is None:
            return int(every)
        try:
            file = self._file(path)
            if not self._local:  # one request for all pages
                content = file.read_at(chunk.stop - chunk.start, chunk.start)
                file, chunk = pa.BufferReader(content), chunk._replace(start=0, stop=len(content))
            return -(-fill(file, chunk, rows.start * width, out.reshape(-1)) // width)
        except _Unsuited:
            return int(every)
        except (OSError, pa.ArrowException):  # pyarrow's own reader tries next, and says what is wrong
            self._files.pop(path, None)
            return int(every)

    def _file(self, path: str) -> pa.NativeFile:
        if path not in self._files:
            while len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[path] = self._system.open_input_file(path)
        self._files.move_to_end(path)
        return self._files[path]


class Chunk(NamedTuple):
    """One column of one row group, as its file's footer has it.

    Attributes:
        start: offset of its first page.
        stop: offset behind its last page.
        values: in it, over all pages.
        stored: numpy's name of the type in the file.
        codec: pyarrow's name of the compression; None for none.
        levels: kinds of levels (repetition, definition) in front of the values of a page.
    """

    start: int
    stop: int
    values: int
    stored: str
    codec: str | None
    levels: int


class _Page(NamedTuple):
    """A page: where its content is, and what of it are values. `levels_bytes` None: lengths stand in the page."""

    at: int
    size: int
    plain_size: int
    values: int
    plain: bool
    levels_bytes: int | None
    packed: bool


class _Unsuited(Exception):
    """The chunk is none of plain numbers."""


def chunk_of(metadata: Any, group: int, name: str, values: int, dtype: np.dtype[Any]) -> Chunk | None:
    """The column `name` of a row group of a file (pyarrow.parquet.FileMetaData).

    None where it does not hold as many numbers as `values`, or numbers that can become `dtype` no other way than by
    taking them as they are or by leaving out leading bytes.
    """
    row_group = metadata.row_group(group)
    leaves = [leaf for leaf in range(row_group.num_columns) if _top(metadata.schema.column(leaf).path) == name]
    if len(leaves) != 1 or sys.byteorder != "little":
        return None
    column, schema = row_group.column(leaves[0]), metadata.schema.column(leaves[0])
    stored = _STORED.get(column.physical_type, "")
    suited = dtype.str[1:] == stored if dtype.kind == "f" else stored[:1] == "i" and dtype.kind in "iu"
    if not suited or column.num_values != values or column.compression not in _CODECS:
        return None
    start = column.dictionary_page_offset or column.data_page_offset
    return Chunk(
        start=start,
        stop=start + column.total_compressed_size,
        values=values,
        stored=stored,
        codec=_CODECS[column.compression],
        levels=(schema.max_repetition_level > 0) + (schema.max_definition_level > 0),
    )


def fill(file: pa.NativeFile, chunk: Chunk, first: int, out: npt.NDArray[Any]) -> int:
    """Read values `first`... of a chunk into `out`, one-dimensional and contiguous.

    Returns how many of the chunk's first values refer to a dictionary and were left out.

    Raises:
        _Unsuited: a page is not plain or holds a null.
        OSError, pa.ArrowException: the file cannot be read.
    """
    at = leading = 0
    for page in _pages(file, chunk):
        low, high = max(first - at, 0), min(first + len(out) - at, page.values)
        if not page.plain:
            if leading != at:
                raise _Unsuited
            leading += page.values
        elif low < high:
            _read(file, chunk, page, low, out[at + low - first : at + high - first])
        at += page.values
    if at != chunk.values:
        raise _Unsuited
    return leading


def _pages(file: pa.NativeFile, chunk: Chunk) -> Iterator[_Page]:
    at = chunk.start
    while at < chunk.stop:
        header = _Header(file.read_at(min(_HEADER_BYTES, chunk.stop - at), at))
        page = _page(header.struct(), header, at)
        yield page
        at = page.at + page.size


def _page(fields: dict[int, Any], header: _Header, at: int) -> _Page:
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
        raise _Unsuited from error
    if not sound or fields[1] not in (_DATA_PAGE, _DATA_PAGE_V2) or encoding not in (_PLAIN, *_DICTIONARIES):
        raise _Unsuited
    return page


def _read(file: pa.NativeFile, chunk: Chunk, page: _Page, first: int, out: npt.NDArray[Any]) -> None:
    """Read values `first`... of a page."""
    if chunk.codec is not None and page.packed:
        file, page = _unpacked(file, chunk.codec, page)
    stored, skip = np.dtype(chunk.stored), _levels_bytes(file, chunk, page)
    if page.plain_size - skip != page.values * stored.itemsize:
        raise _Unsuited  # a null has levels and no value
    same = out.dtype.itemsize == stored.itemsize
    into = out if same else np.empty(len(out), stored)
    file.seek(page.at + skip + first * stored.itemsize)
    if file.readinto(into.data.cast("B")) != into.nbytes:
        raise _Unsuited
    if not same:
        np.copyto(out, into, casting="unsafe")


def _unpacked(file: pa.NativeFile, codec: str, page: _Page) -> tuple[pa.NativeFile, _Page]:
    """The content of a page. In the second version the levels stand in front as they are, and are left out."""
    front = page.levels_bytes or 0
    size = page.plain_size - front
    file.seek(page.at + front)
    content = pa.decompress(file.read_buffer(page.size - front), size, codec=codec)
    return pa.BufferReader(content), page._replace(at=0, plain_size=size, levels_bytes=page.levels_bytes and 0)


def _levels_bytes(file: pa.NativeFile, chunk: Chunk, page: _Page) -> int:
    """Bytes of levels in front of the values; in the first version each kind begins with its length."""
    if page.levels_bytes is not None:
        return page.levels_bytes
    size = 0
    for _ in range(chunk.levels):
        size += 4 + int.from_bytes(file.read_at(4, page.at + size), "little")
    return size


class _Header:
    """Reads a struct of Thrift's compact protocol. Raises _Unsuited for what page headers do not have."""

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
        raise _Unsuited

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
            raise _Unsuited
        self.at += 1
        return self._data[self.at - 1]


def _top(path: str) -> str:
    return path.partition(".")[0]
