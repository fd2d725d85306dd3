"""Fashion-MNIST: fetched once, verified, written whole. No network: the sources are replaced."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import urllib.error
from pathlib import Path

import numpy as np
import pytest

import trainwright.datasets.fashion_mnist  # noqa: F401  (registers the module)
from trainwright.core.errors import DataError
from trainwright.datasets import parquet

SIZES = {"train": 3000, "t10k": 1500}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    import sys

    module = sys.modules["trainwright.datasets.fashion_mnist"]

    def nothing(target: Path) -> None:
        raise FileNotFoundError("not on this machine")

    monkeypatch.setattr(module, "from_debian", nothing)
    monkeypatch.setattr(module, "from_address", nothing)
    return module


def contents() -> dict[str, bytes]:
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


@pytest.fixture
def small(module, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    files = contents()
    sums = {name: hashlib.sha256(files[name]).hexdigest() for name in module.SHA256}
    monkeypatch.setattr(module, "SHA256", sums)
    return files


def test_the_files_become_parquet_once(module, small: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path / "raw", small)
    lines: list[str] = []
    splits = module.fashion_mnist(tmp_path, lines.append)
    train = parquet(splits.train)
    index = train.index()
    assert (index.rows, len(index.groups)) == (3000, 3)
    assert index.schema["image"] == (np.dtype(np.uint8), (28, 28))
    read = train.read(index, [0, 2999])
    images = np.frombuffer(small["train-images-idx3-ubyte"], np.uint8, offset=16).reshape(-1, 28, 28)
    np.testing.assert_array_equal(read["image"], images[[0, 2999]])
    assert read["id"].tolist() == [0, 2999]
    assert read["label"].tolist() == [small["train-labels-idx1-ubyte"][8], small["train-labels-idx1-ubyte"][-1]]
    assert parquet(splits.test).index().rows == 1500
    assert [line for line in lines if line.startswith("verified 4 files")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "test", "train"]
    lines.clear()
    stamp = (tmp_path / "train" / "part-0.parquet").stat().st_mtime_ns
    assert module.fashion_mnist(tmp_path, lines.append) == splits
    assert not lines
    assert (tmp_path / "train" / "part-0.parquet").stat().st_mtime_ns == stamp


def test_the_next_source_is_tried(module, small: dict[str, bytes], tmp_path: Path, monkeypatch) -> None:
    altered = {**small, "train-labels-idx1-ubyte": bytes(8) + bytes(3000)}
    monkeypatch.setattr(module, "from_debian", lambda target: put(target, altered))
    monkeypatch.setattr(module, "from_address", lambda target: put(target, small))
    lines: list[str] = []
    module.fashion_mnist(tmp_path / "data", lines.append)
    assert any("train-labels-idx1-ubyte.gz is altered" in line for line in lines)
    assert parquet(tmp_path / "data" / "train").index().rows == 3000


def test_when_none_answers_it_says_what_to_do(module, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be fetched") as caught:
        module.fashion_mnist(tmp_path)
    assert str(tmp_path / "raw") in caught.value.remedy and module.ADDRESS in caught.value.remedy
    assert "not on this machine" in caught.value.where
    assert not (tmp_path / "train").exists()


def test_no_package_manager_and_no_network_are_reasons_and_no_crashes(module, tmp_path: Path, monkeypatch) -> None:
    def unpack(target: Path) -> None:
        raise subprocess.CalledProcessError(100, ["apt-get"], stderr="W: odd\nE: Unable to locate package\n")

    def ask(target: Path) -> None:
        raise urllib.error.URLError("timed out")

    monkeypatch.setattr(module, "from_debian", unpack)
    monkeypatch.setattr(module, "from_address", ask)
    with pytest.raises(DataError) as caught:
        module.fashion_mnist(tmp_path)
    assert "E: Unable to locate package" in caught.value.where and "timed out" in caught.value.where


def test_a_torn_archive_is_refused(module, small: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path / "raw", small)
    torn = tmp_path / "raw" / "t10k-images-idx3-ubyte.gz"
    torn.write_bytes(torn.read_bytes()[:-50])
    with pytest.raises(DataError, match="could not be fetched"):
        module.fashion_mnist(tmp_path)


def test_missing_package_lists_are_fetched_aside(module, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.undo()
    calls: list[list[str]] = []

    def run(command: list[str], folder: Path) -> None:
        calls.append(command)
        if command[:2] == ["apt-get", "download"]:
            raise subprocess.CalledProcessError(100, command, stderr="E: No candidate")
        if "download" in command:
            (folder / "x.deb").write_bytes(b"")
        if command[0] == "dpkg":
            put(folder / "unpacked" / "usr" / "share" / "datasets" / "fashion-mnist", contents())

    monkeypatch.setattr("trainwright.datasets.debian._run", run)
    module.from_debian(tmp_path)
    assert [command[-1] for command in calls] == [module.PACKAGE, "update", module.PACKAGE, str(tmp_path / "unpacked")]
    assert f"Dir::State::Lists={tmp_path}/lists" in calls[1]
    assert (tmp_path / "t10k-labels-idx1-ubyte.gz").is_file()


def test_the_command_prints_each_step(module, small: dict[str, bytes], tmp_path: Path, capsys) -> None:
    assert module.main([str(tmp_path / "none")]) == 1
    assert "could not be fetched" in capsys.readouterr().err
    put(tmp_path / "raw", small)
    assert module.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"ready: {tmp_path}/train and {tmp_path}/test"
    assert len(lines) >= 4
