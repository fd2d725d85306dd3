"""Several optimizers in turn: a worker that dies between two updates of a step costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trainwright as tw
from tests.support import gan_jobs, torch_jobs
from tests.support.finished_runs import final_state, told
from trainwright.core import events


def job(folder: Path, *kills: torch_jobs.Kill) -> tw.Job:
    random = np.random.default_rng(4)
    data = {"x": random.normal(2.0, 1.0, (50, 4)), "z": random.normal(size=(50, 3))}

    def model() -> Any:
        made = gan_jobs.Gan()
        made.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        return made

    def step(model: Any, batch: Any) -> Iterator[tuple[str, Any]]:
        now = int(model.steps)
        model.steps += 1
        for number, turn in enumerate(gan_jobs.step(model, batch)):
            for kill in kills:
                if number == 1 and (kill.rank, kill.step) == (torch_jobs.rank(), now):
                    kill.strike()
            yield turn

    return torch_jobs.job(
        folder, model=model, optimizer=gan_jobs.OPTIMIZERS, step=step, train=tw.datasets.table(data), batch_size=12,
        clip_norm=0.5, schedule=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.97),
        weight_average=tw.WeightAverage(decay=0.9),
    )  # fmt: skip


def test_a_worker_that_dies_between_two_updates_costs_nothing(tmp_path: Path, ray_cluster: None) -> None:
    folder, other = tmp_path / "killed", tmp_path / "unbroken"
    kill = torch_jobs.Kill(rank=1, step=8, folder=str(tmp_path))
    assert tw.fit(job(folder, kill)).state == tw.fit(job(other)).state == "done"
    assert kill.mark.exists()
    assert final_state(folder, "faulty") == final_state(other, "faulty")
    formed: Any = told(folder, "faulty", events.Formed)
    assert (formed[-1].source, formed[-1].step, formed[-1].steps_lost) == ("replica", 8, 0)
