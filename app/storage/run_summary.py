"""Summaries of a run's events, and their compaction: what readers fetch does not grow with the run.

`SUMMARY.json` holds what the events up to some batch of each driver fold to, `BRIEF.json` the little of it that a list
of runs shows. Both may be old, torn or missing: readers fold what came since, or all. So neither a driver that is
killed at any moment nor one that was fenced and writes an old summary over a newer one does harm.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from trainwright.core.events import Formed
from trainwright.storage.event_files import (
    EventFile,
    EventReader,
    Reads,
    find_files,
    folder_of,
    needed,
    pack,
    packed_path,
    parse,
    unpack,
)
from trainwright.storage.event_folding import Folding
from trainwright.storage.store_errors import MissingFile

SUMMARY, BRIEF = "SUMMARY.json", "BRIEF.json"
_PACKED_BYTES = 8 << 20  # the most that a packed file has, but for a single batch that has more
_GRACE_S = 60.0  # for readers that have listed a file to read it


class Writes(Reads, Protocol):
    """What compaction asks of a store."""

    def put(self, path: str, data: bytes) -> None:
        """Write a whole file; raises StorageError."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files, also those that are not there; raises StorageError."""


class Summary(NamedTuple):
    """What events fold to, and by token the first batch that is not in it."""

    folding: Folding
    covered: Mapping[int, int]


def read_folding(store: Reads, run: str) -> Folding:
    """What all events of a run fold to. Raises StorageError."""
    return read_summary(store, run).folding


def read_summary(store: Reads, run: str) -> Summary:
    """The same, and which batches that is. Raises StorageError."""
    stored = _stored(store, run, SUMMARY)
    reader = EventReader(store, run, stored.covered)
    newest = max(stored.covered, default=0)
    for batch in reader.batches():
        if batch.token < newest:  # of a driver that lost the run before, told late: it belongs in between
            return _folded(store, run)
        for event in parse(batch):
            stored.folding.add(event)
    return Summary(stored.folding, reader.covered)


def read_brief(store: Reads, run: str) -> Folding:
    """What the events of a run fold to, as far as a list of runs shows it. Raises StorageError."""
    brief = _stored(store, run, BRIEF)
    if not brief.covered:
        return read_folding(store, run)
    newest, exact_from = max(brief.covered), brief.folding.exact_from
    for batch in EventReader(store, run, brief.covered).batches():
        for event in parse(batch):
            if batch.token < newest or (isinstance(event, Formed) and event.step < exact_from):
                return read_folding(store, run)
            brief.folding.add(event)
    return brief.folding


def _stored(store: Reads, run: str, name: str) -> Summary:
    """A summary as it is stored; one of nothing where there is none that can be used."""
    try:
        facts = json.loads(store.get(folder_of(run) + name))
        covered = {int(token): int(number) for token, number in facts["covered"].items()}
        return Summary(Folding.of(facts["folded"]), covered)
    except (MissingFile, ValueError, TypeError, KeyError, AttributeError):
        return Summary(Folding(), {})


def _folded(store: Reads, run: str) -> Summary:
    """All events folded, from the first."""
    folding, reader = Folding(), EventReader(store, run)
    for event in reader.read():
        folding.add(event)
    return Summary(folding, reader.covered)


class Compactor:
    """Packs the batches of a run's events into few files, and stores the summaries.

    A packed file takes in the ones before it that are no larger, so that their number grows with the logarithm of the
    batches, and each byte is written again as often. What packed files cover is deleted a minute later.

    Args:
        clock: seconds, from any origin.
    """

    def __init__(self, store: Writes, run: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._doomed: dict[str, float] = {}  # covered files, and when they were seen to be
        self._sound: set[str] = set()  # packed files that this process has written or read to the end

    def compact(self) -> None:
        """Do all of it. Raises StorageError, after which everything is still there to be read."""
        files = needed(self._trusted(find_files(self._store, self._run)), {})
        for loose in _runs([file for file in files if not file.packed]):
            self._pack(loose, [file for file in files if file.packed and file.token == loose[0].token])
        folding, covered = read_summary(self._store, self._run)
        for name, part in ((SUMMARY, folding), (BRIEF, folding.brief)):
            told = {"covered": covered, "folded": part.facts()}
            self._store.put(folder_of(self._run) + name, json.dumps(told, separators=(",", ":")).encode())
        self._delete()

    def _pack(self, loose: Sequence[EventFile], packed: Sequence[EventFile]) -> None:
        """Make few files of batches that follow each other, and of the packed files right before them."""
        token, first, parts, size_bytes = loose[0].token, loose[0].first, list[bytes](), 0
        for file in loose:
            parts.append(pack(self._store.get(file.path)))
            size_bytes += len(parts[-1])
            if size_bytes >= _PACKED_BYTES or file is loose[-1]:
                for older in reversed(packed):
                    room = older.size_bytes <= min(size_bytes, _PACKED_BYTES - size_bytes)
                    if older.last + 1 != first or not room or (data := self._whole(older)) is None:
                        break
                    parts.insert(0, data)
                    first, size_bytes = older.first, size_bytes + len(data)
                path = packed_path(self._run, token, first, file.last)
                self._store.put(path, b"".join(parts))
                self._sound.add(path)
                first, parts, size_bytes = file.last + 1, [], 0

    def _trusted(self, files: Sequence[EventFile]) -> list[EventFile]:
        """The same without damaged files whose batches others may have still: a power cut tears the last write."""
        return [file for file in files if not (file.packed and self._is_doubtful(file, files))]

    def _is_doubtful(self, file: EventFile, files: Sequence[EventFile]) -> bool:
        shared = any(_overlap(file, other) for other in files if other is not file)
        return shared and file.path not in self._sound and self._whole(file) is None

    def _whole(self, file: EventFile) -> bytes | None:
        """A packed file's bytes; None where they are damaged, so that the damage is not carried on."""
        data = self._store.get(file.path)
        try:
            if sum(1 for _ in unpack(data)) != file.last - file.first + 1:
                return None
        except ValueError:
            return None
        self._sound.add(file.path)
        return data

    def _delete(self) -> None:
        files, now_s = find_files(self._store, self._run), self._clock()
        trusted = self._trusted(files)
        kept = needed(trusted, {})
        spared = {file.path for file in kept} | {
            file.path for file in {*files} - {*trusted} if not any(_holds(other, file) for other in kept)
        }
        covered = [file.path for file in files if file.path not in spared]
        self._doomed = {path: self._doomed.get(path, now_s) for path in covered}
        self._store.delete([path for path, seen_s in self._doomed.items() if now_s - seen_s >= _GRACE_S])


def _overlap(file: EventFile, other: EventFile) -> bool:
    """Whether two files have a batch in common."""
    return other.token == file.token and other.first <= file.last and other.last >= file.first


def _holds(file: EventFile, other: EventFile) -> bool:
    """Whether a file has all batches of another."""
    return other.token == file.token and file.first <= other.first and file.last >= other.last


def _runs(files: Iterable[EventFile]) -> list[list[EventFile]]:
    """Files of one driver that follow each other, together; the files are in order."""
    found: list[list[EventFile]] = []
    for file in files:
        before = found[-1][-1] if found else None
        if before is not None and (before.token, before.last + 1) == (file.token, file.first):
            found[-1].append(file)
        else:
            found.append([file])
    return found
