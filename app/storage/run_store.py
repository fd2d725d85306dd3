"""The run's log, checkpoints and heartbeat behind the three words that the driver has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.core.data import Cursor
from trainwright.core.engine import CheckpointManifest, CheckpointRef
from trainwright.core.errors import CheckpointError, StorageError
from trainwright.driver import messages as m
from trainwright.storage.checkpoints import delete_unreferenced, newest_intact, write_manifest
from trainwright.storage.event_files import read_run_summary
from trainwright.storage.object_store import Store
from trainwright.storage.run_log import Heartbeat, LogEntry, Owner, RunLog


class RunStore:
    """Implements `driver.world.Ledger`. Methods are called from one storage thread, but for `say`.

    Args:
        job: the job's description, kept in every entry.
        keep: checkpoints retained.
        fresh: begin again, naming none of the checkpoints that are there.
        cursor: the data position after so many steps.
        facts: small values kept in every manifest.
        note: takes a line for the user; from the storage thread.
        begin: takes the token when the run is this driver's, and has storage hold what was told of the beginning: no
            worker has been asked for by then.
        tell: has storage hold the events so far, before the log names a checkpoint and before it is given back:
            whoever goes on from there, though this driver was killed, knows of all that was before.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        job: Mapping[str, str],
        keep: int,
        fresh: bool,
        cursor: Callable[[int], Cursor],
        facts: Mapping[str, Any],
        note: Callable[[str], object],
        begin: Callable[[int], object],
        tell: Callable[[], object],
    ) -> None:
        self._store, self._run = store, run
        self._log = RunLog(store, run)
        self._job, self._keep, self._fresh = dict(job), keep, fresh
        self._cursor, self._facts = cursor, dict(facts)
        self._heartbeat: Heartbeat | None = None
        self._token = 0
        self._entry: LogEntry | None = None
        self._note, self._begin, self._tell = note, begin, tell

    def acquire(self) -> int:
        """Take the run; returns the token. Raises RunConflict, StorageError."""
        self._entry = entry = self._log.acquire(Owner.here(), self._job, fresh=self._fresh)
        self._token = entry.token
        impatient = self._store.impatient()
        guard = RunLog(impatient, self._run)  # of its own: it is asked from the heartbeat's thread
        self._heartbeat = Heartbeat(
            impatient, self._run, entry.token, note=self._note, confirm=lambda: guard.confirm(entry.token)
        )
        self._heartbeat.start()
        for number in self._log.torn:
            self._note(f"entry {number} of the log is torn and is passed over: its writer was cut off while it wrote")
        return entry.token

    def assure(self) -> bool:
        """Whether the run is known to be still ours; see `Heartbeat.assure`. Raises FencedError."""
        heartbeat = self._heartbeat
        return heartbeat is None or heartbeat.assure()

    def chain(self) -> tuple[CheckpointRef, ...]:
        """The checkpoints that the log names, up to the newest that has all its files; notes what it leaves out.

        Raises:
            CheckpointError: there are checkpoints and none is whole; nothing was changed.
        """
        assert self._entry is not None, "acquire comes first"
        named = self._entry.checkpoints
        head, notes = newest_intact(self._store, self._run, named, checksums=False)
        if named and head is None:
            self.release(m.ReleaseLease(outcome="failed", step=0))
            raise CheckpointError(
                "no checkpoint of the run is whole: " + "; ".join(notes),
                where=self._store.uri_of(f"{self._run}/checkpoints"),
                remedy="restore the files from a copy, or begin again with fresh=True",
            )
        for text in notes:
            self._note(text)
        self._begin(self._token)
        return named[: named.index(head) + 1] if head else ()

    def say(self, **facts: Any) -> None:
        """Keep other small values in the manifests to come."""
        self._facts = {**self._facts, **facts}

    def commit(self, commit: m.CommitCheckpoint) -> m.CheckpointCommitted:
        """Write the manifest, name it in the log, then delete what the log no longer names."""
        manifest = CheckpointManifest(
            step=commit.step,
            cursor=self._cursor(commit.step),
            files=commit.files,
            layout=commit.layout,
            facts=self._facts,
        )
        self._see(commit)
        self._tell()
        digest = write_manifest(self._store, self._run, commit.path, manifest)
        checkpoint = CheckpointRef(step=commit.step, path=commit.path, manifest_sha256=digest, parent=commit.parent)
        entry = self._log.commit(self._token, checkpoint, self._keep)
        try:
            delete_unreferenced(self._store, self._run, entry.checkpoints)
        except StorageError as error:  # the new checkpoint exists all the same
            self._note(f"older checkpoints could not be deleted: {error.what}")
        return m.CheckpointCommitted(checkpoint=checkpoint, older=entry.checkpoints[:-1])

    def _see(self, commit: m.CommitCheckpoint) -> None:
        """Make sure that what the workers wrote is in the driver's store, and not on a disk of theirs."""
        sizes = dict(self._store.list(f"{self._run}/{commit.path}"))
        for file in commit.files:
            if sizes.get(f"{self._run}/{commit.path}/{file.name}") != file.size_bytes:
                raise StorageError(
                    f"the driver does not see the file {file.name} that a worker wrote",
                    where=self._store.uri_of(f"{self._run}/{commit.path}"),
                    remedy="give a storage= that all nodes share: s3://, gs://, az:// or a network folder",
                )

    def told(self) -> int:
        """The newest step that storage has an event of; 0 for none."""
        return read_run_summary(self._store, self._run).told

    def release(self, release: m.ReleaseLease) -> None:
        """Give the run back; the next driver may take it at once.

        A store that fails here costs nothing that is committed: it is noted, and the next driver finds out that this
        one is gone. Raises FencedError.
        """
        self._tell()
        try:
            self._log.release(self._token, release.outcome)
        except StorageError as error:
            self._note(
                f"the log does not say that the run is over: {error.what}. No checkpoint is lost; "
                "the next command of this name may wait some seconds until it takes the run over"
            )
        self.close()

    def give_up(self) -> None:
        """The driver broke: let the next one have the run."""
        if self._heartbeat is not None:
            self.release(m.ReleaseLease(outcome="failed", step=0))

    def close(self) -> None:
        """Stop the heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
