"""Ray Datasets as sources: in the object store, and written as parquet once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import ray

from trainwright.core.errors import DataError
from trainwright.datasets import from_ray
from trainwright.datasets.data_source import Field
from trainwright.datasets.formats.ray_dataset import RayLoader

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(autouse=True)
def quiet(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets are materialised in the order of their rows."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    monkeypatch.setattr(context.execution_options, "preserve_order", True)


def numbers(rows: int = 100, blocks: int = 4) -> Any:
    data = ray.data.range(rows, override_num_blocks=blocks)
    wide = data.map_batches(lambda batch: {"id": batch["id"], "image": np.tile(batch["id"][:, None, None], (1, 2, 3))})
    return wide.materialize()


def test_blocks_in_the_object_store_are_read_anywhere() -> None:
    data = from_ray(numbers())
    index = data.index()
    assert index.rows == 100 and len(index.groups) == 4
    assert index.schema == {"id": Field(np.dtype(np.int64), ()), "image": Field(np.dtype(np.int64), (2, 3))}
    read = data.read(index, [99, 3])
    assert read["id"].tolist() == [99, 3] and read["image"][0].tolist() == [[99] * 3] * 2
    packed = cloudpickle.dumps((data, index))

    def remote(packed: bytes) -> Any:
        data, index = cloudpickle.loads(packed)
        return data.read(index, range(index.rows), ["id"])["id"].tolist()

    assert ray.get(ray.remote(num_cpus=0)(remote).remote(packed)) == list(range(100))
    assert from_ray(numbers()).index().hash == index.hash != from_ray(numbers(99)).index().hash
    assert from_ray(numbers(blocks=5)).index().hash != index.hash


def test_text_becomes_objects() -> None:
    data = from_ray(ray.data.from_items([{"text": f"row {row}", "x": row} for row in range(9)]))
    index = data.index()
    assert index.schema["text"] == Field(np.dtype(object), ())
    assert sorted(data.read(index, range(9))["text"]) == [f"row {row}" for row in range(9)]


def test_a_cache_is_written_once_and_is_the_data_from_then_on(tmp_path: Path) -> None:
    executed = tmp_path / "executed"

    def counting(batch: dict[str, Any]) -> dict[str, Any]:
        with executed.open("a") as file:
            file.write("x")
        return batch

    cache = tmp_path / "cache"
    first = from_ray(numbers().map_batches(counting), cache=str(cache))
    times = executed.stat().st_size
    index = first.index()
    assert index.rows == 100 and index.schema["image"].shape == (2, 3)
    assert first.read(index, range(100))["id"].tolist() == list(range(100))
    again = from_ray(numbers().map_batches(counting), cache=str(cache))
    assert again.index().hash == index.hash and executed.stat().st_size == times > 0
    (cache / "_SUCCESS").unlink()
    with pytest.raises(DataError, match="not empty"):
        from_ray(numbers(), cache=str(cache))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a list is no Ray Dataset"):
        from_ray([1, 2])
    with pytest.raises(DataError, match="no rows"):
        from_ray(numbers().map_batches(lambda batch: {"id": batch["id"][:0]}).materialize())
    holes = ray.data.from_items([{"x": 1}, {"x": None}])
    with pytest.raises(DataError, match="null"):
        from_ray(holes)
    with pytest.raises(DataError, match="null"):
        from_ray(holes, cache=str(tmp_path / "cache"))
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_is_gone_is_named() -> None:
    gone = ray.remote(num_cpus=0, max_retries=0)(lambda: os._exit(1)).remote()
    with pytest.raises(DataError, match="the block is gone: WorkerCrashedError") as caught:
        RayLoader([gone]).load(0, ["id"])
    assert caught.value.where == "Ray block 0" and "cache=" in caught.value.remedy
