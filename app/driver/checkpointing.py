"""Checkpoints: copied by the writers while all stand, uploaded while steps go on, then named by the log.

An upload outlives the generation that began it for as long as the processes that owe its files live; what it holds
stays a true state of the run, even where the ranks were set back below its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from trainwright.core.checkpoint import checkpoint_path
from trainwright.core.errors import StorageError, WorkerLost
from trainwright.core.events import Checkpointed, CheckpointSkipped
from trainwright.driver import memory_checkpointing
from trainwright.driver import messages as m
from trainwright.driver.due_times import checkpoint_due, checkpoint_interval_s, hang_deadline_s
from trainwright.driver.persistent_collections import PersistentSet
from trainwright.driver.state import Phase, State, Upload
from trainwright.driver.transition import Turn


def wants_checkpoint(state: State, now_s: float) -> bool:
    """Whether the ranks, idle at `state.step`, are to be copied into storage now."""
    upload, step = state.upload, state.step
    if state.committed >= step or upload is not None:
        return False
    if state.ending:
        return state.attempts == 0
    interval_s = checkpoint_interval_s(state)
    if interval_s is not None:
        return now_s - state.saved_s >= interval_s
    return state.considered != step and checkpoint_due(state.settings, step)


def skip_if_busy(turn: Turn) -> None:
    """Let a checkpoint that falls due go while another is on its way, unless it is the last one."""
    state = turn.state
    due = checkpoint_due(state.settings, state.step) and state.considered != state.step and not state.ending
    if due and state.upload is not None and state.upload.step != state.step and state.committed < state.step:
        turn.change(considered=state.step)
        reason = f"the checkpoint of step {state.upload.step} is still being written"
        turn.emit(CheckpointSkipped(step=state.step, reason=reason))


def snapshot(turn: Turn, *verbs: Literal["upload", "keep"]) -> None:
    """Have the writers, the keepers or both copy their pieces."""
    state = turn.state
    ranks = {"upload": frozenset(state.writers), "keep": frozenset(state.keepers)}
    copying = sorted({rank for verb in verbs for rank in ranks[verb]})
    workers = [state.members[rank].worker for rank in copying]
    turn.enter(Phase.SNAPSHOTTING, awaiting=PersistentSet(workers), copying=verbs)
    for rank, worker in zip(copying, workers, strict=True):
        own = tuple(verb for verb in verbs if rank in ranks[verb])
        turn.call([worker], "snapshot", m.Copying(step=state.step, verbs=own))
    turn.arm("hang", hang_deadline_s(state))


def snapshotted(turn: Turn) -> None:
    """All pieces are copied: have them stored, and let the ranks go on."""
    state = turn.state
    copies: Mapping[int, m.Snapshot] = state.answers
    assert all(copy.step == state.step for copy in copies.values()), "copies of another step"
    turn.change(phase=Phase.READY)
    if "upload" in state.copying:
        _begin_upload(turn, [copies[rank] for rank in state.writers])
    if "keep" in state.copying:
        memory_checkpointing.begin(turn, copies)


def _begin_upload(turn: Turn, copies: Sequence[m.Snapshot]) -> None:
    state = turn.state
    path = checkpoint_path(state.step, state.generation.token, 0 if state.step > state.named else state.uploads)
    workers = [state.members[rank].worker for rank in state.writers]
    upload = Upload(
        step=state.step,
        path=path,
        owing=PersistentSet(workers),
        generation=state.generation,
        size_bytes=sum(copy.size_bytes for copy in copies),
        blocked_s=max(copy.blocked_s for copy in copies),
        started_s=turn.now_s,
    )
    named = max(state.named, state.step)
    turn.change(
        upload=upload, uploads=state.uploads + 1, named=named, considered=state.step, saved_s=turn.now_s,
        saving_s=upload.blocked_s,
    )  # fmt: skip
    turn.call(workers, "upload", path)


def uploaded(turn: Turn, event: m.Returned) -> None:
    """One writer's files are stored; after the last one the checkpoint is named."""
    upload = _upload(turn)
    turn.change(
        upload=replace(upload, owing=upload.owing - {event.worker}, files=upload.files + tuple(event.value)),
    )
    _go_on(turn)


def upload_failed(turn: Turn, event: m.Raised) -> None:
    """One writer could not store its files: this checkpoint will not be."""
    forget(turn, frozenset({event.worker}), event.failure.error)


def forget(turn: Turn, workers: frozenset[int], trouble: Exception | None = None) -> None:
    """These workers will bring no more files; nothing to do where they owe none."""
    upload = turn.state.upload
    if upload is None or not upload.owing & workers:
        return
    trouble = upload.trouble or trouble or WorkerLost("the process that was writing it ended")
    turn.change(upload=replace(upload, owing=upload.owing - workers, trouble=trouble))
    _go_on(turn)


def committed(turn: Turn, event: m.Committed) -> None:
    """The log names the checkpoint."""
    upload = _upload(turn)
    assert event.checkpoint.path == upload.path, "the answer to another commit"
    turn.change(head=event.checkpoint, older=event.older, attempts=0, upload_s=turn.now_s - upload.started_s)
    turn.emit(
        Checkpointed(
            step=upload.step,
            path=upload.path,
            size_bytes=upload.size_bytes,
            blocked_s=upload.blocked_s,
            seconds=turn.now_s - upload.started_s,
        )
    )
    _empty_slot(turn)


def commit_failed(turn: Turn, event: m.CommitFailed) -> None:
    """The log could not be written: this checkpoint is not."""
    turn.change(upload=replace(_upload(turn), trouble=event.error))
    _give_up(turn)


def abandon(turn: Turn, reason: str) -> None:
    """Stop waiting for files. A commit under way is always waited for, so that the log's entries come in order."""
    upload = turn.state.upload
    if upload is not None and not upload.committing:
        turn.change(upload=replace(upload, owing=PersistentSet(), trouble=StorageError(reason)))
        _give_up(turn)


def _go_on(turn: Turn) -> None:
    upload, state = _upload(turn), turn.state
    if upload.owing:
        return
    if upload.trouble is not None:
        _give_up(turn)
        return
    turn.disarm("upload")  # the answer to a commit is always waited for
    turn.change(upload=replace(upload, committing=True))
    parent = state.head.path if state.head else ""
    turn.want(m.Commit(step=upload.step, path=upload.path, files=upload.files, parent=parent, layout=state.layout))


def _give_up(turn: Turn) -> None:
    """The upload failed. It counts as an attempt where the run waits for it and storage is the cause."""
    upload, state = _upload(turn), turn.state
    needed = state.phase is Phase.WAITING and state.ending and upload.step == state.step
    if needed and not isinstance(upload.trouble, WorkerLost):
        since_s = state.failing_s if state.attempts else turn.now_s
        turn.change(attempts=state.attempts + 1, trouble=upload.trouble, failing_s=since_s)
    turn.emit(CheckpointSkipped(step=upload.step, reason=_first_line(upload.trouble)))
    _empty_slot(turn)


def _empty_slot(turn: Turn) -> None:
    turn.disarm("upload")
    turn.change(upload=None)
    if turn.state.phase is Phase.WAITING:
        turn.change(phase=Phase.READY)


def _upload(turn: Turn) -> Upload:
    upload = turn.state.upload
    assert upload is not None, "no upload is on its way"
    return upload


def _first_line(error: Exception | None) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
