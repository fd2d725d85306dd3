"""Samples that cannot be read are found, told of once, and take part with weight 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.data import Feeding
from trainwright.core.errors import DataError
from trainwright.datasets import table
from trainwright.datasets.columns import Arrays
from trainwright.datasets.order import Rows
from trainwright.datasets.salvage import Salvage, Skipped
from trainwright.datasets.stream import Stream


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
    told: list[Skipped] = []
    salvage = Salvage(40, told.append)
    rows = np.array(samples, dtype=np.int64)
    if set(samples) <= bad:
        with pytest.raises(DataError, match="none of"):
            salvage.read(reading(bad, []), rows)
        return
    for _ in range(2):
        columns, good = salvage.read(reading(bad, []), rows)
        assert good.tolist() == [sample not in bad for sample in samples]
        assert (columns["id"][good] == rows[good]).all()
        assert not set(columns["id"].tolist()) & bad
    assert sorted(item.sample for item in told) == sorted(set(samples) & bad)
    assert all("is damaged" in item.error and item.where == "file 1" for item in told)


def test_known_bad_rows_cost_nothing_again() -> None:
    salvage, calls = Salvage(5, lambda item: None), []
    read, rows = reading({7}, calls), np.arange(64)
    salvage.read(read, rows)
    assert len(calls) <= 2 * 7
    del calls[:]
    salvage.read(read, rows)
    assert calls == [63]


def test_the_limit_ends_it_with_the_last_error() -> None:
    with pytest.raises(DataError, match=r"more than 2 samples cannot be read.*row 9 is damaged"):
        Salvage(2, lambda item: None).read(reading({3, 6, 9}, []), np.arange(12))


def test_the_stream_gives_bad_samples_weight_0_and_keeps_the_order() -> None:
    def fragile(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"id": row["id"], "inverse": 1.0 / (float(row["id"]) - 13.0) if row["id"] != 13 else 1 // 0}

    told: list[Skipped] = []
    data = table({"id": np.arange(100)})
    feeding = Feeding(data_ranks=range(1), total=1)
    plain = Stream(data, batch_size=8, feeding=feeding)
    stream = Stream(data.map(fragile), batch_size=8, feeding=feeding, salvage=Salvage(1, told.append))
    used: list[int] = []
    for expected, feed in zip(plain.feeds(), stream.feeds(), strict=True):
        batch, whole = feed.parts[0][0], expected.parts[0][0]
        assert (batch.samples == whole.samples).all(), "no sample moves to another batch"
        assert (batch.weights == (batch.samples != 13)).all()
        assert np.isfinite(batch.columns["inverse"]).all()
        used += batch.columns["id"][batch.weights > 0].tolist()
    assert sorted(used) == [row for row in range(100) if row != 13]
    assert [item.sample for item in told] == [13] and "ZeroDivisionError" in told[0].error
