"""From order to steps: which samples each global step has, and each data rank's share of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Cursor
from trainwright.core.errors import DataError
from trainwright.datasets.order import Order, Rows


def steps_per_pass(rows: int, batch_size: int, drop_last: bool) -> int:
    """Steps of one pass over the data; a short last batch counts unless it is dropped."""
    return rows // batch_size if drop_last else -(-rows // batch_size)


def steps_per_epoch(rows: int, batch_size: int, drop_last: bool, epoch_samples: int | None = None) -> int:
    """Steps of an epoch: of one pass, or of `epoch_samples` samples, however many passes those are."""
    return steps_per_pass(rows, batch_size, drop_last) if epoch_samples is None else -(-epoch_samples // batch_size)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One data rank's part of some steps of one epoch.

    Attributes:
        steps: the global steps.
        epoch: the pass that they belong to.
        samples: (rows,) int64, row numbers in position order; a step without a sample of this rank has one stand-in.
        bounds: (len(steps) + 1,) int64; step i has samples bounds[i]..bounds[i + 1].
        real: (len(steps),) bool; False where the step's only sample is a stand-in of weight 0.
        good: (rows,) bool; False for a sample that cannot be read, which has weight 0. None where all can.
    """

    steps: range
    epoch: int
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
        drop_last: leave out the short last batch of each pass.
        epoch_samples: samples of an epoch, whatever the data has: a virtual epoch. The passes stay as they are.
    """

    order: Order
    batch_size: int
    epochs: int = 1
    drop_last: bool = False
    epoch_samples: int | None = None

    def __post_init__(self) -> None:
        if not self.steps_per_pass:
            raise DataError(
                f"the data has {self.rows} rows, less than a batch of {self.batch_size}, and drop_last leaves them out",
                remedy=f"set batch_size to {self.rows} or less, or drop_last=False",
            )

    @property
    def rows(self) -> int:
        """Rows of the data set."""
        return self.order.lanes.rows

    @property
    def steps_per_pass(self) -> int:
        """Steps of one pass over the data."""
        return steps_per_pass(self.rows, self.batch_size, self.drop_last)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, virtual or not."""
        return steps_per_epoch(self.rows, self.batch_size, self.drop_last, self.epoch_samples)

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        return self.steps_per_epoch * self.epochs

    def cursor(self, step: int) -> Cursor:
        """Where the batch of global step `step` starts."""
        epoch, within = divmod(step, self.steps_per_pass)
        return Cursor(epoch=epoch, position=within * self.batch_size, lanes=self.order.lanes.count)

    def size(self, step: int) -> int:
        """Real samples in the global batch of a step."""
        return min(self.batch_size, self.rows - step % self.steps_per_pass * self.batch_size)

    def chunk(self, step: int, length: int) -> range:
        """The chunk of up to `length` steps that holds `step`. Chunks lie on a fixed grid within each pass."""
        first = step - step % self.steps_per_pass
        start = step - (step - first) % length
        return range(start, min(start + length, first + self.steps_per_pass, self.total_steps))

    def share_rows(self, steps: range, total: int) -> Rows:
        """Rows, stand-ins included, of each data rank's share of `steps`, which all belong to one pass: (total,) int64.

        It costs less than one `share`, since no permutation is computed.
        """
        within = steps.start % self.steps_per_pass
        start, stop = within * self.batch_size, min((within + len(steps)) * self.batch_size, self.rows)
        positions = np.arange(start, stop, dtype=np.int64)
        cells = (positions - start) // self.batch_size * total + self.order.owners(positions, total)
        counts = np.bincount(cells, minlength=len(steps) * total).reshape(len(steps), total)
        rows: Rows = np.maximum(counts, 1).sum(axis=0, dtype=np.int64)
        return rows

    def share(self, steps: range, rank: int, total: int) -> Share:
        """What data rank `rank` of `total` gets in `steps`, which all belong to one pass."""
        epoch, within = divmod(steps.start, self.steps_per_pass)
        starts = (within + np.arange(len(steps) + 1, dtype=np.int64)) * self.batch_size
        stop = min(int(starts[-1]), self.rows)
        positions, samples = self.order.share(epoch, int(starts[0]), stop, rank, total)
        bounds = np.searchsorted(positions, starts).astype(np.int64)
        real = np.diff(bounds) > 0
        if not real.all():
            empty = np.flatnonzero(~real)
            stand_ins = [self.order.stand_in(int(starts[step]), rank, total) for step in empty]
            fill = self.order.rows_at(epoch, np.array(stand_ins, dtype=np.int64))
            samples = np.insert(samples, bounds[empty], fill)
            bounds = bounds + np.concatenate([[0], np.cumsum(~real)])
        return Share(steps=steps, epoch=epoch, samples=samples, bounds=bounds, real=real)
