"""Repeated failures: when the run gives up, crash loops, loss spikes, pauses before the next attempt.

A crash loop is a step that ended the same rank in the same way again and again, and that was never completed; a
throwaway step counts as the step after it. The survivors' positions tell which step that is. Without survivors, or if
steps overlap, the first steps after a failure are taken one at a time (see `limit_target_step`).

A loss spike is handled as in the training of PaLM (Chowdhery et al., 2022, 5.1): restart from a checkpoint before the
spike and skip its batch. The driver detects spikes in the reports of steps, so no rank waits; later steps are undone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

from trainwright.core.data import PeakMemory
from trainwright.core.errors import DeviceOutOfMemory, HangError, LossSpike, TrainwrightError, WorkerLost
from trainwright.core.events import Failed, Noted, Stacks
from trainwright.core.job_consistency import CRASH_LOOP_FAILURES
from trainwright.driver import checkpointing
from trainwright.driver import messages as m
from trainwright.driver.driver_state import (
    RECOVERY_PHASES,
    CrashLoop,
    DriverState,
    FailureCause,
    RepeatedError,
    Transition,
)
from trainwright.driver.messages import SkippedBatch
from trainwright.driver.persistent_collections import PersistentMap

_SHOWN_SAMPLES = 20
_PROGRAMMING_ERRORS = frozenset(
    {
        "ArithmeticError", "AssertionError", "AttributeError", "ImportError", "IndexError", "InvalidArgumentError",
        "KeyError", "ModuleNotFoundError", "NameError", "NotImplementedError", "RecursionError", "TypeError",
        "UnboundLocalError", "UnimplementedError", "ValueError", "ZeroDivisionError",
    }
)  # fmt: skip
"""Exceptions that the same code raises again, because it is wrong."""
_TRACEBACK_REMEDY = "read the last lines of the traceback; correct the job, or report the error if no line is yours"
_MAX_BACKOFF_S, _SECONDS_PER_HOUR = 60.0, 3600.0
_SAME_FAILURE_S = 10.0  # losses of several dynamic members within this time are one failure
TIMER_TOLERANCE_S = 1e-3  # a remaining wait that is not worth a timer


def failed_event(state: DriverState, worker: int, rank: int, cause: str, detail: str = "") -> Failed:
    """Return the event that reports a failure; rank -1 for none."""
    member = state.membership.members[rank] if rank >= 0 else None
    return Failed(
        generation=state.epoch.generation.number,
        worker=worker,
        rank=rank,
        node=member.node if member else "",
        pid=member.pid if member else 0,
        cause=cause,
        detail=detail,
        step=state.position.progress,
    )


def start_recovery(transition: Transition) -> None:
    """Note when the recovery started, unless one runs already, and forget the stack traces of an earlier one."""
    since_s = transition.state.recovery.since_s if transition.state.phase in RECOVERY_PHASES else transition.now_s
    transition.change(since_s=since_s, stacks=PersistentMap())


def set_cause(transition: Transition, cause: FailureCause | None) -> None:
    """Note the cause of the failure that the driver recovers from; None for no failure."""
    transition.change(blame=cause)


def set_suspect(transition: Transition, cause: FailureCause | None) -> None:
    """Note a failure that a step can be the reason for."""
    transition.change(suspect=cause)


def on_stacks_returned(transition: Transition, event: m.CallReturned) -> None:
    """Keep the stack trace of a rank that hung."""
    state = transition.state
    rank = state.membership.rank_of[event.worker]
    transition.change(stacks=state.recovery.stacks.put(rank, event.value))
    transition.emit(Stacks(worker=event.worker, rank=rank, node=state.membership.members[rank].node, text=event.value))


def count_failure(transition: Transition) -> None:
    """Count a failure, in a row and within the hour."""
    state = transition.state
    recent = tuple(failed_s for failed_s in state.recovery.failed_s if failed_s > transition.now_s - _SECONDS_PER_HOUR)
    transition.change(failures=state.recovery.failures + 1, failed_s=(*recent, transition.now_s))


def uncount_failure(transition: Transition) -> None:
    """Take back the last failure, which turned out to be none of the run."""
    recovery = transition.state.recovery
    transition.change(failures=recovery.failures - 1, failed_s=recovery.failed_s[:-1], suspect=None)


def count_member_failure(transition: Transition, ranks: frozenset[int], *, in_vain: bool) -> None:
    """Count the loss of dynamic members; losses of several ranks at about the same time are one failure.

    Args:
        ranks: ranks of the members.
        in_vain: whether they had not yet taken part, so that this is a failure of its own.
    """
    recovery = transition.state.recovery
    alike = bool(recovery.losing) and transition.now_s - recovery.failed_s[-1] < _SAME_FAILURE_S
    if in_vain or not alike or ranks & recovery.losing:
        count_failure(transition)
    transition.change(losing=recovery.losing | ranks)


def forget_lost_members(transition: Transition) -> None:
    """Let the next loss of a dynamic member count as a failure of its own."""
    transition.change(losing=frozenset())


def note_step(transition: Transition, step: int) -> None:
    """Note a completed step. A step that was never completed before clears the failures, but not the current one."""
    state, recovery = transition.state, transition.state.recovery
    if step > state.position.high and (recovery.failures or recovery.losing):
        failures = min(recovery.failures, 1) if state.phase in RECOVERY_PHASES else 0
        transition.change(failures=failures, losing=frozenset())
    transition.reached(step)


def on_state_restored(transition: Transition, step: int) -> None:
    """Forget losses of steps that are done again, and a spike before which the ranks were restored."""
    losses = tuple((done, loss) for done, loss in transition.state.recovery.losses if done <= step)
    transition.change(losses=losses, spiked=0)


def is_given_up(transition: Transition) -> bool:
    """End the run with the error of the last failure if there were too many; return whether it did."""
    state, settings = transition.state, transition.settings
    budget = settings.limits.failures_an_hour
    if _is_repeated_error(transition) and not settings.limits.pass_limit:
        transition.end_run("failed", _final_error(state, "a new process raised the same error at the same place"))
        return True
    if state.recovery.failures > settings.limits.failures:
        text = f"failure {state.recovery.failures} in a row, none of which got past step {state.position.high}"
        transition.end_run("failed", _final_error(state, f"{text}; failures={settings.limits.failures}"))
        return True
    if budget is not None and len(state.recovery.failed_s) > budget:
        text = f"failure {len(state.recovery.failed_s)} within an hour; failures_an_hour={budget}"
        transition.end_run("failed", _final_error(state, text))
        return True
    return False


def _is_repeated_error(transition: Transition) -> bool:
    """Whether an error of code ended one process after the other, with no step completed in between.

    Such errors do not pass by themselves, as those of networks, disks and memory may. Each failure counts once, when
    its cause is settled.
    """
    recovery, high = transition.state.recovery, transition.state.position.high
    blame, last = recovery.blame, recovery.repeated
    if blame is None or blame.kind not in _PROGRAMMING_ERRORS or not recovery.failed_s:
        return False
    if last is None or last.failed_s != recovery.failed_s[-1]:
        cause, failed_s = blame.event.cause, recovery.failed_s[-1]
        times = last.times + 1 if last is not None and (last.cause, last.high) == (cause, high) else 1
        last = RepeatedError(cause=cause, high=high, failed_s=failed_s, times=times)
        transition.change(repeated=last)
    return last.times > 1


def _final_error(state: DriverState, text: str) -> Exception:
    """Return the error of the last failure; errors of trainwright say how many came before."""
    assert state.recovery.blame is not None, "a failure has a cause"
    error = state.recovery.blame.error
    loop = _describe_loop(state)
    if loop is not None and isinstance(error, TrainwrightError):
        what, remedy = loop
        return type(error)(f"{what}; {text}", where=error.where, remedy=remedy, detail=error.detail)
    code = state.recovery.blame.kind in _PROGRAMMING_ERRORS and isinstance(error, TrainwrightError)
    if isinstance(error, DeviceOutOfMemory):
        error = explain_out_of_memory(state, state.recovery.blame.event.rank, error)
    elif not code and not isinstance(error, (WorkerLost, HangError)):
        return error
    assert isinstance(error, TrainwrightError), "all other errors were returned"
    remedy = _TRACEBACK_REMEDY if code else error.remedy
    return type(error)(f"{error.what}; {text}", where=error.where, remedy=remedy, detail=error.detail)


def explain_out_of_memory(
    state: DriverState, rank: int, error: TrainwrightError, memory: PeakMemory | None = None
) -> TrainwrightError:
    """Return the error with what the plan predicted, what was used, and the plans that need less memory."""
    explain = state.settings.limits.explain_memory
    if explain is None:
        return error
    figures, remedy = explain(state.membership.plan, rank, memory)
    what = f"{error.what}; {figures}" if figures else error.what
    return type(error)(what, where=error.where, remedy=remedy or error.remedy, detail=error.detail)


def backoff_s(failures: int) -> float:
    """Return the seconds between a failure and the next attempt: 0 after the first in a row, then 1, 2, 4, up to 60."""
    return 0.0 if failures < 2 else min(_MAX_BACKOFF_S, 2.0 ** min(failures - 2, 10))


def limit_target_step(state: DriverState, until: int) -> int:
    """Return the step to run to, `until` at most: after failures, one step at a time past the highest one known."""
    restore_plan, plan, position = state.epoch.restore_plan, state.membership.plan, state.position
    streamed = plan is not None and plan.streamed  # a step begins the next one, which may be the cause
    if not state.recovery.failures or restore_plan is None or (restore_plan.source == "replica" and not streamed):
        return until
    return min(until, position.high if position.step < position.high else position.step + 1)


def _extend_loop(state: DriverState, suspect: FailureCause | None) -> CrashLoop | None:
    """Return the crash loop with one more failure, or a new one if this failure is not like those before."""
    if suspect is None or not suspect.kind:
        return state.recovery.loop
    step, rank, last = state.position.high + 1, suspect.event.rank, state.recovery.loop
    if last is not None and (last.step, last.rank, last.kind) == (step, rank, suspect.kind):
        return replace(last, times=last.times + 1)
    return CrashLoop(step=step, rank=rank, kind=suspect.kind, cause=suspect.event.cause)


def record_crash_loop(transition: Transition) -> None:
    """Count the failure, once all ranks told where they stand; skip the batch of a crash loop if the job allows it."""
    state = transition.state
    loop = _extend_loop(state, state.recovery.suspect)
    transition.change(loop=loop, suspect=None)
    if loop is None or loop.times < CRASH_LOOP_FAILURES or loop.step != state.position.high + 1:
        return
    if _is_skipped(state, loop.step) or len(state.recovery.passing) >= state.settings.limits.pass_limit:
        return
    why = _loop_text(loop)
    transition.change(passing=(*state.recovery.passing, SkippedBatch(step=loop.step, why=why)))
    transition.emit(Noted(text=f"{why}; its batch is skipped, and its samples are listed in quarantine/ of the run"))


def _is_skipped(state: DriverState, step: int) -> bool:
    return any(passed.step == step for passed in state.recovery.passing)


def _describe_loop(state: DriverState) -> tuple[str, str] | None:
    """Return what happened and what to do, for a run that ends in a crash loop; None for others."""
    suspect = state.recovery.suspect
    loop = _extend_loop(state, suspect)
    if suspect is None or not suspect.kind or suspect is not state.recovery.blame or loop is None or loop.times < 2:
        return None
    what = _loop_text(loop)
    if _is_skipped(state, loop.step):
        return (
            f"{what}; passing its batch by did not help",
            "the batch is not the cause: look at what all steps do there, and at batches that are read ahead",
        )
    if loop.kind in _PROGRAMMING_ERRORS:
        return what, _TRACEBACK_REMEDY
    return what + _samples_text(state, loop), (
        "look at these samples and at the memory that the step takes; "
        f'on_crash_loop="skip" (with resume=True) passes such a batch by after {CRASH_LOOP_FAILURES} failures'
    )


def _loop_text(loop: CrashLoop) -> str:
    """`step 413 failed 3 times on rank 1: killed by SIGKILL`."""
    where = f" on rank {loop.rank}" if loop.rank >= 0 else ""
    return f"step {loop.step} failed {loop.times} times{where}: {loop.cause}"


def _samples_text(state: DriverState, loop: CrashLoop) -> str:
    """`; its share of that batch holds samples 3, 17, 40 and 5 more`."""
    samples_of, workers = state.settings.length.samples_of, len(state.membership.members)
    if samples_of is None or not 0 <= loop.rank < workers:
        return ""
    samples = [str(row) for row in sorted(samples_of(loop.step, loop.rank, workers, state.membership.plan))]
    shown, more = ", ".join(samples[:_SHOWN_SAMPLES]), len(samples) - _SHOWN_SAMPLES
    return f"; its share of that batch holds samples {shown}{f' and {more} more' if more > 0 else ''}"


# --- Loss spikes ------------------------------------------------------------------------------------------------------


_MAX_LOSSES, MIN_LOSSES = 100, 20  # losses in the median, at most and at least
_SPIKE_REMEDY = "look at the batch, lower the learning rate, take checkpoints more often, or raise max_loss_ratio"


def check_losses(transition: Transition, event: m.StepsCompleted) -> None:
    """Look for a loss spike in completed steps."""
    limit = transition.settings.limits.max_loss_ratio
    if limit is None or transition.state.recovery.spiked:
        return
    for step, loss in enumerate(event.losses, event.step - len(event.losses) + 1):
        usual = median_loss(transition.state)
        if usual is not None and loss > limit * usual:
            many = f"{loss / usual:.1f} times the usual {usual:.4g}"
            _on_loss_spike(transition, step, f"the loss of step {step} is {loss:.4g}, {many}")
            return
        if math.isfinite(loss):
            transition.change(losses=(*transition.state.recovery.losses, (step, loss))[-_MAX_LOSSES:])


def median_loss(state: DriverState) -> float | None:
    """Return the median of the last losses; None if there are too few, or if it is not positive."""
    losses = [loss for _, loss in state.recovery.losses]
    usual = median(losses) if len(losses) >= MIN_LOSSES else 0.0
    return usual if usual > 0 else None


def _on_loss_spike(transition: Transition, step: int, what: str) -> None:
    state, limit, skipped = transition.state, transition.settings.limits.spike_limit, transition.state.recovery.passing
    transition.emit(Failed(generation=state.epoch.generation.number, cause=what, step=state.position.progress))
    error = None
    if limit == 0:
        error = LossSpike(what, remedy='on_spike="rollback" goes back to before it and passes it by')
    elif state.committed >= step:
        error = LossSpike(f"{what}, and the newest checkpoint is not from before it", remedy=_SPIKE_REMEDY)
    elif len(skipped) >= limit:
        error = LossSpike(f"{what}; {len(skipped)} batches were skipped before", remedy=_SPIKE_REMEDY)
    if error is not None:
        transition.end_run("failed", error)
        return
    checkpointing.discard_memory_copies_from(transition, step)
    transition.change(spiked=step, passing=(*skipped, SkippedBatch(step=step, why=what)))
    transition.emit(Noted(text=f"{what}: going back to before it; its batch is skipped"))
    transition.request_pause()
