"""Virtual epochs: lengths count samples, passes over the data follow each other as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError
from trainwright.datasets import table
from trainwright.datasets.loading.batch_loader import BatchLoader, make_schedule


def stream(
    rows: int, batch: int, epochs: int, samples: int | None, rank: int = 0, of: int = 1, **more: Any
) -> BatchLoader:
    data = table({"id": np.arange(rows)}).map(lambda row, rng: {"id": row["id"], "random": rng.random()})
    return BatchLoader(
        data, batch_size=batch, epochs=epochs, epoch_samples=samples, seed=2,
        feeding=FeedAssignment(data_ranks=range(rank, rank + 1), total=of), **more,
    )  # fmt: skip


def fed(of: BatchLoader, start: int = 0) -> list[list[tuple[int, float]]]:
    """(row, random number) of the real samples of each step."""
    with of.feeds(start) as feeds:
        batches = [feed.parts[0][0] for feed in feeds]
    return [
        [
            (row, random)
            for row, random, weight in zip(batch.columns["id"], batch.columns["random"], batch.weights, strict=True)
            if weight
        ]
        for batch in batches
    ]


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 16), st.integers(1, 4), st.integers(1, 90), st.integers(1, 3))
def test_an_epoch_has_as_many_samples_as_it_says_and_passes_follow_each_other(
    rows: int, batch: int, epochs: int, samples: int, ranks: int
) -> None:
    virtual = stream(rows, batch, epochs, samples)
    steps = fed(virtual)
    sizes = [len(step) for step in steps]
    length = virtual.schedule.steps_per_epoch
    assert [sum(sizes[first : first + length]) for first in range(0, len(sizes), length)] == [samples] * epochs
    flat = [each for step in steps for each in step]
    passes = fed(stream(rows, batch, -(-len(flat) // rows), None))
    assert flat == [each for step in passes for each in step][: len(flat)]
    steps_of = make_schedule(
        table({"id": np.arange(rows)}).index(), batch_size=batch, epochs=epochs, seed=2, shuffle=True, drop_last=False,
        epoch_samples=samples,
    )  # fmt: skip
    chunk = steps_of.chunk(len(steps) - 1, 3)
    counts = [len(steps_of.share(chunk, rank, ranks).samples) for rank in range(ranks)]
    assert steps_of.share_rows(chunk, ranks).tolist() == counts
    shares = [fed(stream(rows, batch, epochs, samples, rank, ranks)) for rank in range(ranks)]
    assert [sorted(each for share in step for each in share) for step in zip(*shares, strict=True)] == (
        [sorted(step) for step in steps]
    )


def test_40_samples_of_10_rows_are_10_batches_of_4_and_a_start_in_the_middle_is_the_same() -> None:
    virtual = stream(10, 4, 2, 40)
    batches = fed(virtual)
    assert [len(batch) for batch in batches] == [4] * 20
    assert sorted(row for batch in batches[:5] for row, _ in batch) == sorted([*range(10)] * 2)
    assert fed(virtual, 7) == batches[7:]


def test_drop_last_leaves_out_the_short_batch_of_a_virtual_epoch() -> None:
    assert [len(batch) for batch in fed(stream(10, 4, 2, 18, drop_last=True))] == [4] * 8
    with pytest.raises(DataError, match="an epoch has 3 rows, less than a batch of 4"):
        stream(10, 4, 2, 3, drop_last=True)


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 90), st.integers(1, 4))
def test_static_shapes_hold_the_largest_share_of_a_batch_over_two_passes(
    rows: int, batch: int, samples: int, ranks: int
) -> None:
    for rank in range(ranks):
        with stream(rows, batch, 2, samples, rank, ranks, static_shapes=True).feeds() as feeds:
            assert len({feed.parts[0][0].rows for feed in feeds}) == 1
