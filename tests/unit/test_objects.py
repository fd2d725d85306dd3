"""Objects as sources: map-style torch data sets, and what looks like one of Hugging Face's."""

from __future__ import annotations

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.support.streams import place
from trainwright.core import random_state
from trainwright.core.data import FeedAssignment
from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets import from_huggingface, from_torch, mix, split, table
from trainwright.datasets.data_source import Field
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.python_objects import group_rows
from trainwright.datasets.loading.batch_loader import BatchLoader


class Squares:
    """Map-style, without torch; `made` gives a sample."""

    def __init__(self, rows: int, made: Any) -> None:
        self.rows, self.made = rows, made

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        return self.made(row)


class Pair(NamedTuple):
    image: Any
    label: int


def test_tensors_become_columns() -> None:
    images = torch.arange(40.0).reshape(20, 2)
    data = from_torch(TensorDataset(images, torch.arange(20)), columns=("image", "label"))
    index = data.index()
    assert index.rows == 20
    assert index.schema == {"image": Field(np.dtype(np.float32), (2,)), "label": Field(np.dtype(np.int64), ())}
    read = data.read(index, [7, 0])
    assert read["image"].tolist() == [[14, 15], [0, 1]] and read["label"].tolist() == [7, 0]
    assert set(from_torch(TensorDataset(images)).index().schema) == {"0"}
    assert repr(data) == "from_torch(TensorDataset)"


@pytest.mark.parametrize(
    ("made", "columns", "names"),
    [
        (lambda row: {"a": row, "b": "text"}, None, ["a", "b"]),
        (lambda row: {"a": row, "b": "text"}, ["a"], ["a"]),
        (lambda row: (row, 0.5), None, ["0", "1"]),
        (lambda row: [row, 0.5], ["a", "b"], ["a", "b"]),
        (lambda row: [row, row], ["pair"], ["pair"]),
        (lambda row: Pair(torch.zeros(2, requires_grad=True), row), None, ["image", "label"]),
        (lambda row: np.float32(row), None, ["0"]),
    ],
)
def test_samples_of_all_kinds(made: Any, columns: Any, names: list[str]) -> None:
    data = from_torch(Squares(5, made), columns)
    index = data.index()
    assert list(index.schema) == names
    assert all(len(array) == 3 for array in data.read(index, [4, 0, 4]).values())


def test_text_and_arrays_of_different_lengths_become_objects() -> None:
    data = from_torch(Squares(50, lambda row: {"tokens": torch.arange(row % 7), "text": f"row {row}", "raw": b"x"}))
    index = data.index()
    assert index.schema["tokens"] == index.schema["text"] == Field(np.dtype(object), ())
    read = data.read(index, [6, 3])
    assert [tokens.tolist() for tokens in read["tokens"]] == [[0, 1, 2, 3, 4, 5], [0, 1, 2]]
    assert read["text"].tolist() == ["row 6", "row 3"] and read["raw"].tolist() == [b"x", b"x"]


class Many(Squares):
    def __init__(self, rows: int, made: Any) -> None:
        super().__init__(rows, made)
        self.asked: list[list[int]] = []

    def __getitems__(self, rows: list[int]) -> list[Any]:
        self.asked.append(rows)
        return [self.made(row) for row in rows]


def test_many_rows_are_asked_for_together_where_that_is_possible() -> None:
    many = Many(100, lambda row: {"x": row})
    data = from_torch(many)
    index = data.index()
    many.asked.clear()
    assert data.read(index, [20, 17])["x"].tolist() == [20, 17]
    group = index.groups[1]
    assert many.asked == [list(range(group.first, group.first + group.rows))]
    assert from_torch(Subset(TensorDataset(torch.arange(9)), [8, 2])).index().rows == 2


def test_the_row_groups_follow_the_size_of_a_row() -> None:
    assert group_rows(1_000_000, 8) == 4096
    assert group_rows(1_000_000, 1 << 19) == 2
    assert group_rows(1_000, 8) == 16
    assert group_rows(10_000_000, 1 << 30) == 1
    index = from_torch(Squares(1000, lambda row: {"x": np.zeros(1 << 15)})).index()
    assert index.row_bytes == 1 << 18 and {group.rows for group in index.groups} == {4}
    assert index.groups[-1].first + index.groups[-1].rows == 1000


def test_the_hash_is_of_length_type_and_sampled_content() -> None:
    def hashed(*arguments: Any) -> str:
        return from_torch(Squares(*arguments)).index().hash

    first = hashed(30, lambda row: {"x": row})
    assert first == hashed(30, lambda row: {"x": row})
    tensors = from_torch(TensorDataset(torch.arange(3)))
    assert pickle.loads(pickle.dumps(tensors)).index() == tensors.index()
    assert len({first, hashed(31, lambda row: {"x": row}), hashed(30, lambda row: {"x": row + 1})}) == 3
    assert from_torch(Many(30, lambda row: {"x": row}), replayable=False).index().hash != first


def test_values_that_change_are_refused_unless_that_is_declared() -> None:
    rng = np.random.default_rng(0)
    noisy = Squares(30, lambda row: {"x": rng.random()})
    with pytest.raises(DataError, match="other values each time") as caught:
        from_torch(noisy).index()
    assert "global generators" in caught.value.remedy
    declared = from_torch(noisy, replayable=False)
    index = declared.index()
    assert index.hash == declared.index().hash
    reader = declared.reader(index, None)
    first, second = (reader.gather(np.arange(30), epoch)["x"] for epoch in (0, 1))
    assert (first != second).all()


class Augmented(Squares):
    """Draws from all global generators, in every third row or in each."""

    def __init__(self, rows: int, every: int = 1) -> None:
        super().__init__(rows, lambda row: {"x": self.drawn() if row % every == 0 else 0.0, "row": row})
        self.asked = 0

    def drawn(self) -> float:
        self.asked += 1
        return random.random() + float(np.random.random()) + float(torch.rand(()))


class Beside(Augmented):
    def __getitem__(self, row: int) -> Any:
        return {"x": self.drawn(), "sample": row}


class AugmentedTogether(Augmented):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self.made(row) for row in rows]


def streamed(data: Dataset, epochs: int, rank: int = 0, of: int = 1, start: int = 0) -> dict[tuple[int, int], float]:
    """The value of each row in each epoch."""
    feeding = FeedAssignment(data_ranks=range(rank, rank + 1), total=of)
    stream = BatchLoader(data, batch_size=8, epochs=epochs, seed=5, feeding=feeding)
    with stream.feeds(start) as feeds:
        return {
            (place(stream.schedule, feed.step)[0], row): value
            for feed in feeds
            for batch in feed.parts[0]
            for row, value in zip(batch.columns["row"], batch.columns["x"], strict=True)
        }


@pytest.mark.parametrize("kind", [Augmented, AugmentedTogether])
@pytest.mark.parametrize("every", [1, 3])
def test_random_transforms_are_fresh_in_each_epoch_and_replayable(kind: type[Augmented], every: int) -> None:
    data = from_torch(kind(40, every))
    found = streamed(data, 3)
    drawing = [row for row in range(40) if row % every == 0]
    assert all(len({found[epoch, row] for epoch in range(3)}) == 3 for row in drawing)
    assert len({found[0, row] for row in drawing}) == len(drawing)
    assert found == streamed(data, 3)
    assert found == {key: value for rank in range(2) for key, value in streamed(data, 3, rank, 2).items()}
    later = streamed(data, 3, start=7)
    assert later == {key: found[key] for key in later}
    seeds = [float(data.read(data.index(), [0], seed=seed)["x"][0]) for seed in (5, 6)]
    assert seeds[0] == found[0, 0] != seeds[1]


def test_rows_that_draw_nothing_are_asked_for_once_and_leave_the_generators_alone() -> None:
    plain = Squares(40, lambda row: {"x": float(row), "row": row})
    asked: list[int] = []
    made, plain.made = plain.made, lambda row: asked.append(row) or made(row)
    data = from_torch(plain)
    index = data.index()
    asked.clear()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random_state.generator_states()
    reader = data.reader(index, None)
    for epoch in range(3):
        reader.gather(np.arange(40), epoch)
    assert sorted(asked) == list(range(40))
    from_torch(Augmented(40)).reader(index, None).gather(np.arange(40))
    assert random_state.generator_states() == before


@pytest.mark.parametrize("derive", ["split", "beside", "mix"])
def test_random_rows_are_fresh_in_each_epoch_through_what_is_made_of_a_data_set(derive: str) -> None:
    data = from_torch(Augmented(40))
    made = {
        "split": lambda: split(data, {"a": 0.7, "b": 0.3})["a"],
        "beside": lambda: table({"y": np.arange(40), "row": np.arange(40)}).beside(from_torch(Beside(40))),
        "mix": lambda: mix({"only": data}),
    }[derive]()
    found = streamed(made, 2)
    rows = {row for _, row in found}
    assert len(rows) > 20 and all(found[0, row] != found[1, row] for row in rows)
    assert found == streamed(made, 2)


def test_rows_are_not_drawn_while_a_step_runs() -> None:
    data = from_torch(Augmented(40))
    reader = data.reader(data.index(), None)
    with ThreadPoolExecutor(1) as pool:
        with random_state.GENERATORS_LOCK:
            reading = pool.submit(reader.gather, np.arange(4))
            torch.manual_seed(3)
            drawn = [torch.rand(()).item() for _ in range(1000)]
            assert not reading.done()
        reading.result()
    torch.manual_seed(3)
    assert drawn == [torch.rand(()).item() for _ in range(1000)]


def test_a_stream_over_an_object_delivers_each_row_once() -> None:
    data = from_torch(TensorDataset(torch.arange(300)), columns=["x"])
    ranks = []
    for rank in range(2):
        stream = BatchLoader(
            data, batch_size=32, epochs=1, seed=1, shuffle=True, drop_last=False,
            feeding=FeedAssignment(data_ranks=range(rank, rank + 1), total=2),
        )  # fmt: skip
        with stream.feeds() as feeds:
            ranks.append(
                [
                    value
                    for feed in feeds
                    for batch in feed.parts[0]
                    for value in batch.columns["x"][batch.weights > 0].tolist()
                ]
            )
    assert sorted(ranks[0] + ranks[1]) == list(range(300)) and ranks[0] and ranks[1]


def raising(row: int) -> Any:
    if row == 3:
        raise KeyError("no such image")
    return {"x": row}


@pytest.mark.parametrize(
    ("made", "kind", "message", "where"),
    [
        (raising, UserCodeError, "Squares raised KeyError", "row 3"),
        (lambda row: {"x": None}, DataError, "is None", "row 0, column 'x'"),
        (lambda row: {"x": [[1], [1, 2]]}, DataError, "cannot become an array", "row 0, column 'x'"),
        (lambda row: {"x": torch.zeros(2, dtype=torch.bfloat16)}, DataError, "cannot become an array", "row 0"),
        (lambda row: {"x": row} if row < 4 else {"y": row}, DataError, "another", "Squares"),
        (lambda row: {"x": row if row < 4 else 0.5}, DataError, "float64 .* and int64", "column 'x'"),
        (lambda row: {"x": np.zeros((row, 2)) if row < 4 else np.zeros(2)}, DataError, "in different rows", "'x'"),
    ],
)
def test_wrong_objects_are_named(made: Any, kind: type[Exception], message: str, where: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        from_torch(Squares(8, made)).index()
    assert where in caught.value.where and caught.value.remedy  # type: ignore[attr-defined]


def test_a_row_unlike_those_sampled_is_named() -> None:
    data = from_torch(Squares(200, lambda row: {"x": np.zeros(3 if row == 151 else 2)}))
    index = data.index()
    assert data.read(index, [0])["x"].shape == (1, 2)
    with pytest.raises(DataError, match=r"float64 \[3\] here and float64 \[2\]") as caught:
        data.read(index, [151])
    assert "row 151" in caught.value.where and "from_torch(..., ragged=('x',))" in caught.value.remedy


@pytest.mark.parametrize("iterated", [False, True])
def test_lengths_that_differ_only_in_other_rows_are_declared(iterated: bool) -> None:
    rows = Squares(200, lambda row: {"x": np.zeros(3 if row == 151 else 2), "y": np.float32(row)})
    given: Any = (lambda: DataLoader(rows, 10, collate_fn=list)) if iterated else rows
    data = from_torch(given, ragged=["x"])
    index = data.index()
    assert index.schema == {"x": Field(np.dtype(object), ()), "y": Field(np.dtype(np.float32), ())}
    feeding = FeedAssignment(data_ranks=range(1), total=1)
    with BatchLoader(data, batch_size=100, epochs=1, seed=0, shuffle=False, feeding=feeding).feeds() as feeds:
        columns = [feed.parts[0][0].columns["x"] for feed in feeds]
    assert [max(map(len, column)) for column in columns] == [2, 3]
    with pytest.raises(DataError, match="no column 'z'") as caught:
        from_torch(given, ragged="z").index()
    assert "ragged=" in caught.value.where


def test_an_object_that_shrank_is_named() -> None:
    squares = Squares(200, lambda row: {"x": row})
    data = from_torch(squares)
    index = data.index()
    squares.rows = 100
    with pytest.raises(DataError, match="has 100 rows and had 200"):
        data.read(index, [0])


@pytest.mark.parametrize(("columns", "message"), [(["a"], "2 values and columns= names 1"), (["y"], "names 1")])
def test_names_that_do_not_fit_are_refused(columns: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_torch(Squares(4, lambda row: (row, row)), columns).index()
    with pytest.raises(DataError, match="no column 'lable'") as caught:
        from_torch(Squares(4, lambda row: {"label": row}), ["lable"]).index()
    assert caught.value.remedy == "did you mean 'label'?"


def test_what_is_no_map_style_object_is_refused() -> None:
    with pytest.raises(DataError, match="a generator is not a map-style"):
        from_torch(row for row in range(3))
    with pytest.raises(DataError, match="no rows"):
        from_torch(Squares(0, lambda row: row)).index()


class MatrixType(pa.ExtensionType):
    """As Hugging Face's Array2D: nested lists whose array gives itself as one block."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.list_(pa.int32())), "tests.matrix")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialised: bytes) -> MatrixType:
        return cls()

    def __arrow_ext_class__(self) -> Any:
        return MatrixArray


class MatrixArray(pa.ExtensionArray):
    def to_numpy(self, zero_copy_only: bool = True) -> np.ndarray:
        return np.array(self.storage.to_pylist(), dtype=np.int32)


class HuggingFace:
    """What of `datasets.Dataset` is used: length, features, format, and slices as Arrow tables."""

    def __init__(self, table: pa.Table, kind: str | None = None) -> None:
        self.table, self.format = table, {"type": kind}
        self.features = dict.fromkeys(table.column_names)

    def with_format(self, kind: str, columns: list[str]) -> HuggingFace:
        return HuggingFace(self.table.select(columns), kind)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, key: Any) -> Any:
        assert self.format["type"] == "arrow" and isinstance(key, slice)
        return self.table.slice(key.start, key.stop - key.start)


def hugging_face(rows: int = 100) -> pa.Table:
    matrix = pa.array([[[row, 1, 2], [3, 4, 5]] for row in range(rows)], pa.list_(pa.list_(pa.int32())))
    return pa.table(
        {
            "label": np.arange(rows),
            "text": [f"text {row}" for row in range(rows)],
            "tokens": pa.array([list(range(8)) for _ in range(rows)]),
            "matrix": pa.ExtensionArray.from_storage(MatrixType(), matrix),
            "image": [{"bytes": b"png", "path": None} for _ in range(rows)],
        }
    )


def test_hugging_face_data_is_read_by_arrow_slices() -> None:
    data = from_huggingface(HuggingFace(hugging_face()))
    index = data.index()
    assert index.schema["label"] == Field(np.dtype(np.int64), ())
    assert index.schema["tokens"] == index.schema["text"] == Field(np.dtype(object), ())
    assert index.schema["matrix"] == Field(np.dtype(np.int32), (2, 3))
    read = data.read(index, [99, 3])
    assert read["label"].tolist() == [99, 3] and read["text"].tolist() == ["text 99", "text 3"]
    assert read["matrix"][0].tolist() == [[99, 1, 2], [3, 4, 5]]
    assert read["tokens"][1].tolist() == list(range(8))
    assert read["image"][0]["bytes"] == b"png"
    assert list(from_huggingface(HuggingFace(hugging_face()), ["label"]).index().schema) == ["label"]
    assert index.hash == from_huggingface(HuggingFace(hugging_face())).index().hash
    assert repr(data) == "from_huggingface(HuggingFace)"


def test_hugging_face_nulls_are_named() -> None:
    table = pa.table({"label": pa.array([1, 2, None, 4])})
    with pytest.raises(DataError, match="1 of 1 values are null") as caught:
        from_huggingface(HuggingFace(table)).index()
    assert caught.value.where == "rows 2 to 2, column 'label'"


class Streamed:
    features = "known"

    def with_format(self, kind: str) -> Streamed:
        return self


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"train": 1, "test": 2}, "train, test"),
        (Streamed(), "streaming=True"),
        ([1, 2], "from_torch"),
        (HuggingFace(hugging_face(), "custom"), r"\.map\("),
    ],
)
def test_other_hugging_face_objects_are_refused(given: Any, remedy: str) -> None:
    with pytest.raises(DataError, match="cannot be read by row number") as caught:
        from_huggingface(given)
    with pytest.raises(DataError, match=remedy):
        raise DataError(caught.value.remedy)
