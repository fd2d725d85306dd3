"""CSV, JSON lines and plain text as data sources: one type for each column over all files, read group by group."""

from __future__ import annotations

import csv as standard_csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import Arrays, Field, field_of, unique_names
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import RandomAccessFile, changed_error
from trainwright.datasets.formats.scanned_files import (
    FileFormat,
    FileSurvey,
    GroupLocation,
    Offsets,
    file_source,
    line_ends,
    null_error,
    survey_ranges,
    table_arrays,
    whole_records,
)

_NULL = "null"
_NUMBERS = {"int", "float"}


def _merge_kinds(first: str, second: str) -> str:
    """Return the narrowest kind for values of both: int64 and float64 give float64, other pairs give text.

    A column with lists or objects of JSON is a column of objects.
    """
    if first == second or second == _NULL:
        return first
    if first == _NULL:
        return second
    if "object" in (first, second):
        return "object"
    return "float" if {first, second} == _NUMBERS else "str"


# --- CSV --------------------------------------------------------------------------------------------------------------


_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 20
_NULLS = ["", "NA", "N/A", "#N/A", "NULL", "null", "None", "<NA>"]
_TYPES = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string(), _NULL: pa.string()}
_KINDS = {pa.null(): _NULL, pa.bool_(): "bool", pa.int64(): "int", pa.float64(): "float"}


@dataclass(frozen=True, kw_only=True)
class _CsvFormat(FileFormat):
    """CSV as in RFC 4180, in UTF-8, with a header; quoted values may hold newlines."""

    delimiter: str | None = None  # between values; None for a comma, and a tab in .tsv files

    name = "CSV"
    call = "csv"
    suffixes = (".csv", ".tsv")

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Split the file into groups, and infer the type of each column over all of them."""
        head = data.read(0, min(_HEAD_BYTES, data.size_bytes))
        delimiter = self._delimiter(data.file)
        start = _header_end(head, delimiter, data)
        if not start:
            return FileSurvey(pieces=(), traits={})
        place = GroupLocation(file=data.file, group=0, row=0)
        names = self._names(head[:start], place)
        kinds = dict.fromkeys(names, _NULL)

        def count(body: bytes, place: GroupLocation) -> int:
            table = self._parse(names, body, None, place)
            if table.num_rows:
                for name in names:
                    kinds[name] = _merge_kinds(kinds[name], _KINDS.get(table.schema.field(name).type, "str"))
            return int(table.num_rows)

        ranges = whole_records(data, start, partial(csv_record_ends, delimiter=delimiter))
        return FileSurvey(pieces=survey_ranges(data.file, ranges, count), traits=kinds)

    def merge(self, one: str, other: str) -> str | None:
        """Return the narrowest kind for both; any two are compatible as text."""
        return _merge_kinds(one, other)

    def field(self, trait: str) -> Field:
        return field_of(_TYPES[trait])

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, str], place: GroupLocation) -> Arrays:
        """Columns of one group, each of the type that it has over all files."""
        types = {name: _TYPES[kind] for name, kind in traits.items()}
        table = self._parse(self._names(head, place), body, types, place)
        return table_arrays(table, tuple(traits), place)

    def _delimiter(self, file: str) -> str:
        return self.delimiter or ("\t" if ".tsv" in os.path.basename(file).lower() else ",")

    def _names(self, head: bytes, place: GroupLocation) -> list[str]:
        where = f"{place.file}, header"
        try:
            lines = io.StringIO(head.removeprefix(_BOM).decode("utf-8"), newline="")
        except UnicodeDecodeError as error:
            raise DataError(f"the header is not UTF-8: {error}", where=where, remedy="write it as UTF-8") from error
        names = next(row for row in standard_csv.reader(lines, delimiter=self._delimiter(place.file)) if row)
        return unique_names(names, where)

    def _parse(self, names: list[str], body: bytes, types: Mapping[str, Any] | None, place: GroupLocation) -> pa.Table:
        """Return records as a table: the columns of `types`, or all columns with inferred types."""
        ragged: list[Any] = []

        def refuse(row: Any) -> str:
            ragged.append(row)
            return "skip"

        convert = pacsv.ConvertOptions(
            column_types=types,
            include_columns=list(types) if types is not None else None,
            null_values=_NULLS,
            true_values=["true", "True", "TRUE"],
            false_values=["false", "False", "FALSE"],
        )
        try:
            table = pacsv.read_csv(
                pa.BufferReader(body),
                read_options=pacsv.ReadOptions(column_names=names, use_threads=False, block_size=len(body) + 1),
                parse_options=pacsv.ParseOptions(
                    delimiter=self._delimiter(place.file), newlines_in_values=True, invalid_row_handler=refuse
                ),
                convert_options=convert,
            )
        except pa.ArrowException as error:
            raise DataError(
                f"the lines cannot be read as CSV: {error}",
                where=place.at(),
                remedy="correct the file; one that changed after it was indexed must be indexed again",
            ) from error
        if ragged:
            raise _row_length_error(ragged[0], names, place)
        if types is None:
            _require_utf8(table, place)
        return table


def csv_record_ends(data: bytes, last: bool, delimiter: str = ",") -> Offsets:
    """Ends of CSV records: ends of lines that are not inside a quoted value.

    A quotation mark opens a value only where the value begins; inside, two stand for one (RFC 4180, 2.5 to 2.7).
    """
    ends = line_ends(data, last)
    octets = np.frombuffer(data, np.uint8)
    marks = np.flatnonzero(octets == ord('"'))
    if not len(marks):
        return ends
    odd, even = marks[1::2], marks[::2]
    begins = np.isin(octets[even - 1], np.frombuffer(f"\n\r{delimiter}".encode(), np.uint8)) | (even == 0)
    begins[1:] |= even[1:] == odd[: len(even) - 1] + 1
    inside = np.searchsorted(marks, ends) % 2 == 1 if begins.all() else _quoted_ends(data, ends, delimiter)
    record_ends: Offsets = ends[~inside]
    return record_ends


def _quoted_ends(data: bytes, ends: Offsets, delimiter: str) -> npt.NDArray[np.bool_]:
    """Return which ends of lines are inside quoted values; for data with quotation marks in unquoted values too."""
    opening = rb"(?:(?<=[\n\r" + re.escape(delimiter.encode()) + rb"])|\A)"
    spans = [(-1, -1)]
    for match in re.finditer(opening + rb'"[^"]*+(?:""[^"]*+)*+(?:"|(\Z))', data):
        unclosed = match.group(1) is not None
        spans.append((match.start(), len(data) + 1 if unclosed else match.end()))
    starts, stops = np.array(spans, dtype=np.int64).T
    inside: npt.NDArray[np.bool_] = ends < stops[np.searchsorted(starts, ends - 1, "right") - 1]
    return inside


def _header_end(head: bytes, delimiter: str, data: RandomAccessFile) -> int:
    """Return where the first line that is not blank ends; 0 where there is none."""
    last = len(head) == data.size_bytes
    body = head.removeprefix(_BOM)
    blank = len(head) - len(body.lstrip(b"\r\n"))
    if last and blank == len(head):
        return 0
    ends = csv_record_ends(head[blank:], last, delimiter)
    if not len(ends):
        raise DataError(
            f"the header has no end within {len(head)} bytes", where=data.file, remedy="close its quotation marks"
        )
    return blank + int(ends[0])


def _row_length_error(row: Any, names: list[str], place: GroupLocation) -> DataError:
    number = row.number - 1 if row.number is not None else None
    text = row.text if len(row.text) <= 80 else row.text[:77] + "..."
    return DataError(
        f"a line has {row.actual_columns} values for {len(names)} columns: {text!r}",
        where=place.at(number),
        remedy='correct the line; a value with a delimiter, newline or quotation mark needs "quotation marks"',
    )


def _require_utf8(table: pa.Table, place: GroupLocation) -> None:
    """Text that is not UTF-8 is inferred as bytes."""
    for name in table.column_names:
        if not pa.types.is_binary(table.schema.field(name).type):
            continue
        for row, value in enumerate(table.column(name).to_pylist()):
            try:
                (value or b"").decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"a value is not UTF-8: {error.reason}", where=place.at(row, name), remedy="write the file as UTF-8"
                ) from error


def csv(path: str | os.PathLike[str], columns: Iterable[str] | None = None, *, delimiter: str | None = None) -> Dataset:
    """Rows of CSV files with a header. The first pass infers one type for each column over all files.

    A column is int64, float64, bool, or else text. Quoted values may hold newlines. A compressed file (.gz, .bz2,
    .zst) is read as one group, and only up to 256 MiB unpacked.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `az://`).
        columns: read only these; by default all.
        delimiter: one character between values; by default a comma, in .tsv files a tab.
    """
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
        raise DataError(f"delimiter={delimiter!r} cannot part values", remedy="give one character, such as ';'")
    return Dataset(source=file_source(path, _CsvFormat(delimiter=delimiter), columns))


# --- JSON lines -------------------------------------------------------------------------------------------------------


_JSON_DTYPES = {"bool": np.dtype(np.bool_), "int": np.dtype(np.int64), "float": np.dtype(np.float64)}
_JSON_KINDS = {bool: "bool", int: "int", float: "float", str: "str", type(None): _NULL, list: "object", dict: "object"}
_JSON_TYPES: Mapping[str, frozenset[type]] = {
    "bool": frozenset({bool}),
    "int": frozenset({int}),
    "float": frozenset({int, float}),
}
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, kw_only=True)
class _JsonLinesFormat(FileFormat):
    """One JSON object a line, in UTF-8. Columns are the names at the top; lists and objects stay Python objects."""

    name = "JSON lines"
    call = "json_lines"
    suffixes = (".jsonl", ".ndjson", ".json")

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Split the file at its lines, and infer the kind of each column over all of them."""
        kinds: dict[str, str] = {}

        def count(body: bytes, place: GroupLocation) -> int:
            objects = _json_objects(body, place)
            for name, kind in _json_kinds(objects).items():
                kinds[name] = _merge_kinds(kinds.get(name, _NULL), kind)
            return len(objects)

        return FileSurvey(pieces=survey_ranges(data.file, whole_records(data, 0, line_ends), count), traits=kinds)

    def merge(self, one: str, other: str) -> str | None:
        """Return the narrowest kind for both; any two are compatible."""
        return _merge_kinds(one, other)

    def field(self, trait: str) -> Field:
        return Field(_JSON_DTYPES.get(trait, np.dtype(object)), ())

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, str], place: GroupLocation) -> Arrays:
        """Columns of one group, each of the type that it has over all files."""
        objects = _json_objects(body, place)
        return {name: _json_column(objects, name, kind, place) for name, kind in traits.items()}


def _json_objects(body: bytes, place: GroupLocation) -> list[dict[str, Any]]:
    """Return one object for each line that is not blank."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        row = sum(1 for line in body[: error.start].split(b"\n")[:-1] if line.strip())
        raise DataError(
            f"a line is not UTF-8: {error.reason}", where=place.at(row), remedy="write the file as UTF-8"
        ) from error
    lines = (line for line in text.removeprefix("\ufeff").split("\n") if line and not line.isspace())
    return [_json_object(line, row, place) for row, line in enumerate(lines)]


def _json_object(line: str, row: int, place: GroupLocation) -> dict[str, Any]:
    excerpt = line if len(line) <= 80 else line[:77] + "..."
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"a line is no JSON: {error}: {excerpt!r}",
            where=place.at(row),
            remedy="write one whole JSON object on each line",
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"a line is a {type(value).__name__} and no object: {excerpt!r}",
            where=place.at(row),
            remedy='write one object of columns on each line: {"x": 1}',
        )
    return value


def _json_kinds(objects: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the kind of each column; integers beyond 64 bits are floats."""
    seen: dict[str, set[str]] = {}
    for row in objects:
        for name, value in row.items():
            kind = _JSON_KINDS[type(value)]
            if kind == "int" and value not in _INT64:
                kind = "float"
            seen.setdefault(name, set()).add(kind)
    return {name: reduce(_merge_kinds, sorted(kinds)) for name, kinds in seen.items()}


def _json_column(objects: list[dict[str, Any]], name: str, kind: str, place: GroupLocation) -> npt.NDArray[Any]:
    values: list[Any] = [row.get(name) for row in objects]
    nulls = values.count(None)
    if nulls:
        row = values.index(None)
        what = "is null" if name in objects[row] else "is missing"
        raise null_error(f"{name!r} {what}, in {nulls} of {len(values)} rows", place.at(row, name))
    if kind == "str":
        values = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if kind not in _JSON_DTYPES:
        return np.fromiter(values, dtype=object, count=len(values))
    changed = next((row for row, value in enumerate(values) if type(value) not in _JSON_TYPES[kind]), None)
    if changed is not None:
        raise _json_changed(values[changed], kind, place.at(changed, name))
    try:
        return np.array(values, dtype=_JSON_DTYPES[kind])
    except OverflowError as error:
        raise _json_changed(max(values, key=abs), kind, place.at(column=name)) from error


def _json_changed(value: object, kind: str, where: str) -> DataError:
    return changed_error(f"{value!r} is no {kind}, which the column was when it was indexed", where)


def json_lines(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Rows of files with one JSON object on each line. The first pass infers one type for each column over all files.

    A column is int64, float64, bool, text, or else Python objects (lists and objects of JSON). A compressed file (.gz,
    .bz2, .zst) is read as one group, and only up to 256 MiB unpacked.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `az://`).
        columns: read only these; by default all.
    """
    return Dataset(source=file_source(path, _JsonLinesFormat(), columns))


# --- Plain text -------------------------------------------------------------------------------------------------------


_BREAK = re.compile(rb"\n[ \t\r]*\n\s*(?=\S)")  # what follows must have begun, or more of the break may come
_DOCUMENTS = {"line": re.compile(r"\n"), "paragraph": re.compile(r"\n[ \t\r]*\n\s*", re.ASCII), "file": None}


@dataclass(frozen=True, kw_only=True)
class _TextFormat(FileFormat):
    """UTF-8 text. A document is a line, a paragraph between blank lines, or a file; blank documents are dropped."""

    by: Literal["line", "paragraph", "file"] = "line"
    name = "text"
    call = "text"
    suffixes = (".txt", ".text", ".md")

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Split the file after documents, and count them."""
        pieces = survey_ranges(data.file, self._ranges(data), lambda body, place: len(self._documents(body, place)))
        return FileSurvey(pieces=pieces, traits={"text": "str"})

    def field(self, trait: str) -> Field:
        return Field(np.dtype(object), ())

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, Any], place: GroupLocation) -> Arrays:
        documents = self._documents(body, place)
        return {name: np.fromiter(documents, dtype=object, count=len(documents)) for name in traits}

    def _ranges(self, data: RandomAccessFile) -> Iterator[tuple[int, bytes]]:
        if self.by == "file":
            return iter([(0, data.read(0, data.size_bytes))] if data.size_bytes else [])
        return whole_records(data, 0, line_ends if self.by == "line" else paragraph_ends)

    def _documents(self, body: bytes, place: GroupLocation) -> list[str]:
        try:
            text = body.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise DataError(
                f"the text is not UTF-8: {error.reason}",
                where=f"{place.at()}, byte {error.start} of the group",
                remedy="write the file as UTF-8",
            ) from error
        between = _DOCUMENTS[self.by]
        parts = [text] if between is None else between.split(text)
        return [part.rstrip("\r\n") if between else part for part in parts if part and not part.isspace()]


def paragraph_ends(data: bytes, last: bool) -> Offsets:
    """Return the ends of paragraphs: after the blank lines that follow each, and at the end of the file."""
    ends = [match.end() for match in _BREAK.finditer(data)]
    return np.array([*ends, len(data)] if last and data else ends, dtype=np.int64)


def text(path: str | os.PathLike[str], by: Literal["line", "paragraph", "file"] = "line") -> Dataset:
    """Documents of UTF-8 text files, in the column `text`; `.tokenize()` and `.pack(length)` make sequences of them.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `az://`).
        by: the unit of a document: each line, each paragraph (separated by blank lines), or each file.

    Raises:
        DataError: `by` has another value.
    """
    if by not in _DOCUMENTS:
        raise DataError(f"by={by!r} is not a way to cut text", remedy=f"give one of {', '.join(_DOCUMENTS)}")
    return Dataset(source=file_source(path, _TextFormat(by=by)))
