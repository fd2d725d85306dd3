"""A loss that explodes: the run goes back to before it and passes its batch by."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import final_state, told
from trainwright.core import events
from trainwright.core.errors import LossSpike

SPIKE = 22  # steps completed before it
SLOW_S = 0.15  # of each of the last steps: a slow driver hears of the spike while the ranks still step
STEP = torch_jobs.make_step(())


def steep(factor: float, folder: Path) -> Any:
    """The step of `tests.support.torch_jobs` with one loss that is so many times too high, once on each rank."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        net = getattr(model, "module", model)
        mark = folder / f"steep-{torch_jobs.rank()}"
        due = int(net.steps) == SPIKE and net.training and not mark.exists()
        if due:
            mark.touch()
        if net.training and int(net.steps) >= SPIKE - 4:
            threading.Event().wait(SLOW_S)
        losses: torch.Tensor = STEP(model, batch)
        return losses * (factor if due else 1.0)

    return step


def test_the_run_goes_back_and_passes_the_batch_by(folder: Path, ray_cluster: None) -> None:
    """Bitwise the unbroken run in which that step changes nothing, since its loss is not finite."""
    tw.fit(torch_jobs.job(folder, step=steep(1e3, folder.parent), max_loss_ratio=10.0, on_spike="rollback"))
    plain = folder.parent / "plain" / "runs"
    plain.mkdir(parents=True)
    tw.fit(torch_jobs.job(plain, step=steep(float("nan"), plain.parent), on_nonfinite="skip"))
    assert final_state(folder, "faulty") == final_state(plain, "faulty")
    formed: Any = told(folder, "faulty", events.Formed)
    assert formed[-1].source == "checkpoint" and formed[-1].step <= SPIKE and formed[-1].survivors == 2
    failed: Any = told(folder, "faulty", events.Failed)
    assert len(failed) == 1 and f"the loss of step {SPIKE + 1} is" in failed[0].cause
    kept = pq.read_table(folder / "faulty" / "quarantine").to_pydict()
    assert len(kept["sample"]) == 24 and all("times the usual" in error for error in kept["error"])


def test_without_leave_to_go_back_the_run_ends_and_says_why(folder: Path, ray_cluster: None) -> None:
    with pytest.raises(LossSpike, match=f"the loss of step {SPIKE + 1} is .* times the usual"):
        tw.fit(torch_jobs.job(folder, step=steep(1e3, folder.parent), max_loss_ratio=10.0))
    assert final_state(folder, "faulty").step <= SPIKE
