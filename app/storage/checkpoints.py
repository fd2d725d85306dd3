"""Checkpoints in storage: writing, verification, choice of the newest intact one, loading, and deletion of old ones.

    <run>/checkpoints/00001200-<token>/MANIFEST.json and the files of the engine

A checkpoint exists when the run log names it; before, many workers may write its files in any order. The log has the
SHA-256 of the manifest, and the manifest has those of the files, so readers notice torn and altered files.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TypeVar

from trainwright.core.engine import (
    OPTIMIZER_PREFIX,
    CheckpointChoice,
    CheckpointFile,
    CheckpointManifest,
    CheckpointRef,
    StateReader,
)
from trainwright.core.errors import CheckpointError, DamagedCheckpoint, JobError, StorageError, StoreDown
from trainwright.core.job import Job
from trainwright.core.metric_goals import best_evaluation, metric_name
from trainwright.storage.event_files import read_run_summary
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import RunLog
from trainwright.storage.store_errors import MissingFile

MANIFEST = "MANIFEST.json"
_FORMAT = 1
_PARALLEL_READS = 4  # files at a time; each has up to 64 MiB in memory
_FOLDER = re.compile(r"(\d{8,})-(\d+)(?:\.(\d+))?")
_REMEDY = "training continues from the checkpoint before it; to use this one, restore the file from a copy"


class CheckpointWriter:
    """Writes the files of a checkpoint, and records their sizes and checksums. Implements `core.engine.StateWriter`."""

    def __init__(self, store: Store, run: str, path: str) -> None:
        self._store, self._folder = store, f"{run}/{path}"
        self._lock = threading.Lock()
        self._entries: dict[str, CheckpointFile | None] = {}  # None: it is being written

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Store one file, given in pieces. May be called from any thread.

        Its checksum is computed in another thread while the store takes the pieces. After an error that retries cannot
        help, such as a full store, the files written so far are deleted.

        Raises:
            StorageError: the checkpoint stays incomplete.
            ValueError: the checkpoint has a file of this name already.
        """
        flat = [_flat(memoryview(piece)) for piece in pieces]
        with self._lock:
            if name == MANIFEST or name in self._entries:
                raise ValueError(f"the checkpoint has a file {name!r} already")
            self._entries[name] = None
        with ThreadPoolExecutor(1) as pool:
            summing = pool.submit(_sha256, flat)
            try:
                self._store.put(f"{self._folder}/{name}", *flat)
            except StoreDown:
                raise  # it would not delete either
            except StorageError as error:
                self._take_back(error)
                raise
        size_bytes = sum(piece.nbytes for piece in flat)
        with self._lock:
            self._entries[name] = CheckpointFile(name=name, size_bytes=size_bytes, sha256=summing.result())

    def _take_back(self, error: StorageError) -> None:
        with self._lock:
            names = sorted(self._entries)
        try:
            self._store.delete(f"{self._folder}/{name}" for name in names)
        except StorageError as second:
            error.detail += f"the incomplete checkpoint could not be deleted: {second.what}"

    @property
    def entries(self) -> tuple[CheckpointFile, ...]:
        """The written files, by name. Complete when every `write` has returned without an error."""
        with self._lock:
            return tuple(entry for _, entry in sorted(self._entries.items()) if entry is not None)


class CheckpointReader:
    """Reads the files of one checkpoint and verifies them. Implements `core.engine.StateReader`.

    Args:
        weights_only: whether the model will not be trained further.
    """

    def __init__(
        self, store: Store, run: str, ref: CheckpointRef, manifest: CheckpointManifest, *, weights_only: bool = False
    ) -> None:
        self._store, self._folder = store, f"{run}/{ref.path}"
        self._files = {entry.name: entry for entry in manifest.files}
        self.weights_only = weights_only

    def names(self) -> tuple[str, ...]:
        """Names of all files."""
        return tuple(self._files)

    def read(self, name: str) -> bytearray:
        """Read and verify one file. The checksum is computed while further chunks arrive.

        Raises:
            CheckpointError: the file is missing, torn or altered, or the checkpoint never had it.
            StorageError: the store cannot be read.
        """
        portions, start = self.stream(name), 0
        data = bytearray(self._files[name].size_bytes if name in self._files else 0)
        for portion in portions:
            data[start : start + len(portion)] = portion
            start += len(portion)
        return data

    def stream(self, name: str) -> Iterator[memoryview]:
        """Yield one file in chunks, and verify it at the end. Raises the errors of `read`."""
        place = f"{self._folder}/{name}"
        if name not in self._files:
            raise _damaged(self._store, place, f"the checkpoint has no file {name!r}, only {', '.join(self._files)}")
        yield from _verified_chunks(self._store, place, self._files[name])

    def verify(self, name: str) -> None:
        """Read one file without keeping it. Raises the errors of `read`."""
        deque(self.stream(name), maxlen=0)


# --- manifest ---------------------------------------------------------------------------------------------------------


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the stored form of a manifest."""
    return json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1, sort_keys=True).encode()


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Parse a manifest. Raises ValueError, TypeError or KeyError for anything else."""
    fields = json.loads(data)
    if fields.pop("format") != _FORMAT:
        raise ValueError("another format version")
    return CheckpointManifest(step=fields["step"], files=tuple(CheckpointFile(**item) for item in fields["files"]))


def write_manifest(store: Store, run: str, path: str, manifest: CheckpointManifest) -> str:
    """Write the manifest of a checkpoint, after all its files. Returns its SHA-256 for the run log."""
    data = encode_manifest(manifest)
    store.put(f"{run}/{path}/{MANIFEST}", data)
    return hashlib.sha256(data).hexdigest()


def read_manifest(store: Store, run: str, ref: CheckpointRef) -> CheckpointManifest:
    """Read the manifest of a checkpoint that the run log names.

    Raises:
        CheckpointError: the manifest is missing, or is not the one that was committed.
        StorageError: the store cannot be read.
    """
    place = f"{run}/{ref.path}/{MANIFEST}"
    try:
        data = store.get(place)
    except MissingFile:
        raise _missing(store, place) from None
    if hashlib.sha256(data).hexdigest() != ref.manifest_sha256:
        raise _damaged(store, place, "the manifest is torn or altered: its checksum is not the one in the log")
    try:
        return decode_manifest(data)
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(store, place, "the manifest was written by another version") from error


# --- choice and retention ---------------------------------------------------------------------------------------------


def verify(
    store: Store, run: str, ref: CheckpointRef, *, checksums: bool = False, weights_only: bool = False
) -> CheckpointManifest:
    """Check that a checkpoint is complete: its manifest, and every file with its size.

    Args:
        checksums: also read every file and compare its checksum; a few files at a time, in bounded memory.
        weights_only: do not read the files with optimizer state.

    Raises:
        CheckpointError: the checkpoint is damaged; the message names the file.
        StorageError: the store cannot be read.
    """
    manifest = read_manifest(store, run, ref)
    folder = f"{run}/{ref.path}"
    sizes = dict(store.list(folder))
    for entry in manifest.files:
        place = f"{folder}/{entry.name}"
        if place not in sizes:
            raise _missing(store, place)
        _check_size(store, place, entry, sizes[place])
    if checksums:
        reader = CheckpointReader(store, run, ref, manifest)
        names = [name for name in reader.names() if not (weights_only and name.startswith(OPTIMIZER_PREFIX))]
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            deque(pool.map(reader.verify, names), maxlen=0)
    return manifest


def newest_intact(
    store: Store, run: str, refs: Sequence[CheckpointRef], *, checksums: bool = True, weights_only: bool = False
) -> tuple[CheckpointRef | None, list[str]]:
    """Find the newest intact checkpoint, and return it with a note on each newer one that was skipped.

    Args:
        refs: from an entry of the run log, newest last.
        checksums: read every file; otherwise the files are verified when they are loaded.

    Returns:
        None and the notes when no checkpoint is intact.

    Raises:
        StorageError: the store cannot be read; the checkpoints may be intact.
    """
    notes: list[str] = []
    for ref in reversed(refs):
        try:
            verify(store, run, ref, checksums=checksums, weights_only=weights_only)
        except CheckpointError as error:
            notes.append(_damage_note(ref, error))
        else:
            return ref, notes
    return None, notes


def _damage_note(ref: CheckpointRef, error: CheckpointError) -> str:
    """Return a line for the user about a damaged checkpoint."""
    return f"the checkpoint of step {ref.step} is skipped: {error.what} ({error.where})"


def delete_unreferenced(store: Store, run: str, keep: Sequence[CheckpointRef]) -> tuple[str, ...]:
    """Delete the checkpoint folders that the run log does not name: old ones, and incomplete ones of dead drivers.

    Folders newer than the newest kept one, by token and then by step, stay: they are uploads in progress, of this
    driver or of one that took over.

    Args:
        keep: the checkpoints of the newest log entry, newest last; when empty, nothing is deleted.

    Returns:
        The deleted folders, relative to the run.

    Raises:
        StorageError: the store cannot be used.
    """
    if not keep:
        return ()
    newest = _folder_order(keep[-1].path)
    spared = {ref.path for ref in keep}
    doomed = []
    for name in store.folders(f"{run}/checkpoints"):
        path = f"checkpoints/{name}"
        if _FOLDER.fullmatch(name) and path not in spared and _folder_order(path) < newest:
            doomed.append(path)
    for path in doomed:
        store.delete_folder(f"{run}/{path}")
    return tuple(doomed)


def _folder_order(path: str) -> tuple[int, int, int]:
    """Return token, step and attempt of a checkpoint folder."""
    match = _FOLDER.fullmatch(path.rpartition("/")[2])
    if not match:
        raise ValueError(f"{path!r} is not a checkpoint folder")
    return int(match.group(2)), int(match.group(1)), int(match.group(3) or 0)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _flat(data: memoryview) -> memoryview:
    """Return the same memory as plain bytes; a copy where it is not contiguous."""
    return data.cast("B") if data.c_contiguous else memoryview(data.tobytes())


def _sha256(pieces: Sequence[memoryview]) -> str:
    """Return the checksum of pieces, one after the other."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _verified_chunks(store: Store, place: str, entry: CheckpointFile) -> Iterator[memoryview]:
    """Yield a file in chunks. Raises CheckpointError at the end where it is not the file of the manifest."""
    digest, size_bytes = hashlib.sha256(), 0
    try:
        for portion in store.stream(place):
            digest.update(portion)
            size_bytes += len(portion)
            yield portion
    except MissingFile:
        raise _missing(store, place) from None
    _check_size(store, place, entry, size_bytes)
    if digest.hexdigest() != entry.sha256:
        raise _damaged(store, place, f"{entry.name} is altered: its checksum is not the one in the manifest")


def _check_size(store: Store, place: str, entry: CheckpointFile, size: int) -> None:
    if size != entry.size_bytes:
        raise _damaged(store, place, f"{entry.name} is torn: it has {size} bytes, not {entry.size_bytes}")


def _missing(store: Store, place: str) -> DamagedCheckpoint:
    return _damaged(store, place, f"{place.rpartition('/')[2]} is missing")


def _damaged(store: Store, place: str, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(what, where=store.uri_of(place), remedy=_REMEDY)


# --- Checkpoints of a run whose weights are whole, for all that use a trained run -------------------------------------


_Value = TypeVar("_Value")


def with_checkpoint(job: Job, step: CheckpointChoice, load: Callable[[StateReader], _Value]) -> _Value:
    """Return the result of `load` for the weights of the run's newest whole checkpoint, or of the one at `step`.

    Each file is verified when it is read. If a file is damaged, the previous checkpoint is loaded.

    Raises:
        CheckpointError: there is none; names the steps that are kept.
    """

    def loaded(checkpoint: CheckpointRef) -> _Value:
        store = open_store(job.storage)
        manifest = read_manifest(store, job.name, checkpoint)
        return load(CheckpointReader(store, job.name, checkpoint, manifest, weights_only=True))

    return load_newest(job, step, loaded)


def find_checkpoint(job: Job, step: CheckpointChoice = None) -> tuple[Store, CheckpointRef]:
    """Return the run's newest checkpoint whose weights are whole, or the one that `step` selects, and its store.

    Raises:
        CheckpointError: there is none; names the steps that are kept.
    """
    store, kept_steps, refs = checkpoints_of(job, step)
    checkpoint, notes = newest_intact(store, job.name, refs, weights_only=True)
    if checkpoint is None:
        raise _no_intact(job, step, store, kept_steps, notes)
    return store, checkpoint


def load_newest(job: Job, step: CheckpointChoice, load: Callable[[CheckpointRef], _Value]) -> _Value:
    """Return the result of `load` for the newest checkpoint that is not damaged, or for the one at `step`.

    Raises:
        CheckpointError: there is none; names the steps that are kept.
    """
    store, kept_steps, refs = checkpoints_of(job, step)
    notes: list[str] = []
    for checkpoint in reversed(refs):
        try:
            return load(checkpoint)
        except DamagedCheckpoint as error:
            notes.append(_damage_note(checkpoint, error))
            print(notes[-1], file=sys.stderr)
    raise _no_intact(job, step, store, kept_steps, notes)


def checkpoints_of(job: Job, step: CheckpointChoice) -> tuple[Store, str, tuple[CheckpointRef, ...]]:
    """Return the run's store, its steps in words, and the checkpoints that `step` selects, newest last."""
    store = open_store(job.storage)
    entry = RunLog(store, job.name).head()
    checkpoints = entry.checkpoints if entry else ()
    chosen = _best_step(job, store, checkpoints) if step == "best" else step
    selected = tuple(ref for ref in checkpoints if chosen in (None, ref.step))
    return store, ", ".join(str(ref.step) for ref in checkpoints), selected


def _best_step(job: Job, store: Store, refs: Sequence[CheckpointRef]) -> int:
    """Return the step of the best evaluation whose checkpoint is kept. Raises JobError, CheckpointError."""
    goal, steps = job.checkpointing.best, {ref.step for ref in refs}
    if goal is None:
        raise JobError(['step="best" needs best= in the job: name the metric that was evaluated, such as best="-loss"'])
    evaluations = read_run_summary(store, job.name).ordered_evaluations
    best = best_evaluation(goal, (event for event in evaluations if event.step in steps))
    if best is None:
        raise CheckpointError(
            f"no checkpoint of the run {job.name!r} has an evaluation with {metric_name(goal)}",
            where=store.uri_of(job.name),
            remedy=f"choose one of the steps kept: {', '.join(map(str, sorted(steps)))}" if steps else "train it first",
        )
    return best.step


def _no_intact(job: Job, step: CheckpointChoice, store: Store, kept: str, notes: Sequence[str]) -> CheckpointError:
    selection = {"None": "", "best": " of its best evaluation"}.get(str(step), f" at step {step}")
    missing = "train it first: trainwright fit"
    if "://" not in job.storage and not job.storage.startswith("/"):
        missing += f"; or go to the folder where it was trained, since storage={job.storage!r} is in the current one"
    return CheckpointError(
        f"the run {job.name!r} has no usable checkpoint{selection}",
        where=store.uri_of(job.name),
        remedy=f"steps kept: {kept}" if kept else missing,
        detail="\n".join(notes),
    )
