"""Heavy transforms that hold what is slow to open: opened once an actor, and the batches of a run without faults."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from tests.support.fetched_streams import ROWS, check, stream
from tests.support.processes import wait_for
from tests.support.streams import collect
from trainwright.core.errors import DataError, ResourceError, UserCodeError
from trainwright.datasets import Dataset, table
from trainwright.datasets.dataset import first_row
from trainwright.datasets.ray_data.actor_pools import MAX_DEATHS, allocate_actors
from trainwright.datasets.ray_data.ray_fetcher import RayFetcher, make_pipeline_spec, start_delivery

pytestmark = pytest.mark.usefixtures("ray_cluster")

ORDER: dict[str, Any] = {"batch_size": 128, "epochs": 2, "seed": 3}


class Model:
    """Leaves a mark where it is opened, called and closed; dies of the row `fatal`, once."""

    def __init__(self, folder: str, fatal: int = -1) -> None:
        self.folder, self.fatal = Path(folder), fatal
        self.factor = np.float32(3)
        self.mark("opened")

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self.fatal in columns["id"] and not list(self.folder.glob("struck-*")):
            self.mark("struck")
            os.kill(os.getpid(), signal.SIGKILL)
        return {**columns, "triple": columns["id"].astype(np.float32) * self.factor}

    def close(self) -> None:
        self.mark("closed")

    def mark(self, what: str) -> None:
        (self.folder / f"{what}-{os.getpid()}").touch()


class Broken:
    def __init__(self, folder: str, number: int) -> None:
        (Path(folder) / f"tried-{os.getpid()}").touch()
        if number:
            os.kill(os.getpid(), number)
        raise FileNotFoundError("no weights here")

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        return columns


def late(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "late": rng.integers(9)}


def dataset(folder: Path, fatal: int = -1, kind: type = Model, **more: Any) -> Dataset:
    """A light function, a heavy one, a class, and a light one again."""
    rows = table({"id": np.arange(ROWS)}).map_batches(lambda columns: {**columns, "two": columns["id"] * 2}, cpus=0.5)
    given = {"folder": str(folder), **({"fatal": fatal} if kind is Model else more)}
    return rows.map_batches(kind, cpus=0.5, fn_constructor_kwargs=given).map(late)


def start(*data: Dataset) -> list[RayFetcher]:
    return start_delivery([make_pipeline_spec(one, one.index(), **ORDER) for one in data], cpus=1.0, deadline_s=90.0)


def marked(folder: Path, what: str) -> set[int]:
    """Processes that left a mark."""
    return {int(mark.name.partition("-")[2]) for mark in folder.glob(f"{what}-*")}


def process_of(fetcher: RayFetcher) -> int:
    """The process of the feeder that serves now."""
    process: int = ray.get(fetcher.feeder.__ray_call__.remote(lambda feeder: os.getpid()))
    return process


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Dataset]:
    """The same, computed in this process, which leaves its marks elsewhere."""
    (tmp_path / "here").mkdir()
    data = dataset(tmp_path / "here")
    yield data
    data.functions[1].close()  # type: ignore[attr-defined]


@pytest.mark.soak
def test_opened_once_for_any_number_of_ranks_places_and_data_sets(tmp_path: Path, plain: Dataset) -> None:
    data = dataset(tmp_path)
    training, evaluation = start(data, dataset(tmp_path).map(late))
    for rank, total, begin in ((0, 1, 0), (1, 3, 15), (0, 2, 3)):
        check(collect(stream(data, rank, total, training), begin), collect(stream(plain, rank, total, None), begin))
    more = plain.map(late)
    check(collect(stream(more, 0, 1, evaluation)), collect(stream(more, 0, 1, None)))
    (process,) = marked(tmp_path, "opened")
    busy = {stage.name: stage for stage in training.stages()}
    assert list(busy) == ["reading", "dataset.<locals>.<lambda>", "Model"] and busy["Model"].slots == 1
    assert all(0 < stage.busy <= 1 for stage in busy.values())
    training.close()
    assert marked(tmp_path, "closed") == {process}
    wait_for(lambda: not Path(f"/proc/{process}").exists(), 20)


@pytest.mark.parametrize("victim", ["actor", pytest.param("feeder", marks=pytest.mark.soak)])
def test_what_was_lost_with_a_process_is_computed_again(tmp_path: Path, plain: Dataset, victim: str) -> None:
    data = dataset(tmp_path, fatal=701 if victim == "actor" else -1)
    (fetcher,) = start(data)
    with stream(data, 0, 1, fetcher).feeds(0) as feeds:
        first = [next(feeds) for _ in range(3)]
        if victim == "feeder":
            ray.kill(fetcher.feeder, no_restart=False)
        check(first + list(feeds), collect(stream(plain, 0, 1, None)))
    fetcher.close()
    assert len(marked(tmp_path, "opened")) == 2
    assert len(marked(tmp_path, "struck")) == (victim == "actor")
    for process in marked(tmp_path, "opened"):
        wait_for(lambda process=process: not Path(f"/proc/{process}").exists(), 20)


def test_a_constructor_that_raises_is_told_to_all_and_not_tried_again(tmp_path: Path) -> None:
    data = dataset(tmp_path, kind=Broken, number=0)
    (fetcher,) = start(data)
    feeders = {process_of(fetcher)}
    for rank in (0, 1):
        with pytest.raises(
            UserCodeError, match="constructor of the transform Broken raised FileNotFoundError"
        ) as caught:
            next(stream(data, rank, 2, fetcher).feeds(0))
        assert "in __init__" in caught.value.detail and "no weights here" in caught.value.detail
        feeders.add(process_of(fetcher))
    fetcher.close()
    # Ray 2.60 may end a feeder whose execution it cancels ("submitted_task_ref_count > 0"): the next tries once more.
    assert 1 <= len(marked(tmp_path, "tried")) <= len(feeders)


@pytest.mark.soak
def test_a_constructor_that_ends_its_process_is_told_after_a_few(tmp_path: Path) -> None:
    data = dataset(tmp_path, kind=Broken, number=int(signal.SIGKILL))
    (fetcher,) = start(data)
    with pytest.raises(
        UserCodeError, match=f"process of the transform Broken died {MAX_DEATHS} times while it was opened"
    ):
        next(stream(data, 0, 1, fetcher).feeds(0))
    fetcher.close()
    assert len(marked(tmp_path, "tried")) == MAX_DEATHS


class Stuck(Model):
    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        self.mark("tried")
        threading.Event().wait()
        return columns


@pytest.mark.soak
def test_one_that_hangs_with_a_batch_each_time_is_told_after_a_few(tmp_path: Path) -> None:
    data = dataset(tmp_path, kind=Stuck)
    (fetcher,) = start_delivery(
        [make_pipeline_spec(data, data.index(), **ORDER)], cpus=1.0, deadline_s=90.0, hang_s=2.0
    )
    hung = rf"process of the transform Stuck hung {MAX_DEATHS} times each time it was given this batch \(rows \d"
    with pytest.raises(UserCodeError, match=hung) as caught:
        next(stream(data, 0, 1, fetcher).feeds(0))
    assert "within 1 s" in caught.value.detail and "raise hang_deadline_s" in caught.value.remedy
    fetcher.close()
    assert len(marked(tmp_path, "tried")) >= MAX_DEATHS
    for process in marked(tmp_path, "tried"):
        wait_for(lambda process=process: not Path(f"/proc/{process}").exists(), 20)


def test_a_class_of_a_job_file_which_no_other_process_can_import_is_opened(tmp_path: Path) -> None:
    (tmp_path / "own_job.py").write_text(
        "class Model:\n    def __call__(self, columns):\n        return {**columns, 'double': 2 * columns['id']}\n"
    )
    spec = spec_from_file_location("trainwright_job_own_job", tmp_path / "own_job.py")
    assert spec is not None and spec.loader is not None
    own = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(own)
        data = table({"id": np.arange(4)}).map_batches(own.Model, cpus=0.5)
        assert first_row(data, data.index())["double"] == [0]
    finally:
        del sys.modules[spec.name]


def test_cpus_are_dealt_to_classes_and_tasks_in_turn(tmp_path: Path) -> None:
    one, other = dataset(tmp_path), dataset(tmp_path).map_batches(Model, gpus=1, fn_constructor_args=("there",))
    recipes = [make_pipeline_spec(data, data.index(), **ORDER) for data in (one, other)]
    assert allocate_actors(recipes[:1], {"CPU": 1.0, "GPU": 0.0}) == ([1], {"CPU": 0.5, "GPU": 0.0})
    assert allocate_actors(recipes[:1], {"CPU": 2.5, "GPU": 0.0}) == ([3], {"CPU": 1.0, "GPU": 0.0})
    assert allocate_actors(recipes, {"CPU": 1.0, "GPU": 2.0}) == ([1, 2], {"CPU": 0.5, "GPU": 0.0})
    with pytest.raises(ResourceError, match="the transform Model asks for 1 GPUs and 0 are left"):
        allocate_actors(recipes, {"CPU": 1.0, "GPU": 0.0})
    with pytest.raises(ResourceError, match=r"the transforms Model and .*lambda> ask for 1 CPUs and 0.75 are left"):
        allocate_actors(recipes, {"CPU": 0.75, "GPU": 1.0})


def test_what_is_no_class_to_call_is_told_at_once() -> None:
    data = table({"id": np.arange(3)})
    with pytest.raises(DataError, match="is not a class whose objects can be called"):
        data.map_batches(lambda columns: columns, cpus=1, fn_constructor_kwargs={"a": 1})
    with pytest.raises(DataError, match=r"Model cannot be sent to another process: .*lock"):
        data.map_batches(Model, cpus=1, fn_constructor_args=(threading.Lock(),))
