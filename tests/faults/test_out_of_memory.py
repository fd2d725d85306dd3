"""A GPU without memory, as torch reports it, ends the run at once, with the plans that need less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import told
from trainwright.core import events
from trainwright.core.errors import DeviceOutOfMemory


def full(model: Any, batch: Any) -> torch.Tensor:
    """A step whose fourth forward on rank 1 finds no memory."""
    net = getattr(model, "module", model)
    if torch_jobs.rank() == 1 and int(net.steps) == 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return torch_jobs.make_step(())(model, batch)


def test_the_run_is_not_tried_again_and_the_error_names_rank_prediction_and_plans(
    ray_cluster: None, folder: Path
) -> None:
    with pytest.raises(DeviceOutOfMemory) as raised:
        tw.fit(torch_jobs.job(folder, step=full, failures=3))
    error = raised.value
    assert "ran out of the device's memory: CUDA out of memory. Tried to allocate 2.00 GiB." in error.what
    assert "the plan predicted " in error.what and "rank 1" in error.where and "worker 1 on " in error.where
    assert error.remedy.startswith("a plan that needs less memory: strategy=")
    failed: Any = told(folder, "faulty", events.Failed)
    assert [event.rank for event in failed] == [1]
    assert len(told(folder, "faulty", events.Placed)) == len(told(folder, "faulty", events.Formed)) + 1 == 2
    (ended,) = told(folder, "faulty", events.RunEnded)
    assert ended.outcome == "failed" and "needs less memory" in ended.error
