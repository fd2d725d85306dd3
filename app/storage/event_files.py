"""Files of a run's events, and how they are read.

    <run>/events/<token>-<number>.jsonl               a batch of JSON lines, written by the driver of that token
    <run>/events/<token>-<first>-<last>.jsonl.gz      the same bytes of several batches, each a gzip member
    <run>/events/SUMMARY.json, BRIEF.json             what the events up to some batch fold to, see `summary`

Batches of a token are numbered from 0 without gaps and never change. A packed file is written whole before the batches
that it covers are deleted, so that each batch is always in at least one file. Of files that cover the same batch,
readers take it from one.

`SUMMARY.json` holds what the events up to some batch of each driver fold to, `BRIEF.json` the little of it that a list
of runs shows. Both may be old, torn or missing: readers fold what came since, or all. So neither a driver that is
killed at any moment nor one that was fenced and writes an old summary over a newer one does harm.
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
from typing import NamedTuple

from trainwright.core.events import Event, Formed, Noted, from_json
from trainwright.storage.object_store import Store
from trainwright.storage.run_summary import RunSummary
from trainwright.storage.store_errors import MissingFile

_READERS, _AHEAD_BYTES = 16, 64 << 20
_FEW_FILES = 4  # files that are quicker read one after the other than by threads of their own
_TRIES = 8  # to list again where a listed file is gone, which compaction does seldom
_NAME = re.compile(r"(\d+)-(\d+)(?:\.jsonl|-(\d+)\.jsonl\.gz)")
_PIECE_BYTES = 1 << 16
_LOST_NOTE = "the events there are lost, training is not"
_CoveredBatches = Mapping[int, int]
"""By token, the number of the first batch that is not covered."""


@dataclass(frozen=True, kw_only=True)
class _EventFile:
    """A file with the batches `first` to `last`, both included, of the driver `token`."""

    path: str
    token: int
    first: int
    last: int
    packed: bool
    size_bytes: int


class _EventBatch(NamedTuple):
    """The bytes of a batch, and where they were read."""

    path: str
    token: int
    number: int
    data: bytes
    error: str = ""


def events_folder(run: str) -> str:
    """Where a run's events are."""
    return f"{run}/events/"


def batch_path(run: str, token: int, number: int) -> str:
    """Path of one batch."""
    return f"{events_folder(run)}{token:08d}-{number:06d}.jsonl"


def _packed_path(run: str, token: int, first: int, last: int) -> str:
    """Path of a packed file."""
    return f"{events_folder(run)}{token:08d}-{first:06d}-{last:06d}.jsonl.gz"


def find_event_files(store: Store, run: str) -> list[_EventFile]:
    """All event files of a run in order of (token, first batch), the one that covers most first. Raises StorageError.

    Files of other names are left out.
    """
    found = []
    for path, size_bytes in store.list(events_folder(run)):
        match = _NAME.fullmatch(path.rpartition("/")[2])
        if match:
            first, packed = int(match[2]), match[3] is not None
            last = int(match[3]) if packed else first
            found.append(
                _EventFile(path=path, token=int(match[1]), first=first, last=last, packed=packed, size_bytes=size_bytes)
            )
    return sorted(found, key=lambda file: (file.token, file.first, -file.last, not file.packed))


def _files_to_read(files: Iterable[_EventFile], covered: _CoveredBatches) -> list[_EventFile]:
    """The files that hold what is not covered, each batch in one of them only; `files` as of `find_event_files`."""
    found, upto = [], dict(covered)
    for file in files:
        if file.last >= upto.get(file.token, 0):
            found.append(file)
            upto[file.token] = file.last + 1
    return found


def _gzip_member(data: bytes) -> bytes:
    """A batch as a member of a packed file; packed files are joined by putting their bytes one after the other."""
    return gzip.compress(data, 1, mtime=0)  # level 6 saves 5 % of it and takes five times as long


def _gzip_members(data: bytes) -> Iterator[bytes]:
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

    def __init__(self, store: Store, run: str, covered: _CoveredBatches | None = None) -> None:
        self._store, self._run = store, run
        self.covered: dict[int, int] = dict(covered or {})

    def read(self) -> Iterator[Event]:
        """Events of the batches that are new, in order of (token, number of the batch).

        A batch that is torn, which the last one of a dead driver may be, gives the events before the tear and a
        Noted event that says so. Raises StorageError when the store cannot be read.
        """
        for batch in self.batches():
            yield from _parse_batch(batch)

    def batches(self) -> Iterator[_EventBatch]:
        """The same as bytes. What a damaged packed file has lost is read from other files that have it still."""
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
        """New batches from files that are not known to be damaged; True where one more of them is, and is known now."""
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
        """Batches of one file that are not covered; they are from then on. Raises ValueError where it is damaged."""
        number = file.first
        for part in _gzip_members(data) if file.packed else (data,):
            if number >= self.covered.get(file.token, 0):
                self.covered[file.token] = number + 1
                yield _EventBatch(file.path, file.token, number, part)
            number += 1
        if number <= file.last:
            raise ValueError("the file is torn")

    def _lost(self, damaged: Mapping[_EventFile, str], *upto: int) -> Iterator[_EventBatch]:
        """What damaged files alone had, before a batch given as (token, number), or all of it."""
        for file, error in sorted(damaged.items(), key=lambda item: (item[0].token, item[0].first)):
            ahead = not upto or file.token < upto[0]
            stop = file.last + 1 if ahead else min(file.last + 1, upto[1] if file.token == upto[0] else 0)
            number = max(self.covered.get(file.token, 0), file.first)
            if number < stop:
                self.covered[file.token] = stop
                yield _EventBatch(file.path, file.token, number, b"", error)


def _read_files(store: Store, files: list[_EventFile]) -> Iterator[tuple[_EventFile, bytes]]:
    """Files with their bytes, in order; several are read at the same time, but not too many bytes."""
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
    """Events of one batch, up to the first line that cannot be read."""
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
    """All events of a run, of all its drivers, in order; see `EventReader.read`."""
    return list(EventReader(store, run).read())


def append_event(store: Store, run: str, event: Event) -> Event:
    """Add what came to light after a run ended to what its last driver told. Raises StorageError."""
    stamped = event if event.time_s else replace(event, time_s=time.time())
    line = f"{stamped.to_json()}\n".encode()
    while True:
        token, number = max(((file.token, file.last + 1) for file in find_event_files(store, run)), default=(0, 0))
        if not store.create(batch_path(run, token, number), line):
            continue  # another process was quicker
        packed = [file for file in find_event_files(store, run) if file.packed and file.token == token]
        if not any(file.first <= number <= file.last for file in packed):
            return stamped  # else another's event of this number was packed since, and counts in its place


# --- Summaries of a run's events, and their compaction ----------------------------------------------------------------


SUMMARY_FILE, BRIEF_FILE = "SUMMARY.json", "BRIEF.json"
_PACKED_BYTES = 8 << 20  # the most that a packed file has, but for a single batch that has more
_GRACE_S = 60.0  # for readers that have listed a file to read it


class _StoredSummary(NamedTuple):
    """What events fold to, and by token the first batch that is not in it."""

    folding: RunSummary
    covered: Mapping[int, int]


def read_run_summary(store: Store, run: str) -> RunSummary:
    """What all events of a run fold to. Raises StorageError."""
    return _read_summary(store, run).folding


def _read_summary(store: Store, run: str) -> _StoredSummary:
    """The same, and which batches that is. Raises StorageError."""
    stored = _stored(store, run, SUMMARY_FILE)
    reader = EventReader(store, run, stored.covered)
    newest = max(stored.covered, default=0)
    for batch in reader.batches():
        if batch.token < newest:  # of a driver that lost the run before, told late: it belongs in between
            return _summarize_all(store, run)
        for event in _parse_batch(batch):
            stored.folding.add(event)
    return _StoredSummary(stored.folding, reader.covered)


def read_brief_summary(store: Store, run: str) -> RunSummary:
    """What the events of a run fold to, as far as a list of runs shows it. Raises StorageError."""
    brief = _stored(store, run, BRIEF_FILE)
    if not brief.covered:
        return read_run_summary(store, run)
    newest, exact_from = max(brief.covered), brief.folding.exact_from
    for batch in EventReader(store, run, brief.covered).batches():
        for event in _parse_batch(batch):
            if batch.token < newest or (isinstance(event, Formed) and event.step < exact_from):
                return read_run_summary(store, run)
            brief.folding.add(event)
    return brief.folding


def _stored(store: Store, run: str, name: str) -> _StoredSummary:
    """A summary as it is stored; one of nothing where there is none that can be used."""
    try:
        facts = json.loads(store.get(events_folder(run) + name))
        covered = {int(token): int(number) for token, number in facts["covered"].items()}
        return _StoredSummary(RunSummary.of(facts["folded"]), covered)
    except (MissingFile, ValueError, TypeError, KeyError, AttributeError):
        return _StoredSummary(RunSummary(), {})


def _summarize_all(store: Store, run: str) -> _StoredSummary:
    """All events folded, from the first."""
    folding, reader = RunSummary(), EventReader(store, run)
    for event in reader.read():
        folding.add(event)
    return _StoredSummary(folding, reader.covered)


class EventCompactor:
    """Packs the batches of a run's events into few files, and stores the summaries.

    A packed file takes in the ones before it that are no larger, so that their number grows with the logarithm of the
    batches, and each byte is written again as often. What packed files cover is deleted a minute later.

    Args:
        clock: seconds, from any origin.
    """

    def __init__(self, store: Store, run: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._doomed: dict[str, float] = {}  # covered files, and when they were seen to be
        self._sound: set[str] = set()  # packed files that this process has written or read to the end

    def compact(self) -> None:
        """Do all of it. Raises StorageError, after which everything is still there to be read."""
        files = _files_to_read(self._trusted(find_event_files(self._store, self._run)), {})
        for loose in _consecutive_files([file for file in files if not file.packed]):
            self._pack(loose, [file for file in files if file.packed and file.token == loose[0].token])
        folding, covered = _read_summary(self._store, self._run)
        for name, part in ((SUMMARY_FILE, folding), (BRIEF_FILE, folding.brief)):
            told = {"covered": covered, "folded": part.facts()}
            self._store.put(events_folder(self._run) + name, json.dumps(told, separators=(",", ":")).encode())
        self._delete()

    def _pack(self, loose: Sequence[_EventFile], packed: Sequence[_EventFile]) -> None:
        """Make few files of batches that follow each other, and of the packed files right before them."""
        token, first, parts, size_bytes = loose[0].token, loose[0].first, list[bytes](), 0
        for file in loose:
            parts.append(_gzip_member(self._store.get(file.path)))
            size_bytes += len(parts[-1])
            if size_bytes >= _PACKED_BYTES or file is loose[-1]:
                for older in reversed(packed):
                    room = older.size_bytes <= min(size_bytes, _PACKED_BYTES - size_bytes)
                    if older.last + 1 != first or not room or (data := self._whole(older)) is None:
                        break
                    parts.insert(0, data)
                    first, size_bytes = older.first, size_bytes + len(data)
                path = _packed_path(self._run, token, first, file.last)
                self._store.put(path, b"".join(parts))
                self._sound.add(path)
                first, parts, size_bytes = file.last + 1, [], 0

    def _trusted(self, files: Sequence[_EventFile]) -> list[_EventFile]:
        """The same without damaged files whose batches others may have still: a power cut tears the last write."""
        return [file for file in files if not (file.packed and self._is_doubtful(file, files))]

    def _is_doubtful(self, file: _EventFile, files: Sequence[_EventFile]) -> bool:
        shared = any(_overlap(file, other) for other in files if other is not file)
        return shared and file.path not in self._sound and self._whole(file) is None

    def _whole(self, file: _EventFile) -> bytes | None:
        """A packed file's bytes; None where they are damaged, so that the damage is not carried on."""
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
        kept = _files_to_read(trusted, {})
        spared = {file.path for file in kept} | {
            file.path for file in {*files} - {*trusted} if not any(_contains(other, file) for other in kept)
        }
        covered = [file.path for file in files if file.path not in spared]
        self._doomed = {path: self._doomed.get(path, now_s) for path in covered}
        self._store.delete([path for path, seen_s in self._doomed.items() if now_s - seen_s >= _GRACE_S])


def _overlap(file: _EventFile, other: _EventFile) -> bool:
    """Whether two files have a batch in common."""
    return other.token == file.token and other.first <= file.last and other.last >= file.first


def _contains(file: _EventFile, other: _EventFile) -> bool:
    """Whether a file has all batches of another."""
    return other.token == file.token and file.first <= other.first and file.last >= other.last


def _consecutive_files(files: Iterable[_EventFile]) -> list[list[_EventFile]]:
    """Files of one driver that follow each other, together; the files are in order."""
    found: list[list[_EventFile]] = []
    for file in files:
        before = found[-1][-1] if found else None
        if before is not None and (before.token, before.last + 1) == (file.token, file.first):
            found[-1].append(file)
        else:
            found.append([file])
    return found
