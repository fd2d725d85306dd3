"""The driver: what to do about what happened. Pure: no clock, no randomness, no input or output.

`begin` gives the first state and effects; `decide` turns each event into the next. An event that is out of date is
dropped by `is_stale`; any other comes in a phase that `POSSIBLE` names, or the driver or its world is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.core.group import Generation
from trainwright.driver import (
    checkpointing,  # fmt: skip
    driver_takeover,
    dynamic_members,
    membership,
    memory_checkpointing,
    preemption,
    recovery,
    rendezvous,
    segments,
    shutdown,
)
from trainwright.driver import messages as m
from trainwright.driver import plan_trials as probing
from trainwright.driver.due_times import hang_deadline_s
from trainwright.driver.run_policy import Settings
from trainwright.driver.state import STANDING, Phase, State
from trainwright.driver.transition import Turn

Decision = tuple[State, tuple[m.Effect, ...]]

_ALL = frozenset(Phase) - {Phase.READY}
_CALLING = frozenset(
    {
        Phase.RESERVING, Phase.FORMING, Phase.HEALING, Phase.PROBING, Phase.RUNNING, Phase.SNAPSHOTTING,
        Phase.EVALUATING,
    }
)  # fmt: skip
_WORKING = _CALLING | {Phase.GATHERING, Phase.WAITING}
_LIVING = _WORKING | {Phase.CLOSING}
_TIMED: Mapping[str, frozenset[Phase]] = {
    "place": frozenset({Phase.GATHERING}),
    "shrink": frozenset({Phase.GATHERING}),
    "leave": frozenset({Phase.GATHERING}),
    "call": frozenset({Phase.RESERVING, Phase.FORMING, Phase.HEALING}),
    "hang": frozenset({Phase.RUNNING, Phase.EVALUATING, Phase.SNAPSHOTTING, Phase.PROBING}),
    "pause": frozenset({Phase.RUNNING}),
    "notice": frozenset({Phase.RUNNING, Phase.WAITING}),
    "upload": frozenset({Phase.WAITING, Phase.CLOSING}),
    "retry": frozenset({Phase.WAITING}),
    "backoff": frozenset({Phase.GATHERING}),
    "late": frozenset({Phase.RUNNING}),
    "apart": STANDING - {Phase.READY},
}

POSSIBLE: Mapping[str, frozenset[Phase]] = {
    "Acquired": frozenset({Phase.ACQUIRING}),
    "Lost": _ALL - {Phase.FINISHED},
    "Started": _WORKING - {Phase.PROBING},  # spares at any time
    "Returned": _CALLING | {Phase.GATHERING, Phase.WAITING},  # while waiting, of those who are apart
    "Raised": _CALLING | {Phase.GATHERING, Phase.WAITING},
    "Returned interrupt": frozenset({Phase.GATHERING}),
    "Returned upload": _LIVING - {Phase.PROBING},
    "Raised upload": _LIVING - {Phase.PROBING},
    "Returned keep": _WORKING - {Phase.PROBING},
    "Raised keep": _WORKING - {Phase.PROBING},
    "Died": _LIVING | {Phase.RELEASING},
    "Noticed": _WORKING,
    "Progressed": _WORKING - {Phase.RESERVING, Phase.FORMING, Phase.HEALING, Phase.PROBING},
    "Committed": _LIVING - {Phase.PROBING},
    "CommitFailed": _LIVING - {Phase.PROBING},
    "StopAsked": _ALL - {Phase.FINISHED},
    "Released": frozenset({Phase.RELEASING}),
    **{f"Expired {name}": phases for name, phases in _TIMED.items()},
}
"""In which phases each kind of event (see `kind_of`) can come when it is not out of date."""


def begin(settings: Settings, now_s: float) -> Decision:
    """The first state of a run, and the wish to take its log."""
    return State(settings=settings, since_s=now_s, phase_s=now_s), (m.Acquire(),)


def decide(state: State, event: m.Happening, now_s: float) -> Decision:
    """The state after an event, and the effects wanted, to be carried out in order.

    Args:
        event: what happened.
        now_s: any clock that runs forward; used for durations in events only.
    """
    if is_stale(state, event):
        return state, ()
    kind = kind_of(event)
    assert state.phase in POSSIBLE[kind], f"{kind} cannot come while {state.phase.value}"
    turn = Turn(state, now_s)
    HANDLERS[type(event)](turn, event)
    _advance(turn)
    return turn.state, tuple(turn.effects)


def kind_of(event: m.Happening) -> str:
    """Name of an event's kind: its type, with the upload's answers and the timers told apart."""
    match event:
        case m.Returned(verb="upload" | "keep" | "interrupt") | m.Raised(verb="upload" | "keep"):
            return f"{type(event).__name__} {event.verb}"
        case m.Expired(name=name):
            return f"Expired {name}"
    return type(event).__name__


def is_stale(state: State, event: m.Happening) -> bool:
    """Whether an event is about something that the driver has let go of."""
    if state.phase is Phase.FINISHED:
        return True
    if state.phase is Phase.RELEASING and not isinstance(event, (m.Released, m.Lost, m.StopAsked, m.Died)):
        return True
    match event:
        case m.Expired():
            return state.timers.get(event.name) != event.number
        case m.Progressed():
            return event.generation != state.generation or state.phase is Phase.CLOSING
        case m.Started():
            unknown = event.worker not in state.starting and event.worker not in state.spares
            return unknown or state.phase is Phase.CLOSING
        case m.Died():
            return event.worker not in state.rank_of and event.worker not in state.spares
        case m.Noticed():
            return preemption.is_old_news(state, event)
        case m.Returned(verb="interrupt"):  # the answer of the thread of steps counts; this one explains
            return not event.value or state.phase is not Phase.GATHERING or event.worker not in state.rank_of
        case m.Returned(verb="stop") | m.Raised(verb="stop" | "interrupt"):
            return True
        case m.Returned(verb="upload") | m.Raised(verb="upload"):
            upload = state.upload  # one given up may still be answered
            return upload is None or event.worker not in upload.owing or event.generation != upload.generation
        case m.Returned(verb="keep") | m.Raised(verb="keep"):
            keeping = state.keeping
            return keeping is None or event.worker not in keeping.owing or state.phase is Phase.CLOSING
        case m.Returned() | m.Raised():
            owing = event.worker in state.awaiting or event.worker in state.apart
            return event.generation != state.generation or not owing
    return False


def _acquired(turn: Turn, event: m.Acquired) -> None:
    step = event.head.step if event.head else 0
    turn.change(
        generation=Generation(token=event.token, number=0), head=event.head, older=event.older, told=event.told,
        progress=step, high=step, since_s=turn.now_s, saved_s=turn.now_s,
    )  # fmt: skip
    if step >= turn.settings.total_steps:
        shutdown.close(turn, "done")
    elif turn.state.stopping:
        shutdown.close(turn, "stopped")
    else:
        turn.change(kept=event.kept, versions=event.kept.version if event.kept else 0)
        probing.plan_trials(turn, event)
        driver_takeover.begin(turn, event.living)


def _started(turn: Turn, event: m.Started) -> None:
    membership.started(turn, event)
    if event.worker in turn.state.apart:
        dynamic_members.started(turn, event.worker)
    else:
        dynamic_members.take_recruits(turn)


def _returned(turn: Turn, event: m.Returned) -> None:
    if event.verb == "upload":
        checkpointing.uploaded(turn, event)
    elif event.verb == "keep":
        memory_checkpointing.delivered(turn, event)
    elif event.verb == "interrupt":
        recovery.explained(turn, event)
    elif turn.state.phase is Phase.GATHERING:
        recovery.returned(turn, event)
    elif event.verb == "run" and dynamic_members.follows(turn.state, event.worker):
        recovery.strayed(turn, event)
    elif event.worker in turn.state.apart:
        dynamic_members.answered(turn, event)
    else:
        _collect(turn, event)


def _collect(turn: Turn, event: m.Returned) -> None:
    """One more answer; the last one ends the phase (see `_advance`)."""
    state = turn.state
    rank = state.rank_of[event.worker]
    turn.change(awaiting=state.awaiting - {event.worker}, answers=state.answers.put(rank, event.value))
    if state.phase is Phase.RUNNING:
        turn.reached(event.value.step)
    segments.await_workers(turn)
    if state.phase is Phase.RUNNING and turn.state.awaiting and not state.answers:
        turn.arm("hang", hang_deadline_s(turn.state))


def _raised(turn: Turn, event: m.Raised) -> None:
    closing = turn.state.phase is Phase.CLOSING
    if event.verb == "upload" and (closing or event.failure.kind == "storage"):
        checkpointing.upload_failed(turn, event)
    elif event.verb == "keep" and event.failure.kind == "storage":
        memory_checkpointing.refused(turn, event)
    else:
        recovery.raised(turn, event)


def _expired(turn: Turn, event: m.Expired) -> None:
    state, settings = turn.state, turn.settings
    turn.change(timers={name: number for name, number in state.timers.items() if name != event.name})
    match event.name:
        case "place":
            membership.place_expired(turn)
        case "shrink" | "backoff" | "late":
            pass  # `_advance` sees that its time is over
        case "apart":
            recovery.cut_off(turn, dynamic_members.expired(turn))
        case "leave":
            recovery.leave_expired(turn)
        case "call":
            recovery.silent(turn, settings.call_deadline_s)
        case "hang":
            recovery.silent(turn, hang_deadline_s(state))
        case "pause":
            segments.pause_if_due(turn)
        case "notice":
            preemption.time_is_short(turn)
        case "retry":
            checkpointing.snapshot(turn, "upload")
        case "upload" if state.phase is Phase.CLOSING:
            checkpointing.abandon(turn, f"not written within {settings.upload_deadline_s:g} s")
        case "upload" if not state.ending:
            segments.put_off_growing(turn)
        case _:
            recovery.upload_silent(turn)


def _advance(turn: Turn) -> None:
    """Follow up on what an event completed."""
    if turn.state.phase in COMPLETED and segments.is_over(turn.state):
        turn.disarm("call", "hang", "pause", "late")
        COMPLETED[turn.state.phase](turn)
    if segments.waits_for_nobody(turn.state):
        turn.disarm("upload")
        turn.change(phase=Phase.READY)
    if shutdown.nothing_left(turn.state):
        shutdown.close(turn, "stopped")
    elif turn.state.phase is Phase.READY:
        segments.proceed(turn)
    elif turn.state.phase is Phase.RUNNING and preemption.may_go(turn.state, turn.now_s):
        membership.pause(turn)
    if turn.state.phase is Phase.GATHERING and recovery.gathered(turn):
        rendezvous.reserve(turn)
    if turn.state.phase is Phase.CLOSING and turn.state.upload is None:
        shutdown.closed(turn)


HANDLERS: Mapping[type, Callable[[Turn, Any], None]] = {
    m.Acquired: _acquired,
    m.Lost: shutdown.lost,
    m.Started: _started,
    m.Returned: _returned,
    m.Raised: _raised,
    m.Died: recovery.died,
    m.Noticed: preemption.noticed,
    m.Progressed: segments.progressed,
    m.Committed: checkpointing.committed,
    m.CommitFailed: checkpointing.commit_failed,
    m.StopAsked: shutdown.stop_asked,
    m.Expired: _expired,
    m.Released: shutdown.released,
}
"""What to do about each type of event."""

COMPLETED: Mapping[Phase, Callable[[Turn], None]] = {
    Phase.RESERVING: rendezvous.reserved,
    Phase.FORMING: rendezvous.formed,
    Phase.HEALING: rendezvous.healed,
    Phase.PROBING: probing.probed,
    Phase.RUNNING: segments.segment_ended,
    Phase.SNAPSHOTTING: checkpointing.snapshotted,
    Phase.EVALUATING: segments.evaluated,
}
"""What to do when all answers of a phase are in."""
