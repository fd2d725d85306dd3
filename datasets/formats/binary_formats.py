"""Arrow IPC, TFRecord and WebDataset files as data sources.

The first pass reads Arrow files once: pyarrow says neither where the record batches of a stream are nor how many rows
they have without reading them. A row group is a record batch. Of TFRecord files every checksum is verified; TensorFlow
is not needed: the messages (tensorflow/core/example/example.proto and feature.proto) are declared here and parsed by
the protobuf package. Of WebDataset shards only the tar headers are read.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.message import DecodeError

from trainwright.core.errors import DataError
from trainwright.core.tfrecord_framing import message_class, record_ends, unframe
from trainwright.datasets.data_source import Arrays, Field, field_of, unique_names
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import RandomAccessFile, changed_error
from trainwright.datasets.formats.scanned_files import (
    FileFormat,
    FileSurvey,
    GroupLocation,
    Offsets,
    RecordRange,
    file_source,
    group_boundaries,
    null_error,
    survey_ranges,
    table_arrays,
    whole_records,
)

_MAGIC, _FEATHER_1 = b"ARROW1\0\0", b"FEA1"  # a file is a stream between a magic word and a footer
_PADDING_BYTES = 64  # that a writer may leave after the last message


@dataclass(frozen=True, kw_only=True)
class _ArrowFormat(FileFormat):
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

    def field(self, trait: pa.DataType) -> Field:
        return field_of(trait)

    def pack(self, trait: pa.DataType) -> str:
        """An Arrow IPC schema in base64."""
        return b64encode(pa.schema([("", trait)]).serialize()).decode()

    def unpack(self, stored: Any) -> pa.DataType:
        return pa.ipc.read_schema(pa.py_buffer(b64decode(stored, validate=True))).types[0]

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, pa.DataType], place: GroupLocation) -> Arrays:
        """Return the columns of one record batch, after full validation: damaged offsets must not reach memory."""
        schema = _schema(head, place.file)
        options = pa.ipc.IpcReadOptions(
            included_fields=[schema.get_field_index(name) for name in traits], use_threads=False
        )
        try:
            with pa.ipc.open_stream(pa.py_buffer(head.removeprefix(_MAGIC) + body), options=options) as reader:
                table = reader.read_all()
            table.validate(full=True)
        except (OSError, pa.ArrowException) as error:
            raise _damaged_file_error(str(error), place.at()) from error
        for name, kind in traits.items():
            if name not in table.column_names or table.schema.field(name).type != kind:
                raise _damaged_file_error(f"it has no column of type {kind}", place.at(column=name))
        return table_arrays(table, tuple(traits), place)


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
    stream = _FileStream(data, start)
    reader = pa.ipc.MessageReader.open_stream(pa.PythonFile(stream, "r"))
    reader.read_next_message()  # the schema
    end = stream.tell()
    for message in reader:
        if message.type == "record batch":
            break
        end = stream.tell()
    return end


def _record_batches(data: RandomAccessFile, start: int, first: int) -> list[RecordRange]:
    """Return the bytes and rows of each record batch."""
    stream, end = _FileStream(data, start), first
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
        raise _damaged_file_error(f"{unread_bytes} bytes at byte {stream.tell()} are not a message", data.file)
    return pieces


def _schema(head: bytes, file: str) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(head.removeprefix(_MAGIC)))
    except (OSError, pa.ArrowException) as error:
        raise _damaged_file_error(f"its schema cannot be read: {error}", file) from error


def _damaged_file_error(how: str, where: str) -> DataError:
    return DataError(f"the Arrow data is damaged: {how}", where=where, remedy="write the file again, or leave it out")


def arrow(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Read rows of Arrow IPC files, Feather files (version 2) and IPC streams; a group is a record batch.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `az://`).
        columns: read only these; by default all.
    """
    return Dataset(source=file_source(path, _ArrowFormat(), columns))


class _FileStream(io.RawIOBase):
    """The content of a file as a binary stream, from byte `start` on."""

    def __init__(self, data: RandomAccessFile, start: int = 0) -> None:
        self._data, self._position = data, start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._data.size_bytes}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._data.size_bytes)
        content = self._data.read(self._position, stop) if stop > self._position else b""
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


# --- TFRecord files of tf.train.Example -------------------------------------------------------------------------------


_KINDS = {"bytes_list": "bytes", "float_list": "float32", "int64_list": "int64"}  # by field of Feature
_FIELDS = {kind: field for field, kind in _KINDS.items()}
_SCHEMA = {
    "BytesList": {"value": (1, "repeated bytes")},
    "FloatList": {"value": (1, "repeated float")},
    "Int64List": {"value": (1, "repeated int64")},
    "Feature": {
        "bytes_list": (1, "oneof BytesList"),
        "float_list": (2, "oneof FloatList"),
        "int64_list": (3, "oneof Int64List"),
    },
    "Entry": {"key": (1, "string"), "value": (2, "Feature")},
    "Features": {"feature": (1, "repeated Entry")},  # on the wire the same as map<string, Feature>
    "FeatureLists": {},
    # A SequenceExample has the same first field, and is recognised by the second.
    "Example": {"features": (1, "Features"), "feature_lists": (2, "FeatureLists")},
}
_Features = Mapping[str, Any]
"""Messages `Feature` by name."""


class _FeatureTrait(NamedTuple):
    """Kind and length of a feature in all rows."""

    kind: str  # bytes, float32 or int64
    length: int | None  # values in a row; None if rows differ

    def __str__(self) -> str:
        return self.kind if self.length == 1 else f"list of {self.length or ''} {self.kind}".replace("  ", " ")


@dataclass(frozen=True, kw_only=True)
class _TFRecordFormat(FileFormat):
    """TFRecord files of tf.train.Example. Lists of one value are scalars; lists of one length have a fixed shape."""

    name = "TFRecord"
    call = "tfrecord"
    suffixes = (".tfrecord", ".tfrecords")

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Read all records, verify their checksums, and determine the trait of each feature."""
        traits: dict[str, _FeatureTrait] = {}

        def count(body: bytes, place: GroupLocation) -> int:
            records = _records(body, place)
            for row, features in enumerate(records):
                for name, feature in features.items():
                    trait = _trait(feature)
                    if trait is not None and trait != traits.get(name):
                        traits[name] = self._widened(traits.get(name), trait, place.at(row, name))
            return len(records)

        return FileSurvey(pieces=survey_ranges(data.file, whole_records(data, 0, _frame_ends), count), traits=traits)

    def merge(self, one: _FeatureTrait, other: _FeatureTrait) -> _FeatureTrait | None:
        """Return the common trait of two with one kind; its length is None if they differ in length."""
        if one.kind != other.kind:
            return None
        return one if one.length == other.length else _FeatureTrait(one.kind, None)

    def field(self, trait: _FeatureTrait) -> Field:
        """Return dtype and shape of the column; lists of different lengths are objects."""
        is_list = trait.length is None or trait.length == 0
        plain = trait.kind == "bytes" or is_list
        shape = () if is_list or trait.length == 1 else (trait.length or 0,)
        return Field(np.dtype(object if plain else trait.kind), shape)

    def pack(self, trait: _FeatureTrait) -> list[Any]:
        return [*trait]

    def unpack(self, stored: Any) -> _FeatureTrait:
        kind, length = stored
        return _FeatureTrait(str(kind), None if length is None else int(length))

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, _FeatureTrait], place: GroupLocation) -> Arrays:
        records = _records(body, place)
        return {name: self._column(records, name, trait, place) for name, trait in traits.items()}

    def _widened(self, old: _FeatureTrait | None, new: _FeatureTrait, where: str) -> _FeatureTrait:
        merged = self.merge(old, new) if old is not None else new
        if merged is None:
            raise DataError(
                f"the feature is {new.kind} here and {old and old.kind} in the rows before",
                where=where,
                remedy="write every feature with one type",
            )
        return merged

    def _column(
        self, records: list[_Features], name: str, trait: _FeatureTrait, place: GroupLocation
    ) -> npt.NDArray[Any]:
        kind_field, field = _FIELDS[trait.kind], self.field(trait)
        lists = []
        for row, features in enumerate(records):
            feature = features.get(name)
            if feature is None or feature.WhichOneof("kind") is None:
                raise null_error(f"the record has no feature {name!r}", place.at(row, name))
            values = getattr(feature, kind_field)
            length = len(values.value)
            if trait.length not in (None, length) or (not length and _trait(feature) != (trait.kind, 0)):
                actual = _trait(feature) or trait
                how = f"{actual.length} values of {actual.kind} where all rows had {trait}"
                raise changed_error(how, place.at(row, name))
            lists.append(values)
        if field.dtype != np.dtype(object):
            return _numbers(lists, trait.kind, trait.length or 0).reshape(-1, *field.shape)
        column = np.empty((len(lists), *field.shape), object)
        for row, values in enumerate(lists):
            if trait.kind != "bytes":
                column[row] = _numbers([values], trait.kind, len(values.value))
            else:
                column[row] = values.value[0] if trait.length == 1 else [*values.value]
        return column


def _trait(feature: Any) -> _FeatureTrait | None:
    """Return kind and length of one feature; None for one without a list."""
    field = feature.WhichOneof("kind")
    return None if field is None else _FeatureTrait(_KINDS[field], len(getattr(feature, field).value))


def _numbers(lists: Sequence[Any], kind: str, length: int) -> npt.NDArray[Any]:
    """Return the values of number lists of one length: (lists * length,)."""
    if kind == "float32" and length > 1:  # a serialized FloatList ends with its values as an array
        packed = b"".join(values.SerializeToString()[-4 * length :] for values in lists)
        return np.frombuffer(packed, "<f4").astype(np.float32)
    return np.fromiter(chain.from_iterable(values.value for values in lists), kind, len(lists) * length)


def _frame_ends(data: bytes, last: bool) -> Offsets:
    return np.fromiter(record_ends(data), np.int64)


def _records(body: bytes, place: GroupLocation) -> list[_Features]:
    """Return the features of each record of a group, with its checksums verified."""
    parse = _example_class().FromString
    records: list[_Features] = []
    stop = 0
    for row, (start, stop) in enumerate(pairwise(chain((0,), record_ends(body)))):
        data = unframe(body[start:stop])
        if data is None:
            raise _damaged_record_error(place, row, start)
        try:
            example = parse(data)
        except DecodeError as error:
            raise _no_example_error("it cannot be parsed", place.at(row)) from error
        if example.HasField("feature_lists"):
            raise _no_example_error("it looks like a SequenceExample, which has no one row", place.at(row))
        records.append({entry.key: entry.value for entry in example.features.feature})
    if not records or stop != len(body):
        raise _damaged_record_error(place, len(records), stop)
    return records


@cache
def _example_class() -> Any:
    return message_class("Example", _SCHEMA)


def _no_example_error(problem: str, where: str) -> DataError:
    return DataError(
        f"the record is not a tf.train.Example: {problem}",
        where=where,
        remedy="write tf.train.Example, or convert the file to parquet with TensorFlow",
    )


def _damaged_record_error(place: GroupLocation, row: int, start: int) -> DataError:
    """Return the error for a record; `start` is its first byte within the group."""
    return DataError(
        f"the record at byte {place.offset + start} is damaged: its CRC-32C is wrong",
        where=place.at(row),
        remedy="write the file again, or leave it out",
    )


def tfrecord(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Read rows of TFRecord files of tf.train.Example; TensorFlow is not needed.

    A feature with one value in every row becomes a scalar; with the same number of values in every row, an array of
    that length; otherwise each row is an object: an array, or a list of bytes. Numbers are int64 and float32. All
    checksums are verified.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `az://`).
        columns: read only these features; by default all.
    """
    return Dataset(source=file_source(path, _TFRecordFormat(), columns))


# --- WebDataset: tar shards in which neighbouring members of one key make a sample ------------------------------------


_KEY = "__key__"
_NAME = re.compile(r"((?:.*/|)[^./][^./]*)\.([^/]+)")
_BLOCK = tarfile.BLOCKSIZE
_BUFFER_BYTES = 4 << 20
_DECODED = {"txt": "text", "cls": "class", "json": "json"}  # by the part of an extension behind its last dot


class _Sample(NamedTuple):
    """Neighbouring members of one key: start and size of each by extension, and the byte range of all."""

    key: str
    members: dict[str, tuple[int, int]]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class _TarFormat(FileFormat):
    """Tar files as WebDataset writes them. The key of a member is its path up to the first dot of its name."""

    name = "WebDataset"
    call = "webdataset"
    suffixes = (".tar",)

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Walk over the headers."""
        traits: dict[str, str] = {_KEY: "text"}
        starts: list[int] = []
        stops: list[int] = []
        with io.BufferedReader(_FileStream(data), _BUFFER_BYTES) as stream:
            for sample in _samples(stream, data.file, is_complete=True):
                starts.append(sample.start)
                stops.append(sample.stop)
                traits.update((name, _DECODED.get(name.rpartition(".")[2], "bytes")) for name in sample.members)
        cuts = group_boundaries(np.array(stops, dtype=np.int64) - min(starts, default=0), last=True)
        pieces = [RecordRange(starts[low], stops[high - 1], high - low) for low, high in pairwise([0, *cuts])]
        return FileSurvey(pieces=tuple(pieces), traits=traits)

    def field(self, trait: str) -> Field:
        return Field(np.dtype(np.int64 if trait == "class" else object), ())

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, str], place: GroupLocation) -> Arrays:
        samples = list(_samples(io.BytesIO(body), place.at(), is_complete=False))
        return {name: _column(samples, body, name, trait, place) for name, trait in traits.items()}


def _column(samples: list[_Sample], body: bytes, name: str, trait: str, place: GroupLocation) -> npt.NDArray[Any]:
    values: list[Any] = []
    for row, sample in enumerate(samples):
        if name == _KEY:
            values.append(sample.key)
            continue
        if name not in sample.members:
            raise DataError(
                f"the sample {sample.key!r} has no {name!r}",
                where=place.at(row, name),
                remedy="let the members of a sample stand together (tar --sort=name), or read other columns",
            )
        start, size = sample.members[name]
        try:
            values.append(_value(body[start : start + size], trait))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"the {name!r} of sample {sample.key!r} is no {trait}: {error}",
                where=place.at(row, name),
                remedy="write it again, or read other columns",
            ) from error
    if trait == "class":
        return np.array(values, dtype=np.int64)
    return np.fromiter(values, dtype=object, count=len(values))


def _value(content: bytes, trait: str) -> Any:
    if trait == "text":
        return content.decode("utf-8")
    if trait == "json":
        return json.loads(content)
    if trait == "class":
        value = int(content)
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{value} has more than 64 bits")
        return value
    return content


def _samples(stream: IO[bytes], where: str, is_complete: bool) -> Iterator[_Sample]:
    """Samples in order. Raises DataError for a damaged header, and for an archive without an end if `is_complete`."""
    sample: _Sample | None = None
    for member in _members(stream, where, is_complete):
        match = _NAME.fullmatch(member.name)
        if match is None or not member.isreg():
            continue
        key, extension = match.group(1), match.group(2).lower()
        if sample is not None and key != sample.key:
            yield sample
            sample = None
        sample = sample or _Sample(key, {}, member.offset, member.offset)
        if extension in sample.members:
            raise DataError(
                f"the sample {key!r} has two members {extension!r}", where=where, remedy="give every sample its own key"
            )
        sample.members[extension] = (member.offset_data, member.size)
        sample = sample._replace(stop=member.offset_data + -(-member.size // _BLOCK) * _BLOCK)
    if sample is not None:
        yield sample


def _members(stream: IO[bytes], where: str, is_complete: bool) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header
                yield member
            stream.seek(archive.offset)
            end = stream.read(_BLOCK)
    except tarfile.TarError as error:
        raise _damaged_archive_error(str(error), where) from error
    if end.strip(b"\0"):
        raise _damaged_archive_error(f"no header stands at byte {archive.offset}", where)
    if is_complete and not end:
        raise _damaged_archive_error("it has no end: it may be cut off", where)


def _damaged_archive_error(how: str, where: str) -> DataError:
    return DataError(f"the archive is damaged: {how}", where=where, remedy="write the shard again, or leave it out")


def webdataset(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Rows of tar shards as WebDataset writes them: the members of one key are a row, each extension is a column.

    `.txt` becomes text, `.cls` int64, `.json` Python objects; all else stays bytes, such as images for `decode_image`.
    The key is the column `__key__`.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `az://`).
        columns: read only these; by default all.
    """
    return Dataset(source=file_source(path, _TarFormat(), columns))
