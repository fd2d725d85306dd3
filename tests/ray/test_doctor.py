"""A doctor visits every node of a cluster, and waits for none without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from trainwright.diagnostics import cluster_probe
from trainwright.diagnostics.node_facts import UnreachableNode


def test_a_connected_cluster_is_looked_at(tmp_path: Path, ray_cluster: None) -> None:
    found = tw.doctor(storage=str(tmp_path / "runs"), imports=False)
    assert found.subject == "1 node of the cluster"
    assert {finding.subject for finding in found.findings} >= {"Python", "storage", "network", "clock", "CPUs"}
    assert all(finding.where for finding in found.findings) and not [*tmp_path.iterdir()]


def _hangs(*_: Any) -> None:
    time.sleep(600)


def _dies(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("task", "deadline_s", "why"), [(_hangs, 1.0, "did not answer"), (_dies, 30.0, "was lost")])
def test_a_node_that_hangs_or_dies_is_a_finding(task: Any, deadline_s: float, why: str, ray_cluster: None) -> None:
    import ray

    there = cluster_probe.living_nodes(ray.nodes())  # type: ignore[no-untyped-call]
    (answer,) = cluster_probe.run_on_nodes(there, task, lambda stop: (), deadline_s).values()
    assert isinstance(answer, UnreachableNode) and why in answer.reason


@pytest.mark.nodes
def test_two_nodes_are_compared(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ray.doctor_world", str(tmp_path / "runs")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes of the cluster" in done.stdout and "each node sees what the others wrote" in done.stdout
    assert (
        "ring, one TCP connection" in done.stdout
        and "of this machine's clock" in done.stdout
        and "versions" in done.stdout
    )
    assert "THEN" in done.stdout and "was lost" in done.stdout.partition("THEN")[2], done.stdout
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "no mark is left"
