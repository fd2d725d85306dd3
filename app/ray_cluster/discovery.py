"""Connect to Ray; read the nodes of its cluster, those that it can add, and those that are starting.

Ray starts nodes for placement groups that wait for resources. Its head's monitor was given a file with the node types
that may be started, or Kubernetes has them. The monitor reports the nodes that are starting in one of two forms:
`ray.autoscaler.v2.sdk` or, for the older autoscaler, JSON in the store of the head.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainwright.core.cluster import RAY_RESOURCES, Cluster, Node
from trainwright.core.errors import ResourceError
from trainwright.core.events import Event, Formed, Noted, RunEnded, RunStarted, Waiting
from trainwright.ray_cluster.ray_compat import (
    autoscaler_report,
    errors_to_stderr,
    kubernetes_autoscaling,
    kubernetes_cluster,
)

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
    import ray
    from ray.exceptions import AuthenticationError

    errors_to_stderr()
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
    except Exception as error:  # of no common class: a node that does not start in time raises a bare Exception
        if address == "local":
            raise ResourceError(
                f"Ray did not start on this machine: {error}",
                where=f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs",
                remedy="try again when the machine does less; /tmp/ray/session_latest/logs has the logs of Ray",
            ) from error
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
    more = tuple(
        _node({"Resources": kind.resources, "Labels": kind.labels, "NodeManagerHostname": f"{kind.name}#{number}"})
        for number, kind in enumerate(left, 1)
    )
    if not nodes and not more:
        raise ResourceError("the Ray cluster has no living node with a CPU", remedy="add nodes, or start a new cluster")
    return Cluster(nodes=nodes, possible=more, unseen=unseen)


def nodes_by_id() -> dict[str, Node]:
    """The living nodes of the connected cluster, by Ray's id of them."""
    import ray

    listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {facts["NodeID"]: _node(facts) for facts in listed if facts["Alive"]}


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


# --- Autoscaling ------------------------------------------------------------------------------------------------------


HEAD_RESOURCE = "node:__internal_head__"  # a resource that the head alone has
LOOK_S = 2.0  # between two looks at what is being started
_HEAD_ANSWER_S = 30.0  # for the head to answer
_UNTOLD = "the provider refused (monitor.log on the head says why)"  # Ray 2.60 keeps the reason to itself
_OPTION = "--autoscaling-config="
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """A kind of node that the cluster may start."""

    name: str  # as the cluster's file has it
    most: int  # of them at once
    resources: Mapping[str, float]  # of each, by Ray's names
    labels: Mapping[str, str] = field(default_factory=dict)  # likewise


@dataclass(frozen=True, kw_only=True)
class AutoscalerLimits:
    """What the cluster may start: node types in the order of its file, and how many nodes beside the head in all."""

    types: tuple[NodeType, ...]
    most: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AutoscalerLimits:
        """Of the autoscaler's configuration. Types whose resources are not told may hold anything, and are left out."""
        head, types = config.get("head_node_type"), config.get("available_node_types") or {}
        known = tuple(
            NodeType(
                name=name, most=int(about.get("max_workers", 0)), resources=about["resources"],
                labels=about.get("labels") or {},
            )
            for name, about in types.items()
            if name != head and about.get("resources")
        )  # fmt: skip
        return cls(types=known, most=int(config.get("max_workers", sum(each.most for each in known))))

    def left(self, running: Iterable[Mapping[str, Any]]) -> Iterator[NodeType]:
        """One for each node that may still come, beside those that run, as `ray.nodes()` has them."""
        workers = [node for node in running if HEAD_RESOURCE not in node["Resources"]]
        there = Counter(self._type_of(node) for node in workers)
        room = self.most - len(workers)
        for each in self.types:
            for _ in range(min(room, each.most - there[each.name])):
                room -= 1
                yield each

    def _type_of(self, node: Mapping[str, Any]) -> str:
        """By its label; the older autoscaler's nodes have none, and are known by what they hold."""
        labelled = (node.get("Labels") or {}).get("ray.io/node-group", "")
        if any(each.name == labelled for each in self.types):
            return str(labelled)
        held = node["Resources"]
        alike = (
            each.name
            for each in self.types
            if all(held.get(name) == each.resources.get(name) for name in ("CPU", "GPU", "TPU"))
        )
        return next(alike, "")


def autoscaler_limits(nodes: Iterable[Mapping[str, Any]]) -> AutoscalerLimits | None:
    """What the connected cluster may start; None where it starts nothing.

    Args:
        nodes: that live, as `ray.nodes()` has them.

    Raises:
        ResourceError: the head does not answer, or its configuration cannot be read.
    """
    import ray
    from ray.exceptions import RayError

    context = ray.get_runtime_context()
    address = str(context.gcs_address)
    head = next((node["NodeID"] for node in nodes if HEAD_RESOURCE in node["Resources"]), None)
    try:
        if head in (None, context.get_node_id()):
            config = read_config(address)
        else:
            there: Any = ray.remote(num_cpus=0, resources={HEAD_RESOURCE: 0.001}, max_retries=0)(read_config)
            with pickle_by_value():
                asked = there.remote(address)
            config = ray.get(asked, timeout=_HEAD_ANSWER_S)
    except (RayError, OSError, yaml.YAMLError) as error:
        raise ResourceError(
            f"what the cluster may start cannot be read: {error}",
            where=f"the head, {address}",
            remedy="look at the file that ray start --head was given as --autoscaling-config",
        ) from error
    return None if config is None else AutoscalerLimits.of(config)


@contextlib.contextmanager
def pickle_by_value() -> Iterator[None]:
    """Within it Ray sends what is here by value: a head on which nothing is trained need not have trainwright."""
    from ray import cloudpickle

    modules = sys.modules[__name__], sys.modules[kubernetes_cluster.__module__]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


def read_config(address: str, processes: Path = Path("/proc")) -> dict[str, Any] | None:
    """On the head: what the autoscaler of the cluster at this address was given; None where there is none."""
    if "RAY_CLUSTER_NAME" in os.environ and (SERVICE_ACCOUNT / "namespace").exists():
        return _of_kubernetes(os.environ["RAY_CLUSTER_NAME"], (SERVICE_ACCOUNT / "namespace").read_text().strip())
    port = address.rpartition(":")[2]  # the host may be known by several names
    for words in _commands(processes):
        given = [word.removeprefix(_OPTION) for word in words if word.startswith(_OPTION)]
        if given and any(word.startswith("--gcs-address=") and word.endswith(f":{port}") for word in words):
            config: dict[str, Any] = yaml.safe_load(Path(given[0]).expanduser().read_text(encoding="utf-8"))
            return config
    return None


def _commands(processes: Path) -> Iterator[list[str]]:
    """Of all processes of this machine."""
    for file in processes.glob("[0-9]*/cmdline"):
        try:
            yield file.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue


def _of_kubernetes(name: str, namespace: str) -> dict[str, Any] | None:
    """From the RayCluster; its head may read it where the operator runs an autoscaler for it, and else nobody asks."""
    import requests

    try:
        found = kubernetes_cluster(name, namespace)
    except requests.HTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403, 404):
            return None
        raise
    if not found["spec"].get("enableInTreeAutoscaling"):
        return None
    return kubernetes_autoscaling(found)


@dataclass(frozen=True, kw_only=True)
class PendingNodes:
    """Nodes on their way, by type, and why some do not come."""

    asked: Mapping[str, int] = field(default_factory=dict)  # that the provider was asked for
    booting: Mapping[str, int] = field(default_factory=dict)  # that it gave, and that are set up
    refused: tuple[str, ...] = ()  # what it said of those it did not give

    def __str__(self) -> str:
        """`2 nodes (1 gpu asked for, 1 gpu booting); none came for gpu: InsufficientInstanceCapacity`."""
        parts = [f"{number} {name} asked for" for name, number in sorted(self.asked.items())]
        parts += [f"{number} {name} booting" for name, number in sorted(self.booting.items())]
        total = sum(self.asked.values()) + sum(self.booting.values())
        coming = f"{total} node{'s' if total != 1 else ''} ({', '.join(parts)})" if total else "nodes"
        return "; ".join((coming, *(f"none came for {reason}" for reason in self.refused)))


def _pending_nodes() -> PendingNodes:
    """What the connected cluster is starting."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    older = autoscaler_report()
    return (
        parse_autoscaler_report(json.loads(older))
        if older
        else parse_cluster_status(get_cluster_status(ray.get_runtime_context().gcs_address))
    )


def parse_cluster_status(status: Any) -> PendingNodes:
    """Of a `ray.autoscaler.v2.schema.ClusterStatus`."""
    asked, booting = Counter[str](), Counter[str]()
    for launch in status.pending_launches:
        asked[launch.ray_node_type_name] += launch.count
    for node in status.pending_nodes:
        booting[node.ray_node_type_name] += 1
    refused = {f"{launch.ray_node_type_name}: {launch.details or _UNTOLD}" for launch in status.failed_launches}
    return PendingNodes(asked=asked, booting=booting, refused=tuple(sorted(refused)))


def parse_autoscaler_report(status: Mapping[str, Any]) -> PendingNodes:
    """Of the older autoscaler's report."""
    report = status.get("autoscaler_report") or {}
    available = (report.get("node_availability_summary") or {}).get("node_availabilities") or {}
    refused = []
    for name, about in available.items():
        why = about.get("unavailable_node_information")
        if not about.get("is_available") and why:
            refused.append(f"{name}: {why.get('category', '')} {why.get('description', '')}".strip())
    refused += [f"1 {kind}: its set-up failed on {place}" for place, kind in report.get("failed_nodes") or []]
    booting = Counter(kind for _, kind, _ in report.get("pending_nodes") or [])
    return PendingNodes(asked=report.get("pending_launches") or {}, booting=booting, refused=tuple(sorted(refused)))


class PendingNodeWatcher:
    """A listener that tells, while a run has not all its workers, which nodes the cluster starts for it.

    Before the first step that is what the run waits for; later it is a note.

    `see` returns what is being started.
    """

    def __init__(self, write: Callable[[Event], object], see: Callable[[], PendingNodes] = _pending_nodes) -> None:
        self._write, self._see = write, see
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards what is waited for
        self._what = self._said = ""  # of the run, and what was made of it
        self._until_s, self._told = 0.0, PendingNodes()
        self._thread = threading.Thread(target=self._watch, name="trainwright-lookout", daemon=True)

    def on(self, event: Event) -> None:
        """Take one event."""
        with self._lock:
            if isinstance(event, RunStarted):
                self._thread.start()
            elif isinstance(event, Waiting) and event.what != self._said:
                self._what, self._until_s = event.what, time.monotonic() + event.deadline_s
            elif isinstance(event, Formed | RunEnded):
                self._what = ""

    def close(self) -> None:
        """The run has ended."""
        self._closed.set()

    def _watch(self) -> None:
        failure = ""
        while not self._closed.wait(LOOK_S):
            try:
                found = self._see()
            except Exception as error:  # the next query may succeed
                text = f"cannot read which nodes the cluster is starting: {error}"
                if text != failure and not self._closed.is_set():
                    self._write(Noted(text=text))
                failure = text
                continue
            failure = ""
            if found != self._told:
                self._told = found
                self._tell(found)

    def _tell(self, found: PendingNodes) -> None:
        """What has changed."""
        with self._lock:
            what, left_s = self._what, max(0.0, self._until_s - time.monotonic())
            self._said = what if found == PendingNodes() else str(found)
        if what:
            self._write(Waiting(what=self._said, deadline_s=left_s))
        elif found != PendingNodes():
            self._write(Noted(text=f"the cluster starts {found}"))
