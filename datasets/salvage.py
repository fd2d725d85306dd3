"""Going on without samples that cannot be read: they are found, told of, and take part with weight 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError, TrainwrightError, UserCodeError
from trainwright.datasets.columns import Arrays
from trainwright.datasets.order import Rows

Read = Callable[[Rows], Arrays]


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A sample that could not be read or transformed.

    Attributes:
        sample: its row number in the data set.
        where: file and row group, or what the error names.
        error: what happened.
    """

    sample: int
    where: str
    error: str


class Salvage:
    """Reads what can be read. For one thread.

    Args:
        limit: samples that may be skipped; one more raises DataError.
        record: is told of each, once.
    """

    def __init__(self, limit: int, record: Callable[[Skipped], None]) -> None:
        self._limit, self._record = limit, record
        self._skipped: dict[int, Skipped] = {}

    def read(self, read: Read, samples: Rows) -> tuple[Arrays, npt.NDArray[np.bool_]]:
        """read(samples), and which of its rows are good; a bad one holds a copy of a good one.

        Raises DataError where the limit is passed or no row of these is good.
        """
        good = np.array([sample not in self._skipped for sample in samples.tolist()], dtype=np.bool_)
        found = self._parts(read, samples[good])
        good[good] = np.concatenate([np.full(len(part), arrays is not None) for part, arrays in found] or [good[:0]])
        pieces = [arrays for _, arrays in found if arrays is not None]
        if not pieces:
            raise self._none_left(samples)
        columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        return _spread(columns, good), good

    def _parts(self, read: Read, samples: Rows) -> list[tuple[Rows, Arrays | None]]:
        """Parts of the samples in order with their columns, None for a single bad one: halved until each is known."""
        if not len(samples):
            return []
        try:
            return [(samples, read(samples))]
        except TooManySkipped:
            raise
        except (DataError, UserCodeError) as error:
            if len(samples) == 1:
                self._skip(int(samples[0]), error)
                return [(samples, None)]
        middle = len(samples) // 2
        return self._parts(read, samples[:middle]) + self._parts(read, samples[middle:])

    def _skip(self, sample: int, error: TrainwrightError) -> None:
        skipped = Skipped(sample=sample, where=error.where, error=error.what)
        self._skipped[sample] = skipped
        self._record(skipped)
        if len(self._skipped) > self._limit:
            raise _too_many(self._limit, error)

    def _none_left(self, samples: Rows) -> DataError:
        first = self._skipped[int(samples[0])]
        return DataError(
            f"none of {len(samples)} samples in a row can be read: {first.error}",
            where=first.where,
            remedy="mend the file; a few samples can be skipped, not whole batches",
        )


class TooManySkipped(DataError):
    """The limit of samples that may be skipped was passed."""


def _too_many(limit: int, last: TrainwrightError) -> TooManySkipped:
    return TooManySkipped(
        f"more than {limit} samples cannot be read, which is the limit; the last: {last.what}",
        where=last.where,
        remedy="look at the quarantine beside the run, mend the data, or raise skip_limit",
        detail=last.detail,
    )


def _spread(columns: Arrays, good: npt.NDArray[np.bool_]) -> Arrays:
    """One row for each of `good`: the next of the columns', or the first for a bad one."""
    take = np.where(good, np.cumsum(good) - 1, 0)
    return {name: array[take] for name, array in columns.items()}
