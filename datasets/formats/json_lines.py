"""JSON lines as a source: one object a line, one type a column over all files, read group by group."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.arrow_columns import Arrays, Field
from trainwright.datasets.formats.byte_ranges import Ranges
from trainwright.datasets.formats.paths import absolute
from trainwright.datasets.formats.record_boundaries import line_ends, whole_records
from trainwright.datasets.formats.scanned_files import FileSource, Piece, Place, PlainTraits, Survey, null_error
from trainwright.datasets.formats.type_inference import NULL, merge_kinds

_DTYPES = {"bool": np.dtype(np.bool_), "int": np.dtype(np.int64), "float": np.dtype(np.float64)}
_KINDS = {bool: "bool", int: "int", float: "float", str: "str", type(None): NULL, list: "object", dict: "object"}
_TYPES: Mapping[str, frozenset[type]] = {
    "bool": frozenset({bool}),
    "int": frozenset({int}),
    "float": frozenset({int, float}),
}
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, kw_only=True)
class JsonLinesFormat(PlainTraits):
    """One JSON object a line, in UTF-8. Columns are the names at the top; lists and objects stay Python objects."""

    name = "JSON lines"
    call = "json_lines"
    suffixes = (".jsonl", ".ndjson", ".json")

    def survey(self, data: Ranges) -> Survey:
        """Cut the file at its lines, and infer the kind of each column over all of them."""
        kinds: dict[str, str] = {}
        pieces: list[Piece] = []
        rows = 0
        for offset, body in whole_records(data, 0, line_ends):
            place = Place(file=data.file, group=len(pieces), row=rows)
            objects = _objects(body, place)
            if objects:
                pieces.append(Piece(offset, offset + len(body), len(objects)))
                rows += len(objects)
            for name, found in _kinds(objects).items():
                kinds[name] = merge_kinds(kinds.get(name, NULL), found)
        return Survey(pieces=tuple(pieces), traits=kinds)

    def merge(self, one: str, other: str) -> str | None:
        """The narrowest kind that holds both; any two go together."""
        return merge_kinds(one, other)

    def field(self, trait: str) -> Field:
        """What arrays of a column look like."""
        return Field(_DTYPES.get(trait, np.dtype(object)), ())

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, str], place: Place) -> Arrays:
        """Columns of one group, each of the type that it has over all files."""
        objects = _objects(body, place)
        return {name: _column(objects, name, kind, place) for name, kind in traits.items()}


def _objects(body: bytes, place: Place) -> list[dict[str, Any]]:
    """One object for each line that is not blank."""
    return [_object(line, row, place) for row, line in enumerate(_lines(body, place))]


def _lines(body: bytes, place: Place) -> Iterator[str]:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        row = sum(1 for line in body[: error.start].split(b"\n")[:-1] if line.strip())
        raise DataError(
            f"a line is not UTF-8: {error.reason}", where=place.at(row), remedy="write the file as UTF-8"
        ) from error
    return (line for line in text.removeprefix("\ufeff").split("\n") if line and not line.isspace())


def _object(line: str, row: int, place: Place) -> dict[str, Any]:
    shown = line if len(line) <= 80 else line[:77] + "..."
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"a line is no JSON: {error}: {shown!r}",
            where=place.at(row),
            remedy="write one whole JSON object on each line",
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"a line is a {type(value).__name__} and no object: {shown!r}",
            where=place.at(row),
            remedy='write one object of columns on each line: {"x": 1}',
        )
    return value


def _kinds(objects: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The kind of each column; integers beyond 64 bits are floats."""
    seen: dict[str, set[str]] = {}
    for row in objects:
        for name, value in row.items():
            kind = _KINDS[type(value)]
            if kind == "int" and value not in _INT64:
                kind = "float"
            seen.setdefault(name, set()).add(kind)
    return {name: reduce(merge_kinds, sorted(kinds)) for name, kinds in seen.items()}


def _column(objects: list[dict[str, Any]], name: str, kind: str, place: Place) -> npt.NDArray[Any]:
    values: list[Any] = [row.get(name) for row in objects]
    nulls = values.count(None)
    if nulls:
        row = values.index(None)
        what = "is null" if name in objects[row] else "is missing"
        raise null_error(f"{name!r} {what}, in {nulls} of {len(values)} rows", place.at(row, name))
    if kind == "str":
        values = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if kind not in _DTYPES:
        return np.fromiter(values, dtype=object, count=len(values))
    changed = next((row for row, value in enumerate(values) if type(value) not in _TYPES[kind]), None)
    if changed is not None:
        raise _changed(values[changed], kind, place.at(changed, name))
    try:
        return np.array(values, dtype=_DTYPES[kind])
    except OverflowError as error:
        raise _changed(max(values, key=abs), kind, place.at(column=name)) from error


def _changed(value: object, kind: str, where: str) -> DataError:
    return DataError(
        f"the file changed: {value!r} is no {kind}, which the column was when it was indexed",
        where=where,
        remedy="keep the data as it is while a run reads it",
    )


def json_lines(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Rows of files with one JSON object on each line. The first pass infers one type for each column over all files.

    A column is int64, float64, bool, text, or else Python objects (lists and objects of JSON). A compressed file (.gz,
    .bz2, .zst) is read as one group, and only up to 256 MiB unpacked.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `abfs://`).
        columns: read only these; by default all.
    """
    names = None if columns is None else tuple(columns)
    return Dataset(source=FileSource(path=absolute(path), format=JsonLinesFormat(), columns=names))
