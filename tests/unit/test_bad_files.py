"""Bad input in files: what is said of damage, of change, of slow stores and of wrong arguments, and where."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainwright.datasets as datasets
from tests.support.file_formats import FORMATS, frame, write_csv, write_stream
from trainwright.core.errors import DataError
from trainwright.datasets import arrow, csv, parquet
from trainwright.datasets.formats.file_system import retry_transient
from trainwright.datasets.formats.parquet import ParquetLoader
from trainwright.datasets.formats.scanned_files import FileLoader

BROKEN: list[tuple[str, dict[str, str], str, str]] = [
    ("csv", {}, "the folder is empty", ""),
    ("csv", {"a.txt": "x"}, "no CSV file is here, among 1 entries", ""),
    ("csv", {"a.csv": ""}, "no rows", ""),
    ("csv", {"a.csv": "x,y\n"}, "no rows", ""),
    ("csv", {"a.csv": "\n\n"}, "no rows", ""),
    (
        "csv",
        {"a.csv": "x,y\n1,2\n", "b.csv": "x,z\n1,2\n"},
        "'y' is missing here and int in .*a.csv",
        "b.csv, column 'y'",
    ),
    ("csv", {"a.csv": "x\n1\n", "b.csv": "x,y\n1,2\n"}, "'y' is int here and missing in", "b.csv, column 'y'"),
    ("csv", {"a.csv": "x,x\n1,2\n"}, "column 'x' comes twice", "a.csv, header"),
    ("csv", {"a.csv": "x,y\n1,2\n3\n"}, "a line has 1 values for 2 columns: '3'", "a.csv, row group 0, row 1"),
    ("csv", {"a.csv": "x,y\n" + "1,2\n" * 5000 + "1,2,3\n"}, "3 values for 2 columns", "a.csv, row group 1, row 5000"),
    ("csv", {"a.csv": "x,y\n1,caf\udce9\n"}, "a value is not UTF-8", "a.csv, row group 0, row 0, column 'y'"),
    ("csv", {"a.csv": "x\udce9,y\n1,2\n"}, "the header is not UTF-8", "a.csv, header"),
    ("csv", {"a.csv": 'x,y\n1,2\n3,"4\n5,6\n'}, "does not end before the file does", "a.csv, row 1"),
    ("csv", {"a.csv": 'x,"y\n1,2\n'}, "the header has no end", "a.csv"),
    ("json_lines", {"a.jsonl": ""}, "no rows", ""),
    ("json_lines", {"a.jsonl": '{"x": 1}\n{"x": 2\n'}, "a line is no JSON: .* column", "a.jsonl, row group 0, row 1"),
    ("json_lines", {"a.jsonl": '{"x": 1}\n\n[1]\n'}, "a line is a list and no object", "a.jsonl, row group 0, row 1"),
    ("json_lines", {"a.jsonl": '{"x": 1}\n{"x": "\udce9"}\n'}, "not UTF-8", "a.jsonl, row group 0, row 1"),
    ("json_lines", {"a.json": '[\n{"x": 1}\n]\n'}, "a line is no JSON", "a.json, row group 0, row 0"),
    ("json_lines", {"a.jsonl": '{"x": 1}\n', "b.jsonl": '{"y": 1}\n'}, "'x' is missing here", "b.jsonl, column 'x'"),
    ("arrow", {"a.arrow": ""}, "damaged: it is empty", "a.arrow"),
    ("arrow", {"a.arrow": "FEA1...."}, "Feather version 1", "a.arrow"),
    ("arrow", {"a.arrow": "what is this"}, "the Arrow data is damaged", "a.arrow"),
    ("arrow", {"a.arrow": "ARROW1\0\0"}, "the file has no end", "a.arrow"),
]


@pytest.mark.parametrize(("kind", "files", "message", "where"), BROKEN)
def test_each_wrong_source_has_its_own_error(
    tmp_path: Path, kind: str, files: dict[str, str], message: str, where: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=message) as caught:
        getattr(datasets, kind)(tmp_path).index()
    assert caught.value.where == (f"{tmp_path}/{where}" if where else str(tmp_path))
    assert caught.value.remedy


@pytest.mark.parametrize("kind", ["csv", "json_lines", "text", "tfrecord", "webdataset"])
def test_gzip_without_its_suffix_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.data"
    path.write_bytes(gzip.compress(b"x,y\n1,2\n" * 90))
    with pytest.raises(DataError, match="compressed with gzip") as caught:
        getattr(datasets, kind)(path).index()
    assert caught.value.where == str(path) and caught.value.remedy == "name it a.data.gz"


@pytest.mark.parametrize("suffix", FORMATS)
def test_missing_columns_and_files_are_named(tmp_path: Path, suffix: str) -> None:
    source, write = FORMATS[suffix]
    with pytest.raises(DataError, match="nothing at this path"):
        source(tmp_path / "nowhere").index()
    path = tmp_path / f"a.{suffix}"
    write(frame(5), path)
    with pytest.raises(DataError, match="there is no column 'flagg'") as caught:
        source(path, columns=["id", "flagg"]).index()
    assert caught.value.where == str(path) and caught.value.remedy == "did you mean 'flag'?"


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("how", ["vanishes", "grows", "shrinks"])
def test_a_file_that_changes_in_the_middle_is_named(tmp_path: Path, suffix: str, how: str) -> None:
    source, write = FORMATS[suffix]
    path = tmp_path / f"a.{suffix}"
    write(frame(100), path)
    data = source(path)
    index = data.index()
    loader = data.source.open(index)
    assert loader.load(0, ["id"])["id"].tolist() == list(range(100))
    content = path.read_bytes()
    if how == "vanishes":
        path.unlink()
    else:
        path.write_bytes(content + b"\n" if how == "grows" else content[:-9])
    with pytest.raises(DataError, match=r"the file changed: it (is gone|has .* bytes and had)") as caught:
        loader.load(0, ["id"])
    assert caught.value.where == str(path)


def test_a_read_that_a_store_refuses_for_a_while_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_csv(frame(10), tmp_path / "a.csv")
    data = csv(tmp_path)
    index = data.index()
    left = [2]

    class Slow:
        def open_input_file(self, path: str) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise OSError("AWS Error SLOW_DOWN during GetObject operation (HTTP status 503)")
            return pa.OSFile(path)

    monkeypatch.setattr("trainwright.datasets.formats.file_system.retry_transient", impatiently)
    loader = FileLoader(Slow(), data.source.format, index)
    assert loader.load(0, ["id"])["id"].tolist() == list(range(10))
    assert left[0] == -1


def impatiently(read: Callable[[], Any], where: str) -> Any:
    return retry_transient(read, where, clock=lambda: 0.0, sleep=lambda seconds: None)


def test_parquet_waits_for_its_store_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame(10).to_parquet(tmp_path / "a.parquet")
    read, left = ParquetLoader._read, [2]

    def slow(loader: ParquetLoader, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 28, Timeout was reached")
        return read(loader, *arguments)

    monkeypatch.setattr("trainwright.datasets.formats.parquet.retry_transient", impatiently)
    monkeypatch.setattr(ParquetLoader, "_read", slow)
    data = parquet(tmp_path)
    index = data.index()
    assert data.source.open(index).load(0, ["id"])["id"].tolist() == list(range(10))
    assert left[0] == -1


def test_a_group_with_other_rows_than_indexed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x\n10\n20\n")
    data = csv(path)
    index = data.index()
    path.write_text("x\n1\n2\n3\n")
    with pytest.raises(DataError, match="the row group has 3 rows and had 2"):
        data.read(replace(index, sizes={}), [0])


@pytest.mark.parametrize("damage", ["cut", "middle", "schema"])
def test_damaged_arrow_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.arrow"
    write_stream(frame(), path)
    content = path.read_bytes()
    start = arrow(path).index().groups[1].start
    places = {"cut": content[: start + 100], "middle": content[:start] + bytes(50) + content[start + 50 :]}
    path.write_bytes(places.get(damage, content[:16] + b"\xff" * 60 + content[76:]))
    with pytest.raises(DataError, match="the Arrow data is damaged") as caught:
        arrow(path).index()
    assert caught.value.where == str(path)


def test_arrow_with_a_dictionary_that_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrows"
    batches = [pa.record_batch({"w": pa.array(words).dictionary_encode()}) for words in (["a", "b"], ["c"])]
    with pa.ipc.new_stream(path, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    with pytest.raises(DataError, match="after the first record batch"):
        arrow(path).index()


def test_nulls_name_file_group_row_and_column(tmp_path: Path) -> None:
    values = pd.DataFrame({"x": pd.array([1] * 4500, dtype="Int64"), "y": range(4500)})
    values.loc[4200, "x"] = pd.NA
    for suffix, (source, write) in FORMATS.items():
        path = tmp_path / f"a.{suffix}"
        write(values, path)
        data = source(path)
        index = data.index()
        assert data.read(index, [4200], ["y"])["y"].tolist() == [4200]
        with pytest.raises(DataError, match="null") as caught:
            data.read(index, [4300], ["x"])
        assert caught.value.where == f"{path}, row group 1, row 4200, column 'x'"
        assert "columns=[...]" in caught.value.remedy


@pytest.mark.parametrize(("source", "suffix"), [(parquet, "parquet"), (arrow, "arrow")])
def test_a_column_that_comes_twice_is_named(tmp_path: Path, source: Callable[..., Any], suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    if suffix == "parquet":
        pq.write_table(twice, path)
    else:
        with pa.ipc.new_file(path, twice.schema) as writer:
            writer.write_table(twice)
    with pytest.raises(DataError, match="column 'x' comes twice") as caught:
        source(path).index()
    assert caught.value.where == str(path)


@pytest.mark.parametrize("delimiter", ["", "ab", '"', "\n", "é"])
def test_a_delimiter_that_is_none_is_refused(delimiter: str) -> None:
    with pytest.raises(DataError, match="cannot part values"):
        csv("a.csv", delimiter=delimiter)
