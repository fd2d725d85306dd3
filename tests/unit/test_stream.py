"""Delivery: every step's feed, from any step on, for any number of ranks."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.streams import collect, ids, place, real, same, stream
from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets import parquet, sample_order, table
from trainwright.datasets.loading import batch_loader
from trainwright.datasets.loading.batch_loader import BatchLoader, ReadAhead, chunk_steps, make_schedule
from trainwright.datasets.row_reader import RowReader


@settings(max_examples=40)
@given(
    rows=st.integers(1, 150),
    batch_size=st.integers(1, 40),
    total=st.integers(1, 7),
    accumulation=st.integers(1, 4),
    shuffle=st.booleans(),
    static_shapes=st.booleans(),
)
def test_every_sample_is_delivered_once_an_epoch_in_the_computed_batch(
    rows: int, batch_size: int, total: int, accumulation: int, shuffle: bool, static_shapes: bool
) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "epochs": 2, "shuffle": shuffle}
    options |= {"accumulation": accumulation, "static_shapes": static_shapes}
    streams = [stream(ids(rows), rank, total, **options) for rank in range(total)]
    everyone = [collect(source) for source in streams]
    for step, feeds in enumerate(zip(*everyone, strict=True)):
        epoch, position = place(streams[0].schedule, step)
        size = min(batch_size, rows - position)
        expected = streams[0].schedule.order.rows_of(epoch, position, position + size)
        assert {feed.rows for feed in feeds} == {size}
        assert sorted(sample for feed in feeds for sample in real(feed)) == sorted(expected.tolist())
        for feed in feeds:
            assert feed.step == step and len(feed.parts) == 1 and len(feed.parts[0]) == accumulation
            for batch in feed.parts[0]:
                assert batch.rows == len(batch.weights) == len(batch.columns["x"]) >= 1
                np.testing.assert_array_equal(batch.columns["id"], batch.samples)
                np.testing.assert_array_equal(batch.columns["x"][:, 0], batch.samples * 3)
            if static_shapes:
                assert len({batch.rows for batch in feed.parts[0]}) == 1
    if static_shapes:
        assert len({feed.parts[0][0].rows for feeds in everyone for feed in feeds}) == 1
    if total == 1 and accumulation == 1:
        for step, feed in enumerate(everyone[0]):
            epoch, position = place(streams[0].schedule, step)
            expected = streams[0].schedule.order.rows_of(epoch, position, position + feed.rows)
            assert real(feed) == expected.tolist()


@pytest.mark.parametrize("start", [0, 1, 5, 12, 13, 25, 38, 39])
def test_a_stream_starts_exactly_where_it_is_asked_to(start: int) -> None:
    source = stream(ids(100), epochs=3, batch_size=8)
    assert (source.schedule.steps_per_epoch, source.schedule.total_steps) == (13, 39)
    whole = collect(source)
    late = collect(stream(ids(100), epochs=3, batch_size=8), start)
    assert [feed.step for feed in late] == list(range(start, 39))
    assert all(same(one, other) for one, other in zip(whole[start:], late, strict=True))


def test_steps_of_epochs_with_and_without_a_short_last_batch() -> None:
    source = stream(ids(100), epochs=2, batch_size=8)
    dropping = stream(ids(100), epochs=2, batch_size=8, drop_last=True)
    assert (dropping.schedule.steps_per_epoch, dropping.schedule.total_steps) == (12, 24)
    assert [feed.rows for feed in collect(dropping)] == [8] * 24
    assert [feed.rows for feed in collect(source)] == [*[8] * 12, 4] * 2


def test_micro_batches_are_even_and_in_position_order() -> None:
    source = stream(ids(100), batch_size=11, accumulation=4)
    feed = next(iter(collect(source)))
    assert [batch.rows for batch in feed.parts[0]] == [2, 3, 3, 3]
    assert real(feed) == source.schedule.order.rows_of(0, 0, 11).tolist()


def test_an_empty_share_is_a_real_sample_of_weight_zero() -> None:
    feeds = collect(stream(ids(96), 2, 7, batch_size=3, shuffle=False, accumulation=2))
    empty = [feed for feed in feeds if not real(feed)]
    assert empty
    own = {sample for feed in feeds for sample in real(feed)}
    for feed in empty:
        assert [batch.rows for batch in feed.parts[0]] == [1, 1]
        assert {float(batch.weights[0]) for batch in feed.parts[0]} == {0.0}
        assert {int(batch.samples[0]) for batch in feed.parts[0]} <= own


def test_an_actor_with_several_data_ranks_is_fed_as_they_would_be_alone() -> None:
    together = collect(stream(ids(50), 1, 4, ranks=2, epochs=2))
    alone = [collect(stream(ids(50), rank, 4, epochs=2)) for rank in (1, 2)]
    for feed, first, second in zip(together, *alone, strict=True):
        assert feed.data_ranks == range(1, 3)
        for part, single in zip(feed.parts, (first.parts[0], second.parts[0]), strict=True):
            assert [batch.samples.tolist() for batch in part] == [batch.samples.tolist() for batch in single]


def test_an_actor_without_data_ranks_is_told_the_counts() -> None:
    feeds = collect(stream(ids(20), 0, 2, ranks=0))
    assert [(feed.parts, feed.rows) for feed in feeds] == [((), 8), ((), 8), ((), 4)]


def test_the_warm_feed_has_the_shape_of_an_ordinary_step_and_no_weight() -> None:
    source = stream(ids(100), 1, 3, accumulation=2, static_shapes=True, batch_size=9)
    ordinary, warm = collect(source)[0], source.warm_feed()
    assert [batch.rows for batch in warm.parts[0]] == [batch.rows for batch in ordinary.parts[0]]
    assert {name: array.shape for name, array in warm.parts[0][0].columns.items()} == {"id": (2,), "x": (2, 3)}
    assert all(not batch.weights.any() for batch in warm.parts[0])
    short = stream(ids(20), batch_size=8).warm_feed(2)
    assert (short.step, short.parts[0][0].rows) == (0, 8)
    mapped = stream(ids(100).map(lambda row, rng: {"id": row["id"]}), batch_size=40, fetcher=object())
    assert len(mapped.warm_feed().parts[0][0].columns["id"]) == 40


def test_the_warm_feed_touches_no_sample_of_the_steps_to_avoid() -> None:
    source = stream(ids(24), batch_size=8, epochs=1)
    batches = [set(feed.parts[0][0].samples.tolist()) for feed in collect(source)]
    for avoided in ((0,), (0, 1), (2,), (1, 2)):
        samples = set(source.warm_feed(avoided[0], avoided).parts[0][0].samples.tolist())
        assert len(samples) == 8 and all(not samples & batches[step] for step in avoided)


def test_only_columns_asked_for_are_given() -> None:
    feed = collect(stream(ids(20), columns=("id",)))[0]
    assert list(feed.parts[0][0].columns) == ["id"]
    with pytest.raises(DataError, match="did you mean 'id'"):
        stream(ids(20), columns=("ids",))


def test_random_transforms_do_not_depend_on_ranks_or_start() -> None:
    def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"id": row["id"], "noise": rng.random()}

    dataset = ids(40).map(noisy)
    seen: dict[tuple[int, int], float] = {}
    for total, start in ((1, 0), (3, 0), (2, 7)):
        for rank in range(total):
            source = stream(dataset, rank, total, epochs=2)
            for feed in collect(source, start):
                batch, epoch = feed.parts[0][0], place(source.schedule, feed.step)[0]
                for sample, value in zip(batch.samples.tolist(), batch.columns["noise"].tolist(), strict=True):
                    assert seen.setdefault((epoch, sample), value) == value
    assert len(set(seen.values())) == len(seen) == 80


class Groups:
    """A source in memory that counts what is loaded."""

    def __init__(self, path: Path, rows: int, group: int) -> None:
        pq.write_table(pa.table({"id": np.arange(rows)}), path, row_group_size=group)
        self.dataset = parquet(path)
        self.loaded: list[int] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from trainwright.datasets.formats.parquet import ParquetLoader

        load = ParquetLoader.load

        def counted(loader: ParquetLoader, number: int, columns: Any) -> Any:
            self.loaded.append(number)
            return load(loader, number, columns)

        monkeypatch.setattr(ParquetLoader, "load", counted)


def test_a_rank_reads_only_row_groups_of_its_lanes_and_each_once(tmp_path: Path, monkeypatch) -> None:
    groups = Groups(tmp_path / "x.parquet", 4800, 100)
    groups.watch(monkeypatch)
    source = stream(groups.dataset, 1, 4, epochs=3, batch_size=64)
    feeds = collect(source)
    assert source.schedule.order.lanes.count == 48
    assert sorted(groups.loaded) == list(range(1, 48, 4))
    assert len({sample for feed in feeds for sample in real(feed)}) == 1200


def test_memory_stays_bounded_where_the_data_does_not_fit(tmp_path: Path, monkeypatch) -> None:
    for module in (batch_loader, sample_order):
        monkeypatch.setattr(module, "MEMORY_BYTES", 8 * 1200)
    groups = Groups(tmp_path / "x.parquet", 4800, 100)
    groups.watch(monkeypatch)
    source = stream(groups.dataset, batch_size=64, window=25)
    feeds = collect(source)
    assert sorted(sample for feed in feeds for sample in real(feed)) == list(range(4800))
    assert len(groups.loaded) <= 4800 / 25  # each window is decoded once
    reader = source._rows._gather.__self__
    assert isinstance(reader, RowReader) and sum(map(reader._size, reader._slot_of)) * reader._row_bytes <= 8 * 1200


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trainwright-feeds"]


def gone() -> bool:
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        threads()[0].join(0.1)
    return not threads()


def test_no_thread_survives() -> None:
    feeds = stream(ids(5000), epochs=50).feeds(0)
    next(feeds)
    assert threads()
    feeds.close()
    feeds.close()
    assert not threads()
    assert list(feeds) == []
    abandoned = stream(ids(5000), epochs=50).feeds(0)
    next(abandoned)
    del abandoned
    gc.collect()
    assert gone()
    list(stream(ids(50)).feeds(0))
    assert gone()


def test_an_exception_reaches_the_consumer_after_the_feeds_before_it() -> None:
    def fails(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        if row["id"] == 4000:
            raise RuntimeError("rotten")
        return row

    source = stream(ids(5000).map(fails), shuffle=False)
    seen = []
    with pytest.raises(UserCodeError, match="rotten") as caught, source.feeds(0) as feeds:
        for feed in feeds:
            seen.extend(real(feed))
    assert caught.value.where == "sample 4000"
    assert seen == list(range(len(seen))) and len(seen) >= 3000
    assert gone()


@pytest.mark.parametrize(
    ("make", "row_bytes"),
    [
        (lambda row: np.zeros(1000 + row % 5, np.int64), 8_000),
        (lambda row: "a" * (1000 + row), 1_000),
        (lambda row: {"tokens": [[row] * 100] * 10}, 60_000),
        (lambda row: b"" if row % 2 else None, 60),
    ],
)
def test_what_is_read_ahead_counts_objects_by_their_content(make: Any, row_bytes: int) -> None:
    values = np.fromiter((make(row) for row in range(64)), object, 64)
    data = table({"x": np.arange(64)}).map_batches(lambda columns: {"v": values[columns["x"]]})
    loader = BatchLoader(data, batch_size=16, feeding=FeedAssignment(data_ranks=range(1), total=1))
    with loader.feeds() as feeds:
        next(feeds)
        assert 0.9 * 64 * row_bytes < feeds.prefetch.chunk_bytes < 1.3 * 64 * row_bytes + 64 * 16


def test_reading_goes_ahead_and_is_bounded() -> None:
    made: list[int] = []
    reached = threading.Event()

    def numbers() -> Any:
        for number in range(100):
            made.append(number)
            if number == 3:
                reached.set()
            yield number

    ahead = ReadAhead(numbers(), depth=3)
    assert reached.wait(10)
    assert next(ahead) == 0
    assert next(ahead) == 1
    assert len(made) <= 6
    ahead.close()
    with pytest.raises(StopIteration):
        next(ahead)


def test_text_and_images_are_fed(tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (30, 5, 4), dtype=np.uint8)
    columns = {
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
        "name": [f"n{i}" for i in range(30)],
        "id": np.arange(30),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=7)
    for feed in collect(stream(parquet(tmp_path / "x.parquet"), epochs=2)):
        batch = feed.parts[0][0]
        np.testing.assert_array_equal(batch.columns["image"], images[batch.samples])
        assert batch.columns["name"].tolist() == [f"n{i}" for i in batch.samples]
        assert batch.columns["image"].flags.writeable and batch.columns["image"].flags.c_contiguous


def test_the_steps_of_a_run_follow_from_the_index() -> None:
    index = ids(100).index()
    schedule = make_schedule(index, batch_size=8, epochs=3, seed=5, shuffle=True, drop_last=False, window=None)
    assert schedule.total_steps == stream(ids(100), epochs=3).schedule.total_steps
    with pytest.raises(DataError, match="an epoch has 100 rows"):
        stream(ids(100), batch_size=101, drop_last=True)


@pytest.mark.parametrize(
    ("rows", "row_bytes", "steps"), [(256, 800, 16), (1, 8, 64), (0, 8, 64), (9000, 8, 1), (8, 1 << 20, 1)]
)
def test_chunks_are_neither_slow_nor_large(rows: int, row_bytes: int, steps: int) -> None:
    assert chunk_steps(rows, row_bytes) == steps


def test_objects_that_a_function_changes_in_place_are_whole_again_in_the_next_epoch() -> None:
    turns = np.empty(4, dtype=object)
    turns[:] = [[row] for row in range(4)]

    def end(row: dict[str, Any], rng: Any) -> dict[str, Any]:
        row["turns"].append(9)
        return row

    data = table({"turns": turns}).map(end)
    feeding = FeedAssignment(data_ranks=range(1), total=1)
    feeds = collect(BatchLoader(data, batch_size=4, epochs=3, shuffle=False, feeding=feeding))
    assert [feed.parts[0][0].columns["turns"].tolist() for feed in feeds] == [[[row, 9] for row in range(4)]] * 3
    assert turns.tolist() == [[row] for row in range(4)]


@pytest.mark.parametrize("how", ["map", "map_batches"])
def test_ragged_values_of_a_function_are_told_with_a_remedy(how: str) -> None:
    data = table({"x": np.arange(2)})
    ragged = (
        data.map(lambda row, rng: {"w": [[1], [1, 2]]})
        if how == "map"
        else data.map_batches(lambda columns: {"w": [[1], [1, 2]]})
    )
    with pytest.raises(DataError, match=r"'w' from .* makes no array") as caught:
        ragged.read(ragged.index(), [0, 1])
    assert caught.value.remedy
