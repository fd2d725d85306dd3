"""Four workers, then three, then five in the middle of a run: the same batches, the same losses."""

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
from tests.faults.elastic_world import elastic_job
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
    ours, theirs = losses(folder), losses(plain)
    assert ours.keys() == theirs.keys() and max(abs(ours[step] - theirs[step]) for step in ours) < 1e-9
    assert np.allclose(account(folder), account(plain), rtol=0, atol=1e-12), "each sample counts as often"
