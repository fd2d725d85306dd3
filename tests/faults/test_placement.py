"""Ranks on nodes: replicas apart, the stages of each together, so that the loss of a node costs no step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.faults.placement_world import job
from tests.support.finished_runs import told
from tests.support.processes import ROOT
from trainwright.core import events


@pytest.mark.nodes
def test_a_lost_node_takes_one_copy_of_each_piece(tmp_path: Path, ray_cluster: None) -> None:
    folder = tmp_path / "runs"
    command = [sys.executable, "-m", "tests.faults.placement_world", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes: dict[str, set[int]] = {}
    for mark in tmp_path.glob("rank-*"):
        _, rank, node = mark.name.split("-")
        nodes.setdefault(node, set()).add(int(rank))
    held = sorted(map(sorted, nodes.values()))
    assert held in ([[0, 2], [0, 2], [1, 3]], [[0, 2], [1, 3], [1, 3]]), "a replica on each, the lost node's on the new"
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.steps_lost) for event in formed] == [("initial", 0), ("replica", 0)]
    assert formed[-1].survivors == 2
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "lost").touch()
    tw.fit(job(plain / "runs", plan=None, workers=1))
    ours, theirs = _losses(folder), _losses(plain / "runs")
    assert ours.keys() == theirs.keys() and max(abs(ours[step] - theirs[step]) for step in ours) < 1e-9


def _losses(folder: Path) -> dict[int, float]:
    """By step."""
    found: dict[int, float] = {}
    for event in told(folder, "faulty", events.Steps):
        found.update(zip(event.step, event.loss, strict=True))  # type: ignore[attr-defined]
    return found


@pytest.mark.nodes
def test_ray_gives_out_and_moves_the_bundle_of_a_tensor_group_as_one(forked_workers: None) -> None:
    command = [sys.executable, "-m", "tests.faults.placement_world", "--rooms"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, moved = (line.split() for line in done.stdout.splitlines()[-3:])
    assert len(set(first)) == len(set(second)) == len(set(moved)) == 1, "a tensor group is on one node"
    assert len({first[0], second[0], moved[0]}) == 3
