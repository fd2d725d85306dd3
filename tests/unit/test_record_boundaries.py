"""Cutting text into groups of whole records: at every real record end, however the file was read."""

from __future__ import annotations

import csv
import io
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import DataError
from trainwright.datasets.formats import scanned_files
from trainwright.datasets.formats.file_system import RandomAccessFile
from trainwright.datasets.formats.scanned_files import group_boundaries, line_ends, whole_records
from trainwright.datasets.formats.text_formats import csv_record_ends

QUOTED = st.text(alphabet='ab",;\n\r é', max_size=8).map(lambda text: '"' + text.replace('"', '""') + '"')
PLAIN = st.text(alphabet='ab" é', max_size=8).filter(lambda text: not text.startswith('"'))
RECORDS = st.lists(st.lists(QUOTED | PLAIN, min_size=1, max_size=4), min_size=1, max_size=12)


def in_memory(file: str, content: bytes) -> RandomAccessFile:
    return RandomAccessFile(file, lambda: pa.BufferReader(content))


def lines(records: list[list[str]], delimiter: str, end: str) -> list[bytes]:
    return [(delimiter.join(fields) + end).encode() for fields in records]


@given(RECORDS, st.sampled_from(",;\t|"), st.sampled_from(["\n", "\r\n"]))
def test_records_end_where_they_were_written(records: list[list[str]], delimiter: str, end: str) -> None:
    plain = [[field.replace(delimiter, "") if field[:1] != '"' else field for field in record] for record in records]
    written = lines(plain, delimiter, end)
    ends = csv_record_ends(b"".join(written), True, delimiter)
    assert ends.tolist() == np.cumsum([len(line) for line in written]).tolist()


@given(st.lists(st.lists(st.text(max_size=6), min_size=2, max_size=3), min_size=1, max_size=8))
def test_what_the_standard_library_writes_is_cut_into_its_rows(rows: list[list[str]]) -> None:
    stream = io.StringIO(newline="")
    expected = []
    for row in rows:
        csv.writer(stream).writerow(row)
        expected.append(len(stream.getvalue().encode()))
    assert csv_record_ends(stream.getvalue().encode(), True).tolist() == expected


@given(RECORDS, st.data())
def test_a_part_of_a_file_gives_the_same_ends_as_far_as_they_are_sure(records: list[list[str]], data: Any) -> None:
    whole = b"".join(lines(records, ",", "\n"))
    stop = data.draw(st.integers(0, len(whole)))
    ends = csv_record_ends(whole, True)
    part = csv_record_ends(whole[:stop], False)
    assert part.tolist() == ends[: len(part)].tolist()
    assert len(part) >= np.searchsorted(ends, stop, "right") - 1


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 9), st.integers(1, 200))
def test_groups_are_bounded_and_leave_nothing_out(sizes: list[int], rows: int, size_bytes: int) -> None:
    ends = np.cumsum(sizes, dtype=np.int64)
    cuts = group_boundaries(ends, True, rows, size_bytes)
    assert cuts == sorted(set(cuts)) and (cuts[-1:] or [0]) == [len(sizes)]
    for low, high in pairwise([0, *cuts]):
        assert high - low <= rows
        assert sum(sizes[low : high - 1]) < size_bytes
        full = high - low == rows or sum(sizes[low:high]) >= size_bytes
        assert full or high == len(sizes)
    early = group_boundaries(ends, False, rows, size_bytes)
    assert early == cuts[: len(early)] and len(cuts) - len(early) <= 1


@settings(max_examples=60)
@given(RECORDS, st.integers(1, 40), st.integers(1, 4), st.integers(1, 60))
def test_groups_do_not_depend_on_how_the_file_was_read(
    records: list[list[str]], chunk: int, rows: int, size_bytes: int
) -> None:
    content = b"".join(lines(records, ",", "\n"))

    def pieces(chunk_bytes: int) -> list[tuple[int, bytes]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scanned_files, "CHUNK_BYTES", chunk_bytes)
            patch.setattr(scanned_files.group_boundaries, "__defaults__", (rows, size_bytes))
            return list(whole_records(in_memory("f", content), 0, csv_record_ends))

    found = pieces(chunk)
    assert found == pieces(1 << 20)
    assert b"".join(body for _, body in found) == content
    assert [offset for offset, _ in found] == [0, *np.cumsum([len(body) for _, body in found])][:-1]


def test_a_last_line_without_a_newline_counts() -> None:
    assert line_ends(b"a\nbc", True).tolist() == [2, 4]
    assert line_ends(b"a\nbc", False).tolist() == [2]
    assert line_ends(b"", True).tolist() == []
    assert csv_record_ends(b'a,"b\n"\nc', True).tolist() == [7, 8]


@pytest.mark.parametrize(
    ("content", "limit", "message", "row"),
    [
        (b'a,b\nc,"d\ne,f\n', 1 << 20, "begins at byte 4 of 13 does not end before the file does", 1),
        (b"a\n" * 3 + b"b" * 100 + b"\n", 60, "begins at byte 6 of 107 does not end within", 3),
    ],
)
def test_a_record_without_an_end_is_named(
    content: bytes, limit: int, message: str, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanned_files, "CHUNK_BYTES", 16)
    with pytest.raises(DataError, match=message) as caught:
        list(whole_records(in_memory("x.csv", content), 0, csv_record_ends, limit))
    assert caught.value.where == f"x.csv, row {row}"
    assert "quotation mark" in caught.value.remedy
