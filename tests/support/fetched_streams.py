"""Streams whose rows come through Ray Data."""

from __future__ import annotations

from typing import Any

from tests.support.streams import same
from trainwright.core.data import Feed, FeedAssignment
from trainwright.datasets import Dataset
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.datasets.ray_data.ray_fetcher import RayFetcher

ROWS, BATCH = 1500, 128
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "seed": 3}


def stream(data: Dataset, rank: int, total: int, fetcher: RayFetcher | None, **more: Any) -> BatchLoader:
    feeding = FeedAssignment(data_ranks=range(rank, rank + 1), total=total)
    return BatchLoader(data, feeding=feeding, fetcher=fetcher, **{**OPTIONS, **more})


def check(ours: list[Feed], light: list[Feed]) -> None:
    assert [feed.step for feed in ours] == [feed.step for feed in light]
    assert all(same(one, other) for one, other in zip(ours, light, strict=True))
