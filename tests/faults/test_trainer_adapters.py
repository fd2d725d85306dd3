"""A module written for Lightning: a killed worker costs nothing, and two workers equal a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainwright as tw
from tests.support.finished_runs import final_state
from tests.support.torch_jobs import Kill
from tests.support.trainer_stand_ins import Classifier, plain_losses


def test_a_lightning_module_survives_a_killed_worker(tmp_path: Path, ray_cluster: None) -> None:
    kill = Kill(rank=1, step=9, folder=str(tmp_path))
    folders = tmp_path / "killed", tmp_path / "unbroken"
    options = {"name": "module", "epochs": 2, "workers": 2, "spares": 0, "keeper_s": 0, "shuffle": False}
    options |= {"checkpoint_steps": 5, "strategy": "data_parallel", "plan": "dp=2"}
    runs = [
        tw.fit(tw.from_lightning(Classifier(each), storage=str(folder), **options))
        for each, folder in zip((kill, None), folders, strict=True)
    ]
    assert [run.state for run in runs] == ["done", "done"]
    assert kill.mark.exists()
    assert final_state(folders[0], "module") == final_state(folders[1], "module")
    expected = plain_losses(Classifier(), 2)
    for run in runs:
        assert list(run.history["loss"]) == pytest.approx(expected, rel=1e-5)
        assert "accuracy" in run.history
        assert list(run.evaluations["val_loss"]) == pytest.approx(list(run.evaluations["loss"]))
