"""Jobs and runs for tests of checkpoints: copies in memory, and runs that failed after a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support import torch_jobs
from trainwright.core import events
from trainwright.core.errors import UserCodeError

STEP_S = 0.02  # so slow a step leaves time for copies


def slow_step(
    kills: tuple[torch_jobs.Kill, ...], awaits: dict[int, torch_jobs.Awaited], folder: Path
) -> Callable[..., Any]:
    """The step of `tests.support.torch_jobs`, slowly."""
    inner = torch_jobs.make_step(kills, "", awaits, str(folder))

    def step(model: Any, batch: Any) -> Any:
        threading.Event().wait(STEP_S)
        return inner(model, batch)

    return step


def kept_job(folder: Path, kills: tuple[torch_jobs.Kill, ...], workers: int, **fields: Any) -> tw.Job:
    """No checkpoint but the last, and a copy whenever it costs no more than a hundredth of the time."""
    awaits = {20: torch_jobs.Awaited(kind=events.Kept)}
    step = slow_step(kills, awaits, folder)
    return torch_jobs.job(folder, step=step, workers=workers, checkpoint_steps=100, keeper_s=0.05, **fields)


def stop_at(folder: Path, step: int, workers: int = 2) -> None:
    """A run that failed after `step`, its checkpoints at 5, 10, … kept."""

    def failing(model: Any, batch: Any) -> Any:
        net = getattr(model, "module", model)
        if int(net.steps) == step and net.training:
            raise ValueError("enough")
        return torch_jobs.make_step((), str(folder))(model, batch)

    with pytest.raises(UserCodeError, match="enough"):
        tw.fit(torch_jobs.job(folder, step=failing, workers=workers))
