"""Plans measured on the workers before the first step: the quickest goes on, and nothing of it is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import told
from tests.support.torch_jobs import cross_entropy, momentum
from trainwright.core import events
from trainwright.reporting import run_views

LONG = 1_000_000  # epochs: what is measured pays in the end
STEPS = 6


def fat() -> nn.Module:
    """Gradients that take longer to reduce than to compute, of a small batch."""
    wide = [nn.Sequential(nn.Linear(2048, 2048), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(torch_jobs.WIDTH, 2048), nn.Tanh(), *wide, nn.Linear(2048, torch_jobs.CLASSES))


class Slow(nn.Dropout):
    """Takes its time for every sample."""

    def forward(self, hidden: Tensor) -> Tensor:
        if not hidden.is_meta:
            time.sleep(0.001 * len(hidden))
        return super().forward(hidden)


def slow() -> nn.Module:
    """Little to reduce, and samples that are best divided: stages wait for each other's."""
    wide = [nn.Sequential(nn.Linear(32, 32), Slow(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Linear(torch_jobs.WIDTH, 32), *wide, nn.Linear(32, torch_jobs.CLASSES))


class Watch:
    """A listener that notices when enough steps were taken."""

    def __init__(self) -> None:
        self.enough = threading.Event()

    def on(self, event: events.Event) -> None:
        if isinstance(event, events.Steps) and event.step and event.step[-1] >= STEPS:
            self.enough.set()

    def close(self) -> None:
        """Nothing is held."""


def first_steps(folder: Path, model: Callable[[], nn.Module], **fields: Any) -> dict[int, float]:
    """Losses of a run that is stopped after a few steps."""
    own = {"step": None, "model": model, "optimizer": momentum, "loss": cross_entropy, "inputs": "x", "targets": "y"}
    run = tw.start(
        torch_jobs.job(folder, **{**own, "batch_size": 8, "epochs": LONG, "checkpoint_steps": 10**9, **fields})
    )
    watch = Watch()
    run.listen(watch)
    enough = watch.enough.wait(120)
    run.stop(now=True)
    assert run.wait(60) and enough
    losses: dict[int, float] = {}
    for event in told(folder, "faulty", events.Steps):
        losses.update(zip(event.step, event.loss, strict=True))  # type: ignore[attr-defined]
    return {step: losses[step] for step in range(1, STEPS + 1)}


@pytest.mark.parametrize(("model", "wins"), [(fat, False), pytest.param(slow, True, marks=pytest.mark.soak)])
def test_the_quickest_plan_goes_on_and_the_run_is_the_one_without(
    model: Callable[[], nn.Module], wins: bool, tmp_path: Path, ray_cluster: None
) -> None:
    losses = first_steps(tmp_path / "probed", model)
    (probed,) = told(tmp_path / "probed", "faulty", events.Probed)
    assert isinstance(probed, events.Probed)
    measured = {row["name"].partition(" ")[0]: row["measured_s"] for row in probed.rows}
    assert len(measured) >= 2 and probed.name.startswith("data_parallel") == wins, probed.text
    assert measured[probed.name.partition(" ")[0]] <= 1.02 * min(value for value in measured.values() if value)
    assert len(told(tmp_path / "probed", "faulty", events.Placed)) == 2, "in the same processes"
    assert len(told(tmp_path / "probed", "faulty", events.Formed)) == 1
    shown = run_views.run_view(str(tmp_path / "probed"), "faulty").data
    assert shown["plan"]["strategy"] == probed.name.partition(" ")[0]
    assert any("ms a step" in other["reason"] for other in shown["others"])
    plan = str(probed.name.partition("(")[2].rstrip(")"))
    pinned = first_steps(tmp_path / "pinned", model, plan=plan, strategy=shown["plan"]["strategy"])
    assert losses == pinned and not told(tmp_path / "pinned", "faulty", events.Probed)
