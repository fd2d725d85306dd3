"""Runs on a cluster that starts nodes when they are asked for; see test_autoscaling.py.

Run as `python -m tests.faults.autoscaling_world grows|refuses|elsewhere FOLDER`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import ray

import trainwright as tw
from tests.faults.cloud import cloud
from tests.faults.elastic_world import Smooth, world_size
from tests.support import torch_jobs
from trainwright.core.errors import ResourceError
from trainwright.ray_cluster.discovery import discover

FEWEST, MOST = 2, 4
CPU = {"resources": {"CPU": 4}, "max_workers": 2}
SLOW_S = 0.5  # a step before the others have come


def slow_step(grows: bool) -> Any:
    """The step of `tests.support.torch_jobs`, which dawdles until the world has grown."""
    inner = torch_jobs.make_step(())

    def step(model: Any, batch: dict[str, Any]) -> Any:
        if grows and model.training and world_size() == FEWEST:
            threading.Event().wait(SLOW_S)
        return inner(model, batch)

    return step


def growing_job(folder: Path, grows: bool, **fields: Any) -> tw.Job:
    """In float64."""
    folder.mkdir(parents=True, exist_ok=True)
    return torch_jobs.job(folder, model=Smooth, step=slow_step(grows), epochs=12, **fields)


def grows(folder: Path) -> None:
    """Begin on the one node that two workers need, and take in two more when another node has come."""
    with cloud(folder, {"cpu": CPU}) as address:
        ray.init(address=address, log_to_driver=False)
        tw.fit(growing_job(folder / "runs", True, workers=None, min_workers=FEWEST, max_workers=MOST))


def refuses(folder: Path) -> None:
    """Wait for a node that the provider does not give."""
    with cloud(folder, {"rare": CPU}, refuse=("rare",)) as address:
        ray.init(address=address, log_to_driver=False)
        try:
            tw.fit(growing_job(folder / "runs", False, workers=FEWEST, place_deadline_s=12.0))
        except ResourceError as error:
            print(error)


def elsewhere(folder: Path) -> None:
    """Look at the cluster from a node that is not the head."""
    with cloud(folder, {"cpu": CPU}) as address:
        ray.init(address=address, log_to_driver=False)
        print("seen there:", ray.get(ray.remote(num_cpus=1)(look).remote(), timeout=90))


def look() -> tuple[int, list[str]]:
    """Nodes that run, and names of those that may come."""
    cluster = discover(possible=True)
    return len(cluster.nodes), [node.name for node in cluster.possible]


if __name__ == "__main__":
    {"grows": grows, "refuses": refuses, "elsewhere": elsewhere}[sys.argv[1]](Path(sys.argv[2]))
