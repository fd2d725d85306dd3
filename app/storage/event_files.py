"""Files of a run's events, and how they are read.

    <run>/events/<token>-<number>.jsonl               a batch of JSON lines, written by the driver of that token
    <run>/events/<token>-<first>-<last>.jsonl.gz      the same bytes of several batches, each a gzip member
    <run>/events/SUMMARY.json, BRIEF.json             what the events up to some batch fold to, see `summary`

Batches of a token are numbered from 0 without gaps and never change. A packed file is written whole before the batches
that it covers are deleted, so that each batch is always in at least one file. Of files that cover the same batch,
readers take it from one.
"""

from __future__ import annotations

import gzip
import re
import time
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from trainwright.core.events import Event, Noted, from_json
from trainwright.storage.store_errors import MissingFile

_READERS, _AHEAD_BYTES = 16, 64 << 20
_FEW = 4  # files that are quicker read one after the other than by threads of their own
_TRIES = 8  # to list again where a listed file is gone, which compaction does seldom
_NAME = re.compile(r"(\d+)-(\d+)(?:\.jsonl|-(\d+)\.jsonl\.gz)")
_PIECE_BYTES = 1 << 16
_LOST = "the events there are lost, training is not"
Covered = Mapping[int, int]
"""By token, the number of the first batch that is not covered."""


class Reads(Protocol):
    """What readers of events ask of a store."""

    def get(self, path: str) -> bytes:
        """A whole file; raises MissingFile and other StorageErrors."""

    def list(self, prefix: str) -> Iterable[tuple[str, int]]:
        """Paths below a prefix, with sizes in bytes; raises StorageError."""


class Adds(Reads, Protocol):
    """What `append` asks of a store."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a whole file unless there is one; raises StorageError."""


@dataclass(frozen=True, kw_only=True)
class EventFile:
    """A file with the batches `first` to `last`, both included, of the driver `token`."""

    path: str
    token: int
    first: int
    last: int
    packed: bool
    size_bytes: int


class Batch(NamedTuple):
    """The bytes of a batch, and where they were read."""

    path: str
    token: int
    number: int
    data: bytes
    error: str = ""


def folder_of(run: str) -> str:
    """Where a run's events are."""
    return f"{run}/events/"


def batch_path(run: str, token: int, number: int) -> str:
    """Path of one batch."""
    return f"{folder_of(run)}{token:08d}-{number:06d}.jsonl"


def packed_path(run: str, token: int, first: int, last: int) -> str:
    """Path of a packed file."""
    return f"{folder_of(run)}{token:08d}-{first:06d}-{last:06d}.jsonl.gz"


def find_files(store: Reads, run: str) -> list[EventFile]:
    """All event files of a run in order of (token, first batch), the one that covers most first. Raises StorageError.

    Files of other names are left out.
    """
    found = []
    for path, size_bytes in store.list(folder_of(run)):
        match = _NAME.fullmatch(path.rpartition("/")[2])
        if match:
            first, packed = int(match[2]), match[3] is not None
            last = int(match[3]) if packed else first
            found.append(
                EventFile(path=path, token=int(match[1]), first=first, last=last, packed=packed, size_bytes=size_bytes)
            )
    return sorted(found, key=lambda file: (file.token, file.first, -file.last, not file.packed))


def needed(files: Iterable[EventFile], covered: Covered) -> list[EventFile]:
    """The files that hold what is not covered, each batch in one of them only; `files` as of `find_files`."""
    found, upto = [], dict(covered)
    for file in files:
        if file.last >= upto.get(file.token, 0):
            found.append(file)
            upto[file.token] = file.last + 1
    return found


def pack(data: bytes) -> bytes:
    """A batch as a member of a packed file; packed files are joined by putting their bytes one after the other."""
    return gzip.compress(data, 1, mtime=0)  # level 6 saves 5 % of it and takes five times as long


def unpack(data: bytes) -> Iterator[bytes]:
    """The batches of a packed file. Raises ValueError after the last one before damage."""
    view, place = memoryview(data), 0
    while place < len(view):
        member, parts = zlib.decompressobj(31), list[bytes]()
        try:
            while not member.eof:
                if place >= len(view):
                    raise ValueError("the file is torn")
                piece = view[place : place + _PIECE_BYTES]
                parts.append(member.decompress(piece))
                place += len(piece) - len(member.unused_data)
        except zlib.error as error:
            raise ValueError(f"the file is damaged: {error}") from error
        yield b"".join(parts)


class EventReader:
    """Reads a run's events from storage, each of them once: call `read` again for what came since.

    Args:
        covered: batches that are not read.
    """

    def __init__(self, store: Reads, run: str, covered: Covered | None = None) -> None:
        self._store, self._run = store, run
        self.covered: dict[int, int] = dict(covered or {})

    def read(self) -> Iterator[Event]:
        """Events of the batches that are new, in order of (token, number of the batch).

        A batch that is torn, which the last one of a dead driver may be, gives the events before the tear and a
        Noted event that says so. Raises StorageError when the store cannot be read.
        """
        for batch in self.batches():
            yield from parse(batch)

    def batches(self) -> Iterator[Batch]:
        """The same as bytes. What a damaged packed file has lost is read from other files that have it still."""
        damaged: dict[EventFile, str] = {}
        for again in range(_TRIES):
            try:
                while (yield from self._pass(damaged)):
                    continue
                return
            except MissingFile:
                if again == _TRIES - 1:
                    raise

    def _pass(self, damaged: dict[EventFile, str]) -> Generator[Batch, None, bool]:
        """New batches from files that are not known to be damaged; True where one more of them is, and is known now."""
        sound = [file for file in find_files(self._store, self._run) if file not in damaged]
        for file, data in _fetched(self._store, needed(sound, self.covered)):
            yield from self._lost(damaged, file.token, file.first)
            try:
                yield from self._new(file, data)
            except ValueError as error:
                damaged[file] = str(error)
                return True
        yield from self._lost(damaged)
        return False

    def _new(self, file: EventFile, data: bytes) -> Iterator[Batch]:
        """Batches of one file that are not covered; they are from then on. Raises ValueError where it is damaged."""
        number = file.first
        for part in unpack(data) if file.packed else (data,):
            if number >= self.covered.get(file.token, 0):
                self.covered[file.token] = number + 1
                yield Batch(file.path, file.token, number, part)
            number += 1
        if number <= file.last:
            raise ValueError("the file is torn")

    def _lost(self, damaged: Mapping[EventFile, str], *upto: int) -> Iterator[Batch]:
        """What damaged files alone had, before a batch given as (token, number), or all of it."""
        for file, error in sorted(damaged.items(), key=lambda item: (item[0].token, item[0].first)):
            ahead = not upto or file.token < upto[0]
            stop = file.last + 1 if ahead else min(file.last + 1, upto[1] if file.token == upto[0] else 0)
            number = max(self.covered.get(file.token, 0), file.first)
            if number < stop:
                self.covered[file.token] = stop
                yield Batch(file.path, file.token, number, b"", error)


def _fetched(store: Reads, files: list[EventFile]) -> Iterator[tuple[EventFile, bytes]]:
    """Files with their bytes, in order; several are read at the same time, but not too many bytes."""
    if len(files) <= _FEW:
        yield from ((file, store.get(file.path)) for file in files)
        return
    with ThreadPoolExecutor(_READERS) as pool:
        place = 0
        while place < len(files):
            end, ahead_bytes = place, 0
            while end < len(files) and (end == place or ahead_bytes + files[end].size_bytes <= _AHEAD_BYTES):
                ahead_bytes += files[end].size_bytes
                end += 1
            some = files[place:end]
            yield from zip(some, pool.map(store.get, [file.path for file in some]), strict=True)
            place = end


def parse(batch: Batch) -> list[Event]:
    """Events of one batch, up to the first line that cannot be read."""
    events: list[Event] = []
    if batch.error:
        return [Noted(text=f"{batch.path} cannot be read from batch {batch.number} on: {batch.error}; {_LOST}")]
    for number, line in enumerate(batch.data.splitlines(), 1):
        try:
            events.append(from_json(line.decode()))
        except (ValueError, TypeError):
            time_s = events[-1].time_s if events else 0.0
            return [*events, Noted(time_s=time_s, text=f"{batch.path} cannot be read from line {number} on: {_LOST}")]
    return events


def read_events(store: Reads, run: str) -> list[Event]:
    """All events of a run, of all its drivers, in order; see `EventReader.read`."""
    return list(EventReader(store, run).read())


def append(store: Adds, run: str, event: Event) -> Event:
    """Add what came to light after a run ended to what its last driver told. Raises StorageError."""
    stamped = event if event.time_s else replace(event, time_s=time.time())
    line = f"{stamped.to_json()}\n".encode()
    while True:
        token, number = max(((file.token, file.last + 1) for file in find_files(store, run)), default=(0, 0))
        if not store.create(batch_path(run, token, number), line):
            continue  # another process was quicker
        packed = [file for file in find_files(store, run) if file.packed and file.token == token]
        if not any(file.first <= number <= file.last for file in packed):
            return stamped  # else another's event of this number was packed since, and counts in its place
