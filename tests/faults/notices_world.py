"""A driver on a machine of a cloud, whose metadata service is on this machine; see test_node_notices.py.

Run as `python -m tests.faults.notices_world FOLDER CLOUD`. The service announces its notice in step 8. It has its real
address: it needs a network namespace without a way out, in which that is an address of loopback.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray

import trainwright as tw
from tests.support import torch_jobs
from tests.support.metadata_server import (
    PREEMPTED,
    REBALANCE,
    MetadataServer,
    announce,
    interruption,
    of_file,
    scheduled,
    serving,
)
from tests.support.ray_clusters import TORCH_IMPORTS, forking, thrifty
from trainwright.core import events

ADVICE = {REBALANCE: json.dumps({"noticeTime": "2026-10-27T08:22:00Z"})}


def answers(cloud: str) -> dict[str, str]:
    """The notice of a cloud: the machine ends."""
    return {
        "aws": {**ADVICE, **interruption(90.0)},
        "google": {PREEMPTED: "TRUE"},
        "azure": scheduled("Preempt", 40.0),
    }[cloud]


def announcing_step(folder: Path, cloud: str) -> Any:
    """The step of `tests.support.torch_jobs`, in which AWS recommends to leave before step 5, and all announce in 8."""
    file = folder.parent / "answers.json"
    # The checkpoint of step 5 must be written before ranks that alone hold the state can hand over.
    waits = {
        10: torch_jobs.Awaited(kind=events.Leaving, number=2),
        11: torch_jobs.Awaited(kind=events.Checkpointed),
    }
    if cloud == "aws":
        waits[5] = torch_jobs.Awaited(kind=events.Noted, number=1)
    inner = torch_jobs.make_step((), awaits=waits, storage=str(folder))

    def step(model: Any, batch: Any) -> Any:
        now = int(getattr(model, "module", model).steps)
        if model.training and torch_jobs.rank() == 0:
            if now == 4 and cloud == "aws":
                announce(file, ADVICE)
            if now == 8:
                announce(file, answers(cloud))
        return inner(model, batch)

    return step


def main(folder: Path, cloud: str) -> None:
    """Train, with a spare that is on the same machine."""
    folder.mkdir(parents=True, exist_ok=True)
    thrifty()
    service = MetadataServer(answers=of_file(folder.parent / "answers.json"))
    # In a network namespace, the fork server of the tests cannot be reached.
    with forking(TORCH_IMPORTS), serving(service, "169.254.169.254", 80):
        os.environ["TRAINWRIGHT_CLOUD_NOTICES"] = "on"
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        tw.fit(torch_jobs.job(folder, step=announcing_step(folder, cloud), failures=0))
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
