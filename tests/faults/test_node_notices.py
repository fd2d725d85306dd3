"""A cloud or Ray announces that a node ends, in the middle of a run: no failure, no step lost, the unbroken result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from tests.support.finished_runs import State, final_state, told
from tests.support.metadata_server import AZURE_TAG
from tests.support.namespaces import machine
from tests.support.processes import ROOT
from trainwright.core import events

SERVICE_ADDRESS = """
ip address add 169.254.169.254/32 dev lo
mount -t tmpfs firmware /sys/class
mkdir -p /sys/class/dmi/id
"""
NOTICES = {  # with a fact of the cloud's firmware
    "aws": ("AWS spot interruption (terminate)", 90.0, "sys_vendor", "Amazon EC2"),
    "google": ("Google Cloud preemption", 30.0, "product_name", "Google Compute Engine"),
    "azure": ("Azure spot eviction", 40.0, "chassis_asset_tag", AZURE_TAG),
}


def run(module: str, *arguments: object) -> None:
    """A driver of its own; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=160)
    assert done.returncode == 0, done.stdout + done.stderr


def notes(folder: Path) -> list[str]:
    noted: Any = told(folder, "faulty", events.Noted)
    return [event.text for event in noted]


@pytest.mark.parametrize("cloud", ["aws", "google", "azure"])
def test_all_workers_of_a_machine_that_a_cloud_takes_back_hand_their_ranks_over(
    cloud: str, folder: Path, unbroken: Callable[[int], State]
) -> None:
    """On one machine nothing else is left: all start again there, from a checkpoint of the step of the notice."""
    text, most_s, name, fact = NOTICES[cloud]
    with machine(prepare=f"{SERVICE_ADDRESS}echo {fact} >/sys/class/dmi/id/{name}\n") as rented:
        rented.run(sys.executable, "-m", "tests.faults.notices_world", folder, cloud, deadline_s=160)
    assert final_state(folder, "faulty") == unbroken(2)
    assert not told(folder, "faulty", events.Failed)
    leaving: Any = told(folder, "faulty", events.Leaving)
    assert sorted(event.rank for event in leaving) == [0, 1] and {event.why for event in leaving} == {text}
    assert all(most_s - 15 <= event.left_s <= most_s for event in leaving)
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.steps_lost) for event in formed] == [("initial", 0), ("checkpoint", 0)]
    advised = [note for note in notes(folder) if "rebalance" in note]
    assert len(advised) == (1 if cloud == "aws" else 0), "told once, and no end"


@pytest.mark.nodes
@pytest.mark.parametrize("how", ["sigterm", "drain", "drain_without_end", "stop"])
def test_the_rank_goes_to_another_node_where_one_has_room(
    how: str, folder: Path, unbroken: Callable[[int], State]
) -> None:
    """Told to go: the worker's process; its node, by Ray's drain; `ray start --block`, as Kubernetes tells a pod."""
    run("tests.faults.preemption_world", folder, how)
    assert len(list(folder.parent.glob("node-*"))) == 2
    assert not told(folder, "faulty", events.Failed)
    (leaving,) = told(folder, "faulty", events.Leaving)
    assert leaving.why == ("preemption notice" if how == "sigterm" else "Ray drains its node")  # type: ignore[attr-defined]
    ours, theirs = (load(state.files["model.safetensors"]) for state in (final_state(folder, "faulty"), unbroken(1)))
    assert np.allclose(ours["seen"], theirs["seen"], rtol=0, atol=1e-12), "each sample counts as often"
    assert all(np.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4) for name in theirs), (
        "other numbers of threads"
    )
