"""WebDataset as a source: tar shards become rows by key."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.record_files import Members, sample, write
from trainwright.core.errors import DataError
from trainwright.datasets import webdataset
from trainwright.datasets.data_source import Field


def samples(start: int, stop: int, folder: str = "") -> Members:
    return [member for number in range(start, stop) for member in sample(number, folder)]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_shards_are_read_in_any_order(tmp_path: Path, form: int) -> None:
    folder = "é" + "long/" * 30 if form != tarfile.USTAR_FORMAT else "train/"
    write(tmp_path / "s-0.tar", samples(0, 4500, folder), form)
    write(tmp_path / "s-1.tar", samples(4500, 4600, folder), form)
    data = webdataset(tmp_path)
    index = data.index()
    assert [
        sum(group.rows for group in index.groups if group.file.endswith(name)) for name in ("-0.tar", "-1.tar")
    ] == [
        4500,
        100,
    ]
    assert all(group.rows <= 4096 and group.stop - group.start < 9 << 20 for group in index.groups)
    assert index.groups[1].number == 1 and index.groups[-1].number == 0 and index.groups[-1].first == 4500
    objects = Field(np.dtype(object), ())
    label = Field(np.dtype(np.int64), ())
    assert index.schema == {"__key__": objects, "jpg": objects, "cls": label, "txt": objects, "json": objects}
    rows = [4599, 0, 4096, 4095, 17]
    read = data.read(index, rows)
    for place, number in enumerate(rows):
        image, _, text, _ = (content for _, content in sample(number))
        assert read["__key__"][place] == f"{folder}{number:06}"
        assert read["jpg"][place] == image and read["txt"][place] == text.decode()
        assert read["cls"][place] == number % 10 and read["json"][place] == {"id": number}
    only = webdataset(tmp_path, columns=["cls"])
    assert {name: array.tolist() for name, array in only.read(only.index(), [4123]).items()} == {"cls": [3]}


def test_a_group_is_bounded_in_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [(f"{number}.bin", bytes(3 << 20)) for number in range(7)])
    index = webdataset(tmp_path).index()
    assert [group.rows for group in index.groups] == [3, 3, 1]
    assert all(group.stop - group.start < 10 << 20 for group in index.groups)


def test_extensions_and_other_members(tmp_path: Path) -> None:
    members = [
        ("./a.left.PNG", b"l"), ("./a.left.txt", b"words"), ("./a.right.png", b"r"),
        ("README", b"no sample"), ("./.hidden.txt", b"x"),
        ("./b.left.png", b"L"), ("./b.left.txt", b""), ("./b.right.png", b"R"),
    ]  # fmt: skip
    write(tmp_path / "a.tar", members)
    data = webdataset(tmp_path)
    read = data.read(data.index(), [1, 0])
    assert {name: array.tolist() for name, array in read.items()} == {
        "__key__": ["./b", "./a"],
        "left.png": [b"L", b"l"],
        "left.txt": ["", "words"],
        "right.png": [b"R", b"r"],
    }


def test_a_compressed_shard_is_one_group(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", samples(0, 5000))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes(), 1))
    data = webdataset(tmp_path / "a.tar.gz")
    index = data.index()
    assert [group.rows for group in index.groups] == [5000]
    assert data.read(index, [4999], ["txt"])["txt"].tolist() == ["caption é 4999"]


def damaged(path: Path, kind: str) -> None:
    write(path, samples(0, 20))
    content = path.read_bytes()
    with tarfile.open(path) as archive:
        place = archive.getmembers()[41].offset
    if kind == "header":
        content = content[:place] + b"\xff" * 512 + content[place + 512 :]
    if kind == "cut in a member":
        content = content[: place + 515]
    if kind == "cut between members":
        content = content[:place]
    if kind == "no tar":
        content = b"hello" * 300
    if kind == "empty":
        content = b""
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("header", "no header stands at byte"),
        ("cut in a member", "the archive is damaged"),
        ("cut between members", "it has no end"),
        ("no tar", "the archive is damaged"),
        ("empty", "the archive is damaged: empty"),
    ],
)
def test_damaged_archives_are_named(tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "a.tar"
    damaged(path, kind)
    with pytest.raises(DataError, match=message) as caught:
        webdataset(tmp_path).index()
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("members", "message"),
    [([], "no rows"), ([("README", b"")], "no rows"), ([("a.x", b""), ("a.x", b"")], "two members 'x'")],
)
def test_archives_without_samples_and_with_one_twice(tmp_path: Path, members: Members, message: str) -> None:
    write(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=message):
        webdataset(tmp_path).index()


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("000001.cls", b"cat"), "the 'cls' of sample '000001' is no class: invalid literal"),
        (("000001.cls", b"9" * 30), "more than 64 bits"),
        (("000001.txt", b"\xff"), "the 'txt' of sample '000001' is no text"),
        (("000001.json", b"{"), "the 'json' of sample '000001' is no json"),
        (None, "the sample '000001' has no"),
    ],
)
def test_a_missing_or_damaged_member_names_its_row(tmp_path: Path, member: Any, message: str) -> None:
    changed = dict(samples(0, 3))
    name = member[0] if member else "000001.cls"
    changed[name] = member[1] if member else b""
    if member is None:
        del changed[name]
    path = tmp_path / "a.tar"
    write(path, list(changed.items()))
    data = webdataset(path)
    index = data.index()
    assert len(data.read(index, [0], ["jpg"])["jpg"]) == 1
    with pytest.raises(DataError, match=message) as caught:
        data.read(index, [0])
    assert caught.value.where == f"{path}, row group 0, row 1, column {name.split('.')[1]!r}"


def test_shards_must_have_the_same_extensions(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [("a.jpg", b""), ("a.cls", b"1")])
    write(tmp_path / "b.tar", [("b.jpg", b"")])
    with pytest.raises(DataError, match="'cls' is missing here and class in") as caught:
        webdataset(tmp_path).index()
    assert caught.value.where == f"{tmp_path}/b.tar, column 'cls'"
    assert webdataset(tmp_path, columns=["jpg"]).index().rows == 2


def test_a_shard_that_changes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, samples(0, 3))
    data = webdataset(path)
    index = data.index()
    write(path, samples(0, 30))
    with pytest.raises(DataError, match="the file changed: it has"):
        data.read(index, [0])
