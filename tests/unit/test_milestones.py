"""Milestones: where a run pauses, and for what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.engine import checkpoint_path
from trainwright.driver.checkpointing import checkpoint_due, evaluation_due, next_milestone
from trainwright.driver.run_policy import RunPolicy


def settings(total: int = 10, epoch: int = 4, checkpoint: int | None = None, evaluate: int | None = None) -> RunPolicy:
    return RunPolicy.of(
        workers=1, total_steps=total, steps_per_epoch=epoch, checkpoint_steps=checkpoint, evaluate_steps=evaluate
    )


def test_checkpoints_come_with_epochs_unless_told_otherwise() -> None:
    assert [step for step in range(11) if checkpoint_due(settings(), step)] == [4, 8, 10]
    assert [step for step in range(11) if checkpoint_due(settings(checkpoint=3), step)] == [3, 6, 9, 10]


def test_evaluations_come_as_told_and_at_the_end_or_never() -> None:
    assert [step for step in range(11) if evaluation_due(settings(evaluate=6), step)] == [6, 10]
    assert not any(evaluation_due(settings(), step) for step in range(11))


def test_names_are_never_used_twice() -> None:
    assert checkpoint_path(1200, 7) == "checkpoints/00001200-7"
    assert len({checkpoint_path(1200, 7, again) for again in range(5)}) == 5


SETTINGS = st.builds(
    settings,
    total=st.integers(1, 60),
    epoch=st.integers(1, 20),
    checkpoint=st.none() | st.integers(1, 70),
    evaluate=st.none() | st.integers(1, 70),
)


@given(SETTINGS)
def test_a_run_pauses_wherever_something_is_due_and_nowhere_else(chosen: RunPolicy) -> None:
    pauses, step = [], 0
    while step < chosen.length.total_steps:
        step = next_milestone(chosen, step)
        pauses.append(step)
    due = [s for s in range(1, chosen.length.total_steps + 1) if checkpoint_due(chosen, s) or evaluation_due(chosen, s)]
    assert pauses == due
    assert pauses[-1] == chosen.length.total_steps
