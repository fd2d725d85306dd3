"""tf.train.Example in protobuf's wire format, read without TensorFlow.

The messages (tensorflow/core/example/example.proto and feature.proto):

    Example   { Features features = 1; }
    Features  { map<string, Feature> feature = 1; }     an entry has the key as field 1 and the value as field 2
    Feature   { oneof { BytesList = 1; FloatList = 2; Int64List = 3; } }
    BytesList { repeated bytes value = 1; }     FloatList, Int64List: repeated and packed, or one by one

The wire format: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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


def stacked(features: Sequence[Feature], length: int) -> npt.NDArray[Any] | None:
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


def example(data: bytes, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Feature]:
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
