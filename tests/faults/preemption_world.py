"""A driver on a Ray cluster of two nodes whose only worker is told to go; see test_node_notices.py.

Run as `python -m tests.faults.preemption_world FOLDER HOW`; each node that a step ran on leaves a mark.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import trainwright as tw
from tests.support import torch_jobs
from tests.support.ray_clusters import thrifty
from trainwright.core import events
from trainwright.ray_cluster.ray_compat import store_at

PREEMPTION = 2  # DRAIN_NODE_REASON_PREEMPTION of Ray's autoscaler.proto


def marking_step(folder: Path, how: str) -> Any:
    """The step of `tests.support.torch_jobs`, with a notice in step 8 and a mark for each node."""
    notice = torch_jobs.Kill(rank=0, step=8, folder=str(folder.parent), number=signal.SIGTERM)
    kills = (notice,) if how == "sigterm" else ()
    # The checkpoint of step 5 must be written before a rank that alone holds the state can hand over.
    awaits = {10: torch_jobs.Awaited(kind=events.Leaving), 11: torch_jobs.Awaited(kind=events.Checkpointed)}
    inner = torch_jobs.make_step(kills, awaits=awaits, storage=str(folder))

    def step(model: Any, batch: Any) -> Any:
        if model.training and ray.get_runtime_context().get_actor_id():  # not a trial of the driver's
            (folder.parent / f"node-{ray.get_runtime_context().get_node_id()}").touch()
            if how != "sigterm" and int(model.steps) == 8:
                stop_node() if how == "stop" else drain_node(60.0 if how == "drain" else 0.0)
        return inner(model, batch)

    return step


def drain_node(left_s: float) -> None:
    """What `ray drain-node` and the autoscaler do; 0 gives no time of the end."""
    here = ray.get_runtime_context()
    by_ms = round((time.time() + left_s) * 1000) if left_s else 0
    accepted, why = store_at(here.gcs_address).drain_node(here.get_node_id(), PREEMPTION, "a test", by_ms)
    assert accepted, why


def stop_node() -> None:
    """SIGTERM to `ray start --block`, whose child is the raylet, whose child is this process."""
    facts = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(facts.rpartition(")")[2].split()[1]), signal.SIGTERM)


@contextmanager
def started_nodes(address: str, number: int) -> Iterator[None]:
    """Nodes as in a container: each is a process `ray start --block`. One of them must end by itself."""
    ports = [f"--{name}=0" for name in ("min-worker-port", "max-worker-port", "dashboard-agent-listen-port")]  # any
    command = [Path(sys.executable).with_name("ray"), "start", "--block", f"--address={address}", "--num-cpus=3"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        while len(nodes) < number:  # one after the other: they would take each other's ports
            nodes.append(subprocess.Popen([*command, *ports], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL))
            until_s = time.monotonic() + 60
            while ray.cluster_resources().get("CPU", 0) < 3 * len(nodes):  # type: ignore[no-untyped-call]
                assert time.monotonic() < until_s and nodes[-1].poll() is None, "the node did not start"
                time.sleep(0.1)
        yield
        until_s = time.monotonic() + 60
        while nodes and all(node.poll() is None for node in nodes):
            assert time.monotonic() < until_s, "the node that was told to stop did not end"
            time.sleep(0.1)
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(60)


def main(folder: Path, how: str) -> None:
    """Train on nodes that are not the head's, which would take the driver's Ray with it."""
    thrifty()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(0 if how == "stop" else 2):
        cluster.add_node(num_cpus=3)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    folder.mkdir(parents=True, exist_ok=True)
    with started_nodes(cluster.address, 2 if how == "stop" else 0):
        tw.fit(torch_jobs.job(folder, step=marking_step(folder, how), workers=1, failures=0))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
