"""Pages read as they are give what pyarrow gives, or are left to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import DataError
from trainwright.datasets import parquet
from trainwright.datasets.data_source import Index, to_array
from trainwright.datasets.formats.parquet import ParquetLoader, read_pages
from trainwright.datasets.row_reader import RowReader

ROWS = 300
PLAIN: dict[str, Any] = {"use_dictionary": False, "row_group_size": 120, "data_page_size": 500}


def table(rows: int = ROWS) -> pa.Table:
    rng = np.random.default_rng(rows)
    images = rng.integers(-100, 100, (rows, 3, 2), dtype=np.int8)
    return pa.table(
        {
            "vector": pa.FixedSizeListArray.from_arrays(rng.normal(size=rows * 7).astype(np.float32), 7),
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
            "double": rng.normal(size=rows),
            "id": np.arange(rows),
            "byte": rng.integers(0, 256, rows).astype(np.uint8),
            "unsigned": rng.integers(0, 2**32, rows).astype(np.uint32),
        }
    )


def opened(path: Path) -> tuple[Index, ParquetLoader]:
    dataset = parquet(path)
    index = dataset.index()
    loader = dataset.source.open(index)
    assert isinstance(loader, ParquetLoader)
    return index, loader


def empty(index: Index, rows: range, names: list[str]) -> dict[str, np.ndarray]:
    fields = {name: index.schema[name] for name in names}
    return {name: np.empty((len(rows), *field.shape), field.dtype) for name, field in fields.items()}


@settings(max_examples=60)
@given(data=st.data())
def test_any_rows_of_any_plain_file_are_what_pyarrow_reads(data: st.DataObject, tmp_path_factory: Any) -> None:
    options = {
        **PLAIN,
        "compression": data.draw(st.sampled_from(["none", "snappy", "zstd", "gzip", "brotli"])),
        "data_page_version": data.draw(st.sampled_from(["1.0", "2.0"])),
        "data_page_size": data.draw(st.sampled_from([64, 700, 1 << 20])),
        "write_statistics": data.draw(st.booleans()),
        "write_page_checksum": data.draw(st.booleans()),
    }
    path = tmp_path_factory.mktemp("pages") / "x.parquet"
    pq.write_table(table(), path, **options)
    index, loader = opened(path)
    number = data.draw(st.integers(0, len(index.groups) - 1))
    group = index.groups[number]
    first = data.draw(st.integers(0, group.rows - 1))
    rows = range(first, data.draw(st.integers(first + 1, group.rows)))
    into = empty(index, rows, list(index.schema))
    assert loader.fill(number, rows, into) == []
    expected = table().slice(group.first + rows.start, len(rows))
    for name, array in into.items():
        np.testing.assert_array_equal(array, to_array(expected.column(name), name))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("limit", [100, 2000, 1 << 20])
def test_pages_that_refer_to_a_dictionary_are_left_to_pyarrow(tmp_path: Path, version: str, limit: int) -> None:
    rows, random = 3000, np.random.default_rng(0)
    content = {
        "vector": pa.FixedSizeListArray.from_arrays(random.normal(size=rows * 3), 3),
        "x": random.normal(size=rows),
        "few": np.arange(rows) % 5,
    }
    pq.write_table(
        pa.table(content), tmp_path / "x.parquet", row_group_size=1000, dictionary_pagesize_limit=limit,
        data_page_size=1000, write_batch_size=10, data_page_version=version,
    )  # fmt: skip
    index, loader = opened(tmp_path / "x.parquet")
    into = empty(index, range(1000), list(content))
    assert loader.fill(1, range(1000), into) == (["few"] if limit < 1 << 20 else list(content))
    for blocks in (None, np.array([0, 50, 700, 1100, 3000])):
        reader = RowReader(loader, index, list(content), blocks=blocks)
        wanted = random.permutation(rows)
        for name, array in reader.gather(wanted).items():
            np.testing.assert_array_equal(array, to_array(pa.table(content).column(name), name)[wanted])


def nulls() -> pa.Table:
    vector = pa.array([[1.0, 2.0], None, [3.0, None], [5.0, 6.0]], pa.list_(pa.float32(), 2))
    return pa.table({"vector": vector, "x": pa.array([1, None, 3, 4]), "ok": pa.array([1, 2, 3, 4])})


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy"])
def test_nulls_are_left_to_pyarrow_which_refuses_them(tmp_path: Path, version: str, codec: str) -> None:
    options: dict[str, Any] = {"use_dictionary": False, "data_page_version": version, "compression": codec}
    try:
        pq.write_table(nulls(), tmp_path / "x.parquet", **options)
    except pa.ArrowNotImplementedError:
        pytest.skip("this pyarrow does not write such a file")
    index, loader = opened(tmp_path / "x.parquet")
    rows = range(4)
    assert loader.fill(0, rows, empty(index, rows, ["vector", "x", "ok"])) == ["vector", "x"]
    with pytest.raises(DataError, match="null"):
        RowReader(loader, index, ["vector"]).gather(np.arange(4))


@pytest.mark.parametrize(
    ("column", "options"),
    [
        (pa.array(np.arange(50)), {"use_dictionary": True}),
        (pa.array(np.arange(50.0)), {"column_encoding": {"x": "BYTE_STREAM_SPLIT"}}),
        (pa.array(np.arange(50)), {"column_encoding": {"x": "DELTA_BINARY_PACKED"}}),
        (pa.array(np.arange(50.0)), {"compression": "lz4"}),
        (pa.array(np.arange(50), pa.timestamp("us")), {}),
        (pa.array(np.arange(50) % 2 == 0), {}),
        (pa.array(np.arange(50.0).astype(np.float16)), {}),
        (pa.array([f"n{i}" for i in range(50)]), {}),
    ],
)
def test_what_is_not_plain_is_left_to_pyarrow(tmp_path: Path, column: pa.Array, options: dict[str, Any]) -> None:
    pq.write_table(pa.table({"x": column}), tmp_path / "x.parquet", **{"use_dictionary": False, **options})
    index, loader = opened(tmp_path / "x.parquet")
    assert loader.fill(0, range(50), empty(index, range(50), ["x"])) == ["x"]
    rows = np.array([49, 0, 7])
    expected = to_array(pa.chunked_array([column]), "x")[rows]
    np.testing.assert_array_equal(RowReader(loader, index, ["x"]).gather(rows)["x"], expected)


@pytest.mark.parametrize("at", [0, 1, 3, 8, 20, 45])
def test_a_page_that_is_damaged_gives_no_numbers(tmp_path: Path, at: int) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": np.arange(1000.0)}), path, use_dictionary=False, compression="none")
    start = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start + at : start + at + 6] = b"\xff" * 6
    path.write_bytes(bytes(content))
    metadata, out = pq.read_metadata(path), np.empty(1000)
    with pafs.LocalFileSystem().open_input_file(str(path)) as file:
        left = read_pages(file, metadata, 0, "x", range(1000), out, at_once=False)
    assert left == 1000 or at >= 20  # behind the header's counts lie statistics and levels


def test_a_file_that_is_gone_or_cut_is_left_to_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table(), path, **PLAIN)
    index, loader = opened(path)
    into, content = empty(index, range(120), ["double"]), path.read_bytes()
    path.rename(tmp_path / "y.parquet")
    assert loader.fill(0, range(120), into) == ["double"]
    path.write_bytes(content)
    assert loader.fill(0, range(120), into) == []
    path.write_bytes(content[:700])
    assert loader.fill(0, range(120), into) == ["double"]


def test_a_row_group_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table(), path, **PLAIN)
    index = parquet(path).index()
    pq.write_table(table(250), path, **PLAIN)
    reader = parquet(path).reader(index, ["double"])
    with pytest.raises(DataError, match="the file changed"):
        reader.gather(np.array([299]))
