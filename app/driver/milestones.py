"""Milestones: the steps at which a run pauses, what is due there, and how long to wait for one. Pure arithmetic."""

from __future__ import annotations

from trainwright.driver.state import Phase, Settings, State

_PATIENCE = 30.0  # times the longest wait so far
_LEAST_S, _MOST_S = 120.0, 900.0  # a store that is slow is read again for a minute, and that is no hang


def checkpoint_due(settings: Settings, step: int) -> bool:
    """Whether a checkpoint belongs to this many completed steps."""
    return step > 0 and (step % _checkpoint_steps(settings) == 0 or step >= settings.total_steps)


def evaluation_due(settings: Settings, step: int) -> bool:
    """Whether an evaluation belongs to this many completed steps."""
    every = settings.evaluate_steps
    return every is not None and step > 0 and (step % every == 0 or step >= settings.total_steps)


def next_milestone(settings: Settings, step: int) -> int:
    """The first step after `step` at which anything is due, at most the last one."""
    intervals = [_checkpoint_steps(settings)]
    if settings.evaluate_steps is not None:
        intervals.append(settings.evaluate_steps)
    return min(settings.total_steps, *(step - step % every + every for every in intervals))


def hang_deadline_s(state: State) -> float:
    """Seconds without a completed step that are a hang: as the job says, or many times the longest wait so far.

    Before the first step, which may compile, and for evaluations nothing is known: a quarter of an hour.
    """
    given = state.settings.hang_deadline_s
    if given is not None:
        return given
    if state.phase is Phase.EVALUATING or not state.longest_s:
        return _MOST_S
    return min(max(_PATIENCE * state.longest_s, _LEAST_S), _MOST_S)


def _checkpoint_steps(settings: Settings) -> int:
    return settings.checkpoint_steps or settings.steps_per_epoch
