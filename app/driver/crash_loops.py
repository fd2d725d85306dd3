"""Crash loops: the same failure at the same step, again and again; and how long to wait before the next try. Pure.

A step is blamed where it, or the throwaway step before it, ended the same rank in the same way, and no step beyond it
was ever completed. Which step that is, is known once the survivors have told where they stand; where there are none,
or steps overlap, the first steps after a failure are taken one at a time (see `careful`).
"""

from __future__ import annotations

from dataclasses import replace

from trainwright.core.errors import HangError, TrainwrightError, WorkerLost
from trainwright.core.events import Failed, Noted
from trainwright.core.job_checks import LOOP
from trainwright.driver.messages import Passed
from trainwright.driver.shutdown import close
from trainwright.driver.state import Blame, Loop, Repeated, State
from trainwright.driver.transition import Turn

SHOWN_SAMPLES = 20
CODE = frozenset(
    {
        "ArithmeticError", "AssertionError", "AttributeError", "ImportError", "IndexError", "InvalidArgumentError",
        "KeyError", "ModuleNotFoundError", "NameError", "NotImplementedError", "RecursionError", "TypeError",
        "UnboundLocalError", "UnimplementedError", "ValueError", "ZeroDivisionError",
    }
)  # fmt: skip
"""Exceptions that say that code is wrong: the same code raises them again."""
_READ = (
    "read the traceback: its last lines are where the error was raised; mend the job, or report it if none are yours"
)
MOST_S, HOUR_S = 60.0, 3600.0
SOON_S = 1e-3  # a wait that is as good as over


def failed(state: State, worker: int, rank: int, cause: str, detail: str = "") -> Failed:
    """The event that tells of a failure."""
    node = state.members[rank].node if rank >= 0 else ""
    number, step = state.generation.number, state.progress
    return Failed(generation=number, worker=worker, rank=rank, node=node, cause=cause, detail=detail, step=step)


def count(turn: Turn) -> None:
    """One failure more, in a row and within the hour."""
    state = turn.state
    recent = tuple(failed_s for failed_s in state.failed_s if failed_s > turn.now_s - HOUR_S)
    turn.change(failures=state.failures + 1, failed_s=(*recent, turn.now_s))


def give_up(turn: Turn) -> bool:
    """Whether the failures are too many: the run ends by the last one's error."""
    state, settings = turn.state, turn.settings
    budget = settings.failures_an_hour
    if _comes_again(turn) and not settings.pass_limit:
        close(turn, "failed", _last_straw(state, "a new process raised the same error at the same place"))
        return True
    if state.failures > settings.failures:
        text = f"failure {state.failures} in a row, none of which got past step {state.high}"
        close(turn, "failed", _last_straw(state, f"{text}; failures={settings.failures}"))
        return True
    if budget is not None and len(state.failed_s) > budget:
        text = f"failure {len(state.failed_s)} within an hour; failures_an_hour={budget}"
        close(turn, "failed", _last_straw(state, text))
        return True
    return False


def _comes_again(turn: Turn) -> bool:
    """Whether an error of code ended one process after the other, with no step completed in between.

    Such errors do not pass by themselves, as those of networks, disks and memory may. Each failure is looked at once,
    when its cause is settled.
    """
    state, last = turn.state, turn.state.repeated
    blame = state.blame
    if blame is None or blame.kind not in CODE or not state.failed_s:
        return False
    if last is None or last.failed_s != state.failed_s[-1]:
        alike = last is not None and (last.cause, last.high) == (blame.event.cause, state.high)
        times = last.times + 1 if last is not None and alike else 1
        last = Repeated(cause=blame.event.cause, high=state.high, failed_s=state.failed_s[-1], times=times)
        turn.change(repeated=last)
    return last.times > 1


def _last_straw(state: State, text: str) -> Exception:
    """The last failure's error; our own ones say how many came before."""
    assert state.blame is not None, "a failure has a cause"
    error = state.blame.error
    loop = told(state)
    if loop is not None and isinstance(error, TrainwrightError):
        what, remedy = loop
        return type(error)(f"{what}; {text}", where=error.where, remedy=remedy, detail=error.detail)
    code = state.blame.kind in CODE and isinstance(error, TrainwrightError)
    if not code and not isinstance(error, (WorkerLost, HangError)):
        return error
    assert isinstance(error, TrainwrightError), "those alone are left"
    remedy = _READ if code else error.remedy
    return type(error)(f"{error.what}; {text}", where=error.where, remedy=remedy, detail=error.detail)


def backoff_s(failures: int) -> float:
    """Seconds between a failure and the next try: none after the first in a row, then 1, 2, 4, up to a minute."""
    return 0.0 if failures < 2 else min(MOST_S, 2.0 ** min(failures - 2, 10))


def careful(state: State, until: int) -> int:
    """The step to run to, until at most: one at a time past the highest one known, where the last tries failed."""
    streamed = state.plan is not None and state.plan.streamed  # a step begins the next one, which may be the cause
    if not state.failures or state.heal is None or (state.heal.source == "replica" and not streamed):
        return until
    return min(until, state.high if state.step < state.high else state.step + 1)


def grown(state: State, suspect: Blame | None) -> Loop | None:
    """The loop with one more failure: a longer one where it is like those before, else a new one."""
    if suspect is None or not suspect.kind:
        return state.loop
    step, rank, last = state.high + 1, suspect.event.rank, state.loop
    if last is not None and (last.step, last.rank, last.kind) == (step, rank, suspect.kind):
        return replace(last, times=last.times + 1)
    return Loop(step=step, rank=rank, kind=suspect.kind, cause=suspect.event.cause)


def note(turn: Turn) -> None:
    """All have told where they stand: count the failure, and pass the batch by where the job allows it."""
    state = turn.state
    loop = grown(state, state.suspect)
    turn.change(loop=loop, suspect=None)
    if loop is None or loop.times < LOOP or loop.step != state.high + 1:
        return
    if any(passed.step == loop.step for passed in state.passing) or len(state.passing) >= state.settings.pass_limit:
        return
    why = _what(loop)
    turn.change(passing=(*state.passing, Passed(step=loop.step, why=why)))
    turn.emit(Noted(text=f"{why}; its batch is passed by, its samples get lines in quarantine/ beside the run"))


def told(state: State) -> tuple[str, str] | None:
    """What happened and what to do, of a run that ends in a crash loop; None where it does not."""
    suspect = state.suspect
    loop = grown(state, suspect)
    if suspect is None or not suspect.kind or suspect is not state.blame or loop is None or loop.times < 2:
        return None
    what = _what(loop)
    if any(passed.step == loop.step for passed in state.passing):
        return (
            f"{what}; passing its batch by did not help",
            "the batch is not the cause: look at what all steps do there, and at batches that are read ahead",
        )
    if loop.kind in CODE:
        return what, _READ
    return what + _samples(state, loop), (
        "look at these samples and at the memory that the step takes; "
        f'on_crash_loop="skip" (with resume=True) passes such a batch by after {LOOP} failures'
    )


def _what(loop: Loop) -> str:
    """`step 413 failed 3 times on rank 1: killed by SIGKILL`."""
    where = f" on rank {loop.rank}" if loop.rank >= 0 else ""
    return f"step {loop.step} failed {loop.times} times{where}: {loop.cause}"


def _samples(state: State, loop: Loop) -> str:
    """`; its share of the batch holds samples 3, 17 and 40`."""
    if state.settings.samples_of is None or not 0 <= loop.rank < len(state.members):
        return ""
    found = state.settings.samples_of(loop.step, loop.rank, len(state.members), state.plan)
    samples = [str(sample) for sample in sorted(found)]
    shown, more = ", ".join(samples[:SHOWN_SAMPLES]), len(samples) - SHOWN_SAMPLES
    return f"; its share of that batch holds samples {shown}{f' and {more} more' if more > 0 else ''}"
