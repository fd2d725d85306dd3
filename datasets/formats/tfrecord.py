"""TFRecord files of tf.train.Example as a data source; TensorFlow is not needed.

Files are read group by group and every checksum is verified. The messages (tensorflow/core/example/example.proto and
feature.proto) are declared here and parsed by the protobuf package.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from trainwright.core.errors import DataError
from trainwright.core.tfrecord_framing import message_class, record_ends, unframe
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
    """TFRecord files of tf.train.Example. Lists of one value are scalars; lists of one length have a fixed shape."""

    name = "TFRecord"
    call = "tfrecord"
    suffixes = (".tfrecord", ".tfrecords")

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Read all records, verify their checksums, and find what each feature is in all rows."""
        traits: dict[str, _FeatureTrait] = {}
        pieces: list[RecordRange] = []
        rows = 0
        for offset, body in whole_records(data, 0, _frame_ends):
            place = GroupLocation(file=data.file, group=len(pieces), row=rows, offset=offset)
            records = _records(body, place)
            for row, features in enumerate(records):
                for name, feature in features.items():
                    found = _trait(feature)
                    if found is not None and found != traits.get(name):
                        traits[name] = self._widened(traits.get(name), found, place.at(row, name))
            pieces.append(RecordRange(offset, offset + len(body), len(records)))
            rows += len(records)
        return FileSurvey(pieces=tuple(pieces), traits=traits)

    def merge(self, one: _FeatureTrait, other: _FeatureTrait) -> _FeatureTrait | None:
        """Return the trait of both: of one kind, and of one length where both have the same."""
        if one.kind != other.kind:
            return None
        return one if one.length == other.length else _FeatureTrait(one.kind, None)

    def field(self, trait: _FeatureTrait) -> Field:
        """Return dtype and shape of the column; lists of different lengths are objects."""
        listed = trait.length is None or trait.length == 0
        plain = trait.kind == "bytes" or listed
        shape = () if listed or trait.length == 1 else (trait.length or 0,)
        return Field(np.dtype(object if plain else trait.kind), shape)

    def pack(self, trait: _FeatureTrait) -> list[Any]:
        """Return kind and length."""
        return [*trait]

    def unpack(self, stored: Any) -> _FeatureTrait:
        """Return the trait of a kind and a length."""
        kind, length = stored
        return _FeatureTrait(str(kind), None if length is None else int(length))

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, _FeatureTrait], place: GroupLocation) -> Arrays:
        """Return the columns of one group."""
        records = _records(body, place)
        return {name: self._column(records, name, trait, place) for name, trait in traits.items()}

    def _widened(self, known: _FeatureTrait | None, found: _FeatureTrait, where: str) -> _FeatureTrait:
        merged = self.merge(known, found) if known is not None else found
        if merged is None:
            raise DataError(
                f"the feature is {found.kind} here and {known and known.kind} in the rows before",
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
                raise _changed_feature_error(feature, trait, place.at(row, name))
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
    """Return the values of number lists of one length: (lists * length,).

    Args:
        lists: messages FloatList or Int64List.
        kind: float32 or int64.
        length: of each list.
    """
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
        f"the record is no tf.train.Example: {problem}",
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


def _changed_feature_error(feature: Any, trait: _FeatureTrait, where: str) -> DataError:
    kind, length = _trait(feature) or trait
    return DataError(
        f"the file changed: {length} values of {kind} where all rows had {trait}",
        where=where,
        remedy="keep the data as it is while a run reads it",
    )


def tfrecord(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Read rows of TFRecord files of tf.train.Example; TensorFlow is not needed.

    A feature with one value in every row becomes a scalar; with the same number of values in every row, an array of
    that length; otherwise each row is an object: an array, or a list of bytes. Numbers are int64 and float32. All
    checksums are verified.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `abfs://`).
        columns: read only these features; by default all.
    """
    names = None if columns is None else tuple(columns)
    return Dataset(source=FileSource(path=absolute_path(path), format=_TFRecordFormat(), columns=names))
