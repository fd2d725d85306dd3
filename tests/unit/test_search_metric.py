"""The metric of a run of a search: after its last step, once it is finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.core.engine import CheckpointRef
from trainwright.core.events import Evaluated, RunStarted
from trainwright.storage.event_files import append_event
from trainwright.storage.object_store import Store, open_store
from trainwright.storage.run_log import Outcome as End
from trainwright.storage.run_log import Owner, RunLog
from trainwright.tuning.trials import final_metric

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


def test_a_finished_run_has_the_metric_of_its_last_step(store: Store) -> None:
    assert final_metric(store, "run", "accuracy") is None
    run(store, FIGURES, "done")
    assert final_metric(store, "run", "accuracy") == FIGURES[20]


@pytest.mark.parametrize(
    ("told", "end"), [({}, "done"), ({10: 0.5}, "done"), (FIGURES, "stopped"), (FIGURES, "failed")]
)
def test_a_run_without_its_end_or_its_last_evaluation_has_none(store: Store, told: dict[int, float], end: End) -> None:
    run(store, told, end)
    assert final_metric(store, "run", "accuracy") is None
