"""What the runs of a search came to, and whom a comparison stops that goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.core.engine import CheckpointRef
from trainwright.core.events import Evaluated, RunStarted
from trainwright.distillation.search_trials import FinishedAwareASHA, TrialResult, mark_stopped, trial_result
from trainwright.storage.event_files import append_event
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import Outcome as End
from trainwright.storage.run_log import Owner, RunLog

FIGURES = {10: 1 / 3, 20: 0.1 + 0.2}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def run(store: Store, figures: dict[int, float], end: End) -> None:
    """A run of 20 steps that ended, as far as storage was told."""
    log = RunLog(store, "run")
    token = log.acquire(Owner.here(), {}).token
    log.commit(token, CheckpointRef(step=20, path="checkpoints/20", manifest_sha256="", parent=""), 1)
    log.release(token, end)
    append_event(store, "run", RunStarted(run="run", token=token, total_steps=20, steps_per_epoch=10))
    for step, value in figures.items():
        append_event(store, "run", Evaluated(step=step, metrics={"accuracy": value}))


def test_a_run_that_is_done_came_to_what_its_evaluations_say(store: Store) -> None:
    assert trial_result(store, "run", "accuracy") is None
    run(store, FIGURES, "done")
    found = trial_result(store, "run", "accuracy")
    assert found == TrialResult(told=FIGURES) and (found.step, found.value) == (20, FIGURES[20])


@pytest.mark.parametrize(
    ("told", "end"), [({}, "done"), ({10: 0.5}, "done"), (FIGURES, "stopped"), (FIGURES, "failed")]
)
def test_a_run_that_has_more_to_do_or_to_say_has_not_ended(store: Store, told: dict[int, float], end: End) -> None:
    run(store, told, end)
    assert trial_result(store, "run", "accuracy") is None


def test_a_run_that_was_stopped_came_to_what_it_was_stopped_for(store: Store) -> None:
    """Though its own events of that never came into storage, or say more."""
    stopped = TrialResult(told=FIGURES, stopped=True)
    mark_stopped(store, "run", stopped)
    assert trial_result(store, "run", "accuracy") == stopped
    run(store, {**FIGURES, 30: 0.9}, "done")
    assert trial_result(store, "run", "accuracy") == stopped


def test_nobody_is_stopped_who_has_ended_but_all_are_compared_with_them() -> None:
    scheduler = FinishedAwareASHA(metric="value", mode="max", max_t=100, grace_period=1, reduction_factor=2)

    def told(name: str, value: float, settled: bool) -> str:
        trial: Any = SimpleNamespace(trial_id=name)
        scheduler.on_trial_add(None, trial)  # type: ignore[arg-type]
        return scheduler.on_trial_result(None, trial, {"training_iteration": 1, "value": value, "settled": settled})

    assert told("best", 0.9, True) == "CONTINUE"
    assert told("worse", 0.1, True) == "CONTINUE"
    assert told("between", 0.4, False) == "STOP"
    assert told("good", 0.8, False) == "CONTINUE"
