"""From a share's columns to the feeds of its steps; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from trainwright.core.data import Batch, Feed, Feeding
from trainwright.datasets.formats.arrow_columns import Arrays
from trainwright.datasets.sampling.step_schedule import Schedule, Share

Shares = Mapping[int, tuple[Share, Arrays]]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """How shares become feeds.

    Attributes:
        schedule: of the run.
        feeding: data ranks of this actor.
        accumulation: micro-batches of each data rank in one step.
        rows: every micro-batch is filled to this many rows with repeats of weight 0; None leaves it as it is.
    """

    schedule: Schedule
    feeding: Feeding
    accumulation: int = 1
    rows: int | None = None

    def feed(self, step: int, shares: Shares) -> Feed:
        """The feed of one step, from the shares of this actor's data ranks that hold the step."""
        return Feed(
            step=step,
            parts=tuple(self._part(step, *shares[rank]) for rank in self.feeding.data_ranks),
            data_ranks=self.feeding.data_ranks,
            total=self.feeding.total,
            rows=self.schedule.size(step),
        )

    def _part(self, step: int, share: Share, columns: Arrays) -> tuple[Batch, ...]:
        """A step's rows cut into micro-batches as evenly as possible, in position order."""
        at = step - share.steps.start
        first, last = int(share.bounds[at]), int(share.bounds[at + 1])
        real = last - first if share.real[at] else 0
        cuts = [first + real * part // self.accumulation for part in range(self.accumulation + 1)]
        return tuple(self._batch(share, columns, low, high, first) for low, high in pairwise(cuts))

    def _batch(self, share: Share, columns: Arrays, low: int, high: int, first: int) -> Batch:
        """Rows low..high; the step's first row, with weight 0, where there are none."""
        real = high - low
        if not real:
            low, high = first, first + 1
        weights = np.ones(real) if share.good is None else share.good[low:high].astype(np.float64)
        batch = Batch(
            columns={name: array[low:high] for name, array in columns.items()},
            weights=weights if real else np.zeros(1),
            samples=share.samples[low:high],
        )
        return batch if self.rows is None or batch.rows == self.rows else _filled(batch, self.rows)


def _filled(batch: Batch, rows: int) -> Batch:
    """Repeat the first row, with weight 0, up to `rows` rows."""
    take = np.concatenate([np.arange(batch.rows), np.zeros(rows - batch.rows, dtype=np.int64)])
    return Batch(
        columns={name: array[take] for name, array in batch.columns.items()},
        weights=np.concatenate([batch.weights, np.zeros(rows - batch.rows)]),
        samples=batch.samples[take],
    )


class Coming:
    """Feeds in order, each told of those after it whose steps may begin before its own ends.

    Args:
        feeds: in the order of steps.
        ahead: how many may.
        apart: steps that begin when the one before is over, and before which none begins.
    """

    def __init__(self, feeds: Iterator[Feed], ahead: int, apart: Container[int]) -> None:
        self._feeds, self._ahead, self._apart = feeds, ahead, apart
        self._read: deque[Feed] = deque()

    def next(self, until: int) -> Feed:
        """The next step's; none from step `until` on begins with it."""
        read = self._read
        if not read:
            read.append(next(self._feeds))
        while len(read) <= self._ahead and read[-1].step + 1 < until:
            if any(step in self._apart for step in (read[-1].step, read[-1].step + 1)):
                break
            read.append(next(self._feeds))
        following: Feed | None = None
        for feed in reversed(read):
            following = replace(feed, following=following)
        assert following is not None, "the next one is among them"
        read.popleft()
        return following


def weightless(feed: Feed) -> Feed:
    """The same feed with all weights 0."""
    return replace(
        feed,
        parts=tuple(tuple(replace(batch, weights=np.zeros(batch.rows)) for batch in part) for part in feed.parts),
    )
