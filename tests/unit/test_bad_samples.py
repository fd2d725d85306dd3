"""Samples that cannot be read are found, told of once, and take part with weight 0."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError
from trainwright.datasets import parquet, table
from trainwright.datasets.data_source import Arrays, Rows
from trainwright.datasets.formats.parquet import ParquetLoader
from trainwright.datasets.loading import batch_loader
from trainwright.datasets.loading.bad_samples import SkippedSample, SkippingReader
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.datasets.row_reader import RowReader


def reading(bad: set[int], calls: list[int]) -> Any:
    def read(samples: Rows) -> Arrays:
        calls.append(len(samples))
        wrong = bad & set(samples.tolist())
        if wrong:
            raise DataError(f"row {min(wrong)} is damaged", where="file 1")
        return {"id": samples.copy()}

    return read


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40, unique=True), st.sets(st.integers(0, 40), max_size=8))
def test_good_rows_stay_and_bad_ones_are_told_once(samples: list[int], bad: set[int]) -> None:
    told: list[SkippedSample] = []
    salvage = SkippingReader(40, told.append)
    rows = np.array(samples, dtype=np.int64)
    for _ in range(2):
        columns, good = salvage.read(reading(bad, []), rows)
        assert good.tolist() == [sample not in bad for sample in samples]
        assert (columns["id"][good] == rows[good]).all()
        assert not set(columns["id"].tolist()) & bad
    assert sorted(item.sample for item in told) == sorted(set(samples) & bad)
    assert all("is damaged" in item.error and item.where == "file 1" for item in told)


def test_known_bad_rows_cost_nothing_again() -> None:
    salvage, calls = SkippingReader(5, lambda item: None), []
    read, rows = reading({7}, calls), np.arange(64)
    salvage.read(read, rows)
    assert len(calls) <= 2 * 7
    del calls[:]
    salvage.read(read, rows)
    assert calls == [63]


def test_a_bad_row_of_another_pass_is_tried_again_alone() -> None:
    told: list[SkippedSample] = []
    salvage, calls, rows = SkippingReader(1, told.append), list[int](), np.arange(64)
    salvage.read(reading({7}, []), rows, 0)
    for number, bad in ((1, {7}), (2, set()), (3, {7})):
        columns, good = salvage.read(reading(bad, calls), rows, number)
        assert good.tolist() == [row not in bad for row in range(64)] and (columns["id"][good] == rows[good]).all()
        assert calls == [7, 1, 56]
        del calls[:]
    assert [item.sample for item in told] == [7], "it is told of and counted once"


def test_the_limit_ends_it_with_the_last_error() -> None:
    with pytest.raises(DataError, match=r"more than 2 samples cannot be read.*row 9 is damaged"):
        SkippingReader(2, lambda item: None).read(reading({3, 6, 9}, []), np.arange(12))


def test_the_stream_gives_bad_samples_weight_0_and_keeps_the_order() -> None:
    def fragile(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"id": row["id"], "inverse": 1.0 / (float(row["id"]) - 13.0) if row["id"] != 13 else 1 // 0}

    told: list[SkippedSample] = []
    data = table({"id": np.arange(100)})
    feeding = FeedAssignment(data_ranks=range(1), total=1)
    plain = BatchLoader(data, batch_size=8, feeding=feeding)
    stream = BatchLoader(data.map(fragile), batch_size=8, feeding=feeding, skipper=SkippingReader(1, told.append))
    used: list[int] = []
    for expected, feed in zip(plain.feeds(), stream.feeds(), strict=True):
        batch, whole = feed.parts[0][0], expected.parts[0][0]
        assert (batch.samples == whole.samples).all(), "no sample moves to another batch"
        assert (batch.weights == (batch.samples != 13)).all()
        assert np.isfinite(batch.columns["inverse"]).all()
        used += batch.columns["id"][batch.weights > 0].tolist()
    assert sorted(used) == [row for row in range(100) if row != 13]
    assert [item.sample for item in told] == [13] and "ZeroDivisionError" in told[0].error


def failing_now_and_then(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "one": 1 // int(rng.random() > 0.05)}


@pytest.mark.parametrize("bucketed", [False, True])
def test_a_sample_is_bad_in_the_passes_in_which_it_fails_also_in_a_run_that_resumes(bucketed: bool) -> None:
    data = table({"id": np.arange(64), "n": np.arange(64) % 9})
    if bucketed:
        data = data.bucketed("n", 8).map(lambda row, rng: {**row, "one": 1 // int(row["id"] != 13)})
    else:
        data = data.map(failing_now_and_then)

    def weights(start: int) -> list[Any]:
        stream = BatchLoader(
            data, batch_size=8, epochs=20, feeding=FeedAssignment(data_ranks=range(1), total=1),
            skipper=SkippingReader(64, lambda item: None),
        )  # fmt: skip
        with stream.feeds(start) as feeds:
            return [feed.parts[0][0].weights.tolist() for feed in feeds]

    whole = weights(0)
    assert weights(100) == whole[100:]
    trained = [sum(map(sum, whole[first : first + 8])) for first in range(0, len(whole), 8)]
    assert trained == [63] * 20 if bucketed else min(trained[10:]) > 53


ODD: list[tuple[dict[str, Any], str]] = [
    ({"y": 1.5}, r"column 'y' is float64 \[\] here and int64 \[\] in the other rows"),
    ({"y": np.zeros(3, dtype=np.int64)}, r"column 'y' is int64 \[3\] here and int64 \[\] in"),
    ({"z": 1}, r"column 'y' is missing here and int64 \[\] in the other rows"),
    ({"y": 1, "z": 2}, r"column 'z' is int64 \[\] here and missing in the other rows"),
]


def salvaged(data: Any, told: list[SkippedSample], start: int = 0, batch_size: int = 8) -> list[Any]:
    """(columns, weights) of each step from `start` on."""
    feeding = FeedAssignment(data_ranks=range(1), total=1)
    salvage = SkippingReader(10, told.append)
    stream = BatchLoader(data, batch_size=batch_size, feeding=feeding, shuffle=False, skipper=salvage)
    with stream.feeds(start) as feeds:
        batches = [feed.parts[0][0] for feed in feeds]
    return [(batch.columns, batch.weights) for batch in batches]


@pytest.mark.parametrize(("odd", "error"), ODD)
@pytest.mark.parametrize("where", [0, 5, 8])
def test_a_row_unlike_the_others_is_skipped(odd: dict[str, Any], error: str, where: int) -> None:
    told: list[SkippedSample] = []
    data = table({"x": np.arange(9)}).map(lambda row, rng: odd if row["x"] == where else {"y": int(row["x"])})
    (columns, weights), (last, last_weights) = salvaged(data, told)
    for part in (columns, last):
        assert part.keys() == {"y"} and part["y"].dtype == np.int64 and part["y"].ndim == 1
    assert [*weights, *last_weights] == [float(row != where) for row in range(9)]
    assert [item.sample for item in told] == [where] and told[0].where == f"sample {where}"
    assert re.search(error, told[0].error)


@pytest.mark.parametrize("first", [0, 16])
def test_what_rows_are_like_is_kept_across_reads(first: int) -> None:
    def read(samples: Rows) -> Arrays:
        return {"y": np.asarray([1.5 if sample == 19 else sample for sample in samples.tolist()])}

    told: list[SkippedSample] = []
    salvage = SkippingReader(1, told.append)
    salvage.read(read, np.arange(first, first + 2))
    columns, good = salvage.read(read, np.arange(16, 32))
    assert columns["y"].dtype == np.int64
    assert (columns["y"][good] == [row for row in range(16, 32) if row != 19]).all()
    assert [item.sample for item in told] == [19], "the one row that widens the others is found"


def test_texts_of_any_length_are_alike() -> None:
    told: list[SkippedSample] = []
    data = table({"x": np.arange(9)}).map(lambda row, rng: {"y": "a" * int(row["x"])} if row["x"] != 5 else {})
    assert [len(text) for text in salvaged(data, told)[0][0]["y"]] == [0, 1, 2, 3, 4, 0, 6, 7]
    assert [item.sample for item in told] == [5]


@pytest.mark.parametrize("memory_bytes", [1 << 29, 1 << 12])
def test_one_null_costs_one_sample_and_not_its_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    reads: list[int] = []
    read = ParquetLoader._read
    monkeypatch.setattr(ParquetLoader, "_read", lambda self, *args: (reads.append(1), read(self, *args))[1])
    monkeypatch.setattr(batch_loader, "MEMORY_BYTES", memory_bytes)
    values = [None if row == 77 else row / 2 for row in range(1000)]
    pq.write_table(pa.table({"id": range(1000), "x": values}), tmp_path / "a.parquet", row_group_size=100)
    told: list[SkippedSample] = []
    stream = BatchLoader(
        parquet(str(tmp_path)), batch_size=50, feeding=FeedAssignment(data_ranks=range(1), total=1), shuffle=False,
        epochs=2, skipper=SkippingReader(1, told.append),
    )  # fmt: skip
    with stream.feeds(0) as feeds:
        batches = [feed.parts[0][0] for feed in feeds]
    for batch in batches:
        assert (batch.weights == (batch.samples != 77)).all()
        good = batch.weights > 0
        assert (batch.columns["x"][good] == batch.samples[good] / 2).all()
    assert [item.sample for item in told] == [77] and len(batches) == 40
    assert told[0].where.endswith("row group 0, row 77, column 'x'") and told[0].error == "1 of 1 values are null"
    assert len(reads) < 60, "a row group is not read again for each half"


@pytest.mark.parametrize("bad", [{107, 307, 507, 707, 907}, set(range(210, 290)) | {700}])
def test_damaged_row_groups_are_kept_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int]
) -> None:
    reads: list[int] = []
    read = ParquetLoader._read
    monkeypatch.setattr(ParquetLoader, "_read", lambda self, *args: (reads.append(1), read(self, *args))[1])
    values = [None if row in bad else f"text {row}" for row in range(1000)]
    pq.write_table(pa.table({"id": range(1000), "x": values}), tmp_path / "a.parquet", row_group_size=100)
    told: list[SkippedSample] = []
    stream = BatchLoader(
        parquet(str(tmp_path)), batch_size=8, feeding=FeedAssignment(data_ranks=range(1), total=1), seed=1, epochs=2,
        skipper=SkippingReader(100, told.append),
    )  # fmt: skip
    seen: list[int] = []
    with stream.feeds(0) as feeds:
        for batch in (feed.parts[0][0] for feed in feeds):
            assert [float(sample not in bad) for sample in batch.samples.tolist()] == batch.weights.tolist()
            good = batch.weights > 0
            assert batch.columns["x"][good].tolist() == [f"text {row}" for row in batch.samples[good].tolist()]
            seen += batch.samples[good].tolist()
    assert sorted(seen) == sorted([*(set(range(1000)) - bad)] * 2)
    assert sorted(item.sample for item in told) == sorted(bad)
    for item in told:
        place = f"row group {item.sample // 100}, row {item.sample}, column 'x'"
        assert item.where.endswith(place) and item.error == "1 of 1 values are null"
    assert len(reads) < 40, "each is read a few times, and once more for its bad row in each pass"


def test_each_column_of_a_damaged_row_group_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages that are copied as they are, a block's first attempt reads only the column with the bad row."""
    reads: list[tuple[str, ...]] = []
    read = ParquetLoader._read
    monkeypatch.setattr(
        ParquetLoader, "_read", lambda self, group, columns: (reads.append((*columns,)), read(self, group, columns))[1]
    )
    rows = pa.table({"id": range(100), "x": [None if row in (7, 70) else row / 2 for row in range(100)]})
    pq.write_table(rows, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    index, blocks = parquet(str(tmp_path)).index(), np.array([0, 50, 100])
    loader = parquet(str(tmp_path)).source.open(index)
    reader = RowReader(loader, index, ["id", "x"], blocks=blocks, memory_bytes=16 * 100)  # by one thread
    good = np.setdiff1d(np.arange(100), (7, 70))
    found = reader.gather_skipping_bad(good)
    assert found["id"].tolist() == good.tolist() and found["x"].tolist() == (good / 2).tolist()
    assert reads == [("x",), ("id",)]


def weighted(folder: Path) -> Any:
    return parquet(str(folder / "damaged")).weighted("w")


def bucketed(folder: Path) -> Any:
    return parquet(str(folder / "damaged")).bucketed("w", 50)


def beside_a_table(folder: Path) -> Any:
    return table({"row": np.arange(1000)}).beside(parquet(str(folder / "damaged")))


def beside_files(folder: Path) -> Any:
    return parquet(str(folder / "whole")).beside(parquet(str(folder / "damaged")))


@pytest.mark.parametrize("derived", [weighted, bucketed, beside_a_table, beside_files])
def test_one_null_behind_another_source_costs_one_sample(tmp_path: Path, derived: Any) -> None:
    rows = np.arange(1000)
    values = [None if row == 77 else row / 2 for row in range(1000)]
    columns = {"sample": rows, "x": values, "w": rows % 17 + 1}
    for name, data in (("damaged", columns), ("whole", {"row": rows})):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(data), tmp_path / name / "a.parquet", row_group_size=100)
    data, told = derived(tmp_path), list[SkippedSample]()
    number = "row" if "row" in data.index().schema else "sample"
    stream = BatchLoader(
        data, batch_size=50, feeding=FeedAssignment(data_ranks=range(1), total=1), seed=1, epochs=2,
        skipper=SkippingReader(20, told.append),
    )  # fmt: skip
    bad = 0
    with stream.feeds(0) as feeds:
        for batch in (feed.parts[0][0] for feed in feeds):
            good, row = batch.weights > 0, batch.columns[number]
            assert (batch.columns["x"][good] == row[good] / 2).all() and 77 not in row[good]
            bad += int(np.count_nonzero(~good))
    assert told and all(item.error == "1 of 1 values are null" for item in told)
    assert all(item.where.endswith("row group 0, row 77, column 'x'") for item in told)
    assert bad == 2 if derived is not weighted else 0 < bad < 20, "each pass loses the bad row alone"


@pytest.mark.parametrize("start", [0, 4])
def test_a_batch_with_no_good_row_does_not_end_the_run(start: int) -> None:
    def fragile(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": row["x"], "one": 1 // int(row["x"] < 7)}

    told: list[SkippedSample] = []
    steps = salvaged(table({"x": np.arange(9)}).map(fragile), told, start, batch_size=2)
    columns, weights = steps[-1]
    assert len(steps) == 5 - start and weights.tolist() == [0.0]
    assert columns["x"].item() < 7 and columns["one"].dtype == np.int64
    assert [item.sample for item in told] == list(range(7, 9))[-1 if start else 0 :]


def test_a_good_row_is_repeated_once_it_was_seen() -> None:
    told: list[SkippedSample] = []
    calls: list[int] = []
    salvage = SkippingReader(200, told.append)
    read = reading(set(range(1, 200)), calls)
    salvage.read(read, np.arange(1))
    for _ in range(2):
        columns, good = salvage.read(read, np.arange(100, 104))
        assert columns["id"].tolist() == [0] * 4 and not good.any()
    assert len(calls) == 1 + 7 and len(told) == 4


def test_it_ends_where_no_row_is_found_anywhere() -> None:
    told: list[SkippedSample] = []
    with pytest.raises(DataError, match="none of 3 samples in a row can be read: row 100 is damaged"):
        SkippingReader(5, told.append).read(reading(set(range(200)), []), np.arange(100, 103))
    assert [item.sample for item in told] == [100, 101, 102], "others that were tried are not counted"


def test_no_samples_are_no_error() -> None:
    columns, good = SkippingReader(0, lambda item: None).read(reading(set(), []), np.arange(0))
    assert len(columns["id"]) == len(good) == 0
