"""A cloud for Ray's autoscaler: nodes are raylets of this machine, which it may be slow to give, or refuse.

`provider` in the configuration names `Nodes`, which Ray's monitor imports. By the name `fake_multinode` Ray's newer
autoscaler would look for a file that its package lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray._private.parameter import RayParams
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.cluster_utils import Cluster

from tests.support.processes import ROOT
from tests.support.s3_server import free_ports

HEAD_ID = "f" * 51 + "00000"
HEAD = "ray.head.default"  # as the fake nodes have it
STORE_BYTES = 100_000_000
EMPTY = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files",
)  # fmt: skip


class Nodes(FakeMultiNodeProvider):
    """Ray's fake nodes; `slow_s` in its configuration is how long each launch takes, `refuse` names types it lacks."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: dict[str, str], count: int, resources: Any, labels: Any
    ) -> None:
        """As a provider does."""
        kind = tags["ray-user-node-type"]
        if kind in self.provider_config["refuse"]:
            raise NodeLaunchException("InsufficientInstanceCapacity", f"no {kind} in this zone", None)
        time.sleep(self.provider_config["slow_s"])
        with patch("ray._private.parameter.RayParams", partial(RayParams, include_log_monitor=False)):  # it would stay
            super().create_node_with_resources_and_labels(node_config, tags, count, resources, labels)


def configuration(port: int, types: Mapping[str, Any], *, most: int, slow_s: float, refuse: tuple[str, ...]) -> Any:
    """What `ray start --autoscaling-config` is given."""
    head = {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0}
    workers = {name: {"node_config": {}, "min_workers": 0, **about} for name, about in types.items()}
    for about in workers.values():
        about["resources"] = {**about["resources"], "object_store_memory": STORE_BYTES}
    return {
        "cluster_name": "test",
        "max_workers": most,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 100,
        "provider": {
            "type": "external", "module": f"{__name__}.Nodes", "gcs_address": f"127.0.0.1:{port}",
            "launch_multiple": True, "head_node_id": HEAD_ID, "disable_node_updaters": True,
            "disable_launch_config_check": True, "slow_s": slow_s, "refuse": list(refuse),
        },
        "auth": {},
        "file_mounts": {},
        **{name: [] for name in EMPTY},
        "head_node_type": HEAD,
        "available_node_types": {HEAD: head, **workers},
    }  # fmt: skip


@contextlib.contextmanager
def cloud(
    folder: Path,
    types: Mapping[str, Any],
    *,
    most: int = 8,
    slow_s: float = 0.0,
    refuse: tuple[str, ...] = (),
    newer: bool = True,
    head_cpus: int = 0,
) -> Iterator[str]:
    """The address of a cluster whose head, which has no CPU for workers, may start these nodes.

    Args:
        folder: for its configuration.
        types: by name, as a cluster file has them.
        most: of all types.
        slow_s, refuse: as of `Nodes`.
        newer: Ray's newer autoscaler, else the older one.
        head_cpus: of the head.
    """
    (port,) = free_ports(1)
    file = folder / "autoscaling.yaml"
    file.write_text(json.dumps(configuration(port, types, most=most, slow_s=slow_s, refuse=refuse)))
    environment = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "PYTHONPATH": str(ROOT),
        "RAY_enable_autoscaler_v2": "1" if newer else "0",
    }  # fmt: skip
    names = ("RAY_OVERRIDE_NODE_ID_FOR_TESTING", "RAY_CLOUD_INSTANCE_ID")
    identity = {**dict.fromkeys(names, HEAD_ID), "RAY_NODE_TYPE_NAME": HEAD}
    with patch.dict(os.environ, environment):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": head_cpus, "include_dashboard": False, "autoscaling_config": str(file),
                "gcs_server_port": port, "env_vars": identity, "object_store_memory": STORE_BYTES,
            },
        )  # fmt: skip
    try:
        yield str(cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()
