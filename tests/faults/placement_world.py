"""A driver on a Ray cluster of its own: two replicas of two stages on two nodes, one of which is lost; see
test_placement.py.

A third node comes before the second one goes, while all ranks stand in one step. Run as `python -m
tests.faults.placement_world FOLDER`; each step leaves a mark of the rank and of the node on which it ran.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn

import trainwright as tw
from tests.support import torch_jobs
from tests.support.processes import wait_for
from tests.support.ray_clusters import thrifty
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.ray_cluster.placement_groups import PlacementGroups

CPUS = 3  # of each node: room for two workers, and one left for data
LOSE_AT = 8
RANKS = 4


class Double(nn.Module):
    """Numbers in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def build() -> nn.Module:
    """Layers enough for two stages, in float64."""
    return nn.Sequential(
        Double(),
        nn.Linear(torch_jobs.WIDTH, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, torch_jobs.CLASSES),
    ).double()


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def marking(marks: Path) -> Callable[[int, int], float]:
    """A schedule, which every stage asks: it leaves marks, and one step waits until a node has gone."""

    def schedule(step: int, total: int) -> float:
        if torch.distributed.is_initialized():
            node = ray.get_runtime_context().get_node_id()
            (marks / f"rank-{torch_jobs.rank()}-{node}").touch()
            if step >= LOSE_AT and not (marks / "lost").exists():
                (marks / f"waits-{os.getpid()}-{node}").touch()
                wait_for((marks / "lost").exists, 100)
        return 1.0

    return schedule


def job(folder: Path, **fields: Any) -> tw.Job:
    """Two replicas of two stages; checkpoints at the end alone."""
    own = {
        "step": None,
        "model": build,
        "loss": cross_entropy,
        "inputs": "x",
        "targets": "y",
        "optimizer": torch_jobs.sgd,
    }
    plan = {"plan": "dp=2,pp=2,schedule=1f1b,accumulation=2", "checkpoint_steps": 100, "keeper_s": 0, "spares": 0}
    return torch_jobs.job(
        folder, **{**own, **plan, "schedule": marking(folder.parent), "workers": RANKS, "epochs": 8, **fields}
    )


def main(folder: Path) -> None:
    """Train while a node is lost."""
    folder.mkdir(parents=True, exist_ok=True)
    thrifty()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    second = cluster.add_node(num_cpus=CPUS)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    run = tw.start(job(folder))
    wait_for(lambda: len([*folder.parent.glob("waits-*")]) == RANKS, 90)
    cluster.add_node(num_cpus=CPUS)
    going = [int(mark.name.split("-")[1]) for mark in folder.parent.glob(f"waits-*-{second.node_id}")]
    assert len(going) == RANKS // 2
    cluster.remove_node(second, allow_graceful=False)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in going), 60)  # they took no other step
    (folder.parent / "lost").touch()
    assert run.wait(120), "no end"
    ray.shutdown()
    cluster.shutdown()


def rooms() -> None:
    """Say on which nodes the slots of two tensor groups are, and those of the second when its node is excluded."""
    thrifty()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=CPUS)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    mesh = Mesh(data=2, tensor=2)
    rooms = PlacementGroups(
        Plan(strategy="", engine="", mesh=mesh, batch_size=4, placement=WorkerResources(cpus=1.0)), elastic=False
    )
    homes = [_home(rooms, slot) for slot in range(mesh.size)]
    rooms.exclude_node(homes[2])
    print(*homes[:2])
    print(*homes[2:])
    print(*(_home(rooms, slot) for slot in (2, 3)))
    rooms.give_back()
    ray.shutdown()
    cluster.shutdown()


def _home(rooms: PlacementGroups, slot: int) -> str:
    """The node on which a slot's process runs."""
    task = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    home: str = ray.get(task.options(num_cpus=1, scheduling_strategy=rooms.of(slot)).remote(), timeout=60)
    rooms.found(slot, home)
    return home


if __name__ == "__main__":
    rooms() if sys.argv[1] == "--rooms" else main(Path(sys.argv[1]))
