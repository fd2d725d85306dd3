"""A killed worker with state of its own: state, logged values and evaluations are bitwise those of an unbroken run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events
from trainwright.core.errors import JobError
from trainwright.inference import sharded_inference

STEP_S = 0.02  # so slow a step leaves time for copies
Found = tuple[State, dict[int, dict[str, Any]], dict[int, float]]


class Carrying(torch_jobs.Net):
    """With a batch norm, and a count of how often this rank saw each sample, in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(width=16)
        self.norm = nn.BatchNorm1d(torch_jobs.WIDTH)
        self.register_buffer("counts", torch.zeros(torch_jobs.ROWS), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(x))


def counting(inner: Callable[..., torch.Tensor], model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A step whose loss depends on what its rank saw before."""
    net: Any = getattr(model, "module", model)
    if net.training:
        threading.Event().wait(STEP_S)
        net.counts[batch["id"]] += 1
    tw.log("seen", net.counts[batch["id"]])
    return inner(model, batch) * (1 + 0.1 * net.counts[batch["id"]])


def job(
    folder: Path, *kills: torch_jobs.Kill, awaits: dict[int, torch_jobs.Awaited] | None = None, **fields: Any
) -> tw.Job:
    given = {"model": Carrying, "inexact": ("batch_norm",), "evaluate": tw.datasets.table(torch_jobs.data()),
             "inputs": "x", "targets": "y", "metrics": {"f1": torch_jobs.F1}, **fields}  # fmt: skip
    step = partial(counting, torch_jobs.make_step(kills, awaits=awaits, storage=str(folder)))
    return torch_jobs.job(folder, step=step, local_state="counts", **given)


def found(folder: Path) -> Found:
    """The last state, local state included, the evaluations by step, and what each step logged."""
    evaluated: Any = told(folder, "faulty", events.Evaluated)
    evaluations: dict[int, dict[str, Any]] = {}
    for event in evaluated:  # one is computed again where the copy that all went back to is older
        assert evaluations.setdefault(event.step, dict(event.metrics)) == event.metrics
    stepped: Any = told(folder, "faulty", events.Steps)
    logged = {step: value for event in stepped for step, value in zip(event.step, event.logged["seen"], strict=True)}
    return final_state(folder, "faulty"), evaluations, logged


@pytest.fixture(scope="module")
def unharmed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run lies that nothing happened to."""
    folder = tmp_path_factory.mktemp("unharmed")
    tw.fit(job(folder))
    return folder


@pytest.fixture(scope="module")
def whole(unharmed: Path) -> Found:
    state, evaluations, logged = found(unharmed)
    assert {"local-0-of-2.safetensors", "local-1-of-2.safetensors"} <= state.files.keys()
    assert [*evaluations] == [9, 18, 27]
    assert evaluations[27].keys() == {"loss", "f1", "seen"} and 0 < evaluations[27]["f1"] < 1
    assert len(logged) == 27 and logged[1] == 1.0 < logged[27]
    return state, evaluations, logged


def test_the_checkpoint_evaluates_as_the_run_did(unharmed: Path, whole: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of as many workers with its own state; they are told all the while that somebody wants them."""
    monkeypatch.setattr(sharded_inference, "BEAT_S", 0.05)
    assert tw.evaluate(job(unharmed)) == pytest.approx(whole[1][27], rel=1e-9)


def test_all_go_back_to_the_checkpoint_that_holds_what_the_worker_kept(folder: Path, whole: Found) -> None:
    kill = torch_jobs.Kill(rank=1, step=12, point="synchronisation", folder=str(folder.parent))
    saved = {12: torch_jobs.Awaited(kind=events.Checkpointed)}
    tw.fit(job(folder, kill, awaits=saved))
    assert kill.mark.exists() and found(folder) == whole
    formed: Any = told(folder, "faulty", events.Formed)[-1]
    assert formed.source == "checkpoint" and formed.step in (5, 10) and formed.steps_lost == 12 - formed.step


def test_all_go_back_to_the_copy_in_memory_that_holds_it(folder: Path, whole: Found) -> None:
    kill = torch_jobs.Kill(rank=0, step=21, folder=str(folder.parent))
    kept = {20: torch_jobs.Awaited(kind=events.Kept)}
    tw.fit(job(folder, kill, awaits=kept, checkpoint_steps=100, keeper_s=0.05))
    assert kill.mark.exists() and found(folder) == whole
    formed: Any = told(folder, "faulty", events.Formed)[-1]
    assert formed.source == "keeper" and formed.step + formed.steps_lost == 21


def test_what_is_not_declared_ends_the_run_before_a_checkpoint_holds_it(folder: Path) -> None:
    with pytest.raises(JobError, match=r"after step 5 ranks 0 and 1 differ in buffer 'counts'") as caught:
        tw.fit(job(folder).replace(local_state=()))
    assert "declare local_state=('counts',)" in str(caught.value)
    assert not told(folder, "faulty", events.Checkpointed)
