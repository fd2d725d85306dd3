"""WebDataset as a source: tar shards in which neighbouring members of one key make a sample."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import DataError
from trainwright.datasets.data_source import Arrays, Field
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.formats.file_system import RandomAccessFile, absolute_path
from trainwright.datasets.formats.scanned_files import (
    FileSource,
    FileSurvey,
    GroupLocation,
    RecordRange,
    TextTraits,
    group_boundaries,
)

_KEY = "__key__"
_NAME = re.compile(r"((?:.*/|)[^./][^./]*)\.([^/]+)")
_BLOCK = tarfile.BLOCKSIZE
_BUFFER_BYTES = 4 << 20
_DECODED = {"txt": "text", "cls": "class", "json": "json"}


class _Sample(NamedTuple):
    """Neighbouring members of one key: by extension, where each begins and how long it is; and all of their bytes."""

    key: str
    members: dict[str, tuple[int, int]]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class _TarFormat(TextTraits):
    """Tar files as WebDataset writes them. The key of a member is its path up to the first dot of its name."""

    name = "WebDataset"
    call = "webdataset"
    suffixes = (".tar",)

    def survey(self, data: RandomAccessFile) -> FileSurvey:
        """Walk over the headers."""
        traits: dict[str, str] = {_KEY: "text"}
        starts: list[int] = []
        stops: list[int] = []
        with io.BufferedReader(_RangeStream(data), _BUFFER_BYTES) as stream:
            for sample in _samples(stream, data.file, whole=True):
                starts.append(sample.start)
                stops.append(sample.stop)
                traits.update((name, _column_decoder(name)) for name in sample.members)
        cuts = group_boundaries(np.array(stops, dtype=np.int64) - min(starts, default=0), last=True)
        pieces = [RecordRange(starts[low], stops[high - 1], high - low) for low, high in pairwise([0, *cuts])]
        return FileSurvey(pieces=tuple(pieces), traits=traits)

    def merge(self, one: str, other: str) -> str | None:
        """An extension means the same everywhere."""
        return one if one == other else None

    def field(self, trait: str) -> Field:
        """What arrays of a column look like."""
        return Field(np.dtype(np.int64 if trait == "class" else object), ())

    def decode(self, head: bytes, body: bytes, traits: Mapping[str, str], place: GroupLocation) -> Arrays:
        """Columns of one group."""
        samples = list(_samples(io.BytesIO(body), place.at(), whole=False))
        return {name: _column(samples, body, name, trait, place) for name, trait in traits.items()}


def _column_decoder(name: str) -> str:
    """How the column of an extension is decoded: by the part behind its last dot."""
    return _DECODED.get(name.rpartition(".")[2], "bytes")


def _column(samples: list[_Sample], body: bytes, name: str, trait: str, place: GroupLocation) -> npt.NDArray[Any]:
    values: list[Any] = []
    for row, sample in enumerate(samples):
        if name == _KEY:
            values.append(sample.key)
            continue
        if name not in sample.members:
            raise DataError(
                f"the sample {sample.key!r} has no {name!r}",
                where=place.at(row, name),
                remedy="let the members of a sample stand together (tar --sort=name), or read other columns",
            )
        start, size = sample.members[name]
        try:
            values.append(_value(body[start : start + size], trait))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"the {name!r} of sample {sample.key!r} is no {trait}: {error}",
                where=place.at(row, name),
                remedy="write it anew, or read other columns",
            ) from error
    if trait == "class":
        return np.array(values, dtype=np.int64)
    return np.fromiter(values, dtype=object, count=len(values))


def _value(content: bytes, trait: str) -> Any:
    if trait == "text":
        return content.decode("utf-8")
    if trait == "json":
        return json.loads(content)
    if trait == "class":
        value = int(content)
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{value} has more than 64 bits")
        return value
    return content


def _samples(stream: IO[bytes], where: str, whole: bool) -> Iterator[_Sample]:
    """Samples in order. Raises DataError for a damaged header, and for a `whole` archive without an end."""
    sample: _Sample | None = None
    for member in _members(stream, where, whole):
        match = _NAME.fullmatch(member.name)
        if match is None or not member.isreg():
            continue
        key, extension = match.group(1), match.group(2).lower()
        if sample is not None and key != sample.key:
            yield sample
            sample = None
        sample = sample or _Sample(key, {}, member.offset, member.offset)
        if extension in sample.members:
            raise DataError(
                f"the sample {key!r} has two members {extension!r}", where=where, remedy="give every sample its own key"
            )
        sample.members[extension] = (member.offset_data, member.size)
        sample = sample._replace(stop=member.offset_data + -(-member.size // _BLOCK) * _BLOCK)
    if sample is not None:
        yield sample


def _members(stream: IO[bytes], where: str, whole: bool) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header
                yield member
            stream.seek(archive.offset)
            end = stream.read(_BLOCK)
    except tarfile.TarError as error:
        raise _damaged_archive_error(str(error), where) from error
    if end.strip(b"\0"):
        raise _damaged_archive_error(f"no header stands at byte {archive.offset}", where)
    if whole and not end:
        raise _damaged_archive_error("it has no end: it may be cut off", where)


def _damaged_archive_error(how: str, where: str) -> DataError:
    return DataError(f"the archive is damaged: {how}", where=where, remedy="write the shard anew, or leave it out")


class _RangeStream(io.RawIOBase):
    """Ranges as a binary file."""

    def __init__(self, data: RandomAccessFile) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._data.size_bytes}[whence]
        self._at = origin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._data.size_bytes)
        content = self._data.read(self._at, stop) if stop > self._at else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def webdataset(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Dataset:
    """Rows of tar shards as WebDataset writes them: the members of one key are a row, each extension is a column.

    `.txt` becomes text, `.cls` int64, `.json` Python objects; all else stays bytes, such as images for `decode_image`.
    The key is the column `__key__`.

    Args:
        path: a file, a folder or a glob; local or a URI that pyarrow.fs understands (`s3://`, `gs://`, `abfs://`).
        columns: read only these; by default all.
    """
    names = None if columns is None else tuple(columns)
    return Dataset(source=FileSource(path=absolute_path(path), format=_TarFormat(), columns=names))
