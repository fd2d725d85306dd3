"""Milestones: the steps at which a run pauses, and what is due there. Pure arithmetic."""

from __future__ import annotations

from trainwright.driver.state import Settings


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


def _checkpoint_steps(settings: Settings) -> int:
    return settings.checkpoint_steps or settings.steps_per_epoch
