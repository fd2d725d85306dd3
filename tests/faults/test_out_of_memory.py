"""A GPU without memory, as torch reports it, ends the run at once, with the plans that need less."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from torch import nn

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import final_state, told
from trainwright.core import events
from trainwright.core.errors import DeviceOutOfMemory, JobError


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


class Limited(nn.Module):
    """In its fifth forward, once the run has a checkpoint, rank 1 finds no memory; once in the life of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        ends = nn.Linear(torch_jobs.WIDTH, 512), nn.Linear(512, torch_jobs.CLASSES)
        self.body = nn.Sequential(ends[0], *(nn.Tanh() for _ in range(60)), ends[1]).double()
        self.folder, self.calls = folder, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if torch_jobs.rank() == 1 and self.calls == 5 and not (self.folder / "full").exists():
            (self.folder / "full").touch()
            torch_jobs.await_told(str(self.folder), torch_jobs.Awaited(kind=events.Checkpointed))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        outputs: torch.Tensor = self.body(x.double())
        return outputs


def parameters(folder: Path, *, replan: bool, **fields: Any) -> dict[str, Any]:
    """Those of a run, which needs no dropout and no average."""
    folder.mkdir(parents=True)
    if not replan:
        (folder / "full").touch()
    tw.fit(torch_jobs.job(
        folder, model=partial(Limited, folder), optimizer=torch_jobs.momentum, loss=torch_jobs.cross_entropy,
        step=None, inputs="x", targets="y", on_oom="replan" if replan else "raise", failures=1,
        checkpoint_steps=2, **fields,
    ))  # fmt: skip
    found: dict[str, Any] = {}
    for name, data in final_state(folder, "faulty").files.items():
        found |= load(data) if name.startswith("model") else {}
    return found


@pytest.mark.parametrize(("fields", "leaner", "source"), [
    ({"strategy": "data_parallel"}, "data_parallel (dp=2,accumulation=2)", "replica"),
    ({"strategy": "sharded", "plan": "zero=2"}, "sharded (dp=2,zero=1,accumulation=2)", "checkpoint"),
], ids=["in place", "another layout"])  # fmt: skip
def test_the_run_continues_under_a_plan_that_needs_less_with_the_same_results(
    ray_cluster: None, folder: Path, fields: dict[str, Any], leaner: str, source: str
) -> None:
    """In place where only micro-batches change; under another layout from a checkpoint."""
    found = parameters(folder / "limited", replan=True, **fields)
    told_of = partial(told, folder / "limited", "faulty")
    changed: Any
    (changed,) = told_of(events.Replanned)
    assert (changed.name, changed.why) == (leaner, "the device of rank 1 ran out of memory")
    formed: Any = told_of(events.Formed)
    assert [(event.workers, event.source) for event in formed] == [(2, "initial"), (2, source)]
    assert formed[1].steps_lost <= 3 * (source == "checkpoint")
    assert len(told_of(events.Placed)) == 2, "both keep their processes"
    expected = parameters(folder / "unbroken", replan=False, **fields)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12)


def test_a_plan_that_cannot_change_is_refused_before_anything_starts(ray_cluster: None, folder: Path) -> None:
    with pytest.raises(
        JobError, match=r'on_oom="replan" needs a torch module on one device .* the plan is parameter_server'
    ):
        tw.fit(torch_jobs.job(folder, strategy="parameter_server", on_oom="replan"))
    assert not folder.exists() or not told(folder, "faulty", events.Placed)
