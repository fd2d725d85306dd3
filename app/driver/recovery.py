"""Recover from worker failures: find the cause, release the group, replace workers, and decide when to give up.

The driver enters GATHERING at the start and after every failure. It waits for calls under way, so that it knows the
first cause before it counts a failure. Ranks that wait in a collective are interrupted, idle ranks leave the group. A
new process takes the rank of a failed worker at once (see `membership`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from trainwright.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DeviceOutOfMemory,
    HangError,
    JobError,
    PeerLost,
    StorageError,
    TrainwrightError,
    WorkerLost,
    headline,
)
from trainwright.core.events import Noted, Waiting
from trainwright.driver import checkpointing, dynamic_members, failure_policy, preemption, rendezvous
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import drop_upload_workers
from trainwright.driver.driver_state import RECOVERY_PHASES, DriverState, FailureCause, Phase, Transition
from trainwright.driver.failure_policy import failed_event
from trainwright.driver.membership import complete_members, drop_workers, on_standby_died, replace_workers

_SHOWN_RANKS = 8
_STEPPING = frozenset({Phase.RUNNING, Phase.RESTORING, Phase.PROBING})  # a throwaway step counts as the first step


def on_worker_died(transition: Transition, event: m.WorkerDied) -> None:
    """Replace a worker that ended. Once the outcome is decided, only note that it uploads no more."""
    state, worker = transition.state, event.worker
    if state.phase in (Phase.CLOSING, Phase.RELEASING):
        drop_workers(transition, {worker})
        return
    if worker in state.membership.spares:
        on_standby_died(transition, event)
        return
    rank = state.membership.rank_of[worker]
    node = state.membership.members[rank].node
    error = WorkerLost(
        f"the worker of rank {rank} ended: {event.cause}",
        where=f"rank {rank}, node {node or 'not known'}",
        remedy="look for memory use, preemption and the node's health at that time; then run the same command again",
    )
    blame = FailureCause(error=error, event=failed_event(state, worker, rank, event.cause), kind="died")
    if dynamic_members.is_dynamic(state, worker):
        dynamic_members.on_members_lost(transition, blame, frozenset({worker}))
        return
    _begin_recovery(transition, blame, lost={worker}, again=event.worker in state.membership.starting)


def on_call_raised(transition: Transition, event: m.CallRaised) -> None:
    """End the run if the user's code or data raised, otherwise recover."""
    state, worker = transition.state, event.worker
    error, kind, rank = event.failure.error, event.failure.kind, state.membership.rank_of[worker]
    failed = failed_event(state, worker, rank, headline(error), _detail(error))
    cause = FailureCause(error=error, event=failed)
    if isinstance(error, DeviceOutOfMemory) and event.verb == "form" and not state.membership.members[rank].fresh:
        kind = "internal"  # this plan had the memory before: a process that holds nothing of it may have it again
    ends_process = kind == "internal" or event.verb in ("leave", "upload", "keep")
    if state.trials is not None and kind in ("user", "data", "internal"):
        _reject_plan(transition, cause, kill=kind == "internal")
    elif isinstance(error, DeviceOutOfMemory) and (leaner := _leaner_plans(transition)) is not None:
        _has_answered(transition, worker)
        _begin_recovery(transition, cause)
        transition.adjust_policy(layouts=leaner)
    elif event.verb == "restore" and isinstance(error, DamagedCheckpoint) and _has_older(state):
        _has_answered(transition, worker)
        _fall_back(transition, error, cause)
    elif kind in ("user", "data") or isinstance(error, CheckpointError):
        if isinstance(error, DeviceOutOfMemory):
            error = failure_policy.explain_out_of_memory(state, failed.rank, error, event.failure.memory)
        transition.emit(failed)
        if event.verb == "upload":
            drop_upload_workers(transition, frozenset({worker}), error)
        transition.end_run("failed", error)
    elif dynamic_members.is_dynamic(state, worker):
        cause = replace(cause, peer=kind == "peer")
        spent = state.settings.world.reform == "new_process" and kind != "peer"  # no process joins twice
        if spent or ends_process:
            dynamic_members.on_members_lost(transition, cause, frozenset({worker}), kill=True)
        else:
            dynamic_members.on_member_left(transition, worker, cause)
    elif ends_process:
        kind_of_error = headline(error).split(":")[0] if kind == "internal" else ""
        _begin_recovery(transition, replace(cause, kind=kind_of_error), lost={worker}, kill=True)
    elif kind == "peer":
        _has_answered(transition, worker)
        _begin_recovery(transition, replace(cause, peer=True), left={worker})
    else:
        if event.verb == "restore":
            checkpointing.forget_memory_checkpoint(transition)
        _has_answered(transition, worker)
        _begin_recovery(transition, cause)


def _leaner_plans(transition: Transition) -> m.PlanSelector | None:
    """Return plans that need less memory than that of this epoch; None if there are none, or the job asks for none.

    They are the same for each of several ranks that run out of memory under one plan.
    """
    layouts, plan = transition.settings.world.layouts, transition.state.membership.plan
    if not transition.settings.limits.replan_memory or layouts is None or plan is None:
        return None
    return layouts.leaner(plan)


def _has_older(state: DriverState) -> bool:
    """Whether another checkpoint can replace the one that is loaded; the report of one rank is enough."""
    return bool(state.checkpoints.older) or state.phase is Phase.GATHERING


def _fall_back(transition: Transition, error: DamagedCheckpoint, blame: FailureCause) -> None:
    """Form the group again, and load the checkpoint before the damaged one. That is no failure of the workers."""
    checkpoints = transition.state.checkpoints
    if transition.state.phase is not Phase.GATHERING and checkpoints.head is not None:
        text = f"the checkpoint of step {checkpoints.head.step} is skipped: {error.what} ({error.where})"
        transition.emit(
            Noted(text=f"{text}; the run continues from the checkpoint of step {checkpoints.older[-1].step}")
        )
        checkpointing.drop_damaged_head(transition)
    _begin_recovery(transition, blame, counts=False)


def _has_answered(transition: Transition, worker: int) -> None:
    """Note that a worker owes no answer, whether the others waited for it or not."""
    transition.no_longer_await({worker})
    dynamic_members.drop_pending(transition, worker)


def on_chief_lost(transition: Transition, event: m.CallReturned) -> None:
    """Have a worker join again that lost the chief; the end of the chief may explain it later."""
    error = PeerLost("it no longer follows the chief")
    rank = transition.state.membership.rank_of[event.worker]
    cause = FailureCause(error=error, event=failed_event(transition.state, event.worker, rank, error.what), peer=True)
    dynamic_members.on_member_left(transition, event.worker, cause)


def _reject_plan(transition: Transition, blame: FailureCause, *, kill: bool) -> None:
    """Set the plan on trial aside, because a rank cannot work under it. That is no failure of the run."""
    worker, state = frozenset({blame.event.worker}), transition.state
    if _is_counted_by_peers_only(state):
        failure_policy.uncount_failure(transition)
    rendezvous.reject_plan(transition, blame.error)
    transition.no_longer_await(worker)
    if transition.state.phase is not Phase.GATHERING:
        _release_idle_workers(transition, worker, False)
    failure_policy.set_cause(transition, blame)
    if kill:
        _replace(transition, worker, kill=True)


def _is_counted_by_peers_only(state: DriverState) -> bool:
    """Whether only workers that lost a peer reported the counted failure of the first plan on trial."""
    if state.recovery.blame is None or state.phase is not Phase.GATHERING or rendezvous.is_optional_trial(state):
        return False
    return state.recovery.blame.peer and not preemption.is_expected_failure(state, state.recovery.blame)


def on_silence(transition: Transition, deadline_s: float) -> None:
    """Recover from workers that did not answer in time: those that only wait for others can be interrupted."""
    state = transition.state
    if all(dynamic_members.is_dynamic(state, worker) for worker in state.awaiting):
        dynamic_members.on_members_silent(transition, frozenset(state.awaiting))
        return
    ranks = [state.membership.rank_of[worker] for worker in state.awaiting]
    error = HangError(
        f"{_ranks(ranks)} did not move for {deadline_s:g} s while {state.phase.value}",
        remedy="if a step or an evaluation takes that long, raise hang_deadline_s",
    )
    blame = FailureCause(error=error, event=failed_event(state, -1, -1, error.what))
    _begin_recovery(transition, blame, explain=True)
    if transition.state.phase is Phase.GATHERING:
        transition.arm("leave", state.settings.deadlines.interrupt_deadline_s)


def on_isolated(transition: Transition, blame: FailureCause | None) -> None:
    """Recover if no member reaches the ranks that all need, which do not notice it themselves."""
    if blame is not None:  # a failure that was counted when the first member was lost
        _begin_recovery(transition, blame, counts=not transition.state.recovery.losing)


def on_upload_deadline(transition: Transition) -> None:
    """End the processes that hang in an upload that the run waits for."""
    upload = transition.state.checkpoints.upload
    assert upload is not None and upload.owing, "nothing is being uploaded"
    error = StorageError(
        f"the checkpoint of step {upload.step} was not written within "
        f"{transition.settings.saving.upload_deadline_s:g} s",
        where=upload.path,
        remedy="check that the store can be written; the same command goes on from the last checkpoint",
    )
    blame = FailureCause(error=error, event=failed_event(transition.state, -1, -1, error.what))
    _begin_recovery(transition, blame, lost=upload.owing, kill=True)


def _begin_recovery(
    transition: Transition,
    blame: FailureCause,
    *,
    lost: Iterable[int] = (),
    left: Iterable[int] = (),
    kill: bool = False,
    again: bool = False,
    explain: bool = False,
    counts: bool = True,
) -> None:
    """Count a failure, release the idle ranks, and replace the failed workers.

    Args:
        blame: this sign of a failure.
        lost: workers to replace; `kill` ends them first.
        left: workers that have left the group by themselves.
        again: whether this is another failure, although the driver recovers from one already.
        explain: whether busy ranks are to return their stack traces.
        counts: whether the failure counts.
    """
    state, recovery = transition.state, transition.state.recovery
    entering = state.phase is not Phase.GATHERING
    if not blame.peer:
        transition.emit(blame.event)
    if (entering or again) and state.shutdown.stopping and state.phase in RECOVERY_PHASES:
        transition.end_run("stopped")
        if not kill:
            drop_workers(transition, frozenset(lost))
        return
    trial = entering and rendezvous.is_optional_trial(state)
    # Workers that leave as planned may lose peers: that is no failure.
    if entering or again or (recovery.blame is None and not blame.peer):
        failure_policy.set_cause(transition, blame)
        if counts and not trial and not preemption.is_expected_failure(state, blame):
            failure_policy.count_failure(transition)
    elif recovery.blame is not None and recovery.blame.peer and not blame.peer:
        failure_policy.set_cause(transition, blame)
    stepping = entering and state.phase in _STEPPING and not trial
    if stepping or (recovery.suspect and recovery.suspect.peer and not again):
        failure_policy.set_suspect(transition, blame)
    lost, left = frozenset(lost), frozenset(left)
    if entering:
        _release_idle_workers(transition, lost | left, explain)
    elif not lost and not blame.peer:
        _release_workers(transition, frozenset({blame.event.worker}))
    _replace(transition, lost, kill=kill)
    if transition.settings.world.reform == "new_process":
        _release_workers(transition, left)


def _release_idle_workers(transition: Transition, gone: frozenset[int], explain: bool) -> None:
    """Enter GATHERING: interrupt busy workers, and release idle ones, but for those that are `gone`."""
    transition.disarm()
    dynamic_members.reabsorb_members(transition)
    state = transition.state
    failure_policy.start_recovery(transition)
    transition.enter(Phase.GATHERING)
    transition.call(sorted(state.awaiting - gone), "interrupt", explain)
    _release_workers(
        transition, frozenset(state.membership.rank_of) - state.awaiting - state.membership.starting - gone
    )
    transition.arm("leave", transition.settings.deadlines.leave_deadline_s)


def _release_workers(transition: Transition, workers: frozenset[int]) -> None:
    """Release idle workers from the old group: they leave it, or their process ends, perhaps after a copy."""
    if transition.settings.world.reform == "new_process":
        copying = checkpointing.request_just_in_time_copy(transition, workers)
        transition.also_await(copying)
        _replace(transition, workers - copying, kill=True)
        return
    transition.also_await(workers)
    transition.call(sorted(workers), "leave")


def _replace(transition: Transition, workers: Set[int], *, kill: bool) -> None:
    if workers:
        replace_workers(
            transition, sorted(transition.state.membership.rank_of[worker] for worker in workers), kill=kill
        )


def on_call_returned(transition: Transition, event: m.CallReturned) -> None:
    """Release a survivor whose call ended well after the failure was known."""
    transition.no_longer_await({event.worker})
    if event.verb == "run":
        failure_policy.note_step(transition, event.value.step)
    if event.verb != "leave":
        _release_workers(transition, frozenset({event.worker}))
    elif checkpointing.makes_just_in_time_copy(transition.state, event.worker):
        checkpointing.on_just_in_time_copy_taken(transition, event.value)
        _replace(transition, {event.worker}, kill=True)


def on_leave_deadline(transition: Transition) -> None:
    """Replace survivors that hang: they neither answer nor leave. That is part of the same failure.

    If none has left yet, and none is known to hang, all may be in the middle of a long step. Their state is worth a
    longer wait.
    """
    state, recovery, members = transition.state, transition.state.recovery, transition.state.membership.members
    hanging = recovery.blame is not None and isinstance(recovery.blame.error, HangError)
    loose = {member.worker for member in members if not member.fresh} - state.awaiting
    if not (hanging or loose) and transition.now_s - state.phase_s < state.settings.deadlines.call_deadline_s:
        transition.arm("leave", state.settings.deadlines.call_deadline_s)
        return
    silent = [worker for worker in state.awaiting if not checkpointing.makes_just_in_time_copy(state, worker)]
    if silent:
        _report_hung_workers(transition, silent, hanging=hanging)
    else:
        transition.emit(
            Noted(text=f"a survivor did not copy its state within {transition.now_s - state.phase_s:.0f} s")
        )
    _replace(transition, state.awaiting, kill=True)


def _report_hung_workers(transition: Transition, workers: Sequence[int], *, hanging: bool) -> None:
    """Report workers that do not answer; they are the cause if the failure is one of `hanging` workers."""
    state, recovery, members = transition.state, transition.state.recovery, transition.state.membership.members
    ranks = [state.membership.rank_of[worker] for worker in workers]
    stacks = [f"stack traces of rank {rank}:\n{recovery.stacks[rank]}" for rank in ranks if rank in recovery.stacks]
    error = HangError(
        f"{_ranks(ranks)} hung: no answer {transition.now_s - state.phase_s:.0f} s after being interrupted",
        where=", ".join(sorted({f"node {members[rank].node}" for rank in ranks})[:_SHOWN_RANKS]),
        remedy="look at what they wait for; if a step or an evaluation takes that long, raise hang_deadline_s",
        detail="\n".join(stacks),
    )
    alone = ranks[0] if len(ranks) == 1 else -1
    failed = failed_event(state, members[alone].worker if alone >= 0 else -1, alone, error.what, error.detail)
    transition.emit(failed)
    if hanging:
        blame = FailureCause(error=error, event=failed, kind="hung")
        failure_policy.set_cause(transition, blame)
        failure_policy.set_suspect(transition, blame if recovery.suspect is not None else None)


def is_gathered(transition: Transition) -> bool:
    """Whether all ranks are held by idle processes. Gives up when the failures are too many."""
    if transition.state.awaiting:
        return False
    transition.disarm("leave")
    blame = transition.state.recovery.blame
    if blame is not None and blame.peer:
        transition.emit(blame.event)
        failure_policy.set_cause(transition, replace(blame, peer=False, error=_network_error(blame.error)))
    if failure_policy.is_given_up(transition) or not rendezvous.settle_trials(transition):
        return False  # trials are settled first: the chosen plan says how many workers it needs
    return complete_members(transition) and not _backs_off(transition)


def _backs_off(transition: Transition) -> bool:
    """Whether it is too soon for the next attempt. The pause starts at the last failure; a stop request ends it."""
    state = transition.state
    wait_s = failure_policy.backoff_s(state.recovery.failures)
    left_s = state.recovery.failed_s[-1] + wait_s - transition.now_s if wait_s and state.recovery.failed_s else 0.0
    if left_s < failure_policy.TIMER_TOLERANCE_S or state.shutdown.stopping:
        return False
    if "backoff" not in state.timers:
        transition.emit(
            Waiting(what=f"another try after {state.recovery.failures} failures in a row", deadline_s=left_s)
        )
        transition.arm("backoff", left_s)
    return True


def _network_error(error: Exception) -> WorkerLost:
    return WorkerLost(
        "the workers lost each other, and none of them ended",
        remedy="check the network between the nodes",
        detail=str(error),
    )


def _detail(error: Exception) -> str:
    """Return the traceback of user code, or all problems of a wrong job."""
    if isinstance(error, JobError) and not error.detail:
        return error.what
    return error.detail if isinstance(error, TrainwrightError) else ""


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:_SHOWN_RANKS])
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"
