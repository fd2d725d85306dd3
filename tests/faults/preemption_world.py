"""A driver on a Ray cluster of two nodes whose only worker is told to go; see test_preemption.py.

Run as `python -m tests.faults.preemption_world FOLDER`; each node that a step ran on leaves a mark.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import trainwright as tw
from tests.support import torch_jobs
from trainwright.core import events


def marking_step(folder: Path) -> Any:
    """The step of `tests.support.torch_jobs`, with a notice in step 8 and a mark for each node."""
    kill = torch_jobs.Kill(rank=0, step=8, folder=str(folder.parent), number=signal.SIGTERM)
    inner = torch_jobs.make_step((kill,), awaits={10: torch_jobs.Awaited(kind=events.Leaving)}, storage=str(folder))

    def step(model: Any, batch: Any) -> Any:
        if model.training:
            (folder.parent / f"node-{ray.get_runtime_context().get_node_id()}").touch()
        return inner(model, batch)

    return step


def main(folder: Path) -> None:
    """Train."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    cluster.add_node(num_cpus=3)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    folder.mkdir(parents=True, exist_ok=True)
    tw.fit(torch_jobs.job(folder, step=marking_step(folder), workers=1, failures=0))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
