"""TFRecord framing and protobuf messages, shared by the data source `tfrecord` and the TensorBoard writer.

A record (tensorflow/core/lib/io/record_writer.h) is the length as uint64, the masked CRC-32C of the length as uint32,
the data, and the masked CRC-32C of the data as uint32. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_MASK_DELTA = 0xA282EAD8


def frame(data: bytes) -> bytes:
    """Return the record that holds `data`."""
    length = _LENGTH.pack(len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def record_ends(data: bytes) -> Iterator[int]:
    """Yield where each complete record ends. Lengths are not checked here: `unframe` finds a wrong one."""
    end = 0
    while len(data) - end >= _HEADER_BYTES:
        end += _HEADER_BYTES + _LENGTH.unpack_from(data, end)[0] + _FOOTER_BYTES
        if end > len(data):
            return
        yield end


def unframe(record: bytes) -> bytes | None:
    """Return the data of a complete record; None where a checksum is wrong."""
    length, data = record[: _LENGTH.size], record[_HEADER_BYTES:-_FOOTER_BYTES]
    sums = record[_LENGTH.size : _HEADER_BYTES], record[-_FOOTER_BYTES:]
    return data if sums == (_masked_crc(length), _masked_crc(data)) else None


def _masked_crc(data: bytes) -> bytes:
    """Return the CRC-32C as TFRecord stores it: rotated right by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def message_class(root: str, schema: Mapping[str, Mapping[str, tuple[int, str]]]) -> Any:
    """Declare protobuf messages and return the class of one of them.

    They live in a pool of their own, so TensorFlow can register its messages of the same names in the same process.

    Args:
        root: name of the message whose class is returned.
        schema: by message and field: the field's number, and its type as in a .proto file: `bytes`, `repeated int64`,
            the name of another message. `oneof` before a type puts the field into the one oneof of its message, `kind`.
    """
    file = FileDescriptorProto(name=f"{root}.proto", package="trainwright", syntax="proto3")
    for name, fields in schema.items():
        declared = file.message_type.add(name=name)
        for field, (number, declaration) in fields.items():
            rule, _, kind = declaration.rpartition(" ")
            added = declared.field.add(name=field, number=number)
            repeated = rule == "repeated"
            added.label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            if kind in schema:
                added.type, added.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".trainwright.{kind}"
            else:
                added.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
            if rule == "oneof":
                if not declared.oneof_decl:
                    declared.oneof_decl.add(name="kind")
                added.oneof_index = 0
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(f"trainwright.{root}"))
