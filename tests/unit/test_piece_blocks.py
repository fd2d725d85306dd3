"""Pieces as blocks of Ray Data: the same arrays again, from the block's own memory."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import object_array
from trainwright.datasets.ray_data.piece_blocks import Piece, SharePart, piece_summary

LABEL = SharePart(8, 1, 2, 0, 3)
RAGGED = [np.arange(count, dtype=np.int32).reshape(count, 1) for count in (2, 0, 3)]
COLUMNS: dict[str, npt.NDArray[Any]] = {
    "image": np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5),
    "half": np.array([1.5, -0.0, np.nan], np.float16),
    "flag": np.array([[True, False], [False, True], [True, True]]),
    "when": np.array(["2026-01-01", "NaT", "1969-12-31"], "datetime64[us]"),
    "big endian": np.array([1, 2, 3], ">i4"),
    "complex": np.array([1j, 2, 3 + 1j]),
    "words": np.array(["a", "bc", ""]),
    "record": np.array([(1, 2.0)] * 3, [("a", "i4"), ("b", "f8")]),
    "no values": np.zeros((3, 0, 2), np.float32),
    "turned": np.arange(12.0).reshape(4, 3).T,
    "text": object_array(["a", "\ud800", ""]),
    "bytes": object_array([b"", b"\x00\xff", b"x"]),
    "ragged": object_array(RAGGED),
    "ragged, big endian": object_array([np.arange(count, dtype=">i4") for count in (3, 1, 2)]),
    "one ragged of big endian": object_array([np.arange(3, dtype=">f4")] * 3),
    "tags": np.array([["a", "b"], ["c", ""], ["d", "e"]], dtype=object),
    "strings": np.array(["a", "bc", ""], np.dtypes.StringDType()),
    "record with objects": np.array([(1, "x")] * 3, [("a", "i4"), ("b", object)]),
    "mixed": object_array([np.zeros(2), np.zeros(2, np.int8), {"a": 1}]),
    "step": np.arange(3),
    "piece": np.arange(3),
}


def piece(**columns: npt.NDArray[Any]) -> Piece:
    rows = np.arange(3, dtype=np.int64)
    return Piece(label=LABEL, samples=rows + 5, passes=rows * 0, columns=columns, spent=(("reading", 0.5),))


def check(found: dict[str, npt.NDArray[Any]]) -> None:
    assert list(found) == list(COLUMNS)
    for name, array in COLUMNS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        for one, other in zip(found[name], array, strict=True):
            np.testing.assert_array_equal(one, other)
            assert type(one) is type(other) and getattr(one, "dtype", None) == getattr(other, "dtype", None), name


def test_every_type_comes_back_as_it_was() -> None:
    found = Piece.of(pickle.loads(pickle.dumps(piece(**COLUMNS).to_block())))
    assert (found.label, found.spent, found.error) == (LABEL, (("reading", 0.5),), None)
    assert found.samples.tolist() == [5, 6, 7] and found.passes.tolist() == [0, 0, 0]
    check(dict(found.columns))
    assert all(value.flags.writeable for value in found.columns["ragged"]), "a function may change them in place"


@pytest.mark.parametrize("row", [0, 2])
def test_a_row_of_several_is_read(row: int) -> None:
    """Ray may lay blocks together, and slice them."""
    block = piece(**COLUMNS).to_block()
    check(dict(Piece.of(pa.concat_tables([block, block, block]).slice(row, 1)).columns))
    with pytest.raises(ValueError, match="too many values"):
        Piece.of(pa.concat_tables([block, block]))
    check(dict(Piece.of(pa.concat_tables([block, block]).combine_chunks().slice(min(row, 1), 1)).columns))


def test_arrays_enter_and_leave_a_block_without_a_copy() -> None:
    images = np.arange(3 * 1000, dtype=np.float32).reshape(3, 1000)
    block = piece(image=images).to_block()
    assert np.shares_memory(Piece.of(block).columns["image"], images)


def test_an_error_travels_without_rows() -> None:
    error = DataError("torn", where="a.parquet", remedy="write it again")
    found = Piece.of(Piece(label=LABEL, samples=np.arange(2), passes=np.zeros(2, int), error=error).to_block())
    assert str(found.error) == str(error) and not found.columns
    summary = piece_summary(piece(**COLUMNS).to_block())
    assert summary.label == LABEL and not summary.columns and not len(summary.samples)
