"""Recover from worker failures: find the cause, release the group, replace workers, and decide when to give up.

The driver enters GATHERING at the start and after every failure. It waits for calls under way, so that the first cause
is known before a failure counts as one of the cluster. Ranks that wait in a collective are interrupted, idle ranks
leave the group. A new process takes a lost rank at once (see `membership`).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from trainwright.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    HangError,
    PeerLost,
    StorageError,
    TrainwrightError,
    WorkerLost,
)
from trainwright.core.events import Noted, Stacks, Waiting
from trainwright.driver import dynamic_members, failure_policy, plan_trials, preemption
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import drop_upload_workers
from trainwright.driver.driver_state import RECOVERY_PHASES, DriverState, FailureCause, Phase, Transition
from trainwright.driver.membership import complete_members, on_standby_died, replace_workers
from trainwright.driver.persistent_collections import PersistentMap
from trainwright.driver.shutdown import end_run

_SHOWN_RANKS = 8
_STEPPING = frozenset({Phase.RUNNING, Phase.HEALING, Phase.PROBING})  # throwaway steps are the first one's


def on_worker_died(turn: Transition, event: m.WorkerDied) -> None:
    """A process ended. Once the outcome is decided that matters only for what it was uploading."""
    state = turn.state
    if state.phase in (Phase.CLOSING, Phase.RELEASING):
        _drop_dead_workers(turn, frozenset({event.worker}))
        return
    if event.worker in state.membership.spares:
        on_standby_died(turn, event)
        return
    rank = state.membership.rank_of[event.worker]
    node = state.membership.members[rank].node
    error = WorkerLost(
        f"the worker of rank {rank} ended: {event.cause}",
        where=f"rank {rank}, node {node or 'not known'}",
        remedy="look for memory use, preemption and the node's health at that time; then run the same command again",
    )
    blame = FailureCause(
        error=error, event=failure_policy.failed_event(turn.state, event.worker, rank, event.cause), kind="died"
    )
    if dynamic_members.is_dynamic(state, event.worker):
        dynamic_members.on_members_lost(turn, blame, frozenset({event.worker}))
        return
    _begin_recovery(turn, blame, lost={event.worker}, again=event.worker in state.membership.starting)


def _drop_dead_workers(turn: Transition, workers: frozenset[int]) -> None:
    """They are dead and will not be replaced: what they owe is not waited for."""
    state = turn.state
    turn.change(
        rank_of=state.membership.rank_of.without(workers),
        spares=state.membership.spares.without(workers),
    )
    drop_upload_workers(turn, workers)


def on_call_raised(turn: Transition, event: m.CallRaised) -> None:
    """A call raised: end the run where the user's code or data is the cause, otherwise recover."""
    state = turn.state
    rank, error, kind = state.membership.rank_of[event.worker], event.failure.error, event.failure.kind
    detail = error.detail if isinstance(error, TrainwrightError) else ""
    failed = failure_policy.failed_event(turn.state, event.worker, rank, _text(error), detail)
    if state.trials is not None and kind in ("user", "data", "internal"):
        _try_another(turn, FailureCause(error=error, event=failed), kill=kind == "internal")
    elif event.verb == "heal" and isinstance(error, DamagedCheckpoint) and _has_older(state):
        _has_answered(turn, event.worker)
        _fall_back(turn, error, FailureCause(error=error, event=failed))
    elif kind in ("user", "data") or isinstance(error, CheckpointError):
        turn.emit(failed)
        if event.verb == "upload":
            drop_upload_workers(turn, frozenset({event.worker}), error)
        end_run(turn, "failed", error)
    elif dynamic_members.is_dynamic(state, event.worker):
        blame = FailureCause(error=error, event=failed, peer=kind == "peer")
        spent = state.settings.world.reform == "new_process" and kind != "peer"  # no process joins twice
        if spent or kind == "internal" or event.verb in ("leave", "upload", "keep"):
            dynamic_members.on_members_lost(turn, blame, frozenset({event.worker}), kill=True)
        else:
            dynamic_members.on_member_left(turn, event.worker, blame)
    elif kind == "internal" or event.verb in ("leave", "upload", "keep"):
        blame = FailureCause(error=error, event=failed, kind=_text(error).split(":")[0] if kind == "internal" else "")
        _begin_recovery(turn, blame, lost={event.worker}, kill=True)
    elif kind == "peer":
        _has_answered(turn, event.worker)
        _begin_recovery(turn, FailureCause(error=error, event=failed, peer=True), left={event.worker})
    else:
        if event.verb == "heal":
            turn.change(kept=None)  # what could not be read is not asked for again
        _has_answered(turn, event.worker)
        _begin_recovery(turn, FailureCause(error=error, event=failed))


def _has_older(state: DriverState) -> bool:
    """Whether another checkpoint can take the place of the one that is loaded; one rank's word is enough for that."""
    return bool(state.checkpoints.older) or state.phase is Phase.GATHERING


def _fall_back(turn: Transition, error: DamagedCheckpoint, blame: FailureCause) -> None:
    """Form again, and load the checkpoint before the damaged one. That is no failure of the workers."""
    state = turn.state
    if state.phase is not Phase.GATHERING and state.checkpoints.head is not None:
        *older, head = state.checkpoints.older
        text = f"the checkpoint of step {state.checkpoints.head.step} is passed over: {error.what} ({error.where})"
        turn.emit(Noted(text=f"{text}; the run goes on from that of step {head.step}"))
        turn.change(head=head, older=tuple(older))
    _begin_recovery(turn, blame)
    turn.change(failures=state.recovery.failures, failed_s=state.recovery.failed_s)


def _has_answered(turn: Transition, worker: int) -> None:
    """It owes nothing more, whether the others waited for it or not."""
    others = {other: doing for other, doing in turn.state.dynamic.apart.items() if other != worker}
    turn.change(awaiting=turn.state.awaiting - {worker}, apart=others)


def on_chief_lost(turn: Transition, event: m.CallReturned) -> None:
    """A worker was to follow the chief to the end of the generation: it lost the chief, whose end may be told yet."""
    error = PeerLost("it no longer follows the chief")
    failed = failure_policy.failed_event(
        turn.state, event.worker, turn.state.membership.rank_of[event.worker], error.what
    )
    dynamic_members.on_member_left(turn, event.worker, FailureCause(error=error, event=failed, peer=True))


def _try_another(turn: Transition, blame: FailureCause, *, kill: bool) -> None:
    """A rank cannot work under the plan on trial: the others let go. No failure of the run."""
    worker, state = frozenset({blame.event.worker}), turn.state
    if _is_counted_by_peers_only(state):
        turn.change(failures=state.recovery.failures - 1, failed_s=state.recovery.failed_s[:-1], suspect=None)
    plan_trials.reject_plan(turn, blame.error)
    turn.change(awaiting=turn.state.awaiting - worker)
    if turn.state.phase is not Phase.GATHERING:
        _release_idle_workers(turn, worker, False)
    turn.change(blame=blame)
    if kill:
        _replace(turn, worker, kill=True)


def _is_counted_by_peers_only(state: DriverState) -> bool:
    """Whether a failure was counted, of the first plan on trial, by none but those who lost a peer."""
    if state.recovery.blame is None or state.phase is not Phase.GATHERING or plan_trials.is_optional_trial(state):
        return False
    return state.recovery.blame.peer and not preemption.is_expected_failure(state, state.recovery.blame)


def on_silence(turn: Transition, deadline_s: float) -> None:
    """Workers that owe an answer did not move in time: those that only wait for others can be interrupted."""
    state = turn.state
    if all(dynamic_members.is_dynamic(state, worker) for worker in state.awaiting):
        dynamic_members.on_members_silent(turn, frozenset(state.awaiting))
        return
    ranks = [state.membership.rank_of[worker] for worker in state.awaiting]
    error = HangError(
        f"{_ranks(ranks)} did not move for {deadline_s:g} s while {state.phase.value}",
        remedy="if a step or an evaluation takes that long, raise hang_deadline_s",
    )
    turn.change(stacks=PersistentMap())
    _begin_recovery(
        turn, FailureCause(error=error, event=failure_policy.failed_event(turn.state, -1, -1, error.what)), explain=True
    )
    if turn.state.phase is Phase.GATHERING:
        turn.arm("leave", state.settings.deadlines.interrupt_deadline_s)


def on_stacks_returned(turn: Transition, event: m.CallReturned) -> None:
    """A rank says where it stood when the group did not move."""
    state = turn.state
    rank = state.membership.rank_of[event.worker]
    turn.change(stacks=state.recovery.stacks.put(rank, event.value))
    turn.emit(Stacks(worker=event.worker, rank=rank, node=state.membership.members[rank].node, text=event.value))


def on_isolated(turn: Transition, blame: FailureCause | None) -> None:
    """Where there is a cause for it: nobody reaches those that all need, who themselves know nothing of it."""
    state = turn.state
    if blame is not None:
        _begin_recovery(turn, blame)
    if blame is not None and state.recovery.losing:  # it was counted when the first of them was lost
        turn.change(failures=state.recovery.failures, failed_s=state.recovery.failed_s)


def on_upload_deadline(turn: Transition) -> None:
    """The run waits for nothing but an upload, and the store does not take it: end the processes that hang in it."""
    upload = turn.state.checkpoints.upload
    assert upload is not None and upload.owing, "nothing is being uploaded"
    error = StorageError(
        f"the checkpoint of step {upload.step} was not written within {turn.settings.saving.upload_deadline_s:g} s",
        where=upload.path,
        remedy="check that the store can be written; the same command goes on from the last checkpoint",
    )
    blame = FailureCause(error=error, event=failure_policy.failed_event(turn.state, -1, -1, error.what))
    _begin_recovery(turn, blame, lost=upload.owing, kill=True)


def _begin_recovery(
    turn: Transition,
    blame: FailureCause,
    *,
    lost: Iterable[int] = (),
    left: Iterable[int] = (),
    kill: bool = False,
    again: bool = False,
    explain: bool = False,
) -> None:
    """Count a failure, let the idle ranks go, and replace the lost workers.

    Args:
        blame: this sign of failure.
        lost: workers to replace; `kill` ends them first.
        left: workers that have left the group by themselves.
        again: a failure of its own, although one is being recovered from already.
        explain: the busy ranks are to say where they stand.
    """
    state = turn.state
    entering = state.phase is not Phase.GATHERING
    if not blame.peer:
        turn.emit(blame.event)
    if (entering or again) and state.shutdown.stopping and state.phase in RECOVERY_PHASES:
        end_run(turn, "stopped")
        if not kill:
            _drop_dead_workers(turn, frozenset(lost))
        return
    if entering or again or (state.recovery.blame is None and not blame.peer):  # who lets go as planned may lose others
        turn.change(blame=blame)
        failure_policy.count_failure(turn)
        if preemption.is_expected_failure(state, blame) or (entering and plan_trials.is_optional_trial(state)):
            turn.change(failures=state.recovery.failures, failed_s=state.recovery.failed_s)
    elif state.recovery.blame is not None and state.recovery.blame.peer and not blame.peer:
        turn.change(blame=blame)
    stepping = entering and state.phase in _STEPPING and not plan_trials.is_optional_trial(state)
    if stepping or (state.recovery.suspect and state.recovery.suspect.peer and not again):
        turn.change(suspect=blame)
    lost, left = frozenset(lost), frozenset(left)
    if entering:
        _release_idle_workers(turn, lost | left, explain)
    elif not lost and not blame.peer:
        _release_workers(turn, frozenset({blame.event.worker}))
    _replace(turn, lost, kill=kill)
    if turn.settings.world.reform == "new_process":
        _replace(turn, left, kill=True)


def _release_idle_workers(turn: Transition, gone: frozenset[int], explain: bool) -> None:
    turn.disarm()
    dynamic_members.reabsorb_members(turn)
    state = turn.state
    since_s = state.recovery.since_s if state.phase in RECOVERY_PHASES else turn.now_s
    turn.enter(Phase.GATHERING, since_s=since_s)
    turn.call(sorted(state.awaiting - gone), "interrupt", explain)
    _release_workers(turn, frozenset(state.membership.rank_of) - state.awaiting - state.membership.starting - gone)
    turn.arm("leave", turn.settings.deadlines.leave_deadline_s)


def _release_workers(turn: Transition, workers: frozenset[int]) -> None:
    """Release idle workers from the old group: they leave it, or their process ends."""
    state = turn.state
    if state.settings.world.reform == "new_process":
        _replace(turn, workers, kill=True)
        return
    turn.change(awaiting=state.awaiting | workers)
    turn.call(sorted(workers), "leave")


def _replace(turn: Transition, workers: Set[int], *, kill: bool) -> None:
    if workers:
        replace_workers(turn, sorted(turn.state.membership.rank_of[worker] for worker in workers), kill=kill)


def on_call_returned(turn: Transition, event: m.CallReturned) -> None:
    """A survivor's call ended well, after the failure was known."""
    turn.change(awaiting=turn.state.awaiting - {event.worker})
    if event.verb == "run":
        turn.reached(event.value.step)
    if event.verb != "leave":
        _release_workers(turn, frozenset({event.worker}))


def on_leave_deadline(turn: Transition) -> None:
    """Survivors that neither answer nor leave hang: they are replaced, as part of the same failure.

    Where none has let go yet, and none is known to hang, all may be in the middle of a long step, and their state is
    worth more patience.
    """
    state = turn.state
    hanging = state.recovery.blame is not None and isinstance(state.recovery.blame.error, HangError)
    loose = {member.worker for member in state.membership.members if not member.fresh} - state.awaiting
    if not (hanging or loose) and turn.now_s - state.phase_s < state.settings.deadlines.call_deadline_s:
        turn.arm("leave", state.settings.deadlines.call_deadline_s)
        return
    ranks = [state.membership.rank_of[worker] for worker in state.awaiting]
    error = HangError(
        f"{_ranks(ranks)} hung: no answer {turn.now_s - state.phase_s:.0f} s after being interrupted",
        where=", ".join(sorted({f"node {state.membership.members[rank].node}" for rank in ranks})[:_SHOWN_RANKS]),
        remedy="look at what they wait for; if a step or an evaluation takes that long, raise hang_deadline_s",
        detail="\n".join(
            f"rank {rank} stood at:\n{state.recovery.stacks[rank]}" for rank in ranks if rank in state.recovery.stacks
        ),
    )
    alone = ranks[0] if len(ranks) == 1 else -1
    failed = failure_policy.failed_event(
        turn.state, state.membership.members[alone].worker if alone >= 0 else -1, alone, error.what, error.detail
    )
    turn.emit(failed)
    if hanging:
        blame = FailureCause(error=error, event=failed, kind="hung")
        turn.change(blame=blame, suspect=blame if state.recovery.suspect is not None else None)
    _replace(turn, state.awaiting, kill=True)


def is_gathered(turn: Transition) -> bool:
    """Whether all ranks are held by idle processes. Gives up when the failures are too many."""
    state = turn.state
    if state.awaiting:
        return False
    turn.disarm("leave")
    if state.recovery.blame is not None and state.recovery.blame.peer:
        turn.emit(state.recovery.blame.event)
        turn.change(blame=replace(state.recovery.blame, peer=False, error=_network_error(state.recovery.blame.error)))
    if failure_policy.is_given_up(turn) or not plan_trials.settle_trials(turn):
        return False  # the plan that goes on is settled first, since how many it takes is its own
    return complete_members(turn) and not _backs_off(turn)


def _backs_off(turn: Transition) -> bool:
    """Whether it is too soon to try again. The time runs from the last failure; a wish to stop ends it."""
    state = turn.state
    wait_s = failure_policy.backoff_s(state.recovery.failures)
    left_s = state.recovery.failed_s[-1] + wait_s - turn.now_s if wait_s and state.recovery.failed_s else 0.0
    if left_s < failure_policy.TIMER_TOLERANCE_S or state.shutdown.stopping:
        return False
    if "backoff" not in state.timers:
        turn.emit(Waiting(what=f"another try after {state.recovery.failures} failures in a row", deadline_s=left_s))
        turn.arm("backoff", left_s)
    return True


def _network_error(error: Exception) -> WorkerLost:
    return WorkerLost(
        "the workers lost each other, and none of them ended",
        remedy="check the network between the nodes",
        detail=str(error),
    )


def _text(error: Exception) -> str:
    return error.what if isinstance(error, TrainwrightError) else f"{type(error).__name__}: {error}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:_SHOWN_RANKS])
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"
