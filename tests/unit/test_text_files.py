"""Text files as documents: by line, paragraph and file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.errors import DataError
from trainwright.datasets.formats.text_formats import paragraph_ends, text

STORY = "one line\n\nsecond paragraph,\ntwo lines\n \n\n\nthird ünï\n"


def documents(path: Path, **how: Any) -> list[str]:
    dataset = text(path, **how)
    index = dataset.index()
    found = dataset.read(index, np.arange(index.rows))["text"].tolist()
    backwards = dataset.read(index, np.arange(index.rows)[::-1])["text"].tolist()
    assert backwards == found[::-1], "random access is sequential access"
    return list(found)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("line", ["one line", "second paragraph,", "two lines", "third ünï"]),
        ("paragraph", ["one line", "second paragraph,\ntwo lines", "third ünï"]),
        ("file", [STORY]),
    ],
)
def test_a_document_is_what_was_asked_for(tmp_path: Path, by: Any, expected: list[str]) -> None:
    (tmp_path / "a.txt").write_text(STORY)
    (tmp_path / "empty.txt").write_text("\n \n")
    assert documents(tmp_path, by=by) == expected


def test_windows_line_ends_and_a_byte_order_mark_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\r\ntwo\r\nthree".encode())
    assert documents(tmp_path) == ["one", "two", "three"]
    assert documents(tmp_path, by="paragraph") == ["one", "two\r\nthree"]


def test_many_lines_are_cut_into_groups_that_are_read_alone(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(10_000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    assert len(text(tmp_path).index().groups) > 1
    assert documents(tmp_path) == lines


@given(st.lists(st.text("ab\n \t", max_size=6), max_size=8))
def test_paragraph_ends_do_not_depend_on_how_much_was_read(parts: list[str]) -> None:
    data = "\n\n".join(parts).encode()
    whole = paragraph_ends(data, True).tolist()
    for size in range(len(data)):
        assert set(paragraph_ends(data[:size], False).tolist()) <= set(whole)


def test_text_becomes_sequences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(STORY)
    packed = text(tmp_path).tokenize().pack(16)
    index = packed.index()
    assert packed.read(index, [0])["tokens"].shape == (1, 16)
    assert bytes(packed.read(index, [0])["tokens"][0][:8].tolist()).decode() == "one line"


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="by='word' is not a way"):
        text(tmp_path, by="word")  # type: ignore[arg-type]
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(DataError, match="not UTF-8") as caught:
        text(tmp_path).index()
    assert "a.txt, row group 0" in str(caught.value)
