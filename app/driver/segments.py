"""Segments of steps, and what is due between them: evaluations, checkpoints, growth, measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from trainwright.core.data import FeedAssignment, MetricSums, PrefetchDepth, slowest_phase_times
from trainwright.core.errors import StorageError, StoreDown
from trainwright.core.events import Evaluated, Measured, Noted, Prefetched, Stale, Waiting
from trainwright.driver import dynamic_members, failure_policy, preemption
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import (
    evaluation_due,
    hang_deadline_s,
    is_copy_due,
    next_milestone,
    seconds_until_copy,
    skip_if_upload_runs,
    take_snapshot,
    wants_checkpoint,
    wants_memory_copy,
)
from trainwright.driver.driver_state import DriverState, Phase, Transition
from trainwright.driver.failure_policy import limit_target_step
from trainwright.driver.membership import can_grow, request_pause, start_standbys, target_size
from trainwright.driver.messages import EvaluateRequest
from trainwright.driver.persistent_collections import PersistentSet
from trainwright.driver.shutdown import end_run

_LATE_S = 2.0  # for workers to come to an evaluation, once the steps are over
_RETRY_MOST_S = 60.0


def proceed(turn: Transition) -> None:
    """All ranks stand idle at one step: do what is due there, then step on or end."""
    dynamic_members.replace_preempted(turn)
    dynamic_members.admit_joiners(turn)
    if turn.state.recovery.spiked:
        preemption.begin_regroup(turn, preemption.leaving_members(turn.state))
        return
    if preemption.begin_handover(turn):
        return
    skip_if_upload_runs(turn)
    state = turn.state
    copies = _wanted_copies(state, turn.now_s)
    if copies:
        take_snapshot(turn, *copies)
    elif _wants_evaluation(state):
        _evaluate(turn)
    elif not state.ending:
        (_grow if can_grow(state) else _run)(turn)
    elif state.checkpoints.upload is not None:
        _await_upload(turn)
    elif state.committed >= state.position.step:
        end_run(turn, "done" if state.position.step >= state.settings.length.total_steps else "stopped")
    else:
        _retry_checkpoint(turn)


def _wanted_copies(state: DriverState, now_s: float) -> tuple[Literal["upload", "keep"], ...]:
    upload: tuple[Literal["upload"], ...] = ("upload",) if wants_checkpoint(state, now_s) else ()
    keep: tuple[Literal["keep"], ...] = ("keep",) if wants_memory_copy(state, now_s) else ()
    return upload + keep


def _wants_evaluation(state: DriverState) -> bool:
    cut_short = state.shutdown.stopping and state.position.step < state.settings.length.total_steps
    return (
        not cut_short
        and state.segment.evaluated < state.position.step
        and evaluation_due(state.settings, state.position.step)
    )


def _grow(turn: Transition) -> None:
    """Take recruits in; where all begin anew for that, from a checkpoint of this very step, which is waited for."""
    state, upload = turn.state, turn.state.checkpoints.upload
    quick = state.checkpoints.upload_s < turn.settings.saving.upload_deadline_s
    if not state.loses_state(target_size(state)) or state.committed >= state.position.step:
        preemption.begin_regroup(turn)
    elif quick and upload is None and state.checkpoints.considered != state.position.step:
        take_snapshot(turn, "upload")
    elif quick and upload is not None and upload.step == state.position.step:
        _await_upload(turn)
    else:
        _run(turn)  # an older one is on its way, this one failed, or the last one took too long: at the next pause


def is_wait_needless(state: DriverState) -> bool:
    """Whether an upload is waited for on behalf of recruits that are gone by now."""
    return state.phase is Phase.WAITING and not (state.ending or preemption.leaving_members(state) or can_grow(state))


def postpone_growth(turn: Transition) -> None:
    """The store does not take the checkpoint that more workers would begin from: go on, since its writers hold it."""
    upload, waited_s = turn.state.checkpoints.upload, turn.settings.saving.upload_deadline_s
    assert upload is not None, "it is waited for"
    turn.emit(
        Noted(
            text=f"continuing with {len(turn.state.membership.members)} of {target_size(turn.state)} workers for now: "
            f"more workers would start from the checkpoint of step {upload.step}, which was not written within "
            f"{waited_s:g} s"
        )
    )
    _run(turn)


def _await_upload(turn: Transition) -> None:
    turn.enter(Phase.WAITING)
    if turn.state.checkpoints.upload is not None and not turn.state.checkpoints.upload.committing:
        turn.arm("upload", turn.settings.saving.upload_deadline_s)


def _run(turn: Transition) -> None:
    until = limit_target_step(turn.state, next_milestone(turn.settings, turn.state.position.step))
    turn.enter(Phase.RUNNING, moved_s=turn.now_s, pausing=False, until=until)
    turn.call_all("run", range(turn.state.position.step, until))
    turn.arm("hang", hang_deadline_s(turn.state))
    dynamic_members.extend_deadlines(turn)
    dynamic_members.update_hang_timer(turn)
    _arm_pause(turn)
    preemption.arm_handover_timer(turn)


def _arm_pause(turn: Transition) -> None:
    wishes = (seconds_until_copy(turn.state, turn.now_s), preemption.seconds_until_comparison(turn.state, turn.now_s))
    soonest_s = min((wish for wish in wishes if wish is not None), default=None)
    if soonest_s is not None:
        turn.arm("pause", soonest_s)


def request_pause_if_due(turn: Transition) -> None:
    """The time has come to look whether something is due."""
    if is_copy_due(turn.state, turn.now_s) or preemption.is_comparison_due(turn.state, turn.now_s):
        request_pause(turn)
    else:
        _arm_pause(turn)


def on_steps_completed(turn: Transition, event: m.StepsCompleted) -> None:
    """Steps were completed."""
    turn.reached(event.step)
    if turn.state.phase is Phase.RUNNING:
        failure_policy.check_losses(turn, event)
    if turn.state.phase is Phase.RUNNING:
        waited_s = turn.now_s - turn.state.segment.moved_s
        turn.change(moved_s=turn.now_s, longest_s=max(turn.state.segment.longest_s, waited_s))
        turn.arm("hang", hang_deadline_s(turn.state))
        dynamic_members.update_hang_timer(turn)
        start_standbys(turn)


def is_phase_complete(state: DriverState) -> bool:
    """Whether all whom the phase waits for have answered. For an evaluation, all who may judge are worth a wait."""
    if state.phase is not Phase.RUNNING or not state.awaiting:
        return not state.awaiting
    if state.settings.world.topology == "collective" or dynamic_members.is_segment_open(state):
        return False
    return "late" not in state.timers


def arm_late_timer(turn: Transition) -> None:
    """Give workers that an evaluation needs a moment to finish their steps."""
    state = turn.state
    if state.phase is not Phase.RUNNING or state.settings.world.topology != "independent" or not state.awaiting:
        return
    over = not dynamic_members.is_segment_open(state) and "late" not in state.timers
    if over and _wants_evaluation(state.with_fields(step=state.answers[0].step)):
        turn.arm("late", _LATE_S)


def on_segment_ended(turn: Transition) -> None:
    """End a segment: all ranks left the loop after the same step (rank 0's if workers step independently)."""
    dynamic_members.detach_late_workers(turn)
    answers: Mapping[int, m.SegmentReport] = turn.state.answers
    reports = [answers[rank] for rank in sorted(answers)]
    together = turn.settings.world.topology == "collective"
    steps = {report.step for report in reports}
    assert len(steps) == 1 or not together, f"ranks left the loop after different steps: {sorted(steps)}"
    skipped = sum(report.skipped for report in reports)
    if skipped > turn.state.segment.skipped:
        turn.emit(Noted(text=f"{skipped} samples were skipped so far; see quarantine/ beside the run"))
    told = max if together else sum  # all pass the same steps by, or each its own units
    passed = told(report.passed for report in reports)
    if passed > turn.state.segment.passed:
        turn.emit(Noted(text=f"{passed} steps changed nothing so far, because their loss was not finite"))
    overflowed = told(report.overflowed for report in reports)
    if overflowed > turn.state.segment.overflowed:
        turn.emit(Noted(text=f"{overflowed} steps changed nothing so far, because their gradient overflowed in fp16"))
    turn.change(phase=Phase.READY, step=reports[0].step, skipped=skipped, passed=passed, overflowed=overflowed)
    _finish_early(turn, reports)
    preemption.compare_ranks(turn, {rank: report.own_s for rank, report in answers.items()})
    _emit_prefetch(turn, [report.prefetch for report in reports if report.prefetch])
    _emit_measurements(turn, reports)
    _emit_staleness(turn, reports[0])


def _emit_staleness(turn: Transition, report: m.SegmentReport) -> None:
    """Report the staleness of applied updates."""
    stale = report.staleness
    if stale is not None and (stale.counts or stale.dropped or stale.again):
        counts = [[age, number] for age, number in sorted(stale.counts.items())]
        turn.emit(
            Stale(step=report.step, counts=counts, unit=stale.unit, dropped=stale.dropped, again=stale.again)
        )  # fmt: skip


def _finish_early(turn: Transition, reports: Sequence[m.SegmentReport]) -> None:
    """The training is over before its last step: that step is the last one then."""
    step, settings = reports[0].step, turn.settings
    if any(report.finished for report in reports) and step < settings.length.total_steps:
        turn.emit(Noted(text=f"a callback ended the training after {step} of {settings.length.total_steps} steps"))
        turn.adjust_policy(total_steps=step)


def _emit_prefetch(turn: Transition, found: list[PrefetchDepth]) -> None:
    """Say how far the rank that reads furthest ahead does so, whenever that changes."""
    furthest = max(found, key=lambda item: item.chunks * item.chunk_bytes, default=None)
    if furthest is not None and furthest != turn.state.segment.prefetch:
        turn.change(prefetch=furthest)
        turn.emit(Prefetched(**vars(furthest)))


def _evaluate(turn: Transition) -> None:
    """Evaluate: on all ranks, on a chief, or divided between the present workers."""
    state, wanted = turn.state, EvaluateRequest(step=turn.state.position.step)
    turn.enter(Phase.EVALUATING)
    match state.settings.world.topology:
        case "independent":
            judges = dynamic_members.active_workers(state)
        case "coordinator":
            judges = [state.membership.members[0].worker]
        case _:
            judges = [member.worker for member in state.membership.members]
    turn.change(awaiting=PersistentSet(judges), judges=len(judges))
    for place, worker in enumerate(judges):
        if state.settings.world.topology == "independent":
            wanted = replace(wanted, feeding=FeedAssignment(data_ranks=range(place, place + 1), total=len(judges)))
        turn.call([worker], "evaluate", wanted)
    if judges:
        turn.arm("hang", hang_deadline_s(turn.state))
        dynamic_members.update_hang_timer(turn)


def on_evaluated(turn: Transition) -> None:
    """All sums are in, added in the order of ranks so that they repeat bitwise; once more where some were lost."""
    state = turn.state
    if not state.segment.judges or len(state.answers) < state.segment.judges:
        _evaluate(turn)
        return
    total = MetricSums()
    for rank in sorted(state.answers):
        total = total + state.answers[rank]
    seconds = turn.now_s - state.phase_s
    turn.emit(Evaluated(step=state.position.step, metrics=total.means(), seconds=seconds))
    turn.change(phase=Phase.READY, evaluated=state.position.step)


def _retry_checkpoint(turn: Transition) -> None:
    """The last checkpoint failed: once more after a pause, a few times; while the store is down, for an hour."""
    state, settings = turn.state, turn.settings
    assert state.checkpoints.attempts > 0 and state.checkpoints.trouble is not None, (
        "the last checkpoint was never tried"
    )
    waited_s = turn.now_s - state.checkpoints.failing_s
    down = isinstance(state.checkpoints.trouble, StoreDown)
    if (
        waited_s >= settings.saving.outage_deadline_s
        if down
        else state.checkpoints.attempts >= settings.saving.storage_attempts
    ):
        error = StorageError(
            f"the checkpoint of step {state.position.step} could not be written in {state.checkpoints.attempts} "
            f"attempts: {state.checkpoints.trouble}",
            remedy=f"mend the store, then run the same command: it goes on from step {state.committed}",
        )
        end_run(turn, "failed", error)
        return
    if down and state.checkpoints.attempts == 1:
        turn.emit(Waiting(what="the store, to write the last checkpoint", deadline_s=settings.saving.outage_deadline_s))
    turn.enter(Phase.WAITING)
    turn.arm("retry", min(_RETRY_MOST_S, settings.saving.retry_s * 2 ** (state.checkpoints.attempts - 1)))


# --- Measurements of the ranks ----------------------------------------------------------------------------------------


def _emit_measurements(turn: Transition, reports: Sequence[m.SegmentReport]) -> None:
    """Emit the phases of the slowest rank and the best known noise scale; say once that the batch is far above it."""
    phases = slowest_phase_times(report.phases for report in reports if report.phases)
    if phases is None:
        return
    sampler = max(reports, key=lambda report: (report.noise is not None, report.sampled))
    noise, roles = (
        sampler.noise,
        [turn.settings.world.role_of(rank) for rank in range(len(turn.state.membership.members))],
    )
    turn.emit(
        Measured(
            step=turn.state.position.step, steps=phases.steps, workers=roles.count("worker"),
            phases=dict(phases.medians),
            data_s=phases.data_s, sampled=sampler.sampled, noise=vars(noise) if noise else {},
        )
    )  # fmt: skip
    if noise is not None and noise.advice and not turn.state.segment.advised:
        turn.change(advised=True)
        turn.emit(Noted(text=noise.advice))
