"""Cutting files that have no index into ranges of whole records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError
from trainwright.datasets.formats.byte_ranges import Ranges

GROUP_ROWS, GROUP_BYTES = 4096, 8 << 20
RECORD_BYTES = 256 << 20
CHUNK_BYTES = 8 << 20

Offsets = npt.NDArray[np.int64]
Ends = Callable[[bytes, bool], Offsets]
"""ends(data, last): where the records end in data that begins with a record, ascending, only whole records; `last`
says that the file ends with the data."""


def cut(ends: Offsets, last: bool, rows: int = GROUP_ROWS, size_bytes: int = GROUP_BYTES) -> list[int]:
    """Behind which records to cut data that begins with one: `rows` at a time, or fewer that reach `size_bytes`.

    Args:
        ends: where each record ends, ascending.
        last: these are all. Otherwise cuts that depend on what follows are left open, so that the cuts do not depend on
            how much of a file was looked at together.
        rows: of a group.
        size_bytes: of a group.

    Returns:
        How many records stand before each cut, ascending.
    """
    cuts: list[int] = []
    record = low = 0
    while record < len(ends):
        index = min(record + rows - 1, int(np.searchsorted(ends, low + size_bytes)))
        if index >= len(ends):
            if not last:
                break
            index = len(ends) - 1
        low, record = int(ends[index]), index + 1
        cuts.append(record)
    return cuts


def whole_records(data: Ranges, start: int, ends: Ends, limit_bytes: int = RECORD_BYTES) -> Iterator[tuple[int, bytes]]:
    """Ranges of whole records with the byte where each begins, in the memory of two ranges and a chunk.

    Args:
        data: the file.
        start: where its first record begins.
        ends: finds records.
        limit_bytes: no record is longer.

    Raises:
        DataError: a record is longer, or is not whole at the end of the file.
    """
    offset = position = start
    rest = b""
    records = 0
    while position < data.size_bytes:
        after = min(position + CHUNK_BYTES, data.size_bytes)
        rest += data.read(position, after)
        position, low = after, 0
        last = position == data.size_bytes
        found = ends(rest, last)
        cuts = cut(found, last)
        for high in found[np.array(cuts, dtype=np.int64) - 1].tolist():
            yield offset + low, rest[low:high]
            low = high
        unfinished = int(found[-1]) if len(found) else 0
        if (last and unfinished < len(rest)) or len(rest) - unfinished > limit_bytes:
            raise _no_end(data, offset + unfinished, records + len(found), limit_bytes, last)
        records += cuts[-1] if cuts else 0
        offset, rest = offset + low, rest[low:]


def line_ends(data: bytes, last: bool) -> Offsets:
    """Ends of lines, the newline included; at the end of a file it may be missing."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")).astype(np.int64) + 1
    if last and data and not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    return ends


def _no_end(data: Ranges, offset: int, row: int, limit_bytes: int, last: bool) -> DataError:
    within = "before the file does" if last else f"within {limit_bytes >> 20} MiB"
    return DataError(
        f"the row that begins at byte {offset} of {data.size_bytes} does not end {within}",
        where=f"{data.file}, row {row}",
        remedy="the file may be cut off, or a quotation mark not closed: write it anew, or leave it out",
    )
