"""Mixtures: weights hold in every prefix, and every row comes when it is due."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import prediction_jobs
from trainwright.core.cluster import Cluster
from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError
from trainwright.datasets import concat, mix, parquet, split, table
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.datasets.ops.weighted_mix import MixPattern, largest_single_pass, pattern_of
from trainwright.planning.job_preparation import plan_for, prepare

SIZES = {"a": 50, "b": 20}
COUNTS = st.lists(st.integers(1, 60), min_size=1, max_size=6).map(tuple)


def numbers(first: int, rows: int) -> Any:
    return table({"x": np.arange(first, first + rows)})


@given(COUNTS)
def test_every_prefix_has_the_weights_within_one_row(counts: tuple[int, ...]) -> None:
    pattern = MixPattern(counts=counts)
    rows = 2 * pattern.period + 3
    parts, _ = pattern.at(np.arange(rows))
    for part, count in enumerate(counts):
        seen = np.cumsum(parts == part)
        due = [Fraction(count * (row + 1), pattern.period) for row in range(rows)]
        assert all(abs(int(number) - exact) < 1 for number, exact in zip(seen, due, strict=True))


@given(COUNTS, st.integers(0, 10_000))
def test_access_is_direct_and_numbers_each_part_without_gaps(counts: tuple[int, ...], start: int) -> None:
    pattern = MixPattern(counts=counts)
    parts, ranks = pattern.at(np.arange(start + 50))
    for part in range(len(counts)):
        assert ranks[parts == part].tolist() == list(range(np.count_nonzero(parts == part)))
    few = np.arange(start, start + 50)
    for some, all_rows in zip(pattern.at(few), (parts, ranks), strict=True):
        assert some.tolist() == all_rows[few].tolist()
    assert pattern.position(int(parts[start]), int(ranks[start])) == start


@given(COUNTS, st.data())
def test_the_default_epoch_passes_one_part_once_and_repeats_no_row(counts: tuple[int, ...], data: Any) -> None:
    sizes = [data.draw(st.integers(1, 200)) for _ in counts]
    pattern = MixPattern(counts=counts)
    rows = largest_single_pass(pattern, sizes)
    seen = np.bincount(pattern.at(np.arange(rows))[0], minlength=len(counts))
    assert all(seen <= sizes) and any(seen == sizes)
    assert np.bincount(pattern.at(np.arange(rows + 1))[0], minlength=len(counts))[int(np.argmax(seen == sizes))] >= 1
    assert any(np.bincount(pattern.at(np.arange(rows + 1))[0], minlength=len(counts)) > sizes)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [((3, 1), (3, 1)), ((0.7, 0.2, 0.1), (7, 2, 1)), ((50, 50), (1, 1)), ((1 / 3, 2 / 3), (1, 2)), ((5,), (1,))],
)
def test_weights_become_the_smallest_whole_numbers(weights: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert pattern_of(weights).counts == counts


def test_weights_without_small_whole_numbers_are_rounded() -> None:
    pattern = pattern_of([2**0.5, 1.0, 1e-9])
    assert 16_380 <= pattern.period <= 16_390 and pattern.counts[2] == 1
    assert pattern.counts[0] / pattern.counts[1] == pytest.approx(2**0.5, rel=1e-3)


def test_a_mixture_is_read_like_any_data_set() -> None:
    data = mix({"a": numbers(0, 30), "b": numbers(1000, 500)}, {"a": 3, "b": 1}, tag=True)
    index = data.index()
    assert index.rows == 40
    read = data.read(index, range(40))
    assert sorted(read["x"][read["source"] == 0]) == list(range(30))
    assert read["x"][read["source"] == 1].tolist() == list(range(1000, 1010))
    assert read["source"].dtype == np.int64
    backwards = data.read(index, np.arange(39, -1, -1), ["x"])
    assert backwards["x"].tolist() == read["x"][::-1].tolist() and list(backwards) == ["x"]
    assert data.read(index, [3, 1], ["source"])["source"].tolist() == read["source"][[3, 1]].tolist()


def test_parts_that_are_used_up_begin_again() -> None:
    data = mix({"a": numbers(0, 3), "b": numbers(100, 1000)}, rows=20)
    read = data.read(data.index(), range(20))["x"]
    assert read[read < 100].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert len(set(read[read >= 100].tolist())) == 10


def test_another_seed_begins_elsewhere_and_still_passes_each_row_once() -> None:
    parts = {"a": numbers(0, 50), "b": numbers(100, 1000)}
    reads = [(data := mix(parts, seed=seed)).read(data.index(), range(100))["x"] for seed in (0, 1)]
    assert reads[0].tolist() != reads[1].tolist()
    for read in reads:
        assert sorted(read[read < 100]) == list(range(50))
    assert mix(parts).index().hash != mix(parts, seed=1).index().hash == mix(parts, seed=1).index().hash


def test_many_row_groups_and_another_process() -> None:
    data = mix({"a": numbers(0, 5000), "b": numbers(10_000, 9000)}, {"a": 1, "b": 2}, rows=9000)
    index = pickle.loads(pickle.dumps(data.index()))
    assert len(index.groups) > 1 and sum(group.rows for group in index.groups) == 9000
    rows = np.random.default_rng(0).permutation(9000)[:200]
    whole = data.read(index, range(9000))["x"]
    assert pickle.loads(pickle.dumps(data)).read(index, rows)["x"].tolist() == whole[rows].tolist()


def test_the_parts_keep_their_transforms() -> None:
    noisy = numbers(0, 4).map(lambda row, rng: {"x": row["x"], "noise": rng.random()})
    plain = numbers(10, 8).map_batches(lambda columns: {"x": columns["x"], "noise": columns["x"] * 0.0})
    data = mix({"noisy": noisy, "plain": plain}, rows=16, seed=0)
    index = data.index()
    assert set(index.schema) == {"x", "noise"}
    read = data.read(index, range(16))
    first, second = (read["noise"][read["x"] == 2]).tolist()
    assert first == noisy.read(noisy.index(), [2], seed=0, epoch=0)["noise"][0]
    assert second == noisy.read(noisy.index(), [2], seed=0, epoch=1)["noise"][0] != first
    assert len(data.functions) == 2
    assert data.map(lambda row, rng: {"y": row["x"] + 1}).read(index, [0])["y"][0] == read["x"][0] + 1


def test_a_stream_over_a_mixture_delivers_each_row_once() -> None:
    data = mix({"a": numbers(0, 90), "b": numbers(1000, 1000)}, {"a": 3, "b": 1})
    stream = BatchLoader(
        data,
        batch_size=16,
        epochs=1,
        seed=3,
        shuffle=True,
        drop_last=False,
        feeding=FeedAssignment(data_ranks=range(1), total=1),
    )
    with stream.feeds() as feeds:
        seen = [value for feed in feeds for batch in feed.parts[0] for value in batch.columns["x"].tolist()]
    assert sorted(value for value in seen if value < 1000) == list(range(90))
    assert len(seen) == len(set(seen)) == 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": {}}, "nothing to mix"),
        ({"weights": {"a": 1}}, "'b' has no weight"),
        ({"weights": {"a": 1, "b": 1, "bb": 1}}, "there is no part 'bb'"),
        ({"weights": {"a": 1, "b": 0}}, "not positive"),
        ({"rows": 0}, "rows=0"),
        ({"parts": {"a": numbers(0, 3).map_batches(dict, cpus=1)}}, "runs on Ray Data"),
    ],
)
def test_wrong_mixtures_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        mix(**{"parts": {"a": numbers(0, 3), "b": numbers(0, 3)}, **arguments})
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (table({"x": np.arange(3.0)}), r"'x' is float64 \[\] here and int64 \[\] in 'a'"),
        (table({"x": np.zeros((3, 2), np.int64)}), r"'x' is int64 \[2\] here"),
        (table({"y": np.arange(3)}), "'x' is missing here"),
        (numbers(0, 3).map(lambda row, rng: {"x": float(row["x"])}), "float64"),
    ],
)
def test_parts_of_different_columns_are_refused(other: Any, message: str) -> None:
    with pytest.raises(DataError, match=message.replace("'a'", "'0'")):
        concat(numbers(0, 3), other).index()
    with pytest.raises(DataError, match=message) as caught:
        mix({"a": numbers(0, 3), "b": other}).index()
    assert "before mixing" in caught.value.remedy and "part 'b'" in caught.value.where


def test_rows_that_are_in_no_epoch_are_noted(tmp_path: Path) -> None:
    parts = {"a": numbers(0, 5000), "b": numbers(10_000, 2001)}
    data = mix(parts)
    note = "a mixture, and 2,998 of 5,000 rows of 'a' are in no epoch: mix(..., rows=9999) has each row at least once"
    assert data.index().note == note and data.index().rows == 4003
    read = mix(parts, rows=9999)
    assert read.index().note == "" and set(read.read(read.index(), range(9999))["x"]) >= set(range(5000))
    assert mix({"a": numbers(0, 30), "b": numbers(0, 10)}, {"a": 3, "b": 1}).index().note == ""
    beside = data.beside(table({"sample": np.arange(4003), "t": np.zeros(4003)}))
    assert beside.index().note == note
    assert (
        "3,999 of 5,000 rows of 'a' and 1,000 of 2,001 rows of 'b' are"
        in mix({**parts, "c": numbers(0, 1000)}).index().note
    )
    few = {
        name: table({"x": np.zeros((size, 4), np.float32), "y": np.arange(size) % 3}) for name, size in SIZES.items()
    }
    job = prediction_jobs.job(tmp_path, train=mix(few), workers=1)
    notes = plan_for(prepare(job), Cluster.parse("1x2xCPU")).chosen.notes
    assert any("train= is a mixture, and 29 of 50 rows of 'a' are in no epoch" in each for each in notes), notes


def increased(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": row["x"] + 1}


def test_data_sets_one_after_the_other(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 700)):
        pq.write_table(pa.table({"x": np.arange(first, first + 700)}), tmp_path / f"{name}.parquet", row_group_size=90)
    folds = split(parquet(tmp_path), {"0": 0.4, "1": 0.3, "2": 0.3})
    data = concat(folds["0"], numbers(5000, 7).map(increased), folds["2"])
    index = pickle.loads(pickle.dumps(data.index()))
    sides = {name: part.read(part.index(), range(part.index().rows))["x"].tolist() for name, part in folds.items()}
    expected = np.array([*sides["0"], *range(5001, 5008), *sides["2"]])
    assert index.rows == len(expected) and index.note == ""
    assert [group.first for group in index.groups] == list(index.firsts) and len(index.groups) > 16
    rows = np.random.default_rng(0).permutation(index.rows)
    assert pickle.loads(pickle.dumps(data)).read(index, rows)["x"].tolist() == expected[rows].tolist()
    stream = BatchLoader(data, batch_size=50, feeding=FeedAssignment(data_ranks=range(1), total=1), seed=3)
    with stream.feeds(5) as feeds:  # as a run that resumes
        late = [x for feed in feeds for x in feed.parts[0][0].columns["x"].tolist()]
    with stream.feeds(0) as feeds:
        whole = [x for feed in feeds for x in feed.parts[0][0].columns["x"].tolist()]
    assert sorted(whole) == sorted(expected.tolist()) and whole != expected.tolist() and whole[250:] == late
    assert concat(folds["2"], folds["0"]).index().hash != concat(folds["0"], folds["2"]).index().hash
    assert data.map(lambda row, rng: {"y": -row["x"]}).read(index, [3])["y"].tolist() == [-expected[3]]
    assert repr(concat(folds["0"])).startswith("concat(split(parquet(")
    for wrong, message in (((), "nothing to concat"), ((numbers(0, 3).map_batches(dict, cpus=1),), "runs on Ray Data")):
        with pytest.raises(DataError, match=message):
            concat(*wrong)


def test_a_column_of_the_tags_name_is_refused() -> None:
    with pytest.raises(DataError, match="a column 'source' already"):
        mix({"a": table({"source": np.arange(3)})}, tag=True).index()
