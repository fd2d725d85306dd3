"""The driver's state machine: the next state and effects for each event. Pure: no clock, randomness or I/O.

`begin_run` gives the first state and effects; `decide` turns each event into the next ones. Events that are out of date
are dropped (`is_stale`). Any other event comes in a phase that `POSSIBLE_PHASES` names, or the driver or the effect
executor has a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.core.errors import RunConflict, TrainwrightError, UserCodeError
from trainwright.core.events import RunEnded
from trainwright.core.metric_goals import best_text
from trainwright.driver import (
    checkpointing,
    dynamic_members,
    failure_policy,
    membership,
    preemption,
    recovery,
    rendezvous,
    segments,
    step_traces,
)
from trainwright.driver import messages as m
from trainwright.driver.driver_state import RECOVERY_PHASES, STEADY_PHASES, DriverState, Phase, Transition
from trainwright.driver.run_policy import RunPolicy

Step = tuple[DriverState, tuple[m.Effect, ...]]
EventKind = tuple[type, str]
"""The type of an event, and the verb or the name of the timer if that makes a difference."""

_ALL = frozenset(Phase) - {Phase.READY}
_CALLING = frozenset(
    {
        Phase.RESERVING, Phase.FORMING, Phase.RESTORING, Phase.PROBING, Phase.RUNNING, Phase.SNAPSHOTTING,
        Phase.EVALUATING,
    }
)  # fmt: skip
_WORKING = _CALLING | {Phase.GATHERING, Phase.WAITING}
_LIVING = _WORKING | {Phase.CLOSING}
_TIMED: Mapping[str, frozenset[Phase]] = {
    "place": frozenset({Phase.GATHERING}),
    "shrink": frozenset({Phase.GATHERING}),
    "leave": frozenset({Phase.GATHERING}),
    "call": frozenset({Phase.RESERVING, Phase.FORMING, Phase.RESTORING}),
    "hang": frozenset({Phase.RUNNING, Phase.EVALUATING, Phase.SNAPSHOTTING, Phase.PROBING}),
    "pause": frozenset({Phase.RUNNING}),
    "notice": frozenset({Phase.RUNNING, Phase.WAITING}),
    "upload": frozenset({Phase.WAITING, Phase.CLOSING}),
    "trace": frozenset({Phase.CLOSING}),
    "retry": frozenset({Phase.WAITING}),
    "backoff": frozenset({Phase.GATHERING}),
    "late": frozenset({Phase.RUNNING}),
    "apart": STEADY_PHASES - {Phase.READY},
}

POSSIBLE_PHASES: Mapping[EventKind, frozenset[Phase]] = {
    (m.LeaseAcquired, ""): frozenset({Phase.ACQUIRING}),
    (m.LeaseLost, ""): _ALL - {Phase.FINISHED},
    (m.WorkerStarted, ""): _WORKING - {Phase.PROBING},  # spares at any time
    (m.CallReturned, ""): _CALLING | {Phase.GATHERING, Phase.WAITING},  # while waiting, of those who are apart
    (m.CallRaised, ""): _CALLING | {Phase.GATHERING, Phase.WAITING},
    (m.CallReturned, "interrupt"): frozenset({Phase.GATHERING}),
    (m.CallReturned, "upload"): _LIVING - {Phase.PROBING},
    (m.CallRaised, "upload"): _LIVING - {Phase.PROBING},
    (m.CallReturned, "keep"): _WORKING - {Phase.PROBING},
    (m.CallRaised, "keep"): _WORKING - {Phase.PROBING},
    (m.CallReturned, "trace"): _LIVING - {Phase.PROBING},
    (m.CallRaised, "trace"): _LIVING - {Phase.PROBING},
    (m.WorkerDied, ""): _LIVING | {Phase.RELEASING},
    (m.PreemptionNoticed, ""): _WORKING,
    (m.StepsCompleted, ""): _WORKING - {Phase.RESERVING, Phase.FORMING, Phase.RESTORING, Phase.PROBING},
    (m.CheckpointCommitted, ""): _LIVING - {Phase.PROBING},
    (m.CommitFailed, ""): _LIVING - {Phase.PROBING},
    (m.StopRequested, ""): _ALL - {Phase.FINISHED},
    (m.LeaseReleased, ""): frozenset({Phase.RELEASING}),
    **{(m.TimerExpired, name): phases for name, phases in _TIMED.items()},
}
"""The phases in which each kind of event (see `event_kind`) can come, unless it is out of date."""


def begin_run(settings: RunPolicy, now_s: float) -> Step:
    """Return the first state of a run, and the effect that takes the lease."""
    return DriverState.of(settings, since_s=now_s, phase_s=now_s), (m.AcquireLease(),)


def decide(state: DriverState, event: m.DriverEvent, now_s: float) -> Step:
    """Return the state after an event, and the effects to carry out in order.

    Args:
        event: what happened.
        now_s: seconds by any clock that runs forward.
    """
    if is_stale(state, event):
        return state, ()
    kind = event_kind(event)
    assert state.phase in POSSIBLE_PHASES[kind], f"{kind[0].__name__} cannot come while {state.phase.value}"
    turn = Transition(state, now_s)
    _HANDLERS[type(event)](turn, event)
    _advance(turn)
    return turn.state, tuple(turn.effects)


def event_kind(event: m.DriverEvent) -> EventKind:
    """Return the key of an event in `POSSIBLE_PHASES`."""
    match event:
        case (
            m.CallReturned(verb="upload" | "keep" | "trace" | "interrupt")
            | m.CallRaised(verb="upload" | "keep" | "trace")
        ):
            return type(event), event.verb
        case m.TimerExpired(name=name):
            return type(event), name
    return type(event), ""


def is_stale(state: DriverState, event: m.DriverEvent) -> bool:
    """Whether an event is out of date."""
    if state.phase is Phase.FINISHED:
        return True
    if state.phase is Phase.RELEASING and not isinstance(
        event, (m.LeaseReleased, m.LeaseLost, m.StopRequested, m.WorkerDied)
    ):
        return True
    match event:
        case m.TimerExpired():
            return state.timers.get(event.name) != event.number
        case m.StepsCompleted():
            return event.generation != state.epoch.generation or state.phase is Phase.CLOSING
        case m.WorkerStarted():
            unknown = event.worker not in state.membership.starting and event.worker not in state.membership.spares
            return unknown or state.phase is Phase.CLOSING
        case m.WorkerDied():
            return event.worker not in state.membership.rank_of and event.worker not in state.membership.spares
        case m.PreemptionNoticed():
            known = event.worker in state.membership.rank_of or event.worker in state.membership.spares
            return not known or state.phase is Phase.CLOSING
        case m.CallReturned(verb="interrupt"):  # it brings stack traces; `leave` is the answer that counts
            return not event.value or state.phase is not Phase.GATHERING or event.worker not in state.membership.rank_of
        case m.CallReturned(verb="stop") | m.CallRaised(verb="stop" | "interrupt"):
            return True
        case m.CallReturned(verb="upload") | m.CallRaised(verb="upload"):
            upload = state.checkpoints.upload  # an abandoned upload may still be answered
            return upload is None or event.worker not in upload.owing
        case m.CallReturned(verb="keep") | m.CallRaised(verb="keep"):
            keeping = state.memory.keeping
            return keeping is None or event.worker not in keeping.owing or state.phase is Phase.CLOSING
        case m.CallReturned(verb="trace") | m.CallRaised(verb="trace"):
            return event.worker not in state.traces.tracing
        case m.CallReturned() | m.CallRaised():
            owing = event.worker in state.awaiting or event.worker in state.dynamic.apart
            return event.generation != state.epoch.generation or not owing or state.phase is Phase.CLOSING
    return False


def _on_lease_acquired(turn: Transition, event: m.LeaseAcquired) -> None:
    step = event.head.step if event.head else 0
    rendezvous.start_epochs(turn, event.token)
    turn.stand_at(step, event.told)
    segments.on_lease_acquired(turn, event)
    checkpointing.on_lease_acquired(turn, event)
    failure_policy.start_recovery(turn)
    last = step >= turn.settings.length.total_steps
    if last and _is_evaluated(turn.state, step):
        turn.end_run("done")
    elif turn.state.ending and not last:
        turn.end_run("stopped")
    else:
        rendezvous.begin_trials(turn, event)
        membership.take_over_workers(turn, event.living)


def _on_worker_started(turn: Transition, event: m.WorkerStarted) -> None:
    membership.on_worker_started(turn, event)
    if event.worker in turn.state.dynamic.apart:
        dynamic_members.on_member_started(turn, event.worker)
    else:
        dynamic_members.admit_joiners(turn)


def _on_call_returned(turn: Transition, event: m.CallReturned) -> None:
    if event.verb == "run":
        step_traces.on_run_returned(turn, event)
    if event.verb == "upload":
        checkpointing.on_upload_returned(turn, event)
    elif event.verb == "keep":
        checkpointing.on_memory_copy_returned(turn, event)
    elif event.verb == "trace":
        step_traces.on_trace_returned(turn, event)
    elif event.verb == "interrupt":
        failure_policy.on_stacks_returned(turn, event)
    elif turn.state.phase is Phase.GATHERING:
        recovery.on_call_returned(turn, event)
    elif event.verb == "run" and dynamic_members.follows_chief(turn.state, event.worker):
        recovery.on_chief_lost(turn, event)
    elif event.worker in turn.state.dynamic.apart:
        dynamic_members.on_member_answered(turn, event)
    else:
        _collect_answer(turn, event)


def _collect_answer(turn: Transition, event: m.CallReturned) -> None:
    """Note an answer; the last one ends the phase (see `_advance`)."""
    state = turn.state
    turn.put_answer(event.worker, event.value)
    if state.phase is Phase.RUNNING:
        failure_policy.note_step(turn, event.value.step)
    segments.arm_late_timer(turn)
    if state.phase is Phase.RUNNING and turn.state.awaiting and not state.answers:
        turn.arm("hang", turn.state.hang_deadline_s)


def _on_call_raised(turn: Transition, event: m.CallRaised) -> None:
    closing = turn.state.phase is Phase.CLOSING
    if event.verb == "trace":
        step_traces.on_trace_raised(turn, event)
    elif event.verb == "upload" and (closing or event.failure.kind == "storage"):
        checkpointing.drop_upload_workers(turn, frozenset({event.worker}), event.failure.error)
    elif event.verb == "keep" and event.failure.kind == "storage":
        checkpointing.on_memory_copy_refused(turn, event)
    else:
        recovery.on_call_raised(turn, event)


def _on_timer_expired(turn: Transition, event: m.TimerExpired) -> None:
    state, settings = turn.state, turn.settings
    turn.disarm(event.name)
    match event.name:
        case "place":
            membership.on_start_deadline(turn)
        case "shrink" | "backoff" | "late":
            pass  # `_advance` looks for missing timers
        case "apart":
            recovery.on_isolated(turn, dynamic_members.on_deadline(turn))
        case "leave":
            recovery.on_leave_deadline(turn)
        case "call":
            recovery.on_silence(turn, settings.deadlines.call_deadline_s)
        case "hang":
            recovery.on_silence(turn, state.hang_deadline_s)
        case "pause":
            segments.request_pause_if_due(turn)
        case "notice":
            preemption.on_handover_deadline(turn)
        case "retry":
            checkpointing.take_snapshot(turn, "upload")
        case "trace":
            step_traces.on_end_deadline(turn)
        case "upload" if state.phase is Phase.CLOSING:
            checkpointing.abandon_upload(turn, f"not written within {settings.saving.upload_deadline_s:g} s")
        case "upload" if not state.ending:
            segments.stop_waiting(turn)
        case _:
            recovery.on_upload_deadline(turn)


def _advance(turn: Transition) -> None:
    """Follow up on what an event completed."""
    if turn.state.phase in _PHASE_COMPLETED and segments.is_phase_complete(turn.state):
        turn.disarm("call", "hang", "pause", "late")
        _PHASE_COMPLETED[turn.state.phase](turn)
    if segments.is_wait_needless(turn.state):
        turn.disarm("upload")
        turn.enter(Phase.READY)
    if _is_recovery_needless(turn.state):
        turn.end_run("stopped")
    elif turn.state.phase is Phase.READY:
        segments.proceed(turn)
    elif turn.state.phase is Phase.RUNNING and preemption.wants_handover(turn.state, turn.now_s):
        turn.request_pause()
    if turn.state.phase is Phase.GATHERING and recovery.is_gathered(turn):
        rendezvous.begin_rendezvous(turn)
    closing = turn.state.phase is Phase.CLOSING and turn.state.checkpoints.upload is None
    if closing and not step_traces.delays_end(turn):
        _release_run(turn)


# --- The end of the run -----------------------------------------------------------------------------------------------


def _on_stop_requested(turn: Transition, event: m.StopRequested) -> None:
    """Stop at once, except for a log entry under way; or tell rank 0 while steps run. Later phases see the request."""
    state = turn.state
    before = state.shutdown.stopping
    turn.request_stop()
    if not event.now:
        if not before and state.phase is Phase.RUNNING:
            turn.call([state.membership.members[0].worker], "stop")
    elif state.phase not in (Phase.ACQUIRING, Phase.RELEASING):
        _kill_all(turn)
        checkpointing.abandon_upload(turn, "the run was stopped at once")
        if turn.state.phase is not Phase.CLOSING:
            turn.end_run("stopped")


def _is_recovery_needless(state: DriverState) -> bool:
    """Whether a recovery is needless, because all results are durable already."""
    progress = state.position.progress
    last = progress >= state.settings.length.total_steps
    return (
        state.phase in RECOVERY_PHASES
        and (state.ending or last)
        and state.committed >= progress
        and (not last or _is_evaluated(state, progress))
        and not state.owes_announcement
    )


def _is_evaluated(state: DriverState, step: int) -> bool:
    """Whether the evaluation after a step was made, or none is due."""
    return state.evaluated >= step or not checkpointing.evaluation_due(state.settings, step)


def _release_run(turn: Transition) -> None:
    """Release the lease, once nothing is uploaded any more."""
    turn.disarm("trace")
    turn.enter(Phase.RELEASING)
    outcome = _outcome(turn.state)
    _emit_run_ended(turn, outcome, _last_error(turn.state))
    turn.want(m.ReleaseLease(outcome=outcome, step=turn.state.committed))


def _outcome(state: DriverState) -> m.RunOutcome:
    """Return how the run ends: one that was stopped after its last results is done, as is one that ends early."""
    early, total = bool(state.end_reason), state.settings.length.total_steps
    stored = state.committed >= (state.position.step if early else total)
    done = state.shutdown.outcome == "stopped" and stored and (early or _is_evaluated(state, total))
    return "done" if done else state.shutdown.outcome


def _on_lease_released(turn: Transition, event: m.LeaseReleased) -> None:
    _finish(turn, _outcome(turn.state), _last_error(turn.state))


def _last_error(state: DriverState) -> Exception | None:
    """Return the run's error; one of user code also says how to continue with a corrected job."""
    error = state.shutdown.error
    if not isinstance(error, UserCodeError) or error.remedy or not state.committed:
        return error
    remedy = f"correct the job; with resume=True it continues from step {state.committed:,}"
    return type(error)(error.what, where=error.where, remedy=remedy, detail=error.detail)


def _on_lease_lost(turn: Transition, event: m.LeaseLost) -> None:
    """Write nothing more, and end the workers, unless they belong to another driver by now.

    An earlier error is reported in place of this one.
    """
    membership.drop_all_workers(turn) if isinstance(event.error, RunConflict) else _kill_all(turn)
    turn.disarm()
    error = turn.state.shutdown.error or event.error
    if turn.state.phase is not Phase.RELEASING:
        _emit_run_ended(turn, "failed", error)
    _finish(turn, "failed", error)


def _kill_all(turn: Transition) -> None:
    for worker in sorted([*turn.state.membership.rank_of, *turn.state.membership.spares]):
        turn.want(m.KillWorker(worker=worker))
    membership.drop_all_workers(turn)


def _emit_run_ended(turn: Transition, outcome: m.RunOutcome, error: Exception | None) -> None:
    text = error.summary if isinstance(error, TrainwrightError) else str(error or "")
    reason, best = turn.state.end_reason, checkpointing.best_kept_evaluation(turn.state)
    turn.emit(
        RunEnded(
            outcome=outcome, step=turn.state.committed, error=text, reason=reason if outcome == "done" else "",
            best=best_text(turn.settings.saving.best, best) if best else "",
        )
    )  # fmt: skip


def _finish(turn: Transition, outcome: m.RunOutcome, error: Exception | None) -> None:
    turn.enter(Phase.FINISHED)
    turn.want(m.FinishRun(outcome=outcome, step=turn.state.committed, error=error))


_HANDLERS: Mapping[type, Callable[[Transition, Any], None]] = {
    m.LeaseAcquired: _on_lease_acquired,
    m.LeaseLost: _on_lease_lost,
    m.WorkerStarted: _on_worker_started,
    m.CallReturned: _on_call_returned,
    m.CallRaised: _on_call_raised,
    m.WorkerDied: recovery.on_worker_died,
    m.PreemptionNoticed: preemption.on_preemption_notice,
    m.StepsCompleted: segments.on_steps_completed,
    m.CheckpointCommitted: checkpointing.on_committed,
    m.CommitFailed: checkpointing.on_commit_failed,
    m.StopRequested: _on_stop_requested,
    m.TimerExpired: _on_timer_expired,
    m.LeaseReleased: _on_lease_released,
}
"""What to do about each type of event."""

_PHASE_COMPLETED: Mapping[Phase, Callable[[Transition], None]] = {
    Phase.RESERVING: rendezvous.on_ports_reserved,
    Phase.FORMING: rendezvous.on_group_formed,
    Phase.RESTORING: rendezvous.on_state_restored,
    Phase.PROBING: rendezvous.on_probe_returned,
    Phase.RUNNING: segments.on_segment_ended,
    Phase.SNAPSHOTTING: checkpointing.on_snapshots_taken,
    Phase.EVALUATING: segments.on_evaluated,
}
"""What to do when all answers of a phase are in."""
