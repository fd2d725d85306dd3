"""Event files of a run: reading, appending, compaction and stored summaries.

    <run>/events/<token>-<number>.jsonl               a batch of JSON lines, written by the driver of that token
    <run>/events/<token>-<first>-<last>.jsonl.gz      a packed file: the bytes of several batches, each a gzip member
    <run>/events/SUMMARY.json, BRIEF.json             a `RunSummary` of the events up to some batch of each driver

Batches of a token are numbered from 0 without gaps and never change. A packed file is written before the batches that
it covers are deleted, so each batch is always in at least one file. Readers take a batch from one of the files.

`BRIEF.json` holds only what a list of runs shows. Both summaries may be old, torn or missing: readers then add the
newer events, or all. So a killed driver does no harm, nor does a fenced one that overwrites a newer summary.
"""

from __future__ import annotations

import gzip
import json
import re
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from trainwright.core.events import Event, Formed, Noted, from_json
from trainwright.storage.object_store import Store
from trainwright.storage.run_summary import RunSummary
from trainwright.storage.store_errors import MissingFile

_READERS, _AHEAD_BYTES = 16, 64 << 20
_FEW_FILES = 4  # so many files are read faster without threads
_TRIES = 8  # compaction deletes a listed file before it is read; this is rare
_NAME = re.compile(r"(\d+)-(\d+)(?:\.jsonl|-(\d+)\.jsonl\.gz)")
_PIECE_BYTES = 1 << 16
_LOST_NOTE = "these events are lost; training is not affected"
_CoveredBatches = Mapping[int, int]
"""By token, the number of the first batch that was not read yet."""


@dataclass(frozen=True, kw_only=True)
class _EventFile:
    """A file with the batches `first` to `last`, `last` included, of the driver `token`."""

    path: str
    token: int
    first: int
    last: int
    packed: bool
    size_bytes: int


class _EventBatch(NamedTuple):
    """The bytes of a batch and the file that it was read from; `error` where it is lost."""

    path: str
    token: int
    number: int
    data: bytes
    error: str = ""


def events_folder(run: str) -> str:
    """Return the folder of a run's events."""
    return f"{run}/events/"


def batch_path(run: str, token: int, number: int) -> str:
    """Return the path of one batch."""
    return f"{events_folder(run)}{token:08d}-{number:06d}.jsonl"


def find_event_files(store: Store, run: str) -> list[_EventFile]:
    """List the event files of a run by token and first batch, those with most batches first.

    Files with other names are ignored. Raises StorageError.
    """
    files = []
    for path, size_bytes in store.list(events_folder(run)):
        match = _NAME.fullmatch(path.rpartition("/")[2])
        if match:
            first, packed = int(match[2]), match[3] is not None
            last = int(match[3]) if packed else first
            files.append(
                _EventFile(path=path, token=int(match[1]), first=first, last=last, packed=packed, size_bytes=size_bytes)
            )
    return sorted(files, key=lambda file: (file.token, file.first, -file.last, not file.packed))


def _files_to_read(files: Iterable[_EventFile], covered: _CoveredBatches) -> list[_EventFile]:
    """Return the files needed for the batches not read yet, each batch in one of them; `files` as listed."""
    needed, next_batches = [], dict(covered)
    for file in files:
        if file.last >= next_batches.get(file.token, 0):
            needed.append(file)
            next_batches[file.token] = file.last + 1
    return needed


def _gzip_members(data: bytes) -> Iterator[bytes]:
    """Yield the batches of a packed file. Raises ValueError at the first damaged one."""
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
    """Reads each event of a run once, without the batches `covered`. Call `read` again for newer events."""

    def __init__(self, store: Store, run: str, covered: _CoveredBatches | None = None) -> None:
        self._store, self._run = store, run
        self.covered: dict[int, int] = dict(covered or {})

    def read(self) -> Iterator[Event]:
        """Yield the events of new batches, by token and batch number.

        A torn batch (the last one of a killed driver may be torn) yields the events before the tear and a Noted event
        that reports it. Raises StorageError when the store cannot be read.
        """
        for batch in self.batches():
            yield from _parse_batch(batch)

    def batches(self) -> Iterator[_EventBatch]:
        """Yield new batches as bytes. Batches of a damaged packed file are read from other files where possible."""
        damaged: dict[_EventFile, str] = {}
        for again in range(_TRIES):
            try:
                while (yield from self._pass(damaged)):
                    continue
                return
            except MissingFile:
                if again == _TRIES - 1:
                    raise

    def _pass(self, damaged: dict[_EventFile, str]) -> Generator[_EventBatch, None, bool]:
        """Yield new batches of the files not known to be damaged. Returns True where another damaged file was found."""
        sound = [file for file in find_event_files(self._store, self._run) if file not in damaged]
        for file, data in _read_files(self._store, _files_to_read(sound, self.covered)):
            yield from self._lost(damaged, file.token, file.first)
            try:
                yield from self._new(file, data)
            except ValueError as error:
                damaged[file] = str(error)
                return True
        yield from self._lost(damaged)
        return False

    def _new(self, file: _EventFile, data: bytes) -> Iterator[_EventBatch]:
        """Yield the new batches of one file and mark them as read. Raises ValueError where the file is damaged."""
        number = file.first
        for part in _gzip_members(data) if file.packed else (data,):
            if number >= self.covered.get(file.token, 0):
                self.covered[file.token] = number + 1
                yield _EventBatch(file.path, file.token, number, part)
            number += 1
        if number <= file.last:
            raise ValueError("the file is torn")

    def _lost(self, damaged: Mapping[_EventFile, str], *upto: int) -> Iterator[_EventBatch]:
        """Yield errors for batches that only damaged files have, up to a batch given as (token, number), or all."""
        for file, error in sorted(damaged.items(), key=lambda item: (item[0].token, item[0].first)):
            ahead = not upto or file.token < upto[0]
            stop = file.last + 1 if ahead else min(file.last + 1, upto[1] if file.token == upto[0] else 0)
            number = max(self.covered.get(file.token, 0), file.first)
            if number < stop:
                self.covered[file.token] = stop
                yield _EventBatch(file.path, file.token, number, b"", error)


def _read_files(store: Store, files: list[_EventFile]) -> Iterator[tuple[_EventFile, bytes]]:
    """Yield files with their bytes, in order. Several are read at the same time, within a limit of bytes."""
    if len(files) <= _FEW_FILES:
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


def _parse_batch(batch: _EventBatch) -> list[Event]:
    """Return the events of one batch, up to the first unreadable line."""
    events: list[Event] = []
    if batch.error:
        return [Noted(text=f"{batch.path} cannot be read from batch {batch.number} on: {batch.error}; {_LOST_NOTE}")]
    for number, line in enumerate(batch.data.splitlines(), 1):
        try:
            events.append(from_json(line.decode()))
        except (ValueError, TypeError):
            time_s = events[-1].time_s if events else 0.0
            return [
                *events,
                Noted(time_s=time_s, text=f"{batch.path} cannot be read from line {number} on: {_LOST_NOTE}"),
            ]
    return events


def read_events(store: Store, run: str) -> list[Event]:
    """Return all events of all drivers of a run, in order; see `EventReader.read`."""
    return list(EventReader(store, run).read())


def append_event(store: Store, run: str, event: Event) -> Event:
    """Append an event to a run that has ended, after the events of its last driver. Raises StorageError."""
    stamped = event if event.time_s else replace(event, time_s=time.time())
    line = f"{stamped.to_json()}\n".encode()
    while True:
        token, number = max(((file.token, file.last + 1) for file in find_event_files(store, run)), default=(0, 0))
        if not store.create(batch_path(run, token, number), line):
            continue  # another process took this number
        packed = [file for file in find_event_files(store, run) if file.packed and file.token == token]
        if not any(file.first <= number <= file.last for file in packed):
            return stamped  # else another process packed an event of this number, which counts


# --- Summaries of a run's events, and their compaction ----------------------------------------------------------------


SUMMARY_FILE, BRIEF_FILE = "SUMMARY.json", "BRIEF.json"
_PACKED_BYTES = 8 << 20  # limit of a packed file; only a single batch may be larger
_GRACE_S = 60.0  # readers that listed a file have this long to read it


class _StoredSummary(NamedTuple):
    """A summary, and by token the first batch that is not part of it."""

    summary: RunSummary
    covered: Mapping[int, int]


def read_run_summary(store: Store, run: str) -> RunSummary:
    """Return the summary of all events of a run. Raises StorageError."""
    return SummaryReader(store, run).read()


class SummaryReader:
    """The summary of a run's events. Call `read` again to add newer ones: each event is read once.

    Attributes:
        covered: by token, the number of the first batch that is not part of the summary.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._summary: RunSummary | None = None
        self.covered: Mapping[int, int] = {}

    def read(self) -> RunSummary:
        """Return the summary of all events, the same object at each call. Raises StorageError."""
        if self._summary is None:
            self._summary, self.covered = _stored(self._store, self._run, SUMMARY_FILE)
        reader = EventReader(self._store, self._run, self.covered)
        newest = max(self.covered, default=0)
        try:
            for batch in reader.batches():
                if batch.token < newest:  # a late batch of an older driver belongs before later ones: from the first
                    self._summary, self.covered = RunSummary(), {}
                    return self.read()
                for event in _parse_batch(batch):
                    self._summary.add(event)
        except BaseException:
            self._summary, self.covered = None, {}  # it may have a part of a batch
            raise
        self.covered = reader.covered
        return self._summary


def read_brief_summary(store: Store, run: str) -> RunSummary:
    """Return the summary of a run with at least what a list of runs shows. Raises StorageError."""
    brief = _stored(store, run, BRIEF_FILE)
    if not brief.covered:
        return read_run_summary(store, run)
    newest, exact_from = max(brief.covered), brief.summary.exact_from
    for batch in EventReader(store, run, brief.covered).batches():
        for event in _parse_batch(batch):
            if batch.token < newest or (isinstance(event, Formed) and event.step < exact_from):
                return read_run_summary(store, run)
            brief.summary.add(event)
    return brief.summary


def _stored(store: Store, run: str, name: str) -> _StoredSummary:
    """Read a stored summary; an empty one where there is none or it cannot be used."""
    try:
        facts = json.loads(store.get(events_folder(run) + name))
        covered = {int(token): int(number) for token, number in facts["covered"].items()}
        return _StoredSummary(RunSummary.of(facts["folded"]), covered)
    except (MissingFile, ValueError, TypeError, KeyError, AttributeError):
        return _StoredSummary(RunSummary(), {})


class EventCompactor:
    """Packs the event batches of a run into few files, and stores the summaries.

    A new packed file includes the preceding ones that are not larger. So the number of files, and how often each byte
    is rewritten, grow with the logarithm of the number of batches. Covered files are deleted a minute later.
    """

    def __init__(self, store: Store, run: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._doomed: dict[str, float] = {}  # covered files, and when they were seen to be
        self._sound: set[str] = set()  # packed files that this process has written or read to the end

    def compact(self) -> None:
        """Pack, store the summaries, delete. Raises StorageError, after which all events can still be read."""
        files = _files_to_read(self._trusted(find_event_files(self._store, self._run)), {})
        loose = enumerate(file for file in files if not file.packed)
        for (token, _), run in groupby(loose, lambda item: (item[1].token, item[1].first - item[0])):
            self._pack([file for _, file in run], [file for file in files if file.packed and file.token == token])
        reader = SummaryReader(self._store, self._run)
        summary, covered = reader.read(), reader.covered
        for name, part in ((SUMMARY_FILE, summary), (BRIEF_FILE, summary.brief)):
            summary_file = {"covered": covered, "folded": part.facts()}
            self._store.put(events_folder(self._run) + name, json.dumps(summary_file, separators=(",", ":")).encode())
        self._delete()

    def _pack(self, loose: Sequence[_EventFile], packed: Sequence[_EventFile]) -> None:
        """Pack consecutive batches, and the packed files directly before them, into few files."""
        token, first, parts, size_bytes = loose[0].token, loose[0].first, list[bytes](), 0
        for file in loose:
            # One gzip member a batch, so that packed files can be joined. Level 6 saves 5 % in five times the time.
            parts.append(gzip.compress(self._store.get(file.path), 1, mtime=0))
            size_bytes += len(parts[-1])
            if size_bytes >= _PACKED_BYTES or file is loose[-1]:
                for older in reversed(packed):
                    room = older.size_bytes <= min(size_bytes, _PACKED_BYTES - size_bytes)
                    if older.last + 1 != first or not room or (data := self._whole(older)) is None:
                        break
                    parts.insert(0, data)
                    first, size_bytes = older.first, size_bytes + len(data)
                path = f"{events_folder(self._run)}{token:08d}-{first:06d}-{file.last:06d}.jsonl.gz"
                self._store.put(path, b"".join(parts))
                self._sound.add(path)
                first, parts, size_bytes = file.last + 1, [], 0

    def _trusted(self, files: Sequence[_EventFile]) -> list[_EventFile]:
        """Leave out damaged files whose batches others may still have: a power cut tears the last write."""
        return [file for file in files if not (file.packed and self._is_doubtful(file, files))]

    def _is_doubtful(self, file: _EventFile, files: Sequence[_EventFile]) -> bool:
        shared = any(_overlap(file, other) for other in files if other is not file)
        return shared and file.path not in self._sound and self._whole(file) is None

    def _whole(self, file: _EventFile) -> bytes | None:
        """Return a packed file's bytes; None where they are damaged, so that the damage is not copied."""
        data = self._store.get(file.path)
        try:
            if sum(1 for _ in _gzip_members(data)) != file.last - file.first + 1:
                return None
        except ValueError:
            return None
        self._sound.add(file.path)
        return data

    def _delete(self) -> None:
        files, now_s = find_event_files(self._store, self._run), self._clock()
        trusted = self._trusted(files)
        needed = _files_to_read(trusted, {})
        spared = {file.path for file in needed} | {
            file.path for file in {*files} - {*trusted} if not any(_contains(other, file) for other in needed)
        }
        covered = [file.path for file in files if file.path not in spared]
        self._doomed = {path: self._doomed.get(path, now_s) for path in covered}
        self._store.delete([path for path, seen_s in self._doomed.items() if now_s - seen_s >= _GRACE_S])


def _overlap(file: _EventFile, other: _EventFile) -> bool:
    """Return whether two files have a batch in common."""
    return other.token == file.token and other.first <= file.last and other.last >= file.first


def _contains(file: _EventFile, other: _EventFile) -> bool:
    """Return whether a file has all batches of another."""
    return other.token == file.token and file.first <= other.first and file.last >= other.last
