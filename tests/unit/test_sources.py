"""Sources: what is read, and what is said when it cannot be."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainwright.core.data import fold_seed
from trainwright.core.errors import DataError, UserCodeError
from trainwright.datasets import Dataset, parquet, table
from trainwright.datasets.data_source import Field, Loader, joined_chunks
from trainwright.datasets.dataset import transformed_fields
from trainwright.datasets.formats.file_system import resolve_file_system
from trainwright.datasets.row_reader import RowReader


def images(rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, 4, 3), dtype=np.uint8)


def write(path: Path, rows: int = 20, group: int = 6, first: int = 0, **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images(rows)),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 2, dtype=np.float32)), 2),
        "label": np.arange(first, first + rows, dtype=np.int64),
        "text": [f"row {first + row}" for row in range(rows)],
        "flag": np.arange(rows) % 2 == 0,
        **more,
    }
    pq.write_table(pa.table(columns), path, row_group_size=group)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data" / "a.parquet", 20)
    write(tmp_path / "data" / "more" / "b.parquet", 9, first=20)
    (tmp_path / "data" / "_SUCCESS").write_text("")
    return tmp_path / "data"


def test_a_folder_of_files_is_indexed_without_reading_columns(folder: Path) -> None:
    index = parquet(folder).index()
    assert index.rows == 29
    assert [(Path(group.file).name, group.number, group.rows, group.first) for group in index.groups] == [
        ("a.parquet", 0, 6, 0),
        ("a.parquet", 1, 6, 6),
        ("a.parquet", 2, 6, 12),
        ("a.parquet", 3, 2, 18),
        ("b.parquet", 0, 6, 20),
        ("b.parquet", 1, 3, 26),
    ]
    assert index.schema == {
        "image": Field(np.dtype(np.uint8), (4, 3)),
        "vector": Field(np.dtype(np.float32), (2,)),
        "label": Field(np.dtype(np.int64), ()),
        "text": Field(np.dtype(object), ()),
        "flag": Field(np.dtype(bool), ()),
    }
    assert pickle.loads(pickle.dumps(index)) == index
    assert index.row_bytes >= 12 + 8 + 8 + 8 + 1


def test_rows_are_read_in_the_order_asked_for(folder: Path) -> None:
    data = parquet(folder)
    rows = [28, 0, 19, 20, 0]
    read = data.read(data.index(), rows)
    assert read["label"].tolist() == rows
    assert read["text"].tolist() == [f"row {row}" for row in rows]
    assert read["image"].dtype == np.uint8
    np.testing.assert_array_equal(read["image"][1], images(20)[0])
    np.testing.assert_array_equal(read["vector"][2], [38, 39])
    assert read["flag"].tolist() == [True, True, False, True, True]
    assert list(data.read(data.index(), [3], ["flag"])) == ["flag"]
    with pytest.raises(DataError, match="rows go from 0 to 28"):
        data.read(data.index(), [29])


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("a.parquet", 20), ("*.parquet", 20), ("**/*.parquet", 29), ("m*/?.p*", 9),
        ("**/[!a].parquet", 9), ("**/[^a].parquet", 9), ("**/[!b-z_]*", 20), ("[ab].parquet", 20), ("more[!x]b*", 0),
    ],
)  # fmt: skip
def test_files_and_globs(folder: Path, path: str, rows: int) -> None:
    if rows:
        assert parquet(f"{folder}/{path}").index().rows == rows
    else:
        with pytest.raises(DataError, match="no parquet file is here"):
            parquet(f"{folder}/{path}").index()


@pytest.mark.parametrize(("path", "rows"), [("", 29), ("/a.parquet", 20), ("/**/b.parquet", 9)])
def test_uris(folder: Path, path: str, rows: int) -> None:
    assert parquet(f"{folder.as_uri()}{path}").index().rows == rows


@pytest.mark.parametrize("path", ["train", "train/", "tr*", "part-?.parquet", "y=?/**/[!0]"])
def test_the_options_in_the_address_of_a_store_are_no_wildcard(path: str) -> None:
    for options in ("region=eu-west-9", "endpoint_override=http://minio:9000&scheme=http&region=eu-west-9"):
        system, found = resolve_file_system(f"s3://bucket/{path}?{options}")
        assert system.region == "eu-west-9" and found == f"bucket/{path}".rstrip("/")


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, {"account_key": "", "blob_storage_authority": ".blob.core.windows.net"}),
        ({"ACCESS_KEY": "a2V5"}, {"account_key": "a2V5"}),
        ({"ACCOUNT_KEY": "a2V5", "SAS_TOKEN": "sig=s"}, {"account_key": "a2V5", "sas_token": ""}),
        (
            {"CLIENT_ID": "i", "CLIENT_SECRET": "s", "TENANT_ID": "t"},
            {"client_id": "i", "client_secret": "s", "tenant_id": "t"},
        ),
        ({"SAS_TOKEN": "sig=s", "CLIENT_ID": "i"}, {"sas_token": "sig=s", "client_id": ""}),
        (
            {"ENDPOINT": "http://meadow:10000/me"},
            {"blob_storage_authority": "meadow:10000", "blob_storage_scheme": "http", "dfs_storage_scheme": "http"},
        ),
        (
            {"ENDPOINT": "https://me.blob.core.chinacloudapi.cn"},
            {
                "blob_storage_authority": ".blob.core.chinacloudapi.cn",
                "dfs_storage_authority": ".dfs.core.chinacloudapi.cn",
            },
        ),
    ],
)
def test_az_is_opened_with_the_account_of_the_environment(
    environment: dict[str, str], settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(DataError, match="no account is set for az://") as caught:
        parquet("az://box/train").index()
    assert caught.value.where == "az://box/train" and "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.remedy
    for name, value in {"ACCOUNT_NAME": "me", **environment}.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    for path in ("box/train", "box/train/", "box/y=?/**/[!0]", "box/*.parquet"):
        system, found = resolve_file_system(f"az://{path}")
        assert system.type_name == "abfs" and found == path.rstrip("/")
    _, (given,) = system.__reduce__()
    assert given["account_name"] == "me" and {name: given[name] for name in settings} == settings
    with pytest.raises(DataError, match="write az://CONTAINER/PATH"):
        resolve_file_system("az://box@me/train")


@pytest.mark.parametrize(
    ("kind", "wide"),
    [(pa.string(), pa.large_string()), (pa.binary(), pa.large_binary()), (pa.float32(), pa.float32())],
)
def test_chunks_of_text_and_bytes_are_joined_with_wide_offsets(kind: pa.DataType, wide: pa.DataType) -> None:
    """Those of string and binary end at 2 GiB."""
    column = pa.chunked_array([["1"], ["22"]]).cast(kind)
    assert joined_chunks(column).type == wide and joined_chunks(column).to_pylist() == column.to_pylist()
    assert joined_chunks(column.slice(1)).type == kind, "one chunk is taken as it is"


class Unhashable(pa.ExtensionType):
    """A type of a library, which defines equality alone, as Ray's tensors do."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(pa.float32(), "trainwright.tests.unhashable")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)


def test_chunks_of_a_type_that_cannot_be_hashed_are_joined() -> None:
    chunk = pa.ExtensionArray.from_storage(Unhashable(), pa.array([1.0], pa.float32()))
    assert joined_chunks(pa.chunked_array([chunk, chunk])).storage.to_pylist() == [1.0, 1.0]


def test_a_relative_path_means_the_same_in_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    data = pickle.loads(pickle.dumps(parquet("a.parquet", columns=["label"])))
    monkeypatch.chdir("/")
    assert list(data.index().schema) == ["label"]


def test_the_hash_names_the_content_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    first = parquet(folder).index().hash
    folder.rename(tmp_path / "moved")
    assert parquet(tmp_path / "moved").index().hash == first
    write(tmp_path / "moved" / "c.parquet", 1)
    assert parquet(tmp_path / "moved").index().hash != first


def test_tables_of_three_kinds_are_the_same() -> None:
    arrays = {"x": np.arange(6.0).reshape(3, 2), "y": np.array([3, 1, 2])}
    plain = table(arrays)
    arrow = table(pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6.0)), 2), "y": arrays["y"]}))
    assert plain.index() == arrow.index()
    np.testing.assert_array_equal(arrow.read(arrow.index(), [2, 0])["x"], [[4, 5], [0, 1]])
    frame = table(pd.DataFrame({"y": [3, 1, 2], "name": ["a", "b", "c"], "z": [0.5, float("nan"), 1.0]}))
    assert frame.index().schema["name"] == Field(np.dtype(object), ())
    assert frame.read(frame.index(), [1])["name"].tolist() == ["b"]
    assert np.isnan(frame.read(frame.index(), [1])["z"][0])
    assert plain.index().hash != table({**arrays, "y": np.array([3, 1, 9])}).index().hash
    assert not plain.heavy and repr(plain.map(dict)) == "table(x, y).map(...)"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no rows"),
        ({"x": np.zeros(0)}, "no rows"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, "differ in length: 'x' 2, 'y' 3"),
        ({"x": 3.0}, "single value"),
        ({"x": [[[1], [1, 2]], [[1]]]}, "make no array"),
        ({"x": np.array(["a", None], dtype=object)}, "None"),
        (pd.DataFrame({"x": ["a", None]}), "1 of 2 values are missing"),
        (pd.DataFrame({"x": pd.array([1, None], dtype="Int64")}), "missing"),
        (pa.table({"x": pa.array([1, None])}), "1 of 2 values are null"),
        (pa.table({"x": [[1, 2], [3, None], []]}), "1 of 4 values are null"),
        (pa.table({"x": [[["a"]], [[None]]]}), "1 of 2 values are null"),
        (pa.table({"x": pa.array([[1, None]], pa.list_(pa.int64(), 2))}), "1 of 2 values are null"),
        (pa.table({"x": pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))}), "1 of 2 values"),
        (pa.Table.from_arrays([pa.array([1])] * 2, names=["x", "x"]), "'x' comes twice"),
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), "'x' comes twice"),
        ({1: [1], "1": [2]}, "column '1' comes twice"),
        ({"x": np.ma.MaskedArray([1, 2], mask=[False, True])}, "masked values have no meaning"),
        (7, "a int is not a table"),
    ],
)
def test_tables_that_cannot_be_are_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        table(data)


@pytest.mark.parametrize("kind", ["gradient", "bfloat16"])
def test_tensors_that_numpy_cannot_hold_are_named(kind: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3, requires_grad=True) if kind == "gradient" else torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(DataError, match="make no array") as caught:
        table({"x": tensor})
    assert caught.value.where == "column 'x'"
    assert ".detach()" in caught.value.remedy and ".float()" in caught.value.remedy


def test_a_masked_array_without_masked_values_is_a_column() -> None:
    data = table({"x": np.ma.MaskedArray([1, 2], mask=False)})
    assert data.read(data.index(), [1])["x"].tolist() == [2]


def broken(tmp_path: Path, kind: str) -> Dataset:
    target = tmp_path / "data" / "x.parquet"
    if kind == "empty folder":
        (tmp_path / "data").mkdir()
        return parquet(tmp_path / "data")
    if kind == "other files":
        target.parent.mkdir()
        (target.parent / "notes.txt").write_text("hello")
        return parquet(tmp_path / "data")
    if kind == "missing":
        return parquet(tmp_path / "nowhere")
    write(target, 5, nulls=[1] * 5)
    if kind == "no rows":
        pq.write_table(pa.table({"x": pa.array([], pa.int64())}), target)
    if kind == "torn":
        target.write_bytes(target.read_bytes()[:-20])
    if kind == "no file of the glob":
        return parquet(f"{tmp_path}/data/*.orc")
    if kind == "drift":
        write(tmp_path / "data" / "y.parquet", 5, nulls=[0.5] * 5)
    if kind == "column gone":
        write(tmp_path / "data" / "y.parquet", 5)
    if kind == "no such column":
        return parquet(tmp_path / "data", columns=["lable"])
    if kind == "scheme":
        return parquet("ftp3://host/data")
    return parquet(tmp_path / "data")


@pytest.mark.parametrize(
    ("kind", "message", "where"),
    [
        ("empty folder", "the folder is empty", "data"),
        ("other files", "no parquet file is here, among 1 entries", "data"),
        ("missing", "nothing at this path", "nowhere"),
        ("no rows", "no rows", "data"),
        ("torn", "not a whole parquet file", "x.parquet, "),
        ("no file of the glob", "no parquet file is here", "*.orc"),
        ("drift", "'nulls' is double here and int64 in", "y.parquet, column 'nulls'"),
        ("column gone", "'nulls' is missing here and int64 in", "y.parquet, column 'nulls'"),
        ("no such column", "there is no column 'lable'", "x.parquet"),
        ("scheme", "the address is not understood", "ftp3://"),
    ],
)
def test_each_wrong_source_has_its_own_error(tmp_path: Path, kind: str, message: str, where: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        broken(tmp_path, kind).index()
    assert where in caught.value.where
    assert caught.value.remedy
    if kind == "no such column":
        assert caught.value.remedy == "did you mean 'label'?"


def test_nulls_name_file_row_group_and_column(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", 10, group=4, score=[1.0] * 7 + [None] + [2.0] * 2)
    data = parquet(tmp_path / "x.parquet")
    assert data.read(data.index(), [2, 9], ["label"])["label"].tolist() == [2, 9]
    assert data.read(data.index(), [2, 9])["score"].tolist() == [1.0, 2.0]
    with pytest.raises(DataError, match="1 of 4 values are null") as caught:
        data.read(data.index(), [5])
    assert caught.value.where.endswith("x.parquet, row group 1, row 7, column 'score'")
    assert "columns=[...]" in caught.value.remedy


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write(path, 40, group=20)
    data = parquet(path)
    index = data.index()
    chunk = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(content)
    assert data.read(index, [3])["label"].tolist() == [3]
    with pytest.raises(DataError, match="a row group cannot be read") as caught:
        data.read(index, [33])
    assert caught.value.where.endswith("x.parquet, row group 1")


def test_a_file_that_vanishes_or_changes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write(path)
    data = parquet(path)
    index = data.index()
    write(path, 12, group=3)
    with pytest.raises(DataError, match="has 3 rows and had 6"):
        data.read(index, [0])
    path.unlink()
    with pytest.raises(DataError, match="a row group cannot be read"):
        data.read(index, [0])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"x": np.arange(4)}, {"x": np.arange(4) + 0.5}, "'x' is double and was int64"),
        ({"x": np.arange(4.0)}, {"x": np.arange(4)}, "'x' is int64 and was float64"),
        ({"x": np.arange(4.0)}, {"x": pa.array([[1.0]] * 4, pa.list_(pa.float64(), 1))}, "'x' is fixed_size_list"),
        ({"x": np.arange(4)}, {"y": np.arange(4)}, "'x' is missing and was int64"),
    ],
)
def test_a_column_that_changes_under_its_index_is_named(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(before), path)
    data = parquet(path)
    index = data.index()
    pq.write_table(pa.table(after), path)
    loader = data.source.open(index)
    for _ in range(2):
        with pytest.raises(DataError, match=f"the file changed: column {message}") as caught:
            loader.load(0, ["x"])
        assert caught.value.where == f"{path}, column 'x'"


def test_a_missing_column_is_answered_with_the_nearest() -> None:
    data = table({"image": np.zeros(3), "label": np.zeros(3)})
    with pytest.raises(DataError, match="did you mean 'label'"):
        data.read(data.index(), [0], ["lable"])
    with pytest.raises(DataError, match="did you mean 'image'"):
        mapped = data.map(lambda row, rng: row)
        mapped.read(mapped.index(), [0], ["imag"])


def test_randomness_of_a_row_is_counted() -> None:
    data = table({"x": np.arange(50)}).map(lambda row, rng: {"noise": rng.random(), "x": row["x"]})
    index = data.index()
    alone = data.read(index, [7], seed=3, epoch=2)["noise"][0]
    together = data.read(index, range(50), seed=3, epoch=2)["noise"]
    assert together[7] == alone
    assert alone == np.random.Generator(np.random.Philox(key=fold_seed(3, 2, 7))).random()
    assert len(set(together.tolist())) == 50
    assert data.read(index, [7], seed=3, epoch=1)["noise"][0] != alone
    twice = data.map(lambda row, rng: {**row, "second": rng.random()}).read(index, [7], seed=3, epoch=2)
    assert twice["noise"][0] == alone != twice["second"][0]


def test_transforms_change_columns() -> None:
    data = (
        table({"x": np.arange(6)})
        .map_batches(lambda columns: {"x": columns["x"] * 2, "y": columns["x"].astype(np.float32)})
        .map(lambda row, rng: {"pair": np.array([row["x"], row["y"]]), "name": f"number {row['x']}"})
    )
    index = data.index()
    assert transformed_fields(data, index) == {
        "pair": Field(np.dtype(np.float64), (2,)),
        "name": Field(np.dtype(object), ()),
    }
    read = data.read(index, [5, 1])
    assert read["pair"].tolist() == [[10, 5], [2, 1]]
    assert read["name"].tolist() == ["number 10", "number 2"]
    assert data.map_batches(dict, cpus=1).heavy and not data.heavy


def raises(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["x"] == 3:
        raise KeyError("no such thing")
    return row


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (table({"x": np.arange(6)}).map(raises), UserCodeError, "the transform raises raised KeyError"),
        (table({"x": np.arange(6)}).map_batches(lambda columns: 1 / 0), UserCodeError, "raised ZeroDivisionError"),
        (table({"x": np.arange(6)}).map_batches(lambda columns: {"x": columns["x"][1:]}), DataError, "returned 5 rows"),
        (table({"x": np.arange(6)}).map_batches(lambda columns: {"x": 3}), DataError, "0 rows of 'x' for 6"),
        (table({"x": np.arange(6)}).map_batches(lambda columns: None), DataError, "returned a NoneType"),
        (table({"x": np.arange(6)}).map(lambda row, rng: None), DataError, "returned a NoneType"),
        (table({"x": np.arange(6)}).map(lambda row, rng: {f"{row['x'] > 2}": 1}), DataError, "returned columns"),
        (table({"x": np.arange(6)}).map(lambda row, rng: {"x": np.zeros(row["x"])}), DataError, "in one row"),
    ],
)
def test_wrong_transforms_are_named(data: Dataset, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        data.read(data.index(), range(6))
    if message.endswith("KeyError"):
        assert caught.value.where == "sample 3"
        assert 'raise KeyError("no such thing")' in caught.value.detail
        assert "transforms.py" not in caught.value.detail
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_negative_number_of_cpus_is_refused() -> None:
    with pytest.raises(DataError, match="cpus=-1"):
        table({"x": np.arange(6)}).map_batches(dict, cpus=-1)


class CountingLoader(Loader):
    def __init__(self, rows: int, group: int) -> None:
        self.rows, self.group, self.loaded = rows, group, []

    def load(self, number: int, columns: Any) -> dict[str, np.ndarray]:
        self.loaded.append(number)
        first = number * self.group
        return {"x": np.arange(first, min(first + self.group, self.rows), dtype=np.int64)}


def test_the_reader_keeps_a_bounded_part_and_reads_nothing_twice_that_it_keeps() -> None:
    index = table({"x": np.arange(100)}).index()
    groups = tuple(type(index.groups[0])(file="f", number=n, rows=10, first=n * 10) for n in range(10))
    index = type(index)(rows=100, groups=groups, schema=index.schema, row_bytes=8, hash="")
    loader = CountingLoader(100, 10)
    reader = RowReader(loader, index, ["x"], memory_bytes=3 * 80)
    rows = np.array([95, 3, 94, 4, 55])
    assert reader.gather(rows)["x"].tolist() == rows.tolist()
    assert reader.gather(rows)["x"].tolist() == rows.tolist()
    assert loader.loaded == [0, 5, 9]
    reader.gather(np.array([20, 0]))
    assert loader.loaded == [0, 5, 9, 2]
    reader.gather(np.array([55, 0]))
    assert loader.loaded == [0, 5, 9, 2, 5]
    blocks = RowReader(loader, index, ["x"], blocks=np.array([0, 4, 25, 30, 100]))
    assert blocks.gather(rows)["x"].tolist() == rows.tolist()
    assert blocks.gather(np.arange(100))["x"].tolist() == list(range(100))


def test_tables_of_long_arrays_that_differ_in_the_middle_are_told_apart() -> None:
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1.0
    hashes = set()
    for middle in (one, other):
        column = np.empty(1, dtype=object)
        column[0] = middle
        hashes.add(table({"x": column}).index().hash)
    assert len(hashes) == 2
