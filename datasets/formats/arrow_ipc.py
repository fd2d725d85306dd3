"""Arrow IPC files (Feather version 2) and streams as a data source, with a row group for each record batch.

The first pass reads each file once: pyarrow says neither where the record batches of a stream are nor how many rows
they have without reading them.
"""

from __future__ import annotations

import io
import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import Arrays, Field, field_of, unique_names
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import RandomAccessFile, absolute_path
from trainwright.datasets.formats.scanned_files import FileSource, FileSurvey, GroupLocation, RecordRange, table_arrays

_MAGIC, _FEATHER_1 = b"ARROW1\0\0", b"FEA1"
_PADDING_BYTES = 64  # that a writer may leave after the last message


@dataclass(frozen=True, kw_only=True)
class _ArrowFormat:
    """Arrow IPC files and streams, compressed bodies and dictionaries included."""

    name = "Arrow"
    call = "arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Read all record batches and note where they are. Raises DataError for a damaged file."""
        start = _stream_start(data)
        try:
            first = _first_batch_start(data, start)
            pieces = _record_batches(data, start, first)
        except (OSError, StopIteration, pa.ArrowException) as error:
            raise _damaged_file_error(str(error) or "it has no schema", data.file) from error
        schema = _schema(data.read(0, first), data.file)
        return FileSurvey(
            pieces=tuple(piece for piece in pieces if piece.rows),
            traits=dict(zip(unique_names(schema.names, data.file), schema.types, strict=True)),
        )

    def merge(self, one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
        """Return the type where both are the same."""
        return one if one == other else None

    def field(self, trait: pa.DataType) -> Field:
        """Return dtype and shape of the column."""
        return field_of(trait)

    def pack(self, trait: pa.DataType) -> str:
        """An Arrow IPC schema in base64."""
        return b64encode(pa.schema([("", trait)]).serialize()).decode()

    def unpack(self, stored: Any) -> pa.DataType:
        """The type of the only column."""
        return pa.ipc.read_schema(pa.py_buffer(b64decode(stored, validate=True))).types[0]

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, pa.DataType], place: GroupLocation) -> Arrays:
        """Return the columns of one record batch, after full validation: damaged offsets must not reach memory."""
        schema = _schema(head, place.file)
        options = pa.ipc.IpcReadOptions(
            included_fields=[schema.get_field_index(name) for name in traits], use_threads=False
        )
        try:
            with pa.ipc.open_stream(pa.py_buffer(_stream_of(head) + body), options=options) as reader:
                table = reader.read_all()
            table.validate(full=True)
        except (OSError, pa.ArrowException) as error:
            raise _damaged_file_error(str(error), place.at()) from error
        for name, kind in traits.items():
            if name not in table.column_names or table.schema.field(name).type != kind:
                raise _damaged_file_error(f"it has no column of type {kind}", place.at(column=name))
        return table_arrays(table, tuple(traits), place)


class _InputStream(io.RawIOBase):
    """The content of a file as a stream, from a byte on."""

    def __init__(self, data: RandomAccessFile, start: int) -> None:
        self._data, self._position = data, start

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes. Raises DataError."""
        stop = self._data.size_bytes if size < 0 else min(self._position + size, self._data.size_bytes)
        content = self._data.read(self._position, stop)
        self._position = stop
        return content

    def tell(self) -> int:
        """Return the position in the file."""
        return self._position


def _stream_start(data: RandomAccessFile) -> int:
    """Return where the first message starts: behind the magic word of a file, or at the first byte of a stream."""
    if not data.size_bytes:
        raise _damaged_file_error("it is empty", data.file)
    start = data.read(0, min(len(_MAGIC), data.size_bytes))
    if start.startswith(_FEATHER_1):
        raise DataError(
            "the file is Feather version 1", where=data.file, remedy="write it again: pyarrow.feather.write_feather"
        )
    if start != _MAGIC:
        return 0
    if data.read(max(data.size_bytes - 6, len(_MAGIC)), data.size_bytes) != _MAGIC[:6]:
        raise _damaged_file_error("the file has no end", data.file)
    return len(_MAGIC)


def _first_batch_start(data: RandomAccessFile, start: int) -> int:
    """Return where the first record batch starts: behind the schema and the dictionaries."""
    stream = _InputStream(data, start)
    reader = pa.ipc.MessageReader.open_stream(pa.PythonFile(stream, "r"))
    reader.read_next_message()  # the schema
    end = stream.tell()
    for message in reader:
        if message.type == "record batch":
            break
        end = stream.tell()
    return end


def _record_batches(data: RandomAccessFile, start: int, first: int) -> list[RecordRange]:
    """Return the bytes and rows of each record batch.

    Args:
        data: the file.
        start: where the first message starts.
        first: where the first record batch starts.
    """
    stream, end = _InputStream(data, start), first
    options = pa.ipc.IpcReadOptions(included_fields=[0], use_threads=False)  # of the others no body is decompressed
    pieces: list[RecordRange] = []
    dictionaries = None
    with pa.ipc.open_stream(pa.PythonFile(stream, "r"), options=options) as reader:
        for batch in reader:
            pieces.append(RecordRange(end, stream.tell(), batch.num_rows))
            end, count = stream.tell(), reader.stats.num_dictionary_batches
            if dictionaries not in (None, count):
                raise DataError(
                    "a dictionary comes after the first record batch, so no batch can be read alone",
                    where=data.file,
                    remedy="write the file with one dictionary a column (unify_dictionaries=True), or as parquet",
                )
            dictionaries = count
    # A damaged message may look like the end of the stream.
    footer_bytes = int.from_bytes(data.read(data.size_bytes - 10, data.size_bytes - 6), "little") + 10 if start else 0
    unread_bytes = data.size_bytes - footer_bytes - stream.tell()
    if unread_bytes > _PADDING_BYTES:
        raise _damaged_file_error(f"{unread_bytes} bytes at byte {stream.tell()} are no message", data.file)
    return pieces


def _schema(head: bytes, file: str) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(_stream_of(head)))
    except (OSError, pa.ArrowException) as error:
        raise _damaged_file_error(f"its schema cannot be read: {error}", file) from error


def _stream_of(head: bytes) -> bytes:
    """Return a stream: a file is one between a magic word and a footer."""
    return head.removeprefix(_MAGIC)


def _damaged_file_error(how: str, where: str) -> DataError:
    return DataError(f"the Arrow data is damaged: {how}", where=where, remedy="write the file again, or leave it out")


def arrow(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Read rows of Arrow IPC files, Feather files (version 2) and IPC streams; a group is a record batch.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `abfs://`).
        columns: read only these; by default all.
    """
    names = None if columns is None else tuple(columns)
    return Dataset(source=FileSource(path=absolute_path(path), format=_ArrowFormat(), columns=names))
