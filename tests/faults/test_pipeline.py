"""Models in parts under the driver: what died comes from memory or from storage, and the run is the unbroken one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import State, final_state, told
from tests.support.torch_jobs import cross_entropy, momentum
from trainwright.core import events

KEPT_STEP, KILLED_STEP = 20, 21


def build() -> nn.Module:
    """Layers enough for two stages, and dropout in each."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(nn.Linear(torch_jobs.WIDTH, 64), *layers, nn.Linear(64, torch_jobs.CLASSES))


def struck(kills: tuple[torch_jobs.Kill, ...], storage: str, paced: bool) -> Callable[[int, int], float]:
    """A schedule, which every stage asks before it applies a step: a stage without a loss dies in it too."""

    def schedule(step: int, total: int) -> float:
        if paced:
            torch_jobs.keep_pace(storage, step)
        elif kills and step <= KEPT_STEP:
            threading.Event().wait(0.02)  # a copy may take a hundredth of the time
            if step == KEPT_STEP:
                torch_jobs.await_told(storage, torch_jobs.Awaited(kind=events.Kept))
        for kill in kills:
            if kill.rank == torch_jobs.rank() and kill.step == step:
                kill.strike()
        return 1.0

    return schedule


def job(folder: Path, kills: tuple[torch_jobs.Kill, ...] = (), paced: bool = False, **fields: Any) -> tw.Job:
    """Two stages, a last batch that is short, and checkpoints at the end alone where nothing else is said."""
    own = {"step": None, "model": build, "optimizer": momentum, "loss": cross_entropy, "inputs": "x", "targets": "y"}
    plan = {"plan": "pp=2,schedule=1f1b,accumulation=4", "checkpoint_steps": 100}
    return torch_jobs.job(folder, **{**own, **plan, "schedule": struck(kills, str(folder), paced), **fields})


@pytest.fixture(scope="module")
def whole(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> State:
    """An unbroken run."""
    folder = tmp_path_factory.mktemp("stages")
    tw.fit(job(folder))
    return final_state(folder, "faulty")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)], ids=["first", "last"])
def test_a_stage_that_died_comes_from_memory(rank: int, folder: Path, whole: State) -> None:
    kill = torch_jobs.Kill(rank=rank, step=KILLED_STEP, folder=str(folder.parent))
    tw.fit(job(folder, (kill,), keeper_s=0.05))
    assert kill.mark.exists() and final_state(folder, "faulty") == whole
    formed: Any = told(folder, "faulty", events.Formed)
    assert [event.source for event in formed] == ["initial", "keeper"] and formed[-1].survivors == 1
    failed: Any = told(folder, "faulty", events.Failed)
    assert [event.rank for event in failed] == [rank]


@pytest.mark.soak
def test_a_part_of_each_layer_that_died_comes_from_its_replica(folder: Path, ray_cluster: None) -> None:
    given: dict[str, Any] = {"plan": "dp=2,tp=2", "workers": 4, "tensor_plan": {"1.0": "column", "2.0": "row"}}
    kill = torch_jobs.Kill(rank=3, step=KILLED_STEP, folder=str(folder.parent))
    tw.fit(job(folder, (kill,), keeper_s=0.05, **given))
    tw.fit(job(folder.parent / "unbroken", **given))
    assert kill.mark.exists()
    assert final_state(folder, "faulty") == final_state(folder.parent / "unbroken", "faulty")
    formed: Any = told(folder, "faulty", events.Formed)
    assert [event.source for event in formed] == ["initial", "replica"] and formed[-1].survivors == 3


def test_a_stage_that_died_comes_from_storage_and_the_run_goes_on_undivided(folder: Path, whole: State) -> None:
    kill = torch_jobs.Kill(rank=0, step=KILLED_STEP, folder=str(folder.parent))
    broken = job(folder, (kill,), paced=True, checkpoint_steps=5)
    tw.fit(broken)
    assert kill.mark.exists() and final_state(folder, "faulty") == whole
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.step) for event in formed] == [("initial", 0), ("checkpoint", 20)]

    trained: Any = tw.load_model(broken)
    assert sum(parameter.numel() for parameter in trained.parameters()) == sum(
        parameter.numel() for parameter in build().parameters()
    )
    tw.fit(job(folder, epochs=4, plan=None, strategy="data_parallel"), resume=True)
    resumed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.step) for event in resumed][2:] == [("checkpoint", 27)]
    assert final_state(folder, "faulty").step == 36
