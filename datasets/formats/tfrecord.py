"""TFRecord as a source: tf.train.Example in checked frames, read group by group without TensorFlow.

A frame (tensorflow/core/lib/io/record_writer.h): length, uint64; masked CRC-32C of the length, uint32; the data; masked
CRC-32C of the data, uint32; all little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.arrow_columns import Arrays, Field
from trainwright.datasets.formats.byte_ranges import Ranges
from trainwright.datasets.formats.crc32c import crc32c, masked
from trainwright.datasets.formats.paths import absolute
from trainwright.datasets.formats.record_boundaries import Offsets, whole_records
from trainwright.datasets.formats.scanned_files import FileSource, Piece, Place, Survey, null_error
from trainwright.datasets.formats.tf_example import Feature, example, stacked

_LENGTH = struct.Struct("<Q")
_HEADER, _FOOTER = 12, 4


class FeatureTrait(NamedTuple):
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
class RecordFormat:
    """TFRecord files of tf.train.Example. Lists of one value are scalars; of one length, of fixed shape."""

    name = "TFRecord"
    call = "tfrecord"
    suffixes = (".tfrecord", ".tfrecords")

    def survey(self, data: Ranges) -> Survey:
        """Walk over the frames, check their sums, and find what each feature is in all rows."""
        traits: dict[str, FeatureTrait] = {}
        pieces: list[Piece] = []
        rows = 0
        for offset, body in whole_records(data, 0, frame_ends):
            place = Place(file=data.file, group=len(pieces), row=rows)
            examples = _examples(body, None, place)
            for row, features in enumerate(examples):
                for name, feature in features.items():
                    traits[name] = self._met(traits.get(name), feature, place.at(row, name))
            pieces.append(Piece(offset, offset + len(body), len(examples)))
            rows += len(examples)
        return Survey(pieces=tuple(pieces), traits=traits)

    def merge(self, one: FeatureTrait, other: FeatureTrait) -> FeatureTrait | None:
        """Of the same kind, of one length where both have it."""
        if one.kind != other.kind:
            return None
        return one if one.length == other.length else FeatureTrait(one.kind, None)

    def field(self, trait: FeatureTrait) -> Field:
        """What arrays of a column look like; a list whose length differs is an object."""
        listed = trait.length is None or trait.length == 0
        plain = trait.kind == "bytes" or listed
        shape = () if listed or trait.length == 1 else (trait.length or 0,)
        return Field(np.dtype(object if plain else trait.kind), shape)

    def pack(self, trait: FeatureTrait) -> list[Any]:
        """Kind and length."""
        return [*trait]

    def unpack(self, stored: Any) -> FeatureTrait:
        """From kind and length."""
        kind, length = stored
        return FeatureTrait(str(kind), None if length is None else int(length))

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, FeatureTrait], place: Place) -> Arrays:
        """Columns of one group."""
        examples = _examples(body, traits, place)
        return {name: self._column(examples, name, trait, place) for name, trait in traits.items()}

    def _met(self, known: FeatureTrait | None, feature: Feature, where: str) -> FeatureTrait:
        found = FeatureTrait(feature.kind, feature.length())
        merged = self.merge(known, found) if known is not None else found
        if merged is None:
            raise DataError(
                f"the feature is {feature.kind} here and {known and known.kind} in the rows before",
                where=where,
                remedy="write every feature with one type",
            )
        return merged

    def _column(
        self, examples: list[dict[str, Feature]], name: str, trait: FeatureTrait, place: Place
    ) -> npt.NDArray[Any]:
        features: list[Feature] = []
        for row, found in enumerate(examples):
            if name not in found:
                raise null_error(f"the record has no feature {name!r}", place.at(row, name))
            features.append(found[name])
        field = self.field(trait)
        if trait.length and trait.kind != "bytes" and all(feature.kind == trait.kind for feature in features):
            together = stacked(features, trait.length)
            if together is not None:
                return together.reshape(-1, *field.shape)
        column = np.empty((len(features), *field.shape), field.dtype)
        for row, feature in enumerate(features):
            try:
                column[row] = _values(feature, trait)
            except ValueError as error:
                raise _damaged(error, place.at(row, name)) from error
        return column


def _values(feature: Feature, trait: FeatureTrait) -> Any:
    """What a row of a column holds. Raises ValueError where it is not what it was in the first pass."""
    values: Any = feature.parts if feature.kind == "bytes" else feature.numbers()
    if feature.kind != trait.kind or trait.length not in (None, len(values)):
        raise ValueError(f"{len(values)} values of {feature.kind} where all rows had {trait}")
    return values[0] if trait.length == 1 else values


def frame_ends(data: bytes, last: bool) -> Offsets:
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


def _examples(body: bytes, names: Mapping[str, FeatureTrait] | None, place: Place) -> list[dict[str, Feature]]:
    """Features of each record, its sums checked."""
    starts, stops = _frames(body, place)
    examples = []
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        try:
            examples.append(example(body, start, stop, names))
        except ValueError as error:
            raise DataError(
                f"the record is no tf.train.Example: {error}",
                where=place.at(row),
                remedy="write tf.train.Example, or convert the file to parquet with TensorFlow",
            ) from error
    return examples


def _frames(body: bytes, place: Place) -> tuple[Offsets, Offsets]:
    """Where the data of each frame starts and stops. Raises DataError for the first whose sums are not right."""
    ends = frame_ends(body, True)
    heads = np.append(0, ends[:-1]).astype(np.int64)
    starts, stops = heads + _HEADER, ends - _FOOTER
    wrong = masked(crc32c(body, heads, heads + _LENGTH.size)) != _words(body, heads + _LENGTH.size)
    if not wrong.any():
        wrong = masked(crc32c(body, starts, stops)) != _words(body, stops)
    if wrong.any() or starts.size == 0 or ends[-1] != len(body):
        row = int(np.argmax(wrong)) if wrong.any() else len(ends)
        raise _damaged("its CRC-32C is wrong", place.at(row))
    return starts, stops


def _words(body: bytes, places: Offsets) -> npt.NDArray[np.uint32]:
    octets = np.frombuffer(body, np.uint8)
    words: npt.NDArray[np.uint32] = octets[places[:, None] + np.arange(4)].view("<u4")[:, 0]
    return words


def _damaged(how: object, where: str) -> DataError:
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
    return Dataset(source=FileSource(path=absolute(path), format=RecordFormat(), columns=names))
