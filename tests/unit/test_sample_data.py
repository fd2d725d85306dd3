"""The data sets of the examples: fetched once, verified, written completely. No network: the sources are replaced."""

from __future__ import annotations

import gzip
import hashlib
import struct
import subprocess
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import sample_data

from trainwright.core.errors import DataError
from trainwright.datasets import parquet

SIZES = {"train": 3000, "t10k": 1500}
TEXT = b"".join(f"Ge1:{verse} And the evening and the morning were day {verse}.\n".encode() for verse in range(1, 99))


def images() -> dict[str, bytes]:
    files = {}
    for name, rows in SIZES.items():
        generator = np.random.default_rng(rows)
        files[f"{name}-images-idx3-ubyte"] = bytes(16) + generator.integers(0, 256, rows * 784, np.uint8).tobytes()
        files[f"{name}-labels-idx1-ubyte"] = bytes(8) + generator.integers(0, 10, rows).astype(np.uint8).tobytes()
    return files


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*arguments: object) -> dict[str, bytes]:
        raise FileNotFoundError("not on this machine")

    monkeypatch.setattr(sample_data, "unpack_debian", nothing)
    monkeypatch.setattr(sample_data, "fashion_mnist_from_address", nothing)
    monkeypatch.setattr(sample_data, "KING_JAMES_SHA256", hashlib.sha256(TEXT).hexdigest())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    files = images()
    sums = {name: hashlib.sha256(files[name]).hexdigest() for name in files}
    monkeypatch.setattr(sample_data, "FASHION_MNIST_SHA256", sums)
    return files


def test_the_files_become_parquet_once(small: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path / "raw", small)
    lines: list[str] = []
    splits = sample_data.fashion_mnist(tmp_path, lines.append)
    train = parquet(splits.train)
    index = train.index()
    assert (index.rows, len(index.groups)) == (3000, 3)
    assert index.schema["image"] == (np.dtype(np.uint8), (28, 28))
    read = train.read(index, [0, 2999])
    expected = np.frombuffer(small["train-images-idx3-ubyte"], np.uint8, offset=16).reshape(-1, 28, 28)
    np.testing.assert_array_equal(read["image"], expected[[0, 2999]])
    assert read["id"].tolist() == [0, 2999]
    assert read["label"].tolist() == [small["train-labels-idx1-ubyte"][8], small["train-labels-idx1-ubyte"][-1]]
    assert parquet(splits.test).index().rows == 1500
    assert [line for line in lines if line.startswith("verified 4 files")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "test", "train"]
    lines.clear()
    stamp = (tmp_path / "train" / "part-0.parquet").stat().st_mtime_ns
    assert sample_data.fashion_mnist(tmp_path, lines.append) == splits
    assert not lines
    assert (tmp_path / "train" / "part-0.parquet").stat().st_mtime_ns == stamp


def test_the_next_source_is_tried(small: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    altered = {**small, "train-labels-idx1-ubyte": bytes(8) + bytes(3000)}
    monkeypatch.setattr(sample_data, "fashion_mnist_from_debian", lambda: altered)
    monkeypatch.setattr(sample_data, "fashion_mnist_from_address", lambda: small)
    lines: list[str] = []
    sample_data.fashion_mnist(tmp_path / "data", lines.append)
    assert any("train-labels-idx1-ubyte is altered" in line for line in lines)
    assert parquet(tmp_path / "data" / "train").index().rows == 3000


def test_without_a_source_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be downloaded") as caught:
        sample_data.fashion_mnist(tmp_path)
    assert str(tmp_path / "raw") in caught.value.remedy and sample_data.ADDRESS in caught.value.remedy
    assert "not on this machine" in caught.value.where
    assert not (tmp_path / "train").exists()


def test_a_missing_package_manager_or_network_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack() -> dict[str, bytes]:
        raise subprocess.CalledProcessError(100, ["apt-get"], stderr="W: odd\nE: Unable to locate package\n")

    def ask() -> dict[str, bytes]:
        raise urllib.error.URLError("timed out")

    monkeypatch.setattr(sample_data, "fashion_mnist_from_debian", unpack)
    monkeypatch.setattr(sample_data, "fashion_mnist_from_address", ask)
    with pytest.raises(DataError) as caught:
        sample_data.fashion_mnist(tmp_path)
    assert "E: Unable to locate package" in caught.value.where and "timed out" in caught.value.where


def test_a_torn_archive_is_refused(small: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path / "raw", small)
    torn = tmp_path / "raw" / "t10k-images-idx3-ubyte.gz"
    torn.write_bytes(torn.read_bytes()[:-50])
    with pytest.raises(DataError, match="could not be downloaded"):
        sample_data.fashion_mnist(tmp_path)


def test_missing_package_lists_are_downloaded_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    calls: list[list[str]] = []

    def run(command: list[str], folder: Path) -> None:
        calls.append(command)
        if command[:2] == ["apt-get", "download"]:
            raise subprocess.CalledProcessError(100, command, stderr="E: No candidate")
        if "download" in command:
            (folder / "x.deb").write_bytes(b"")
        if command[0] == "dpkg":
            put(folder / "unpacked" / "usr" / "share" / "datasets" / "fashion-mnist", images())

    monkeypatch.setattr(sample_data, "_run", run)
    files = sample_data.fashion_mnist_from_debian()
    package = sample_data.FASHION_MNIST_PACKAGE
    assert [command[-1] for command in calls[:3]] == [package, "update", package]
    assert any(option.startswith("Dir::State::Lists=") for option in calls[1])
    assert files == images()


def test_a_package_that_apt_did_not_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sample_data, "_run", lambda command, folder: None)
    with pytest.raises(FileNotFoundError, match="no file of any"):
        sample_data.unpack_debian("any", tmp_path)


def test_the_command_prints_each_step(small: dict[str, bytes], tmp_path: Path, capsys) -> None:
    assert sample_data.main([str(tmp_path / "none")]) == 1
    assert "could not be downloaded" in capsys.readouterr().err
    put(tmp_path / "raw", small)
    assert sample_data.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"ready: {tmp_path}/train and {tmp_path}/test"
    assert len(lines) >= 4


def test_the_text_is_split_after_a_verse_once(tmp_path: Path) -> None:
    (tmp_path / sample_data.KING_JAMES_FILE).write_bytes(TEXT)
    lines: list[str] = []
    train, test = (Path(part) for part in sample_data.king_james(tmp_path, lines.append))
    assert train.read_bytes() + test.read_bytes() == TEXT
    assert train.read_bytes().endswith(b".\n")
    assert 0 <= 0.95 * len(TEXT) - len(train.read_bytes()) < 60
    assert any(line.startswith("verified 1 file") for line in lines)
    lines.clear()
    sample_data.king_james(tmp_path, lines.append)
    assert not lines
    names = [sample_data.KING_JAMES_FILE, "test.txt", "train.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def write_windows(folder: Path, windows: list[bytes]) -> None:
    """`bible.data` as in the unpacked package, of as many windows as it has."""
    offsets = [sample_data.FIRST_WINDOW]
    for window in windows:
        offsets.append(offsets[-1] + len(window))
    table = struct.pack(f">{len(offsets)}I", *offsets)
    (folder / "usr" / "lib").mkdir(parents=True)
    data = bytes(sample_data.WINDOW_OFFSETS) + table + b"".join(windows)
    (folder / "usr" / "lib" / "bible.data").write_bytes(data)


WINDOWS = (sample_data.FIRST_WINDOW - sample_data.WINDOW_OFFSETS) // 4 - 1


def test_the_windows_of_the_package_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows that gzip wrote, in place of compress(1), which nothing here can write."""
    content = b"The edition.\n" + TEXT
    size = -(-len(content) // WINDOWS)
    windows = [gzip.compress(content[start : start + size]) for start in range(0, WINDOWS * size, size)]
    write_windows(tmp_path / "package", windows)
    monkeypatch.setattr(sample_data, "unpack_debian", lambda package, folder: tmp_path / "package")
    monkeypatch.setattr(sample_data, "COMPRESS_MAGIC", b"")
    train, test = sample_data.king_james(tmp_path)
    assert Path(train).read_bytes() + Path(test).read_bytes() == TEXT


def test_text_files_on_disk_are_verified(tmp_path: Path) -> None:
    (tmp_path / sample_data.KING_JAMES_FILE).write_bytes(TEXT)
    train = Path(sample_data.king_james(tmp_path).train)
    train.write_bytes(train.read_bytes()[1:])
    with pytest.raises(DataError, match="is altered") as caught:
        sample_data.king_james(tmp_path)
    assert str(train) in caught.value.remedy


@pytest.mark.parametrize(
    ("window", "words"), [(gzip.compress(b"no line", mtime=0), "is altered"), (b"other", "gzip: ")]
)
def test_another_layout_of_the_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: bytes, words: str
) -> None:
    write_windows(tmp_path, [window] * WINDOWS)
    monkeypatch.setattr(sample_data, "unpack_debian", lambda package, folder: tmp_path)
    monkeypatch.setattr(sample_data, "COMPRESS_MAGIC", b"")
    with pytest.raises(DataError, match="could not be downloaded") as caught:
        sample_data.king_james(tmp_path / "new")
    assert words in caught.value.where and "b'" not in caught.value.where


def test_another_text_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / sample_data.KING_JAMES_FILE).write_bytes(TEXT + b"more")
    with pytest.raises(DataError, match="could not be downloaded") as caught:
        sample_data.king_james(tmp_path)
    assert "is altered" in caught.value.where and "not on this machine" in caught.value.where
    assert str(tmp_path / sample_data.KING_JAMES_FILE) in caught.value.remedy
