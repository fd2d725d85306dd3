"""Losses that are not finite: the run ends with the samples' names, or passes such steps by."""

from __future__ import annotations

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
from trainwright.core.errors import NonFiniteLoss

BAD = 50
EPOCHS, STEPS = 3, 27


def poisoned(model: Any, batch: Any) -> torch.Tensor:
    """NaN for one sample."""
    losses: torch.Tensor = STEP(model, batch)
    return losses * torch.where(batch["id"] == BAD, torch.nan, 1.0)


def quietly_poisoned(model: Any, batch: Any) -> torch.Tensor:
    """Finite losses whose gradients are NaN, beside one sample: the root of zero."""
    losses: torch.Tensor = STEP(model, batch)
    return losses + (losses - losses).sqrt() if (batch["id"] == BAD).any() else losses


STEP = torch_jobs.make_step(())


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_follows(folder: Path, ray_cluster: None) -> None:
    run = tw.fit(torch_jobs.job(folder, step=poisoned, on_nonfinite="skip"))
    assert run.state == "done"
    shares = -account_of(final_state(folder, "faulty")) / 1e-2
    assert shares[BAD] == 0
    assert np.isclose(shares.sum(), STEPS - EPOCHS), "of each epoch one step is missing, and only that"
    notes: Any = told(folder, "faulty", events.Noted)
    assert f"{EPOCHS} steps changed nothing so far" in notes[-1].text
    kept = pq.read_table(folder / "faulty" / "quarantine").to_pydict()
    assert kept["sample"] == [BAD] and "the loss became nan" in kept["error"][0]
    losses = [loss for event in told(folder, "faulty", events.Steps) for loss in event.loss]  # type: ignore[attr-defined]
    assert np.isnan(losses).sum() == EPOCHS and len(losses) == STEPS


def test_a_gradient_that_is_not_finite_is_passed_by_too(folder: Path, ray_cluster: None) -> None:
    tw.fit(torch_jobs.job(folder, step=quietly_poisoned, on_nonfinite="skip"))
    shares = -account_of(final_state(folder, "faulty")) / 1e-2
    assert shares[BAD] == 0 and np.isclose(shares.sum(), STEPS - EPOCHS)


def test_parameters_that_became_nan_are_never_committed(folder: Path, ray_cluster: None) -> None:
    """Step 15 gets a NaN gradient, and a checkpoint is due after it: the one before stays the newest."""

    def late(model: Any, batch: Any) -> torch.Tensor:
        losses: torch.Tensor = STEP(model, batch)
        return losses + (losses - losses).sqrt() if int(getattr(model, "module", model).steps) == 15 else losses

    with pytest.raises(NonFiniteLoss, match=r"not finite|became nan"):
        tw.fit(torch_jobs.job(folder, step=late))
    state = final_state(folder, "faulty")
    assert state.step in (5, 10) and np.isfinite(account_of(state)).all()


def test_too_many_such_steps_end_the_run(folder: Path, ray_cluster: None) -> None:
    with pytest.raises(NonFiniteLoss, match=f"in samples {BAD}, and 1 steps were skipped before, which is the limit"):
        tw.fit(torch_jobs.job(folder, step=poisoned, on_nonfinite="skip", skip_limit=1))


def test_by_default_the_run_ends_and_names_the_sample_and_the_way_out(folder: Path, ray_cluster: None) -> None:
    with pytest.raises(NonFiniteLoss, match=f"in samples {BAD}") as caught:
        tw.fit(torch_jobs.job(folder, step=poisoned))
    assert 'on_nonfinite="skip"' in caught.value.remedy
