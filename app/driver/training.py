"""Steps, and what is due between them."""

from __future__ import annotations

from trainwright.core.data import Prefetch, Sums
from trainwright.core.errors import StorageError
from trainwright.core.events import Evaluated, Noted, Prefetched
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import skip_if_busy, snapshot, wants_snapshot
from trainwright.driver.ending import close
from trainwright.driver.milestones import evaluation_due, hang_deadline_s, next_milestone
from trainwright.driver.recovering import replenish
from trainwright.driver.state import Phase, State
from trainwright.driver.turn import Turn


def proceed(turn: Turn) -> None:
    """All ranks stand idle at one step: do what is due there, then step on or end."""
    skip_if_busy(turn)
    state = turn.state
    if wants_snapshot(state):
        snapshot(turn)
    elif _wants_evaluation(state):
        _evaluate(turn)
    elif not state.ending:
        _run(turn)
    elif state.upload is not None:
        turn.enter(Phase.WAITING)
        if not state.upload.committing:
            turn.arm("upload", state.settings.upload_deadline_s)
    elif state.committed >= state.step:
        close(turn, "done" if state.step >= state.settings.total_steps else "stopped")
    else:
        _try_again(turn)


def _wants_evaluation(state: State) -> bool:
    cut_short = state.stopping and state.step < state.settings.total_steps
    return not cut_short and state.evaluated < state.step and evaluation_due(state.settings, state.step)


def _run(turn: Turn) -> None:
    until = next_milestone(turn.settings, turn.state.step)
    turn.enter(Phase.RUNNING, moved_s=turn.now_s)
    turn.call_all("run", until)
    turn.arm("hang", hang_deadline_s(turn.state))


def progressed(turn: Turn, event: m.Progressed) -> None:
    """Steps were completed."""
    turn.reached(event.step)
    if turn.state.phase is Phase.RUNNING:
        waited_s = turn.now_s - turn.state.moved_s
        turn.change(moved_s=turn.now_s, longest_s=max(turn.state.longest_s, waited_s))
        turn.arm("hang", hang_deadline_s(turn.state))
        replenish(turn)


def segment_ended(turn: Turn) -> None:
    """All ranks have left the loop, after the same step."""
    reports: list[m.SegmentReport] = list(turn.state.answers.values())
    steps = {report.step for report in reports}
    assert len(steps) == 1, f"ranks left the loop after different steps: {sorted(steps)}"
    skipped = sum(report.skipped for report in reports)
    if skipped > turn.state.skipped:
        turn.emit(Noted(text=f"{skipped} samples were skipped so far; see quarantine/ beside the run"))
    passed = max(report.passed for report in reports)
    if passed > turn.state.passed:
        turn.emit(Noted(text=f"{passed} steps changed nothing so far, because their loss was not finite"))
    turn.change(phase=Phase.READY, step=reports[0].step, skipped=skipped, passed=passed)
    _tell_prefetch(turn, [report.prefetch for report in reports if report.prefetch])


def _tell_prefetch(turn: Turn, found: list[Prefetch]) -> None:
    """Say how far the rank that reads furthest ahead does so, whenever that changes."""
    furthest = max(found, key=lambda item: item.chunks * item.chunk_bytes, default=None)
    if furthest is not None and furthest != turn.state.prefetch:
        turn.change(prefetch=furthest)
        turn.emit(Prefetched(**vars(furthest)))


def _evaluate(turn: Turn) -> None:
    turn.enter(Phase.EVALUATING)
    turn.call_all("evaluate", turn.state.step)
    turn.arm("hang", hang_deadline_s(turn.state))


def evaluated(turn: Turn) -> None:
    """All sums are in, added in the order of ranks so that they repeat bitwise."""
    state = turn.state
    total = Sums()
    for rank in range(len(state.members)):
        total = total + state.answers[rank]
    seconds = turn.now_s - state.phase_s
    turn.emit(Evaluated(step=state.step, metrics=total.means(), seconds=seconds))
    turn.change(phase=Phase.READY, evaluated=state.step)


def _try_again(turn: Turn) -> None:
    """The last checkpoint failed: once more after a pause, a few times."""
    state, settings = turn.state, turn.settings
    assert state.attempts > 0 and state.trouble is not None, "the last checkpoint was never tried"
    if state.attempts >= settings.storage_attempts:
        error = StorageError(
            f"the checkpoint of step {state.step} could not be written in {state.attempts} attempts: {state.trouble}",
            remedy=f"mend the store, then run the same command: it goes on from step {state.committed}",
        )
        close(turn, "failed", error)
        return
    turn.enter(Phase.WAITING)
    turn.arm("retry", settings.retry_s * 2 ** (state.attempts - 1))
