"""How well an order shuffles, measured against a perfect permutation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainwright.datasets.sampling.sampler import Order, Rows

BLOCKS = 20


@dataclass(frozen=True, kw_only=True)
class ShuffleQuality:
    """Statistics of an order. Of a perfect permutation the first two are 1 and the third is 0, but for chance.

    Attributes:
        scatter: mean distance, in positions of an epoch, between rows that are stored next to each other, over that of
            a perfect permutation, a third of the rows. Below 1, neighbours stay together.
        clumping: chi-square of what batches hold of each of 20 equal parts of the storage, over its expectation. Above
            1, batches hold more of some parts and less of others than chance gives; below 1 they are more even, as
            stratified samples are.
        memory: rank correlation (Spearman) of the rows' positions in two epochs. Above 0, rows come at similar times.
    """

    scatter: float
    clumping: float
    memory: float


def shuffle_quality(order: Order, batch_size: int, *, epoch: int = 0) -> ShuffleQuality:
    """Measure an order over two epochs, in the memory of a few numbers a row."""
    rows = order.lanes.rows
    first, second = (order.rows_of(number, 0, rows) for number in (epoch, epoch + 1))
    place, later = np.empty_like(first), np.empty_like(second)
    place[first], later[second] = np.arange(rows), np.arange(rows)
    neighbours = float(np.abs(np.diff(place)).mean()) if rows > 1 else 0.0
    return ShuffleQuality(
        scatter=neighbours / ((rows + 1) / 3),
        clumping=_clumping(first, batch_size),
        memory=float(np.corrcoef(place, later)[0, 1]) if rows > 2 else 0.0,
    )


def _clumping(rows: Rows, batch_size: int) -> float:
    """Mean over full batches of the chi-square statistic, over its mean for draws without replacement."""
    total = len(rows)
    size = min(batch_size, total - 1)
    batches = total // size if size else 0
    blocks = min(BLOCKS, total)
    if not batches or blocks < 2:
        return 1.0
    share = rows[: batches * size].reshape(batches, size) * blocks // total
    counts = np.stack([np.bincount(batch, minlength=blocks) for batch in share])
    wanted = size * np.bincount(np.arange(total) * blocks // total, minlength=blocks) / total
    expected = (blocks - 1) * (total - size) / (total - 1)
    return float((((counts - wanted) ** 2) / wanted).sum(1).mean() / expected)
