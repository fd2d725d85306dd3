"""The pieces of a heavy data set: labelled as they are wanted, at the same cost anywhere in a run."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from trainwright.core.data import FeedAssignment
from trainwright.datasets import table
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.datasets.ray_data.delivery_pipeline import PART_ROWS, PipelineSpec
from trainwright.datasets.ray_data.piece_blocks import SharePart
from trainwright.datasets.sample_order import Lanes, SampleOrder, StepSchedule, choose_lanes

RANKS = 8


def recipe_of(schedule: StepSchedule, length: int = 4) -> PipelineSpec:
    data = table({"id": np.arange(10)})
    return PipelineSpec(dataset=data, index=data.index(), columns=None, schedule=schedule, length=length)


def test_a_piece_far_into_a_large_run_costs_what_the_first_one_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """10^9 rows, 90 epochs: each piece looks at its own chunk, and permutes no row."""
    chunks: list[range] = []
    counted = StepSchedule.share_rows

    def share_rows(self: StepSchedule, steps: range, total: int) -> np.ndarray:
        chunks.append(steps)
        return counted(self, steps, total)

    monkeypatch.setattr(StepSchedule, "share_rows", share_rows)
    monkeypatch.setattr(SampleOrder, "rows_at", None)
    lanes = choose_lanes(10**9, 3136, groups=range(0, 10**9, 100_000))
    schedule = StepSchedule(order=SampleOrder(lanes=lanes), batch_size=256, epochs=90)
    for start in (0, schedule.total_steps // 2, schedule.total_steps - 8):
        chunks.clear()
        first = list(islice(recipe_of(schedule).pieces(start, RANKS), RANKS))
        assert len(chunks) == 1 and start in chunks[0]
        assert {piece.step for piece in first} == {chunks[0].start}


def test_the_pieces_of_a_resumed_run_are_those_of_the_unbroken_one() -> None:
    schedule = StepSchedule(
        order=SampleOrder(lanes=Lanes(rows=1000, count=12, window=50), seed=3), batch_size=300, epochs=5
    )
    recipe = recipe_of(schedule)
    unbroken = list(recipe.pieces(0, RANKS))
    for step in range(schedule.total_steps):
        chunk = schedule.chunk(step, recipe.length)
        assert list(recipe.pieces(step, RANKS)) == [piece for piece in unbroken if piece.step >= chunk.start]
    for rank in range(RANKS):
        chunk = schedule.chunk(0, recipe.length)
        rows = len(schedule.share(chunk, rank, RANKS).samples)
        parts = -(-rows // PART_ROWS)
        expected = [SharePart(0, rank, RANKS, part, parts) for part in range(parts)]
        assert [piece for piece in unbroken if (piece.step, piece.rank) == (0, rank)] == expected


def test_avoided_steps_are_looked_for_without_listing_a_run() -> None:
    """A warm feed of a run of 10^15 steps."""
    data = table({"id": np.arange(24)})
    source = BatchLoader(data, batch_size=8, epochs=10**15, feeding=FeedAssignment(data_ranks=range(1), total=1))
    assert source.warm_feed(0, (0,)).parts[0][0].rows == 8
