"""CSV, JSON lines and Arrow as sources: one schema over all files, rows by number in any order."""

from __future__ import annotations

import bz2
import gzip
import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.support.file_formats import FORMATS, ROWS, frame, write_csv
from trainwright.core.errors import DataError
from trainwright.datasets import arrow, csv, json_lines
from trainwright.datasets.data_source import Field
from trainwright.datasets.formats import file_system
from trainwright.datasets.formats.scanned_files import FileLoader


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_pandas_writes_is_read_back_in_any_order(tmp_path: Path, suffix: str) -> None:
    source, write = FORMATS[suffix]
    write(frame(), tmp_path / f"a.{suffix}")
    write(frame(500, first=ROWS), tmp_path / f"b.{suffix}")
    expected = pd.concat([frame(), frame(500, first=ROWS)])
    data = source(tmp_path)
    index = data.index()
    assert index.rows == len(expected) == ROWS + 500
    assert index.schema == {
        "id": Field(np.dtype(np.int64), ()),
        "x": Field(np.dtype(np.float64), ()),
        "text": Field(np.dtype(object), ()),
        "flag": Field(np.dtype(bool), ()),
    }
    assert pickle.loads(pickle.dumps((data, index))) == (data, index)
    assert index.row_bytes >= 8 + 8 + 8 + 1
    in_order = data.read(index, range(index.rows))
    rows = np.random.default_rng(1).permutation(index.rows)[:2000]
    for name in index.schema:
        np.testing.assert_array_equal(in_order[name], expected[name].to_numpy())
        np.testing.assert_array_equal(data.read(index, rows, [name])[name], in_order[name][rows])


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_group_is_read_from_its_own_bytes(tmp_path: Path, suffix: str) -> None:
    source, write = FORMATS[suffix]
    path = tmp_path / f"a.{suffix}"
    write(frame(), path)
    data = source(path)
    index = data.index()
    groups = index.groups
    assert [group.rows for group in groups][:2] == ([3000, 3000] if source is arrow else [4096, 4096])
    assert all(one.stop == two.start and one.first + one.rows == two.first for one, two in pairwise(groups))
    content = bytearray(path.read_bytes())
    for group in (groups[0], groups[-1]):
        content[group.start : group.stop] = bytes(group.stop - group.start)
    path.write_bytes(content)
    middle = range(groups[1].first, groups[2].first)
    assert data.read(index, middle, ["id"])["id"].tolist() == list(middle)
    with pytest.raises(DataError) as caught:
        data.read(index, [0])
    assert caught.value.where.startswith(f"{path}, row group 0")


@pytest.mark.parametrize(
    ("path", "rows"), [("", 12), ("/a.csv", 5), ("/*.csv", 5), ("/**/*.csv", 12), ("/m*/?.csv", 7)]
)
@pytest.mark.parametrize("uri", [False, True])
def test_files_folders_globs_and_uris(tmp_path: Path, path: str, rows: int, uri: bool) -> None:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    write_csv(frame(5), folder / "a.csv")
    write_csv(frame(7, first=5), folder / "more" / "b.csv")
    (folder / "_notes.csv").write_text("no,table\n")
    assert csv(f"{folder.as_uri() if uri else folder}{path}").index().rows == rows


def test_links_in_a_folder_repeat_no_row(tmp_path: Path) -> None:
    """Of the paths of a file, one without a link in the folder counts, wherever the folder itself lies."""
    folder = tmp_path / "data"
    (folder / "v2").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    write_csv(frame(5), folder / "v2" / "b.csv")
    write_csv(frame(4, first=5), tmp_path / "other" / "c.csv")
    before = csv(folder).index()
    (folder / "a.csv").symlink_to(folder / "v2" / "b.csv")
    for name, target in (("current", "v2"), ("all", "."), ("more", tmp_path / "other")):
        (folder / name).symlink_to(target)
    (tmp_path / "linked").symlink_to(folder)
    assert before.rows == 5
    for path in (folder, tmp_path / "linked"):
        for shown in (str(path), f"{path}/**/*.csv", path.as_uri()):
            groups = csv(shown).index().groups
            assert [(group.file, group.rows) for group in groups] == [
                (f"{path}/more/c.csv", 4), (f"{path}/v2/b.csv", 5)
            ]  # fmt: skip


def test_a_relative_path_means_the_same_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_csv(frame(3), tmp_path / "a.csv")
    monkeypatch.chdir(tmp_path)
    data = pickle.loads(pickle.dumps(csv("a.csv", columns=["x"])))
    monkeypatch.chdir("/")
    assert list(data.index().schema) == ["x"] and repr(data) == f"csv({str(tmp_path / 'a.csv')!r})"


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_hash_names_the_content_and_not_the_place(tmp_path: Path, suffix: str) -> None:
    source, write = FORMATS[suffix]
    (tmp_path / "data").mkdir()
    write(frame(20), tmp_path / "data" / f"a.{suffix}")
    first = source(tmp_path / "data").index().hash
    assert source(tmp_path / "data", columns=["id"]).index().hash != first
    (tmp_path / "data").rename(tmp_path / "moved")
    assert source(tmp_path / "moved").index().hash == first
    write(frame(21), tmp_path / "moved" / f"a.{suffix}")
    assert source(tmp_path / "moved").index().hash != first


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_loader_has_twins_for_other_threads(tmp_path: Path, suffix: str) -> None:
    source, write = FORMATS[suffix]
    write(frame(20), tmp_path / f"a.{suffix}")
    data = source(tmp_path)
    loader = data.source.open(data.index())
    assert isinstance(loader, FileLoader) and loader.twin() is not loader
    assert loader.twin().load(0, ["id"])["id"].tolist() == loader.load(0, ["id"])["id"].tolist()


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", None)])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_compressed_file_is_one_group(tmp_path: Path, kind: str, suffix: str, pack: Any) -> None:
    source, write = FORMATS[kind]
    write(frame(), tmp_path / f"a.{kind}")
    plain = (tmp_path / f"a.{kind}").read_bytes()
    packed = pack(plain) if pack else pa.Codec("zstd").compress(plain, asbytes=True)
    (tmp_path / "packed").mkdir()
    path = tmp_path / "packed" / f"a.{kind}{suffix}"
    path.write_bytes(packed)
    data, other = source(tmp_path / "packed"), source(tmp_path / f"a.{kind}")
    index = data.index()
    assert [(group.rows, group.first) for group in index.groups] == [(ROWS, 0)]
    assert index.schema == other.index().schema
    for name, array in other.read(other.index(), [0, 9_999, 4_096]).items():
        np.testing.assert_array_equal(data.read(index, [0, 9_999, 4_096])[name], array)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match="the compressed file is damaged") as caught:
        data.index()
    assert caught.value.where == str(path)


def test_a_compressed_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "UNPACKED_BYTES", 1 << 20)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x\n" + b"1\n" * (1 << 20)))
    with pytest.raises(DataError, match="larger than 1 MiB") as caught:
        csv(tmp_path).index()
    assert "trainwright data convert" in caught.value.remedy


def test_arrow_keeps_tensors_dictionaries_and_nested_values(tmp_path: Path) -> None:
    tensors = np.arange(60, dtype=np.uint8).reshape(5, 4, 3)
    table = pa.table(
        {
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors),
            "word": pa.array(["a", "b", "a", "c", "b"]).dictionary_encode(),
            "list": [[1], [1, 2], [], [3], [4]],
        }
    )
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    data = arrow(path)
    index = data.index()
    assert [group.rows for group in index.groups] == [2, 2, 1]
    read = data.read(index, [4, 1])
    np.testing.assert_array_equal(read["image"], tensors[[4, 1]])
    assert read["word"].tolist() == ["b", "b"] and read["list"][1].tolist() == [1, 2]
    other = tmp_path / "b.arrow"
    with pa.ipc.new_file(other, table.select(["image"]).schema) as writer:
        writer.write_table(table.select(["image"]))
    with pytest.raises(DataError, match="'list' is missing here and list<"):
        arrow(tmp_path).index()


MIXED: list[tuple[list[Any], str, list[Any]]] = [
    ([1, 2, 3], "i8", [1, 2, 3]),
    ([1, 2.5, 3], "f8", [1.0, 2.5, 3.0]),
    ([1, 2, 1 << 70], "f8", [1.0, 2.0, float(1 << 70)]),
    ([1, 2.5, "three"], "O", ["1", "2.5", "three"]),
    ([True, False, True], "?", [True, False, True]),
    ([True, 2, 3], "O", ["true", "2", "3"]),
    (["2024-01-01", "12:30:00", "2024-01-01T10:00:00"], "O", ["2024-01-01", "12:30:00", "2024-01-01T10:00:00"]),
    ([1, 2, "2024-01-01"], "O", ["1", "2", "2024-01-01"]),
]


@pytest.mark.parametrize(("values", "dtype", "expected"), MIXED)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("layout", ["one group", "groups", "files"])
def test_one_type_holds_the_values_of_all_groups_and_files(
    tmp_path: Path, kind: str, values: list[Any], dtype: str, expected: list[Any], layout: str
) -> None:
    repeats = 1 if layout == "one group" else 4096
    words = [json.dumps(value) if kind == "jsonl" or value is True or value is False else value for value in values]
    lines = [f'{{"x": {word}}}\n' if kind == "jsonl" else f"{word}\n" for word in words]
    head = "" if kind == "jsonl" else "x\n"
    parts = [line * repeats for line in lines] if layout == "files" else ["".join(line * repeats for line in lines)]
    for number, part in enumerate(parts):
        (tmp_path / f"{number}.{kind}").write_text(head + part)
    data = FORMATS[kind][0](tmp_path)
    index = data.index()
    assert len(index.groups) == (1 if layout == "one group" else 3)
    assert index.schema == {"x": Field(np.dtype(dtype), ())}
    read = [data.source.open(index).load(number, ["x"])["x"] for number in range(len(index.groups))]
    assert all(array.dtype == np.dtype(dtype) for array in read)
    assert np.concatenate(read)[::repeats].tolist() == expected


def test_a_float_may_be_nan_and_a_text_empty_or_na(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("x\ttext\n1\tNA\nnan\t\n-inf\ta,b\n")
    (tmp_path / "b.csv").write_text("x;text\n1;NA\nnan;\n-inf;a,b\n")
    for data in (csv(tmp_path / "a.tsv"), csv(tmp_path / "b.csv", delimiter=";")):
        read = data.read(data.index(), [0, 1, 2])
        np.testing.assert_array_equal(read["x"], [1.0, np.nan, -np.inf])
        assert read["text"].tolist() == ["NA", "", "a,b"]


def test_json_objects_of_a_line_stay_objects(tmp_path: Path) -> None:
    rows = [{"x": [1, 2], "y": {"a": None}}, {"x": [3, 4], "y": {"b": [1.5]}}]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, rows)))
    data = json_lines(tmp_path)
    read = data.read(data.index(), [1, 0])
    assert read["x"].tolist() == [[3, 4], [1, 2]] and read["y"].tolist() == [rows[1]["y"], rows[0]["y"]]


@pytest.mark.parametrize(
    ("text", "rows"), [('a,b\n1,"x"', [(1, "x")]), ('a,b\n1,5" x\n2,"z"', [(1, '5" x'), (2, "z")])]
)
def test_a_last_value_may_be_quoted_without_a_line_end(tmp_path: Path, text: str, rows: list[Any]) -> None:
    (tmp_path / "a.csv").write_text(text)
    data = csv(tmp_path)
    read = data.read(data.index(), range(len(rows)))
    assert list(zip(read["a"].tolist(), read["b"].tolist(), strict=True)) == rows
