"""Delivery through Ray Data gives the same batches as reading in the consumer, whatever is killed."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import trainwright as tw
from tests.support import torch_jobs
from tests.support.fetched_streams import BATCH, OPTIONS, ROWS, check, stream
from tests.support.finished_runs import final_state, told
from tests.support.processes import ROOT
from tests.support.streams import collect
from trainwright.core import events
from trainwright.core.data import Feed
from trainwright.core.errors import DataError, HangError, ResourceError, UserCodeError
from trainwright.core.pickling import dumps, loads
from trainwright.datasets import Dataset, table
from trainwright.datasets.dataset import delivery_of
from trainwright.datasets.loading.batch_loader import make_schedule
from trainwright.datasets.ray_data import delivery_pipeline
from trainwright.datasets.ray_data.delivery_actor import DatasetDelivery, DeliveryActor, _PipelineWindow
from trainwright.datasets.ray_data.piece_blocks import Piece, SharePart
from trainwright.datasets.ray_data.ray_fetcher import RayFetcher, make_pipeline_spec, start_delivery
from trainwright.planning import data_delivery

pytestmark = pytest.mark.usefixtures("ray_cluster")


def heavy(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**columns, "square": columns["id"].astype(np.float32) ** 2, "name": columns["id"].astype(str)}


def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "noise": np.float16(rng.random())}


class Foreign:
    """A function of a module that this machine has and others lack."""

    def __call__(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return columns

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, ("not_there",)


def dataset() -> Dataset:
    """Light, heavy and light again, with two kinds of randomness and a tensor."""
    images = np.random.default_rng(0).integers(0, 256, (ROWS, 6, 5), dtype=np.uint8)
    source = table({"id": np.arange(ROWS), "image": images})
    return source.map(noisy).map_batches(heavy, cpus=0.5).map(lambda row, rng: {**row, "late": rng.integers(9)})


def feeder(data: Dataset, **more: Any) -> RayFetcher:
    recipe = make_pipeline_spec(data, data.index(), **{**OPTIONS, **more})
    return start_delivery([recipe], cpus=2.0, deadline_s=90.0)[0]


@pytest.fixture(scope="module")
def shared(ray_cluster: None) -> Iterator[RayFetcher]:
    fetcher = feeder(dataset())
    yield fetcher
    fetcher.close()


@pytest.mark.parametrize(("total", "start"), [(1, 0), (3, 7), (2, 13)])
def test_the_same_batches_both_ways(shared: RayFetcher, total: int, start: int) -> None:
    data = dataset()
    assert data.heavy
    for rank in range(total):
        light = collect(stream(data, rank, total, None), start)
        assert len(light) == 24 - start and light[-1].rows == ROWS - 11 * BATCH
        check(collect(stream(data, rank, total, shared), start), light)


def test_light_data_comes_through_ray_data_on_request() -> None:
    data = table({"id": np.arange(ROWS)}).map(noisy)
    assert not data.heavy and delivery_of(data, "ray_data") == ("ray_data", "delivery='ray_data'")
    fetcher = feeder(data)
    check(collect(stream(data, 1, 2, fetcher)), collect(stream(data, 1, 2, None)))
    assert [(stage.name, stage.slots) for stage in fetcher.stages()] == [("reading", 2)]
    fetcher.close()


async def answer_of(local: DatasetDelivery, step: int) -> delivery_pipeline.DeliveryReply:
    """Ask a feeder in this process, and end its pump."""
    answer = await local.chunk(step, 1, 2, 60.0)
    local._window = None
    for pump in [thread for thread in threading.enumerate() if thread.name == "trainwright-pump"]:
        await asyncio.to_thread(pump.join, 60)
    return answer


def test_no_more_is_read_than_the_consumers_will_want_soon() -> None:
    """Enough ahead of the furthest consumer for all processes; readers of a replaced pipeline are told to end."""
    data = dataset()
    schedule = make_schedule(data.index(), shuffle=True, drop_last=False, **OPTIONS)
    recipe = delivery_pipeline.PipelineSpec(dataset=data, index=data.index(), columns=None, schedule=schedule, length=2)

    async def ask() -> None:
        local = DeliveryActor([dumps(recipe)], {"CPU": 1.0, "GPU": 0.0}).feeders[0]
        window = local._window = _PipelineWindow(number=7, start=4, total=1)
        ahead = local._ahead()
        assert await local.admit(7, 4 + ahead) and not await local.admit(6, 4)
        late = asyncio.ensure_future(local.admit(7, 6 + ahead))
        await asyncio.sleep(0)
        assert not late.done()
        window.delivered_steps[0] = 6
        local._notify()
        assert await asyncio.wait_for(late, 10)
        never = asyncio.ensure_future(local.admit(7, 200))
        await asyncio.sleep(0)
        local._window = _PipelineWindow(number=8, start=0, total=1)
        local._notify()
        assert not await asyncio.wait_for(never, 10)

    asyncio.run(ask())


def test_how_far_ahead_follows_processes_and_bytes() -> None:
    data = dataset()
    schedule = make_schedule(data.index(), shuffle=True, drop_last=False, **OPTIONS)
    recipe = delivery_pipeline.PipelineSpec(dataset=data, index=data.index(), columns=None, schedule=schedule, length=8)
    chunk_rows, piece_rows = 8 * BATCH, delivery_pipeline.PART_ROWS
    label = SharePart(0, 0, 1, 0, 1)

    def ahead_chunks(cpus: float, piece_bytes: int, room_bytes: float, ranks: int = 1) -> float:
        local = DatasetDelivery(0, recipe, None, {"CPU": cpus, "GPU": 0.0}, [], room_bytes)
        piece = Piece(label=label, samples=np.arange(1), passes=np.zeros(1, int), size_bytes=piece_bytes)
        local._window = _PipelineWindow(number=0, start=0, total=ranks)
        local._arrived(local._window, None, piece)
        return local._ahead() / 8

    assert ahead_chunks(1.0, 1, 1e12) == 4
    assert ahead_chunks(63.0, 1, 1e12) == 2 * 127 * piece_rows // chunk_rows, "two pieces for each of 127 processes"
    assert ahead_chunks(63.0, 10**6, 2e7) == 20 * piece_rows // chunk_rows, "20 pieces have room"
    assert ahead_chunks(63.0, 10**9, 2e7) == 1
    assert ahead_chunks(63.0, 1, 1e12, ranks=32) == 2 * 127 // 32, "each rank has a piece of its own"
    assert ahead_chunks(63.0, 10**6, 2e8, ranks=32) == 200 // 32


def test_a_function_that_cannot_be_imported_where_it_runs_is_told_at_once() -> None:
    data = dataset().map_batches(Foreign(), cpus=0.5)
    fetcher = feeder(data)
    with pytest.raises(DataError, match="cannot be opened where Ray Data runs") as caught:
        collect(stream(data, 0, 1, fetcher))
    assert "No module named 'not_there'" in caught.value.detail


def test_blocks_that_come_in_any_order_are_found_by_their_label(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset()
    fetcher = feeder(data)

    def scrambled(stored: Any, pieces: Any, free: Any, gate: Any) -> Iterator[Any]:
        made = loads(ray.get(stored))
        yield from [ray.put(made.transform(made.read(label), 1).to_block()) for label in pieces][::-1]

    monkeypatch.setattr(delivery_pipeline, "run_pipeline", scrambled)
    monkeypatch.setattr(delivery_pipeline, "PART_ROWS", 100)
    recipe = delivery_pipeline.PipelineSpec(
        dataset=data, index=data.index(), columns=None, schedule=fetcher._schedule, length=fetcher._length
    )
    local = DeliveryActor([dumps(recipe)], {"CPU": 1.0, "GPU": 0.0}).feeders[0]
    monkeypatch.setattr(local, "_handle", lambda: None)
    chunk = recipe.schedule.chunk(9, recipe.length)
    answer = asyncio.run(answer_of(local, chunk.start))
    found = [Piece.of(ray.get(block)) for block in answer.blocks]
    expected = recipe.schedule.share(chunk, 1, 2).samples
    assert len(found) > 1, "several pieces"
    np.testing.assert_array_equal(np.concatenate([content.samples for content in found]), expected)
    np.testing.assert_array_equal(np.concatenate([content.columns["id"] for content in found]), expected)
    fetcher.close()


class OpenGate(delivery_pipeline.ReadGate):
    """Holds nothing back."""

    def pass_(self, step: int) -> None:
        pass


def test_a_pipeline_takes_pieces_as_it_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels of a run that never ends: one execution's are taken before the first block, then the next one's."""
    data, taken = dataset(), list[SharePart]()
    schedule = make_schedule(data.index(), shuffle=True, drop_last=False, **{**OPTIONS, "epochs": 10**12})
    recipe = delivery_pipeline.PipelineSpec(dataset=data, index=data.index(), columns=None, schedule=schedule, length=8)

    def pieces() -> Iterator[SharePart]:
        for piece in recipe.pieces(10**12, 2):
            assert len(taken) < 24, "no more was needed"
            taken.append(piece)
            yield piece

    monkeypatch.setattr(delivery_pipeline, "MAX_TASKS", 12)
    blocks = delivery_pipeline.run_pipeline(ray.put(dumps(recipe)), pieces(), {"CPU": 2.0}, OpenGate(None, 0))
    made = [ray.get(next(blocks))]
    assert len(taken) == 12
    made += [ray.get(next(blocks)) for _ in range(23)]
    assert len(taken) == 24
    blocks.close()
    assert sorted(Piece.of(block).label for block in made) == sorted(taken)
    for block in made[:3]:
        found = Piece.of(block)
        label = found.label
        share = schedule.share(schedule.chunk(label.step, 8), label.rank, label.total)
        own = slice(label.part * delivery_pipeline.PART_ROWS, (label.part + 1) * delivery_pipeline.PART_ROWS)
        np.testing.assert_array_equal(found.columns["id"], share.samples[own])


@pytest.mark.soak
def test_a_stream_resumed_far_into_a_run_is_the_unbroken_one() -> None:
    """Bitwise, from a step many executions of Ray Data away."""
    data, more = dataset(), {"epochs": 4000}
    fetcher = feeder(data, **more)
    light, start = stream(data, 1, 2, None, **more), 40_001
    with light.feeds(start) as expected, stream(data, 1, 2, fetcher, **more).feeds(start) as feeds:
        check([next(feeds) for _ in range(30)], [next(expected) for _ in range(30)])
    fetcher.close()


@ray.remote(num_cpus=0)
class Consumer:
    """A worker that takes feeds until it is killed."""

    def __init__(self, fetcher: RayFetcher) -> None:
        self.feeds = stream(dataset(), 0, 2, fetcher).feeds(0)

    def take(self, count: int) -> list[Feed]:
        return [next(self.feeds) for _ in range(count)]

    def process(self) -> int:
        return os.getpid()


def test_a_killed_consumer_is_replaced_and_earlier_steps_are_given_again(shared: RayFetcher) -> None:
    light = collect(stream(dataset(), 0, 2, None))
    consumer = Consumer.remote(shared)
    check(ray.get(consumer.take.remote(20), timeout=120), light[:20])
    os.kill(ray.get(consumer.process.remote()), 9)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(consumer.take.remote(1), timeout=60)
    check(collect(stream(dataset(), 0, 2, shared), 17), light[17:])
    check(collect(stream(dataset(), 0, 2, shared), 2), light[2:])


def test_a_killed_feeder_computes_again_what_was_lost() -> None:
    fetcher = feeder(dataset())
    light = collect(stream(dataset(), 0, 1, None))
    with stream(dataset(), 0, 1, fetcher).feeds(0) as feeds:
        first = [next(feeds) for _ in range(3)]
        ray.kill(fetcher.feeder, no_restart=False)
        check(first + list(feeds), light)
    fetcher.close()


def test_an_error_of_the_transform_reaches_the_consumer_with_its_traceback() -> None:
    def fails(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if 700 in columns["id"]:
            raise OverflowError("rotten row")
        return columns

    data = table({"id": np.arange(ROWS)}).map_batches(fails, cpus=1)
    fetcher = feeder(data, shuffle=False)
    seen = []
    with pytest.raises(UserCodeError, match="rotten row") as caught:
        for feed in stream(data, 0, 1, fetcher, shuffle=False).feeds(0):
            seen.append(feed.step)
    assert 'raise OverflowError("rotten row")' in caught.value.detail
    assert seen == list(range(len(seen))) and len(seen) <= 5
    fetcher.close()


def test_a_hanging_transform_is_told_within_the_deadline(tmp_path: Path) -> None:
    def waits(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        while not (tmp_path / "go").exists():
            time.sleep(0.05)
        return columns

    data = table({"id": np.arange(ROWS)}).map_batches(waits, cpus=1)
    (fetcher,) = start_delivery([make_pipeline_spec(data, data.index(), **OPTIONS)], cpus=1.0, deadline_s=3.0)
    with pytest.raises(HangError, match="delivered nothing within 3 s"):
        next(stream(data, 0, 1, fetcher).feeds(0))
    (tmp_path / "go").touch()
    fetcher.close()


def test_too_few_cpus_are_told_before_anything_starts() -> None:
    data = table({"id": np.arange(9)}).map_batches(heavy, cpus=3)
    with pytest.raises(ResourceError, match="asks for 3 CPUs and 2 are left"):
        feeder(data)


ON_A_GPU = """
import numpy as np, ray
from tests.support import ray_clusters
from trainwright.core.data import FeedAssignment
from trainwright.datasets import table
from trainwright.datasets.ray_data.ray_fetcher import make_pipeline_spec, start_delivery
from trainwright.datasets.loading.batch_loader import BatchLoader

ray_clusters.thrifty()
ray.init(address="local", num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False)

def visible(columns):
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return {**columns, "gpus": np.full(len(columns["x"]), len(ids))}

class Visible:
    def __init__(self):
        self.ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def __call__(self, columns):
        return {**columns, "held": np.full(len(columns["x"]), len(self.ids))}

data = table({"x": np.arange(40)}).map_batches(visible, gpus=0.5).map_batches(Visible, gpus=0.5)
index = data.index()
(fetcher,) = start_delivery([make_pipeline_spec(data, index, batch_size=8)], cpus=0.0, gpus=1)
with BatchLoader(data, index, batch_size=8, feeding=FeedAssignment(data_ranks=range(1), total=1),
fetcher=fetcher).feeds() as feeds:
    found = [batch.columns for feed in feeds for part in feed.parts for batch in part]
assert sorted(x for columns in found for x in columns["x"].tolist()) == list(range(40))
print({gpu for columns in found for name in ("gpus", "held") for gpu in columns[name].tolist()})
"""


@pytest.mark.soak
def test_a_function_that_asks_for_a_gpu_gets_one(forked_workers: None) -> None:
    """As Ray counts them: the machine needs none."""
    command = [sys.executable, "-c", ON_A_GPU]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["{1}"], done.stderr
    with pytest.raises(ResourceError, match="asks for 1 GPUs and 0 are left for Ray Data"):
        feeder(dataset().map_batches(heavy, gpus=1))


def late(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    time.sleep(0.005)
    return row


def test_a_run_whose_workers_could_not_transform_in_time_is_delivered_by_ray_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one CPU beside the workers here. The run computes what one with `delivery="direct"` does."""
    monkeypatch.setattr(data_delivery, "_GAIN", 0.4)
    data = table(torch_jobs.data()).map(late)
    for how in ("auto", "direct"):
        tw.fit(torch_jobs.job(tmp_path / how, train=data, epochs=1, delivery=how))
        (start,) = told(tmp_path / how, "faulty", events.RunStarted)
        notes = [note for note in start.plan["notes"] if "delivered by Ray Data" in note]  # type: ignore[attr-defined]
        assert len(notes) == (how == "auto") and all("transforming the rows of a step takes" in note for note in notes)
    assert final_state(tmp_path / "auto", "faulty") == final_state(tmp_path / "direct", "faulty")
