"""What a consumer of Ray Data asks for ahead, and what it does with a request that timed out meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.core.errors import HangError
from trainwright.datasets.ray_data.ray_fetcher import RayFetcher

CHUNKS, LENGTH = 3, 8


class Asking(RayFetcher):
    """Notes what is asked for, by (step, rank); the answers of some requests are that nothing came."""

    def __init__(self, silent: set[tuple[int, int, int]]) -> None:
        schedule: Any = SimpleNamespace(
            chunk=lambda step, length: range(step // LENGTH * LENGTH, (step // LENGTH + 1) * LENGTH),
            total_steps=CHUNKS * LENGTH,
        )
        super().__init__(None, 0, schedule, LENGTH, 60.0)
        self.asked: list[tuple[int, int]] = []
        self.silent = silent

    def _request(self, step: int, rank: int, total: int, lost: bool) -> Any:
        self.asked.append((step, rank))
        return (step, rank, self.asked.count((step, rank)))

    def _take(self, reference: Any) -> Any:
        if reference in self.silent:
            raise HangError("nothing came")
        return reference


def test_a_request_that_timed_out_while_nobody_waited_is_made_again() -> None:
    """As in a long evaluation; one that times out while its consumer waits is an error."""
    fetcher = Asking({(LENGTH, 0, 1), (2 * LENGTH, 0, 1), (2 * LENGTH, 0, 2)})
    assert fetcher.fetch(0, 0, 1)[1] == (0, 0, 1)
    assert fetcher.fetch(LENGTH, 0, 1)[1] == (LENGTH, 0, 2)
    with pytest.raises(HangError):
        fetcher.fetch(2 * LENGTH, 0, 1)


def test_each_rank_of_a_worker_keeps_what_it_asked_for_ahead() -> None:
    fetcher = Asking(set())
    for step in range(0, CHUNKS * LENGTH, LENGTH):
        for rank in range(2):
            fetcher.fetch(step, rank, 2)
    assert len(fetcher.asked) == len({*fetcher.asked}) == 2 * CHUNKS
