"""`trainwright data` as a user types it: inspect and convert."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FileSelector
from rich.console import Console

from tests.support.processes import finish
from tests.support.s3_server import S3Bucket
from trainwright.cli.data_commands import as_data, as_table, progress
from trainwright.core.errors import DataError
from trainwright.datasets import parquet, table
from trainwright.datasets.data_source import object_array
from trainwright.datasets.dataset_tools import convert, detect_format, inspect, open_dataset
from trainwright.datasets.formats.file_system import resolve_file_system
from trainwright.datasets.formats.parquet_writer import group_rows, is_complete, shard_rows, write_shards


def write(path: Path, rows: int = 1000, group: int = 10, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (rows, 8, 4), dtype=np.uint8)
    columns = {
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
        "label": np.arange(rows) % 3,
        "id": np.arange(rows),
        "text": [f"row {row}" for row in range(rows)],
        "tokens": pa.array([list(range(row % 4)) for row in range(rows)], pa.list_(pa.int64())),
        **more,
    }
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def read_all(path: Path) -> dict[str, Any]:
    data = parquet(path)
    index = data.index()
    return data.read(index, range(index.rows))


def test_inspect_shows_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet")
    code, out, err = finish("data", "inspect", path)
    assert code == 0 and not err, err
    for text in (
        "1,000",
        "100 of 10 to 10 rows",
        "uint8",
        "[8, 4]",
        "label: 0: 334, 1: 333, 2: 333",
        "row 2",
        "perfect permutation",
    ):
        assert text in out, out


def test_inspect_as_json_and_of_a_job_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet")
    code, out, err = finish("data", "inspect", path, "--json", "--rows", "1")
    assert code == 0, err
    found = json.loads(out)
    assert found["rows"] == found["counted_rows"] == 1000 and found["row_groups"]["count"] == 100
    assert found["columns"][0] == {"name": "image", "dtype": "uint8", "shape": [8, 4]}
    assert found["classes"] == {"label": {"0": 334, "1": 333, "2": 333}}
    assert [sample["text"] for sample in found["samples"]] == ["row 0"]
    assert found["files"] == {"count": 1, "size_bytes": path.stat().st_size, "nulls": {}} and found["warnings"] == []
    job = tmp_path / "job.py"
    job.write_text(
        "import trainwright as tw\n"
        f"data = tw.datasets.parquet({str(path)!r})\n"
        "parts = tw.datasets.split(data, {'train': 0.8, 'rest': 0.2})\n"
        "job = tw.Job(name='n', model=dict, optimizer=dict, step=dict, batch_size=8,\n"
        "             train=parts['train'], evaluate=parts['rest'])\n"
    )
    code, out, err = finish("data", "inspect", job, "--json")
    assert code == 0, err
    both = json.loads(out)
    assert [found["name"] for found in both] == ["train", "evaluate"]
    assert both[1]["shuffle"] is None
    assert 0.8 < both[0]["shuffle"]["scatter"] < 1.2 and both[0]["shuffle"]["clumping"] < 1.2
    assert sum(found["rows"] for found in both) == 1000 and "split(" in both[0]["source"]


def test_convert_writes_good_shards_atomically(tmp_path: Path) -> None:
    path, out = write(tmp_path / "in" / "x.parquet"), tmp_path / "made" / "out"
    code, told, err = finish("data", "convert", path.parent, out, "--rows-per-group", "100", "--shard-mb", "0.005")
    assert code == 0, err
    assert "rows 1,000/1,000, " in err and "wrote 1,000 rows in" in told and str(out) in told
    assert sorted(entry.name for entry in out.parent.iterdir()) == ["out"]
    before, after = read_all(path), read_all(out)
    for name in before:
        assert after[name].dtype == before[name].dtype
        assert list(map(str, after[name])) == list(map(str, before[name]))
    files = sorted(out.glob("*.parquet"))
    assert len(files) > 1 and json.loads((out / "_SUCCESS").read_text())["files"] == len(files)
    assert isinstance(pq.read_schema(files[0]).field("image").type, pa.FixedShapeTensorType)
    rows = [pq.read_metadata(file).num_rows for file in files]
    assert sum(rows) == 1000 and max(rows) - min(rows) <= 100
    code, _, err = finish("data", "convert", path, out)
    assert code == 1 and "the folder is not empty" in err and "->" in err


def test_an_unknown_suffix_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "x.orc").write_text("")
    code, _, err = finish("data", "convert", tmp_path / "x.orc", tmp_path / "out")
    assert code == 1 and "not known by the suffix" in err and ".parquet" in err and "--format" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.csv", "b.csv.gz"], "csv"),
        (["a.jsonl", "b.ndjson"], "json_lines"),
        (["deep/a.tfrecord"], "tfrecord"),
        (["a-000.tar", "a-001.tar"], "webdataset"),
        (["cat/1.png", "dog/2.JPG"], "images"),
        (["a.feather", "notes.txt"], "arrow"),
        (["a.pq", "_SUCCESS"], "parquet"),
    ],
)
def test_formats_are_told_by_suffix(tmp_path: Path, names: list[str], kind: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert detect_format(str(tmp_path)) == kind
    assert detect_format(str(tmp_path / names[0])) == kind
    assert detect_format(f"{tmp_path}/**/*.{names[0].partition('.')[2]}") == kind


def test_formats_that_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing at this path"):
        detect_format(str(tmp_path / "nowhere"))
    for name in ("a.csv", "b.csv", "c.tar"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError, match="several formats lie here: 2 csv, 1 webdataset"):
        detect_format(str(tmp_path))
    with pytest.raises(DataError, match="no format 'parqet'") as caught:
        open_dataset(str(tmp_path), "parqet")
    assert caught.value.remedy == "did you mean 'parquet'?"


def test_sizes_of_shards_and_row_groups() -> None:
    assert group_rows(1 << 10) == 12 << 10 and group_rows(1 << 30) == 1
    assert shard_rows(1000, 1000.0, 128 << 20) == 134_000
    assert shard_rows(1000, 1000.0, 100) == 1000
    equal = shard_rows(1000, 1000.0, 128 << 20, rows=1_000_000)
    assert equal == 143_000 and -(-1_000_000 // equal) == 7
    assert shard_rows(10, 1.0, 128 << 20, rows=95) == 100


def test_row_groups_have_a_good_size_by_default(tmp_path: Path) -> None:
    rows = 300_000
    rng = np.random.default_rng(0)
    data = table({"x": rng.normal(size=(rows, 16)), "flags": rng.integers(0, 2, (rows, 2)) == 1})
    told: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        told.append((done, total))

    written = convert(data, str(tmp_path / "out"), shard_bytes=16 << 20, report=report)
    index = parquet(tmp_path / "out").index()
    sizes = [group.rows * index.row_bytes for group in index.groups]
    assert all(8 << 20 <= size <= 16 << 20 for size in sizes[:-1]) and len(sizes) == written.groups > 2
    assert told == sorted(told) and told[-1] == (rows, rows)
    assert written.files == len(list((tmp_path / "out").glob("*.parquet"))) == 2
    sample = parquet(tmp_path / "out").read(index, [rows - 1])
    np.testing.assert_array_equal(sample["x"][0], data.read(data.index(), [rows - 1])["x"][0])
    assert sample["flags"].dtype == np.bool_ and sample["flags"].shape == (1, 2)


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def pieces() -> Any:
        yield {"x": np.arange(10)}
        yield {"x": np.arange(10.0)}

    out = tmp_path / "out"
    with pytest.raises(DataError, match="the column is double here and int64 before"):
        write_shards(pieces(), str(out), rows_per_group=4)
    with pytest.raises(DataError, match="no row to write"):
        write_shards([], str(out))
    with pytest.raises(DataError, match="no type in parquet"):
        convert(table({"x": np.array([1, "a"], dtype=object)}), str(out))
    for first, other, key in (
        ({"a": 1}, {"a": 1, "b": 2}, "b"),
        ([{"a": {"c": 1}}], [{"a": {"c": 1, "d": 2}}], "a.d"),
    ):
        with pytest.raises(DataError, match=f"has the key '{key}', which the rows before do not have") as caught:
            write_shards([{"x": object_array([first])}, {"x": object_array([first, other])}], str(out))
        assert caught.value.where == "column 'x'" and caught.value.remedy
    assert list(tmp_path.iterdir()) == [] and not is_complete(str(out))
    out.write_text("")
    with pytest.raises(DataError, match="a file has this name"):
        write_shards([], str(out))


def test_nested_objects_are_written_with_the_keys_of_the_first_rows(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": None}, {"a": None, "b": "x"}], [{"b": "y"}, {"a": 3, "b": "z"}]
    write_shards([{"x": object_array(piece)} for piece in rows], str(tmp_path / "out"))
    assert read_all(tmp_path / "out")["x"].tolist() == [*rows[0], {"a": None, "b": "y"}, rows[1][1]]


def test_a_uri_is_written_too(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    written = write_shards([{"x": np.arange(5)}, {"x": np.arange(5, 9)}], out.as_uri(), rows_per_group=4)
    assert written.rows == 9 and written.groups == 3 and is_complete(out.as_uri())
    assert read_all(out)["x"].tolist() == list(range(9))


def test_an_object_store_gets_the_same_shards(s3_bucket: S3Bucket) -> None:
    out = f"{s3_bucket.uri}/data"
    written = write_shards([{"x": np.arange(5)}, {"x": np.arange(5, 9)}], out, rows_per_group=4, shard_bytes=1)
    assert written.files == 3 and is_complete(out)
    system, folder = resolve_file_system(out)
    listed = system.get_file_info(FileSelector(folder, recursive=True))
    assert sorted(info.base_name for info in listed) == ["_SUCCESS", *(f"part-0000{n}.parquet" for n in range(3))]
    index = parquet(out).index()
    assert index.rows == 9 and all("/data/part-" in group.file for group in index.groups)
    with pytest.raises(DataError, match="not empty"):
        write_shards([{"x": np.arange(5)}], out)
    found = inspect(parquet(out))
    assert found.files is not None and found.files.count == 3 and found.files.size_bytes == written.size_bytes


def test_transforms_are_written(tmp_path: Path) -> None:
    convert(table({"x": np.arange(6)}).map(lambda row, rng: {"y": row["x"] * 2}), str(tmp_path / "out"))
    assert read_all(tmp_path / "out")["y"].tolist() == [0, 2, 4, 6, 8, 10]


def test_warnings_name_what_is_worth_mending(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 1000, group=1000, label=np.arange(1000) // 990, hole=pa.array([None] + [1] * 999))
    for number in range(9):
        write(tmp_path / f"b{number}.parquet", 2, label=[0, 0], hole=[1, 2])
    found = inspect(parquet(tmp_path))
    told = "\n".join(found.warnings)
    assert "column 'hole' has 1 nulls" in told and "the first rows cannot be read" in told
    assert "the values of 'label' are skewed: the most frequent comes 101 times" in told
    assert "'hole' cannot be counted" in told and "9.8 times the rows of the mean" in told
    assert found.samples == () and found.files is not None and found.files.count == 10
    assert json.loads(json.dumps(as_data(found)))["warnings"] == list(found.warnings)


def test_one_huge_row_group_is_worth_a_warning() -> None:
    found = inspect(table({"x": np.zeros((9000, 1000)), "when": np.zeros(9000, "datetime64[ns]")}))
    assert ["all rows are in one row group" in line for line in found.warnings] == [True]
    out = io.StringIO()
    Console(file=out, width=120).print(as_table(found, "train"))
    assert "train" in out.getvalue() and "float64 [1000], 0 to 0" in out.getvalue()
    assert "datetime64[ns]" in out.getvalue(), "brackets are no markup"
    assert "warning: all rows" in out.getvalue() and "files" not in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_in_a_terminal_and_few_lines_elsewhere(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, _environ={"TERM": "xterm"})
    with progress(console) as report:
        for rows in range(1, 1001):
            report(rows, 1000)
    text = out.getvalue()
    if terminal:
        assert "\x1b[" in text and "rows 1,000/1,000" in text
    else:
        lines = text.splitlines()
        assert len(lines) == 10 and lines[0].startswith("rows 100/1,000, ") and lines[-1].startswith("rows 1,000/1,000")
