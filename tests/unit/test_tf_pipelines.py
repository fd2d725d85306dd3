"""A tf.data pipeline of the user's own as a source: order, shares, passes, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from threading import Event, Timer
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright import datasets
from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets.data_source import Field
from trainwright.datasets.dataset_tools import inspect
from trainwright.datasets.formats import tf_data
from trainwright.datasets.formats.tf_data import read_blocks
from trainwright.datasets.loading.batch_loader import BatchLoader

ROWS, BATCH = 250, 16


@pytest.fixture(scope="module", autouse=True)
def global_seed() -> None:
    """Seeded shuffles depend on the seed of the process, which tests before may have set."""
    tf.random.set_seed(7)


def numbers() -> Any:
    """Rows 0, 1, 2... with a label."""
    return tf.data.Dataset.range(ROWS).map(lambda i: {"x": tf.cast(i, tf.float32) * [1.0, 2.0], "i": i})


def shuffled(epoch: int) -> Any:
    """Another order in each epoch."""
    return numbers().shuffle(ROWS, seed=epoch, reshuffle_each_iteration=False)


def test_a_parameter_with_a_default_is_not_the_epoch() -> None:
    def make(rows: int = ROWS) -> Any:
        return numbers().take(rows)

    for each in (make, partial(make, rows=ROWS)):
        assert [row for step in seen(stream(each)) for row in step] == [*range(ROWS), *range(ROWS)]


decoded: list[int] = []


def sharded(epoch: int, shard: Callable[[Any], Any]) -> Any:
    """As `shuffled`, in an order of its own; what is decoded is noted."""
    rows = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=epoch, reshuffle_each_iteration=False)

    def decode(i: Any) -> Any:
        return tf.numpy_function(lambda row: (decoded.append(int(row)), row)[1], [i], tf.int64)

    def columns(i: Any) -> Any:
        i.set_shape(())
        return {"x": tf.cast(i, tf.float32) * [1.0, 2.0], "i": i}

    return shard(rows).map(decode).map(columns)


def unseeded() -> Any:
    """Another order each time."""
    return numbers().shuffle(ROWS)


def stream(make: Callable[..., Any], rank: int = 0, total: int = 1, **fields: Any) -> BatchLoader:
    """Of two epochs."""
    feeding = FeedAssignment(data_ranks=range(rank, rank + 1), total=total)
    return BatchLoader(datasets.from_tf(make), batch_size=BATCH, epochs=2, feeding=feeding, **fields)


def seen(of: BatchLoader, start: int = 0, stop: int | None = None) -> list[list[int]]:
    """The labels of each step from `start` on."""
    with of.feeds(start) as feeds:
        steps = [next(feeds) for _ in range((of.schedule.total_steps if stop is None else stop) - start)]
    return [[int(i) for batch in feed.parts[0] for i in batch.columns["i"][batch.weights > 0]] for feed in steps]


def test_rows_come_in_the_order_of_the_pipeline() -> None:
    steps = seen(stream(numbers))
    assert [row for step in steps for row in step] == [*range(ROWS), *range(ROWS)]
    assert [len(step) for step in steps[:16]] == [BATCH] * 15 + [ROWS % BATCH]


def test_each_epoch_has_the_order_that_its_function_gives_it() -> None:
    steps = seen(stream(shuffled))
    for epoch, part in enumerate((steps[:16], steps[16:])):
        expected = [int(row["i"]) for row in shuffled(epoch).as_numpy_iterator()]
        assert [row for step in part for row in step] == expected


def test_a_plan_says_that_a_function_without_epoch_repeats_its_order() -> None:
    """Keras' fit gives each epoch another order of such a pipeline."""

    def make() -> Any:
        return numbers().shuffle(ROWS, seed=42)

    steps = seen(stream(make))
    assert steps[:16] == steps[16:]
    assert "all epochs have the same order" in datasets.from_tf(make).source.plan_note
    assert "all epochs have the same order" in datasets.from_tf(lambda shard: shard(make())).source.plan_note
    for varied in (shuffled, sharded):
        assert datasets.from_tf(varied).source.plan_note.endswith(tf_data._EXACTLY_ONCE)


@cache
def share(rank: int, total: int) -> BatchLoader:
    """One for all examples: to open it traces the pipeline anew."""
    return stream(shuffled, rank, total)


@cache
def whole() -> list[list[int]]:
    return seen(share(0, 1))


@settings(max_examples=12)
@given(total=st.integers(1, 5), start=st.integers(0, 31))
def test_workers_share_each_batch_from_any_step_on(total: int, start: int) -> None:
    parts = [seen(share(rank, total), start) for rank in range(total)]
    assert len(whole()) == 32
    for step, batch in enumerate(whole()[start:]):
        assert sorted(row for part in parts for row in part[step]) == sorted(batch)


@cache
def order(epoch: int) -> list[int]:
    rows = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=epoch, reshuffle_each_iteration=False)
    return [int(i) for i in rows]


@settings(max_examples=8)
@given(
    ranks=st.sampled_from([(0, 1, 1), (0, 1, 2), (1, 1, 2), (1, 2, 4), (2, 1, 3), (0, 3, 3)]), start=st.integers(0, 31)
)
def test_a_worker_decodes_only_its_own_rows_and_only_those_that_are_to_come(
    ranks: tuple[int, int, int], start: int
) -> None:
    """In the order of tf.data on one device, whichever workers there are, and from any step on."""
    first, count, total = ranks
    feeding = FeedAssignment(data_ranks=range(first, first + count), total=total)
    source = datasets.from_tf(sharded)
    index = source.index()
    del decoded[:]
    loader = BatchLoader(source, index, batch_size=BATCH, epochs=2, feeding=feeding)
    with loader.feeds(start) as feeds:
        steps = [next(feeds) for _ in range(start, loader.schedule.total_steps)]
    wanted = []
    for feed in steps:
        epoch, at = divmod(feed.step, 16)
        rows = order(epoch)[at * BATCH : (at + 1) * BATCH]
        for rank, part in zip(feeding.data_ranks, feed.parts, strict=True):
            own = [row for place, row in enumerate(rows, at * BATCH) if place % total == rank]
            assert [int(i) for batch in part for i in batch.columns["i"][batch.weights > 0]] == own
            wanted += own
    spared = len(wanted) + total * 2  # skipping begins at a whole turn of the ranks
    assert len(wanted) <= len(decoded) <= spared and {*wanted} <= {*decoded}


def test_a_row_of_another_worker_comes_from_the_whole_pipeline() -> None:
    """A unit that an asynchronous worker takes over, for one."""
    mine = stream(sharded, 1, 2)
    found = [mine.feed(3, share).parts[0][0].columns["i"].tolist() for share in (1, 0)]
    assert found == [order(0)[3 * BATCH : 4 * BATCH][share::2] for share in (1, 0)]


def test_a_part_that_ends_early_says_at_which_row() -> None:
    source = datasets.from_tf(lambda epoch, shard: shard(numbers()), rows=ROWS + 5, replayable=False)
    reader = source.reader(source.index(), None, feeding=FeedAssignment(data_ranks=range(1, 2), total=2))
    with pytest.raises(DataError, match=f"ended before row {ROWS + 1} of {ROWS + 5}"):
        reader.gather(np.array([ROWS - 1, ROWS + 3]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda epoch, shard: shard(numbers()).shuffle(99, seed=epoch), "one row for each row"),
        (lambda shard: shard(numbers()).filter(lambda row: row["i"] % 5 > 0), "one row for each row"),
        (lambda shard: shard(numbers()).repeat(3), "one row for each row"),
        (lambda epoch, shard: numbers(), "does not call it"),
    ],
)
def test_a_shard_at_the_wrong_place_is_told_before_the_run(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        datasets.from_tf(make, rows=200).index()


def test_the_throwaway_step_costs_no_second_pass() -> None:
    made = []

    def counted(epoch: int) -> Any:
        made.append(epoch)
        return shuffled(epoch)

    source = stream(counted)
    del made[:]
    source.warm_feed(20)
    assert seen(source, 20, 24) == seen(stream(shuffled), 20, 24)
    assert made == [1]


def test_light_transforms_are_applied_with_counted_randomness() -> None:
    feeding = FeedAssignment(data_ranks=range(1), total=1)
    noisy = datasets.from_tf(numbers).map(lambda row, rng: {**row, "noise": rng.random()})
    of = BatchLoader(noisy, batch_size=BATCH, epochs=2, feeding=feeding)
    with of.feeds(0) as one, of.feeds(20) as other:
        rest = [next(other) for _ in range(20, of.schedule.total_steps)]
        whole = [next(one) for _ in range(of.schedule.total_steps)]
    for first, again in zip(whole[20:], rest, strict=True):
        assert np.array_equal(first.parts[0][0].columns["noise"], again.parts[0][0].columns["noise"])
    assert whole[0].parts[0][0].columns["noise"][0] != whole[16].parts[0][0].columns["noise"][0]


@pytest.mark.parametrize(
    ("element", "columns"),
    [
        (lambda i: (i, -i), {"x", "y"}),
        (lambda i: ({"a": i, "b": i}, -i, 1.0), {"a", "b", "y", "weight"}),
        (lambda i: i, {"x"}),
        (lambda i: {"text": tf.strings.as_string(i)}, {"text"}),
    ],
)
def test_elements_become_columns(element: Callable[[Any], Any], columns: set[str]) -> None:
    source = datasets.from_tf(lambda: tf.data.Dataset.range(5).map(element))
    index = source.index()
    assert set(index.schema) == columns
    assert index.weight == ("weight" if "weight" in columns else "")
    assert {len(array) for array in source.read(index, [3, 1]).values()} == {2}


def test_rows_that_differ_in_length_are_objects() -> None:
    source = datasets.from_tf(lambda: tf.data.Dataset.range(6).map(lambda i: {"tokens": tf.range(i), "n": i}))
    found = source.read(source.index(), [4, 0, 2])
    assert [row.tolist() for row in found["tokens"]] == [[0, 1, 2, 3], [], [0, 1]]
    assert found["n"].tolist() == [4, 0, 2]


def test_a_pass_of_an_endless_pipeline_has_the_rows_asked_for() -> None:
    source = datasets.from_tf(lambda: numbers().repeat(), rows=ROWS + 50)
    index = source.index()
    assert index.rows == ROWS + 50
    assert source.read(index, [ROWS + 49])["i"].tolist() == [49]


def test_another_order_each_time_is_told_before_the_run() -> None:
    for make in (unseeded, lambda: numbers().take(1).concatenate(numbers().skip(1).shuffle(ROWS))):
        with pytest.raises(DataError, match="seed its shuffle") as raised:
            datasets.from_tf(make).index()
    assert "replayable=False" in str(raised.value)
    assert datasets.from_tf(unseeded, replayable=False).index().rows == ROWS


def whole_batches() -> Any:
    return numbers().batch(8, drop_remainder=True)


def mapped_batches(rows: Any) -> Any:
    return tf.data.experimental.map_and_batch(lambda row: row, 8, drop_remainder=True)(rows)


LATER: tuple[Callable[[Any], Any], ...] = (
    lambda batches: batches,
    lambda batches: batches.prefetch(2).with_options(tf.data.Options()),
    lambda batches: batches.take(9).skip(1).repeat(2),
    lambda batches: batches.cache().shuffle(4, seed=1),
    lambda batches: batches.apply(tf.data.experimental.assert_cardinality(31)),
)


def test_windows_of_several_rows_are_rows() -> None:
    """A single column of them, or what map() makes of them."""
    texts = tf.data.Dataset.range(40).batch(5, drop_remainder=True)
    found = [datasets.from_tf(make).index() for make in (lambda: texts, lambda: texts.map(lambda i: (i[:-1], i[1:])))]
    assert [{name: each.shape for name, each in index.schema.items()} for index in found] == [
        {"x": (5,)}, {"x": (4,), "y": (4,)},
    ]  # fmt: skip
    assert [index.rows for index in found] == [8, 8]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: numbers().repeat(), r"leave \.repeat\(\) out"),
        (lambda: numbers().filter(lambda row: row["i"] > 3), "does not know how many rows"),
        (lambda: numbers().take(0), "no rows"),
        (lambda: numbers().batch(8), r"leave \.batch\(\) out"),
        *((lambda later=later: later(whole_batches()), r"ends in \.batch\(\)") for later in LATER),
        (lambda: numbers().batch(8, num_parallel_calls=2, drop_remainder=True), "ends in"),
        (lambda: numbers().padded_batch(8, drop_remainder=True), "ends in"),
        (lambda: numbers().apply(mapped_batches), "ends in"),
        (lambda: tf.data.Dataset.range(4).map(lambda i: (i, i, i, i)), "4 parts"),
        (lambda: tf.data.Dataset.range(4).map(lambda i: ((i, i), i)), "parts of its own"),
        (lambda: [1, 2], "returned a list"),
        (lambda: tf.data.Dataset.range(4).map(lambda i: 1 // (i - 2)), "the pipeline raised"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_looked_at(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        datasets.from_tf(make).index()


def test_a_function_that_raises_is_named() -> None:
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        datasets.from_tf(lambda: 1 // 0).index()


def test_a_data_set_itself_cannot_be_sent() -> None:
    with pytest.raises(DataError, match="give the function that makes the data set"):
        datasets.from_tf(numbers())


def test_a_pass_that_ends_early_says_where() -> None:
    source = datasets.from_tf(numbers, rows=ROWS + 5)
    with pytest.raises(DataError, match=f"ended before row {ROWS + 1} of {ROWS + 5}"):
        source.read(source.index(), [ROWS + 1])


@pytest.mark.parametrize(
    "ask",
    [
        lambda source: source.filter(lambda row: True),
        lambda source: source.pack(8),
        lambda source: source.map_batches(lambda columns: columns, cpus=1),
        lambda source: datasets.split(source, {"a": 0.5, "b": 0.5}),
        lambda source: datasets.mix({"a": source}),
    ],
)
def test_what_needs_rows_by_number_is_refused(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(DataError, match="needs rows by number"):
        ask(datasets.from_tf(numbers))


def test_it_can_be_inspected() -> None:
    found = inspect(datasets.from_tf(numbers))
    assert (found.rows, found.shuffle, len(found.samples)) == (ROWS, None, 3)
    assert found.columns["x"].shape == (2,)


@dataclass
class Slow:
    """Stands for a pipeline whose iterator takes its time to end; it has one row, and knows nothing of its end."""

    may_end: Event = field(default_factory=Event)
    ended: Event = field(default_factory=Event)

    def batch(self, rows: int) -> Slow:
        return self

    prefetch = batch

    def __iter__(self) -> Iterator[Any]:
        pipeline = self

        class Elements:
            def __next__(self) -> Any:
                return {"i": tf.constant([7])}

            def __del__(self) -> None:
                pipeline.may_end.wait(60.0)
                pipeline.ended.set()

        return Elements()  # type: ignore[return-value]


INTEGERS = {"i": Field(np.dtype(np.int32), ())}


def test_what_a_pipeline_runs_has_ended_when_it_is_let_go() -> None:
    slow = Slow()
    rows = read_blocks(slow, INTEGERS, "here")
    assert next(rows)["i"].tolist() == [7]
    Timer(0.2, slow.may_end.set).start()
    rows.close()
    assert slow.ended.is_set()


def test_an_iterator_that_does_not_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with TensorFlow's autotuner, which may sleep through its end."""
    monkeypatch.setattr(tf_data, "END_S", 0.05)
    slow = Slow()
    rows = read_blocks(slow, INTEGERS, "here")
    next(rows)
    rows.close()
    assert not slow.ended.is_set()
    slow.may_end.set()
    assert slow.ended.wait(30.0), "it is let go all the same"


def test_a_process_ends_though_a_pipeline_is_half_read() -> None:
    """A thread that is started while the interpreter ends never runs."""
    program = """
import tensorflow as tf
from trainwright import datasets
from trainwright.datasets.formats.tf_data import read_blocks
from trainwright.datasets.data_source import Field
import numpy as np
blocks = read_blocks(tf.data.Dataset.range(10_000).map(lambda i: {"i": i}), {"i": Field(np.dtype("int64"), ())}, "here")
print(len(next(blocks)["i"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "256\n"), done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
