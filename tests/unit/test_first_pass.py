"""A first pass over data: here where it is short, as tasks of Ray where it is long and a cluster is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainwright.core.errors import DataError
from trainwright.datasets import metadata_cache as module
from trainwright.datasets import parquet
from trainwright.datasets.metadata_cache import MetadataContext, first_pass, metadata_context


def clock(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Each look at the clock finds it this much later."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += step_s
        return now[0]

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic, time=time.time, time_ns=time.time_ns))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Items that tasks of Ray are given; they do their work here."""
    parts: list[list[int]] = []

    def on_ray(work: Callable[[Any], Any], items: Sequence[Any], threads: int) -> list[Any]:
        parts.append([*items])
        return [work(item) for item in items]

    monkeypatch.setattr(module, "run_as_ray_tasks", on_ray)
    return parts


@pytest.mark.parametrize(("step_s", "cluster", "here"), [(0.1, True, 9), (3.0, False, 9), (3.0, True, 4)])
def test_a_long_pass_goes_to_the_cluster_that_is_there(
    monkeypatch: pytest.MonkeyPatch, given: list[list[int]], step_s: float, cluster: bool, here: int
) -> None:
    """It is connected to for that, and only then; what is done stays done."""
    clock(monkeypatch, step_s)
    asked: list[bool] = []
    monkeypatch.setattr(module, "ray_connected", lambda: bool(asked.append(cluster)) or cluster)
    assert first_pass(lambda item: item * 2, range(9), threads=2) == [2 * item for item in range(9)]
    assert given == ([[*range(here, 9)]] if here < 9 else [])
    assert bool(asked) == (step_s > 1)


def test_a_run_is_asked_for_its_cluster(monkeypatch: pytest.MonkeyPatch, given: list[list[int]]) -> None:
    clock(monkeypatch, 60.0)
    calls: list[str] = []
    monkeypatch.setitem(module.sys.modules, "ray", type("Ray", (), {"is_initialized": lambda: bool(calls)}))
    assert first_pass(str, range(3)) == ["0", "1", "2"] and not given
    with metadata_context(MetadataContext(connect=lambda: calls.append("connect"))):
        assert first_pass(str, range(3)) == ["0", "1", "2"]
    assert calls == ["connect"] and given == [[2]]


def test_threads_work_at_a_time_and_an_error_ends_the_pass() -> None:
    both = threading.Barrier(2, timeout=30)
    assert first_pass(lambda item: (both.wait(), item)[1], range(4), threads=2) == [0, 1, 2, 3]

    def work(item: int) -> int:
        if item >= 2:
            raise DataError(f"item {item}")
        return item

    with pytest.raises(DataError, match="item 2"):
        first_pass(work, range(6), threads=4)


def test_filters_and_packing_are_counted_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[list[int]]
) -> None:
    clock(monkeypatch, 60.0)
    pq.write_table(pa.table({"id": np.arange(1000)}), tmp_path / "data.parquet", row_group_size=100)
    data = parquet(tmp_path).filter_batches(lambda rows: rows["id"] % 3 == 0)
    monkeypatch.setattr(module, "ray_connected", lambda: True)
    index = data.index()
    assert index.rows == 334 and given == [[*range(2, 10)]]
    monkeypatch.setattr(module, "ray_connected", lambda: False)
    assert data.index() == index
