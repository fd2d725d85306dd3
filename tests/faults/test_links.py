"""The link between two nodes is cut in the middle of a run: it goes on where the driver is, and no step is lost."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from tests.support import processes
from tests.support.finished_runs import State, final_state, told
from tests.support.namespaces import NODES, Cable, Machine, cable, machine
from tests.support.sample_counts import account_of
from trainwright.core import events

GCS_PORT, STEP_S, CUT = 6379, 0.3, 5


@pytest.fixture
def pair() -> Iterator[tuple[Machine, Cable]]:
    """The head of a Ray cluster of two machines, and the cable between them."""
    ray = Path(sys.executable).with_name("ray")
    with ExitStack() as stack:
        machines = [stack.enter_context(machine(name)) for name in ("head", "other")]
        line = cable(*machines)
        roles = (
            ("--head", f"--port={GCS_PORT}", "--include-dashboard=false"),
            (f"--address={line.addresses[0]}:{GCS_PORT}",),
        )
        for made, role, address in zip(machines, roles, line.addresses, strict=True):
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
            )
            said = Path(folder) / "said"
            options = (*role, f"--node-ip-address={address}", "--num-cpus=2", f"--temp-dir={folder}")
            # A daemon that outlives the call would hold its pipes open.
            start = ("sh", "-c", f'"$@" >{said} 2>&1 </dev/null || {{ cat {said}; exit 1; }}', "-", ray, "start")
            made.run(*start, *options, env=NODES)
        yield machines[0], line


@pytest.mark.nodes
def test_a_cut_link_costs_no_step(
    pair: tuple[Machine, Cable], folder: Path, tmp_path: Path, unbroken: Callable[[int], State]
) -> None:
    head, line = pair
    file = processes.write_job(tmp_path, folder, step_s=STEP_S, checkpoint_steps=1000, hang_deadline_s=90.0)
    environment = {"RAY_ADDRESS": f"{line.addresses[0]}:{GCS_PORT}"}
    driver = head.start(sys.executable, "-m", "trainwright", "fit", file, env=environment)
    processes.wait_until(lambda: steps_told(folder) >= CUT, driver)
    placed: Any = told(folder, "faulty", events.Placed)
    assert {event.node for event in placed} == {"head", "other"}
    line.cut()
    processes.wait_until(lambda: len(told(folder, "faulty", events.Formed)) == 2, driver)
    line.mend()
    said, _ = driver.communicate(timeout=90)
    assert driver.returncode == 0, said
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.survivors, event.steps_lost) for event in formed[1:]] == [("replica", 1, 0)]
    failed: Any = told(folder, "faulty", events.Failed)
    assert [event.node for event in failed] == ["other"]
    ours, theirs = final_state(folder, "faulty"), unbroken(2)
    assert ours.step == theirs.step and np.allclose(account_of(ours), account_of(theirs), rtol=0, atol=1e-12)
    mine, plain = (load(state.files["model.safetensors"]) for state in (ours, theirs))
    assert all(np.allclose(mine[name], plain[name], atol=1e-5) for name in plain), (
        "the nodes give each worker 2 threads"
    )


def steps_told(folder: Path) -> int:
    found: Any = told(folder, "faulty", events.Steps) if folder.exists() else []
    return max((event.step[-1] for event in found if event.step), default=0)
