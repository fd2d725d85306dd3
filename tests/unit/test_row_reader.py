"""The reader: any rows in any order, whatever fits, several row groups at a time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import DataError
from trainwright.datasets import parquet, table
from trainwright.datasets.data_source import Field, Index, Loader, RowGroup
from trainwright.datasets.loading.batch_loader import ReadAhead, _Shared
from trainwright.datasets.row_reader import RowReader

SCHEMA = {"x": Field(np.dtype(np.int64), ()), "name": Field(np.dtype(object), ())}


class Numbers(Loader):
    """Row n holds n and its text. Twins share what they count."""

    def __init__(self, index: Index, bad: int = -1, shared: Any = None) -> None:
        self.index, self.bad, self.shared = index, bad, shared or {"loaded": [], "threads": set(), "twins": 0}

    def load(self, number: int, columns: Any) -> dict[str, np.ndarray]:
        self.shared["loaded"].append(number)
        self.shared["threads"].add(threading.get_ident())
        if number == self.bad:
            raise DataError("rotten", where=f"row group {number}", remedy="none")
        group = self.index.groups[number]
        rows = np.arange(group.first, group.first + group.rows)
        return {name: rows if name == "x" else rows.astype(str).astype(object) for name in columns}


class Twins(Numbers):
    def twin(self) -> Twins:
        self.shared["twins"] += 1
        return Twins(self.index, self.bad, self.shared)


def index_of(sizes: list[int]) -> Index:
    firsts = np.cumsum([0, *sizes]).tolist()
    groups = tuple(RowGroup(file="f", number=n, rows=size, first=firsts[n]) for n, size in enumerate(sizes))
    return Index(rows=firsts[-1], groups=groups, schema=SCHEMA, row_bytes=16, hash="")


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    cuts=st.none() | st.sets(st.integers(1, 200)),
    memory_rows=st.integers(1, 400),
    kind=st.sampled_from([Numbers, Twins]),
    seed=st.integers(0, 99),
)
def test_gathers_any_rows_in_any_memory(
    sizes: list[int], cuts: set[int] | None, memory_rows: int, kind: type[Numbers], seed: int
) -> None:
    index = index_of(sizes)
    blocks = None if cuts is None else np.array([0, *sorted(cut for cut in cuts if cut < index.rows), index.rows])
    reader = RowReader(kind(index), index, ["x", "name"], blocks=blocks, memory_bytes=16 * memory_rows)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        rows = rng.integers(0, index.rows, rng.integers(0, 60))
        found = reader.gather(rows)
        assert found["x"].tolist() == rows.tolist()
        assert found["name"].tolist() == [str(row) for row in rows]
        largest = int(np.diff(reader._blocks).max())
        assert sum(map(reader._size, reader._slot_of)) * reader._row_bytes <= 16 * max(memory_rows, largest)


def test_several_row_groups_are_loaded_at_a_time_and_each_once() -> None:
    index = index_of([10] * 40)
    loader = Twins(index)
    reader = RowReader(loader, index, ["x"])
    rows = np.random.default_rng(0).permutation(400)
    assert reader.gather(rows)["x"].tolist() == reader.gather(rows)["x"].tolist() == rows.tolist()
    assert sorted(loader.shared["loaded"]) == list(range(40))
    assert threading.get_ident() not in loader.shared["threads"]
    assert loader.shared["twins"] <= 3


def test_large_row_groups_are_loaded_one_by_one() -> None:
    index = index_of([100] * 4)
    loader = Twins(index)
    reader = RowReader(loader, index, ["x"], memory_bytes=16 * 400)
    reader.gather(np.arange(400))
    assert (loader.shared["loaded"], loader.shared["twins"]) == ([0, 1, 2, 3], 0)


@pytest.mark.parametrize("kind", [Numbers, Twins])
def test_an_error_leaves_the_reader_as_it_was(kind: type[Numbers]) -> None:
    index = index_of([10] * 40)
    loader = kind(index, bad=17)
    reader = RowReader(loader, index, ["x"])
    for _ in range(3):
        with pytest.raises(DataError, match="rotten"):
            reader.gather(np.arange(400))
    good = np.array([*range(169, -1, -1), *range(180, 400)])
    assert reader.gather(good)["x"].tolist() == good.tolist()
    loader.bad = -1
    if kind is Numbers:
        assert reader.gather(np.arange(400))["x"].tolist() == list(range(400))


def test_missing_rows_are_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rotten(Numbers):
        def load_rows(self, number: int, columns: Any, rows: Any) -> dict[str, np.ndarray]:
            if (rows == 7).any():
                raise DataError("rotten", where="row 7", remedy="none")
            group = self.index.groups[number]
            return dict.fromkeys(columns, group.first + rows)

    sorts, sort = list[int](), np.concatenate
    monkeypatch.setattr(np, "concatenate", lambda arrays: (sorts.append(len(arrays)), sort(arrays))[1])
    index = index_of([10] * 40)
    reader = RowReader(Rotten(index, bad=17), index, ["x"])
    good = np.array([*range(177, 169, -1), *range(178, 400), *range(170)])[1:]
    assert reader.gather_skipping_bad(good)["x"].tolist() == good.tolist()
    sorts.clear()
    for _ in range(3):
        assert reader.gather(good)["x"].tolist() == good.tolist()
    assert not sorts, "no bad row was found since"
    with pytest.raises(DataError, match="rotten"):
        reader.gather(np.array([177, 3]))


def test_a_table_in_memory_is_not_copied() -> None:
    data = table({"x": np.arange(100)})
    index = data.index()
    reader = data.reader(index, ["x"], memory_bytes=8)
    assert reader.gather(np.array([5, 3]))["x"].tolist() == [5, 3]
    assert reader._memory["x"] is data.source.arrays["x"]


def test_gathered_rows_are_nobody_elses(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(100)}), tmp_path / "x.parquet", row_group_size=30)
    data = parquet(tmp_path / "x.parquet")
    reader = data.reader(data.index(), ["x"])
    reader.gather(np.arange(100))["x"][:] = -1
    assert reader.gather(np.arange(100))["x"].tolist() == list(range(100))


def test_the_depth_grows_where_a_full_queue_ran_dry_and_the_memory_allows_it() -> None:
    shared = _Shared[int](2, lambda item: 10, 90)
    shared.end(None)  # so that nobody waits for more

    def fill_and_drain(items: int) -> int:
        for item in range(items):
            shared.put(item)
        assert [shared.take() for _ in range(items)] == list(range(items))
        with pytest.raises(StopIteration):
            shared.take()
        return shared.depth

    assert [fill_and_drain(items) for items in (1, 2, 3, 4, 8)] == [2, 4, 4, 8, 8]
    assert ReadAhead(iter(range(9)), depth=3).depth == 3
