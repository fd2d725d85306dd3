"""The driver's view of storage: acquire a run, commit checkpoints, release the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainwright.core.engine import CheckpointManifest, CheckpointRef
from trainwright.core.errors import CheckpointError, StorageError
from trainwright.driver import messages as m
from trainwright.storage.checkpoints import delete_unreferenced, newest_intact, write_manifest
from trainwright.storage.event_files import read_run_summary
from trainwright.storage.object_store import Store
from trainwright.storage.run_log import Heartbeat, LogEntry, Owner, RunLog
from trainwright.storage.run_summary import RunSummary


class RunStore:
    """Run log, checkpoints and heartbeat of one driver. All methods are called from one storage thread.

    Args:
        job: description of the job, kept in every log entry.
        fresh: start again from step 0, without the existing checkpoints.
        note: takes a line for the user; called from the storage thread.
        begin: called with the token when this driver owns the run, before it asks for workers; writes the first events
            to storage.
        stop: called when a stop is requested in storage, with whether at once; from the heartbeat's thread.
        tell: writes the events so far to storage. Called before the log names a checkpoint and before the release, so
            that a later driver finds the events of all steps before its checkpoint.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        job: Mapping[str, str],
        keep: int,
        fresh: bool,
        note: Callable[[str], object],
        begin: Callable[[int], object],
        tell: Callable[[], object],
        stop: Callable[[bool], object] = lambda now: None,
    ) -> None:
        self._store, self._run = store, run
        self._log = RunLog(store, run)
        self._job, self._keep, self._fresh = dict(job), keep, fresh
        self._heartbeat: Heartbeat | None = None
        self._token = 0
        self._entry: LogEntry | None = None
        self._note, self._begin, self._tell, self._stop = note, begin, tell, stop

    def acquire(self) -> int:
        """Acquire the run and return the fencing token. Raises RunConflict, StorageError."""
        self._entry = entry = self._log.acquire(Owner.here(), self._job, fresh=self._fresh)
        self._token = entry.token
        impatient = self._store.impatient()
        guard = RunLog(impatient, self._run)  # a second log object, for the heartbeat's thread
        self._heartbeat = Heartbeat(
            impatient, self._run, entry.token, note=self._note, confirm=lambda: guard.confirm(entry.token),
            on_stop=self._stop,
        )  # fmt: skip
        self._heartbeat.start()
        for number in self._log.torn:
            self._note(f"entry {number} of the run log is torn and is skipped: its writer was interrupted")
        return entry.token

    def assure(self) -> bool:
        """Return whether this driver certainly owns the run; see `Heartbeat.assure`. Raises FencedError."""
        heartbeat = self._heartbeat
        return heartbeat is None or heartbeat.assure()

    def chain(self) -> tuple[CheckpointRef, ...]:
        """Return the checkpoints of the run log, up to the newest complete one, and report the skipped ones.

        Raises:
            CheckpointError: there are checkpoints, but none is complete; nothing was changed.
        """
        assert self._entry is not None, "acquire comes first"
        checkpoints = self._entry.checkpoints
        head, notes = newest_intact(self._store, self._run, checkpoints, checksums=False)
        if checkpoints and head is None:
            self.release(m.ReleaseLease(outcome="failed", step=0))
            raise CheckpointError(
                "no checkpoint of the run is complete: " + "; ".join(notes),
                where=self._store.uri_of(f"{self._run}/checkpoints"),
                remedy="restore the files from a copy, or start again with fresh=True",
            )
        for text in notes:
            self._note(text)
        self._begin(self._token)
        if self._fresh:
            self._delete_outputs()
        return checkpoints[: checkpoints.index(head) + 1] if head else ()

    def _delete_outputs(self) -> None:
        """Delete the report and the quarantine of the run that had this name; the first commit deletes checkpoints."""
        skipped = (path for path, _ in self._store.list(f"{self._run}/quarantine"))
        try:
            self._store.delete([f"{self._run}/report.html", *skipped])
        except StorageError as error:
            self._note(f"the report and the quarantine of the earlier run could not be deleted: {error.what}")

    def commit(self, commit: m.CommitCheckpoint) -> m.CheckpointCommitted:
        """Write the manifest, name the checkpoint in the run log, then delete older checkpoints."""
        manifest = CheckpointManifest(step=commit.step, files=commit.files)
        self._check_files(commit)
        self._tell()
        digest = write_manifest(self._store, self._run, commit.path, manifest)
        checkpoint = CheckpointRef(step=commit.step, path=commit.path, manifest_sha256=digest, parent=commit.parent)
        entry = self._log.commit(self._token, checkpoint, self._keep, commit.hold)
        try:
            delete_unreferenced(self._store, self._run, entry.checkpoints)
        except StorageError as error:  # the new checkpoint exists nevertheless
            self._note(f"older checkpoints could not be deleted: {error.what}")
        return m.CheckpointCommitted(checkpoint=checkpoint, older=entry.checkpoints[:-1])

    def _check_files(self, commit: m.CommitCheckpoint) -> None:
        """Check that the workers' files are in the driver's store, and not on a local disk of theirs."""
        sizes = dict(self._store.list(f"{self._run}/{commit.path}"))
        for file in commit.files:
            if sizes.get(f"{self._run}/{commit.path}/{file.name}") != file.size_bytes:
                raise StorageError(
                    f"the driver cannot find the file {file.name} that a worker wrote",
                    where=self._store.uri_of(f"{self._run}/{commit.path}"),
                    remedy="give a storage= that all nodes share: s3://, gs://, az:// or a network folder",
                )

    def past(self) -> RunSummary:
        """Return the summary of the stored events: steps, evaluations and sessions of earlier drivers."""
        return read_run_summary(self._store, self._run)

    def release(self, release: m.ReleaseLease) -> None:
        """Release the run, so that the next driver can acquire it at once.

        A storage error is reported and loses no checkpoint: the next driver detects by the heartbeat that this one is
        gone. Raises FencedError.
        """
        self._tell()
        try:
            self._log.release(self._token, release.outcome)
        except StorageError as error:
            self._note(
                f"the release of the run could not be written: {error.what}. No checkpoint is lost; "
                "the next command for this run may wait some seconds before it starts"
            )
        self.close()

    def give_up(self) -> None:
        """Release the run after an error of the driver."""
        if self._heartbeat is not None:
            self.release(m.ReleaseLease(outcome="failed", step=0))

    def close(self) -> None:
        """Stop the heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
