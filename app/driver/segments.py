"""Steps, and what is due between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from trainwright.core.data import Feeding, Prefetch, Sums
from trainwright.core.errors import StorageError, StoreDown
from trainwright.core.events import Evaluated, Noted, Prefetched, Stale, Waiting
from trainwright.driver import dynamic_members, loss_spikes, measurements, preemption, stragglers
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import skip_if_busy, snapshot, wants_checkpoint
from trainwright.driver.crash_loops import careful
from trainwright.driver.due_times import copies_due, evaluation_due, hang_deadline_s, next_milestone, pause_after_s
from trainwright.driver.membership import may_grow, pause, replenish, wanted
from trainwright.driver.memory_checkpointing import wants_keep
from trainwright.driver.persistent_collections import PersistentSet
from trainwright.driver.shutdown import close
from trainwright.driver.state import Phase, State
from trainwright.driver.transition import Turn
from trainwright.driver.worker_requests import Evaluation

LATE_S = 2.0  # for workers to come to an evaluation, once the steps are over
_RETRY_MOST_S = 60.0


def proceed(turn: Turn) -> None:
    """All ranks stand idle at one step: do what is due there, then step on or end."""
    dynamic_members.release(turn)
    dynamic_members.take_recruits(turn)
    if turn.state.spiked:
        preemption.regroup(turn, preemption.goers(turn.state))
        return
    if preemption.step_aside(turn):
        return
    skip_if_busy(turn)
    state = turn.state
    copies = _wanted_copies(state, turn.now_s)
    if copies:
        snapshot(turn, *copies)
    elif _wants_evaluation(state):
        _evaluate(turn)
    elif not state.ending:
        (_grow if may_grow(state) else _run)(turn)
    elif state.upload is not None:
        _await_upload(turn)
    elif state.committed >= state.step:
        close(turn, "done" if state.step >= state.settings.total_steps else "stopped")
    else:
        _try_again(turn)


def _wanted_copies(state: State, now_s: float) -> tuple[Literal["upload", "keep"], ...]:
    upload: tuple[Literal["upload"], ...] = ("upload",) if wants_checkpoint(state, now_s) else ()
    keep: tuple[Literal["keep"], ...] = ("keep",) if wants_keep(state, now_s) else ()
    return upload + keep


def _wants_evaluation(state: State) -> bool:
    cut_short = state.stopping and state.step < state.settings.total_steps
    return not cut_short and state.evaluated < state.step and evaluation_due(state.settings, state.step)


def _grow(turn: Turn) -> None:
    """Take recruits in; where all begin anew for that, from a checkpoint of this very step, which is waited for."""
    state, upload = turn.state, turn.state.upload
    quick = state.upload_s < turn.settings.upload_deadline_s
    if not state.loses_state(wanted(state)) or state.committed >= state.step:
        preemption.regroup(turn)
    elif quick and upload is None and state.considered != state.step:
        snapshot(turn, "upload")
    elif quick and upload is not None and upload.step == state.step:
        _await_upload(turn)
    else:
        _run(turn)  # an older one is on its way, this one failed, or the last one took too long: at the next pause


def waits_for_nobody(state: State) -> bool:
    """Whether an upload is waited for on behalf of recruits that are gone by now."""
    return state.phase is Phase.WAITING and not (state.ending or preemption.goers(state) or may_grow(state))


def put_off_growing(turn: Turn) -> None:
    """The store does not take the checkpoint that more workers would begin from: go on, since its writers hold it."""
    upload, waited_s = turn.state.upload, turn.settings.upload_deadline_s
    assert upload is not None, "it is waited for"
    turn.emit(
        Noted(
            text=f"going on with {len(turn.state.members)} of {wanted(turn.state)} workers for now: more would begin "
            f"from the checkpoint of step {upload.step}, which was not written within {waited_s:g} s"
        )
    )
    _run(turn)


def _await_upload(turn: Turn) -> None:
    turn.enter(Phase.WAITING)
    if turn.state.upload is not None and not turn.state.upload.committing:
        turn.arm("upload", turn.settings.upload_deadline_s)


def _run(turn: Turn) -> None:
    until = careful(turn.state, next_milestone(turn.settings, turn.state.step))
    turn.enter(Phase.RUNNING, moved_s=turn.now_s, pausing=False, until=until)
    turn.call_all("run", range(turn.state.step, until))
    turn.arm("hang", hang_deadline_s(turn.state))
    dynamic_members.begin_segment(turn)
    dynamic_members.look(turn)
    _arm_pause(turn)
    preemption.arm(turn)


def _arm_pause(turn: Turn) -> None:
    wishes = (pause_after_s(turn.state, turn.now_s), stragglers.look_after_s(turn.state, turn.now_s))
    soonest_s = min((wish for wish in wishes if wish is not None), default=None)
    if soonest_s is not None:
        turn.arm("pause", soonest_s)


def pause_if_due(turn: Turn) -> None:
    """The time has come to look whether something is due."""
    if copies_due(turn.state, turn.now_s) or stragglers.look_is_due(turn.state, turn.now_s):
        pause(turn)
    else:
        _arm_pause(turn)


def progressed(turn: Turn, event: m.Progressed) -> None:
    """Steps were completed."""
    turn.reached(event.step)
    if turn.state.phase is Phase.RUNNING:
        loss_spikes.look(turn, event)
    if turn.state.phase is Phase.RUNNING:
        waited_s = turn.now_s - turn.state.moved_s
        turn.change(moved_s=turn.now_s, longest_s=max(turn.state.longest_s, waited_s))
        turn.arm("hang", hang_deadline_s(turn.state))
        dynamic_members.look(turn)
        replenish(turn)


def is_over(state: State) -> bool:
    """Whether all whom the phase waits for have answered. For an evaluation, all who may judge are worth a wait."""
    if state.phase is not Phase.RUNNING or not state.awaiting:
        return not state.awaiting
    if state.settings.topology == "collective" or dynamic_members.segment_lasts(state):
        return False
    return "late" not in state.timers


def await_workers(turn: Turn) -> None:
    """The steps are over but for some who will be wanted for an evaluation: they have a moment to come."""
    state = turn.state
    if state.phase is not Phase.RUNNING or state.settings.topology != "independent" or not state.awaiting:
        return
    over = not dynamic_members.segment_lasts(state) and "late" not in state.timers
    if over and _wants_evaluation(replace(state, step=state.answers[0].step)):
        turn.arm("late", LATE_S)


def segment_ended(turn: Turn) -> None:
    """All ranks have left the loop, after the same step, which rank 0 tells where workers step alone."""
    dynamic_members.leave_behind(turn)
    answers: Mapping[int, m.SegmentReport] = turn.state.answers
    reports = [answers[rank] for rank in sorted(answers)]
    together = turn.settings.topology == "collective"
    steps = {report.step for report in reports}
    assert len(steps) == 1 or not together, f"ranks left the loop after different steps: {sorted(steps)}"
    skipped = sum(report.skipped for report in reports)
    if skipped > turn.state.skipped:
        turn.emit(Noted(text=f"{skipped} samples were skipped so far; see quarantine/ beside the run"))
    told = max if together else sum  # all pass the same steps by, or each its own units
    passed = told(report.passed for report in reports)
    if passed > turn.state.passed:
        turn.emit(Noted(text=f"{passed} steps changed nothing so far, because their loss was not finite"))
    overflowed = told(report.overflowed for report in reports)
    if overflowed > turn.state.overflowed:
        turn.emit(Noted(text=f"{overflowed} steps changed nothing so far, because their gradient overflowed in fp16"))
    turn.change(phase=Phase.READY, step=reports[0].step, skipped=skipped, passed=passed, overflowed=overflowed)
    _finish_early(turn, reports)
    stragglers.compare(turn, {rank: report.own_s for rank, report in answers.items()})
    _tell_prefetch(turn, [report.prefetch for report in reports if report.prefetch])
    measurements.tell(turn, reports)
    _tell_staleness(turn, reports[0])


def _tell_staleness(turn: Turn, report: m.SegmentReport) -> None:
    """Say how stale what was applied was."""
    stale = report.staleness
    if stale is not None and (stale.counts or stale.dropped or stale.again):
        counts = [[age, number] for age, number in sorted(stale.counts.items())]
        turn.emit(
            Stale(step=report.step, counts=counts, unit=stale.unit, dropped=stale.dropped, again=stale.again)
        )  # fmt: skip


def _finish_early(turn: Turn, reports: Sequence[m.SegmentReport]) -> None:
    """The training is over before its last step: that step is the last one then."""
    step, settings = reports[0].step, turn.settings
    if any(report.finished for report in reports) and step < settings.total_steps:
        turn.emit(Noted(text=f"a callback ended the training after {step} of {settings.total_steps} steps"))
        turn.change(settings=replace(settings, total_steps=step))


def _tell_prefetch(turn: Turn, found: list[Prefetch]) -> None:
    """Say how far the rank that reads furthest ahead does so, whenever that changes."""
    furthest = max(found, key=lambda item: item.chunks * item.chunk_bytes, default=None)
    if furthest is not None and furthest != turn.state.prefetch:
        turn.change(prefetch=furthest)
        turn.emit(Prefetched(**vars(furthest)))


def _evaluate(turn: Turn) -> None:
    """Have the set judged: by all, by a chief for all, or dealt anew between those workers that are there."""
    state, wanted = turn.state, Evaluation(step=turn.state.step)
    turn.enter(Phase.EVALUATING)
    match state.settings.topology:
        case "independent":
            judges = dynamic_members.at_work(state)
        case "coordinator":
            judges = [state.members[0].worker]
        case _:
            judges = [member.worker for member in state.members]
    turn.change(awaiting=PersistentSet(judges), judges=len(judges))
    for place, worker in enumerate(judges):
        if state.settings.topology == "independent":
            wanted = replace(wanted, feeding=Feeding(data_ranks=range(place, place + 1), total=len(judges)))
        turn.call([worker], "evaluate", wanted)
    if judges:
        turn.arm("hang", hang_deadline_s(turn.state))
        dynamic_members.look(turn)


def evaluated(turn: Turn) -> None:
    """All sums are in, added in the order of ranks so that they repeat bitwise; once more where some were lost."""
    state = turn.state
    if not state.judges or len(state.answers) < state.judges:
        _evaluate(turn)
        return
    total = Sums()
    for rank in sorted(state.answers):
        total = total + state.answers[rank]
    seconds = turn.now_s - state.phase_s
    turn.emit(Evaluated(step=state.step, metrics=total.means(), seconds=seconds))
    turn.change(phase=Phase.READY, evaluated=state.step)


def _try_again(turn: Turn) -> None:
    """The last checkpoint failed: once more after a pause, a few times; while the store is down, for an hour."""
    state, settings = turn.state, turn.settings
    assert state.attempts > 0 and state.trouble is not None, "the last checkpoint was never tried"
    waited_s = turn.now_s - state.failing_s
    down = isinstance(state.trouble, StoreDown)
    if waited_s >= settings.outage_deadline_s if down else state.attempts >= settings.storage_attempts:
        error = StorageError(
            f"the checkpoint of step {state.step} could not be written in {state.attempts} attempts: {state.trouble}",
            remedy=f"mend the store, then run the same command: it goes on from step {state.committed}",
        )
        close(turn, "failed", error)
        return
    if down and state.attempts == 1:
        turn.emit(Waiting(what="the store, to write the last checkpoint", deadline_s=settings.outage_deadline_s))
    turn.enter(Phase.WAITING)
    turn.arm("retry", min(_RETRY_MOST_S, settings.retry_s * 2 ** (state.attempts - 1)))
