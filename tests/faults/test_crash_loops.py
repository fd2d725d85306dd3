"""A batch that kills its worker each time: the run ends with its samples' names, or passes it by."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import final_state, told
from tests.support.sample_counts import account_of
from trainwright.core import events
from trainwright.core.errors import WorkerLost

BAD, STEPS = 50, 9
STEP = torch_jobs.make_step(())


def deadly(model: Any, batch: Any) -> torch.Tensor:
    """The process dies of one sample, whatever its weight."""
    if (batch["id"] == BAD).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return STEP(model, batch)


def poisoned(model: Any, batch: Any) -> torch.Tensor:
    """NaN for the same sample."""
    losses: torch.Tensor = STEP(model, batch)
    return losses * torch.where(batch["id"] == BAD, torch.nan, 1.0)


def test_a_batch_that_kills_its_worker_each_time_is_named(folder: Path, ray_cluster: None) -> None:
    with pytest.raises(WorkerLost) as caught:
        tw.fit(torch_jobs.job(folder, step=deadly, epochs=1, failures=1))
    found = re.search(r"step (\d+) failed 2 times on rank [01]: .*share of that batch holds samples", caught.value.what)
    assert found and str(BAD) in caught.value.what.split("samples ")[1], caught.value.what
    assert 'on_crash_loop="skip"' in caught.value.remedy
    failed: Any = told(folder, "faulty", events.Failed)
    assert len(failed) == 2 and failed[-1].step == int(found[1]) - 1


def test_a_batch_that_kills_its_worker_is_passed_by_and_all_others_count(folder: Path, ray_cluster: None) -> None:
    """Bitwise the unbroken run in which that step changes nothing, since its loss is not finite."""
    assert tw.fit(torch_jobs.job(folder, step=deadly, epochs=1, spares=1, on_crash_loop="skip")).state == "done"
    state = final_state(folder, "faulty")
    tw.fit(torch_jobs.job(folder.parent / "unbroken", step=poisoned, epochs=1, on_nonfinite="skip"))
    assert state == final_state(folder.parent / "unbroken", "faulty")
    shares = -account_of(state) / 1e-2
    passed = np.flatnonzero(shares == 0)
    assert BAD in passed and np.isclose(shares.sum(), STEPS - 1), "one step is missing, and only that"
    kept = pq.read_table(folder / "faulty" / "quarantine").to_pydict()
    assert sorted(kept["sample"]) == passed.tolist(), "of all ranks"
    assert all("failed 3 times on rank" in error for error in kept["error"])
    notes: Any = told(folder, "faulty", events.Noted)
    assert sum("its batch is skipped" in note.text for note in notes) == 1
    assert len(told(folder, "faulty", events.Failed)) == 3
    losses = [loss for event in told(folder, "faulty", events.Steps) for loss in event.loss]  # type: ignore[attr-defined]
    assert np.isnan(losses).sum() == 1
