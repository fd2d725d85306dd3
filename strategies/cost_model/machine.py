"""The devices that a plan's ranks run on, and how the ranks of a group lie on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainwright.core.accelerators import ACCELERATORS, Accelerator, accelerator
from trainwright.core.cluster import FAR_BYTES_PER_S, Cluster
from trainwright.core.errors import ResourceError
from trainwright.core.plan import Mesh

THREAD_EXPONENT = 0.8
NETWORK_BYTES_PER_S = 1.25e9  # of a node without accelerators, where the cluster says nothing else


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that a plan's ranks run on; where they differ, all wait for the slowest.

    Attributes:
        device: its data sheet.
        per_node: devices of a node.
        devices: of all nodes.
        network_bytes_per_s: of one device, one direction.
        host_bytes: of the host's memory, a device's share; 0 where it is not known.
        each: of all devices, where they differ; empty where they are alike.
        preemptible, steady: nodes that may be taken back, and others.
    """

    device: Accelerator
    per_node: int
    devices: int
    network_bytes_per_s: float
    host_bytes: int = 0
    each: tuple[Accelerator, ...] = ()
    preemptible: int = 0
    steady: int = 0

    def speeds(self, ranks: int, precision: str) -> tuple[float, ...]:
        """Of so many devices, the slowest ones, in those of the slowest, from that up."""
        if not self.each:
            return (1.0,) * ranks
        rates = sorted(item.rate(precision) * item.sustained for item in self.each)
        return tuple(rate / rates[0] for rate in rates[:ranks])

    @property
    def nodes(self) -> int:
        """That the devices are of."""
        return -(-self.devices // self.per_node)

    @classmethod
    def of(cls, cluster: Cluster, ranks: int | None = None) -> Machine:
        """The accelerators of a cluster, or the shares of its CPUs that so many ranks get, one for each slot if None.

        Raises:
            ResourceError: an accelerator is not in the table.
        """
        if not cluster.accelerators:
            return _of_cpus(cluster, ranks or cluster.slots)
        nodes = [node for node in cluster.nodes if node.accelerators]
        found = {kind: accelerator(kind) if kind else ASSUMED for kind in dict.fromkeys(node.kind for node in nodes)}
        missing = sorted(kind for kind, item in found.items() if item is None)
        if missing:
            raise ResourceError(
                f"nothing is known of the accelerator {missing[0]!r}",
                where="cluster",
                remedy=f"describe it: trainwright.core.accelerators.ACCELERATORS[{missing[0]!r}] = Accelerator(...)",
            )
        known = [item for item in found.values() if item is not None]
        slowest = min(known, key=lambda item: item.rate("bf16"))
        each = [node.accelerators for node in nodes]
        networks = [
            node.network_bytes_per_s / count if node.network_bytes_per_s else slowest.network_bytes_per_s
            for node, count in zip(nodes, each, strict=True)
        ]
        devices = [item for node in nodes if (item := found[node.kind]) is not None for _ in range(node.accelerators)]
        return cls(
            device=slowest, per_node=min(each), devices=sum(each), network_bytes_per_s=_network(cluster, min(networks)),
            host_bytes=min(node.memory_bytes // node.accelerators for node in nodes),
            each=tuple(devices) if len(found) > 1 else (), preemptible=cluster.preemptible,
            steady=len(cluster.nodes) - cluster.preemptible,
        )  # fmt: skip


def _network(cluster: Cluster, of_device: float) -> float:
    """A device's share of the network, where the way to another region is what limits it."""
    regions = len({node.region for node in cluster.nodes})
    told = any(node.network_bytes_per_s for node in cluster.nodes)
    if regions == 1 or told:
        return of_device
    most = max(node.accelerators for node in cluster.nodes) or 1
    return min(of_device, FAR_BYTES_PER_S / most)


CPU = Accelerator(
    name="CPU",
    memory_bytes=4 * 2**30,
    flops_per_s={"fp32": 9e10},
    memory_bytes_per_s=1.2e10,
    link_bytes_per_s=2e9,
    network_bytes_per_s=1.25e8,
    host=0.2,
    unsure=0.5,
    source="assumed, of one core of a server",
    resource="CPU",
)
ASSUMED = Accelerator(
    name="accelerator of unknown kind",
    memory_bytes=0,
    flops_per_s={"fp32": 3e13, "bf16": 1e14},
    memory_bytes_per_s=8e11,
    link_bytes_per_s=2e10,
    network_bytes_per_s=2e9,
    unsure=0.7,
    source="assumed",
)


def _of_cpus(cluster: Cluster, ranks: int) -> Machine:
    """Equal shares of each node; n threads on one operation are worth n ** 0.8."""
    on_a_node = -(-ranks // len(cluster.nodes))
    share = min(node.cpus for node in cluster.nodes) / on_a_node
    speed = share**THREAD_EXPONENT if share > 1 else share
    memory = min(node.memory_bytes for node in cluster.nodes) // on_a_node
    told = min(node.network_bytes_per_s for node in cluster.nodes)
    network = told or _network(cluster, NETWORK_BYTES_PER_S)
    core = ACCELERATORS.get(CPU.name, CPU)  # as it was measured, if it was
    device = replace(
        core,
        memory_bytes=memory,
        flops_per_s={name: rate * speed for name, rate in core.flops_per_s.items()},
        memory_bytes_per_s=core.memory_bytes_per_s * speed,
    )
    devices = on_a_node * len(cluster.nodes)
    return Machine(
        device=device, per_node=on_a_node, devices=devices, network_bytes_per_s=network / on_a_node,
        preemptible=cluster.preemptible, steady=len(cluster.nodes) - cluster.preemptible,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that reduce together.

    Attributes:
        size: ranks.
        local: of them on one node.
    """

    size: int
    local: int

    @property
    def nodes(self) -> int:
        """Nodes that they lie on."""
        return self.size // self.local


def leaves_node(machine: Machine, mesh: Mesh) -> bool:
    """Whether the next stage is on another node, for some: replica after replica fills the nodes (`core.arranging`)."""
    return mesh.size > machine.per_node and machine.per_node % (mesh.size // mesh.data) > 0


def group(machine: Machine, size: int, stride: int) -> Group:
    """Ranks so many apart, on nodes that are filled one after the other."""
    local = max(1, min(size, machine.per_node // min(stride, machine.per_node)))
    while size % local:
        local -= 1
    return Group(size=size, local=local)
