"""What derived data sets are made by: filters, one-to-many functions, packing to a length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError
from trainwright.datasets.formats.arrow_columns import Arrays, select, stack
from trainwright.datasets.ops.transforms import called
from trainwright.datasets.sampling.sampler import Rows

RowPredicate = Callable[[dict[str, Any]], bool]
BatchPredicate = Callable[[Arrays], Any]
RowsFunction = Callable[[dict[str, Any]], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Keeps the rows for which function(row) is true."""

    function: RowPredicate
    word: str = "filter"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The predicate."""
        return (self.function,)

    def derive(self, columns: Arrays, samples: Rows) -> Arrays:
        """The rows that are kept."""
        keep = np.zeros(len(samples), dtype=np.bool_)
        for row, sample in enumerate(samples.tolist()):
            keep[row] = called(self.function, f"sample {sample}", _row(columns, row), bool)
        return _kept(columns, keep)


@dataclass(frozen=True, kw_only=True)
class BatchFilter:
    """Keeps the rows for which function(columns), an array of booleans, is true."""

    function: BatchPredicate
    word: str = "filter_batches"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The predicate."""
        return (self.function,)

    def derive(self, columns: Arrays, samples: Rows) -> Arrays:
        """The rows that are kept."""
        where = f"samples {samples[0]} to {samples[-1]}"
        keep = np.asarray(called(self.function, where, dict(columns)))
        if keep.shape != (len(samples),) or keep.dtype != np.bool_:
            raise DataError(
                f"the filter returned {keep.dtype} of shape {keep.shape} for {len(samples)} rows",
                where=where,
                remedy="return one boolean for each row",
            )
        return _kept(columns, keep)


@dataclass(frozen=True, kw_only=True)
class FlatMap:
    """Any number of rows for each row."""

    function: RowsFunction
    word: str = "flat_map"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The function."""
        return (self.function,)

    def derive(self, columns: Arrays, samples: Rows) -> Arrays:
        """All rows that come of these, in order."""
        made: list[Mapping[str, Any]] = []
        for row, sample in enumerate(samples.tolist()):
            where = f"sample {sample}"
            made.extend(called(self.function, where, _row(columns, row), finish=list))
        _same_columns(made)
        if not made:
            return {}
        return {name: stack([item[name] for item in made], f"{name!r} from flat_map") for name in made[0]}


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Sequences of tokens, laid end to end and cut to one length; no sequence spans two row groups.

    Attributes:
        column: of arrays of tokens, one document a row.
        length: of a packed sequence, in tokens.
        split: whether a document may go on in the next sequence; otherwise one that does not fit begins a new
            sequence, and one longer than `length` is cut.
    """

    column: str
    length: int
    split: bool = True
    word: str = "pack"

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """None."""
        return ()

    def derive(self, columns: Arrays, samples: Rows) -> Arrays:
        """Columns of (sequences, length): the tokens, `mask` (1 where there is one), `segment` (the document, counted
        from 1 within its sequence, 0 for padding) and `position` (of a token within its piece of the document).
        """
        select(columns, (self.column,), "pack")
        documents = [_document(value) for value in columns[self.column]]
        _check_documents(documents, samples, self.column)
        starts = self._starts([len(document) for document in documents])
        return self._laid(documents, starts)

    def _starts(self, sizes: list[int]) -> list[int]:
        """Where each document begins in the flat space of all sequences."""
        starts, end = [], 0
        for size in sizes:
            if not self.split and end % self.length + min(size, self.length) > self.length:
                end += self.length - end % self.length
            starts.append(end)
            end += size if self.split else min(size, self.length)
        return starts

    def _laid(self, documents: list[npt.NDArray[Any]], starts: list[int]) -> Arrays:
        if not self.split:
            documents = [document[: self.length] for document in documents]
        ends = [start + len(document) for start, document in zip(starts, documents, strict=True)]
        rows = -(-max(ends, default=0) // self.length)
        dtype = np.result_type(*{document.dtype for document in documents}) if documents else np.dtype(np.int64)
        tokens = np.zeros(rows * self.length, dtype)
        mask = np.zeros(rows * self.length, np.float32)
        segment, position = (np.zeros(rows * self.length, np.int32) for _ in range(2))
        for start, document in zip(starts, documents, strict=True):
            self._lay(start, document, tokens, mask, segment, position)
        flat = {self.column: tokens, "mask": mask, "segment": segment, "position": position}
        return {name: array.reshape(rows, self.length) for name, array in flat.items()}

    def _lay(self, start: int, document: npt.NDArray[Any], *arrays: npt.NDArray[Any]) -> None:
        tokens, mask, segment, position = arrays
        stop = start + len(document)
        tokens[start:stop], mask[start:stop] = document, 1.0
        for low in range(start - start % self.length, stop, self.length):
            piece = slice(max(low, start), min(low + self.length, stop))
            segment[piece] = segment[low : piece.start].max(initial=0) + 1
            position[piece] = np.arange(piece.stop - piece.start)


def _row(columns: Arrays, row: int) -> dict[str, Any]:
    return {name: column[row] for name, column in columns.items()}


def _kept(columns: Arrays, keep: npt.NDArray[np.bool_]) -> Arrays:
    return {name: column[keep] for name, column in columns.items()}


def _same_columns(made: list[Mapping[str, Any]]) -> None:
    for item in made:
        if not isinstance(item, Mapping) or item.keys() != made[0].keys():
            given = f"columns {sorted(item)}" if isinstance(item, Mapping) else f"a {type(item).__name__}"
            raise DataError(
                f"flat_map gave {given} for a row", remedy="yield dicts with the same columns for every row"
            )


def _document(value: Any) -> npt.NDArray[Any]:
    """A document as an array; an empty one has no type of its own."""
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
