"""What there is: nodes, CPUs, accelerators, memory, links."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace

from trainwright.core.accelerators import ACCELERATORS as KINDS
from trainwright.core.accelerators import GIB, Accelerator
from trainwright.core.accelerators import accelerator as kind_of
from trainwright.core.errors import ResourceError, nearest

ACCELERATORS = ("GPU", "TPU")
_PART = re.compile(
    r"(?:(?P<nodes>\d+)x)?(?P<each>\d+)x?(?P<kind>[A-Za-z][\w-]*)(?:@(?P<network>\d+(?:\.\d+)?)Gb)?"
    r"(?:/(?P<region>[\w-]+))?(?P<spot>:spot)?"
)
FAR_BYTES_PER_S = 1.25e8  # of a node's network, below which the others are far: 1 Gb/s
_CPU_MEMORY_BYTES = 4 * GIB  # for each CPU of a node that is only imagined


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine.

    Attributes:
        name: of the machine.
        cpus: that Ray may give away.
        memory_bytes: likewise.
        accelerators: how many.
        accelerator: Ray's resource name of them (`GPU`, `TPU`) or empty.
        head: Ray's resource of the first host of a TPU slice, where this is one.
        kind: their model, as in `trainwright.core.accelerators`, or what Ray calls it.
        network_bytes_per_s: of the whole machine, one direction; 0 where it is what the accelerator usually has.
        region: of the provider, between which links are long; empty where that is not known.
        preemptible: it may be taken back at any time (a spot instance).
        coming: it does not run yet: the cluster starts it when it is asked for.
    """

    name: str
    cpus: float
    memory_bytes: int
    accelerators: int = 0
    accelerator: str = ""
    kind: str = ""
    head: str = ""
    network_bytes_per_s: float = 0.0
    region: str = ""
    preemptible: bool = False
    coming: bool = False


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines a job may use.

    Attributes:
        nodes: of it.
        possible: nodes that the cluster would start if they were asked for, named `TYPE#NUMBER`.
        unseen: why those are not known; empty where they are.
    """

    nodes: tuple[Node, ...]
    possible: tuple[Node, ...] = ()
    unseen: str = ""

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A cluster that need not be there.

        Args:
            text: `4x8xH100-80GB` for 4 nodes of 8, `8xA100-80GB` for one node, `2x16xCPU` for 2 nodes of 16 CPUs;
                `@800Gb` after it for the network of each node in Gb/s, then `/name` for its region and `:spot` where it
                may be taken back; `+` between parts that differ: `4x8xT4/east + 4x8xT4/west:spot`.

        Raises:
            ResourceError: it cannot be read, or an accelerator is not known.
        """
        nodes: list[Node] = []
        for part in text.replace(" ", "").split("+"):
            found = _PART.fullmatch(part)
            if found is None or not int(found["each"]) or found["nodes"] == "0":
                raise ResourceError(
                    f"{part!r} is no cluster", where=text, remedy="write nodes x accelerators x kind: 4x8xH100-80GB"
                )
            network = float(found["network"] or 0) * 1e9 / 8
            for _ in range(int(found["nodes"] or 1)):
                node = _imagined(f"node-{len(nodes)}", int(found["each"]), found["kind"], network, text)
                nodes.append(replace(node, region=found["region"] or "", preemptible=bool(found["spot"])))
        return cls(nodes=tuple(nodes))

    @classmethod
    def discover(cls) -> Cluster:
        """The living nodes of the Ray cluster that `RAY_ADDRESS` names or that this process is connected to.

        Raises:
            ResourceError: it cannot be reached, or no node is alive.
        """
        # By name: core must not import Ray.
        found = importlib.import_module("trainwright.runtime.cluster_discovery")
        found.connect()
        cluster: Cluster = found.discover()
        return cluster

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
    def kinds(self) -> tuple[str, ...]:
        """Models of the accelerators, each once."""
        return tuple(dict.fromkeys(node.kind for node in self.nodes if node.accelerators))

    @property
    def far(self) -> bool:
        """Whether some nodes are far from others: in another region, or behind a network of less than 1 Gb/s."""
        slow = any(0 < node.network_bytes_per_s < FAR_BYTES_PER_S for node in self.nodes)
        return len(self.nodes) > 1 and (slow or len({node.region for node in self.nodes}) > 1)

    @property
    def uneven(self) -> bool:
        """Whether workers that step alone may be worth it: nodes differ, may be taken back, or are far apart."""
        return len(self.kinds) > 1 or self.preemptible > 0 or self.far

    @property
    def preemptible(self) -> int:
        """Nodes that may be taken back."""
        return sum(node.preemptible for node in self.nodes)

    @property
    def slots(self) -> int:
        """Workers that a job gets when it names no number.

        One for each accelerator; without accelerators two CPU slots on each node of two CPUs or more, each with
        its share of the node's threads.
        """
        if self.accelerators:
            return self.accelerators
        return sum(2 if node.cpus >= 2 else 1 for node in self.nodes)

    @property
    def coming(self) -> tuple[Node, ...]:
        """Nodes that have to be started first."""
        return tuple(node for node in self.nodes if node.coming)

    @property
    def grows(self) -> bool:
        """Whether there are nodes that do not run yet."""
        return bool(self.possible or self.coming)

    def grown(self, number: int) -> Cluster:
        """With so many of the possible nodes, the first ones."""
        asked = tuple(replace(node, coming=True) for node in self.possible[:number])
        return replace(self, nodes=(*self.nodes, *asked), possible=self.possible[number:])

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
        kinds = " and ".join(kind for kind in self.kinds if kind) or self.accelerator
        devices = f"{self.accelerators} {kinds}" if self.accelerators else "no accelerators"
        regions = len({node.region for node in self.nodes})
        apart = f", in {regions} regions" if regions > 1 else ""
        spot = f", {self.preemptible} preemptible" if self.preemptible else ""
        coming = f", {len(self.coming)} to be started first" if self.coming else ""
        return f"{count} node{'s' if count != 1 else ''}, {self.cpus:g} CPUs, {devices}{apart}{spot}{coming}"


def _imagined(name: str, each: int, kind: str, network: float, text: str) -> Node:
    """A node that is only described."""
    if kind.upper() == "CPU":
        return Node(name=name, cpus=each, memory_bytes=each * _CPU_MEMORY_BYTES, network_bytes_per_s=network)
    found: Accelerator | None = kind_of(kind)
    if found is None:
        raise ResourceError(
            f"the accelerator {kind!r} is not known",
            where=text,
            remedy=f"{nearest(kind, KINDS)}; or describe it: trainwright.core.accelerators.ACCELERATORS[{kind!r}] = "
            "Accelerator(...)",
        )
    return Node(
        name=name,
        cpus=12.0 * each,
        memory_bytes=2 * each * found.memory_bytes,
        accelerators=each,
        accelerator=found.resource,
        kind=found.name,
        network_bytes_per_s=network,
    )
