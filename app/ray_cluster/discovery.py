"""Connect to Ray and read the nodes and accelerators of its cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from trainwright.core.cluster import RAY_RESOURCES, Cluster, Node
from trainwright.core.errors import ResourceError
from trainwright.ray_cluster.autoscaling import NodeType, autoscaler_limits

TOKEN_HELP = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token or RAY_AUTH_TOKEN_PATH to a file with it; by "
    "default it is read from ~/.ray/auth_token"
)


def has_cluster() -> bool:
    """Whether `connect` finds a cluster that is there, instead of starting one."""
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        return True
    import ray

    return ray.is_initialized()


def connect(verbose: bool = False) -> bool:
    """Connect to the cluster of the environment, or start one on this machine; True when this call started it.

    A cluster is found by `RAY_ADDRESS` (as set by `ray job submit`) or an earlier `ray.init`.
    """
    if not verbose:
        logging.getLogger("ray.widgets.util").setLevel(logging.ERROR)  # speaks up while Ray is imported
    import ray
    from ray.exceptions import AuthenticationError

    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS") or "local"
    quiet: dict[str, Any] = {} if verbose else {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        quiet["include_dashboard"] = False
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it ends with this process; others ask for their token
    try:
        ray.init(address=address, **quiet)
    except AuthenticationError as error:
        raise ResourceError(f"the Ray cluster asks for a token: {error}", where=address, remedy=TOKEN_HELP) from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ResourceError(
            f"the Ray cluster cannot be reached: {error}",
            where=address,
            remedy="start it, or unset RAY_ADDRESS to use this machine; http:// addresses are for ray job submit only. "
            f"If it asks for a token (InvalidAuthToken), {TOKEN_HELP}",
        ) from error
    return address == "local"


def discover(*, possible: bool = False) -> Cluster:
    """The living nodes of the connected cluster.

    Args:
        possible: also those that it would start.

    Raises:
        ResourceError: no node is alive, and none would be started.
    """
    import ray

    listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alive = [facts for facts in listed if facts["Alive"]]
    nodes = tuple(node for node in map(_node, alive) if node.cpus > 0)
    known, unseen = None, ""
    try:
        known = autoscaler_limits(alive) if possible else None
    except ResourceError as error:  # no reason to refuse a run that needs no more than what runs
        if not nodes:
            raise
        unseen = f"{error.what} ({error.where})"
    left = known.left(alive) if known is not None else ()
    more = tuple(_node_of(kind, number) for number, kind in enumerate(left, 1))
    if not nodes and not more:
        raise ResourceError("the Ray cluster has no living node with a CPU", remedy="add nodes, or start a new cluster")
    return Cluster(nodes=nodes, possible=more, unseen=unseen)


def nodes_by_id() -> dict[str, Node]:
    """The living nodes of the connected cluster, by Ray's id of them."""
    import ray

    listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {facts["NodeID"]: _node(facts) for facts in listed if facts["Alive"]}


def _node_of(kind: NodeType, number: int) -> Node:
    """One that would be started, of a name of its own."""
    return _node({"Resources": kind.resources, "Labels": kind.labels, "NodeManagerHostname": f"{kind.name}#{number}"})


def _node(facts: Mapping[str, Any]) -> Node:
    resources: Mapping[str, float] = facts["Resources"]
    accelerator = next((name for name in RAY_RESOURCES if resources.get(name, 0) >= 1), "")
    kinds = [key.split(":", 1)[1] for key in resources if key.startswith("accelerator_type:")]
    labels: Mapping[str, str] = facts.get("Labels") or {}
    return Node(
        name=facts["NodeManagerHostname"],
        cpus=resources.get("CPU", 0.0),
        memory_bytes=int(resources.get("memory", 0)),
        accelerators=int(resources.get(accelerator, 0)) if accelerator else 0,
        accelerator=accelerator,
        kind=kinds[0] if kinds else "",
        head=next((name for name in resources if name.startswith("TPU-") and name.endswith("-head")), ""),
        region=labels.get("ray.io/availability-region", ""),
        preemptible=labels.get("ray.io/market-type") == "spot",
    )
