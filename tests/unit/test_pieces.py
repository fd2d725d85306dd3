"""The pieces of a heavy data set: labelled as they are wanted, at the same cost anywhere in a run."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from trainwright.core.data import Feeding
from trainwright.datasets import table
from trainwright.datasets.loading.loader import Stream
from trainwright.datasets.ray_data.pipeline import PIECE_ROWS, Piece, Recipe
from trainwright.datasets.sampling.sampler import Lanes, Order, choose_lanes
from trainwright.datasets.sampling.step_schedule import Schedule

RANKS = 8


def recipe_of(schedule: Schedule, length: int = 4) -> Recipe:
    data = table({"id": np.arange(10)})
    return Recipe(dataset=data, index=data.index(), columns=None, schedule=schedule, length=length)


def test_a_piece_far_into_a_large_run_costs_what_the_first_one_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """10^9 rows, 90 epochs: each piece looks at its own chunk, and permutes no row."""
    chunks: list[range] = []
    counted = Schedule.share_rows

    def share_rows(self: Schedule, steps: range, total: int) -> np.ndarray:
        chunks.append(steps)
        return counted(self, steps, total)

    monkeypatch.setattr(Schedule, "share_rows", share_rows)
    monkeypatch.setattr(Order, "rows_at", None)
    lanes = choose_lanes(10**9, 3136, groups=range(0, 10**9, 100_000))
    schedule = Schedule(order=Order(lanes=lanes), batch_size=256, epochs=90)
    for start in (0, schedule.total_steps // 2, schedule.total_steps - 8):
        chunks.clear()
        first = list(islice(recipe_of(schedule).pieces(start, RANKS), RANKS))
        assert len(chunks) == 1 and start in chunks[0]
        assert {piece.step for piece in first} == {chunks[0].start}


def test_the_pieces_of_a_resumed_run_are_those_of_the_unbroken_one() -> None:
    schedule = Schedule(order=Order(lanes=Lanes(rows=1000, count=12, window=50), seed=3), batch_size=300, epochs=5)
    recipe = recipe_of(schedule)
    unbroken = list(recipe.pieces(0, RANKS))
    for step in range(schedule.total_steps):
        chunk = schedule.chunk(step, recipe.length)
        assert list(recipe.pieces(step, RANKS)) == [piece for piece in unbroken if piece.step >= chunk.start]
    for rank in range(RANKS):
        chunk = schedule.chunk(0, recipe.length)
        rows = len(schedule.share(chunk, rank, RANKS).samples)
        parts = -(-rows // PIECE_ROWS)
        expected = [Piece(0, rank, RANKS, part, parts) for part in range(parts)]
        assert [piece for piece in unbroken if (piece.step, piece.rank) == (0, rank)] == expected


def test_avoided_steps_are_looked_for_without_listing_a_run() -> None:
    """A warm feed of a run of 10^15 steps."""
    data = table({"id": np.arange(24)})
    source = Stream(data, batch_size=8, epochs=10**15, feeding=Feeding(data_ranks=range(1), total=1))
    assert source.warm_feed(0, (0,)).parts[0][0].rows == 8
