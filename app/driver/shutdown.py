"""The end of a run: the outcome is decided once, an upload may still end, then the lease is released."""

from __future__ import annotations

from trainwright.core import events
from trainwright.core.errors import RunConflict, TrainwrightError
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import abandon_upload, evaluation_due
from trainwright.driver.driver_state import RECOVERY_PHASES, DriverState, Phase, Transition
from trainwright.driver.persistent_collections import PersistentMap, PersistentSet


def on_stop_requested(turn: Transition, event: m.StopRequested) -> None:
    """Note a stop request. While steps run, tell rank 0; otherwise the next phase sees it."""
    state = turn.state
    if event.now:
        _stop_now(turn)
    elif not state.shutdown.stopping:
        turn.change(stopping=True)
        if state.phase is Phase.RUNNING:
            turn.call([state.membership.members[0].worker], "stop")


def _stop_now(turn: Transition) -> None:
    """Stop without waiting, except for a log entry under way."""
    turn.change(stopping=True)
    if turn.state.phase in (Phase.ACQUIRING, Phase.RELEASING):
        return
    _kill_all(turn)
    abandon_upload(turn, "the run was stopped at once")
    if turn.state.phase is not Phase.CLOSING:
        end_run(turn, "stopped")


def is_recovery_needless(state: DriverState) -> bool:
    """Whether a recovery is needless, because all results are durable already."""
    last = state.position.progress >= state.settings.length.total_steps
    evaluated = state.segment.evaluated >= state.position.progress or not evaluation_due(
        state.settings, state.position.progress
    )
    wanted = state.shutdown.stopping or last
    return (
        state.phase in RECOVERY_PHASES
        and wanted
        and state.committed >= state.position.progress
        and (evaluated or not last)
    )


def end_run(turn: Transition, outcome: m.RunOutcome, error: Exception | None = None) -> None:
    """Decide the outcome. Answers of workers are ignored from now on, except uploads."""
    turn.disarm()
    empty = PersistentSet()
    turn.enter(Phase.CLOSING, outcome=outcome, error=error, awaiting=empty, starting=empty, apart={})
    if turn.state.checkpoints.upload is not None and not turn.state.checkpoints.upload.committing:
        turn.arm("upload", turn.settings.saving.upload_deadline_s)


def release_run(turn: Transition) -> None:
    """No upload is on its way any more: give the log back."""
    state = turn.state
    if state.shutdown.outcome == "stopped" and state.committed >= state.settings.length.total_steps:
        turn.change(outcome="done")
    turn.enter(Phase.RELEASING)
    _emit_run_ended(turn)
    turn.want(m.ReleaseLease(outcome=turn.state.shutdown.outcome, step=state.committed))


def on_lease_released(turn: Transition, event: m.LeaseReleased) -> None:
    """The log is free."""
    _finish(turn)


def on_lease_lost(turn: Transition, event: m.LeaseLost) -> None:
    """The log is not ours: write nothing more, and end the workers, unless they belong to another driver by now.

    An error that came before outranks this one.
    """
    _drop_workers(turn) if isinstance(event.error, RunConflict) else _kill_all(turn)
    turn.disarm()
    told = turn.state.phase is Phase.RELEASING
    turn.change(outcome="failed", error=turn.state.shutdown.error or event.error)
    if not told:
        _emit_run_ended(turn)
    _finish(turn)


def _kill_all(turn: Transition) -> None:
    for worker in sorted([*turn.state.membership.rank_of, *turn.state.membership.spares]):
        turn.want(m.KillWorker(worker=worker))
    _drop_workers(turn)


def _drop_workers(turn: Transition) -> None:
    empty = PersistentSet()
    turn.change(rank_of=PersistentMap(), awaiting=empty, starting=empty, spares=PersistentMap(), apart={})


def _emit_run_ended(turn: Transition) -> None:
    state = turn.state
    error = state.shutdown.error
    text = error.summary if isinstance(error, TrainwrightError) else str(error or "")
    turn.emit(events.RunEnded(outcome=state.shutdown.outcome, step=state.committed, error=text))


def _finish(turn: Transition) -> None:
    state = turn.state
    turn.enter(Phase.FINISHED)
    turn.want(m.FinishRun(outcome=state.shutdown.outcome, step=state.committed, error=state.shutdown.error))
