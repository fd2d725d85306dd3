"""Collation: what is padded can be taken apart again, and what cannot be collated says why."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from trainwright.core.data import Batch, FeedAssignment
from trainwright.core.engine import Collation, Pad, pad_column, stack_column
from trainwright.core.errors import DataError, JobError, UserCodeError
from trainwright.core.topology import Capabilities
from trainwright.datasets import parquet
from trainwright.datasets.data_source import object_array
from trainwright.datasets.loading.batch_loader import BatchLoader

DATA = tw.datasets.table({"x": [[1.0]], "y": [0], "tokens": [[1, 2]]})


def ragged(rows: list[Any]) -> np.ndarray:
    column = np.empty(len(rows), dtype=object)
    column[:] = [*rows]
    return column


def batch(**columns: Any) -> Batch:
    rows = len(next(iter(columns.values())))
    return Batch(columns=columns, weights=np.ones(rows), samples=np.arange(rows) + 70)


def job(**fields: Any) -> tw.Job:
    given = {"name": "n", "model": dict, "optimizer": list, "train": DATA, "loss": max, "inputs": "x", "batch_size": 1}
    return tw.Job(**{**given, **fields})


@given(
    rows=st.lists(st.lists(st.integers(-9, 9), max_size=12), min_size=1, max_size=8),
    multiple=st.integers(1, 9),
    inner=st.sampled_from([(), (2,), (3, 1)]),
    dtype=st.sampled_from(["int8", "int64", "float32"]),
)
def test_the_mask_gives_back_every_row(
    rows: list[list[int]], multiple: int, inner: tuple[int, ...], dtype: str
) -> None:
    arrays = [np.multiply.outer(row, np.ones(inner)).astype(dtype) for row in rows]
    result, mask = pad_column("x", ragged(arrays), Pad(value=99, multiple=multiple), np.arange(len(rows)))
    longest = max(map(len, rows))
    assert result.dtype == dtype and result.shape == (len(rows), mask.shape[1], *inner)
    assert mask.shape[1] % multiple == 0 and 0 <= mask.shape[1] - max(longest, 1) < multiple
    assert mask.dtype == np.bool_ and (result[~mask] == 99).all()
    for row, one, real in zip(arrays, result, mask, strict=True):
        assert np.array_equal(one[: len(row)], row)
        assert real[: len(row)].all() and not real[len(row) :].any()


def test_a_fixed_length_is_the_width_of_every_batch() -> None:
    result, mask = pad_column("x", ragged([np.arange(3), np.arange(1)]), Pad(value=-1, length=5), [0, 1])
    assert result.tolist() == [[0, 1, 2, -1, -1], [0, -1, -1, -1, -1]]
    assert mask.sum(1).tolist() == [3, 1]
    with pytest.raises(DataError, match=r"has 6 elements, more than Pad\(length=5\) \(sample 41\)"):
        pad_column("x", ragged([np.arange(3), np.arange(6)]), Pad(length=5), [40, 41])


def test_what_has_the_width_already_is_not_copied() -> None:
    column = np.arange(12).reshape(3, 4)
    same, mask = pad_column("x", column, Pad(multiple=2), range(3))
    assert same is column and mask.all() and mask.shape == (3, 4)
    wider, mask = pad_column("x", column, Pad(multiple=8, value=-1), range(3))
    assert wider.shape == (3, 8) and (wider[:, 4:] == -1).all() and mask.sum() == 12


def test_empty_rows_do_not_set_the_type() -> None:
    result, mask = pad_column("x", ragged([[], [3, 4]]), Pad(), [0, 1])
    assert (
        result.dtype == np.int64 and result.tolist() == [[0, 0], [3, 4]] and mask.tolist() == [[False] * 2, [True] * 2]
    )
    nothing, mask = pad_column("x", ragged([[], []]), Pad(), [0, 1])
    assert nothing.shape == mask.shape == (2, 1) and not mask.any()


@pytest.mark.parametrize(
    ("rows", "pad", "message"),
    [
        ([np.arange(2), "text"], Pad(), "a row is <U4 values"),
        ([np.arange(2), 7], Pad(), "a row is a single value"),
        ([np.arange(2), None], Pad(), "a row is object values"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], Pad(), "differ in more than length"),
        ([np.zeros(2, np.uint8), np.zeros(3, np.uint8)], Pad(value=-100), "uint8, which cannot hold Pad"),
        ([np.zeros(2, np.int32), np.zeros(3, np.int32)], Pad(value=math.nan), "int32, which cannot hold Pad"),
    ],
)
def test_rows_that_cannot_be_padded_are_named(rows: list[Any], pad: Pad, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pad_column("x", ragged(rows), pad, range(len(rows)))


def test_objects_of_one_shape_need_no_padding() -> None:
    assert np.array_equal(stack_column("x", ragged([np.arange(3), np.arange(3) + 1])), [[0, 1, 2], [1, 2, 3]])
    with pytest.raises(DataError, match=r"ragged: shape \(2,\) in one row and \(3,\)") as caught:
        stack_column("x", ragged([np.arange(3), np.arange(2)]))
    assert "pad={'x': tw.Pad()}" in caught.value.remedy
    with pytest.raises(DataError, match="holds int, str"):
        stack_column("x", ragged(["text", 3]))


def test_lists_of_lists_of_a_file_are_stacked_and_padded(tmp_path: Path) -> None:
    matrix, cube = [[1.0, 2.0], [3.0, 4.0]], [[[1], [2]], [[3], [4]]]
    columns = {"x": [matrix, matrix], "cube": [cube, cube], "long": [matrix, matrix[:1]], "odd": [[[1], [2, 3]]] * 2}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    data = parquet(tmp_path)
    read = data.read(data.index(), [0, 1])
    assert stack_column("x", read["x"]).tolist() == [matrix] * 2
    assert stack_column("cube", read["cube"]).tolist() == [cube] * 2
    assert pad_column("long", read["long"], Pad(), [0, 1])[0].tolist() == [matrix, [*matrix[:1], [0, 0]]]
    for column in (read["odd"], object_array([[[1], [2, 3]]] * 2)):
        with pytest.raises(DataError, match="of which there are no tensors") as caught:
            stack_column("odd", column)
        assert "lists of one length" in caught.value.remedy


def test_masks_stand_beside_their_columns() -> None:
    given = batch(tokens=ragged([np.arange(2), np.arange(3)]), y=np.arange(2))
    made = Collation(pad={"tokens": Pad()})(given)
    assert list(made) == ["tokens", "y", "tokens_mask"] and made["y"] is given.columns["y"]
    assert given.columns["tokens"].dtype == object
    assert Collation()(given) is given.columns


def test_a_column_that_is_not_there_or_in_the_way_is_named() -> None:
    with pytest.raises(DataError, match="names the column 'token'") as caught:
        Collation(pad={"token": Pad()})(batch(tokens=np.zeros((2, 2))))
    assert "'tokens'" in caught.value.remedy
    with pytest.raises(DataError, match="also the name of the mask of 'x'"):
        Collation(pad={"x": Pad()})(batch(x=np.zeros((2, 2)), x_mask=np.zeros(2)))


def fails(columns: dict[str, Any]) -> dict[str, Any]:
    raise LookupError("no such word")


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (fails, UserCodeError, "collate= raised LookupError: no such word"),
        (lambda columns: [1, 2, 3], DataError, "returned a list"),
        (lambda columns: {"x": columns["x"][:2]}, DataError, "returned 2 rows of 'x' for 3 rows"),
        (lambda columns: {"x": np.float32(1)}, DataError, "returned 0 rows of 'x' for 3 rows"),
        (lambda columns: {"x": [[1], [2, 3], [4]]}, DataError, "makes no array"),
    ],
)
def test_a_collate_function_that_fails_is_told_with_its_samples(
    function: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        Collation(function=function)(batch(x=np.arange(3)))
    error: Any = pickle.loads(pickle.dumps(caught.value))
    assert error.where == "samples 70, 71, 72" and error.remedy
    if kind is UserCodeError:
        assert "in fails" in error.detail and "core/collation.py" not in error.detail


def test_a_collate_function_takes_the_place_of_padding() -> None:
    made = Collation(function=lambda columns: {"sum": [int(row.sum()) for row in columns["x"]]})(
        batch(x=ragged([np.arange(4), np.arange(2)]))
    )
    assert list(made) == ["sum"] and made["sum"].tolist() == [6, 1]


def test_rows_that_a_collate_function_changes_in_place_are_whole_again_in_the_next_epoch() -> None:
    """Masking of spectrograms, for instance: the reader keeps the rows over the epochs."""
    rows = [np.ones(4), np.ones(2)]

    def mask(columns: dict[str, Any]) -> dict[str, Any]:
        for row in columns["x"]:
            row[0] -= 1
        return {"sum": np.array([row.sum() for row in columns["x"]])}

    loader = BatchLoader(
        tw.datasets.table({"x": ragged(rows)}), batch_size=2, epochs=3, shuffle=False,
        feeding=FeedAssignment(data_ranks=range(1), total=1),
    )  # fmt: skip
    with loader.feeds() as feeds:
        made = [Collation(function=mask)(feed.parts[0][0])["sum"].tolist() for feed in feeds]
    assert made == [[3.0, 1.0]] * 3
    assert [row.tolist() for row in rows] == [[1.0] * 4, [1.0] * 2]


def test_an_object_that_cannot_be_copied_is_told_with_its_column() -> None:
    with pytest.raises(DataError, match="column 'x' holds generator, which cannot be copied: TypeError"):
        Collation(function=dict)(batch(x=ragged([(each for each in ())])))


@pytest.mark.parametrize("fields", [{"multiple": 0}, {"length": 0}, {"length": 9, "multiple": 8}])
def test_a_wrong_pad_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(JobError, match="Pad"):
        Pad(**fields)


# --- the job ----------------------------------------------------------------------------------------------------------


def test_keyword_arguments_and_masks_name_the_columns_that_are_read() -> None:
    given = job(
        inputs={"input_ids": "tokens", "attention_mask": "tokens_mask"},
        targets=("y", "tokens_mask"),
        pad={"tokens": tw.Pad(multiple=8)},
    )
    assert given.input_columns == ("tokens",) and given.target_columns == ("y", "tokens")
    assert given.columns == ("tokens", "y")
    spec = given.model_spec(7)
    assert spec.inputs == ("tokens", "tokens_mask") and spec.keywords == ("input_ids", "attention_mask")
    assert spec.targets == ("y", "tokens_mask") and spec.collation.pad["tokens"].multiple == 8
    assert job().model_spec(7).keywords == ()


def test_a_collate_function_is_given_all_columns() -> None:
    given = job(inputs={"a": "made"}, targets="y", collate=fails)
    assert given.columns is None and given.input_columns == given.target_columns == ()
    assert given.model_spec(1).inputs == ("made",) and given.model_spec(1).targets == ("y",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pad": {"tokens": Pad()}}, "pad='tokens' is neither an input nor a target: valid names: x"),
        ({"inputs": "tokens", "pad": {"token": Pad()}}, "did you mean 'tokens'"),
        ({"pad": {"x": Pad()}, "collate": fails}, "collate= replaces pad="),
        ({"inputs": {"input-ids": "x"}}, "not a valid argument name"),
        ({"inputs": {"a": 3}}, "inputs"),
        ({"inputs": {}}, "inputs= is missing"),
    ],
)
def test_a_wrong_job_is_told(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job(**fields)


def test_static_shapes_ask_for_a_length() -> None:
    given = job(inputs=("tokens", "x"), pad={"tokens": Pad(multiple=8), "x": Pad(length=4)}).model_spec(1)
    given.check(Capabilities())
    with pytest.raises(JobError, match="pad='tokens'") as caught:
        given.check(Capabilities(static_shapes=True))
    assert len(caught.value.problems) == 1
