"""From order to steps: which samples each global step has, and each data rank's share of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Cursor
from trainwright.core.errors import DataError
from trainwright.datasets.sampling.sampler import Order, Rows

if TYPE_CHECKING:
    from trainwright.datasets.formats.arrow_columns import Arrays


def steps_per_epoch(rows: int, batch_size: int, drop_last: bool, epoch_samples: int | None = None) -> int:
    """Steps of an epoch of `rows` samples, or of `epoch_samples`; a short last batch counts unless it is dropped."""
    samples = rows if epoch_samples is None else epoch_samples
    return samples // batch_size if drop_last else -(-samples // batch_size)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One data rank's part of some steps that begin in one pass over the data.

    Attributes:
        steps: the global steps.
        passes: (rows,) int64, the pass that each sample belongs to: that in which the steps begin, or the next.
        samples: (rows,) int64, row numbers in position order; a step without a sample of this rank has one stand-in.
        bounds: (len(steps) + 1,) int64; step i has samples bounds[i]..bounds[i + 1].
        real: (len(steps),) bool; False where the step's only sample is a stand-in of weight 0.
        good: (rows,) bool; False for a sample that cannot be read, which has weight 0. None where all can.
    """

    steps: range
    passes: Rows
    samples: Rows
    bounds: Rows
    real: npt.NDArray[np.bool_]
    good: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The steps of a run over one data set; pure, and the same for any number of data ranks.

    Attributes:
        order: of the samples.
        batch_size: global, in samples.
        epochs: of the run; each is a pass over the data, unless `epoch_samples` says otherwise.
        drop_last: leave out the short last batch of each epoch.
        epoch_samples: samples of an epoch, whatever the data has: a virtual epoch. The passes follow each other as they
            are, so that a batch may hold the last samples of one and the first of the next.
    """

    order: Order
    batch_size: int
    epochs: int = 1
    drop_last: bool = False
    epoch_samples: int | None = None

    def __post_init__(self) -> None:
        if not self.steps_per_epoch:
            raise DataError(
                f"an epoch has {self._epoch_rows} rows, less than a batch of {self.batch_size}, "
                "and drop_last leaves them out",
                remedy=f"set batch_size to {self._epoch_rows} or less, or drop_last=False",
            )

    @property
    def rows(self) -> int:
        """Rows of the data set."""
        return self.order.lanes.rows

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, virtual or not."""
        return steps_per_epoch(self.rows, self.batch_size, self.drop_last, self.epoch_samples)

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        return self.steps_per_epoch * self.epochs

    @property
    def _epoch_rows(self) -> int:
        return self.rows if self.epoch_samples is None else self.epoch_samples

    def _place(self, step: int) -> int:
        """Samples before those of a step, over all epochs and passes."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self._epoch_rows + within * self.batch_size

    def cursor(self, step: int) -> Cursor:
        """Where the batch of global step `step` starts: the pass, and the position in it."""
        number, position = divmod(self._place(step), self.rows)
        return Cursor(epoch=number, position=position, lanes=self.order.lanes.count)

    def size(self, step: int) -> int:
        """Real samples in the global batch of a step."""
        return min(self.batch_size, self._epoch_rows - step % self.steps_per_epoch * self.batch_size)

    def samples(self, step: int) -> Rows:
        """Row numbers of the global batch of a step, in the order of their positions: (size,) int64."""
        return self.share(range(step, step + 1), 0, 1).samples

    def largest_share(self, total: int) -> int:
        """An upper bound of what one of `total` data ranks gets of a batch, in rows."""
        most, size = self.order.largest_share, self.batch_size
        if self.epoch_samples is None:
            return most(total, min(size, self.rows))
        if size > self.rows:
            return (size // self.rows + 2) * most(total, self.rows)
        return max(most(total, head) + most(total, size - head) for head in range(size))

    def chunk(self, step: int, length: int) -> range:
        """The chunk of up to `length` steps that holds `step`.

        Chunks lie on a fixed grid within the steps of an epoch that begin in one pass.
        """
        epoch_first = step - step % self.steps_per_epoch
        offset = self._place(epoch_first)
        number = self._place(step) // self.rows
        first = epoch_first + max(-(-(number * self.rows - offset) // self.batch_size), 0)
        stop = epoch_first + min(-(-((number + 1) * self.rows - offset) // self.batch_size), self.steps_per_epoch)
        start = step - (step - first) % length
        return range(start, min(start + length, stop, self.total_steps))

    def share_rows(self, steps: range, total: int) -> Rows:
        """Rows, stand-ins included, of each data rank's share of `steps`, which begin in one pass: (total,) int64.

        It costs less than one `share`, since no permutation is computed.
        """
        start, stop = self._place(steps.start), self._place(steps[-1]) + self.size(steps[-1])
        places = np.arange(start, stop, dtype=np.int64)
        cells = (places - start) // self.batch_size * total + self.order.owners(places % self.rows, total)
        counts = np.bincount(cells, minlength=len(steps) * total).reshape(len(steps), total)
        rows: Rows = np.maximum(counts, 1).sum(axis=0, dtype=np.int64)
        return rows

    def share(self, steps: range, rank: int, total: int) -> Share:
        """What data rank `rank` of `total` gets in `steps`, which all begin in one pass."""
        start, stop = self._place(steps.start), self._place(steps[-1]) + self.size(steps[-1])
        number, end = start // self.rows, (start // self.rows + 1) * self.rows
        starts = start + np.arange(len(steps) + 1, dtype=np.int64) * self.batch_size
        parts = [(number, start, min(stop, end)), *((turn, turn * self.rows, stop) for turn in self._later(end, stop))]
        found = [self._part(*part, rank, total) for part in parts]
        places, samples = (np.concatenate(each) for each in zip(*found, strict=True))
        bounds = np.searchsorted(places, starts).astype(np.int64)
        real = np.diff(bounds) > 0
        if not real.all():
            empty = np.flatnonzero(~real)
            stand_ins = [self.order.stand_in(int(starts[step]) - number * self.rows, rank, total) for step in empty]
            fill = self.order.rows_at(number, np.array(stand_ins, dtype=np.int64))
            samples, places = (np.insert(into, bounds[empty], of) for into, of in ((samples, fill), (places, start)))
            bounds = bounds + np.concatenate([[0], np.cumsum(~real)])
        return Share(steps=steps, passes=places // self.rows, samples=samples, bounds=bounds, real=real)

    def _later(self, end: int, stop: int) -> range:
        """The passes after the first that places up to `stop` lie in; several where a batch holds the data twice."""
        return range(end // self.rows, -(-stop // self.rows))

    def _part(self, number: int, start: int, stop: int, rank: int, total: int) -> tuple[Rows, Rows]:
        """A data rank's places and rows between two places, as far as they lie in one pass."""
        first = number * self.rows
        positions, rows = self.order.share(number, start - first, min(stop - first, self.rows), rank, total)
        return positions + first, rows


def by_pass(passes: Rows, compute: Callable[[npt.NDArray[np.bool_], int], Arrays]) -> Arrays:
    """compute(which, number) of the rows of each pass, together again in their order.

    Args:
        passes: (rows,) int64; one pass or more, in any order.
        compute: gives as many rows as are True in `which`, by column name.
    """
    numbers = np.unique(passes).tolist() or [0]
    found = [(which := passes == number, compute(which, number)) for number in numbers]
    if len(found) == 1:
        return found[0][1]
    order = np.argsort(np.concatenate([np.flatnonzero(which) for which, _ in found]), kind="stable")
    return {name: np.concatenate([arrays[name] for _, arrays in found])[order] for name in found[0][1]}
