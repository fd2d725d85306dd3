"""Copies of a rank's state: to the store, to the node's memory, and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from trainwright.core.engine import CheckpointFile, CheckpointRef, Engine, StateSnapshot, StateWriter
from trainwright.core.errors import StoreDown
from trainwright.driver.messages import MemoryCheckpoint, MemoryCopyRequest, SnapshotRequest, SnapshotTaken
from trainwright.storage.checkpoints import CheckpointReader, CheckpointWriter, read_manifest
from trainwright.storage.memory_checkpoints import FetchFile, MemoryCheckpointReader, MemoryCheckpointStore
from trainwright.storage.object_store import Store

_Save = Callable[[StateSnapshot, StateWriter], None]  # of the engine that made the copy, which may be gone by then


class StateCopies:
    """Snapshots of the state, until they are written, and readers of what was written.

    Args:
        node: of this process, as the driver names it.
        fetch: reads from the memory of another node.
    """

    def __init__(self, store: Store, run: str, node: str, fetch: FetchFile) -> None:
        self._store, self._run, self._node, self._fetch = store, run, node, fetch
        self._memory = MemoryCheckpointStore(store.uri_of(run))
        self._snapshots: dict[str, tuple[StateSnapshot, _Save]] = {}  # by the verb that they are for

    def check_store(self) -> None:
        """Raise if this node has no access to the store; an outage may pass before an upload."""
        with suppress(StoreDown):
            self._store.exists(f"{self._run}/log/HINT")

    def uri_of(self, ref: CheckpointRef) -> str:
        """Return the URI of a checkpoint's folder."""
        return self._store.uri_of(f"{self._run}/{ref.path}")

    def take(self, engine: Engine, wanted: SnapshotRequest) -> SnapshotTaken:
        """Copy the state to host memory; steps may continue at once."""
        begun = time.perf_counter()
        copy = engine.snapshot()
        self._snapshots.update(dict.fromkeys(wanted.verbs, (copy, engine.save)))
        return SnapshotTaken(step=wanted.step, size_bytes=copy.size_bytes, blocked_s=time.perf_counter() - begun)

    def upload(self, path: str) -> tuple[CheckpointFile, ...]:
        """Write the files of the last snapshot to a checkpoint's folder."""
        writer = CheckpointWriter(self._store, self._run, path)
        copy, save = self._snapshots.pop("upload")
        save(copy, writer)
        return writer.entries

    def keep(self, wanted: MemoryCopyRequest) -> tuple[CheckpointFile, ...]:
        """Write the files of the last snapshot to the node's memory, where they outlive this process."""
        copy, save = self._snapshots.pop("keep")
        writer = self._memory.write(wanted.version, copy.size_bytes, wanted.hold)
        save(copy, writer)
        return writer.entries

    def checkpoint(self, ref: CheckpointRef, *, weights_only: bool) -> CheckpointReader:
        """Return a reader of a checkpoint."""
        manifest = read_manifest(self._store, self._run, ref)
        return CheckpointReader(self._store, self._run, ref, manifest, weights_only=weights_only)

    def memory_checkpoint(self, kept: MemoryCheckpoint) -> MemoryCheckpointReader:
        """Return a reader of an in-memory checkpoint."""
        return MemoryCheckpointReader(self._memory, kept, self._node, self._fetch)
