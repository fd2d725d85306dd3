"""Milestones: the steps at which a run pauses, what is due there, and how long to wait for one. Pure arithmetic."""

from __future__ import annotations

import math

from trainwright.driver.run_policy import Settings
from trainwright.driver.state import Phase, State

_AGAIN_S = 1.0  # to look again while one is on its way
_SHARE = 0.01  # of the time, for copies in memory
MIN_CHECKPOINT_INTERVAL_S, _HOUR_S, ASSUMED_UPTIME_S = 10.0, 3600.0, 86400.0
HANG_FACTOR = 30.0  # times the longest wait so far
MIN_HANG_DEADLINE_S, _MOST_S = 120.0, 900.0  # a store that is slow is read again for a minute, and that is no hang


def checkpoint_due(settings: Settings, step: int) -> bool:
    """Whether a checkpoint belongs to this many completed steps."""
    if settings.checkpoint_auto:
        return step >= settings.total_steps
    return _due(settings, step, _checkpoint_steps(settings))


def evaluation_due(settings: Settings, step: int) -> bool:
    """Whether an evaluation belongs to this many completed steps."""
    every = settings.evaluate_steps
    return every is not None and _due(settings, step, every)


def _due(settings: Settings, step: int, every: int) -> bool:
    """Whether a multiple of `every` was reached in the last stride, or the end."""
    return step > 0 and (step // every > (step - settings.stride) // every or step >= settings.total_steps)


def next_milestone(settings: Settings, step: int) -> int:
    """The first step after `step` at which anything is due, at most the last one."""
    intervals = [settings.total_steps if settings.checkpoint_auto else _checkpoint_steps(settings)]
    if settings.evaluate_steps is not None:
        intervals.append(settings.evaluate_steps)
    due = min(step - step % every + every for every in intervals)
    return min(settings.total_steps, -(-due // settings.stride) * settings.stride)


def keep_interval_s(state: State) -> float | None:
    """Seconds between copies of the state in memory: as wanted, but for at most a hundredth of the time."""
    least_s = state.settings.keep_s
    if least_s is None or state.keep_off or not state.keepers:
        return None
    return max(least_s, state.copied_s / _SHARE)


def checkpoint_interval_s(state: State) -> float | None:
    """Seconds between checkpoints where time decides: sqrt(2 x cost x mean time between failures) (Young, 1974).

    The cost is what the steps lost to the last checkpoint, and no upload begins before twice the time of the last one
    has passed. The rate of failures is that of the last hour, at least one a day.
    """
    if not state.settings.checkpoint_auto:
        return None
    if not state.saving_s:
        return MIN_CHECKPOINT_INTERVAL_S
    between_s = min(ASSUMED_UPTIME_S, _HOUR_S / len(state.failed_s)) if state.failed_s else ASSUMED_UPTIME_S
    return max(math.sqrt(2 * state.saving_s * between_s), 2 * state.upload_s, MIN_CHECKPOINT_INTERVAL_S)


def copies_due(state: State, now_s: float) -> bool:
    """Whether the time for a copy in memory or in storage has come, and none of its kind is on its way."""
    return any(idle and due_s <= now_s for idle, due_s in _copies(state))


def pause_after_s(state: State, now_s: float) -> float | None:
    """Seconds until the ranks may have to pause for a copy that is due by time; None for never."""
    copies = _copies(state)
    if not copies:
        return None
    return min(max(due_s - now_s, 0.0 if idle else _AGAIN_S) for idle, due_s in copies)


def _copies(state: State) -> list[tuple[bool, float]]:
    """Of those that come by time: whether none is on its way, and when the next is due."""
    keep_s, checkpoint_s = keep_interval_s(state), checkpoint_interval_s(state)
    keep = [(state.keeping is None, state.kept_s + keep_s)] if keep_s is not None else []
    checkpoint = [(state.upload is None, state.saved_s + checkpoint_s)] if checkpoint_s is not None else []
    return keep + checkpoint


def hang_deadline_s(state: State) -> float:
    """Seconds without a completed step that are a hang: as the job says, or many times the longest wait so far.

    Before the first step, which may compile, and for evaluations nothing is known: a quarter of an hour.
    """
    given = state.settings.hang_deadline_s
    if given is not None:
        return given
    if state.phase is Phase.EVALUATING or not state.longest_s:
        return _MOST_S
    return min(max(HANG_FACTOR * state.longest_s, MIN_HANG_DEADLINE_S), _MOST_S)


def _checkpoint_steps(settings: Settings) -> int:
    return settings.checkpoint_steps or settings.steps_per_epoch
