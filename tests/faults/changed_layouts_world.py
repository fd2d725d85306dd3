"""A driver on a cluster whose second node goes and comes while two stages train; see test_changed_layouts.py.

A node has room for one worker. Run as `python -m tests.faults.changed_layouts_world FOLDER`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn

import trainwright as tw
from tests.faults.elastic_world import await_world, world_size
from tests.support import torch_jobs
from tests.support.ray_clusters import thrifty
from tests.support.torch_jobs import cross_entropy, momentum
from trainwright.core import events

CPUS = 4  # of a node; a worker has all but the one that is left for data
LOSE_AT, SLOW_S = 12, 0.25  # so slow a step, until there are two workers again, leaves time for nodes to go and come
PLACED_AT, PLACED = 60, 3  # the step that one worker waits in for another to be placed


class Wide(nn.Module):
    """The first layer of a model in float64, which takes what the data hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(torch_jobs.WIDTH, 32).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.double()))


def build() -> nn.Module:
    """Layers enough for two stages, without dropout: what remains is the order of sums."""
    return nn.Sequential(Wide(), nn.Linear(32, 32).double(), nn.Tanh(), nn.Linear(32, torch_jobs.CLASSES).double())


def paced(folder: Path) -> Callable[[int, int], float]:
    """A schedule, which all stages ask in each step: tells of the worlds, and dawdles until two are there again."""
    marks = folder.parent

    def schedule(step: int, total: int) -> float:
        size, alone = world_size(), marks / "1-workers"
        if size == 1 or (step >= LOSE_AT and not alone.exists()):
            (marks / f"{size}-workers").touch()
            threading.Event().wait(SLOW_S)
        if size == 1 and step == PLACED_AT and folder.exists():
            torch_jobs.await_told(str(folder), torch_jobs.Awaited(kind=events.Placed, number=PLACED))
        return 1.0 - step / (2 * total)

    return schedule


def staged_job(folder: Path, **fields: object) -> tw.Job:
    """Two stages over twelve epochs, and a checkpoint each five steps."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"step": None, "model": build, "optimizer": momentum, "loss": cross_entropy, "inputs": "x", "targets": "y"}
    plan = {"plan": "pp=2,schedule=1f1b,accumulation=4", "epochs": 12, "schedule": paced(folder)}
    return torch_jobs.job(folder, **{**own, **plan, **fields})


def main(folder: Path) -> None:
    """Train while a node is lost and another comes, then without that."""
    thrifty()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    second = cluster.add_node(num_cpus=CPUS)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    run = tw.start(staged_job(folder, min_workers=1, shrink_s=30.0))
    await_world(folder, 2)
    cluster.remove_node(second, allow_graceful=False)
    await_world(folder, 1)
    cluster.add_node(num_cpus=CPUS)
    assert run.wait(120), "no end"
    tw.fit(staged_job(folder.parent / "plain"))  # the marks are there: it does not dawdle
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
