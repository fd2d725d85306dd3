"""Ray Datasets that are streamed into workers: the same rows, whoever asks, whatever is killed, and clear errors."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import State, final_state
from tests.support.processes import ROOT, wait_for
from tests.support.streams import collect, real, same
from trainwright.core.data import Feed, FeedAssignment
from trainwright.core.errors import DataError, HangError, ResourceError, UserCodeError
from trainwright.core.pickling import dumps, loads
from trainwright.datasets import Dataset, from_ray
from trainwright.datasets.data_source import Index
from trainwright.datasets.dataset import delivery_of
from trainwright.datasets.formats import ray_dataset
from trainwright.datasets.loading.batch_loader import BatchLoader, make_schedule
from trainwright.datasets.ray_data import block_stream
from trainwright.datasets.ray_data.block_stream import StreamRows, start_streams

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.filterwarnings("ignore:Use 'expr' instead of 'fn'")]
ROWS, BATCH = 1000, 64
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "seed": 3}
FREE = {"CPU": 2.0, "GPU": 0.0}


@pytest.fixture(autouse=True)
def quiet(ray_cluster: None) -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False


class Tripled:
    """A class on actors of Ray Data."""

    def __call__(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**columns, "image": np.tile(columns["id"][:, None, None], (1, 2, 3)).astype(np.float32)}


def numbers(rows: int = ROWS, blocks: int = 7) -> Any:
    """The odd numbers up to 2 * rows, with an image of each."""
    data = ray.data.range(2 * rows, override_num_blocks=blocks)
    return data.filter(lambda row: row["id"] % 2 == 1).map_batches(Tripled, compute=ray.data.ActorPoolStrategy(size=1))


def loader(data: Dataset, index: Index, rank: int, total: int, rows: StreamRows | None, **more: Any) -> BatchLoader:
    feeding = FeedAssignment(data_ranks=range(rank, rank + 1), total=total)
    return BatchLoader(data, index, feeding=feeding, rows=rows, **{**OPTIONS, **more})


class Delivery:
    """An actor with one stream."""

    def __init__(self, data: Dataset, index: Index, **more: Any) -> None:
        self.data, self.index = data, index
        passes = make_schedule(index, **{**OPTIONS, **more}).passes
        (self.rows,) = start_streams([(data, index, passes)], None, FREE)

    def feeds(self, rank: int = 0, total: int = 1, start: int = 0, **more: Any) -> list[Feed]:
        return collect(loader(self.data, self.index, rank, total, self.rows, **more), start)


@pytest.fixture(scope="module")
def delivery(ray_cluster: None) -> Iterator[Delivery]:
    data = from_ray(numbers()).map(lambda row, rng: {**row, "noise": rng.random()})
    made = Delivery(data, data.index())
    yield made
    made.rows.close()


def test_workers_get_the_rows_that_one_process_reads(delivery: Delivery) -> None:
    """Exactly once in each epoch, in another order in each, in any number of workers and from any step on."""
    alone = collect(loader(delivery.data, delivery.index, 0, 1, None))
    assert all(same(ours, theirs) for ours, theirs in zip(delivery.feeds(), alone, strict=True))
    steps = -(-ROWS // BATCH)
    epochs = [[sample for feed in alone[first : first + steps] for sample in real(feed)] for first in (0, steps)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(1, 2 * ROWS, 2))] * 2 and epochs[0] != epochs[1]
    for total, start in ((2, 0), (3, 9), (2, steps + 4)):
        shares = [delivery.feeds(rank, total, start) for rank in range(total)]
        for number, whole in enumerate(alone[start:]):
            assert sorted(real(whole)) == sorted(sample for share in shares for sample in real(share[number]))
    batch = alone[3].parts[0][0]
    assert batch.columns["image"].shape[1:] == (2, 3) and (batch.columns["image"][:, 1, 2] == batch.columns["id"]).all()


def test_a_row_can_be_looked_at_without_an_execution(delivery: Delivery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_stream, "execute", lambda *_: pytest.fail("it was executed"))
    first = delivery.data.read(delivery.index, [0, 3])
    assert first["id"].tolist() == [1, 7] and first["image"][1].tolist() == [[7.0] * 3] * 2


def test_the_order_of_the_data_set_is_kept_without_shuffle(delivery: Delivery) -> None:
    first = delivery.feeds(shuffle=False)[0]
    assert real(first) == list(range(1, 2 * BATCH, 2))


def test_a_killed_actor_starts_again_and_gives_the_same_rows(delivery: Delivery) -> None:
    expected = delivery.feeds(1, 2)
    with loader(delivery.data, delivery.index, 1, 2, delivery.rows).feeds() as feeds:
        got = [next(feeds) for _ in range(3)]
        ray.kill(delivery.rows._actor, no_restart=False)
        got += list(feeds)
    assert all(same(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@ray.remote(num_cpus=0)
class Owner:
    """Its objects are lost with it."""

    def made(self) -> list[Any]:
        return [ray.put("a block")]


def is_lost(reference: Any) -> bool:
    """Whether a block can no longer be had."""
    try:
        ray.get(reference)
    except ray.exceptions.ObjectLostError:
        return True
    return False


def test_what_was_executed_to_count_rows_is_the_first_pass(tmp_path: Path) -> None:
    """Unless it is large. A lost block of it is made again with the whole pass."""

    def noted(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with (tmp_path / "executed").open("a") as file:
            file.write(f"{columns['id'].min()}\n")
        return {"id": columns["id"], "odd": columns["id"] % 2}

    def executed() -> int:
        return len((tmp_path / "executed").read_text().split())

    data = from_ray(ray.data.range(ROWS, override_num_blocks=5).map_batches(noted, batch_size=None))
    index = data.index()
    (blocks,) = (ray_dataset._COUNTED[data.source],)
    assert executed() == 5 and index.rows == ROWS
    expected = Delivery(data, index).feeds()
    assert executed() == 10 and data.source not in ray_dataset._COUNTED, "the second of two passes"
    owner = Owner.remote()
    lost = [blocks[0]._replace(reference=ray.get(owner.made.remote())[0]), *blocks[1:]]
    ray.kill(owner)
    wait_for(lambda: is_lost(lost[0].reference), 30)  # the node learns of it a moment later
    ray_dataset._COUNTED[data.source] = lost
    found = Delivery(data, index).feeds()
    assert 20 <= executed() <= 25, "both passes; the second had perhaps begun"
    assert all(same(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


class OwnSource(ray.data.Datasource):
    """A data source of the user's."""

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *more: Any, **options: Any) -> list[Any]:
        return []


def test_a_small_plain_read_is_executed_once_for_all_passes(tmp_path: Path, ray_cluster: None) -> None:
    """Two passes come though the files are gone. What does more than read is executed in each."""
    for part in range(4):
        first = part * ROWS // 4
        ids = np.arange(first, first + ROWS // 4)
        pq.write_table(pa.table({"id": ids, "odd": ids % 2}), tmp_path / f"{part}.parquet")
    read = ray.data.read_parquet(str(tmp_path))
    assert block_stream.is_plain_read(read) and block_stream.known_rows(read) == ROWS
    more = read.map_batches(lambda columns: columns)
    assert not block_stream.is_plain_read(more) and block_stream.known_rows(more) is None
    assert from_ray(more).source.spec(from_ray(more).index(), 2).counted_passes == 1
    assert not block_stream.is_plain_read(ray.data.read_datasource(OwnSource())), "it may give other rows each time"
    assert not block_stream.is_plain_read(ray.data.read_parquet(str(tmp_path), shuffle="files"))
    data = from_ray(read)
    index = data.index()
    assert index.rows == ROWS
    expected = Delivery(data, index).feeds()
    again = from_ray(read)
    index = again.index()
    shutil.rmtree(tmp_path)
    found = Delivery(again, index).feeds()
    assert all(same(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_large_plain_read_is_counted_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    pq.write_table(pa.table({"id": np.arange(ROWS)}), tmp_path / "only.parquet")
    monkeypatch.setattr(ray_dataset, "_COUNTED_BYTES", 8 * ROWS - 1)
    data = from_ray(ray.data.read_parquet(str(tmp_path)))
    assert data.index().rows == ROWS and data.source not in ray_dataset._COUNTED


async def ended(window: block_stream._Window) -> None:
    """Stop a window of this process, and wait for its thread."""
    window.stop()
    for thread in [thread for thread in threading.enumerate() if thread.name == "trainwright-stream"]:
        await asyncio.to_thread(thread.join, 10)


def test_little_is_kept_ahead_and_behind(monkeypatch: pytest.MonkeyPatch, ray_cluster: None) -> None:
    """A stream of many blocks, each read once, though a window holds a few of them only."""
    monkeypatch.setattr(block_stream, "_AHEAD_BYTES", 20_000)
    monkeypatch.setattr(block_stream, "_BEHIND_BYTES", 20_000)
    spec = block_stream.StreamSpec(make=b"", rows=4000, passes=1, exact=True, first="", name="made")
    blocks = [block_stream.Block(100, 8_000, None, first) for first in range(0, 4000, 100)]
    taken: list[int] = []

    def given(self: Any, epoch: int, free: Any = None) -> Iterator[block_stream.Block]:
        for block in blocks:
            taken.append(block.first)
            yield block

    monkeypatch.setattr(block_stream.StreamSpec, "blocks", given)

    async def read() -> None:
        window = block_stream._Window(spec, FREE)
        for low in range(0, 4000, 250):
            reply = await window.blocks(low, min(low + 250, 4000), 10.0, -1)
            assert reply.error is None
            assert reply.blocks[0].first <= low and reply.blocks[-1].first + 100 >= min(low + 250, 4000)
            assert sum(block.size_bytes for block in window._kept) <= 20_000 + 20_000 + 4 * 8_000
        await ended(window)

    asyncio.run(read())
    assert taken == [block.first for block in blocks]


def test_lost_blocks_are_told_by_each_consumer_and_made_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who wants an earlier row waits until those of the current execution have theirs."""
    begun: list[int] = []

    def given(self: Any, epoch: int, free: Any = None) -> Iterator[block_stream.Block]:
        begun.append(epoch)
        yield from (block_stream.Block(100, 8, None, epoch * 400 + first) for first in range(0, 400, 100))

    monkeypatch.setattr(block_stream.StreamSpec, "blocks", given)
    spec = block_stream.StreamSpec(make=b"", rows=400, passes=3, exact=True, first="", name="made")

    async def read() -> None:
        window = block_stream._Window(spec, FREE)
        first = await window.blocks(0, 100, 10.0, -1)
        again = await asyncio.gather(*(window.blocks(rank, 100, 10.0, first.run) for rank in range(3)))
        assert begun.count(0) == 2 and {reply.run for reply in again} == {again[0].run} != {first.run}
        late = await window.blocks(1100, 1200, 10.0, -1)
        window._begin = 1000  # as if earlier blocks had been dropped
        early = await asyncio.wait_for(window.blocks(0, 100, 10.0, -1), 10)
        assert late.blocks and early.blocks[0].first == 0
        await ended(window)

    asyncio.run(read())


def broken(batch: dict[str, Any]) -> dict[str, Any]:
    if 1501 in batch["id"]:
        raise ValueError("no such number")
    return batch


def other_columns(batch: dict[str, Any]) -> dict[str, Any]:
    return batch if 1501 not in batch["id"] else {"id": batch["id"]}


def other_types(batch: dict[str, Any]) -> dict[str, Any]:
    return batch if 1501 not in batch["id"] else {**batch, "id": batch["id"].astype(np.float64)}


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (broken, UserCodeError, "raised ValueError: no such number"),
        (other_columns, DataError, "there is no column 'image'"),
        (other_types, DataError, "column 'id' is float64"),
    ],
)
def test_what_goes_wrong_in_a_block_is_told(change: Any, kind: type[Exception], told: str) -> None:
    data = from_ray(numbers().map_batches(change), rows=ROWS)
    with pytest.raises(kind, match=told) as caught, contextlib.ExitStack() as stack:
        made = Delivery(data, data.index())  # Ray Data may tell of the error before it gives the first block
        stack.callback(made.rows.close)
        made.feeds()
    if change is broken:
        assert "in broken" in str(caught.value.detail)
    else:
        assert "epoch 0, block of rows" in str(caught.value)


@pytest.mark.parametrize(("rows", "told"), [(ROWS - 100, "ended after 900 of 1000 rows"), (ROWS + 100, "gives more")])
def test_a_pass_of_another_length_is_told(rows: int, told: str) -> None:
    data = from_ray(lambda epoch: numbers() if epoch == 0 else numbers(rows))
    made = Delivery(data, data.index())
    with pytest.raises(DataError, match=told):
        made.feeds()
    made.rows.close()


@pytest.mark.parametrize("replayable", [True, False])
def test_other_rows_in_each_execution_are_told_or_allowed(replayable: bool) -> None:
    noisy = numbers().map_batches(lambda batch: {**batch, "noise": np.random.rand(len(batch["id"]))})
    data = from_ray(noisy, rows=ROWS, replayable=replayable)
    made = Delivery(data, data.index())
    if replayable:
        with pytest.raises(DataError, match="other rows among its first 64"):
            made.feeds()
    else:
        assert len(made.feeds()) == 2 * -(-ROWS // BATCH)
    made.rows.close()


def test_a_function_of_the_epoch_and_a_pass_of_so_many_rows() -> None:
    data = from_ray(lambda epoch: numbers().random_shuffle(seed=epoch), rows=640)
    made = Delivery(data, data.index())
    feeds = made.feeds(shuffle=False)
    epochs: Sequence[list[int]] = [[x for feed in feeds[first : first + 10] for x in real(feed)] for first in (0, 10)]
    assert all(len(set(epoch)) == 640 for epoch in epochs) and epochs[0] != epochs[1]
    made.rows.close()


def test_a_short_pass_in_one_process_has_its_rows_in_each_epoch() -> None:
    """The first rows are known from the index; those after the last row of a pass are of no pass."""
    data = from_ray(ray.data.range(100, override_num_blocks=1), rows=10)
    reader = data.reader(data.index(), None)
    for epoch in (0, 1, 0):
        assert reader.gather(np.array([9, 0, 4]), epoch)["id"].tolist() == [9, 0, 4]


def test_nothing_comes_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    data = from_ray(ray.data.range(100).map_batches(lambda batch: batch, num_cpus=64), rows=100, replayable=False)
    index = from_ray(ray.data.range(100)).index()
    monkeypatch.setattr(block_stream, "_require_resources", lambda *_: None)
    made = Delivery(data, index)
    made.rows._deadline_s = 3.0
    with pytest.raises(HangError, match="2 CPUs"):
        made.feeds()
    made.rows.close()


def test_it_says_what_it_needs() -> None:
    pool = ray.data.ActorPoolStrategy(size=3)
    data = ray.data.range(9).map_batches(Tripled, compute=pool, num_cpus=0.5).map_batches(broken, num_cpus=2)
    assert from_ray(data).source.needs == {"CPU": (1.5, 2.0), "GPU": (0.0, 0.0)}
    assert from_ray(ray.data.range(9).map_batches(Tripled, compute=pool, num_gpus=1, batch_size=4)).source.needs[
        "GPU"
    ] == (3.0, 0.0)
    streamed = from_ray(data, rows=9)
    with pytest.raises(ResourceError, match=r"needs 3\.5 CPUs for .*, and 2 are left for Ray Data"):
        start_streams([(streamed, from_ray(ray.data.range(9)).index(), 1)], None, FREE)


def test_two_data_sets_of_one_name_need_the_actors_of_both_and_one_task() -> None:
    """Training and evaluation stream at the same time: actors stay, and tasks take turns."""
    pool = ray.data.ActorPoolStrategy(size=2)
    pooled = from_ray(ray.data.range(9).map_batches(Tripled, compute=pool, num_cpus=0.5), rows=9)
    index = from_ray(ray.data.range(9)).index()
    with pytest.raises(ResourceError, match=r"from_ray\(Dataset\) needs 3 CPUs"):
        start_streams([(pooled, index, 1)] * 2, None, FREE)
    rows, _ = start_streams([(from_ray(ray.data.range(9)), index, 1)] * 2, None, {"CPU": 1.0, "GPU": 0.0})
    rows.close()


def test_what_cannot_be_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match="rows= is for what is read in passes"):
        from_ray(ray.data.range(9).materialize(), rows=3)
    with pytest.raises(DataError, match="'direct' reads in the workers, and a Ray Dataset is executed by Ray Data"):
        delivery_of(from_ray(ray.data.range(9)), "direct")
    with pytest.raises(DataError, match="no rows"):
        from_ray(ray.data.range(9).filter(lambda row: False)).index()
    with pytest.raises(UserCodeError, match="the function given to from_ray raised KeyError"):
        from_ray(lambda epoch: {}[epoch]).index()
    with pytest.raises(DataError, match="a list is no Ray Dataset"):
        from_ray(lambda epoch: [epoch]).index()
    with pytest.raises(DataError, match="rows=0 is not a length"):
        from_ray(ray.data.range(9), rows=0)
    with pytest.raises(DataError, match="null"):
        from_ray(ray.data.from_items([{"x": 1}, {"x": None}])).index()


def table_of_rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows of the small torch job by their numbers."""
    return {name: column[batch["id"]] for name, column in torch_jobs.data().items()}


def test_a_killed_worker_costs_a_run_no_row_and_no_bit(tmp_path: Path) -> None:
    """It trains and evaluates on Ray Datasets; three epochs, each in an order of its own."""

    def state(name: str, *kills: torch_jobs.Kill) -> State:
        streamed = ray.data.range(torch_jobs.ROWS, override_num_blocks=5).map_batches(table_of_rows)
        tw.fit(torch_jobs.job(tmp_path / name, kills, train=streamed, evaluate=streamed))
        return final_state(tmp_path / name, "faulty")

    kill = torch_jobs.Kill(rank=1, step=13, folder=str(tmp_path))
    broken_run, unbroken = state("broken", kill), state("unbroken")
    assert kill.mark.exists() and broken_run.step == unbroken.step == 27
    assert broken_run.files == unbroken.files


@ray.remote(num_cpus=0)
def consume(pickled: bytes, rank: int) -> int:
    """Read a rank's share of one epoch; return the sum of its ids."""
    data, index, rows = loads(pickled)
    with loader(data, index, rank, 2, rows, batch_size=256, epochs=1).feeds() as feeds:
        return sum(sum(real(feed)) for feed in feeds)


SMALL_STORE = """
import numpy as np, ray
from tests.ray.test_ray_streams import FREE, loader
from tests.support.streams import real
from trainwright.datasets import from_ray
from trainwright.datasets.ray_data.block_stream import start_streams

ray.init(address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
count = 2400
numbered = ray.data.range(count, override_num_blocks=60).map_batches(
    lambda batch: {**batch, "x": np.ones((len(batch["id"]), 1 << 18), np.uint8)}, batch_size=40
)
data = from_ray(numbered, rows=count)
(rows,) = start_streams([(data, data.index(), 1)], None, FREE)
with loader(data, data.index(), 0, 1, rows, epochs=1).feeds() as feeds:
    print(sum(sum(real(feed)) for feed in feeds) == count * (count - 1) // 2)
rows.close()
"""


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_stream_goes_through_an_object_store_that_is_smaller_than_its_window() -> None:
    """600 MiB through 80 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", SMALL_STORE], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout.split() == ["True"], done.stderr


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_20_gb_go_through_2_workers_in_bounded_memory() -> None:
    """Of shared memory, where the blocks are; the window may hold 768 MiB, and Ray Data has as much on its way."""
    count = 20 * 1024 * 4

    def wide(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**batch, "x": np.ones((len(batch["id"]), 1 << 18), np.uint8)}

    numbered = ray.data.range(count, override_num_blocks=320).map_batches(wide, batch_size=64)
    data = from_ray(numbered, rows=count)
    made = Delivery(data, data.index(), batch_size=256, epochs=1)
    before, peak = shutil.disk_usage("/dev/shm").used, 0
    packed = dumps((data, made.index, made.rows))
    waiting = [consume.remote(packed, rank) for rank in range(2)]
    while len(ray.wait(waiting, num_returns=2, timeout=0.2)[0]) < 2:
        peak = max(peak, shutil.disk_usage("/dev/shm").used - before)
    assert sum(ray.get(waiting)) == count * (count - 1) // 2
    assert peak < 3 << 30, f"{peak >> 20} MiB"
    print(f"peak {peak >> 20} MiB")
    made.rows.close()
