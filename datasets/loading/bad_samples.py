"""Skip samples that cannot be read: record them, and give them weight 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError, TrainwrightError, UserCodeError
from trainwright.datasets.data_source import Arrays, Field, Rows, require_same_fields, schema_of

_Read = Callable[[Rows], Arrays]
_Parts = list[tuple[Rows, Arrays | None]]

_NEARBY_SAMPLES = 64  # tried before a bad sample, and at the start of the data, if no good row is known
_QUARANTINED = "look at quarantine/ in the folder of the run, correct the data, or raise skip_limit"


@dataclass(frozen=True, kw_only=True)
class SkippedSample:
    """A sample that could not be read or transformed."""

    sample: int  # its row number in the data set
    where: str  # file and row group, or another place that the error names
    error: str  # its message


class SkippingReader:
    """Reads samples and skips samples that fail, or whose columns differ from the others. For one thread.

    The first read decides which columns are right. Each pass tests each sample again, since its number can be another
    row there, or a random transform can fail. So a resumed run skips the same samples as an uninterrupted one.

    Args:
        limit: samples, by number, that may be skipped; one more raises DataError.
        record: called once for each skipped sample.
        remedy: of the error beyond the limit.
    """

    def __init__(self, limit: int, record: Callable[[SkippedSample], None], remedy: str = _QUARANTINED) -> None:
        self._limit, self._record, self._remedy = limit, record, remedy
        self._skipped: dict[int, SkippedSample] = {}
        self._last: dict[int, int] = {}  # by skipped sample, the pass in which it failed last
        self._row: Arrays | None = None  # a good row, with the columns that all rows must have

    def read(self, read: _Read, samples: Rows, number: int = 0) -> tuple[Arrays, npt.NDArray[np.bool_]]:
        """Return read(samples) and a mask of its good rows; a bad row is replaced by a copy of a good one.

        Args:
            read: reads samples of the pass.
            samples: of one pass, by number.
            number: of the pass.

        Raises DataError beyond the limit, or where none of these rows is good and none is found elsewhere.
        """
        good = np.array([self._last.get(sample) != number for sample in samples.tolist()], dtype=np.bool_)
        if not len(samples):
            return read(samples), good
        parts = self._parts_around_suspects(read, samples[good])
        if self._row is None:
            parts = self._choose_good_row(read, parts)
        self._last.update((int(part[0]), number) for part, arrays in parts if arrays is None)
        good[good] = np.concatenate([np.full(len(part), arrays is not None) for part, arrays in parts] or [good[:0]])
        pieces = [arrays for _, arrays in parts if arrays is not None] or [self._good_row_for(read, samples)]
        positions = np.where(good, np.cumsum(good) - 1, 0)  # the next good row, or the first for a bad sample
        return {name: np.concatenate([piece[name] for piece in pieces])[positions] for name in pieces[0]}, good

    def _parts_around_suspects(self, read: _Read, samples: Rows) -> _Parts:
        """As `_parts`, but read samples that were bad in another pass singly, which saves the search for them."""
        suspect = np.array([sample in self._skipped for sample in samples.tolist()], dtype=np.bool_)
        pieces = np.split(samples, np.flatnonzero(suspect[1:] | suspect[:-1]) + 1)
        return [part for piece in pieces for part in self._parts(read, piece)]

    def _parts(self, read: _Read, samples: Rows) -> _Parts:
        """Read samples; if that fails, or columns differ from the good row, read each half.

        Returns parts in order with their columns, or with None for a bad sample.
        """
        if not len(samples):
            return []
        try:
            arrays = read(samples)
            if self._row is not None:
                require_same_fields(schema_of(arrays), schema_of(self._row), "the other rows", f"sample {samples[0]}")
            return [(samples, arrays)]
        except _TooManyBadSamples:
            raise
        except (DataError, UserCodeError) as error:
            if len(samples) == 1:
                self._skip(int(samples[0]), error)
                return [(samples, None)]
        middle = len(samples) // 2
        return self._parts(read, samples[:middle]) + self._parts(read, samples[middle:])

    def _choose_good_row(self, read: _Read, parts: _Parts) -> _Parts:
        """Choose the good row by the columns of most rows, and read the parts with other columns again."""
        rows: Counter[frozenset[tuple[str, Field]]] = Counter()
        examples: dict[frozenset[tuple[str, Field]], Arrays] = {}
        for part, arrays in parts:
            if arrays is not None:
                kind = frozenset(schema_of(arrays).items())
                rows[kind] += len(part)
                examples.setdefault(kind, arrays)
        if not rows:
            return parts
        self._row = _first_row(examples[rows.most_common(1)[0][0]])
        schema = schema_of(self._row)
        result: _Parts = []
        for part, arrays in parts:
            same = arrays is None or schema_of(arrays) == schema
            # a part may differ because of one row, where a batch transform widens the type of all
            result += [(part, arrays)] if same else self._parts(read, part)
        return result

    def _good_row_for(self, read: _Read, samples: Rows) -> Arrays:
        """Return the good row, for samples that are all bad; a run that resumes at them must first find one."""
        if self._row is None:
            self._row = self._find_good_row(read, int(samples[0]))
        if self._row is None:
            first = self._skipped[int(samples[0])]
            raise DataError(
                f"none of {len(samples)} samples in a row can be read: {first.error}",
                where=first.where,
                remedy="correct the file; a few samples can be skipped, not whole batches",
            )
        return self._row

    def _find_good_row(self, read: _Read, first: int) -> Arrays | None:
        """Return a good row among other samples, whose errors are ignored."""
        for sample in (*range(first - 1, max(first - _NEARBY_SAMPLES, 0) - 1, -1), *range(_NEARBY_SAMPLES)):
            # an IndexError means that the data has fewer rows
            with suppress(DataError, UserCodeError, IndexError):
                if sample not in self._skipped:
                    return _first_row(read(np.array([sample], dtype=np.int64)))
        return None

    def _skip(self, sample: int, error: TrainwrightError) -> None:
        if sample in self._skipped:
            return
        skipped = SkippedSample(sample=sample, where=error.where, error=error.what)
        self._skipped[sample] = skipped
        self._record(skipped)
        if len(self._skipped) > self._limit:
            raise _TooManyBadSamples(
                f"more than {self._limit} samples cannot be read, which is the limit; the last: {error.what}",
                where=error.where,
                remedy=self._remedy,
                detail=error.detail,
            )


class _TooManyBadSamples(DataError):
    """More samples are bad than may be skipped."""


def _first_row(columns: Arrays) -> Arrays:
    """Copy the first row, so that the other rows need not stay in memory."""
    return {name: array[:1].copy() for name, array in columns.items()}
