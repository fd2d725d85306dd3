"""Plain text as a source: a document for each line, paragraph or file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainwright.core.errors import DataError
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.arrow_columns import Arrays, Field
from trainwright.datasets.formats.byte_ranges import Ranges
from trainwright.datasets.formats.paths import absolute
from trainwright.datasets.formats.record_boundaries import Offsets, line_ends, whole_records
from trainwright.datasets.formats.scanned_files import FileSource, Piece, Place, PlainTraits, Survey

_BREAK = re.compile(rb"\n[ \t\r]*\n\s*(?=\S)")  # what follows must have begun, or more of the break may come
_DOCUMENTS = {"line": re.compile(r"\n"), "paragraph": re.compile(r"\n[ \t\r]*\n\s*", re.ASCII), "file": None}


@dataclass(frozen=True, kw_only=True)
class TextFormat(PlainTraits):
    """UTF-8 text. A document is a line, what stands between blank lines, or a whole file; blank ones are left out."""

    by: Literal["line", "paragraph", "file"] = "line"
    name = "text"
    call = "text"
    suffixes = (".txt", ".text", ".md")

    def survey(self, data: Ranges) -> Survey:
        """Cut the file after its documents and count them."""
        pieces: list[Piece] = []
        for number, (offset, body) in enumerate(self._ranges(data)):
            rows = len(self._documents(body, Place(file=data.file, group=number, row=0)))
            if rows:
                pieces.append(Piece(offset, offset + len(body), rows))
        return Survey(pieces=tuple(pieces), traits={"text": "str"})

    def merge(self, one: str, other: str) -> str:
        """There is one kind of text."""
        return one

    def field(self, trait: str) -> Field:
        """Text is an object."""
        return Field(np.dtype(object), ())

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, Any], place: Place) -> Arrays:
        """The documents of one group."""
        documents = self._documents(body, place)
        return {name: np.fromiter(documents, dtype=object, count=len(documents)) for name in traits}

    def _ranges(self, data: Ranges) -> Iterator[tuple[int, bytes]]:
        if self.by == "file":
            return iter([(0, data.read(0, data.size_bytes))] if data.size_bytes else [])
        return whole_records(data, 0, line_ends if self.by == "line" else paragraph_ends)

    def _documents(self, body: bytes, place: Place) -> list[str]:
        try:
            text = body.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise DataError(
                f"the text is not UTF-8: {error.reason}",
                where=f"{place.at()}, byte {error.start} of the group",
                remedy="write the file as UTF-8",
            ) from error
        between = _DOCUMENTS[self.by]
        parts = [text] if between is None else between.split(text)
        return [part.rstrip("\r\n") if between else part for part in parts if part and not part.isspace()]


def paragraph_ends(data: bytes, last: bool) -> Offsets:
    """Where paragraphs end: after the blank lines behind each, and at the end of the file."""
    ends = [found.end() for found in _BREAK.finditer(data)]
    return np.array([*ends, len(data)] if last and data else ends, dtype=np.int64)


def text(path: str | os.PathLike[str], by: Literal["line", "paragraph", "file"] = "line") -> Dataset:
    """Documents of UTF-8 text files, in the column `text`; `.tokenize()` and `.pack(length)` make sequences of them.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `abfs://`).
        by: what a document is: each line, each paragraph (blank lines stand between them), or each file as a whole.

    Raises:
        DataError: `by` is none of these.
    """
    if by not in _DOCUMENTS:
        raise DataError(f"by={by!r} is no way to cut text", remedy=f"give one of {', '.join(_DOCUMENTS)}")
    return Dataset(source=FileSource(path=absolute(path), format=TextFormat(by=by)))
