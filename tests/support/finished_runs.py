"""What tests read of a run that has ended."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from trainwright.core import events
from trainwright.core.engine import CheckpointRef
from trainwright.storage.checkpoints import CheckpointReader, newest_intact, read_manifest
from trainwright.storage.event_files import read_events
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import LogEntry, RunLog


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything of the newest checkpoint: its step and its files, byte for byte."""

    step: int
    files: dict[str, bytes]


def final_state(storage: Path | str, run: str) -> State:
    """The newest checkpoint of a run, verified."""
    store = open_store(str(storage))
    entry = RunLog(store, run).head()
    assert entry is not None
    ref, notes = newest_intact(store, run, entry.checkpoints)
    assert ref is not None and not notes
    reader = reader_of(storage, run, ref)
    return State(step=ref.step, files={name: bytes(reader.read(name)) for name in reader.names()})


def reader_of(storage: Path | str, run: str, ref: CheckpointRef) -> CheckpointReader:
    """A reader of one checkpoint."""
    store = open_store(str(storage))
    return CheckpointReader(store, run, ref, read_manifest(store, run, ref))


def log_entries(store: Store, run: str) -> list[LogEntry]:
    """The entries of the run's log that are not torn, in order."""
    found = []
    for path, _ in store.list(f"{run}/log"):
        if path.endswith(".json"):
            with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
                found.append(LogEntry.of(json.loads(store.get(path))))
    return found


def told(storage: Path | str, run: str, kind: type[events.Event]) -> list[events.Event]:
    """The run's events of one kind, from storage."""
    return [event for event in read_events(open_store(str(storage)), run) if type(event) is kind]
