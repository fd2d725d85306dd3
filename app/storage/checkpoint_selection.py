"""Find the checkpoints of a run whose weights are whole, and load from them; for all that uses a trained run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from trainwright.core.engine import CheckpointRef, StateReader
from trainwright.core.errors import CheckpointError, DamagedCheckpoint
from trainwright.core.job import Job
from trainwright.storage.checkpoints import CheckpointReader, damage_note, newest_intact, read_manifest
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import RunLog

_Value = TypeVar("_Value")


def with_checkpoint(job: Job, step: int | None, load: Callable[[StateReader], _Value]) -> _Value:
    """Return what `load` makes of the weights of the run's newest whole checkpoint, or of the one at `step`.

    Each file is verified when it is read. Where one is damaged, the checkpoint before it is loaded.

    Raises:
        CheckpointError: there is none; names the steps that are kept.
    """

    def loaded(checkpoint: CheckpointRef) -> _Value:
        store = open_store(job.storage)
        manifest = read_manifest(store, job.name, checkpoint)
        return load(CheckpointReader(store, job.name, checkpoint, manifest, weights_only=True))

    return load_newest(job, step, loaded)


def find_checkpoint(job: Job, step: int | None = None) -> tuple[Store, CheckpointRef]:
    """Return the run's newest checkpoint whose weights are whole, or the one at `step`, and its store.

    Raises:
        CheckpointError: there is none; names the steps that are kept.
    """
    store, kept, refs = checkpoints_of(job, step)
    checkpoint, notes = newest_intact(store, job.name, refs, weights_only=True)
    if checkpoint is None:
        raise _none_whole(job, step, store, kept, notes)
    return store, checkpoint


def load_newest(job: Job, step: int | None, load: Callable[[CheckpointRef], _Value]) -> _Value:
    """Return what `load` makes of the newest checkpoint that is not damaged, or of the one at `step`.

    Raises:
        CheckpointError: there is none; names the steps that are kept.
    """
    store, kept, refs = checkpoints_of(job, step)
    notes: list[str] = []
    for checkpoint in reversed(refs):
        try:
            return load(checkpoint)
        except DamagedCheckpoint as error:
            notes.append(damage_note(checkpoint, error))
            print(notes[-1], file=sys.stderr)
    raise _none_whole(job, step, store, kept, notes)


def checkpoints_of(job: Job, step: int | None) -> tuple[Store, str, tuple[CheckpointRef, ...]]:
    """Return the run's store, its steps in words, and the checkpoints that `step` selects, newest last."""
    store = open_store(job.storage)
    entry = RunLog(store, job.name).head()
    named = entry.checkpoints if entry else ()
    return store, ", ".join(str(ref.step) for ref in named), tuple(ref for ref in named if step in (None, ref.step))


def _none_whole(job: Job, step: int | None, store: Store, kept: str, notes: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"the run {job.name!r} has no whole checkpoint" + (f" at step {step}" if step is not None else ""),
        where=store.uri_of(job.name),
        remedy=f"steps kept: {kept}" if kept else "train it first: trainwright fit",
        detail="\n".join(notes),
    )
