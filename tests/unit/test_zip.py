"""Data sets side by side: what a plain zip gives, in any order, and refused where the rows do not belong together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets import mix, parquet, split, table
from trainwright.datasets.dataset import transformed_fields
from trainwright.datasets.loading.batch_loader import BatchLoader, make_schedule
from trainwright.datasets.ray_data.delivery_pipeline import PipelineSpec

Row = dict[str, Any]


def soft(numbers: Any) -> Any:
    """What a teacher says of the samples of these numbers."""
    return np.stack((np.asarray(numbers) * 10.0, np.asarray(numbers) * 10.0 + 1), axis=1)


def table_of(rows: int) -> Any:
    return table({"id": np.arange(rows)})


def stored(folder: Path, samples: Any, parts: int = 3, **more: Any) -> Any:
    """Parquet parts as `tw.predict` writes them, of rows in any order."""
    folder.mkdir()
    for number, some in enumerate(np.array_split(np.asarray(samples), parts)):
        values = pa.FixedShapeTensorArray.from_numpy_ndarray(soft(some))
        columns = {"sample": some, "soft": values, **{name: column[some] for name, column in more.items()}}
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=7)
    return parquet(folder)


def jitter(row: Row, rng: np.random.Generator) -> Row:
    assert set(row) == {"id"}
    return {**row, "noise": rng.normal()}


def doubled(columns: Mapping[str, Any]) -> Row:
    assert set(columns) == {"sample", "soft"}
    return {"sample": columns["sample"], "soft": columns["soft"] * 2}


def fed(data: Any, rank: int, ranks: int, epochs: int, seed: int) -> list[Row]:
    feeding = FeedAssignment(data_ranks=range(rank, rank + 1), total=ranks)
    stream = BatchLoader(data, batch_size=8, epochs=epochs, seed=seed, feeding=feeding)
    with stream.feeds(0) as feeds:
        return [dict(batch.columns) for feed in feeds for part in feed.parts for batch in part]


@settings(max_examples=25)
@given(
    rows=st.integers(9, 60), ranks=st.integers(1, 3), seed=st.integers(0, 9), moved=st.booleans(), late=st.booleans()
)
def test_every_rank_is_fed_what_a_plain_zip_gives(
    rows: int, ranks: int, seed: int, moved: bool, late: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In the order and with the randomness that the base has alone, whatever the order of the other's files is."""
    samples = np.random.default_rng(seed).permutation(rows) if moved else np.arange(rows)
    other = stored(tmp_path_factory.mktemp("beside") / "out", samples)
    base = table_of(rows)
    if seed % 2:
        path = tmp_path_factory.mktemp("base") / "base.parquet"
        pq.write_table(pa.table({"id": np.arange(rows)}), path, row_group_size=11)
        base = parquet(path)
    base = base.map(jitter) if late else base
    both = base.beside(other.map_batches(doubled) if late else other)
    for rank in range(ranks):
        alone, found = (fed(data, rank, ranks, epochs=2, seed=seed) for data in (base, both))
        assert len(alone) == len(found)
        for mine, ours in zip(alone, found, strict=True):
            assert set(ours) == {*mine, "soft"}
            for name, column in mine.items():
                np.testing.assert_array_equal(ours[name], column)
            np.testing.assert_array_equal(ours["soft"], soft(mine["id"]) * (2 if late else 1))


def test_it_goes_with_filters_packs_splits_mixtures_and_itself(tmp_path: Path) -> None:
    other = stored(tmp_path / "one", range(40))
    both = table_of(40).beside(other)
    few = stored(tmp_path / "two", range(20))
    cases: Mapping[str, Callable[[], Any]] = {
        "filtered before": lambda: table_of(40).filter(odd).beside(few),
        "filtered after": lambda: both.filter(odd),
        "split": lambda: split(both, {"a": 0.5, "b": 0.5}, by="id")["a"],
        "mixed": lambda: mix({"a": both, "b": table_of(40).beside(other)}),
    }
    for name, made in cases.items():
        data = pickle.loads(pickle.dumps(made()))
        index = data.index()
        found = data.read(index, range(index.rows - 1, -1, -1))
        said: Any = np.arange(20)[::-1] if name == "filtered before" else found["id"]
        np.testing.assert_array_equal(found["soft"], soft(said), err_msg=name)
    again = table_of(40).map(jitter).beside(other).beside(stored(tmp_path / "three", range(40)).map_batches(renamed))
    found = again.read(again.index(), [7, 3])
    assert set(found) == {"id", "noise", "soft", "second"}
    np.testing.assert_array_equal(found["second"], soft([7, 3]))
    assert both.index().hash != table_of(40).index().hash


def odd(row: Row) -> bool:
    return bool(row["id"] % 2)


def test_heavy_transforms_of_both_give_what_light_ones_do(tmp_path: Path) -> None:
    """In stages, as Ray Data runs them."""
    base, other = table_of(40), stored(tmp_path / "out", range(40))
    light = base.map(jitter).map_batches(shifted).beside(other.map_batches(doubled))
    heavy = base.map(jitter).map_batches(shifted, cpus=1).beside(other.map_batches(doubled, cpus=1))
    index = heavy.index()
    schedule = make_schedule(index, batch_size=8, epochs=1, seed=3, shuffle=True, drop_last=False)
    recipe = PipelineSpec(dataset=heavy, index=index, columns=("id", "noise", "soft"), schedule=schedule, length=2)
    content = recipe.read(next(recipe.pieces(0, 1)))
    for stage in range(1, len(recipe.stages)):
        content = recipe.transform(content, stage)
    assert len(recipe.stages) == 3 and content.error is None
    expected = light.read(light.index(), content.samples, seed=3)
    for name, column in expected.items():
        np.testing.assert_array_equal(content.columns[name], column)


def shifted(columns: Mapping[str, Any]) -> Row:
    assert set(columns) == {"id", "noise"}
    return {**columns, "noise": columns["noise"] + 1}


def renamed(columns: Mapping[str, Any]) -> Row:
    return {"second": columns["soft"]}


MISFITS: dict[str, tuple[list[int], str, str]] = {
    "missing": ([*range(12), *range(13, 30)], "row 12 is missing, and 1 of 30 in all", "part-1.parquet"),
    "double": ([*range(30), 29], "row 29 comes 2 times", "part-2.parquet"),
    "doubled": ([5, *range(1, 30)], "row 5 comes 2 times", "part-0.parquet"),
    "too many": ([*range(31)], "row 30 is none of the 30 rows of table", "part-2.parquet"),
    "negative": ([-1, *range(1, 30)], "row -1 is none of the 30 rows", "part-0.parquet"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_rows_that_do_not_belong_together_are_refused_with_row_and_file(name: str, tmp_path: Path) -> None:
    samples, message, file = MISFITS[name]
    with pytest.raises(DataError, match=message) as caught:
        table_of(30).beside(stored(tmp_path / "out", samples)).index()
    assert file in caught.value.where and ".beside first" in caught.value.remedy


def test_a_torn_part_and_what_is_no_prediction_are_refused(tmp_path: Path) -> None:
    other = stored(tmp_path / "out", range(30))
    part = tmp_path / "out" / "part-1.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(DataError, match="not a whole parquet file") as caught:
        table_of(30).beside(other).index()
    assert "part-1.parquet" in caught.value.where
    with pytest.raises(DataError, match=r"'sample' says which row .* there is no such column"):
        table_of(30).beside(table({"soft": np.zeros(30)})).index()
    with pytest.raises(DataError, match="beside takes a data set, and this is a str"):
        table_of(30).beside("out")
    with pytest.raises(DataError, match="it is float64"):
        table_of(30).beside(table({"sample": np.zeros(30)})).index()
    twice = stored(tmp_path / "twice", range(30), id=np.arange(30))
    with pytest.raises(DataError, match="both data sets have a column 'id'"):
        table_of(30).beside(twice).index()
    late = table_of(30).map(jitter).beside(twice)
    with pytest.raises(DataError, match="both data sets have a column 'id'"):
        transformed_fields(late, late.index())


def test_errors_name_the_users_own_function(tmp_path: Path) -> None:
    data = table_of(30).map(failing).beside(stored(tmp_path / "out", range(30)))
    with pytest.raises(UserCodeError, match="the transform failing raised LookupError"):
        data.read(data.index(), [3])


def failing(row: Row, rng: np.random.Generator) -> Row:
    raise LookupError("struck")
