"""Arrow IPC as a source: files (Feather version 2) and streams, a group for each record batch.

pyarrow tells neither where in a file its record batches lie nor how many rows they have without reading them, so the
messages are walked here by their framing (https://arrow.apache.org/docs/format/Columnar.html, "Encapsulated message
format"): 0xFFFFFFFF, int32 size of the metadata, the metadata as a flatbuffer (format/Message.fbs), the body.
"""

from __future__ import annotations

import os
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import Arrays, Field, field_of, unique_names
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import RandomAccessFile, absolute_path
from trainwright.datasets.formats.scanned_files import FileSource, FileSurvey, GroupLocation, RecordRange, table_arrays

_MAGIC, _FEATHER_1 = b"ARROW1\0\0", b"FEA1"
_CONTINUATION = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_LONGEST_METADATA = 64 << 20


class _Message(NamedTuple):
    kind: int
    start: int
    stop: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class _ArrowFormat:
    """Arrow IPC files and streams, compressed bodies and dictionaries included."""

    name = "Arrow"
    call = "arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Walk over the messages; no body is read but dictionaries'."""
        if not data.size_bytes:
            raise _damaged_file_error("it is empty", data.file)
        pieces: list[RecordRange] = []
        head = 0
        for message in _messages(data):
            if message.kind == _BATCH:
                pieces.append(RecordRange(message.start, message.stop, message.rows))
            elif pieces:
                raise DataError(
                    "a dictionary or schema comes after the first record batch, so no batch can be read alone",
                    where=data.file,
                    remedy="write the file with one dictionary a column (unify_dictionaries=True), or as parquet",
                )
            else:
                head = message.stop
        schema = _schema(data.read(0, head), data.file)
        return FileSurvey(
            pieces=tuple(piece for piece in pieces if piece.rows),
            traits=dict(zip(unique_names(schema.names, data.file), schema.types, strict=True)),
        )

    def merge(self, one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
        """Types must be the same."""
        return one if one == other else None

    def field(self, trait: pa.DataType) -> Field:
        """What arrays of a column look like."""
        return field_of(trait)

    def pack(self, trait: pa.DataType) -> str:
        """An Arrow IPC schema in base64."""
        return b64encode(pa.schema([("", trait)]).serialize()).decode()

    def unpack(self, stored: Any) -> pa.DataType:
        """The type of the only column."""
        return pa.ipc.read_schema(pa.py_buffer(b64decode(stored, validate=True))).types[0]

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, pa.DataType], place: GroupLocation) -> Arrays:
        """Columns of one record batch, which is checked in full: a damaged one must not be followed into memory."""
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


def _messages(data: RandomAccessFile) -> Iterator[_Message]:
    """All messages of a file or stream. Raises DataError where one is not whole."""
    start = data.read(0, min(len(_MAGIC), data.size_bytes))
    if start.startswith(_FEATHER_1):
        raise DataError(
            "the file is Feather version 1", where=data.file, remedy="write it anew: pyarrow.feather.write_feather"
        )
    at = len(_MAGIC) if start == _MAGIC else 0
    if at and data.read(max(data.size_bytes - 6, at), data.size_bytes) != _MAGIC[:6]:
        raise _damaged_file_error("the file has no end", data.file)
    while at + 8 <= data.size_bytes:
        prefix = data.read(at, at + 8)
        if prefix[:4] != _CONTINUATION:
            raise _damaged_file_error(f"no message begins at byte {at}", data.file)
        size = int.from_bytes(prefix[4:], "little", signed=True)
        if size == 0:
            return
        if not 0 < size <= _LONGEST_METADATA or at + 8 + size > data.size_bytes:
            raise _damaged_file_error(f"the message at byte {at} is not whole", data.file)
        try:
            kind, body_bytes, rows = _metadata(data.read(at + 8, at + 8 + size))
        except (struct.error, ValueError) as error:
            raise _damaged_file_error(f"the message at byte {at} cannot be read: {error}", data.file) from error
        stop = at + 8 + size + body_bytes
        if stop > data.size_bytes:
            raise _damaged_file_error(
                f"the message at byte {at} needs {stop} bytes and there are {data.size_bytes}", data.file
            )
        yield _Message(kind, at, stop, rows)
        at = stop
    if at != data.size_bytes or at == len(start):
        raise _damaged_file_error(f"{data.size_bytes - at} bytes are left after the last message", data.file)


def _metadata(buffer: bytes) -> tuple[int, int, int]:
    """Type of the header, size of the body and, for a record batch, its rows, from a Message flatbuffer."""
    table = _integer("<I", buffer, 0)
    kind = _integer("<B", buffer, _flatbuffer_field(buffer, table, 1))
    body_bytes = _integer("<q", buffer, _flatbuffer_field(buffer, table, 3))
    if kind not in (_SCHEMA, _DICTIONARY, _BATCH):
        raise ValueError(f"header of type {kind}")
    rows = 0
    if kind == _BATCH:
        header = _flatbuffer_field(buffer, table, 2)
        batch = (header or 0) + _integer("<I", buffer, header)
        rows = _integer("<q", buffer, _flatbuffer_field(buffer, batch, 0))
    if body_bytes < 0 or rows < 0:
        raise ValueError("a negative size")
    return kind, body_bytes, rows


def _flatbuffer_field(buffer: bytes, table: int, field: int) -> int | None:
    """Where a field of a flatbuffer's table lies; None where it has its default, 0."""
    vtable = table - _integer("<i", buffer, table)
    if vtable < 0 or 4 + 2 * field >= _integer("<H", buffer, vtable):
        return None
    offset = _integer("<H", buffer, vtable + 4 + 2 * field)
    return table + offset if offset else None


def _integer(form: str, buffer: bytes, at: int | None) -> int:
    return 0 if at is None else int(struct.unpack_from(form, buffer, at)[0])


def _schema(head: bytes, file: str) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(_stream_of(head)))
    except (OSError, pa.ArrowException) as error:
        raise _damaged_file_error(f"its schema cannot be read: {error}", file) from error


def _stream_of(head: bytes) -> bytes:
    """A file is a stream between a magic word and a footer."""
    return head.removeprefix(_MAGIC)


def _damaged_file_error(how: str, where: str) -> DataError:
    return DataError(f"the Arrow data is damaged: {how}", where=where, remedy="write the file anew, or leave it out")


def arrow(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Rows of Arrow IPC files, Feather files (version 2) and IPC streams; a group is a record batch.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `abfs://`).
        columns: read only these; by default all.
    """
    names = None if columns is None else tuple(columns)
    return Dataset(source=FileSource(path=absolute_path(path), format=_ArrowFormat(), columns=names))
