"""TFRecord as a source: tf.train.Example in checked frames, read group by group without TensorFlow.

A frame (tensorflow/core/lib/io/record_writer.h): length, uint64; masked CRC-32C of the length, uint32; the data; masked
CRC-32C of the data, uint32; all little-endian.

The messages (tensorflow/core/example/example.proto and feature.proto):

    Example   { Features features = 1; }
    Features  { map<string, Feature> feature = 1; }     an entry has the key as field 1 and the value as field 2
    Feature   { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }
    BytesList { repeated bytes value = 1; }     FloatList, Int64List: repeated and packed, or one by one

The wire format: https://protobuf.dev/programming-guides/encoding.

Without its first and last inversion the CRC is linear over GF(2), and zeros in front do not change it. So records are
filled up in front to whole blocks, the blocks' CRCs are sums (xor) over tables, and neighbours are joined in pairs:
crc(a + b) = shift(crc(a), len(b)) xor crc(b), where `shift`, feeding zeros, is linear too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import Arrays, Field
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import RandomAccessFile, absolute_path
from trainwright.datasets.formats.scanned_files import (
    FileSource,
    FileSurvey,
    GroupLocation,
    Offsets,
    RecordRange,
    null_error,
    whole_records,
)

_LENGTH = struct.Struct("<Q")
_HEADER, _FOOTER = 12, 4


class _FeatureTrait(NamedTuple):
    """What a feature is in every row.

    Attributes:
        kind: bytes, float32 or int64.
        length: how many values a row has; None where it differs between rows.
    """

    kind: str
    length: int | None

    def __str__(self) -> str:
        return self.kind if self.length == 1 else f"list of {self.length or ''} {self.kind}".replace("  ", " ")


@dataclass(frozen=True, kw_only=True)
class _TFRecordFormat:
    """TFRecord files of tf.train.Example. Lists of one value are scalars; of one length, of fixed shape."""

    name = "TFRecord"
    call = "tfrecord"
    suffixes = (".tfrecord", ".tfrecords")

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Walk over the frames, check their sums, and find what each feature is in all rows."""
        traits: dict[str, _FeatureTrait] = {}
        pieces: list[RecordRange] = []
        rows = 0
        for offset, body in whole_records(data, 0, _frame_ends):
            place = GroupLocation(file=data.file, group=len(pieces), row=rows)
            examples = _examples(body, None, place)
            for row, features in enumerate(examples):
                for name, feature in features.items():
                    traits[name] = self._met(traits.get(name), feature, place.at(row, name))
            pieces.append(RecordRange(offset, offset + len(body), len(examples)))
            rows += len(examples)
        return FileSurvey(pieces=tuple(pieces), traits=traits)

    def merge(self, one: _FeatureTrait, other: _FeatureTrait) -> _FeatureTrait | None:
        """Of the same kind, of one length where both have it."""
        if one.kind != other.kind:
            return None
        return one if one.length == other.length else _FeatureTrait(one.kind, None)

    def field(self, trait: _FeatureTrait) -> Field:
        """What arrays of a column look like; a list whose length differs is an object."""
        listed = trait.length is None or trait.length == 0
        plain = trait.kind == "bytes" or listed
        shape = () if listed or trait.length == 1 else (trait.length or 0,)
        return Field(np.dtype(object if plain else trait.kind), shape)

    def pack(self, trait: _FeatureTrait) -> list[Any]:
        """Kind and length."""
        return [*trait]

    def unpack(self, stored: Any) -> _FeatureTrait:
        """From kind and length."""
        kind, length = stored
        return _FeatureTrait(str(kind), None if length is None else int(length))

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, _FeatureTrait], place: GroupLocation) -> Arrays:
        """Columns of one group."""
        examples = _examples(body, traits, place)
        return {name: self._column(examples, name, trait, place) for name, trait in traits.items()}

    def _met(self, known: _FeatureTrait | None, feature: Feature, where: str) -> _FeatureTrait:
        found = _FeatureTrait(feature.kind, feature.length())
        merged = self.merge(known, found) if known is not None else found
        if merged is None:
            raise DataError(
                f"the feature is {feature.kind} here and {known and known.kind} in the rows before",
                where=where,
                remedy="write every feature with one type",
            )
        return merged

    def _column(
        self, examples: list[dict[str, Feature]], name: str, trait: _FeatureTrait, place: GroupLocation
    ) -> npt.NDArray[Any]:
        features: list[Feature] = []
        for row, found in enumerate(examples):
            if name not in found:
                raise null_error(f"the record has no feature {name!r}", place.at(row, name))
            features.append(found[name])
        field = self.field(trait)
        if trait.length and trait.kind != "bytes" and all(feature.kind == trait.kind for feature in features):
            together = _stack_features(features, trait.length)
            if together is not None:
                return together.reshape(-1, *field.shape)
        column = np.empty((len(features), *field.shape), field.dtype)
        for row, feature in enumerate(features):
            try:
                column[row] = _values(feature, trait)
            except ValueError as error:
                raise _damaged_record_error(error, place.at(row, name)) from error
        return column


def _values(feature: Feature, trait: _FeatureTrait) -> Any:
    """What a row of a column holds. Raises ValueError where it is not what it was in the first pass."""
    values: Any = feature.parts if feature.kind == "bytes" else feature.numbers()
    if feature.kind != trait.kind or trait.length not in (None, len(values)):
        raise ValueError(f"{len(values)} values of {feature.kind} where all rows had {trait}")
    return values[0] if trait.length == 1 else values


def _frame_ends(data: bytes, last: bool) -> Offsets:
    """Ends of whole frames by their lengths, which are trusted here: a false one is found by its sum."""
    ends: list[int] = []
    at = 0
    while len(data) - at >= _HEADER:
        after = at + _HEADER + _LENGTH.unpack_from(data, at)[0] + _FOOTER
        if after > len(data):
            break
        ends.append(after)
        at = after
    return np.array(ends, dtype=np.int64)


def _examples(body: bytes, names: Mapping[str, _FeatureTrait] | None, place: GroupLocation) -> list[dict[str, Feature]]:
    """Features of each record, its sums checked."""
    starts, stops = _frames(body, place)
    examples = []
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        try:
            examples.append(parse_example(body, start, stop, names))
        except ValueError as error:
            raise DataError(
                f"the record is no tf.train.Example: {error}",
                where=place.at(row),
                remedy="write tf.train.Example, or convert the file to parquet with TensorFlow",
            ) from error
    return examples


def _frames(body: bytes, place: GroupLocation) -> tuple[Offsets, Offsets]:
    """Where the data of each frame starts and stops. Raises DataError for the first whose sums are not right."""
    ends = _frame_ends(body, True)
    heads = np.append(0, ends[:-1]).astype(np.int64)
    starts, stops = heads + _HEADER, ends - _FOOTER
    wrong = masked_crc(crc32c(body, heads, heads + _LENGTH.size)) != _words(body, heads + _LENGTH.size)
    if not wrong.any():
        wrong = masked_crc(crc32c(body, starts, stops)) != _words(body, stops)
    if wrong.any() or starts.size == 0 or ends[-1] != len(body):
        row = int(np.argmax(wrong)) if wrong.any() else len(ends)
        raise _damaged_record_error("its CRC-32C is wrong", place.at(row))
    return starts, stops


def _words(body: bytes, places: Offsets) -> npt.NDArray[np.uint32]:
    octets = np.frombuffer(body, np.uint8)
    words: npt.NDArray[np.uint32] = octets[places[:, None] + np.arange(4)].view("<u4")[:, 0]
    return words


def _damaged_record_error(how: object, where: str) -> DataError:
    return DataError(f"the record is damaged: {how}", where=where, remedy="write the file anew, or leave it out")


def tfrecord(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Rows of TFRecord files of tf.train.Example; TensorFlow is not needed.

    A feature with one value in every row is a scalar, with as many in every row an array of that length, else an object
    a row: an array, or a list of bytes. Numbers are int64 and float32, bytes stay bytes. All sums are checked.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `abfs://`).
        columns: read only these features; by default all.
    """
    names = None if columns is None else tuple(columns)
    return Dataset(source=FileSource(path=absolute_path(path), format=_TFRecordFormat(), columns=names))


# --- tf.train.Example in protobuf's wire format, read without TensorFlow ----------------------------------------------


_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_FEW = 64
_KINDS = {1: "bytes", 2: "float32", 3: "int64"}
_WIRES = {"bytes": {_SIZED}, "float32": {_SIZED, _FIXED32}, "int64": {_SIZED, _VARINT}}


class Feature(NamedTuple):
    """A feature before its values are decoded.

    Attributes:
        kind: bytes, float32 or int64.
        parts: each a value of bytes; or one or more numbers, packed.
    """

    kind: str
    parts: list[bytes]

    def length(self) -> int:
        """How many values it has."""
        if self.kind == "bytes":
            return len(self.parts)
        packed = self.packed()
        if self.kind == "float32":
            return len(packed) // 4
        return sum(map((0x80).__gt__, packed)) if len(packed) < _FEW else int((_octets(packed) < 0x80).sum())

    def packed(self) -> bytes:
        """All parts of numbers as one."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def numbers(self) -> npt.NDArray[Any]:
        """Values of numbers: (length,) float32 or int64. Raises ValueError for damaged ones."""
        packed = self.packed()
        if self.kind == "int64":
            return _varints(packed)
        if len(packed) % 4:
            raise ValueError(f"{len(packed)} bytes of packed float32")
        return np.frombuffer(packed, "<f4").astype(np.float32)


def _stack_features(features: Sequence[Feature], length: int) -> npt.NDArray[Any] | None:
    """Numbers of features of one kind, decoded together: (features, length) float32 or int64.

    None where one of them has not that length or is damaged.
    """
    parts = [feature.packed() for feature in features]
    sizes = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    packed = b"".join(parts)
    if features[0].kind == "float32":
        whole = bool((sizes == 4 * length).all())
        return np.frombuffer(packed, "<f4").astype(np.float32).reshape(-1, length) if whole else None
    stops = np.cumsum(sizes)
    ends = np.flatnonzero(_octets(packed) < 0x80)
    if len(ends) != len(features) * length or (ends[length - 1 :: length] != stops - 1).any():
        return None
    try:
        return _varints(packed).reshape(-1, length)
    except ValueError:  # read one by one, the damaged one is named
        return None


def parse_example(data: bytes, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Feature]:
    """Features of an Example by name, those of `names` alone where given; one without any list is left out.

    Raises ValueError for bytes that are none.
    """
    features: dict[str, Feature] = {}
    for field, wire, low, high in _fields(data, start, stop):
        if field == 2:
            raise ValueError("it looks like a SequenceExample, which has no one row")
        if (field, wire) != (1, _SIZED):
            raise ValueError(f"field {field} of wire type {wire} in an Example")
        for entry, inner, first, after in _fields(data, low, high):
            if (entry, inner) != (1, _SIZED):
                raise ValueError(f"field {entry} of wire type {inner} in Features")
            name, feature = _entry(data, first, after)
            if feature is not None and (names is None or name in names):
                features[name] = feature
    return features


def _entry(data: bytes, start: int, stop: int) -> tuple[str, Feature | None]:
    name, feature = "", None
    for field, wire, low, high in _fields(data, start, stop):
        if wire != _SIZED or field not in (1, 2):
            raise ValueError(f"field {field} of wire type {wire} in an entry of Features")
        if field == 1:
            name = data[low:high].decode("utf-8")
        else:
            feature = _feature(data, low, high)
    return name, feature


def _feature(data: bytes, start: int, stop: int) -> Feature | None:
    feature: Feature | None = None
    for field, wire, low, high in _fields(data, start, stop):
        if wire != _SIZED or field not in _KINDS:
            raise ValueError(f"field {field} of wire type {wire} in a Feature")
        kind = _KINDS[field]
        parts: list[bytes] = []
        for number, inner, first, after in _fields(data, low, high):
            if number != 1 or inner not in _WIRES[kind]:
                raise ValueError(f"field {number} of wire type {inner} in a list of {kind}")
            parts.append(data[first:after])
        feature = Feature(kind, parts)
    return feature


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type and byte range of each field of a message; of a varint, its own bytes."""
    while at < stop:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(data, at - 1, stop)
        wire = tag & 7
        if wire == _SIZED and at < stop and data[at] < 0x80:
            at += 1
            after = at + data[at - 1]
        elif wire == _SIZED:
            size, at = _varint(data, at, stop)
            after = at + size
        elif wire == _VARINT:
            after = _varint(data, at, stop)[1]
        elif wire in (_FIXED32, _FIXED64):
            after = at + (4 if wire == _FIXED32 else 8)
        else:
            raise ValueError(f"wire type {wire}")
        if after > stop:
            raise ValueError("a field is longer than its message")
        yield tag >> 3, wire, at, after
        at = after


def _varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while at < stop and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number without an end")


def _varints(packed: bytes) -> npt.NDArray[np.int64]:
    """Numbers one after the other, as signed 64-bit: (length,) int64."""
    octets = _octets(packed)
    ends = np.flatnonzero(octets < 0x80)
    if not len(octets):
        return np.empty(0, np.int64)
    starts = np.append(0, ends[:-1] + 1)
    if octets[-1] >= 0x80 or (ends - starts).max() >= 10:
        raise ValueError("a number without an end")
    place = np.arange(len(octets)) - np.repeat(starts, ends - starts + 1)
    bits = (octets & np.uint8(0x7F)).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)


def _octets(packed: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(packed, np.uint8)


# --- CRC-32C (Castagnoli ----------------------------------------------------------------------------------------------


_Words = npt.NDArray[np.uint32]
_Offsets = npt.NDArray[np.int64]

_POLYNOMIAL = 0x82F63B78
_CRC_BLOCK = 64
_BLOCK_BITS = 6
_CRC_BLOCKS = 1 << 14  # looked at together
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes, starts: _Offsets, stops: _Offsets) -> _Words:
    """CRC-32C of data[start:stop] for each pair: (records,) uint32."""
    sizes = stops - starts
    blocks = np.maximum(-(-sizes // _CRC_BLOCK), 1)
    lasts = np.cumsum(blocks)
    behind = np.repeat(lasts, blocks) - 1 - np.arange(lasts[-1] if len(lasts) else 0)  # blocks after each in its record
    high = np.repeat(stops, blocks) - behind * _CRC_BLOCK
    sums = _crc_joined(_block_sums(data, np.repeat(starts, blocks), high), blocks)
    return ~(sums ^ _crc_shifted(np.full(len(sizes), 0xFFFFFFFF, np.uint32), sizes))


def masked_crc(sums: _Words) -> _Words:
    """As TFRecord stores them: rotated right by 15 bits, plus a constant."""
    return ((sums >> np.uint32(15)) | (sums << np.uint32(17))) + np.uint32(_MASK_DELTA)


def _block_sums(data: bytes, starts: _Offsets, stops: _Offsets) -> _Words:
    """Raw CRC of the bytes start..stop, at most _BLOCK; where they are fewer, zeros stand in front."""
    padded = np.frombuffer(bytes(_CRC_BLOCK) + data, np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(padded, _CRC_BLOCK)
    place = np.arange(_CRC_BLOCK)
    tables, columns = _position_tables(), (place * 256).astype(np.uint16)
    sums = np.empty(len(stops), np.uint32)
    for first in range(0, len(stops), _CRC_BLOCKS):
        part = slice(first, first + _CRC_BLOCKS)
        rows = windows[stops[part]]
        short = np.flatnonzero(stops[part] - starts[part] < _CRC_BLOCK)
        sizes = (stops[part] - starts[part])[short]
        rows[short] *= place >= _CRC_BLOCK - sizes[:, None]
        sums[part] = np.bitwise_xor.reduce(tables.take(rows + columns), axis=1)
    return sums


def _crc_joined(sums: _Words, counts: _Offsets) -> _Words:
    """One raw CRC for each record from those of its blocks: neighbours join in pairs, counted from its end."""
    level = _BLOCK_BITS
    while len(sums) > len(counts):
        behind = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(sums))
        left = behind % 2 == 1
        sums = np.where(left, _crc_shift(sums, _shift_tables(level)), sums)
        heads = np.zeros(len(sums), dtype=bool)
        heads[np.cumsum(counts) - counts] = True
        sums = np.bitwise_xor.reduceat(sums, np.flatnonzero(left | heads))
        counts, level = -(-counts // 2), level + 1
    return sums


def _crc_shifted(sums: _Words, sizes: _Offsets) -> _Words:
    """Each raw CRC after as many zero bytes as its size, by powers of two."""
    for level in range(int(sizes.max(initial=0)).bit_length()):
        sums = np.where(sizes >> level & 1, _crc_shift(sums, _shift_tables(level)), sums)
    return sums


def _crc_shift(sums: _Words, tables: _Words) -> _Words:
    low, second, third, high = (sums >> np.uint32(8 * byte) & np.uint32(0xFF) for byte in range(4))
    shifted: _Words = tables[0][low] ^ tables[1][second] ^ tables[2][third] ^ tables[3][high]
    return shifted


@cache
def _shift_tables(level: int) -> _Words:
    """(4, 256): what 2**level zero bytes make of each byte of a raw CRC."""
    if level:
        half = _shift_tables(level - 1)
        return _crc_shift(half, half)
    values = np.arange(256, dtype=np.uint32)
    table = values
    for _ in range(8):
        table = np.where(table & 1, table >> np.uint32(1) ^ np.uint32(_POLYNOMIAL), table >> np.uint32(1))
    return np.stack([table, *(values << np.uint32(8 * byte) for byte in range(3))])


@cache
def _position_tables() -> _Words:
    """(_BLOCK * 256,): raw CRC of a block that is zero but for one byte, by its place and value."""
    tables = [_shift_tables(0)[0]]
    for _ in range(_CRC_BLOCK - 1):
        tables.append(_crc_shift(tables[-1], _shift_tables(0)))
    return np.concatenate(tables[::-1])
