"""A node with the only copy of a stage or of shards is lost: the state comes from the memory of its neighbour."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.finished_runs import final_state, told
from tests.support.namespaces import NODES, Machine, cable, ip, machine
from trainwright.core import events

GCS_PORT, WAIT_AT = 6379, 40
JOB_FILE = """
from pathlib import Path
from threading import Event

import torch
from torch import nn

from tests.support import torch_jobs
from tests.support.torch_jobs import cross_entropy, momentum
from trainwright.core import events

folder = Path({folder!r})

def build():
    width, classes = torch_jobs.WIDTH, torch_jobs.CLASSES
    return nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Linear(32, classes))

def paced(step, total):  # slow until copies are in memory, then waits until the node is lost
    if {storage!r}.endswith("faulty") and not (folder / "lost").exists():
        Event().wait(0.2)
        if step == {wait_at}:
            torch_jobs.await_told({storage!r}, torch_jobs.Awaited(kind=events.Kept))
            (folder / "waits").touch()
            patience = 3000
            while patience and not (folder / "lost").exists():
                Event().wait(0.02)
                patience -= 1
    return 1.0 - step / (2 * total)

job = torch_jobs.job(
    {storage!r}, step=None, model=build, optimizer=momentum, loss=cross_entropy, inputs="x", targets="y",
    plan={plan!r}, schedule=paced, epochs=6, checkpoint_steps=1000, keeper_s=0.5,
    hang_deadline_s=90.0,
)
"""


def _second_cable(head: Machine, third: Machine) -> str:
    """Connect a third machine, which reaches the head at its first address too; return its own address."""
    ip(head, "link", "add", "second", "type", "veth", "peer", "name", "second", "netns", str(third.holder))
    for end, address in ((head, "10.77.1.1"), (third, "10.77.1.2")):
        ip(end, "address", "add", f"{address}/24", "dev", "second")
        ip(end, "link", "set", "second", "up")
    ip(third, "route", "add", "default", "via", "10.77.1.1")
    return "10.77.1.2"


def _start_node(at: Machine, address: str, stack: ExitStack, *role: str) -> None:
    """Start a Ray node with room for one worker."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True))
    said, ray = Path(folder) / "said", Path(sys.executable).with_name("ray")
    # A daemon that outlives the call would hold its pipes open.
    start = ("sh", "-c", f'"$@" >{said} 2>&1 </dev/null || {{ cat {said}; exit 1; }}', "-", ray, "start")
    at.run(
        *start, *role, f"--node-ip-address={address}", "--num-cpus=2", f"--temp-dir={folder}", env=NODES, deadline_s=120
    )


@pytest.mark.nodes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", ["pp=2,schedule=1f1b,accumulation=4", "fsdp=2"], ids=["stage", "shards"])
def test_a_lost_node_with_the_only_part_of_its_kind_costs_no_checkpoint(plan: str, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.py" for name in ("faulty", "plain")}
    for name, file in files.items():
        storage = str(tmp_path / name)
        file.write_text(JOB_FILE.format(folder=str(tmp_path), storage=storage, wait_at=WAIT_AT, plan=plan))
    with ExitStack() as stack:
        head, other, third = (stack.enter_context(machine(name)) for name in ("head", "other", "third"))
        addresses = (*cable(head, other).addresses, _second_cable(head, third))
        cluster = f"{addresses[0]}:{GCS_PORT}"
        _start_node(head, addresses[0], stack, "--head", f"--port={GCS_PORT}", "--include-dashboard=false")
        _start_node(other, addresses[1], stack, f"--address={cluster}")
        fit = (sys.executable, "-m", "trainwright", "fit")
        driver = head.start(*fit, files["faulty"], env={"RAY_ADDRESS": cluster})
        processes.wait_until((tmp_path / "waits").exists, driver)
        _start_node(third, addresses[2], stack, f"--address={cluster}")
        # The network of a lost machine stays, since the head's end of the cable would go with it.
        stack.callback(os.close, os.open(f"/proc/{other.holder}/ns/net", os.O_RDONLY))
        other.end()
        (tmp_path / "lost").touch()
        said, _ = driver.communicate(timeout=120)
        assert driver.returncode == 0, said
        head.run(*fit, files["plain"], env={"RAY_ADDRESS": cluster}, deadline_s=100)
    folder = tmp_path / "faulty"
    placed: Any = told(folder, "faulty", events.Placed)
    assert {event.node for event in placed[:2]} == {"head", "other"}
    kept: Any = told(folder, "faulty", events.Kept)
    formed: Any = told(folder, "faulty", events.Formed)
    assert [event.source for event in formed] == ["initial", "keeper"], said
    assert formed[1].step == max(event.step for event in kept if event.time_s < formed[1].time_s), "the newest copy"
    assert not told(folder, "faulty", events.Checkpointed)[:-1], "none but the last"
    assert final_state(folder, "faulty") == final_state(tmp_path / "plain", "faulty")
