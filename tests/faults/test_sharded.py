"""A divided model loses a part with its worker: it comes from a node's memory, and the run is the unbroken one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import trainwright as tw
from tests.support import torch_jobs
from tests.support.checkpoint_jobs import kept_job
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events


@pytest.mark.parametrize("plan", ["dp=2,zero=2", "dp=2,zero=1,accumulation=2"])
def test_a_part_that_died_with_its_worker_comes_from_memory(
    plan: str, folder: Path, unbroken: Callable[[int], State]
) -> None:
    tw.fit(torch_jobs.job(folder.parent / "unbroken", plan=plan))
    kill = torch_jobs.Kill(rank=1, step=21, folder=str(folder.parent))
    broken = kept_job(folder, (kill,), 2, plan=plan)
    tw.fit(broken)
    assert kill.mark.exists()
    assert final_state(folder, "faulty") == final_state(folder.parent / "unbroken", "faulty")
    formed: Any = told(folder, "faulty", events.Formed)
    assert [event.source for event in formed] == ["initial", "keeper"] and formed[-1].survivors == 1

    if "accumulation" in plan:  # dropout then draws other numbers than in data parallelism
        return
    alone: Any = tw.load_model(broken)
    parallel = safetensors.torch.load(unbroken(2).files["average.safetensors"])
    for name, value in alone.named_parameters():
        assert torch.allclose(value, parallel[name], rtol=1e-3, atol=1e-4), name
    assert torch.allclose(alone.seen, parallel["seen"], rtol=1e-9), "samples counted otherwise than in data parallelism"
    tw.fit(torch_jobs.job(folder.parent / "unbroken", epochs=4, strategy="data_parallel"), resume=True)
    resumed: Any = told(folder.parent / "unbroken", "faulty", events.Formed)
    assert [(event.source, event.step) for event in resumed] == [("initial", 0), ("checkpoint", 27)]
