"""The cluster: nodes with CPUs, accelerators, memory and links, and the table of known accelerators.

Rates are dense, without sparsity, of one device; links count one direction. Sources are the data sheets named with each
entry; prices are list prices on demand of the named offer, for one device, and change with time.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from trainwright.core.errors import ResourceError, nearest

_GB = 10**9
_GIB = 2**30
# catalogs/v8 of skypilot-org/skypilot-catalog: aws/vms.csv at e385a0d3, gcp/vms.csv at 8427bbff. The files have no
# dates; the folder is younger than April 2025. Spot is the median over the zones of the region.
_CATALOGUE = "SkyPilot catalogue v8"


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of accelerator."""

    name: str  # with its memory, such as `A100-80GB`
    memory_bytes: int  # of one device
    flops_per_s: Mapping[str, float] = field(hash=False)  # peak rate by precision (`fp32`, `tf32`, `fp16`, `bf16`)
    memory_bytes_per_s: float  # of the device's own memory
    link_bytes_per_s: float  # to the other devices of the node, one direction
    network_bytes_per_s: float  # its share of the node's network, one direction, unless the cluster says otherwise
    # share of the peak rate that its power limit allows in large matrix products, relative to an A100
    sustained: float = 1.0
    # rate of a fused attention kernel relative to large matrix products: what fits MosaicML's published steps of 16k to
    # 64k tokens on A100 and H100 best, when all scores are counted and not those before each token alone
    attention: float = 0.7
    host: float = 1.0  # time of its host for each operation and step, relative to the host of a GPU
    unsure: float = 0.0  # standard deviation of the logarithm of its speed, where that is assumed
    node: int = 8  # usual number of devices of a node
    price: float | None = None  # US dollars an hour; None where there is no usual offer
    spot_price: float | None = None  # the same for preemptible machines
    price_source: str = ""  # where and when the prices were
    source: str = ""  # of the other figures
    data_sheet: bool = False  # the peak rates are those of its manufacturer
    aliases: tuple[str, ...] = field(default=())  # other names, such as Ray's `accelerator_type` or the driver's name
    resource: str = "GPU"  # Ray's resource name

    @property
    def apart(self) -> bool:
        """Whether it has its own memory, unlike a share of the host's CPUs."""
        return self.resource != "CPU"

    def rate(self, precision: str) -> float:
        """Return peak operations a second; half precisions stand in for each other, anything else computes in fp32."""
        for name in (precision, *_STAND_INS.get(precision, ()), "fp32"):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        raise KeyError(precision)


_STAND_INS = {"fp16": ("bf16",), "bf16": ("fp16",)}


def _nvidia(
    name: str,
    memory_gib: float,
    rates: Mapping[str, float],
    memory: float,
    link: float,
    network: float,
    *,
    price: tuple[float, float] | None = None,
    node: int = 8,
    sustained: float = 1.0,
    attention: float = Accelerator.attention,
    aliases: tuple[str, ...] = (),
) -> Accelerator:
    """Make an accelerator from rates in Tflop/s, bandwidths in GB/s, and a node's prices (on demand, spot) in dollars.

    The memory is what torch reports, `torch.cuda.get_device_properties(0).total_memory`: less than the name says.
    """
    return Accelerator(
        name=name,
        memory_bytes=int(memory_gib * _GIB),
        flops_per_s={precision: rate * 1e12 for precision, rate in rates.items()},
        memory_bytes_per_s=memory * _GB,
        link_bytes_per_s=link * _GB,
        network_bytes_per_s=network * _GB,
        node=node,
        sustained=sustained,
        attention=attention,
        price=price[0] / node if price else None,
        spot_price=price[1] / node if price else None,
        price_source=f"AWS us-east-1, {_CATALOGUE}" if price else "",
        source=f"NVIDIA {name} data sheet",
        data_sheet=True,
        aliases=aliases,
    )


def _tpu(
    name: str,
    memory_gb: int,
    bf16: float,
    memory: float,
    link: float,
    price: tuple[float, float],
    aliases: tuple[str, ...] = (),
) -> Accelerator:
    return Accelerator(
        name=name,
        memory_bytes=memory_gb * _GIB,
        flops_per_s={"bf16": bf16 * 1e12, "fp32": bf16 * 1e12 / 2},
        memory_bytes_per_s=memory * _GB,
        link_bytes_per_s=link * _GB,
        network_bytes_per_s=link * _GB,  # the interconnect joins the chips of all hosts of a slice
        node=4,
        price=price[0] / 4,
        spot_price=price[1] / 4,
        price_source=f"Google Cloud us-central, {_CATALOGUE}",
        source="Google Cloud TPU system architecture; fp32 as two passes of bf16",
        data_sheet=True,
        aliases=aliases,
        resource="TPU",
    )


_AMPERE = {"fp16": 312, "bf16": 312, "tf32": 156, "fp32": 19.5}
_HOPPER = {"fp16": 989, "bf16": 989, "tf32": 494, "fp32": 67}
_BLACKWELL = {"fp16": 2250, "bf16": 2250, "tf32": 1125, "fp32": 75}
_since_hopper = partial(_nvidia, sustained=0.78, attention=0.56)
_BUILT_IN = (
    _nvidia("P40-24GB", 22.38, {"fp32": 11.8}, 346, 16, 1.25, node=8),
    _nvidia("P100-16GB", 15.89, {"fp16": 21.2, "fp32": 10.6}, 732, 80, 1.25, aliases=("P100",)),
    _nvidia("V100-16GB", 15.77, {"fp16": 125, "fp32": 15.7}, 900, 150, 0.39, price=(24.48, 4.16), aliases=("V100",)),
    _nvidia("V100-32GB", 31.74, {"fp16": 125, "fp32": 15.7}, 900, 150, 1.56, price=(31.212, 6.71)),
    _nvidia("T4-16GB", 14.56, {"fp16": 65, "fp32": 8.1}, 320, 16, 1.5, node=4, price=(3.912, 1.28), aliases=("T4",)),
    _nvidia(
        "A10G-24GB", 22.06, {"fp16": 70, "bf16": 70, "tf32": 35, "fp32": 31.2}, 600, 32, 1.56, price=(16.288, 5.11)
    ),
    _nvidia("L4-24GB", 21.95, {"fp16": 121, "bf16": 121, "tf32": 60, "fp32": 30.3}, 300, 32, 1.56, price=(13.35, 4.48)),
    _nvidia(
        "L40S-48GB", 44.39, {"fp16": 362, "bf16": 362, "tf32": 183, "fp32": 91.6}, 864, 32, 6.25, price=(30.131, 10.23)
    ),
    _nvidia("RTX4090-24GB", 23.64, {"fp16": 165, "bf16": 165, "tf32": 82.6, "fp32": 82.6}, 1008, 32, 1.25, node=4),
    _nvidia(
        "A100-40GB",
        39.39,
        _AMPERE,
        1555,
        300,
        6.25,
        price=(21.958, 12.50),
        aliases=("A100-PCIE-40GB", "A100-SXM4-40GB"),
    ),
    _nvidia(
        "A100-80GB",
        79.14,
        _AMPERE,
        2039,
        300,
        25,
        price=(27.447, 10.59),
        aliases=("A100", "A100-SXM4-80GB", "A100-80G"),
    ),
    _since_hopper("H100-80GB", 79.1, _HOPPER, 3352, 450, 50, price=(55.04, 31.04), aliases=("H100", "H100-80GB-HBM3")),
    _since_hopper("H200-141GB", 139.8, _HOPPER, 4800, 450, 50, price=(63.296, 19.54), aliases=("H200",)),
    _since_hopper("B200-180GB", 178.3, _BLACKWELL, 7700, 900, 50, price=(113.93, 19.09), aliases=("B200",)),
    _tpu("TPU-V3", 32, 123, 900, 82, (8.00, 2.04), ("TPU-v3",)),
    _tpu("TPU-V4", 32, 275, 1228, 150, (12.88, 3.69), ("TPU-v4",)),
    _tpu("TPU-V5E", 16, 197, 819, 100, (4.80, 0.98), ("TPU-V5LITEPOD", "TPU-v5e")),
    _tpu("TPU-V5P", 95, 459, 2765, 300, (16.80, 3.71), ("TPU-v5p",)),
    _tpu("TPU-V6E", 32, 918, 1640, 224, (10.80, 2.29), ("TPU-v6e",)),
)
ACCELERATORS: dict[str, Accelerator] = {item.name: item for item in _BUILT_IN}


def find_accelerator(kind: str) -> Accelerator | None:
    """Return the accelerator with a name in any spelling; None if the table has none."""
    name = _normalized(kind)
    for item in ACCELERATORS.values():
        if name in map(_normalized, (item.name, *item.aliases)):
            return item
    sizes = [item for item in ACCELERATORS.values() if _normalized(item.name.rpartition("-")[0]) == name]
    return sizes[0] if len(sizes) == 1 else None


def _normalized(kind: str) -> str:
    """Remove what manufacturers and Ray add to a name."""
    text = kind.upper().removeprefix("NVIDIA").removeprefix("TESLA")
    return "".join(character for character in text if character.isalnum()).removeprefix("GOOGLE")


# --- Cluster ----------------------------------------------------------------------------------------------------------


RAY_RESOURCES = ("GPU", "TPU")
ANY_KIND = ("AUTO", "CPU", *RAY_RESOURCES)  # what a job's `accelerator=` may be beside a model of accelerator
_PART = re.compile(
    r"(?:(?P<nodes>\d+)x)?(?P<each>\d+)x?(?P<kind>[A-Za-z][\w-]*)(?:@(?P<network>\d+(?:\.\d+)?)Gb)?"
    r"(?:/(?P<region>[\w-]+))?(?P<spot>:spot)?"
)
FAR_BYTES_PER_S = 1.25e8  # of a node's network, below which other nodes are far: 1 Gb/s
_CPU_MEMORY_BYTES = 4 * _GIB  # for each CPU of a described node


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine."""

    name: str
    cpus: float  # available to Ray
    memory_bytes: int  # available to Ray
    accelerators: int = 0  # number of accelerators
    accelerator: str = ""  # their resource name in Ray (`GPU`, `TPU`) or empty
    kind: str = ""  # model of the accelerators, as in the table above or as Ray calls it
    head: str = ""  # Ray's resource of the first host of a TPU slice, if this is one
    network_bytes_per_s: float = 0.0  # of the whole machine, one direction; 0 for the accelerator's usual network
    region: str = ""  # of the provider, with slow links to other regions; empty where unknown
    preemptible: bool = False  # it may be taken back at any time (a spot instance)
    coming: bool = False  # it does not run yet: the cluster starts it on demand


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines a job may use.

    Attributes:
        nodes: running ones, and those to be started first.
        possible: further nodes that the cluster starts on demand, named `TYPE#NUMBER`.
        unseen: why `possible` is unknown; empty where it is known.
    """

    nodes: tuple[Node, ...]
    possible: tuple[Node, ...] = ()
    unseen: str = ""

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Return the cluster that a text describes; it need not exist.

        Args:
            text: `4x8xH100-80GB` for 4 nodes of 8, `8xA100-80GB` for one node, `2x16xCPU` for 2 nodes of 16 CPUs;
                `@800Gb` after it for the network of each node in Gb/s, then `/name` for its region and `:spot` where it
                may be taken back; `+` between parts that differ: `4x8xT4/east + 4x8xT4/west:spot`.

        Raises:
            ResourceError: it cannot be read, or an accelerator is not known.
        """
        nodes: list[Node] = []
        for part in text.replace(" ", "").split("+"):
            match = _PART.fullmatch(part)
            if match is None or not int(match["each"]) or match["nodes"] == "0":
                raise ResourceError(
                    f"{part!r} is not a cluster", where=text, remedy="write nodes x accelerators x kind: 4x8xH100-80GB"
                )
            network = float(match["network"] or 0) * 1e9 / 8
            for _ in range(int(match["nodes"] or 1)):
                node = _described_node(f"node-{len(nodes)}", int(match["each"]), match["kind"], network, text)
                nodes.append(replace(node, region=match["region"] or "", preemptible=bool(match["spot"])))
        return cls(nodes=tuple(nodes))

    @classmethod
    def discover(cls) -> Cluster:
        """Return the live nodes of the Ray cluster that `RAY_ADDRESS` names or that this process is connected to.

        Raises:
            ResourceError: it cannot be reached, or no node is alive.
        """
        # By name: core must not import Ray.
        discovery = importlib.import_module("trainwright.ray_cluster.discovery")
        discovery.connect()
        cluster: Cluster = discovery.discover()
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
        """Whether some nodes are in another region, or behind a network of less than 1 Gb/s."""
        slow = any(0 < node.network_bytes_per_s < FAR_BYTES_PER_S for node in self.nodes)
        return len(self.nodes) > 1 and (slow or len({node.region for node in self.nodes}) > 1)

    @property
    def uneven(self) -> bool:
        """Whether asynchronous training may pay off: nodes differ, are preemptible, or far apart."""
        return len(self.kinds) > 1 or self.preemptible > 0 or self.far

    @property
    def preemptible(self) -> int:
        """Preemptible nodes."""
        return sum(node.preemptible for node in self.nodes)

    @property
    def slots(self) -> int:
        """Number of workers of a job that sets none.

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
        """Whether the cluster can start more nodes."""
        return bool(self.possible or self.coming)

    def grown(self, number: int) -> Cluster:
        """Return the cluster with the first `number` of its possible nodes."""
        new_nodes = tuple(replace(node, coming=True) for node in self.possible[:number])
        return replace(self, nodes=(*self.nodes, *new_nodes), possible=self.possible[number:])

    def only(self, accelerator: str) -> Cluster:
        """Return the nodes with an accelerator."""
        return Cluster(
            nodes=tuple(node for node in self.nodes if node.accelerator == accelerator and node.accelerators)
        )

    def of_kind(self, kind: str) -> Cluster:
        """Return the nodes with a model of accelerator, in any spelling that the table knows."""
        accelerator = find_accelerator(kind)
        return Cluster(
            nodes=tuple(
                node
                for node in self.nodes
                if node.accelerators
                and (node.kind == kind or (accelerator is not None and find_accelerator(node.kind) == accelerator))
            )
        )

    def without_accelerators(self) -> Cluster:
        """Return the nodes without their accelerators."""
        return Cluster(nodes=tuple(replace(node, accelerators=0, accelerator="", kind="") for node in self.nodes))

    def __str__(self) -> str:
        count = len(self.nodes)
        kinds = " and ".join(kind for kind in self.kinds if kind) or self.accelerator
        devices = f"{self.accelerators} {kinds}" if self.accelerators else "no accelerators"
        regions = len({node.region for node in self.nodes})
        region_text = f", in {regions} regions" if regions > 1 else ""
        spot = f", {self.preemptible} preemptible" if self.preemptible else ""
        coming = f", {len(self.coming)} to be started first" if self.coming else ""
        nodes, cpus = ("s" if number != 1 else "" for number in (count, self.cpus))
        return f"{count} node{nodes}, {self.cpus:g} CPU{cpus}, {devices}{region_text}{spot}{coming}"


def _described_node(name: str, count: int, kind: str, network: float, text: str) -> Node:
    """Return a node of a text description."""
    if kind.upper() == "CPU":
        return Node(name=name, cpus=count, memory_bytes=count * _CPU_MEMORY_BYTES, network_bytes_per_s=network)
    accelerator: Accelerator | None = find_accelerator(kind)
    if accelerator is None:
        raise ResourceError(
            f"the accelerator {kind!r} is not known",
            where=text,
            remedy=f"{nearest(kind, ACCELERATORS)}; or describe it: trainwright.core.cluster.ACCELERATORS[{kind!r}] = "
            "Accelerator(...)",
        )
    return Node(
        name=name,
        cpus=12.0 * count,
        memory_bytes=2 * count * accelerator.memory_bytes,
        accelerators=count,
        accelerator=accelerator.resource,
        kind=accelerator.name,
        network_bytes_per_s=network,
    )
