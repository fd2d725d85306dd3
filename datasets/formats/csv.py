"""CSV as a source: records cut at real line ends, one type a column over all files, read group by group."""

from __future__ import annotations

import csv as standard_csv
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv

from trainwright.core.errors import DataError
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.arrow_columns import Arrays, Field, field_of
from trainwright.datasets.formats.byte_ranges import Ranges
from trainwright.datasets.formats.paths import absolute
from trainwright.datasets.formats.record_boundaries import Offsets, line_ends, whole_records
from trainwright.datasets.formats.scanned_files import FileSource, Piece, Place, PlainTraits, Survey, table_arrays
from trainwright.datasets.formats.type_inference import NULL, merge_kinds

_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 20
_NULLS = ["", "NA", "N/A", "#N/A", "NULL", "null", "None", "<NA>"]
_TYPES = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string(), NULL: pa.string()}
_KINDS = {pa.null(): NULL, pa.bool_(): "bool", pa.int64(): "int", pa.float64(): "float"}


@dataclass(frozen=True, kw_only=True)
class CsvFormat(PlainTraits):
    """CSV as in RFC 4180, in UTF-8, with a header; quoted values may hold newlines.

    Attributes:
        delimiter: between values; None for a comma, and a tab in .tsv files.
    """

    delimiter: str | None = None

    name = "CSV"
    call = "csv"
    suffixes = (".csv", ".tsv")

    def survey(self, data: Ranges) -> Survey:
        """Cut the file, and infer the type of each column over all of it."""
        head = data.read(0, min(_HEAD_BYTES, data.size_bytes))
        delimiter = self._delimiter(data.file)
        start = _header_end(head, delimiter, data)
        if not start:
            return Survey(pieces=(), traits={})
        place = Place(file=data.file, group=0, row=0)
        names = self._names(head[:start], place)
        kinds = dict.fromkeys(names, NULL)
        pieces: list[Piece] = []
        rows = 0
        ends = partial(record_ends, delimiter=delimiter)
        for offset, body in whole_records(data, start, ends):
            place = Place(file=data.file, group=len(pieces), row=rows)
            table = self._parse(names, body, None, place)
            if table.num_rows:
                pieces.append(Piece(offset, offset + len(body), table.num_rows))
                rows += table.num_rows
                kinds = {name: merge_kinds(kinds[name], _kind(table.schema.field(name).type)) for name in names}
        return Survey(pieces=tuple(pieces), traits=kinds)

    def merge(self, one: str, other: str) -> str | None:
        """The narrowest kind that holds both; any two go together as text."""
        return merge_kinds(one, other)

    def field(self, trait: str) -> Field:
        """What arrays of a column look like."""
        return field_of(_TYPES[trait])

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, str], place: Place) -> Arrays:
        """Columns of one group, each of the type that it has over all files."""
        types = {name: _TYPES[kind] for name, kind in traits.items()}
        table = self._parse(self._names(head, place), body, types, place)
        return table_arrays(table, tuple(traits), place)

    def _delimiter(self, file: str) -> str:
        return self.delimiter or ("\t" if ".tsv" in os.path.basename(file).lower() else ",")

    def _names(self, head: bytes, place: Place) -> list[str]:
        where = f"{place.file}, header"
        try:
            lines = io.StringIO(head.removeprefix(_BOM).decode("utf-8"), newline="")
        except UnicodeDecodeError as error:
            raise DataError(f"the header is not UTF-8: {error}", where=where, remedy="write it as UTF-8") from error
        names = next(row for row in standard_csv.reader(lines, delimiter=self._delimiter(place.file)) if row)
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise DataError(f"column {twice[0]!r} comes twice", where=where, remedy="give every column its own name")
        return names

    def _parse(self, names: list[str], body: bytes, types: Mapping[str, Any] | None, place: Place) -> pa.Table:
        """Records as a table: of the types given, those columns alone; else all columns, their types inferred."""
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
            raise _unreadable(error, place) from error
        if ragged:
            raise _ragged(ragged[0], names, place)
        if types is None:
            _refuse_bytes(table, place)
        return table


def record_ends(data: bytes, last: bool, delimiter: str = ",") -> Offsets:
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
    inside = np.searchsorted(marks, ends) % 2 == 1 if begins.all() else _inside(data, ends, delimiter)
    kept: Offsets = ends[~inside]
    return kept


def _inside(data: bytes, ends: Offsets, delimiter: str) -> npt.NDArray[np.bool_]:
    """Which ends of lines lie inside quoted values where some quotation marks stand in values that are not quoted."""
    opening = rb"(?:(?<=[\n\r" + re.escape(delimiter.encode()) + rb"])|\A)"
    spans = [(-1, -1)]
    for match in re.finditer(opening + rb'"[^"]*+(?:""[^"]*+)*+(?:"|(\Z))', data):
        unclosed = match.group(1) is not None
        spans.append((match.start(), len(data) + 1 if unclosed else match.end()))
    starts, stops = np.array(spans, dtype=np.int64).T
    inside: npt.NDArray[np.bool_] = ends < stops[np.searchsorted(starts, ends - 1, "right") - 1]
    return inside


def _header_end(head: bytes, delimiter: str, data: Ranges) -> int:
    """Where the first line that holds something ends; 0 where there is none."""
    last = len(head) == data.size_bytes
    body = head.removeprefix(_BOM)
    blank = len(head) - len(body.lstrip(b"\r\n"))
    if last and blank == len(head):
        return 0
    ends = record_ends(head[blank:], last, delimiter)
    if not len(ends):
        raise DataError(
            f"the header has no end within {len(head)} bytes", where=data.file, remedy="close its quotation marks"
        )
    return blank + int(ends[0])


def _kind(kind: pa.DataType) -> str:
    return _KINDS.get(kind, "str")


def _ragged(row: Any, names: list[str], place: Place) -> DataError:
    number = row.number - 1 if row.number is not None else None
    text = row.text if len(row.text) <= 80 else row.text[:77] + "..."
    return DataError(
        f"a line has {row.actual_columns} values for {len(names)} columns: {text!r}",
        where=place.at(number),
        remedy='mend the line; a value with a delimiter, newline or quotation mark in it stands in "quotation marks"',
    )


def _unreadable(error: Exception, place: Place) -> DataError:
    return DataError(
        f"the lines cannot be read as CSV: {error}",
        where=place.at(),
        remedy="mend the file; one that changed after it was indexed must be indexed again",
    )


def _refuse_bytes(table: pa.Table, place: Place) -> None:
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
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `abfs://`).
        columns: read only these; by default all.
        delimiter: one character between values; by default a comma, in .tsv files a tab.
    """
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
        raise DataError(f"delimiter={delimiter!r} cannot part values", remedy="give one character, such as ';'")
    form = CsvFormat(delimiter=delimiter)
    return Dataset(
        source=FileSource(path=absolute(path), format=form, columns=None if columns is None else tuple(columns))
    )
