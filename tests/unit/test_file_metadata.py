"""Metadata of files is read once for each state of a file, whoever asks; no entry is used for a file that changed."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from tests.support.file_formats import FORMATS, frame
from tests.support.record_files import field, message
from tests.support.record_files import sample as webdataset_sample
from tests.support.record_files import write as webdataset_shard
from tests.support.slow_s3_server import slow_store
from trainwright.core.tfrecord_framing import frame as record
from trainwright.datasets import Dataset, csv, metadata_cache, parquet, text, tfrecord, webdataset
from trainwright.datasets.formats import parquet as files
from trainwright.datasets.formats.parquet import Footer
from trainwright.datasets.formats.scanned_files import SurveyTask
from trainwright.datasets.metadata_cache import MetadataContext, cache_folder, metadata_context


def write(path: Path, rows: range) -> None:
    pq.write_table(pa.table({"id": np.array(rows), "name": [f"row {row}" for row in rows]}), path, row_group_size=4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    for number in range(3):
        write(place / f"{number}.parquet", range(number * 10, number * 10 + 10))
    return place


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, for which files that were changed just now are settled."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(metadata_cache, "SETTLED_S", {True: -60.0, False: -60.0})
    return tmp_path / "cache" / "indexes"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose footers are read from now on."""
    names: list[str] = []
    footer = files.read_footer

    def counted(system: pafs.FileSystem, place: tuple[str, int]) -> Footer:
        names.append(Path(place[0]).name)
        return footer(system, place)

    monkeypatch.setattr(files, "read_footer", counted)
    return names


def test_each_footer_is_read_once(data: Path, cache: Path, read: list[str]) -> None:
    first = parquet(data).index()
    assert sorted(read) == ["0.parquet", "1.parquet", "2.parquet"]
    assert parquet(data).index() == first and parquet(data, ["id"]).index().rows == 30
    assert len(read) == 3
    (file,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700 and file.suffixes == [".json", ".z"]


def appended(data: Path) -> list[str]:
    write(data / "3.parquet", range(30, 40))
    return ["3.parquet"]


def rewritten(data: Path) -> list[str]:
    """Of the same size and time of modification."""
    old, content = (data / "1.parquet").stat(), (data / "1.parquet").read_bytes()
    (data / "1.parquet").write_bytes(content.replace(b"row 1", b"ROW 1"))
    os.utime(data / "1.parquet", ns=(old.st_atime_ns, old.st_mtime_ns))
    return ["1.parquet"]


def regrouped(data: Path) -> list[str]:
    write(data / "0.parquet", range(3))
    return ["0.parquet"]


def removed(data: Path) -> list[str]:
    (data / "2.parquet").unlink()
    return []


@pytest.mark.parametrize("change", [appended, rewritten, regrouped, removed])
def test_a_change_is_seen_and_nothing_else_is_read(
    data: Path, cache: Path, read: list[str], change: Callable[[Path], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = parquet(data).index()
    read.clear()
    changed = change(data)
    after = parquet(data).index()
    assert read == changed
    assert change is rewritten or after != before
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(data.parent / "another"))
    assert parquet(data).index() == after


def test_a_file_that_was_changed_just_now_is_read_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    """It could change again within one tick of the file system's clock."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    parquet(data).index()
    parquet(data).index()
    assert len(read) == 6


FOREIGN: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "flipped": lambda content: content[:40] + bytes([content[40] ^ 255]) + content[41:],
    "no JSON": lambda content: zlib.compress(b"\x80\x04N."),
    "a list": lambda content: zlib.compress(b"[]"),
    "of another path": lambda content: edited(content, lambda found: found.update(identity="else")),
    "no files": lambda content: edited(content, lambda found: found.update(files=[1])),
    "no metadata": lambda content: edited(content, lambda found: [entry.pop() for entry in found["files"].values()]),
    "wrong metadata": lambda content: edited(
        content, lambda found: [entry.__setitem__(1, ["AAAA", [1], []]) for entry in found["files"].values()]
    ),
}


def edited(content: bytes, change: Callable[[Any], object]) -> bytes:
    found = json.loads(zlib.decompress(content))
    change(found)
    return zlib.compress(json.dumps(found).encode())


@pytest.mark.parametrize("how", FOREIGN)
def test_a_torn_or_foreign_cache_file_is_rewritten(data: Path, cache: Path, read: list[str], how: str) -> None:
    first = parquet(data).index()
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.write_bytes(FOREIGN[how](content))
    assert parquet(data).index() == first
    assert len(read) == 6 and [*cache.iterdir()] == [file] and file.read_bytes() == content


@pytest.mark.parametrize("what", ["others may write", "a file", "read only"])
def test_a_cache_that_cannot_be_trusted_or_written_is_not_used(
    data: Path, cache: Path, read: list[str], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = parquet(data).index()
    if what == "others may write":
        cache.chmod(0o777)
    else:
        cache.rename(cache.parent / "before")
        cache.write_bytes(b"")
        if what == "read only":
            cache.unlink()
            cache.symlink_to("/proc/sys")
    with caplog.at_level("INFO"):
        assert parquet(data).index() == first
    assert len(read) == 6 and "is not cached" in caplog.text


def test_what_a_run_keeps_spares_another_machine_the_reading(
    data: Path, cache: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with metadata_context(MetadataContext()) as here:
        first = parquet(data).index()
    write(data / "1.parquet", range(5))
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "another"))
    read.clear()
    with metadata_context(MetadataContext(find=here.kept.get)) as there:
        second = parquet(data).index()
    assert read == ["1.parquet"] and second.rows == first.rows - 5
    assert there.kept.keys() == here.kept.keys() and there.kept != here.kept
    read.clear()
    assert parquet(data).index() == second and not read  # the local cache has it too
    write(data / "1.parquet", range(7))
    with metadata_context(MetadataContext(find=lambda name: b"torn")):
        assert parquet(data).index().rows == first.rows - 3


def test_an_object_store_is_asked_once_for_each_object(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at a time, and again only for an object that is another now, or may be without a sign of it."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    for number in range(60):
        write(data / f"{number}.parquet", range(number, number + 10))
        os.utime(data / f"{number}.parquet", (10**9, 10**9))
    with slow_store(data.parent, 0.02) as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        first = parquet("s3://data/data").index()
        assert first.rows == 600 and store.most > 8
        assert store.requests["GET"] == 60 and store.requests["HEAD"] <= 1
        store.requests.clear()
        assert parquet("s3://data/data").index() == first
        assert not store.requests["GET"]
        os.utime(data / "7.parquet", (10**9 + 1, 10**9 + 1))
        write(data / "8.parquet", range(20))
        for reads in (2, 1, 1):  # the one written just now again each time
            store.requests.clear()
            assert parquet("s3://data/data").index().rows == 610
            assert store.requests["GET"] == reads
    with slow_store(data.parent, 0.0) as other:  # objects of the same names and times, and who knows what in them
        monkeypatch.setenv("AWS_ENDPOINT_URL", other.environment()["AWS_ENDPOINT_URL"])
        parquet("s3://data/data").index()
        assert other.requests["GET"] == 60


def made(place: Path) -> dict[str, tuple[Callable[..., Dataset], Path]]:
    """A file of each format that needs a first pass, and what reads it."""
    found: dict[str, tuple[Callable[..., Dataset], Path]] = {"text": (text, place / "data.txt")}
    (place / "data.txt").write_text("one\ntwo\n", encoding="utf-8")
    for suffix, (reads, writes) in FORMATS.items():
        writes(frame(5), place / f"data.{suffix}")
        found[suffix] = reads, place / f"data.{suffix}"
    numbers = message("x", 2, field(1, 2, b"\0\0\x80?\0\0\0?"))  # 1.0 and 0.5
    (place / "data.tfrecord").write_bytes(record(message("id", 3, field(1, 2, b"\x07")) + numbers))
    webdataset_shard(place / "data.tar", webdataset_sample(1))
    return {**found, "tfrecord": (tfrecord, place / "data.tfrecord"), "tar": (webdataset, place / "data.tar")}


@pytest.mark.parametrize("form", ["text", *FORMATS, "tfrecord", "tar"])
def test_a_file_without_an_index_is_passed_over_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    reads, path = made(tmp_path)[form]
    first = reads(path).index()
    monkeypatch.setattr(SurveyTask, "__call__", None)
    second = reads(path).index()
    assert second == first and {name: type(trait) for name, trait in second.traits.items()} == {
        name: type(trait) for name, trait in first.traits.items()
    }
    assert reads(path).read(second, [0]).keys() == first.schema.keys()


def test_another_option_is_another_entry(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "data.csv").write_text("a;b\n1;2\n", encoding="utf-8")
    assert [*csv(tmp_path / "data.csv").index().schema] == ["a;b"]
    assert [*csv(tmp_path / "data.csv", delimiter=";").index().schema] == ["a", "b"]


def test_the_cache_is_bounded(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_cache, "MAX_CACHE_FILES", 2)
    for number in range(3):
        parquet(data / f"{number}.parquet").index()
        for age, file in enumerate(sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)):
            os.utime(file, (10**9 - age, 10**9 - age))
    assert len([*cache.iterdir()]) == 2


def test_the_users_cache_directory_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/of-the-user")
    assert cache_folder() == Path("/tmp/of-the-user/trainwright/indexes")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/trainwright/indexes"
