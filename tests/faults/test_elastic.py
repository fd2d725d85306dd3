"""The number of workers changes in the middle of a run: the same batches, the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

import trainwright as tw
from tests.faults.elastic_world import Smooth, elastic_job
from tests.support import torch_jobs
from tests.support.finished_runs import final_state, told
from tests.support.processes import ROOT
from trainwright.core import events


def losses(folder: Path) -> dict[int, float]:
    """By step; the last one told of each."""
    found: dict[int, float] = {}
    for event in told(folder, "faulty", events.Steps):
        found.update(zip(event.step, event.loss, strict=True))  # type: ignore[attr-defined]
    return found


def account(folder: Path) -> np.ndarray[Any, Any]:
    """How often each sample counted in the final state."""
    return load(final_state(folder, "faulty").files["model.safetensors"])["seen"]


def check_same(folder: Path, plain: Path) -> None:
    """Two runs used the same batches and had the same losses, up to the order of sums."""
    ours, theirs = losses(folder), losses(plain)
    assert ours.keys() == theirs.keys() and max(abs(ours[step] - theirs[step]) for step in ours) < 1e-9
    assert np.allclose(account(folder), account(plain), rtol=0, atol=1e-12), "each sample counts as often"


def test_by_choice_the_others_continue_at_once_and_the_new_process_joins(ray_cluster: None, tmp_path: Path) -> None:
    folder, plain = tmp_path / "shrinking" / "runs", tmp_path / "plain" / "runs"
    for runs in (folder, plain):
        runs.mkdir(parents=True)
    kill = torch_jobs.Kill(rank=1, step=12, point="synchronisation", folder=str(folder.parent))
    joined = {20: torch_jobs.Awaited(kind=events.Placed, number=3)}
    tw.fit(torch_jobs.job(
        folder, (kill,), model=Smooth, awaits=joined, epochs=4, min_workers=1, on_loss="shrink", checkpoint_steps=100
    ))  # fmt: skip
    tw.fit(torch_jobs.job(plain, model=Smooth, epochs=4))
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.workers, event.steps_lost) for event in formed] == [(2, 0), (1, 0), (2, 0)]
    resized: Any = told(folder, "faulty", events.Resized)
    assert [(event.former, event.workers, event.why) for event in resized] == [
        (2, 1, "the others do not wait"), (1, 2, "there is room"),
    ]  # fmt: skip
    check_same(folder, plain)


@pytest.mark.nodes
def test_a_lost_node_and_a_new_one_change_the_world_and_nothing_else(tmp_path: Path, ray_cluster: None) -> None:
    folder, plain = tmp_path / "elastic" / "runs", tmp_path / "plain" / "runs"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.faults.elastic_world", str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    tw.fit(elastic_job(plain))
    formed: Any = told(folder, "faulty", events.Formed)
    sizes = iter(event.workers for event in formed)
    assert all(size in sizes for size in (4, 3, 5)), "one after the other"
    assert all((event.source, event.steps_lost) == ("replica", 0) for event in formed[1:])
    check_same(folder, plain)
