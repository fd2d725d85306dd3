"""A doctor on a Ray cluster of two nodes, then again while one of them dies; see test_doctor.py.

Run as `python -m tests.ray.doctor_world FOLDER`; both diagnoses are printed.
"""

from __future__ import annotations

import sys
import threading

import ray
from ray.cluster_utils import Cluster

import trainwright as tw
from trainwright.diagnostics import cluster_probe
from trainwright.diagnostics.cluster_probe import check_unreachable
from trainwright.diagnostics.node_facts import ClusterFacts, UnreachableNode


def waits() -> None:
    """Longer than the node lives."""
    threading.Event().wait(600)


def main(folder: str) -> None:
    """Look twice."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    print(tw.doctor(storage=folder, imports=False))
    there = [stop for stop in cluster_probe.living_nodes(ray.nodes()) if stop.node_id == second.node_id]  # type: ignore[no-untyped-call]
    dying = threading.Timer(1.0, cluster.remove_node, (second,), {"allow_graceful": False})
    dying.start()
    absent = cluster_probe.run_on_nodes(there, waits, lambda stop: (), 30.0)
    dying.join()
    assert all(isinstance(each, UnreachableNode) for each in absent.values()), absent
    print("THEN", *check_unreachable(ClusterFacts(machines={}, unreachable=absent)))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
