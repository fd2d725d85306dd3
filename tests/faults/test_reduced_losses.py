"""A step that returns a mean, on batches of similar length: a killed worker costs nothing, each sample counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import final_state
from tests.support.sample_counts import account_of


def job(folder: Path, *kills: torch_jobs.Kill) -> tw.Job:
    losses = torch_jobs.make_step(kills)

    def step(model: Any, batch: Any) -> torch.Tensor:
        return losses(model, batch).mean()

    train = tw.datasets.table(torch_jobs.data()).bucketed(np.arange(torch_jobs.ROWS) % 7, 24)
    return torch_jobs.job(
        folder, kills, step=step, weight=lambda batch: len(batch["id"]), train=train, epochs=1, accumulation=2
    )


def test_a_killed_worker_costs_nothing_where_the_step_returns_a_mean(tmp_path: Path, ray_cluster: None) -> None:
    folder, other = tmp_path / "killed", tmp_path / "unbroken"
    kill = torch_jobs.Kill(rank=1, step=9, point="synchronisation", folder=str(tmp_path))
    assert tw.fit(job(folder, kill)).state == tw.fit(job(other)).state == "done"
    assert kill.mark.exists()
    state = final_state(folder, "faulty")
    assert state == final_state(other, "faulty")
    shares = -account_of(state) / 1e-2  # of a batch of 24 or the last one of 11
    assert (np.isclose(shares, 1 / 24, rtol=0, atol=1e-9) | np.isclose(shares, 1 / 11, rtol=0, atol=1e-9)).all()
