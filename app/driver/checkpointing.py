"""Checkpoints: when they are due, snapshots of idle ranks, uploads during steps, commits to the run log.

An upload continues after the rendezvous epoch that started it, as long as the processes that owe its files live. It
remains a valid state of the run, even if the ranks were restored to an earlier step.

At most one in-memory checkpoint is complete, and one more may be under way. It is complete when each rank has written
its files. None are taken if each piece of the state is on two nodes, in processes that survive a failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from typing import Literal

from trainwright.core.engine import checkpoint_path
from trainwright.core.errors import HangError, StorageError, WorkerLost
from trainwright.core.events import Checkpointed, CheckpointSkipped, Evaluated, Kept, Noted
from trainwright.core.metric_goals import best_evaluation
from trainwright.core.topology import RestartMode, StateTag
from trainwright.driver import messages as m
from trainwright.driver.driver_state import (
    CheckpointUpload,
    DriverState,
    GroupMember,
    JustInTimeCopy,
    MemoryCopy,
    Phase,
    Transition,
)
from trainwright.driver.persistent_collections import PersistentSet
from trainwright.driver.run_policy import RunPolicy


def on_lease_acquired(transition: Transition, event: m.LeaseAcquired) -> None:
    """Note the checkpoints that the run has already."""
    transition.change(
        head=event.head, older=event.older, saved_s=transition.now_s,
        kept=event.kept, versions=event.kept.version if event.kept else 0,
    )  # fmt: skip
    if event.kept is not None and event.kept.step > latest_usable_step(transition.state):
        transition.change(kept=None)


def on_state_restored(transition: Transition, tags: Mapping[int, StateTag]) -> None:
    """Choose the ranks that write checkpoints, once all ranks are restored."""
    state = transition.state
    assert state.epoch.restore_plan is not None, "there is a restore plan"
    nodes = [member.node for member in state.membership.members]
    keepers = () if state.memory.keep_off else choose_memory_copy_ranks(tags, nodes, state.settings.world.reform)
    transition.change(
        writers=choose_writers(tags),
        keepers=keepers,
        neighbours=choose_neighbours(tags, nodes, keepers),
        kept_s=transition.now_s if state.epoch.restore_plan.source != "keeper" else state.memory.kept_s,
        replicas=tuple(sorted(rank for rank, tag in tags.items() if len(tag.pieces) == tag.total)),
        just_in_time=None,
        considered=-1,
    )


def piece_holders(
    held: Mapping[int, StateTag] | Mapping[int, GroupMember], ranks: Iterable[int] | None = None
) -> dict[str, int]:
    """Return the lowest rank that holds each piece of the state, by piece; of these `ranks`, or of all."""
    holders: dict[str, int] = {}
    for rank in sorted(held if ranks is None else ranks):
        for piece in held[rank].pieces:
            holders.setdefault(piece, rank)
    return holders


def choose_writers(held: Mapping[int, StateTag] | Mapping[int, GroupMember]) -> tuple[int, ...]:
    """Return the ranks that write a checkpoint: the lowest that holds each piece. Rank 0 alone for replicas."""
    return tuple(sorted(set(piece_holders(held).values())))


def wants_checkpoint(state: DriverState, now_s: float) -> bool:
    """Whether a checkpoint of the current step is to be written now."""
    upload, step = state.checkpoints.upload, state.position.step
    if state.committed >= step or upload is not None:
        return False
    if state.ending:
        return state.checkpoints.attempts == 0
    if is_best_unsaved(state):
        return state.checkpoints.considered != step
    interval_s = checkpoint_interval_s(state)
    if interval_s is not None:
        return now_s - state.checkpoints.saved_s >= interval_s
    return state.checkpoints.considered != step and checkpoint_due(state.settings, step)


def is_best_unsaved(state: DriverState) -> bool:
    """Whether the evaluation of the current step is the best, and no checkpoint of the step is committed."""
    step = state.position.step
    best = best_kept_evaluation(state, step) if state.evaluated == step > state.committed else None
    return best is not None and best.step == step


def best_kept_evaluation(state: DriverState, step: int = 0) -> Evaluated | None:
    """Return the best evaluation among those of the named checkpoints and of a step; None without one or a goal."""
    checkpoints, goal = state.checkpoints, state.settings.saving.best
    if not goal:
        return None
    steps = {step, state.committed, *(ref.step for ref in checkpoints.older)}
    return best_evaluation(goal, (event for event in state.segment.evaluations if event.step in steps))


def _paths_to_hold(state: DriverState, step: int) -> tuple[str, ...]:
    """Return the path of the checkpoint that stays when that of a step is committed, because it is the best."""
    checkpoints, best = state.checkpoints, best_kept_evaluation(state, step)
    named = (*checkpoints.older, *((checkpoints.head,) if checkpoints.head else ()))
    return tuple(ref.path for ref in named if best is not None and ref.step == best.step)


def skip_if_upload_runs(transition: Transition) -> None:
    """Skip a checkpoint that is due while another is being uploaded, unless it is the last one."""
    checkpoints, step = transition.state.checkpoints, transition.state.position.step
    if checkpoints.upload is None or checkpoints.upload.step == step or transition.state.committed >= step:
        return
    if checkpoint_due(transition.settings, step) and checkpoints.considered != step and not transition.state.ending:
        transition.change(considered=step)
        reason = f"the checkpoint of step {checkpoints.upload.step} is still being written"
        transition.emit(CheckpointSkipped(step=step, reason=reason))


def take_snapshot(
    transition: Transition, *verbs: Literal["upload", "keep"], writers: tuple[int, ...] | None = None
) -> None:
    """Copy the state on the ranks that write to the store, to memory, or to both; `writers` replaces the first ones."""
    if writers is not None:
        transition.change(writers=writers)
    state = transition.state
    ranks = {"upload": frozenset(state.checkpoints.writers), "keep": frozenset(state.memory.keepers)}
    copying = sorted({rank for verb in verbs for rank in ranks[verb]})
    workers = [state.membership.members[rank].worker for rank in copying]
    transition.enter(Phase.SNAPSHOTTING, copying=verbs)
    transition.await_workers(workers)
    for rank, worker in zip(copying, workers, strict=True):
        own = tuple(verb for verb in verbs if rank in ranks[verb])
        transition.call([worker], "snapshot", m.SnapshotRequest(step=state.position.step, verbs=own))
    transition.arm("hang", state.hang_deadline_s)


def on_snapshots_taken(transition: Transition) -> None:
    """Have the copies stored while the ranks continue."""
    state = transition.state
    copies: Mapping[int, m.SnapshotTaken] = state.answers
    assert all(copy.step == state.position.step for copy in copies.values()), "copies of another step"
    transition.enter(Phase.READY)
    if "upload" in state.checkpoints.copying:
        _begin_upload(transition, [copies[rank] for rank in state.checkpoints.writers])
    if "keep" in state.checkpoints.copying:
        _begin_memory_copy(transition, copies)


def _begin_upload(transition: Transition, copies: Sequence[m.SnapshotTaken]) -> None:
    state, checkpoints, step = transition.state, transition.state.checkpoints, transition.state.position.step
    again = 0 if step > checkpoints.named else checkpoints.uploads
    workers = [state.membership.members[rank].worker for rank in checkpoints.writers]
    upload = CheckpointUpload(
        step=step,
        path=checkpoint_path(step, state.epoch.generation.token, again),
        owing=PersistentSet(workers),
        size_bytes=sum(copy.size_bytes for copy in copies),
        blocked_s=max(copy.blocked_s for copy in copies),
        started_s=transition.now_s,
    )
    transition.change(
        upload=upload, uploads=checkpoints.uploads + 1, named=max(checkpoints.named, step),
        considered=step, saved_s=transition.now_s, saving_s=upload.blocked_s,
    )  # fmt: skip
    transition.call(workers, "upload", upload.path)


def on_upload_returned(transition: Transition, event: m.CallReturned) -> None:
    """Note the stored files of one writer; commit the checkpoint after the last one."""
    upload = _current_upload(transition)
    transition.change(
        upload=replace(upload, owing=upload.owing - {event.worker}, files=upload.files + tuple(event.value))
    )
    _commit_if_complete(transition)


def drop_upload_workers(transition: Transition, workers: frozenset[int], trouble: Exception | None = None) -> None:
    """Give up a checkpoint of which these workers owe files, because they will deliver none."""
    upload = transition.state.checkpoints.upload
    if upload is None or not upload.owing & workers:
        return
    trouble = upload.trouble or trouble or WorkerLost("the process that was writing it ended")
    transition.change(upload=replace(upload, owing=upload.owing - workers, trouble=trouble))
    _commit_if_complete(transition)


def on_committed(transition: Transition, event: m.CheckpointCommitted) -> None:
    """Note that the run log names the checkpoint."""
    upload = _current_upload(transition)
    assert event.checkpoint.path == upload.path, "the answer to another commit"
    transition.change(
        head=event.checkpoint, older=event.older, attempts=0, upload_s=transition.now_s - upload.started_s
    )
    transition.emit(
        Checkpointed(
            step=upload.step,
            path=upload.path,
            size_bytes=upload.size_bytes,
            blocked_s=upload.blocked_s,
            seconds=transition.now_s - upload.started_s,
        )
    )
    _end_upload(transition)


def note_announced(transition: Transition, report: m.SegmentReport | None = None) -> None:
    """Note that callbacks were told of checkpoints: rank 0 has taken a step since, or reports a segment's end."""
    checkpoints = transition.state.checkpoints
    transition.change(
        announced=max(checkpoints.announced, transition.state.segment.announcing),
        announces=report.announces if report is not None else checkpoints.announces,
    )


def on_commit_failed(transition: Transition, event: m.CommitFailed) -> None:
    """Give up a checkpoint that the run log does not name, because it could not be written."""
    transition.change(upload=replace(_current_upload(transition), trouble=event.error))
    _skip_checkpoint(transition)


def await_upload(transition: Transition) -> None:
    """Let the ranks wait for the upload under way, until its deadline; the answer to a commit is always waited for."""
    transition.enter(Phase.WAITING)
    if transition.state.checkpoints.upload is not None and not transition.state.checkpoints.upload.committing:
        transition.arm("upload", transition.settings.saving.upload_deadline_s)


def abandon_upload(transition: Transition, reason: str) -> None:
    """Stop waiting for files, because the run ends: writers may still be busy, and cannot write another checkpoint.

    A commit under way is always waited for, so that entries of the log stay in order.
    """
    upload = transition.state.checkpoints.upload
    if upload is not None and not upload.committing:
        transition.change(upload=replace(upload, owing=PersistentSet(), trouble=StorageError(reason)))
        _skip_checkpoint(transition)


def drop_damaged_head(transition: Transition) -> None:
    """Take the checkpoint before the newest one, which is damaged, as the newest."""
    *older, head = transition.state.checkpoints.older
    transition.change(head=head, older=tuple(older))


def _commit_if_complete(transition: Transition) -> None:
    upload, state = _current_upload(transition), transition.state
    if upload.owing:
        return
    if upload.trouble is not None:
        _skip_checkpoint(transition)
        return
    transition.disarm("upload")  # the answer to a commit is always waited for
    transition.change(upload=replace(upload, committing=True))
    parent = state.checkpoints.head.path if state.checkpoints.head else ""
    transition.want(
        m.CommitCheckpoint(
            step=upload.step,
            path=upload.path,
            files=upload.files,
            parent=parent,
            hold=_paths_to_hold(state, upload.step),
        )
    )


def _skip_checkpoint(transition: Transition) -> None:
    """Report a failed upload. It counts as an attempt if the run waits for it and storage is the cause."""
    upload, state = _current_upload(transition), transition.state
    needed = state.phase is Phase.WAITING and state.ending and upload.step == state.position.step
    if needed and not isinstance(upload.trouble, WorkerLost):
        since_s = state.checkpoints.failing_s if state.checkpoints.attempts else transition.now_s
        transition.change(attempts=state.checkpoints.attempts + 1, trouble=upload.trouble, failing_s=since_s)
    transition.emit(CheckpointSkipped(step=upload.step, reason=_first_line(upload.trouble)))
    _end_upload(transition)


def _end_upload(transition: Transition) -> None:
    transition.disarm("upload")
    transition.change(upload=None)
    if transition.state.phase is Phase.WAITING:
        transition.enter(Phase.READY)


def _current_upload(transition: Transition) -> CheckpointUpload:
    upload = transition.state.checkpoints.upload
    assert upload is not None, "nothing is being uploaded"
    return upload


def _first_line(error: Exception | None) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# --- Copies of the state in the nodes' memory -------------------------------------------------------------------------


_COPIES_IN_MEMORY = 2  # on as many nodes, where there are
TOKEN_BITS = 32  # a later driver's versions are higher


def choose_memory_copy_ranks(
    tags: Mapping[int, StateTag], nodes: Sequence[str], reform: RestartMode
) -> tuple[int, ...]:
    """Return the ranks that copy what they hold: the lowest holder of each piece on each of two nodes, if possible.

    Return none if each piece is on two nodes, in processes that survive a failure. A copy of some pieces is useless.

    Args:
        tags: what each rank holds, by rank.
        nodes: name of the node of each rank.
    """
    holders: dict[str, dict[str, int]] = {}  # the lowest rank on each node, by piece
    for rank in sorted(tags):
        for piece in tags[rank].pieces:
            holders.setdefault(piece, {}).setdefault(nodes[rank], rank)
    needed = reform == "new_process" or any(len(by_node) < _COPIES_IN_MEMORY for by_node in holders.values())
    keepers = {rank for by_node in holders.values() for rank in islice(by_node.values(), _COPIES_IN_MEMORY)}
    return tuple(sorted(keepers)) if needed else ()


def choose_neighbours(
    tags: Mapping[int, StateTag], nodes: Sequence[str], keepers: Sequence[int]
) -> tuple[tuple[str, str], ...]:
    """Return the nodes that alone hold copies of some piece, each with another node that gets its copies too.

    Args:
        tags, nodes: as of `choose_memory_copy_ranks`, which returns the `keepers`.
    """
    ring = tuple(dict.fromkeys(nodes[rank] for rank in keepers))
    holders: dict[str, set[str]] = {}
    for rank in keepers:
        for piece in tags[rank].pieces:
            holders.setdefault(piece, set()).add(nodes[rank])
    alone = {node for found in holders.values() if len(found) < _COPIES_IN_MEMORY for node in found}
    following = (*ring[1:], *ring[:1])
    return tuple((node, after) for node, after in zip(ring, following, strict=True) if node in alone and after != node)


def wants_memory_copy(state: DriverState, now_s: float) -> bool:
    """Whether the current step is to be copied into memory now."""
    interval_s = _memory_copy_interval_s(state)
    if interval_s is None or state.memory.keeping is not None or state.ending:
        return False
    return state.position.step > state.copied and now_s - state.memory.kept_s >= interval_s


def _begin_memory_copy(transition: Transition, copies: Mapping[int, m.SnapshotTaken]) -> None:
    state = transition.state
    workers = [state.membership.members[rank].worker for rank in state.memory.keepers]
    keeping = MemoryCopy(
        version=_next_version(state),
        step=state.position.step,
        owing=PersistentSet(workers),
        blocked_s=max(copies[rank].blocked_s for rank in state.memory.keepers),
        started_s=transition.now_s,
        neighbours=state.memory.neighbours,
    )
    transition.change(keeping=keeping, versions=keeping.version, kept_s=transition.now_s, copied_s=keeping.blocked_s)
    hold = (state.memory.kept.version,) if state.memory.kept else ()
    request = m.MemoryCopyRequest(version=keeping.version, hold=hold, neighbours=state.memory.neighbours)
    transition.call(workers, "keep", request)


def _next_version(state: DriverState) -> int:
    return max(state.memory.versions, state.epoch.generation.token << TOKEN_BITS) + 1


def request_just_in_time_copy(transition: Transition, workers: Set[int]) -> frozenset[int]:
    """Have one of these idle workers, whose processes are to be replaced, copy its state into memory first.

    That is just-in-time checkpointing (Gupta et al., EuroSys 2024). A survivor of a failure has completed more steps
    than any copy, and one with the whole state is enough. If ranks hang, none is asked: the others would wait for its
    copy too. None is asked on accelerators: a collective of NCCL that is aborted may end without an error, and its
    values would be taken for gradients. The state of a coordinator is in servers, which may be lost.

    Returns:
        the worker that is asked, and will answer `leave`; none if no copy is wanted, or none of them can make it.
    """
    state, memory, world, blame = (
        transition.state,
        transition.state.memory,
        transition.settings.world,
        transition.state.recovery.blame,
    )
    if transition.settings.saving.keep_s is None or memory.keep_off or memory.just_in_time is not None:
        return frozenset()
    if world.topology != "collective" or world.devices[0] != "cpu" or state.trials is not None:
        return frozenset()
    hung = blame is not None and isinstance(blame.error, HangError)
    if hung or state.recovery.spiked or state.position.progress <= state.copied:
        return frozenset()
    members = state.membership.members
    busy = memory.keeping.owing if memory.keeping is not None else PersistentSet()
    doomed = {member.node for member in members if member.worker in state.handover.leaving}
    able = (members[rank] for rank in memory.replicas if rank < len(members))
    found = [one.worker for one in able if one.worker in workers - busy and one.node not in doomed][:1]
    if found:
        version = _next_version(state)
        hold = tuple(copy.version for copy in (memory.kept, memory.keeping) if copy is not None)
        transition.change(
            versions=version, just_in_time=JustInTimeCopy(worker=found[0], version=version, started_s=transition.now_s)
        )
        transition.call(found, "leave", m.MemoryCopyRequest(version=version, hold=hold))
    return frozenset(found)


def request_survivors_copy(transition: Transition, rank: int) -> frozenset[int]:
    """Have a worker of the previous driver that holds the whole state copy it; see `request_just_in_time_copy`."""
    transition.change(replicas=(rank,))
    return request_just_in_time_copy(transition, frozenset({transition.state.membership.members[rank].worker}))


def makes_just_in_time_copy(state: DriverState, worker: int) -> bool:
    """Whether a worker was asked to copy its state before its process is replaced."""
    return state.memory.just_in_time is not None and state.memory.just_in_time.worker == worker


def on_just_in_time_copy_taken(transition: Transition, taken: m.MemoryCopyTaken | None) -> None:
    """Use the copy of a worker that leaves, if it is newer than the others and may be restored.

    If it could not make one, another may be asked.
    """
    state, just_in_time, former = transition.state, transition.state.memory.just_in_time, transition.state.memory.kept
    assert just_in_time is not None, "no copy was requested"
    if taken is None or not (taken.files or taken.trouble):
        transition.change(just_in_time=None)
        return
    transition.change(just_in_time=replace(just_in_time, taken=True))
    if taken.trouble:
        transition.emit(Noted(text=f"a survivor did not copy its state: {taken.trouble}"))
    if taken.files and state.copied < taken.step <= latest_usable_step(state):
        kept = m.MemoryCheckpoint(version=just_in_time.version, step=taken.step, files=taken.files)
        _use_memory_copy(transition, kept, 0.0, just_in_time.started_s)
        transition.change(former=former)


def on_memory_copy_returned(transition: Transition, event: m.CallReturned) -> None:
    """Note one rank's files in memory; the copy is complete after the last one."""
    memory, keeping, taken = transition.state.memory, _current_memory_copy(transition.state), event.value
    transition.change(keeping=replace(keeping, files=keeping.files + taken.files))
    if taken.trouble and memory.neighbours == keeping.neighbours and memory.neighbours and not keeping.spoiled:
        transition.change(neighbours=())
        transition.emit(Noted(text=f"copies of the state stay in the memory of their own nodes: {taken.trouble}"))
    _drop_memory_copy_owing(transition, frozenset({event.worker}))


def drop_memory_copy_workers(transition: Transition, workers: frozenset[int]) -> None:
    """Give up an in-memory copy of which these workers owe files, because they will deliver none."""
    keeping, just_in_time = transition.state.memory.keeping, transition.state.memory.just_in_time
    if just_in_time is not None and just_in_time.worker in workers and not just_in_time.taken:
        transition.change(just_in_time=None)
    if keeping is not None and keeping.owing & workers:
        transition.change(keeping=replace(keeping, spoiled=True))
        _drop_memory_copy_owing(transition, workers)


def discard_memory_copies_from(transition: Transition, step: int) -> None:
    """Use no in-memory copy of this step or later, in this driver or in the next."""
    kept, keeping = transition.state.memory.kept, transition.state.memory.keeping
    transition.change(former=None)
    if kept is not None and kept.step >= step:
        transition.change(kept=None)
        transition.want(m.MarkComplete(kept=None))
    if keeping is not None and keeping.step >= step:
        transition.change(keeping=replace(keeping, spoiled=True))


def forget_memory_checkpoint(transition: Transition) -> None:
    """Do not restore from the in-memory checkpoint again, because a worker could not read it; try that before it."""
    transition.change(kept=transition.state.memory.former, former=None)


def on_memory_copy_refused(transition: Transition, event: m.CallRaised) -> None:
    """Stop in-memory checkpoints, because a node has no memory for one."""
    transition.change(keepers=(), keep_off=True)
    transition.emit(Noted(text=f"no more copies of the state are kept in memory: {event.failure.error}"))
    drop_memory_copy_workers(transition, frozenset({event.worker}))


def _drop_memory_copy_owing(transition: Transition, workers: frozenset[int]) -> None:
    keeping = _current_memory_copy(transition.state)
    keeping = replace(keeping, owing=keeping.owing - workers)
    transition.change(keeping=keeping if keeping.owing else None)
    if not keeping.owing and not keeping.spoiled:
        kept = m.MemoryCheckpoint(version=keeping.version, step=keeping.step, files=keeping.files)
        _use_memory_copy(transition, kept, keeping.blocked_s, keeping.started_s)


def _use_memory_copy(transition: Transition, kept: m.MemoryCheckpoint, blocked_s: float, started_s: float) -> None:
    """Restore from this copy from now on, unless a newer one was complete earlier."""
    former = transition.state.memory.kept
    if former is not None and former.version > kept.version:
        return
    transition.change(kept=kept, former=None)
    transition.want(m.MarkComplete(kept=kept))
    nodes, sizes = {item.node for item in kept.files}, {item.file.name: item.file.size_bytes for item in kept.files}
    transition.emit(
        Kept(
            step=kept.step, size_bytes=sum(sizes.values()), nodes=sorted(nodes),
            blocked_s=blocked_s, seconds=transition.now_s - started_s,
        )
    )  # fmt: skip


def _current_memory_copy(state: DriverState) -> MemoryCopy:
    assert state.memory.keeping is not None, "nothing is being copied into memory"
    return state.memory.keeping


# --- Milestones -------------------------------------------------------------------------------------------------------


_RECHECK_S = 1.0  # before the next look, while a copy is under way
_MEMORY_COPY_SHARE = 0.01  # of the time, at most, for copies in memory
MIN_CHECKPOINT_INTERVAL_S, _SECONDS_PER_HOUR, ASSUMED_UPTIME_S = 10.0, 3600.0, 86400.0


def checkpoint_due(settings: RunPolicy, step: int) -> bool:
    """Whether a checkpoint is due after this many completed steps."""
    if settings.saving.checkpoint_auto:
        return step >= settings.length.total_steps
    return _is_multiple_reached(settings, step, _checkpoint_steps(settings))


def evaluation_due(settings: RunPolicy, step: int) -> bool:
    """Whether an evaluation is due after this many completed steps."""
    every = settings.length.evaluate_steps
    return every is not None and _is_multiple_reached(settings, step, every)


def latest_usable_step(state: DriverState) -> float:
    """Return the step that a restored state may have at most: no evaluation that decisions depend on is left out.

    A driver may end before it has stored an evaluation after which its workers went on.
    """
    settings, stride = state.settings, state.settings.length.stride
    if settings.length.evaluate_steps is None or not settings.goals:
        return math.inf
    first = max(state.evaluated, state.committed - 1, 0) // stride * stride + stride
    steps = range(first, settings.length.total_steps, stride)
    return next((step for step in steps if evaluation_due(settings, step)), math.inf)


def _is_multiple_reached(settings: RunPolicy, step: int, every: int) -> bool:
    """Whether the last stride reached a multiple of `every`, or the end."""
    return step > 0 and (
        step // every > (step - settings.length.stride) // every or step >= settings.length.total_steps
    )


def next_milestone(settings: RunPolicy, step: int) -> int:
    """Return the first step after `step` at which something is due, at most the last step."""
    intervals = [settings.length.total_steps if settings.saving.checkpoint_auto else _checkpoint_steps(settings)]
    if settings.length.evaluate_steps is not None:
        intervals.append(settings.length.evaluate_steps)
    due = min(step - step % every + every for every in intervals)
    if settings.length.profile and step < settings.length.profile[-1]:
        due = min(due, settings.length.profile[-1])
    return min(settings.length.total_steps, -(-due // settings.length.stride) * settings.length.stride)


def _memory_copy_interval_s(state: DriverState) -> float | None:
    """Seconds between copies in memory: as the job wants, but they may take a hundredth of the time at most."""
    least_s = state.settings.saving.keep_s
    if least_s is None or state.memory.keep_off or not state.memory.keepers:
        return None
    return max(least_s, state.memory.copied_s / _MEMORY_COPY_SHARE)


def checkpoint_interval_s(state: DriverState) -> float | None:
    """Return the seconds between checkpoints: sqrt(2 x cost x mean time between failures) (Young, 1974).

    The cost is the time that the last checkpoint blocked the steps. The interval is at least twice the time of the last
    upload. The rate of failures is that of the last hour, at least one a day. None: checkpoints come by steps.
    """
    if not state.settings.saving.checkpoint_auto:
        return None
    if not state.checkpoints.saving_s:
        return MIN_CHECKPOINT_INTERVAL_S
    failures = len(state.recovery.failed_s)
    between_s = min(ASSUMED_UPTIME_S, _SECONDS_PER_HOUR / failures) if failures else ASSUMED_UPTIME_S
    young_s = math.sqrt(2 * state.checkpoints.saving_s * between_s)
    return max(young_s, 2 * state.checkpoints.upload_s, MIN_CHECKPOINT_INTERVAL_S)


def is_copy_due(state: DriverState, now_s: float) -> bool:
    """Whether it is time for a copy in memory or a checkpoint, and none of its kind is under way."""
    return any(idle and due_s <= now_s for idle, due_s in _timed_copies(state))


def seconds_until_copy(state: DriverState, now_s: float) -> float | None:
    """Return the seconds until the ranks may have to pause for a copy that is due by time; None for never."""
    copies = _timed_copies(state)
    if not copies:
        return None
    return min(max(due_s - now_s, 0.0 if idle else _RECHECK_S) for idle, due_s in copies)


def _timed_copies(state: DriverState) -> list[tuple[bool, float]]:
    """For each kind of copy that comes by time: whether none is under way, and when the next is due."""
    keep_s, checkpoint_s = _memory_copy_interval_s(state), checkpoint_interval_s(state)
    copies = []
    if keep_s is not None:
        copies.append((state.memory.keeping is None, state.memory.kept_s + keep_s))
    if checkpoint_s is not None:
        copies.append((state.checkpoints.upload is None, state.checkpoints.saved_s + checkpoint_s))
    return copies


def _checkpoint_steps(settings: RunPolicy) -> int:
    return settings.saving.checkpoint_steps or settings.length.steps_per_epoch
