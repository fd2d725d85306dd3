"""Streams of small tables, and the comparison of their feeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainwright.core.data import Feed, FeedAssignment
from trainwright.datasets import Dataset, table
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.datasets.sample_order import StepSchedule


def ids(rows: int) -> Dataset:
    return table({"id": np.arange(rows), "x": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)})


def stream(dataset: Dataset, rank: int = 0, total: int = 1, ranks: int = 1, **options: Any) -> BatchLoader:
    feeding = FeedAssignment(data_ranks=range(rank, rank + ranks), total=total)
    return BatchLoader(dataset, **{"batch_size": 8, "seed": 5, "feeding": feeding, **options})


def place(schedule: StepSchedule, step: int) -> tuple[int, int]:
    """The pass over the data in which a step's batch starts, and its position there."""
    epoch, within = divmod(step, schedule.steps_per_epoch)
    start = epoch * (schedule.epoch_samples or schedule.rows) + within * schedule.batch_size
    return divmod(start, schedule.rows)


def real(feed: Feed) -> list[int]:
    """Samples of weight 1 in a feed, in order."""
    return [
        int(sample)
        for part in feed.parts
        for batch in part
        for sample, weight in zip(batch.columns["id"], batch.weights, strict=True)
        if weight
    ]


def collect(source: BatchLoader, start: int = 0) -> list[Feed]:
    with source.feeds(start) as feeds:
        return list(feeds)


def same(left: Feed, right: Feed) -> bool:
    """Equal to the last byte."""
    pairs = [
        (one, other)
        for ours, theirs in zip(left.parts, right.parts, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    return (left.step, left.data_ranks, left.total, left.rows) == (
        right.step,
        right.data_ranks,
        right.total,
        right.rows,
    ) and all(
        one.columns.keys() == other.columns.keys()
        and np.array_equal(one.samples, other.samples)
        and np.array_equal(one.weights, other.weights)
        and all(
            array.dtype == other.columns[name].dtype and np.array_equal(array, other.columns[name])
            for name, array in one.columns.items()
        )
        for one, other in pairs
    )
