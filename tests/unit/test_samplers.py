"""Samplers: rows drawn by weights and batches of similar length, the same for any number of ranks and from any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError
from trainwright.datasets import from_torch, mix, parquet, split, table
from trainwright.datasets.loading import batch_loader
from trainwright.datasets.loading.batch_loader import BatchLoader
from trainwright.datasets.ops import samplers

ROWS, BATCH = 230, 16
LENGTHS = np.random.default_rng(1).integers(1, 100, ROWS)
WEIGHTS = np.where(np.arange(ROWS) % 5 == 0, 0.0, np.arange(ROWS) % 3 + 1.0)
DATA = {"x": np.arange(ROWS), "length": LENGTHS, "w": WEIGHTS}


def batches(data: Any, ranks: int = 1, start: int = 0, **options: Any) -> list[list[int]]:
    """The rows of each global batch, sorted, over two epochs."""
    given = {"batch_size": BATCH, "epochs": 2, "seed": 4, **options}
    found: list[list[int]] = []
    for rank in range(ranks):
        feeding = FeedAssignment(data_ranks=range(rank, rank + 1), total=ranks)
        with BatchLoader(data, feeding=feeding, **given).feeds(start) as feeds:
            own = [feed.parts[0][0] for feed in feeds]
        found = found or [[] for _ in own]
        for rows, part in zip(found, own, strict=True):
            rows += part.columns["x"][part.weights > 0].tolist()
    return [sorted(rows) for rows in found]


@pytest.mark.parametrize("data", [table(DATA).weighted("w", 400), table(DATA).bucketed("length", BATCH)])
def test_the_order_depends_on_seed_and_epoch_alone(data: Any) -> None:
    whole = batches(data)
    assert whole == batches(data, ranks=2) == batches(data, ranks=3)
    assert whole[7:] == batches(data, start=7)
    assert whole != batches(data, seed=5) and whole[: len(whole) // 2] != whole[len(whole) // 2 :]


def test_rows_are_drawn_by_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table(DATA), tmp_path / "data.parquet", row_group_size=20)
    drawn = [batches(data.weighted("w", 4000)) for data in (table(DATA), parquet(str(tmp_path)))]
    with monkeypatch.context() as patch:
        patch.setattr(batch_loader, "MEMORY_BYTES", 4096)
        assert drawn[0] == drawn[1] == batches(parquet(str(tmp_path)).weighted("w", 4000))
    counts = np.bincount(np.concatenate(drawn[0]), minlength=ROWS)
    assert counts.sum() == 2 * 4000 and not counts[WEIGHTS == 0].any()
    shares = [counts[weight == WEIGHTS].mean() for weight in (1.0, 2.0, 3.0)]
    np.testing.assert_allclose(np.array(shares) / shares[0], [1, 2, 3], rtol=0.1)
    assert batches(table(DATA).weighted(WEIGHTS, 4000)) == drawn[0]


def test_batches_have_rows_of_similar_length_and_each_row_comes_once() -> None:
    texts = table({"x": DATA["x"], "tokens": [np.zeros(length, np.int64) for length in LENGTHS]})
    found = batches(texts.bucketed("tokens", BATCH))
    assert found == batches(table(DATA).bucketed(LENGTHS, BATCH))
    steps = len(found) // 2
    for epoch in (found[:steps], found[steps:]):
        assert sorted(np.concatenate(epoch)) == list(range(ROWS)) and len(epoch[-1]) == ROWS % BATCH
    spread = max(np.ptp(LENGTHS[rows]) for rows in found if len(rows) == BATCH)
    assert spread <= 20 < min(np.ptp(LENGTHS[rows]) for rows in batches(table(DATA))[: steps - 1])


def test_no_row_is_left_out_of_every_epoch_because_of_its_length() -> None:
    found = batches(table(DATA).bucketed("length", BATCH), drop_last=True, epochs=6)
    assert set(map(len, found)) == {BATCH} and set(np.concatenate(found)) == set(range(ROWS))


def test_transforms_stay_and_a_row_drawn_twice_is_another_sample() -> None:
    noisy = table({"x": [1, 2]}).map(lambda row, rng: {"x": row["x"], "noise": rng.random()}).weighted([1, 1], 50)
    read = noisy.read(noisy.index(), range(50))
    assert len(set(read["noise"].tolist())) == 50 and set(read["x"].tolist()) == {1, 2}
    assert repr(noisy) == "table(x).weighted(..., 50).map(...)"


class Augmented:
    """A data set whose rows draw random numbers themselves."""

    asked: ClassVar[list[int]] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        self.asked.append(row)
        return {"x": row, "noise": np.random.random()}


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda data: data,
        lambda data: mix({"a": data}, rows=250),
        lambda data: split(data, {"a": 0.9, "b": 0.1})["a"],
        lambda data: data.beside(table({"sample": np.arange(ROWS), "y": np.arange(ROWS)})),
    ],
)
def test_rows_that_are_random_themselves_differ_where_they_are_drawn_twice(
    monkeypatch: pytest.MonkeyPatch, wrapped: Any
) -> None:
    monkeypatch.setattr(samplers, "_GROUP_BYTES", 0)
    monkeypatch.setattr(samplers, "_GROUP_ROWS", 64)  # repeats of a row lie in several row groups
    whole = wrapped(from_torch(Augmented()))
    rows = whole.index().rows
    data = whole.weighted(np.where(np.arange(rows) < 4, 30.0, 1.0), 200)
    index = data.index()
    found = [data.read(index, range(200), seed=3, epoch=epoch) for epoch in (0, 1, 0)]
    assert np.bincount(found[0]["x"]).max() > 9
    assert len({*found[0]["noise"], *found[1]["noise"]}) == 400
    assert (found[0]["noise"] == found[2]["noise"]).all()
    assert (data.read(index, [199, 7, 7], seed=3)["noise"] == found[0]["noise"][[199, 7, 7]]).all()
    if rows < 250:
        assert (found[0].get("y", found[0]["x"]) == found[0]["x"]).all()
    Augmented.asked.clear()
    data.read(index, range(200), seed=3)
    assert len(Augmented.asked) <= 4 * ROWS + 200, "repeats are computed alone"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: table(DATA).weighted("v").index(), "no column 'v' to sample by"),
        (lambda: table(DATA).weighted([1.0, 2.0]).index(), "2 values for 230 rows"),
        (lambda: table(DATA).weighted(-WEIGHTS).index(), "negative or not finite, or only 0"),
        (
            lambda: table({"w": ["0.5", "10"]}).weighted("w").index(),
            "column 'w' holds no numbers but str, such as '0.5'",
        ),
        (lambda: table(DATA).weighted("w", 0), "samples_per_epoch=0 draws no row"),
        (lambda: table(DATA).bucketed("length", 0), "batch_size=0 holds no row"),
        (lambda: table({"x": np.ones((3, 2))}).bucketed("x", 2).index(), r"column 'x' holds float64 \[2\]"),
        (lambda: table(DATA).bucketed("length", 8).filter(bool), "filter comes after weighted or bucketed"),
        (lambda: split(table(DATA).weighted("w"), {"a": 0.5, "b": 0.5}), "split comes after weighted or bucketed"),
        (lambda: batches(table(DATA).bucketed("length", 8)), "batches of 8 rows of similar length, and batch_size=16"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        make()
