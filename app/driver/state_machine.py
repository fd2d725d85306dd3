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
    transition = Transition(state, now_s)
    _HANDLERS[type(event)](transition, event)
    _advance(transition)
    return transition.state, tuple(transition.effects)


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


def _on_lease_acquired(transition: Transition, event: m.LeaseAcquired) -> None:
    step = event.head.step if event.head else 0
    rendezvous.start_epochs(transition, event.token)
    transition.stand_at(step, event.told)
    segments.on_lease_acquired(transition, event)
    checkpointing.on_lease_acquired(transition, event)
    failure_policy.start_recovery(transition)
    last = step >= transition.settings.length.total_steps
    if last and _is_evaluated(transition.state, step):
        transition.end_run("done")
    elif transition.state.ending and not last:
        transition.end_run("stopped")
    else:
        rendezvous.begin_trials(transition, event)
        membership.take_over_workers(transition, event.living)


def _on_worker_started(transition: Transition, event: m.WorkerStarted) -> None:
    membership.on_worker_started(transition, event)
    if event.worker in transition.state.dynamic.apart:
        dynamic_members.on_member_started(transition, event.worker)
    else:
        dynamic_members.admit_joiners(transition)


def _on_call_returned(transition: Transition, event: m.CallReturned) -> None:
    if event.verb == "run":
        step_traces.on_run_returned(transition, event)
    if event.verb == "upload":
        checkpointing.on_upload_returned(transition, event)
    elif event.verb == "keep":
        checkpointing.on_memory_copy_returned(transition, event)
    elif event.verb == "trace":
        step_traces.on_trace_returned(transition, event)
    elif event.verb == "interrupt":
        failure_policy.on_stacks_returned(transition, event)
    elif transition.state.phase is Phase.GATHERING:
        recovery.on_call_returned(transition, event)
    elif event.verb == "run" and dynamic_members.follows_chief(transition.state, event.worker):
        recovery.on_chief_lost(transition, event)
    elif event.worker in transition.state.dynamic.apart:
        dynamic_members.on_member_answered(transition, event)
    else:
        _collect_answer(transition, event)


def _collect_answer(transition: Transition, event: m.CallReturned) -> None:
    """Note an answer; the last one ends the phase (see `_advance`)."""
    state = transition.state
    transition.put_answer(event.worker, event.value)
    if state.phase is Phase.RUNNING:
        failure_policy.note_step(transition, event.value.step)
    segments.arm_late_timer(transition)
    if state.phase is Phase.RUNNING and transition.state.awaiting and not state.answers:
        transition.arm("hang", transition.state.hang_deadline_s)


def _on_call_raised(transition: Transition, event: m.CallRaised) -> None:
    closing = transition.state.phase is Phase.CLOSING
    if event.verb == "trace":
        step_traces.on_trace_raised(transition, event)
    elif event.verb == "upload" and (closing or event.failure.kind == "storage"):
        checkpointing.drop_upload_workers(transition, frozenset({event.worker}), event.failure.error)
    elif event.verb == "keep" and event.failure.kind == "storage":
        checkpointing.on_memory_copy_refused(transition, event)
    else:
        recovery.on_call_raised(transition, event)


def _on_timer_expired(transition: Transition, event: m.TimerExpired) -> None:
    state, settings = transition.state, transition.settings
    transition.disarm(event.name)
    match event.name:
        case "place":
            membership.on_start_deadline(transition)
        case "shrink" | "backoff" | "late":
            pass  # `_advance` looks for missing timers
        case "apart":
            recovery.on_isolated(transition, dynamic_members.on_deadline(transition))
        case "leave":
            recovery.on_leave_deadline(transition)
        case "call":
            recovery.on_silence(transition, settings.deadlines.call_deadline_s)
        case "hang":
            recovery.on_silence(transition, state.hang_deadline_s)
        case "pause":
            segments.request_pause_if_due(transition)
        case "notice":
            preemption.on_handover_deadline(transition)
        case "retry":
            checkpointing.take_snapshot(transition, "upload")
        case "trace":
            step_traces.on_end_deadline(transition)
        case "upload" if state.phase is Phase.CLOSING:
            checkpointing.abandon_upload(transition, f"not written within {settings.saving.upload_deadline_s:g} s")
        case "upload" if not state.ending:
            segments.stop_waiting(transition)
        case _:
            recovery.on_upload_deadline(transition)


def _advance(transition: Transition) -> None:
    """Follow up on what an event completed."""
    if transition.state.phase in _PHASE_COMPLETED and segments.is_phase_complete(transition.state):
        transition.disarm("call", "hang", "pause", "late")
        _PHASE_COMPLETED[transition.state.phase](transition)
    if segments.is_wait_needless(transition.state):
        transition.disarm("upload")
        transition.enter(Phase.READY)
    if _is_recovery_needless(transition.state):
        transition.end_run("stopped")
    elif transition.state.phase is Phase.READY:
        segments.proceed(transition)
    elif transition.state.phase is Phase.RUNNING and preemption.wants_handover(transition.state, transition.now_s):
        transition.request_pause()
    if transition.state.phase is Phase.GATHERING and recovery.is_gathered(transition):
        rendezvous.begin_rendezvous(transition)
    closing = transition.state.phase is Phase.CLOSING and transition.state.checkpoints.upload is None
    if closing and not step_traces.delays_end(transition):
        _release_run(transition)


# --- The end of the run -----------------------------------------------------------------------------------------------


def _on_stop_requested(transition: Transition, event: m.StopRequested) -> None:
    """Stop at once, except for a log entry under way; or tell rank 0 while steps run. Later phases see the request."""
    state = transition.state
    before = state.shutdown.stopping
    transition.request_stop()
    if not event.now:
        if not before and state.phase is Phase.RUNNING:
            transition.call([state.membership.members[0].worker], "stop")
    elif state.phase not in (Phase.ACQUIRING, Phase.RELEASING):
        _kill_all(transition)
        checkpointing.abandon_upload(transition, "the run was stopped at once")
        if transition.state.phase is not Phase.CLOSING:
            transition.end_run("stopped")


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


def _release_run(transition: Transition) -> None:
    """Release the lease, once nothing is uploaded any more."""
    transition.disarm("trace")
    transition.enter(Phase.RELEASING)
    outcome = _outcome(transition.state)
    _emit_run_ended(transition, outcome, _last_error(transition.state))
    transition.want(m.ReleaseLease(outcome=outcome, step=transition.state.committed))


def _outcome(state: DriverState) -> m.RunOutcome:
    """Return how the run ends: one that was stopped after its last results is done, as is one that ends early."""
    early, total = bool(state.end_reason), state.settings.length.total_steps
    stored = state.committed >= (state.position.step if early else total)
    done = state.shutdown.outcome == "stopped" and stored and (early or _is_evaluated(state, total))
    return "done" if done else state.shutdown.outcome


def _on_lease_released(transition: Transition, event: m.LeaseReleased) -> None:
    _finish(transition, _outcome(transition.state), _last_error(transition.state))


def _last_error(state: DriverState) -> Exception | None:
    """Return the run's error; one of user code also says how to continue with a corrected job."""
    error = state.shutdown.error
    if not isinstance(error, UserCodeError) or error.remedy or not state.committed:
        return error
    remedy = f"correct the job; with resume=True it continues from step {state.committed:,}"
    return type(error)(error.what, where=error.where, remedy=remedy, detail=error.detail)


def _on_lease_lost(transition: Transition, event: m.LeaseLost) -> None:
    """Write nothing more, and end the workers, unless they belong to another driver by now.

    An earlier error is reported in place of this one.
    """
    membership.drop_all_workers(transition) if isinstance(event.error, RunConflict) else _kill_all(transition)
    transition.disarm()
    error = transition.state.shutdown.error or event.error
    if transition.state.phase is not Phase.RELEASING:
        _emit_run_ended(transition, "failed", error)
    _finish(transition, "failed", error)


def _kill_all(transition: Transition) -> None:
    for worker in sorted([*transition.state.membership.rank_of, *transition.state.membership.spares]):
        transition.want(m.KillWorker(worker=worker))
    membership.drop_all_workers(transition)


def _emit_run_ended(transition: Transition, outcome: m.RunOutcome, error: Exception | None) -> None:
    text = error.summary if isinstance(error, TrainwrightError) else str(error or "")
    reason, best = transition.state.end_reason, checkpointing.best_kept_evaluation(transition.state)
    transition.emit(
        RunEnded(
            outcome=outcome, step=transition.state.committed, error=text, reason=reason if outcome == "done" else "",
            best=best_text(transition.settings.saving.best, best) if best else "",
        )
    )  # fmt: skip


def _finish(transition: Transition, outcome: m.RunOutcome, error: Exception | None) -> None:
    transition.enter(Phase.FINISHED)
    transition.want(m.FinishRun(outcome=outcome, step=transition.state.committed, error=error))


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
