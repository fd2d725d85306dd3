"""Runs that an earlier version stored are listed, read and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainwright as tw
from tests import stored_runs
from tests.support.finished_runs import told
from trainwright.core import events
from trainwright.core.frameworks import package_versions

STORED = [(place.parent.name, place.name) for place in sorted(stored_runs.HERE.glob("*/*")) if place.is_dir()]
SHOWN = ("python", "torch", "keras", "tensorflow")  # a change of theirs is one of the job
STEPS = range(1, stored_runs.EPOCHS * stored_runs.ROWS // stored_runs.BATCH + 1)


def losses(storage: Path, name: str) -> dict[int, float]:
    """Losses by step, of the last time that each was trained."""
    steps: Any = told(storage, name, events.Steps)
    return {step: loss for event in steps for step, loss in zip(event.step, event.loss, strict=True)}


@pytest.mark.parametrize(("version", "name"), STORED)
def test_a_stored_run_is_read_and_resumed(version: str, name: str, tmp_path: Path, ray_cluster: None) -> None:
    stored = tmp_path / "stored"
    shutil.copytree(stored_runs.HERE / version / name, stored / name)
    before = losses(stored, name)
    assert before and max(before) >= stored_runs.STOPPED_AT
    with pytest.raises(tw.TrainwrightError, match=r"resume=True"):
        tw.fit(stored_runs.job(name, stored).replace(batch_size=4))
    start: Any = told(stored, name, events.RunStarted)[0]
    same = all(
        start.versions[package] == version for package, version in package_versions().items() if package in SHOWN
    )
    assert tw.fit(stored_runs.job(name, stored), resume=not same).state == "done", "the job is the one that was stored"
    formed: Any = told(stored, name, events.Formed)
    assert (formed[-1].source, formed[-1].step) == ("checkpoint", stored_runs.STOPPED_AT)

    assert tw.fit(stored_runs.job(name, tmp_path / "whole")).state == "done"
    evaluated: Any = told(stored, name, events.Evaluated)[-1]
    assert tw.evaluate(stored_runs.job(name, stored))["loss"] == pytest.approx(evaluated.metrics["loss"], rel=1e-5)
    resumed, whole = losses(stored, name), losses(tmp_path / "whole", name)
    assert sorted(resumed) == sorted(whole) == [*STEPS]
    np.testing.assert_allclose([resumed[step] for step in STEPS], [whole[step] for step in STEPS], rtol=1e-4)


def test_there_are_stored_runs() -> None:
    assert {name for _, name in STORED} == set(stored_runs.JOBS)
