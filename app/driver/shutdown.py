"""The end of a run: decided once, then an upload on its way may still end, then the log is given back."""

from __future__ import annotations

from trainwright.core import events
from trainwright.core.errors import RunConflict, TrainwrightError
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import abandon
from trainwright.driver.due_times import evaluation_due
from trainwright.driver.persistent_collections import PersistentMap, PersistentSet
from trainwright.driver.state import RECOVERING, Phase, State
from trainwright.driver.transition import Turn


def stop_asked(turn: Turn, event: m.StopAsked) -> None:
    """Remember the wish. While steps run, rank 0 hears of it; elsewhere it counts at the next chance."""
    state = turn.state
    if event.now:
        _stop_now(turn)
    elif not state.stopping:
        turn.change(stopping=True)
        if state.phase is Phase.RUNNING:
            turn.call([state.members[0].worker], "stop")


def _stop_now(turn: Turn) -> None:
    """Nothing is waited for but a log entry under way."""
    turn.change(stopping=True)
    if turn.state.phase in (Phase.ACQUIRING, Phase.RELEASING):
        return
    _kill_all(turn)
    abandon(turn, "the run was stopped at once")
    if turn.state.phase is not Phase.CLOSING:
        close(turn, "stopped")


def nothing_left(state: State) -> bool:
    """Whether a recovery is in vain: all that is wanted is durable already."""
    last = state.progress >= state.settings.total_steps
    evaluated = state.evaluated >= state.progress or not evaluation_due(state.settings, state.progress)
    wanted = state.stopping or last
    return state.phase in RECOVERING and wanted and state.committed >= state.progress and (evaluated or not last)


def close(turn: Turn, outcome: m.Outcome, error: Exception | None = None) -> None:
    """Decide the outcome. Whatever the workers still answer is of no interest, but for an upload."""
    turn.disarm()
    empty = PersistentSet()
    turn.enter(Phase.CLOSING, outcome=outcome, error=error, awaiting=empty, starting=empty, apart={})
    if turn.state.upload is not None and not turn.state.upload.committing:
        turn.arm("upload", turn.settings.upload_deadline_s)


def closed(turn: Turn) -> None:
    """No upload is on its way any more: give the log back."""
    state = turn.state
    if state.outcome == "stopped" and state.committed >= state.settings.total_steps:
        turn.change(outcome="done")
    turn.enter(Phase.RELEASING)
    _tell_end(turn)
    turn.want(m.Release(outcome=turn.state.outcome, step=state.committed))


def released(turn: Turn, event: m.Released) -> None:
    """The log is free."""
    _finish(turn)


def lost(turn: Turn, event: m.Lost) -> None:
    """The log is not ours: write nothing more, and end the workers, unless they belong to another driver by now.

    An error that came before outranks this one.
    """
    _let_go(turn) if isinstance(event.error, RunConflict) else _kill_all(turn)
    turn.disarm()
    told = turn.state.phase is Phase.RELEASING
    turn.change(outcome="failed", error=turn.state.error or event.error)
    if not told:
        _tell_end(turn)
    _finish(turn)


def _kill_all(turn: Turn) -> None:
    for worker in sorted([*turn.state.rank_of, *turn.state.spares]):
        turn.want(m.Kill(worker=worker))
    _let_go(turn)


def _let_go(turn: Turn) -> None:
    empty = PersistentSet()
    turn.change(rank_of=PersistentMap(), awaiting=empty, starting=empty, spares=PersistentMap(), apart={})


def _tell_end(turn: Turn) -> None:
    state = turn.state
    error = state.error
    text = error.summary if isinstance(error, TrainwrightError) else str(error or "")
    turn.emit(events.RunEnded(outcome=state.outcome, step=state.committed, error=text))


def _finish(turn: Turn) -> None:
    state = turn.state
    turn.enter(Phase.FINISHED)
    turn.want(m.Finish(outcome=state.outcome, step=state.committed, error=state.error))
