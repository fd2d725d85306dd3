"""Files without an index: a first pass finds the groups of rows and the columns.

A format splits a file into groups and decodes the bytes of a group. This module lists the files, merges their schemas,
computes the hash, and reads the byte range of one group.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import (
    NULL_REMEDY,
    Arrays,
    Field,
    Index,
    Loader,
    RowGroup,
    Rows,
    Source,
    hash_parts,
    select_columns,
    to_array,
)
from trainwright.datasets.formats.file_system import (
    COMPRESSIONS,
    RandomAccessFile,
    absolute_path,
    changed_error,
    compression_codec,
    find_files,
    open_file,
    resolve_file_system,
)
from trainwright.datasets.metadata_cache import cached_metadata, first_pass

_SURVEY_THREADS = 4  # files looked at together
_GZIP = b"\x1f\x8b"  # the first bytes of a file
_MAX_HEADS = 64


class RecordRange(NamedTuple):
    """Bytes start..stop of a file, which hold whole rows."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class FileSurvey:
    """The result of the first pass over one file."""

    pieces: tuple[RecordRange, ...]  # groups of rows, in order, one after the other
    traits: Mapping[str, Any]  # by column, its trait in the format


@dataclass(frozen=True, kw_only=True)
class GroupLocation:
    """A group of rows, for messages."""

    file: str  # path
    group: int  # its number within the file
    row: int  # number of its first row within the file
    offset: int = 0  # byte of the file at which it begins; after decompression in a compressed file

    def at(self, row: int | None = None, column: str | None = None) -> str:
        """Return the text for file and group, and optionally the row within the group and the column."""
        words = f"{self.file}, row group {self.group}"
        words += f", row {self.row + row}" if row is not None else ""
        return words + (f", column {column!r}" if column is not None else "")


class FileFormat(ABC):
    """How the files of one format are read. Frozen and picklable.

    The first pass determines a trait of each column, such as its type; in some formats a text.
    """

    name: ClassVar[str]  # of the format, for messages
    call: ClassVar[str]  # name of the function that makes the source
    suffixes: ClassVar[tuple[str, ...]]  # of its files, in lower case

    @abstractmethod
    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Pass over a file in bounded memory. Raises DataError that names file and row for a damaged one."""

    def merge(self, one: Any, other: Any) -> Any | None:
        """Return the trait of a column with two traits; None if they are incompatible."""
        return one if one == other else None

    @abstractmethod
    def field(self, trait: Any) -> Field:
        """Return type and shape of a column's arrays."""

    def pack(self, trait: Any) -> Any:
        """Return the trait of a column as JSON."""
        return trait

    def unpack(self, stored: Any) -> Any:
        """Return the trait from the result of `pack`. Raises ValueError, TypeError, ArrowException for other JSON."""
        return str(stored)

    @abstractmethod
    def decode(self, head: bytes, body: bytes, traits: Mapping[str, Any], place: GroupLocation) -> Arrays:
        """Columns of one group.

        Args:
            head: the bytes before the first group of the file.
            body: the bytes of the group.
            traits: of the columns to read, merged over all files.
            place: of the group; DataError names it, and the row.
        """


@dataclass(frozen=True, kw_only=True)
class SurveyTask:
    """The first pass over single files, in any process."""

    path: str
    format: FileFormat

    def __call__(self, file: tuple[str, int]) -> FileSurvey:
        """Return the survey of a file, given by its path in the file system and its size in bytes."""
        path, size_bytes = file
        with open_file(self._system, path, size_bytes) as data:
            try:
                survey = self.format.survey(data)
            except DataError as error:
                if data.read(0, min(len(_GZIP), data.size_bytes)) != _GZIP:
                    raise
                name = f"{os.path.basename(path)}.gz"
                raise DataError(
                    "the file is compressed with gzip, which its name does not say",
                    where=path,
                    remedy=f"name it {name}",
                ) from error
        if compression_codec(path) is None or not survey.pieces:
            return survey
        pieces = survey.pieces  # reading a part of a compressed file costs as much as reading all of it
        all_rows = RecordRange(pieces[0].start, pieces[-1].stop, sum(piece.rows for piece in pieces))
        return FileSurvey(pieces=(all_rows,), traits=survey.traits)

    @cached_property
    def _system(self) -> pafs.FileSystem:
        return resolve_file_system(self.path)[0]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "format": self.format}  # another process has credentials of its own


@dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """Files of one format."""

    path: str  # a file, a folder (searched recursively) or a glob (`*`, `?`, `**`); absolute, or a URI of pyarrow.fs
    format: FileFormat  # of the files
    columns: tuple[str, ...] | None = None  # read only these; None reads all

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"{self.format.call}({self.path!r})"

    def index(self) -> Index:
        """Survey the files that are not cached. Raises DataError for any problem of the files."""
        system, path = resolve_file_system(self.path)
        suffixes = self.format.suffixes
        packed = tuple(suffix + packing for suffix in suffixes for packing in COMPRESSIONS)
        files = find_files(system, path, self.path, self.format.name, suffixes + packed)
        surveys = self._surveys(system, files)
        groups = number_groups(self.path, files, (survey.pieces for survey in surveys))
        traits = self._merged_traits(files, surveys)
        fields = fields_of(traits, self.format.field, files[0].path)
        ranges = ((group.number, group.rows, group.start, group.stop) for group in groups)
        columns = ((name, traits[name], fields[name].dtype.str, fields[name].shape) for name in sorted(fields))
        return file_index(
            files,
            groups,
            fields,
            stored_bytes=sum(group.stop - group.start for group in groups),
            hashed=(*ranges, *columns),
            traits=traits,
            sizes={info.path: info.size for info in files},
        )

    def open(self, index: Index) -> FileLoader:
        """A loader for one process."""
        return FileLoader(resolve_file_system(self.path)[0], self.format, index)

    def _surveys(self, system: pafs.FileSystem, files: list[pafs.FileInfo]) -> list[FileSurvey]:
        """Return surveys of files, from the caches if possible."""

        def read(infos: list[pafs.FileInfo]) -> list[FileSurvey]:
            survey = SurveyTask(path=self.path, format=self.format)
            return first_pass(survey, [(info.path, info.size) for info in infos], threads=_SURVEY_THREADS)

        return cached_metadata(
            system, files, reads=(self.format, self.path), read=read, pack=self._packed, unpack=self._unpacked
        )

    def _packed(self, survey: FileSurvey) -> Any:
        return [survey.pieces, {name: self.format.pack(trait) for name, trait in survey.traits.items()}]

    def _unpacked(self, stored: Any) -> FileSurvey:
        pieces, traits = stored
        return FileSurvey(
            pieces=tuple(RecordRange(*map(int, piece)) for piece in pieces),
            traits={name: self.format.unpack(trait) for name, trait in traits.items()},
        )

    def _merged_traits(self, files: list[pafs.FileInfo], surveys: list[FileSurvey]) -> dict[str, Any]:
        """Return one trait for each column; all files with rows must have the columns to read."""
        pairs = zip(files, surveys, strict=True)
        (first, survey), *others = [(info.path, survey) for info, survey in pairs if survey.pieces]
        merged = {name: survey.traits[name] for name in select_columns(survey.traits, self.columns, first)}
        for file, other_survey in others:
            for name in sorted({*merged, *(other_survey.traits if self.columns is None else ())}):
                old, new = merged.get(name), other_survey.traits.get(name)
                both = self.format.merge(old, new) if old is not None and new is not None else None
                if both is None:
                    raise schema_error(name, new, old, file, first)
                merged[name] = both
        return merged


def file_source(path: str | os.PathLike[str], form: FileFormat, columns: Iterable[str] | None = None) -> FileSource:
    """Return the source of a path as the user gives it. Raises DataError for an address with a password."""
    return FileSource(path=absolute_path(path), format=form, columns=None if columns is None else tuple(columns))


class FileLoader(Loader):
    """Reads the byte range of one group at a time."""

    def __init__(self, system: pafs.FileSystem, form: FileFormat, index: Index) -> None:
        self._system, self._format, self._index = system, form, index
        self._firsts: dict[str, RowGroup] = {}
        for group in index.groups:
            self._firsts.setdefault(group.file, group)
        self._heads: dict[str, bytes] = {}

    def twin(self) -> FileLoader:
        """Return a loader of the same files for another thread."""
        return FileLoader(self._system, self._format, self._index)

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        """Return columns of group `number`. Raises DataError with file, group and, if known, the row."""
        group = self._index.groups[number]
        row = group.first - self._firsts[group.file].first
        place = GroupLocation(file=group.file, group=group.number, row=row, offset=group.start)
        names = select_columns(self._index.traits, columns, place.at())
        with open_file(self._system, group.file, self._index.sizes.get(group.file)) as data:
            head, body = self._head(data), data.read(group.start, group.stop)
        arrays = self._format.decode(head, body, {name: self._index.traits[name] for name in names}, place)
        for name, array in arrays.items():
            if len(array) != group.rows:
                how = f"the row group has {len(array)} rows and had {group.rows} when it was indexed"
                raise changed_error(how, place.at(column=name))
        return arrays

    def _head(self, data: RandomAccessFile) -> bytes:
        if data.file not in self._heads:
            if len(self._heads) >= _MAX_HEADS:
                self._heads.clear()
            self._heads[data.file] = data.read(0, self._firsts[data.file].start)
        return self._heads[data.file]


def table_arrays(table: pa.Table, names: Sequence[str], place: GroupLocation, rows: Rows | None = None) -> Arrays:
    """Return columns of an Arrow table, or of some rows. Raises DataError that names the first null row."""
    table = table if rows is None else table.take(rows)
    for name in names:
        column = table.column(name)
        if column.null_count:
            row = pc.index(column.is_null(), pa.scalar(True)).as_py()
            row = row if rows is None else int(rows[row])
            raise null_error(f"{column.null_count} of {len(column)} values are null", place.at(row, name))
    return {name: to_array(table.column(name), place.at(column=name)) for name in names}


def null_error(what: str, where: str) -> DataError:
    """Return the error for a missing value."""
    return DataError(what, where=where, remedy=NULL_REMEDY)


# --- The index of files, of this kind and of parquet ------------------------------------------------------------------


def number_groups(
    path: str, files: Sequence[pafs.FileInfo], pieces: Iterable[Sequence[RecordRange]]
) -> tuple[RowGroup, ...]:
    """Return the row groups with rows, from the ranges of each file. Raises DataError if there are none."""
    groups: list[RowGroup] = []
    first = 0
    for info, ranges in zip(files, pieces, strict=True):
        for number, (start, stop, rows) in enumerate(ranges):
            if rows:
                groups.append(RowGroup(file=info.path, number=number, rows=rows, first=first, start=start, stop=stop))
            first += rows
    if not groups:
        raise DataError("the data has no rows", where=path, remedy="write some rows, or name another path")
    return tuple(groups)


def fields_of(kinds: Mapping[str, Any], field: Callable[[Any], Field], file: str) -> dict[str, Field]:
    """Return field(kind) of each column. Raises DataError, naming the file, if one cannot become an array."""
    fields: dict[str, Field] = {}
    for name, kind in kinds.items():
        try:
            fields[name] = field(kind)
        except (pa.ArrowException, DataError) as error:
            raise DataError(
                f"the type {kind} cannot become an array: {error}",
                where=f"{file}, column {name!r}",
                remedy="write it as another type, or read other columns with columns=",
            ) from error
    return fields


def schema_error(name: str, actual: object | None, expected: object | None, file: str, first: str) -> DataError:
    """Return the error for a column whose type in `file` differs from the first file; None for a missing column."""
    return DataError(
        f"column {name!r} is {'missing' if actual is None else actual} here "
        f"and {'missing' if expected is None else expected} in {first}",
        where=f"{file}, column {name!r}",
        remedy="write all files with one schema, or read other columns with columns=",
    )


def file_index(
    files: Sequence[pafs.FileInfo],
    groups: tuple[RowGroup, ...],
    fields: Mapping[str, Field],
    *,
    stored_bytes: int,
    hashed: Iterable[object],
    **more: Any,
) -> Index:
    """Return the index of files.

    Args:
        files, groups, fields: of the data set.
        stored_bytes: size of the columns in the files, the estimate of the size of objects.
        hashed: values for the hash, which also has the sizes of files and their names within the common folder. The
            hash is therefore independent of the place of the folder.
        more: further fields of the index.
    """
    rows, row_bytes = groups[-1].first + groups[-1].rows, sum(field.row_bytes for field in fields.values())
    if any(field.dtype == np.dtype(object) for field in fields.values()):
        row_bytes = max(row_bytes, stored_bytes // rows)
    folder = os.path.commonpath([os.path.dirname(info.path) for info in files]) or "."
    names = ((os.path.relpath(info.path, folder), info.size) for info in files)
    return Index(
        rows=rows, groups=groups, schema=fields, row_bytes=row_bytes, hash=hash_parts([*names, *hashed]), **more
    )


# --- Split files without an index into ranges of whole records --------------------------------------------------------


_GROUP_ROWS, _GROUP_BYTES = 4096, 8 << 20
_RECORD_BYTES = 256 << 20
CHUNK_BYTES = 8 << 20

Offsets = npt.NDArray[np.int64]
_FindEnds = Callable[[bytes, bool], Offsets]
"""ends(data, last): ascending ends of the complete records in data that starts with a record; `last`: the file ends
with the data."""


def group_boundaries(ends: Offsets, last: bool, rows: int = _GROUP_ROWS, size_bytes: int = _GROUP_BYTES) -> list[int]:
    """Split data that starts with a record into groups of `rows` records, or fewer that reach `size_bytes`.

    Args:
        ends: end of each record, ascending.
        last: whether the file ends here. If not, an incomplete last group is not cut, so that the groups do not depend
            on the size of the chunks.
        rows: of a group.
        size_bytes: of a group.

    Returns:
        The number of records before each cut, ascending.
    """
    cuts: list[int] = []
    record = low = 0
    while record < len(ends):
        index = min(record + rows - 1, int(np.searchsorted(ends, low + size_bytes)))
        if index >= len(ends):
            if not last:
                break
            index = len(ends) - 1
        low, record = int(ends[index]), index + 1
        cuts.append(record)
    return cuts


def whole_records(
    data: RandomAccessFile, start: int, ends: _FindEnds, limit_bytes: int = _RECORD_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Yield ranges of whole records with their first bytes, in the memory of two ranges and a chunk.

    Raises:
        DataError: a record is longer than `limit_bytes`, or incomplete at the end of the file.
    """
    offset = position = start
    pending = b""
    records = 0
    while position < data.size_bytes:
        after = min(position + CHUNK_BYTES, data.size_bytes)
        pending += data.read(position, after)
        position, low = after, 0
        last = position == data.size_bytes
        record_ends = ends(pending, last)
        cuts = group_boundaries(record_ends, last)
        for high in record_ends[np.array(cuts, dtype=np.int64) - 1].tolist():
            yield offset + low, pending[low:high]
            low = high
        unfinished = int(record_ends[-1]) if len(record_ends) else 0
        if (last and unfinished < len(pending)) or len(pending) - unfinished > limit_bytes:
            raise _unfinished_record_error(data, offset + unfinished, records + len(record_ends), limit_bytes, last)
        records += cuts[-1] if cuts else 0
        offset, pending = offset + low, pending[low:]


def survey_ranges(
    file: str, ranges: Iterable[tuple[int, bytes]], count: Callable[[bytes, GroupLocation], int]
) -> tuple[RecordRange, ...]:
    """Return the ranges with rows, which `count` counts in the bytes of each range."""
    pieces: list[RecordRange] = []
    first = 0
    for offset, body in ranges:
        rows = count(body, GroupLocation(file=file, group=len(pieces), row=first, offset=offset))
        if rows:
            pieces.append(RecordRange(offset, offset + len(body), rows))
            first += rows
    return tuple(pieces)


def line_ends(data: bytes, last: bool) -> Offsets:
    """Return the ends of lines, the newline included, which may be missing at the end of a file."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")).astype(np.int64) + 1
    if last and data and not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    return ends


def _unfinished_record_error(data: RandomAccessFile, offset: int, row: int, limit_bytes: int, last: bool) -> DataError:
    within = "before the file does" if last else f"within {limit_bytes >> 20} MiB"
    return DataError(
        f"the row that begins at byte {offset} of {data.size_bytes} does not end {within}",
        where=f"{data.file}, row {row}",
        remedy="the file may be cut off, or a quotation mark not closed: write it again, or leave it out",
    )
