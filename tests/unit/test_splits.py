"""Splits: disjoint, complete, and the same for good."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.errors import DataError
from trainwright.datasets import mix, parquet, split, table
from trainwright.datasets.ops.hash_split import HashSplit, SplitIndex, hash_keys

SHARES = {"train": 0.9, "validation": 0.1}
PARTS = st.lists(st.integers(1, 20), min_size=1, max_size=5).map(lambda parts: tuple(n / sum(parts) for n in parts))


def ids(dataset: Any, column: str = "x") -> list[int]:
    index = dataset.index()
    found: list[int] = dataset.read(index, range(index.rows))[column].tolist()
    return found


def written(path: Path, rows: int, group: int = 100) -> Any:
    user = [f"user {row * 7 % 50}" for row in range(rows)]
    pq.write_table(pa.table({"x": np.arange(rows), "user": user}), path, row_group_size=group)
    return parquet(path)


@given(PARTS, st.integers(0, 2**40), st.integers(0, 1 << 32))
def test_a_row_stays_on_its_side_whatever_comes_after_it(shares: tuple[float, ...], seed: int, first: int) -> None:
    cut = HashSplit(shares=shares, seed=seed)
    sides = cut.rows(first, first + 200)
    assert sides.min() >= 0 and sides.max() < len(shares)
    assert cut.rows(first, first + 120).tolist() == sides[:120].tolist()
    assert cut.rows(first + 120, first + 200).tolist() == sides[120:].tolist()


@given(PARTS, st.integers(0, 1000))
def test_the_shares_are_met(shares: tuple[float, ...], seed: int) -> None:
    rows = 20_000
    found = np.bincount(HashSplit(shares=shares, seed=seed).rows(0, rows), minlength=len(shares))
    for share, count in zip(shares, found, strict=True):
        assert abs(count - share * rows) <= 6 * np.sqrt(rows * share * (1 - share)) + 1


@given(st.integers(1, 400), st.integers(0, 50), PARTS, st.booleans())
def test_splits_are_disjoint_complete_and_unmoved_by_appended_rows(
    rows: int, more: int, parts: tuple[float, ...], by_key: bool
) -> None:
    shares = {f"part {number}": share for number, share in enumerate(parts)}

    def sides(count: int) -> dict[str, list[int]]:
        data = table({"x": np.arange(count), "key": np.arange(count) // 3})
        found = {}
        for name, part in split(data, shares, by="key" if by_key else None).items():
            try:
                found[name] = ids(part)
            except DataError:  # an empty part is refused
                found[name] = []
        return found

    before, after = sides(rows), sides(rows + more)
    assert sorted(row for part in before.values() for row in part) == list(range(rows))
    assert {name: [row for row in part if row < rows] for name, part in after.items()} == before


def test_the_sides_are_pinned() -> None:
    """Another release must cut in the same places."""
    assert np.flatnonzero(HashSplit(shares=(0.9, 0.1)).rows(0, 60)).tolist() == [28, 39]
    keys = hash_keys(np.array(["a", "b", b"a", "ä"], dtype=object))
    assert keys is not None
    assert keys.tolist() == [3405396810240292928, 8453121595177857668, 3405396810240292928, 4152366542966443504]


def test_reading_stays_within_the_row_groups(tmp_path: Path) -> None:
    whole = written(tmp_path / "x.parquet", 1000)
    parts = split(whole, SHARES)
    indexes = {name: part.index() for name, part in parts.items()}
    assert sum(index.rows for index in indexes.values()) == 1000
    assert 60 < indexes["validation"].rows < 140
    for name, index in indexes.items():
        assert [group.number for group in index.groups] == list(range(10))
        assert index.hash != whole.index().hash
        read = parts[name].read(index, range(index.rows), ["x"])["x"]
        for group in index.groups:
            assert set(read[group.first : group.first + group.rows] // 100) == {group.number}
    travelled = pickle.loads(pickle.dumps(parts["train"]))
    assert travelled.read(pickle.loads(pickle.dumps(indexes["train"])), [5])["x"] == ids(parts["train"])[5]


def test_rows_of_one_key_fall_on_one_side(tmp_path: Path) -> None:
    whole = written(tmp_path / "x.parquet", 1000)
    parts = split(whole, {"train": 0.7, "validation": 0.2, "test": 0.1}, by="user")
    users = {name: set(ids(part, "user")) for name, part in parts.items()}
    assert sum(map(len, users.values())) == len(set().union(*users.values())) == 50
    assert sorted(row for part in parts.values() for row in ids(part)) == list(range(1000))
    index = parts["train"].index()
    assert isinstance(index, SplitIndex) and all(len(mark) == 13 for mark in index.marks)
    travelled = pickle.loads(pickle.dumps((parts["train"], index)))
    assert travelled[0].read(travelled[1], [7])["x"] == ids(parts["train"])[7]


def test_the_key_column_is_read_once_for_all_parts(tmp_path: Path) -> None:
    whole = written(tmp_path / "x.parquet", 300)
    parts = split(whole, SHARES, by="user")
    loads: list[int] = []
    loader = type(whole.source.open(whole.index()))
    original = loader.load

    def counted(self: Any, number: int, columns: Any) -> Any:
        loads.append(number)
        return original(self, number, columns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load", counted)
        for part in parts.values():
            part.index()
    assert sorted(loads) == [0, 1, 2]


def test_keys_count_by_value_and_not_by_width() -> None:
    wide, narrow = (hash_keys(np.array([-3, 0, 7], dtype=kind)) for kind in (np.int64, np.int8))
    assert wide is not None and narrow is not None and wide.tolist() == narrow.tolist()
    single, double = (hash_keys(np.array([0.5, -0.0], dtype=kind)) for kind in (np.float32, np.float64))
    assert single is not None and double is not None and single.tolist() == double.tolist()
    assert single[1] == 0
    assert hash_keys(np.zeros((2, 2))) is None
    assert hash_keys(np.array([{}, []], dtype=object)) is None


def test_transforms_stay_and_splits_nest(tmp_path: Path) -> None:
    whole = written(tmp_path / "x.parquet", 400).map_batches(lambda columns: {"y": columns["x"] * 2})
    parts = split(whole, {"a": 0.5, "b": 0.5}, seed=4)
    assert sorted(ids(parts["a"], "y") + ids(parts["b"], "y")) == list(range(0, 800, 2))
    inner = split(parts["a"], {"c": 0.5, "d": 0.5}, seed=5)
    assert sorted(ids(inner["c"], "y") + ids(inner["d"], "y")) == sorted(ids(parts["a"], "y"))
    both = mix({"a": parts["a"], "b": parts["b"]})
    assert set(ids(both, "y")) <= set(range(0, 800, 2))
    assert ids(split(whole, {"a": 0.5, "b": 0.5}, seed=6)["a"], "y") != ids(parts["a"], "y")
    filtered = split(table({"x": np.arange(100)}).filter(lambda row: row["x"] % 2 == 0), {"a": 0.5, "b": 0.5})
    assert sorted(ids(filtered["a"]) + ids(filtered["b"])) == list(range(0, 100, 2))
    assert len(filtered["a"].functions) == 1 and "split(" in repr(filtered["a"])


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 0.5, "b": 0.4}, "0.5 \\+ 0.4 are not 1"),
        ({}, "not 1 together"),
        ({"a": 1.5, "b": -0.5}, "-0.5 of 'b' is not positive"),
        ({str(part): 1 / 200 for part in range(200)}, "too many"),
    ],
)
def test_wrong_shares_are_refused(shares: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split(table({"x": np.arange(3)}), shares)


def test_what_cannot_be_split_is_named() -> None:
    data = table({"x": np.arange(30), "image": np.zeros((30, 2))})
    with pytest.raises(DataError, match="no column 'y'"):
        split(data, SHARES, by="y")["train"].index()
    with pytest.raises(DataError, match="are not keys") as caught:
        split(data, SHARES, by="image")["train"].index()
    assert "row group 0" in caught.value.where
    with pytest.raises(DataError, match="'b' has none of 3 rows"):
        split(table({"x": np.arange(3)}), {"a": 0.9999, "b": 0.0001})["b"].index()
