"""Programs for Lightning and for transformers: a killed worker costs nothing, and two workers equal a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support.finished_runs import final_state
from tests.support.torch_jobs import Kill
from tests.support.trainer_stand_ins import Classifier, Trainer, plain_losses, plain_text_losses


def of_lightning(kill: Kill | None, **options: Any) -> tw.Job:
    return tw.from_lightning(Classifier(kill), epochs=2, **options)


def of_trainer(kill: Kill | None, **options: Any) -> tw.Job:
    return tw.from_hf_trainer(Trainer(kill), **options)


@pytest.mark.parametrize(
    ("adapted", "plain", "logged"),
    [(of_lightning, lambda: plain_losses(Classifier(), 2), {"accuracy"}), (of_trainer, plain_text_losses, set())],
)
def test_a_program_survives_a_killed_worker(
    adapted: Callable[..., tw.Job], plain: Any, logged: set[str], tmp_path: Path, ray_cluster: None
) -> None:
    kill = Kill(rank=1, step=7, folder=str(tmp_path))
    folders = tmp_path / "killed", tmp_path / "unbroken"
    options = {"name": "adapted", "workers": 2, "spares": 0, "keeper_s": 0, "shuffle": False, "checkpoint_steps": 5}
    runs = [
        tw.fit(adapted(each, storage=str(folder), plan="dp=2", **options))
        for each, folder in zip((kill, None), folders, strict=True)
    ]
    assert [run.state for run in runs] == ["done", "done"]
    assert kill.mark.exists()
    assert final_state(folders[0], "adapted") == final_state(folders[1], "adapted")
    for run in runs:
        assert list(run.history["loss"]) == pytest.approx(plain(), rel=1e-5)
        assert logged <= set(run.history)
    evaluations = runs[0].evaluations
    assert bool(len(evaluations)) == (adapted is of_lightning)
    assert not len(evaluations) or list(evaluations["val_loss"]) == pytest.approx(list(evaluations["loss"]))
