"""What there is: nodes, CPUs, accelerators, memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

ACCELERATORS = ("GPU", "TPU")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine. `accelerator` is Ray's resource name (`GPU`, `TPU`) or empty; `kind` its model."""

    name: str
    cpus: float
    memory_bytes: int
    accelerators: int = 0
    accelerator: str = ""
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines a job may use."""

    nodes: tuple[Node, ...]

    @property
    def cpus(self) -> float:
        """CPUs of all nodes."""
        return sum(node.cpus for node in self.nodes)

    @property
    def accelerators(self) -> int:
        """Accelerators of all nodes."""
        return sum(node.accelerators for node in self.nodes)

    @property
    def accelerator(self) -> str:
        """Ray's resource name of the accelerators; empty without any."""
        return next((node.accelerator for node in self.nodes if node.accelerators), "")

    @property
    def slots(self) -> int:
        """Workers that a job gets when it names no number.

        One for each accelerator; without accelerators two CPU slots on each node of two CPUs or more, each with
        its share of the node's threads.
        """
        if self.accelerators:
            return self.accelerators
        return sum(2 if node.cpus >= 2 else 1 for node in self.nodes)

    def only(self, accelerator: str) -> Cluster:
        """The nodes that have this accelerator."""
        return Cluster(
            nodes=tuple(node for node in self.nodes if node.accelerator == accelerator and node.accelerators)
        )

    def without_accelerators(self) -> Cluster:
        """The same nodes, their accelerators left alone."""
        return Cluster(nodes=tuple(replace(node, accelerators=0, accelerator="", kind="") for node in self.nodes))

    def __str__(self) -> str:
        count = len(self.nodes)
        devices = f"{self.accelerators} {self.accelerator}" if self.accelerators else "no accelerators"
        return f"{count} node{'s' if count != 1 else ''}, {self.cpus:g} CPUs, {devices}"
