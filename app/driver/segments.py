"""Segments of steps, and what is due between them: evaluations, checkpoints, growth, measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from trainwright.core.data import FeedAssignment, MetricSums, PeakMemory, PrefetchDepth, slowest_phase_times
from trainwright.core.errors import JobError, StorageError, StoreDown
from trainwright.core.events import Evaluated, Measured, MemoryMeasured, Noted, Prefetched, Stale, Waiting
from trainwright.core.metric_goals import check_goals
from trainwright.driver import dynamic_members, failure_policy, preemption
from trainwright.driver import messages as m
from trainwright.driver.checkpointing import (
    await_upload,
    evaluation_due,
    is_best_unsaved,
    is_copy_due,
    next_milestone,
    note_announced,
    seconds_until_copy,
    skip_if_upload_runs,
    take_snapshot,
    wants_checkpoint,
    wants_memory_copy,
)
from trainwright.driver.driver_state import DriverState, Phase, Transition
from trainwright.driver.failure_policy import limit_target_step
from trainwright.driver.membership import can_grow, start_standbys, target_size
from trainwright.driver.messages import EvaluateRequest

_LATE_S = 2.0  # for workers to finish their steps, before an evaluation that they compute
_RETRY_MOST_S = 60.0
_GROWN = 1.01  # of a peak of memory, to be told again


def proceed(transition: Transition) -> None:
    """Do what is due at the current step, when all ranks are idle; then continue or end the run."""
    preemption.replace_preempted(transition)
    dynamic_members.admit_joiners(transition)
    if transition.state.recovery.spiked:
        preemption.begin_regroup(transition, preemption.leaving_members(transition.state))
        return
    if preemption.begin_handover(transition):
        return
    _stop_if_time_is_over(transition)
    state = transition.state
    copies = _wanted_copies(state, transition.now_s)
    if copies:
        take_snapshot(transition, *copies)
    elif _wants_evaluation(state, state.position.step):
        _evaluate(transition)
    elif not state.ending:
        _go_on(transition)
    elif state.checkpoints.upload is not None:
        await_upload(transition)
    elif state.committed >= state.position.step:
        _end(transition)
    else:
        _retry_checkpoint(transition)


def _end(transition: Transition) -> None:
    """End the run, once callbacks have been told of its last checkpoint."""
    state = transition.state
    if state.owes_announcement:
        _call_run(transition, state.position.step)
    else:
        transition.end_run("done" if state.position.step >= state.settings.length.total_steps else "stopped")


def _go_on(transition: Transition) -> None:
    """Continue after the current step; first wait until the checkpoint of the best evaluation is committed."""
    if is_best_unsaved(transition.state) and transition.state.checkpoints.upload is not None:
        await_upload(transition)
        return
    skip_if_upload_runs(transition)
    (_grow if can_grow(transition.state) else _run)(transition)


def _wanted_copies(state: DriverState, now_s: float) -> tuple[Literal["upload", "keep"], ...]:
    upload: tuple[Literal["upload"], ...] = ("upload",) if wants_checkpoint(state, now_s) else ()
    keep: tuple[Literal["keep"], ...] = ("keep",) if wants_memory_copy(state, now_s) else ()
    return upload + keep


def _wants_evaluation(state: DriverState, step: int) -> bool:
    cut_short = state.shutdown.stopping and step < state.settings.length.total_steps
    return not cut_short and state.evaluated < step and evaluation_due(state.settings, step)


def on_lease_acquired(transition: Transition, event: m.LeaseAcquired) -> None:
    """Note the evaluations of earlier drivers, and when the time of the run is over, of which they spent a part."""
    transition.change(evaluations=event.evaluations)
    if transition.settings.length.max_time_s is not None:
        transition.change(deadline_s=transition.now_s + transition.settings.length.max_time_s - event.spent_s)
        _stop_if_time_is_over(transition)


def _stop_if_time_is_over(transition: Transition) -> None:
    """End the run at the current step if its time is over."""
    if transition.now_s >= transition.state.segment.deadline_s and not transition.state.shutdown.stopping:
        transition.change(time_is_over=True)
        transition.request_stop()


def forget_evaluations_after(transition: Transition, step: int) -> None:
    """Evaluate again after this step, because the steps after it are done again."""
    transition.change(evaluations=tuple(event for event in transition.state.segment.evaluations if event.step <= step))


def _grow(transition: Transition) -> None:
    """Take joining workers in. If all ranks restart for that, first wait for a checkpoint of the current step."""
    state, upload, step = transition.state, transition.state.checkpoints.upload, transition.state.position.step
    quick = state.checkpoints.upload_s < transition.settings.saving.upload_deadline_s
    if not state.loses_state(target_size(state)) or state.committed >= step:
        preemption.begin_regroup(transition)
    elif quick and upload is None and state.checkpoints.considered != step:
        take_snapshot(transition, "upload")
    elif quick and upload is not None and upload.step == step:
        await_upload(transition)
    else:
        _run(transition)  # an older upload runs, this one failed, or the last one took too long: at the next pause


def is_wait_needless(state: DriverState) -> bool:
    """Whether the run waits for an upload on behalf of joining workers that are gone by now."""
    if state.phase is not Phase.WAITING or state.ending or is_best_unsaved(state):
        return False
    return not (preemption.leaving_members(state) or can_grow(state))


def stop_waiting(transition: Transition) -> None:
    """Continue although the store does not take a checkpoint: the best, or one from which other workers would start."""
    upload, waited_s = transition.state.checkpoints.upload, transition.settings.saving.upload_deadline_s
    assert upload is not None, "the run waits for it"
    if _wants_evaluation(transition.state, transition.state.position.step):
        transition.disarm("notice")  # it is armed again if the handover waits once more, after the evaluation
        _evaluate(transition)
        return
    count, wanted = len(transition.state.membership.members), target_size(transition.state)
    late = f"the checkpoint of step {upload.step}, which was not written within {waited_s:g} s"
    if is_best_unsaved(transition.state):
        step = transition.state.position.step
        text = f"continuing before step {step}, the best so far, has a checkpoint, because of {late}"
    elif preemption.leaving_members(transition.state):
        text = f"the workers that are to leave continue for now: the others would start from {late}"
    else:
        text = f"continuing with {count} of {wanted} workers for now: more workers would start from {late}"
    transition.emit(Noted(text=text))
    _run(transition)


def _run(transition: Transition) -> None:
    _call_run(
        transition,
        limit_target_step(transition.state, next_milestone(transition.settings, transition.state.position.step)),
    )
    dynamic_members.extend_deadlines(transition)
    _arm_pause(transition)
    preemption.arm_handover_timer(transition)


def _call_run(transition: Transition, until: int) -> None:
    """Have all ranks take the steps up to `until`, which may be none."""
    state, step, saved = transition.state, transition.state.position.step, transition.state.checkpoints
    named = (*saved.older, *((saved.head,) if saved.head else ()))
    new = tuple(ref for ref in named if ref.step > saved.announced)
    transition.enter(Phase.RUNNING, moved_s=transition.now_s, until=until, announcing=state.committed)
    metrics = state.segment.evaluations[-1].metrics if state.evaluated == step else None
    transition.call_all("run", m.RunRequest(steps=range(step, until), metrics=metrics, checkpoints=new))
    dynamic_members.arm_hang_timer(transition)


def _arm_pause(transition: Transition) -> None:
    """Set a timer for the next copy or comparison that is due by time, or for the end of the run's time."""
    state, now_s = transition.state, transition.now_s
    waits_s = (seconds_until_copy(state, now_s), preemption.seconds_until_comparison(state, now_s))
    soonest_s = min(wait_s for wait_s in (*waits_s, state.segment.deadline_s - now_s) if wait_s is not None)
    if math.isfinite(soonest_s):
        transition.arm("pause", max(soonest_s, 0.0))


def request_pause_if_due(transition: Transition) -> None:
    """Have the ranks pause if a copy or a comparison is due, or the time of the run is over."""
    over = transition.now_s >= transition.state.segment.deadline_s
    if (
        over
        or is_copy_due(transition.state, transition.now_s)
        or preemption.is_comparison_due(transition.state, transition.now_s)
    ):
        transition.request_pause()
    else:
        _arm_pause(transition)


def on_steps_completed(transition: Transition, event: m.StepsCompleted) -> None:
    """Note completed steps, look for loss spikes, and give the next step its time."""
    failure_policy.note_step(transition, event.step)
    note_announced(transition)
    if transition.state.phase is Phase.RUNNING:
        failure_policy.check_losses(transition, event)
    if transition.state.phase is Phase.RUNNING:
        waited_s = transition.now_s - transition.state.segment.moved_s
        transition.change(moved_s=transition.now_s, longest_s=max(transition.state.segment.longest_s, waited_s))
        dynamic_members.arm_hang_timer(transition)
        start_standbys(transition)


def is_phase_complete(state: DriverState) -> bool:
    """Whether all awaited workers have answered. Workers that an evaluation needs are awaited a moment longer."""
    if state.phase is not Phase.RUNNING or not state.awaiting:
        return not state.awaiting
    if state.settings.world.topology == "collective" or dynamic_members.is_segment_open(state):
        return False
    return "late" not in state.timers


def arm_late_timer(transition: Transition) -> None:
    """Give workers that an evaluation needs a moment to finish their steps, if they step independently."""
    state = transition.state
    if state.phase is not Phase.RUNNING or state.settings.world.topology != "independent" or not state.awaiting:
        return
    over = not dynamic_members.is_segment_open(state) and "late" not in state.timers
    if over and _wants_evaluation(state, state.answers[0].step):
        transition.arm("late", _LATE_S)


def on_segment_ended(transition: Transition) -> None:
    """End a segment: all ranks left the loop after the same step (rank 0's if workers step independently)."""
    dynamic_members.detach_late_workers(transition)
    answers: Mapping[int, m.SegmentReport] = transition.state.answers
    reports = [answers[rank] for rank in sorted(answers)]
    together, before = transition.settings.world.topology == "collective", transition.state.segment
    steps = {report.step for report in reports}
    assert len(steps) == 1 or not together, f"ranks left the loop after different steps: {sorted(steps)}"
    total = max if together else sum  # all ranks count the same steps, or each its own
    skipped = sum(report.skipped for report in reports)
    passed = total(report.passed for report in reports)
    overflowed = total(report.overflowed for report in reports)
    if skipped > before.skipped:
        transition.emit(Noted(text=f"{skipped} samples were skipped so far; see quarantine/ in the folder of the run"))
    if passed > before.passed:
        transition.emit(Noted(text=f"{passed} steps changed nothing so far, because their loss was not finite"))
    if overflowed > before.overflowed:
        transition.emit(
            Noted(text=f"{overflowed} steps changed nothing so far, because their gradient overflowed in fp16")
        )
    transition.enter(Phase.READY, skipped=skipped, passed=passed, overflowed=overflowed)
    note_announced(transition, reports[0])
    transition.stand_at(reports[0].step)
    _finish_early(transition, reports)
    preemption.compare_ranks(transition, {rank: report.own_s for rank, report in answers.items()})
    _emit_prefetch(transition, [report.prefetch for report in reports if report.prefetch])
    _emit_measurements(transition, reports)
    _emit_staleness(transition, reports[0])
    _emit_memory(transition, {rank: answers[rank].memory for rank in sorted(answers)})


def _emit_memory(transition: Transition, found: Mapping[int, PeakMemory | None]) -> None:
    """Report the peak memory of the ranks' devices, unless all are about as they were last told."""
    peaks = {rank: peak for rank, peak in found.items() if peak is not None}
    before = transition.state.segment.memory
    grown = [
        rank
        for rank, peak in peaks.items()
        if rank not in before or peak.allocated_bytes > _GROWN * before[rank].allocated_bytes
    ]
    if grown or peaks.keys() < before.keys():
        transition.change(memory=peaks)
        transition.emit(
            MemoryMeasured(
                step=transition.state.position.step,
                ranks=[*peaks],
                allocated_bytes=[peak.allocated_bytes for peak in peaks.values()],
                reserved_bytes=[peak.reserved_bytes for peak in peaks.values()],
            )
        )


def _emit_staleness(transition: Transition, report: m.SegmentReport) -> None:
    """Report the staleness of applied updates."""
    stale = report.staleness
    if stale is not None and (stale.counts or stale.dropped or stale.again):
        counts = [[age, number] for age, number in sorted(stale.counts.items())]
        transition.emit(
            Stale(step=report.step, counts=counts, unit=stale.unit, dropped=stale.dropped, again=stale.again)
        )


def _finish_early(transition: Transition, reports: Sequence[m.SegmentReport]) -> None:
    """Make the current step the last one, if a callback ended the training."""
    step, settings = reports[0].step, transition.settings
    if any(report.finished for report in reports) and step < settings.length.total_steps:
        transition.emit(
            Noted(text=f"a callback ended the training after {step} of {settings.length.total_steps} steps")
        )
        transition.adjust_policy(total_steps=step)


def _emit_prefetch(transition: Transition, found: list[PrefetchDepth]) -> None:
    """Report how far the rank that reads furthest ahead does so, whenever that changes."""
    furthest = max(found, key=lambda item: item.chunks * item.chunk_bytes, default=None)
    if furthest is not None and furthest != transition.state.segment.prefetch:
        transition.change(prefetch=furthest)
        transition.emit(Prefetched(**vars(furthest)))


def _evaluate(transition: Transition, evaluated: MetricSums | None = None) -> None:
    """Evaluate: on all ranks, on a chief, or divided between the present workers.

    Args:
        evaluated: sums of all ranks, whose metrics with state rank 0 computes instead, and gives to callbacks.
    """
    state, wanted = transition.state, EvaluateRequest(step=transition.state.position.step, evaluated=evaluated)
    transition.enter(Phase.EVALUATING)
    match state.settings.world.topology:
        case "independent":
            judges = dynamic_members.active_workers(state)
        case "coordinator":
            judges = [state.membership.members[0].worker]
        case _:
            judges = [member.worker for member in state.membership.members]
    judges = judges if evaluated is None else judges[:1]
    transition.await_workers(judges)
    transition.change(judges=len(judges))
    for place, worker in enumerate(judges):
        if state.settings.world.topology == "independent":
            wanted = replace(wanted, feeding=FeedAssignment(data_ranks=range(place, place + 1), total=len(judges)))
        transition.call([worker], "evaluate", wanted)
    if judges:
        dynamic_members.arm_hang_timer(transition)


def on_evaluated(transition: Transition) -> None:
    """Add the sums in the order of ranks, so that they repeat bitwise. Evaluate again if some were lost.

    Metrics with state are objects of the user's, which a worker merges and computes: it answers with sums alone.
    Rank 0 also gives the metrics to its callbacks.
    """
    state = transition.state
    if not state.segment.judges or len(state.answers) < state.segment.judges:
        _evaluate(transition)
        return
    total = MetricSums()
    for rank in sorted(state.answers):
        total = total + state.answers[rank]
    if total.states or total.awaited:
        _evaluate(transition, total)
        return
    seconds = transition.now_s - state.phase_s
    event = Evaluated(step=state.position.step, metrics=total.means(), seconds=seconds)
    transition.emit(event)
    transition.enter(Phase.READY, evaluations=(*state.segment.evaluations, event))
    try:
        check_goals(transition.settings.goals, event.metrics)
    except JobError as error:
        transition.end_run("failed", error)


def _retry_checkpoint(transition: Transition) -> None:
    """Try the last checkpoint again after a pause: a few times, or for an hour while the store is down."""
    saving, checkpoints = transition.settings.saving, transition.state.checkpoints
    attempts, trouble = checkpoints.attempts, checkpoints.trouble
    assert attempts > 0 and trouble is not None, "the last checkpoint was never tried"
    down = isinstance(trouble, StoreDown)
    over = (
        transition.now_s - checkpoints.failing_s >= saving.outage_deadline_s
        if down
        else attempts >= saving.storage_attempts
    )
    if over:
        error = StorageError(
            f"the checkpoint of step {transition.state.position.step} could not be written in {attempts} attempts: "
            f"{trouble}",
            remedy=f"repair the store, then run the same command: it goes on from step {transition.state.committed}",
        )
        transition.end_run("failed", error)
        return
    if down and attempts == 1:
        transition.emit(Waiting(what="the store, to write the last checkpoint", deadline_s=saving.outage_deadline_s))
    transition.enter(Phase.WAITING)
    transition.arm("retry", min(_RETRY_MOST_S, saving.retry_s * 2 ** (attempts - 1)))


# --- Measurements of the ranks ----------------------------------------------------------------------------------------


def _emit_measurements(transition: Transition, reports: Sequence[m.SegmentReport]) -> None:
    """Report the phases of the slowest rank and the noise scale; advise once if the batch is far above it."""
    phases = slowest_phase_times(report.phases for report in reports if report.phases)
    if phases is None:
        return
    sampler = max(reports, key=lambda report: (report.noise is not None, report.sampled))
    noise = sampler.noise
    workers, _ = transition.settings.world.crew(len(transition.state.membership.members))
    transition.emit(
        Measured(
            step=transition.state.position.step, steps=phases.steps, workers=workers, phases=dict(phases.medians),
            data_s=phases.data_s, sampled=sampler.sampled, noise=vars(noise) if noise else {},
        )
    )  # fmt: skip
    if noise is not None and noise.advice and not transition.state.segment.advised:
        transition.change(advised=True)
        transition.emit(Noted(text=noise.advice))
