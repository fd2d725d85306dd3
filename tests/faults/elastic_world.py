"""A driver on a Ray cluster of its own whose nodes go and come while the job trains; see test_elastic.py.

Room is made exact by actors that hold CPUs: three workers fit on the head's node, one on the other, two on the later
one. Run as `python -m tests.faults.elastic_world FOLDER`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import told
from tests.support.processes import wait_for
from tests.support.ray_clusters import thrifty
from trainwright.core import events

HEAD_CPUS, NODE_CPUS, SLOT_CPUS = 16, 8, 3.5  # the last follows from the second: (8 - 1) / 2
LOSE_AT = 5
SLOW_S = 0.3  # of a step from there, until there are five: time for nodes to go, come and be used
PLACED_AT, PLACED = 40, 6  # the step that three wait in for two more to be placed


class Smooth(nn.Module):
    """float64, no dropout: what remains is the order of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(torch_jobs.WIDTH, 32), nn.Tanh(), nn.Linear(32, torch_jobs.CLASSES)
        ).double()
        self.seen = nn.Parameter(torch.zeros(torch_jobs.ROWS, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.double())


def world_size() -> int:
    """Number of ranks; 1 for a spare that rehearses."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def slow_step(folder: Path) -> Any:
    """Return the usual step, which marks each world so far and is slow until there are five."""
    marks = folder.parent
    inner = torch_jobs.make_step(())

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        now, size = int(getattr(model, "module", model).steps), world_size()
        if model.training and size in (3, 4) and now >= LOSE_AT:
            (marks / f"{size}-workers").touch()
            threading.Event().wait(SLOW_S)
        if size == 3 and now == PLACED_AT:
            torch_jobs.await_told(str(folder), torch_jobs.Awaited(kind=events.Placed, number=PLACED))
        return inner(model, batch)

    return step


def elastic_job(folder: Path, **fields: Any) -> tw.Job:
    """Six epochs in float64."""
    folder.mkdir(parents=True, exist_ok=True)
    return torch_jobs.job(folder, model=Smooth, step=slow_step(folder), epochs=8, workers=4, failures=5, **fields)


class Hold:
    """Holds CPUs."""

    def ready(self) -> bool:
        """Answers once it is up."""
        return True


def hold(node_id: str, cpus: float) -> Any:
    """Take CPUs of a node for as long as the answer is kept."""
    stay = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray.remote(Hold).options(num_cpus=cpus, scheduling_strategy=stay).remote()
    ray.get(actor.ready.remote(), timeout=60)
    return actor


def await_world(folder: Path, size: int) -> None:
    """Wait until a world of this size is well under way."""
    tick, patience = threading.Event(), 1800
    while not (folder.parent / f"{size}-workers").exists():
        tick.wait(0.05)
        patience -= 1
        assert patience, f"{size} workers did not step within 90 s"


def await_formed(folder: Path, size: int) -> None:
    """Wait until the driver has told of a world of this size."""
    wait_for(lambda: any(event.workers == size for event in formed(folder)), 90)


def formed(folder: Path) -> list[Any]:
    """The worlds so far."""
    return list(told(folder, "faulty", events.Formed))


def main(folder: Path) -> None:
    """Train while a node is lost and another comes."""
    thrifty()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": HEAD_CPUS, "include_dashboard": False})
    second = cluster.add_node(num_cpus=NODE_CPUS)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    head = cluster.head_node.node_id
    held = [hold(head, HEAD_CPUS - 3 * SLOT_CPUS), hold(second.node_id, NODE_CPUS - SLOT_CPUS)]
    run = tw.start(elastic_job(folder, min_workers=3, max_workers=5, shrink_s=8.0))
    await_world(folder, 4)
    await_formed(folder, 4)
    (folder.parent / "3-workers").unlink(missing_ok=True)  # the run begins with three where the fourth is late
    cluster.remove_node(second, allow_graceful=False)
    await_world(folder, 3)
    cluster.add_node(num_cpus=NODE_CPUS)
    assert run.wait(120), "no end"
    del held
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
