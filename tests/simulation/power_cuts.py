"""Power cuts: a run's files as they were at one of its writes, that write torn, and what its readers make of it.

`record` plays a run of one to three drivers on a store that notes each change. `attack` builds the files as they were
before one of the changes, with that change torn, and raises Violation where a reader fails, where more than the torn
entry is lost, or where the next driver cannot go on. The code under attack is an argument, so that mutants are caught.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import trainwright.storage.event_files
import trainwright.storage.object_store
import trainwright.storage.run_log
from tests.simulation.store import Violation
from tests.support.sample_run import checkpointed, started, stepped
from trainwright.core import events
from trainwright.core.engine import CheckpointManifest, CheckpointRef, checkpoint_path
from trainwright.core.errors import StorageError
from trainwright.reporting.run_history import RunHistory
from trainwright.storage.checkpoints import CheckpointWriter, delete_unreferenced, newest_intact, write_manifest
from trainwright.storage.object_store import Store
from trainwright.storage.run_log import Owner
from trainwright.storage.run_summary import RunSummary

RUN = "run"
KEEP = 2
_EDGES = (rb"(?<=\n)", rb"\x1f\x8b\x08\0")  # of lines, and of batches in a packed file
_BUDGET = 400  # changes of one store, so that whoever tries for ever is stopped


@dataclass(frozen=True)
class Code:
    """The modules under attack."""

    log: ModuleType = trainwright.storage.run_log
    eventfiles: ModuleType = trainwright.storage.event_files
    store: ModuleType = trainwright.storage.object_store


@dataclass(frozen=True)
class Change:
    """One change of a store: a file written, whole, or files deleted.

    Attributes:
        synced: the writer waited for the disk; else the content may be torn until the file is written again.
    """

    path: str
    data: bytes = b""
    deleted: tuple[str, ...] = ()
    synced: bool = True


class Recording(Store):
    """A store in memory that notes its changes."""

    def __init__(self) -> None:
        super().__init__(f"memory://{uuid.uuid4().hex}")
        self.changes: list[Change] = []

    def _note(self, change: Change) -> None:
        self.changes.append(change)
        if len(self.changes) > _BUDGET:
            raise Violation("it tries for ever")

    def put(self, path: str, *pieces: bytes | memoryview, sync: bool = True) -> None:
        """Write a file."""
        data = b"".join(pieces)
        self._note(Change(path, data, synced=sync))
        super().put(path, data, sync=sync)

    def create(self, path: str, data: bytes) -> bool:
        """Write a file that is not there yet."""
        self._note(Change(path, data))
        return super().create(path, data)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files."""
        doomed = tuple(paths)
        if doomed:
            self._note(Change("", deleted=doomed))
            super().delete(doomed)


@dataclass(kw_only=True)
class Played:
    """A run and all changes of its store.

    Attributes:
        told: lines of each batch of events, by path.
    """

    changes: list[Change]
    told: dict[str, list[str]] = field(default_factory=dict)


class _Minutes:
    """A clock on which more than a minute passes from one look to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 61.0
        return self.now_s


def record(rng: Random) -> Played:
    """Play a run: its drivers tell of steps, write checkpoints, compact, and are killed or give the run back."""
    store, told = Recording(), dict[str, list[str]]()
    refs: tuple[CheckpointRef, ...] = ()
    for number in range(rng.choice((1, 2, 3))):
        log = trainwright.storage.run_log.RunLog(store, RUN, dead=lambda owner: True)
        token = log.acquire(Owner(host="here", pid=number + 1), {"name": RUN}).token
        clock, step = _Minutes(), refs[-1].step if refs else 0
        compactor = trainwright.storage.event_files.EventCompactor(store, RUN, clock=clock)
        _tell(store, told, token, 0, [started(token=token), events.Formed(time_s=101, step=step, nodes={"a": "0"})])
        for batch in range(1, rng.randint(2, 7)):
            step += 3
            happened: list[events.Event] = [stepped(range(step - 2, step + 1), time_s=100 + step)]
            if rng.random() < 0.5:
                refs = _commit(store, log, token, step, refs)
                happened.append(checkpointed(step, time_s=100 + step))
            _tell(store, told, token, batch, happened)
            if rng.random() < 0.4:
                compactor.compact()
        if rng.random() < 0.3:
            log.release(token, "stopped")
    return Played(changes=store.changes, told=told)


def _tell(store: Store, told: dict[str, list[str]], token: int, number: int, happened: list[events.Event]) -> None:
    path = trainwright.storage.event_files.batch_path(RUN, token, number)
    told[path] = [event.to_json() for event in happened]
    store.put(path, "".join(f"{line}\n" for line in told[path]).encode())


def _commit(store: Store, log: Any, token: int, step: int, refs: tuple[CheckpointRef, ...]) -> Any:
    path = checkpoint_path(step, token)
    writer = CheckpointWriter(store, RUN, path)
    writer.write("model", b"%d" % step)
    digest = write_manifest(store, RUN, path, CheckpointManifest(step=step, files=writer.entries))
    ref = CheckpointRef(step=step, path=path, manifest_sha256=digest, parent=refs[-1].path if refs else "")
    entry = log.commit(token, ref, KEEP)
    delete_unreferenced(store, RUN, entry.checkpoints)
    return entry.checkpoints


def torn(data: bytes, length: int, zeros: bool) -> bytes:
    """What a power cut leaves of a file: its first bytes, or zeros from there on, as file systems do."""
    return data[:length].ljust(len(data) if zeros else 0, b"\0")


def attack(played: Played, rng: Random, code: Code | None = None) -> None:
    """Tear one of the changes of a run, and have all readers and another driver go on from there."""
    code = code or Code()
    kinds: dict[str, list[int]] = {}
    for number, each in enumerate(played.changes):
        kinds.setdefault(re.sub(r".*/|\d", "", each.path), []).append(number)
    place = rng.choice(kinds[rng.choice(sorted(kinds))])
    change, store = played.changes[place], Recording()
    edges = [found.start() for found in re.finditer(_EDGES[change.path.endswith(".gz")], change.data)]
    length = rng.choice(edges) if edges and rng.random() < 0.5 else rng.randint(0, len(change.data))
    cut = torn(change.data, length, rng.random() < 0.5)
    for path, data in _files(played.changes[:place], rng).items():
        Store.put(store, path, data)
    if change.deleted:
        Store.delete(store, rng.sample(change.deleted, rng.randint(0, len(change.deleted))))
    else:
        Store.put(store, change.path, cut)
        following = played.changes[place + 1 : place + 2]
        if following and following[0].path.endswith("HINT") and rng.random() < 0.5:  # it reached the disk before
            Store.put(store, following[0].path, following[0].data)
    whole = [*played.changes[:place], *([change] if cut == change.data else [])]
    _check_log(code, store, whole, change)
    before = _check_events(code, store, played, whole, change)
    _go_on(code, store, before)


def _files(changes: Iterable[Change], rng: Random) -> dict[str, bytes]:
    """Files by path after these changes, those that nobody waited for torn."""
    files: dict[str, bytes] = {}
    for change in changes:
        for path in change.deleted:
            files.pop(path, None)
        if change.path.startswith(f"{RUN}/log/") and change.synced and change.path in files:
            continue  # a create that another had won
        if change.path:
            length = len(change.data) if change.synced else rng.randint(0, len(change.data))
            files[change.path] = torn(change.data, length, rng.random() < 0.5)
    return files


def _check_log(code: Code, store: Store, whole: list[Change], change: Change) -> None:
    """The head is the last entry that was written whole, and names checkpoints that are."""
    entries = [each.data for each in whole if each.path.startswith(f"{RUN}/log/0")]
    head = code.log.RunLog(store, RUN).head()
    if (head.to_json() if head else None) != (entries[-1] if entries else None):
        raise Violation(f"{change.path} is torn, and the head is {head}")
    if head and head.checkpoints:
        ref, notes = newest_intact(store, RUN, head.checkpoints)
        if ref != head.checkpoints[-1]:
            raise Violation(f"{change.path} is torn, and a checkpoint is passed over: {notes}")


def _check_events(code: Code, store: Store, played: Played, whole: list[Change], change: Change) -> list[str]:
    """All batches that were written whole are read, and of the torn one no line that it never had."""
    told = [each.path for each in whole if each.path in played.told]
    expected = [line for path in sorted(told) for line in played.told[path]]
    found = [event.to_json() for event in code.eventfiles.read_events(store, RUN)]
    lines = _without_notes(found)
    rest = played.told.get(change.path, []) if change.path not in told else []
    if lines[: len(expected)] != expected or lines[len(expected) :] != rest[: len(lines) - len(expected)]:
        raise Violation(f"{change.path} is torn, and events are lost: {len(lines)} of {len(expected)}")
    if len(found) > len(lines) and not all(change.path in line for line in found if line not in lines):
        raise Violation(f"{change.path} is torn, and another file is named: {found[-1]}")
    _check_folded(code, store, found)
    return found


def _check_folded(code: Code, store: Store, found: list[str]) -> None:
    folding = RunSummary()
    for line in found:
        folding.add(events.from_json(line))
    if code.eventfiles.read_run_summary(store, RUN).facts() != folding.facts():
        raise Violation("the summary says something else than the events")
    if _row(code.eventfiles.read_brief_summary(store, RUN)) != _row(folding):
        raise Violation("the list of runs says something else than the events")


def _row(folding: RunSummary) -> str:
    """What a list of runs shows."""
    history = RunHistory(summary=folding, state=folding.state(owner_alive=True))
    return repr(
        (history.state, history.summary.step, history.summary.start.total_steps, history.loss, history.summary.last_s)
    )


def _go_on(code: Code, store: Store, found: list[str]) -> None:
    """The next driver takes the run, commits and compacts; nothing more is lost by that."""
    log = code.log.RunLog(store, RUN, dead=lambda owner: True)
    head = code.log.RunLog(store, RUN).head()
    if head is not None and head.owned:  # its writer lives, and tries again
        code.log.RunLog(store, RUN).release(head.token, "stopped")
    entry = log.acquire(Owner(host="next", pid=9), {"name": RUN})
    if head is not None and (entry.checkpoints != head.checkpoints or entry.token <= head.token):
        raise Violation(f"the next driver begins with {entry}")
    _commit(store, log, entry.token, 1_000, entry.checkpoints)
    clock = _Minutes()
    for _ in range(2):
        code.eventfiles.EventCompactor(store, RUN, clock=clock).compact()
    compactor = code.eventfiles.EventCompactor(store, RUN, clock=clock)
    for _ in range(2):
        compactor.compact()
    after = [event.to_json() for event in code.eventfiles.read_events(store, RUN)]
    if _without_notes(after) != _without_notes(found) or len(after) != len(found):
        raise Violation(f"compaction made {len(after)} events of {len(found)}")


def _without_notes(lines: list[str]) -> list[str]:
    """Lines that were told, without those that say what cannot be read."""
    return [line for line in lines if "cannot be read from" not in line]


def attack_create(folder: Path, code: Code | None = None) -> None:
    """Create a file; it must be on disk before it has its name, and so must its name before `create` returns."""
    store: Store = (code or Code()).store.Store(str(folder))
    calls: list[str] = []
    fsync, link = os.fsync, os.link

    def note(number: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{number}"))
        calls.append("folder" if place.is_dir() else "named" if place.suffix == ".json" else "unnamed")
        fsync(number)

    def noted(*places: Any) -> None:
        calls.append("link")
        link(*places)

    os.fsync, os.link = note, noted  # type: ignore[assignment]
    try:
        made = store.create(f"{RUN}/log/00000001.json", b"{}")
        again = store.create(f"{RUN}/log/00000001.json", b"[]")
    except StorageError as error:
        raise Violation(f"it cannot be created: {error}") from error
    finally:
        os.fsync, os.link = fsync, link
    first = calls[: calls.index("link") + 1] if "link" in calls else []
    if first != ["unnamed", "link"] or calls[2:].count("folder") < 3:  # log, run, store
        raise Violation(f"a power cut can leave an empty entry: {calls}")
    if not made or again or store.get(f"{RUN}/log/00000001.json") != b"{}":
        raise Violation("another writer's file was replaced")
    if [path.name for path in (folder / RUN / "log").iterdir()] != ["00000001.json"]:
        raise Violation("something is left beside it")
