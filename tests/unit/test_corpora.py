"""The King James text: fetched once, verified, divided. No network: what is fetched is replaced."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import pytest

from trainwright.core.errors import DataError
from trainwright.datasets import corpora, debian

TEXT = b"".join(f"Ge1:{verse} And the evening and the morning were day {verse}.\n".encode() for verse in range(1, 99))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "SHA256", hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setattr(corpora, "unpacked", lambda package, folder: folder)


def test_the_text_is_divided_after_a_verse_once(tmp_path: Path) -> None:
    (tmp_path / corpora.FILE).write_bytes(TEXT)
    lines: list[str] = []
    train, test = (Path(part) for part in corpora.king_james(tmp_path, lines.append))
    assert train.read_bytes() + test.read_bytes() == TEXT
    assert train.read_bytes().endswith(b".\n")
    assert 0 <= 0.95 * len(TEXT) - len(train.read_bytes()) < 60
    assert any(line.startswith("verified the text") for line in lines)
    lines.clear()
    corpora.king_james(tmp_path, lines.append)
    assert not lines
    assert sorted(path.name for path in tmp_path.iterdir()) == [corpora.FILE, "test.txt", "train.txt"]


def test_the_packages_windows_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gzip's own windows in the place of those of compress(1), which nothing here writes."""
    count = (corpora.FIRST_WINDOW - corpora.OFFSETS) // 4 - 1
    whole = b"The edition.\n" + TEXT
    size = -(-len(whole) // count)
    windows = [gzip.compress(whole[start : start + size]) for start in range(0, count * size, size)]
    places = [corpora.FIRST_WINDOW]
    for window in windows:
        places.append(places[-1] + len(window))
    data = bytes(corpora.OFFSETS) + struct.pack(f">{count + 1}I", *places) + b"".join(windows)

    def unpacked(package: str, folder: Path) -> Path:
        (folder / "usr" / "lib").mkdir(parents=True)
        (folder / "usr" / "lib" / "bible.data").write_bytes(data)
        return folder

    monkeypatch.setattr(corpora, "unpacked", unpacked)
    monkeypatch.setattr(corpora, "MAGIC", b"")
    train, test = corpora.king_james(tmp_path)
    assert Path(train).read_bytes() + Path(test).read_bytes() == TEXT


def test_a_text_that_is_there_is_verified(tmp_path: Path) -> None:
    (tmp_path / corpora.FILE).write_bytes(TEXT)
    train = Path(corpora.king_james(tmp_path).train)
    train.write_bytes(train.read_bytes()[1:])
    with pytest.raises(DataError, match="is altered") as caught:
        corpora.king_james(tmp_path)
    assert str(train) in caught.value.remedy


@pytest.mark.parametrize(
    ("window", "words"), [(gzip.compress(b"no line", mtime=0), "is altered"), (b"other", "gzip: ")]
)
def test_another_layout_of_the_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: bytes, words: str
) -> None:
    count = (corpora.FIRST_WINDOW - corpora.OFFSETS) // 4
    places = [corpora.FIRST_WINDOW + number * len(window) for number in range(count)]
    data = bytes(corpora.OFFSETS) + struct.pack(f">{count}I", *places) + window * (count - 1)
    (tmp_path / "usr" / "lib").mkdir(parents=True)
    (tmp_path / "usr" / "lib" / "bible.data").write_bytes(data)
    monkeypatch.setattr(corpora, "unpacked", lambda package, folder: tmp_path)
    monkeypatch.setattr(corpora, "MAGIC", b"")
    with pytest.raises(DataError, match="could not be fetched") as caught:
        corpora.king_james(tmp_path / "new")
    assert words in caught.value.where and "b'" not in caught.value.where


def test_a_package_that_apt_did_not_write_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "_run", lambda command, folder: None)
    with pytest.raises(FileNotFoundError, match="no file of any"):
        debian.unpacked("any", tmp_path)


def test_another_text_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / corpora.FILE).write_bytes(TEXT + b"more")
    with pytest.raises(DataError, match="could not be fetched") as caught:
        corpora.king_james(tmp_path)
    assert "is altered" in caught.value.where and "bible.data" in caught.value.where
    assert str(tmp_path / corpora.FILE) in caught.value.remedy
