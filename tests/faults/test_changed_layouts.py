"""Two stages, then one device, then two stages again in the middle of a run: the same model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from tests.support.finished_runs import State, final_state, told
from tests.support.processes import ROOT
from trainwright.core import events


def parameters(state: State) -> dict[str, Any]:
    """Of all stages, by name."""
    found: dict[str, Any] = {}
    for name, data in state.files.items():
        found |= load(data) if name.startswith("model") else {}
    return found


@pytest.mark.nodes
def test_a_lost_stage_makes_it_one_device_and_a_new_node_two_stages_again(tmp_path: Path, forked_workers: None) -> None:
    folder, plain = tmp_path / "relaid", tmp_path / "plain"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.faults.changed_layouts_world", str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    changed: Any = told(folder, "faulty", events.Replanned)
    assert [event.name.partition(" ")[0] for event in changed] == ["one_device", "pipeline"]
    assert "plan='pp=2,schedule=1f1b,accumulation=4' cannot hold" in changed[0].why and not changed[1].why
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.workers, event.source) for event in formed] == [(2, "initial"), (1, "checkpoint"), (2, "checkpoint")]
    assert formed[-1].steps_lost == 0
    ours, theirs = final_state(folder, "faulty"), final_state(plain, "faulty")
    assert ours.step == theirs.step == 108
    left, right = parameters(ours), parameters(theirs)
    assert left.keys() == right.keys() and left
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=1e-9, atol=1e-11)
