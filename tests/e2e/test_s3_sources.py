"""File sources on a real S3 server: listed, indexed, and read by range."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.fs as pafs
import pytest

from tests.support.s3_server import S3Bucket
from trainwright.core.errors import DataError
from trainwright.datasets import Dataset, arrow, csv, images, json_lines, parquet, webdataset

ROWS = 9000


def fill(folder: Path) -> None:
    data = pd.DataFrame({"id": np.arange(ROWS), "text": [f"row, {number}" for number in range(ROWS)]})
    data.to_csv(folder / "a.csv", index=False)
    data.to_json(folder / "a.jsonl", orient="records", lines=True)
    data.to_feather(folder / "a.feather")
    data.to_parquet(folder / "a.parquet", row_group_size=4000)
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number in range(ROWS):
            header, content = tarfile.TarInfo(f"{number}.id.cls"), str(number).encode()
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    for number in range(40):
        (folder / f"class{number % 2}").mkdir(exist_ok=True)
        (folder / f"class{number % 2}" / f"{number}.png").write_bytes(bytes([number]))


@pytest.fixture
def bucket(s3_bucket: S3Bucket, tmp_path: Path) -> str:
    fill(tmp_path)
    uri = s3_bucket.uri.removesuffix("/runs") + "/data"
    system, path = pafs.FileSystem.from_uri(uri)
    pafs.copy_files(str(tmp_path), path, destination_filesystem=system)
    return uri


def test_every_source_reads_from_s3(bucket: str) -> None:
    rows = [ROWS - 1, 0, 4095, 4096, 17]
    sources: list[tuple[Dataset, str]] = [
        (csv(bucket), "id"),
        (csv(f"{bucket}/*.csv"), "id"),
        (json_lines(bucket), "id"),
        (arrow(bucket), "id"),
        (parquet(bucket), "id"),
        (webdataset(f"{bucket}/a.tar"), "id.cls"),
    ]
    for data, name in sources:
        index = data.index()
        assert index.rows == ROWS
        assert data.read(index, rows, [name])[name].tolist() == rows


def test_images_and_their_change_on_s3(bucket: str) -> None:
    data = images(f"{bucket}/")
    index = data.index()
    read = data.read(index, range(40))
    assert read["label"].tolist() == [0] * 20 + [1] * 20
    assert [int(Path(file).stem) for file in read["file"]] == [content[0] for content in read["image"]]
    system, path = pafs.FileSystem.from_uri(bucket)
    system.delete_file(f"{path}/class1/1.png")
    with pytest.raises(DataError, match="the folder changed: it has 19 images"):
        data.read(index, [39])
    parts = csv(bucket)
    before = parts.index()
    system.delete_file(f"{path}/a.csv")
    with pytest.raises(DataError, match="the file changed: it is gone"):
        parts.read(before, [0])
    with pytest.raises(DataError, match="no CSV file is here"):
        parts.index()
