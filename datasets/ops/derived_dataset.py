"""Data sets whose rows are derived from another's: filtered, one-to-many, packed.

A first pass counts the derived rows of each row group once, before the run begins, and the run stores the counts; a
long pass runs as tasks on the Ray cluster. Then the data set is like any other: its length is known, every epoch is
exact, and each rank computes any batch independently. So a run saves the cursor only, and a failure or resize replays
nothing.

Therefore the derived rows cannot change with the epoch: random functions before a filter, a `flat_map` or a `pack` are
seeded by the sample only. Augmentation belongs after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.data import copy_objects
from trainwright.core.errors import DataError
from trainwright.datasets.data_source import (
    Arrays,
    Field,
    Index,
    Loader,
    RowGroup,
    Rows,
    Source,
    hash_parts,
    require_same_fields,
    schema_of,
    select_columns,
    stack_rows,
)
from trainwright.datasets.metadata_cache import current_context, first_pass, run_cached
from trainwright.datasets.ops.row_transforms import Counters, call_user_function, require_same_columns

if TYPE_CHECKING:
    from trainwright.datasets.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class DerivedSource(Source):
    """Rows derived from the transformed rows of another data set, row group by row group."""

    base: Dataset
    derivation: Derivation

    def describe(self) -> str:
        """As the user wrote it, in short."""
        return f"{self.base!r}.{self.derivation.word}(...)"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """All user functions that process the rows."""
        functions = () if isinstance(self.derivation, Pack) else (self.derivation.function,)
        return (*self.base.functions, *functions)

    def index(self) -> Index:
        """Derive every row group once and count its rows. Raises DataError if no row is left."""
        base = self.base.index()
        counted = self._group_counts(base)
        groups: list[RowGroup] = []
        schema: Mapping[str, Field] = {}
        first = size_bytes = 0
        for number, (group, count) in enumerate(zip(base.groups, counted, strict=True)):
            if not count.rows:
                continue
            schema = schema or count.schema
            where = f"{self.describe()}, {group.file}, row group {group.number}"
            require_same_fields(count.schema, schema, "the row groups before", where)
            groups.append(replace(group, number=number, rows=count.rows, first=first))
            first += count.rows
            size_bytes += count.size_bytes
        if not groups:
            raise DataError(
                f"none of {base.rows} rows is left",
                where=self.describe(),
                remedy=f"look at the function given to {self.derivation.word}",
            )
        return Index(
            rows=first,
            groups=tuple(groups),
            schema=schema,
            row_bytes=-(-size_bytes // first),
            hash=hash_parts([base.hash, self.derivation.word, *((group.number, group.rows) for group in groups)]),
            base=base,
            in_order=base.in_order,
        )

    def _group_counts(self, base: Index) -> list[_GroupCount]:
        """Count the derived rows of each row group, or return the counts that the run stored for the same code."""

        def count() -> list[_GroupCount]:
            return first_pass(_Deriver(source=self, base=base).count, range(len(base.groups)))

        fingerprint = current_context().fingerprint
        if fingerprint is None:
            return count()
        return run_cached((fingerprint(self), base.hash), count, pack=_packed, unpack=_unpacked)

    def open(self, index: Index) -> Loader:
        """A loader for one process."""
        assert index.base is not None, "an index of derived rows has a base"
        return _DerivedLoader(_Deriver(source=self, base=index.base), index, self.describe())


@dataclass(frozen=True, kw_only=True)
class _Deriver:
    """Loads row groups of the base and derives them. Picklable: another process opens the files again."""

    source: DerivedSource
    base: Index

    def derived(self, number: int) -> Arrays:
        """Return the rows derived from row group `number` of the base."""
        group, data = self.base.groups[number], self.source.base
        samples = np.arange(group.first, group.first + group.rows, dtype=np.int64)
        arrays = copy_objects(self._loader.load(number, data.source_columns(self.base, None)))
        columns = data.transform({name: array.copy() for name, array in arrays.items()}, samples, Counters(), None)
        return self.source.derivation.derive(columns, samples)

    def count(self, number: int) -> _GroupCount:
        """Return rows, schema and size of the rows derived from row group `number`."""
        arrays = self.derived(number)
        return _GroupCount(_rows(arrays), schema_of(arrays), sum(array.nbytes for array in arrays.values()))

    @cached_property
    def _loader(self) -> Loader:
        return self.source.base.source.open(self.base)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "base": self.base}


class _GroupCount(NamedTuple):
    """The derived rows of a row group."""

    rows: int
    schema: Mapping[str, Field]
    size_bytes: int


def _packed(counted: Sequence[_GroupCount]) -> Any:
    """Return counts as JSON, with each schema once."""
    schemas: list[Any] = []
    groups = []
    for count in counted:
        schema = [[name, field.dtype.str, list(field.shape)] for name, field in count.schema.items()]
        if schema not in schemas:
            schemas.append(schema)
        groups.append([count.rows, schemas.index(schema), count.size_bytes])
    return [schemas, groups]


def _unpacked(stored: Any) -> list[_GroupCount]:
    schemas = [
        {str(name): Field(np.dtype(kind), tuple(map(int, shape))) for name, kind, shape in schema}
        for schema in stored[0]
    ]
    return [_GroupCount(int(rows), schemas[schema], int(size_bytes)) for rows, schema, size_bytes in stored[1]]


class _DerivedLoader(Loader):
    """Loads derived row groups, and checks their numbers of rows."""

    def __init__(self, deriver: _Deriver, index: Index, where: str) -> None:
        self._deriver, self._index, self._where = deriver, index, where

    def load(self, number: int, columns: Sequence[str]) -> Arrays:
        group = self._index.groups[number]
        arrays = self._deriver.derived(group.number)
        if _rows(arrays) != group.rows:
            raise DataError(
                f"row group {group.number} gave {_rows(arrays)} rows now and {group.rows} when the run began",
                where=f"{self._where}, {group.file}",
                remedy="make the function depend on the row alone: no clock, no random numbers of its own, no counter",
            )
        return {name: arrays[name] for name in select_columns(arrays, columns, self._where)}


def _rows(arrays: Arrays) -> int:
    return len(next(iter(arrays.values()))) if arrays else 0


# --- Derivations ------------------------------------------------------------------------------------------------------


RowPredicate = Callable[[dict[str, Any]], bool]
BatchPredicate = Callable[[Arrays], Any]
RowsFunction = Callable[[dict[str, Any]], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Keeps the rows for which function(row) is true."""

    function: RowPredicate
    word: str = "filter"

    def derive(self, columns: Arrays, samples: Rows) -> Arrays:
        """The rows that are kept."""
        keep = np.zeros(len(samples), dtype=np.bool_)
        for row, sample in enumerate(samples.tolist()):
            keep[row] = call_user_function(self.function, f"sample {sample}", _row(columns, row), finish=bool)
        return _filtered(columns, keep)


@dataclass(frozen=True, kw_only=True)
class BatchFilter:
    """Keeps the rows for which function(columns), an array of booleans, is true."""

    function: BatchPredicate
    word: str = "filter_batches"

    def derive(self, columns: Arrays, samples: Rows) -> Arrays:
        """The rows that are kept."""
        where = f"samples {samples[0]} to {samples[-1]}"
        keep = np.asarray(call_user_function(self.function, where, dict(columns)))
        if keep.shape != (len(samples),) or keep.dtype != np.bool_:
            raise DataError(
                f"the filter returned {keep.dtype} of shape {keep.shape} for {len(samples)} rows",
                where=where,
                remedy="return one boolean for each row",
            )
        return _filtered(columns, keep)


@dataclass(frozen=True, kw_only=True)
class FlatMap:
    """Replaces each row by any number of rows."""

    function: RowsFunction
    word: str = "flat_map"

    def derive(self, columns: Arrays, samples: Rows) -> Arrays:
        """Return the rows that the function makes of each row, in order."""
        rows: list[Mapping[str, Any]] = []
        for row, sample in enumerate(samples.tolist()):
            where = f"sample {sample}"
            rows.extend(call_user_function(self.function, where, _row(columns, row), finish=list))
        for item in rows:
            require_same_columns(item, rows[0], "flat_map gave")
        if not rows:
            return {}
        return {name: stack_rows([item[name] for item in rows], f"{name!r} from flat_map") for name in rows[0]}


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Concatenates documents and cuts them into sequences of one length; no sequence spans two row groups."""

    column: str  # of arrays of tokens, one document a row
    length: int  # of a packed sequence, in tokens
    # whether a document may continue in the next sequence; otherwise a document that does not fit starts a new
    # sequence, and a document longer than `length` is cut
    split: bool = True
    word: str = "pack"

    def derive(self, columns: Arrays, samples: Rows) -> Arrays:
        """Columns of (sequences, length): the tokens, `mask` (1 where there is one), `segment` (the document, counted
        from 1 within its sequence, 0 for padding) and `position` (of a token within its piece of the document).
        """
        select_columns(columns, (self.column,), "pack")
        documents = [_document(value) for value in columns[self.column]]
        _check_documents(documents, samples, self.column)
        starts = self._starts([len(document) for document in documents])
        return self._concatenated(documents, starts)

    def _starts(self, sizes: list[int]) -> list[int]:
        """Return the first token of each document in the concatenation of all sequences."""
        starts, end = [], 0
        for size in sizes:
            if not self.split and end % self.length + min(size, self.length) > self.length:
                end += self.length - end % self.length
            starts.append(end)
            end += size if self.split else min(size, self.length)
        return starts

    def _concatenated(self, documents: list[npt.NDArray[Any]], starts: list[int]) -> Arrays:
        if not self.split:
            documents = [document[: self.length] for document in documents]
        ends = [start + len(document) for start, document in zip(starts, documents, strict=True)]
        rows = -(-max(ends, default=0) // self.length)
        dtype = np.result_type(*{document.dtype for document in documents}) if documents else np.dtype(np.int64)
        tokens = np.zeros(rows * self.length, dtype)
        mask = np.zeros(rows * self.length, np.float32)
        segment, position = (np.zeros(rows * self.length, np.int32) for _ in range(2))
        for start, stop, document in zip(starts, ends, documents, strict=True):
            tokens[start:stop], mask[start:stop] = document, 1.0
            for low in range(start - start % self.length, stop, self.length):
                piece = slice(max(low, start), min(low + self.length, stop))
                segment[piece] = segment[low : piece.start].max(initial=0) + 1
                position[piece] = np.arange(piece.stop - piece.start)
        flat = {self.column: tokens, "mask": mask, "segment": segment, "position": position}
        return {name: array.reshape(rows, self.length) for name, array in flat.items()}


Derivation = Filter | BatchFilter | FlatMap | Pack
"""A function of the rows of a row group: `derive` depends on its arguments only, `word` names the method."""


def _row(columns: Arrays, row: int) -> dict[str, Any]:
    return {name: column[row] for name, column in columns.items()}


def _filtered(columns: Arrays, keep: npt.NDArray[np.bool_]) -> Arrays:
    return {name: column[keep] for name, column in columns.items()}


def _document(value: Any) -> npt.NDArray[Any]:
    """Return a document as an array; an empty one, which has no type, as integers."""
    document = np.asarray(value)
    return document if document.size or document.ndim != 1 else document.astype(np.int64)


def _check_documents(documents: list[npt.NDArray[Any]], samples: Rows, column: str) -> None:
    for document, sample in zip(documents, samples.tolist(), strict=True):
        if document.ndim != 1 or document.dtype.kind not in "iu":
            raise DataError(
                f"column {column!r} holds {document.dtype} of shape {document.shape}, and tokens were expected",
                where=f"sample {sample}",
                remedy="pack arrays of integers, one document a row: tokenise first",
            )
