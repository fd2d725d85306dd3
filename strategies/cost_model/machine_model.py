"""The devices that a plan's ranks run on, where the ranks of a group are, and the devices' efficiencies.

Without calibration the efficiencies are the defaults, and an estimate's interval is as wide as `spread` says. With
measurements, `estimator.calibrate` finds the most probable efficiencies. What these leave unexplained is kept as a
residual by shape of work (Gaussian process regression; Rasmussen and Williams 2006, algorithm 2.1), since a library may
pick a slow kernel for one shape only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trainwright.core.cluster import ACCELERATORS, FAR_BYTES_PER_S, Accelerator, Cluster, find_accelerator
from trainwright.core.errors import ResourceError
from trainwright.core.plan import Mesh

_THREAD_EXPONENT = 0.8
_NETWORK_BYTES_PER_S = 1.25e9  # of a node without accelerators, where the cluster says nothing else


@dataclass(frozen=True, kw_only=True)
class MachineModel:
    """The devices of a cluster; where they differ, all wait for the slowest."""

    device: Accelerator  # data sheet of the slowest
    per_node: int  # devices of a node
    devices: int  # number of devices of all nodes
    network_bytes_per_s: float  # of one device, one direction
    host_bytes: int = 0  # a device's share of the host's memory; 0 where it is not known
    each: tuple[Accelerator, ...] = ()  # data sheet of each device, where they differ; else empty
    # preemptible, steady: number of preemptible nodes, and of others
    preemptible: int = 0
    steady: int = 0

    def speeds(self, ranks: int, precision: str) -> tuple[float, ...]:
        """Return the speeds of a number of devices, the slowest of all, ascending and relative to the slowest."""
        if not self.each:
            return (1.0,) * ranks
        rates = sorted(item.rate(precision) * item.sustained for item in self.each)
        return tuple(rate / rates[0] for rate in rates[:ranks])

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.devices // self.per_node)

    @classmethod
    def of(cls, cluster: Cluster, ranks: int | None = None, threads: int = 0) -> MachineModel:
        """Return the accelerators of a cluster, or the share of its CPUs for each rank (by default one rank a slot).

        Args:
            threads: that a rank computes with on CPUs, where it does not use its whole share; 0 for the share.

        Raises:
            ResourceError: an accelerator is not in the table.
        """
        if not cluster.accelerators:
            return _cpu_machine(cluster, ranks or cluster.slots, threads)
        nodes = [node for node in cluster.nodes if node.accelerators]
        found = {
            kind: find_accelerator(kind) if kind else _UNKNOWN_ACCELERATOR
            for kind in dict.fromkeys(node.kind for node in nodes)
        }
        missing = sorted(kind for kind, item in found.items() if item is None)
        if missing:
            raise ResourceError(
                f"the accelerator {missing[0]!r} is missing from the built-in table",
                where="cluster",
                remedy=f"describe it: trainwright.core.cluster.ACCELERATORS[{missing[0]!r}] = Accelerator(...)",
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
    """Return a device's share of the network, limited by the link to another region where there is one."""
    regions = len({node.region for node in cluster.nodes})
    told = any(node.network_bytes_per_s for node in cluster.nodes)
    if regions == 1 or told:
        return of_device
    most = max(node.accelerators for node in cluster.nodes) or 1
    return min(of_device, FAR_BYTES_PER_S / most)


CPU_CORE = Accelerator(
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
_UNKNOWN_ACCELERATOR = Accelerator(
    name="accelerator of unknown kind",
    memory_bytes=0,
    flops_per_s={"fp32": 3e13, "bf16": 1e14},
    memory_bytes_per_s=8e11,
    link_bytes_per_s=2e10,
    network_bytes_per_s=2e9,
    unsure=0.7,
    source="assumed",
)


def _cpu_machine(cluster: Cluster, ranks: int, threads: int) -> MachineModel:
    """Return equal shares of each node's CPUs; n threads on one operation are worth n ** 0.8."""
    on_a_node = -(-ranks // len(cluster.nodes))
    share = min(node.cpus for node in cluster.nodes) / on_a_node
    share = threads if 0 < threads < int(share) else share
    speed = share**_THREAD_EXPONENT if share > 1 else share
    memory = min(node.memory_bytes for node in cluster.nodes) // on_a_node
    told = min(node.network_bytes_per_s for node in cluster.nodes)
    network = told or _network(cluster, _NETWORK_BYTES_PER_S)
    core = ACCELERATORS.get(CPU_CORE.name, CPU_CORE)  # as it was measured, if it was
    device = replace(
        core,
        memory_bytes=memory,
        flops_per_s={name: rate * speed for name, rate in core.flops_per_s.items()},
        memory_bytes_per_s=core.memory_bytes_per_s * speed,
    )
    devices = on_a_node * len(cluster.nodes)
    return MachineModel(
        device=device, per_node=on_a_node, devices=devices, network_bytes_per_s=network / on_a_node,
        preemptible=cluster.preemptible, steady=len(cluster.nodes) - cluster.preemptible,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks that reduce together."""

    size: int  # number of ranks
    local: int  # number of them on one node

    @property
    def nodes(self) -> int:
        """Number of nodes that they are on."""
        return self.size // self.local


def next_stage_is_remote(machine: MachineModel, mesh: Mesh) -> bool:
    """Return whether some next stage is on another node: replica after replica fills the nodes (`core.plan`)."""
    return mesh.size > machine.per_node and machine.per_node % (mesh.size // mesh.data) > 0


def rank_group(machine: MachineModel, size: int, stride: int) -> RankGroup:
    """Return a group of ranks that are `stride` apart, on nodes that are filled one after the other."""
    local = max(1, min(size, machine.per_node // min(stride, machine.per_node)))
    while size % local:
        local -= 1
    return RankGroup(size=size, local=local)


# --- Efficiencies: how much of their data sheets real machines reach --------------------------------------------------


Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Efficiency:
    """An efficiency: its default, the standard deviation of its logarithm, and what it is a share of."""

    default: float
    spread: float
    what: str


EFFICIENCIES: Mapping[str, _Efficiency] = {
    "matmul": _Efficiency(default=0.76, spread=0.06, what="of the peak rate in large matrix products"),
    "matmul_s": _Efficiency(default=3.5e-5, spread=0.7, what="seconds more of each matrix product, whatever its size"),
    "traffic": _Efficiency(default=0.80, spread=0.3, what="of the memory's bandwidth in all other operations"),
    "scores": _Efficiency(default=1.2, spread=0.6, what="of attention's scores that is written to memory"),
    "launch_s": _Efficiency(default=2.4e-5, spread=0.5, what="seconds of the host for each operation"),
    "tensor": _Efficiency(default=0.75, spread=0.2, what="of the links' bandwidth in tensor parallelism"),
    "message_s": _Efficiency(default=3e-5, spread=0.7, what="seconds of each message inside a node"),
    "reduce": _Efficiency(default=0.75, spread=0.4, what="of the links' bandwidth in reductions of gradients"),
    "gather_s": _Efficiency(default=1e-4, spread=0.8, what="seconds of each of ZeRO's collectives, whatever its size"),
    "gather": _Efficiency(default=0.2, spread=0.7, what="of the network's bandwidth in ZeRO's gathers between nodes"),
    "network": _Efficiency(default=0.7, spread=0.4, what="of the network's bandwidth between nodes"),
    "overlap": _Efficiency(default=0.2, spread=0.9, what="of backward under which gradients are reduced"),
    "send": _Efficiency(default=0.4, spread=0.6, what="of a link's bandwidth between stages"),
    "send_s": _Efficiency(default=2.5e-4, spread=0.7, what="seconds of each message between stages"),
    "update": _Efficiency(default=0.85, spread=0.4, what="of the memory's bandwidth in the optimizer"),
    "step_s": _Efficiency(default=4e-3, spread=0.8, what="seconds of each step for everything else"),
}
EFFICIENCY_NAMES = tuple(EFFICIENCIES)
_BETWEEN_NODES = ("gather", "network", "send", "send_s")
_RESIDUAL = 0.10  # standard deviation of a shape's own error, of the logarithm
MEASUREMENT_NOISE = 0.03  # of one measurement's
_UNMODELLED = 0.08  # of what this model leaves out, measured on no machine like it
_SHAPE_SCALES = (0.7, 0.7, 0.7, 3.0, 6.0, 6.0)  # octaves over which shapes are alike; see `step_work._shape`


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Efficiencies and their uncertainty.

    Attributes:
        logs: logarithm of each efficiency over its default, in the order of `EFFICIENCY_NAMES`.
        covariance: of `logs`.
        shapes: of the measured work; see `step_work._shape`.
        kinds: of the measured work; shapes of different kinds say nothing of each other.
        residuals: weights of the shapes' errors.
        inverse: of the shapes' covariance.
        measurements: number of measurements.
        machines: device, network of each device in bytes/s and number of nodes of each measurement.
    """

    logs: tuple[float, ...] = (0.0,) * len(EFFICIENCY_NAMES)
    covariance: tuple[tuple[float, ...], ...] = tuple(
        tuple(item.spread**2 if row == column else 0.0 for column in range(len(EFFICIENCY_NAMES)))
        for row, item in enumerate(EFFICIENCIES.values())
    )
    shapes: tuple[tuple[float, ...], ...] = ()
    kinds: tuple[str, ...] = ()
    residuals: tuple[float, ...] = ()
    inverse: tuple[tuple[float, ...], ...] = ()
    measurements: int = 0
    machines: tuple[tuple[str, float, int], ...] = ()

    def covariance_on(self, device: str, network_bytes_per_s: float, nodes: int) -> Vector:
        """Return the covariance of `logs` on a machine: no narrower than assumed for what was not measured on its like.

        Steps on another device say nothing certain. Those on fewer nodes, or over another network, say nothing certain
        of what goes between nodes.
        """
        found, assumed = np.array(self.covariance), np.diag([item.spread**2 for item in EFFICIENCIES.values()])
        own = [machine for machine in self.machines if machine[0] == device]
        if not own:
            return assumed
        if nodes > max((count for _, network, count in own if network == network_bytes_per_s), default=1):
            between = [EFFICIENCY_NAMES.index(name) for name in _BETWEEN_NODES]
            found[between, :] = assumed[between, :]
            found[:, between] = assumed[:, between]
        return found

    @cached_property
    def efficiencies(self) -> Mapping[str, float]:
        """Efficiencies by name."""
        return efficiencies(np.array(self.logs))

    def residual(self, shape: tuple[float, ...], kind: str) -> tuple[float, float]:
        """Return mean and variance of the unexplained part, as a logarithm."""
        if kind not in self.kinds:
            return 0.0, _UNMODELLED**2 + _RESIDUAL**2
        near = shape_covariance(np.array([shape]), [kind], np.array(self.shapes), self.kinds)[0]
        mean = float(near @ np.array(self.residuals))
        return mean, max(_RESIDUAL**2 - float(near @ np.array(self.inverse) @ near), 0.0) + MEASUREMENT_NOISE**2


def efficiencies(logs: Vector) -> Mapping[str, float]:
    """Return efficiencies from the logarithms of their ratios to the defaults."""
    pairs = zip(EFFICIENCIES.items(), logs, strict=True)
    return {name: item.default * float(np.exp(log)) for (name, item), log in pairs}


def shape_covariance(one: Vector, kinds: Sequence[str], other: Vector, others: Sequence[str]) -> Vector:
    """Return the covariance (n, m) of the errors of shapes (n, features) with those of shapes (m, features)."""
    apart = (((one[:, None] - other[None]) / np.array(_SHAPE_SCALES)) ** 2).sum(axis=2)
    same = np.array(kinds)[:, None] == np.array(others)[None]
    found: Vector = _RESIDUAL**2 * np.exp(-0.5 * apart) * same
    return found


DEFAULT = Calibration()
