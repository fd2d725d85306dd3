"""Crash loops, loss spikes and pauses before the next attempt: what the driver does about repeated failures. Pure.

A step is the suspect if it, or the throwaway step before it, ended the same rank in the same way repeatedly, and no
later step was completed. The survivors' positions tell which step that is; without survivors, or if steps overlap, the
first steps after a failure are taken one at a time (see `limit_target_step`).

A loss spike is handled as in the training of PaLM (Chowdhery et al., 2022, 5.1): restart from a checkpoint before the
spike and skip its batch. The driver detects spikes in the reports of steps, so no rank waits; later steps are undone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

from trainwright.core.errors import HangError, LossSpike, TrainwrightError, WorkerLost
from trainwright.core.events import Failed, Noted
from trainwright.core.job import CRASH_LOOP_FAILURES
from trainwright.driver import checkpointing
from trainwright.driver import messages as m
from trainwright.driver.driver_state import CrashLoop, DriverState, FailureCause, RepeatedError, Transition
from trainwright.driver.membership import request_pause
from trainwright.driver.messages import SkippedBatch
from trainwright.driver.shutdown import end_run

_SHOWN_SAMPLES = 20
_PROGRAMMING_ERRORS = frozenset(
    {
        "ArithmeticError", "AssertionError", "AttributeError", "ImportError", "IndexError", "InvalidArgumentError",
        "KeyError", "ModuleNotFoundError", "NameError", "NotImplementedError", "RecursionError", "TypeError",
        "UnboundLocalError", "UnimplementedError", "ValueError", "ZeroDivisionError",
    }
)  # fmt: skip
"""Exceptions that say that code is wrong: the same code raises them again."""
_TRACEBACK_REMEDY = (
    "read the traceback: its last lines are where the error was raised; mend the job, or report it if none are yours"
)
_MAX_BACKOFF_S, _SECONDS_PER_HOUR = 60.0, 3600.0
TIMER_TOLERANCE_S = 1e-3  # a wait that is as good as over


def failed_event(state: DriverState, worker: int, rank: int, cause: str, detail: str = "") -> Failed:
    """The event that tells of a failure."""
    node = state.membership.members[rank].node if rank >= 0 else ""
    number, step = state.epoch.generation.number, state.position.progress
    return Failed(generation=number, worker=worker, rank=rank, node=node, cause=cause, detail=detail, step=step)


def count_failure(turn: Transition) -> None:
    """One failure more, in a row and within the hour."""
    state = turn.state
    recent = tuple(failed_s for failed_s in state.recovery.failed_s if failed_s > turn.now_s - _SECONDS_PER_HOUR)
    turn.change(failures=state.recovery.failures + 1, failed_s=(*recent, turn.now_s))


def is_given_up(turn: Transition) -> bool:
    """Whether the failures are too many: the run ends by the last one's error."""
    state, settings = turn.state, turn.settings
    budget = settings.limits.failures_an_hour
    if _is_repeated_error(turn) and not settings.limits.pass_limit:
        end_run(turn, "failed", _final_error(state, "a new process raised the same error at the same place"))
        return True
    if state.recovery.failures > settings.limits.failures:
        text = f"failure {state.recovery.failures} in a row, none of which got past step {state.position.high}"
        end_run(turn, "failed", _final_error(state, f"{text}; failures={settings.limits.failures}"))
        return True
    if budget is not None and len(state.recovery.failed_s) > budget:
        text = f"failure {len(state.recovery.failed_s)} within an hour; failures_an_hour={budget}"
        end_run(turn, "failed", _final_error(state, text))
        return True
    return False


def _is_repeated_error(turn: Transition) -> bool:
    """Whether an error of code ended one process after the other, with no step completed in between.

    Such errors do not pass by themselves, as those of networks, disks and memory may. Each failure is looked at once,
    when its cause is settled.
    """
    state, last = turn.state, turn.state.recovery.repeated
    blame = state.recovery.blame
    if blame is None or blame.kind not in _PROGRAMMING_ERRORS or not state.recovery.failed_s:
        return False
    if last is None or last.failed_s != state.recovery.failed_s[-1]:
        alike = last is not None and (last.cause, last.high) == (blame.event.cause, state.position.high)
        times = last.times + 1 if last is not None and alike else 1
        last = RepeatedError(
            cause=blame.event.cause, high=state.position.high, failed_s=state.recovery.failed_s[-1], times=times
        )
        turn.change(repeated=last)
    return last.times > 1


def _final_error(state: DriverState, text: str) -> Exception:
    """The last failure's error; our own ones say how many came before."""
    assert state.recovery.blame is not None, "a failure has a cause"
    error = state.recovery.blame.error
    loop = _describe_loop(state)
    if loop is not None and isinstance(error, TrainwrightError):
        what, remedy = loop
        return type(error)(f"{what}; {text}", where=error.where, remedy=remedy, detail=error.detail)
    code = state.recovery.blame.kind in _PROGRAMMING_ERRORS and isinstance(error, TrainwrightError)
    if not code and not isinstance(error, (WorkerLost, HangError)):
        return error
    assert isinstance(error, TrainwrightError), "those alone are left"
    remedy = _TRACEBACK_REMEDY if code else error.remedy
    return type(error)(f"{error.what}; {text}", where=error.where, remedy=remedy, detail=error.detail)


def backoff_s(failures: int) -> float:
    """Seconds between a failure and the next try: none after the first in a row, then 1, 2, 4, up to a minute."""
    return 0.0 if failures < 2 else min(_MAX_BACKOFF_S, 2.0 ** min(failures - 2, 10))


def limit_target_step(state: DriverState, until: int) -> int:
    """The step to run to, until at most: one at a time past the highest one known, where the last tries failed."""
    streamed = (
        state.membership.plan is not None and state.membership.plan.streamed
    )  # a step begins the next one, which may be the cause
    if (
        not state.recovery.failures
        or state.epoch.heal is None
        or (state.epoch.heal.source == "replica" and not streamed)
    ):
        return until
    return min(until, state.position.high if state.position.step < state.position.high else state.position.step + 1)


def _extend_loop(state: DriverState, suspect: FailureCause | None) -> CrashLoop | None:
    """The loop with one more failure: a longer one where it is like those before, else a new one."""
    if suspect is None or not suspect.kind:
        return state.recovery.loop
    step, rank, last = state.position.high + 1, suspect.event.rank, state.recovery.loop
    if last is not None and (last.step, last.rank, last.kind) == (step, rank, suspect.kind):
        return replace(last, times=last.times + 1)
    return CrashLoop(step=step, rank=rank, kind=suspect.kind, cause=suspect.event.cause)


def record_crash_loop(turn: Transition) -> None:
    """All have told where they stand: count the failure, and pass the batch by where the job allows it."""
    state = turn.state
    loop = _extend_loop(state, state.recovery.suspect)
    turn.change(loop=loop, suspect=None)
    if loop is None or loop.times < CRASH_LOOP_FAILURES or loop.step != state.position.high + 1:
        return
    if (
        any(passed.step == loop.step for passed in state.recovery.passing)
        or len(state.recovery.passing) >= state.settings.limits.pass_limit
    ):
        return
    why = _loop_text(loop)
    turn.change(passing=(*state.recovery.passing, SkippedBatch(step=loop.step, why=why)))
    turn.emit(Noted(text=f"{why}; its batch is passed by, its samples get lines in quarantine/ beside the run"))


def _describe_loop(state: DriverState) -> tuple[str, str] | None:
    """What happened and what to do, of a run that ends in a crash loop; None where it does not."""
    suspect = state.recovery.suspect
    loop = _extend_loop(state, suspect)
    if suspect is None or not suspect.kind or suspect is not state.recovery.blame or loop is None or loop.times < 2:
        return None
    what = _loop_text(loop)
    if any(passed.step == loop.step for passed in state.recovery.passing):
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
    """`; its share of the batch holds samples 3, 17 and 40`."""
    if state.settings.length.samples_of is None or not 0 <= loop.rank < len(state.membership.members):
        return ""
    found = state.settings.length.samples_of(loop.step, loop.rank, len(state.membership.members), state.membership.plan)
    samples = [str(sample) for sample in sorted(found)]
    shown, more = ", ".join(samples[:_SHOWN_SAMPLES]), len(samples) - _SHOWN_SAMPLES
    return f"; its share of that batch holds samples {shown}{f' and {more} more' if more > 0 else ''}"


# --- Loss spikes ------------------------------------------------------------------------------------------------------


_MAX_LOSSES, MIN_LOSSES = 100, 20  # steps that say what is usual, at most and at least
_SPIKE_REMEDY = "look at the batch, lower the learning rate, take checkpoints more often, or raise max_loss_ratio"


def check_losses(turn: Transition, event: m.StepsCompleted) -> None:
    """Steps were completed while all ranks step."""
    limit = turn.settings.limits.max_loss_ratio
    if limit is None or turn.state.recovery.spiked:
        return
    for step, loss in enumerate(event.losses, event.step - len(event.losses) + 1):
        usual = median_loss(turn.state)
        if usual is not None and loss > limit * usual:
            many = f"{loss / usual:.1f} times the usual {usual:.4g}"
            _on_loss_spike(turn, step, f"the loss of step {step} is {loss:.4g}, {many}")
            return
        if math.isfinite(loss):
            turn.change(losses=(*turn.state.recovery.losses, (step, loss))[-_MAX_LOSSES:])


def median_loss(state: DriverState) -> float | None:
    """The median of the last losses; None where there are too few, or where it is no measure of size."""
    usual = median(loss for _, loss in state.recovery.losses) if len(state.recovery.losses) >= MIN_LOSSES else 0.0
    return usual if usual > 0 else None


def losses_until(state: DriverState, step: int) -> tuple[tuple[int, float], ...]:
    """The losses that are left when all stand at a step again."""
    return tuple((done, loss) for done, loss in state.recovery.losses if done <= step)


def _on_loss_spike(turn: Transition, step: int, what: str) -> None:
    state, settings = turn.state, turn.settings
    turn.emit(Failed(generation=state.epoch.generation.number, cause=what, step=state.position.progress))
    if settings.limits.spike_limit == 0:
        end_run(turn, "failed", LossSpike(what, remedy='on_spike="rollback" goes back to before it and passes it by'))
    elif state.committed >= step:
        end_run(
            turn, "failed", LossSpike(f"{what}, and the newest checkpoint is not from before it", remedy=_SPIKE_REMEDY)
        )
    elif len(state.recovery.passing) >= settings.limits.spike_limit:
        end_run(
            turn,
            "failed",
            LossSpike(f"{what}; {len(state.recovery.passing)} batches were passed by before", remedy=_SPIKE_REMEDY),
        )
    else:
        checkpointing.discard_memory_copies_from(turn, step)
        turn.change(spiked=step, passing=(*state.recovery.passing, m.SkippedBatch(step=step, why=what)))
        turn.emit(Noted(text=f"{what}: going back to before it; its batch is passed by"))
        request_pause(turn)
