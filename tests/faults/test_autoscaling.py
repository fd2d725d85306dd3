"""A cluster that starts nodes when they are asked for: a run waits for them, says so, and grows by them."""

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
from tests.faults.autoscaling_world import FEWEST, MOST, growing_job
from tests.support.finished_runs import final_state, told
from tests.support.processes import ROOT
from trainwright.core import events

pytestmark = pytest.mark.hosts


def world(what: str, folder: Path) -> str:
    """What the world of that name says."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.faults.autoscaling_world", what, str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(folder: Path) -> Any:
    """At the end."""
    return load(final_state(folder, "faulty").files["model.safetensors"])


def test_it_begins_on_the_fewest_nodes_and_grows_when_more_have_come(tmp_path: Path, ray_cluster: None) -> None:
    said = world("grows", tmp_path)
    assert "1 node (cpu) to be started first" in said
    assert "waiting for 1 node (1 cpu asked for)" in said
    assert "note: the cluster starts 1 node (1 cpu " in said
    formed: Any = told(tmp_path / "runs", "faulty", events.Formed)
    assert formed[0].workers == FEWEST and formed[-1].workers == MOST
    assert all(event.steps_lost == 0 for event in formed)
    tw.fit(growing_job(tmp_path / "plain", False, workers=FEWEST))
    ours, theirs = weights(tmp_path / "runs"), weights(tmp_path / "plain")
    for name in theirs:
        assert np.allclose(ours[name], theirs[name], rtol=0, atol=1e-9), name


def test_a_driver_that_is_not_on_the_head_knows_what_may_come(tmp_path: Path) -> None:
    assert "seen there: (1, ['cpu#1'])" in world("elsewhere", tmp_path)


def test_it_tells_why_no_node_comes(tmp_path: Path) -> None:
    said = world("refuses", tmp_path)
    assert "none came for rare: the provider refused" in said
    assert "0 of 2 workers started within 12 s" in said
