"""First passes over data as tasks of Ray, and what a run keeps of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainwright as tw
from tests.support.torch_jobs import ROWS, job
from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets import json_lines, metadata_cache, parquet
from trainwright.datasets.formats import parquet as files
from trainwright.datasets.ops import derived_dataset
from trainwright.planning.job_preparation import prepare

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass is long enough for tasks, from the second item on."""
    monkeypatch.setattr(metadata_cache, "MIN_PASS_S", -1.0)
    monkeypatch.setattr(metadata_cache, "LONG_PASS_S", -1.0)


@pytest.mark.usefixtures("long")
def test_items_are_spread_over_processes_in_order() -> None:
    def work(item: int) -> tuple[int, int]:
        time.sleep(0.05)
        return item, os.getpid()

    found = metadata_cache.first_pass(work, range(40))
    assert [item for item, _ in found] == [*range(40)]
    assert [process == os.getpid() for _, process in found] == [True] * 2 + [False] * 38
    assert len({process for _, process in found}) > 2


@pytest.mark.usefixtures("long")
def test_files_and_filters_give_the_same_index_as_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        lines = [f'{{"id": {row}, "x": {row}{".5" if row == 35 else ""}}}' for row in range(number * 4, number * 4 + 4)]
        (tmp_path / f"{number:02}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = json_lines(tmp_path).filter(lambda row: row["id"] % 3 > 0)
    spread = data.index()
    monkeypatch.setattr(metadata_cache, "run_as_ray_tasks", None)
    monkeypatch.setattr(metadata_cache, "ray_connected", lambda: False)
    assert data.index() == spread and spread.rows == 32


@pytest.mark.usefixtures("long")
def test_footers_of_many_files_are_read_in_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same index as here; a torn file is named."""
    monkeypatch.setattr(files, "_FOOTERS", 2)
    for number in range(12):
        pq.write_table(pa.table({"id": range(number, 2 * number + 1)}), tmp_path / f"{number:02}.parquet")
    monkeypatch.setattr(metadata_cache, "ray_connected", lambda: False)
    here = parquet(tmp_path).index()
    monkeypatch.setattr(metadata_cache, "ray_connected", lambda: True)
    tasks, counts = metadata_cache.run_as_ray_tasks, list[int]()

    def counted(work: Any, items: Any, threads: int) -> list[Any]:
        counts.append(len(items))
        return tasks(work, items, threads)

    monkeypatch.setattr(metadata_cache, "run_as_ray_tasks", counted)
    assert parquet(tmp_path).index() == here and here.rows == 78 and counts[0] > 4
    (tmp_path / "11.parquet").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"not a whole parquet file.*11\.parquet, 4 bytes"):
        parquet(tmp_path).index()


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [("data", DataError, "item [78]"), ("user", UserCodeError, "rotten"), ("death", DataError, "a task .* failed")],
)
def test_what_ends_a_task_ends_the_pass(how: str, kind: type[Exception], message: str) -> None:
    def work(item: int) -> int:
        if item == 7 and how == "death":
            os._exit(1)
        if item >= 7 and how != "death":
            raise DataError(f"item {item}") if how == "data" else UserCodeError("rotten")
        return item

    with pytest.raises(kind, match=message):
        metadata_cache.first_pass(work, range(9))


def test_a_run_keeps_what_is_known_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume on a machine without a cache reads no footer, and filters nothing again."""
    monkeypatch.setattr(metadata_cache, "SETTLED_S", {True: -60.0, False: -60.0})
    made = job(tmp_path / "runs", epochs=1, workers=1)
    folder = tmp_path / "data"
    folder.mkdir()
    arrays = made.train.read(made.train.index(), range(ROWS))
    columns = {name: list(array) if array.ndim > 1 else array for name, array in arrays.items()}
    pq.write_table(pa.table(columns), folder / "all.parquet")
    data = parquet(folder).map_batches(dense).filter_batches(kept_all)
    assert tw.fit(made.replace(train=data)).state == "done"
    kept = sorted((tmp_path / "runs" / made.name / "metadata").iterdir())
    assert [file.suffixes for file in kept] == [[".json", ".z"]] * 2, "footers, and what the filter left"
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "another machine"))
    monkeypatch.setattr(files, "read_footer", None)
    monkeypatch.setattr(derived_dataset, "first_pass", None)
    assert prepare(made.replace(train=data), resume=True).train.rows == ROWS


def kept_all(columns: dict[str, np.ndarray]) -> np.ndarray:
    return np.ones(len(next(iter(columns.values()))), dtype=bool)


def dense(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.stack(list(array)) if array.dtype == object else array for name, array in columns.items()}
