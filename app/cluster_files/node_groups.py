"""The groups of nodes that a cluster file describes, the machines that clouds rent, and their prices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from trainwright.cluster_files.yaml_checks import YamlItem
from trainwright.core.cluster import ACCELERATORS, find_accelerator
from trainwright.core.errors import Finding


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one type.

    Attributes:
        item: the type in the file.
        name: of the type.
        low: least number of nodes.
        high: greatest number of nodes.
        machine: the machine to rent; None if it is not in the list.
        spot: whether the nodes are preemptible.
    """

    item: YamlItem
    name: str
    low: int
    high: int
    machine: InstanceType | None = None
    spot: bool = False

    @property
    def price(self) -> float | None:
        """Return US dollars an hour of one node."""
        if self.machine is None:
            return None
        return self.machine.spot_price if self.spot else self.machine.price


def price_findings(file: YamlItem, groups: Sequence[NodeGroup], limit: int) -> list[Finding]:
    """Return what the cluster costs an hour with the fewest nodes, and with the most expensive nodes that may start.

    Args:
        file: the cluster file.
        groups: its groups of nodes.
        limit: greatest number of nodes without the head.
    """
    if not groups or any(group.price is None for group in groups if group.high):
        return []
    low = sum((group.price or 0.0) * group.low for group in groups)
    dearest = sorted((group.price or 0.0 for group in groups for _ in range(group.high - group.low)), reverse=True)
    high = low + sum(dearest[: max(limit + 1 - sum(group.low for group in groups), 0)])
    spot = ", spot prices estimated from them" if any(group.spot for group in groups) else ""
    said = f"about ${low:,.2f} to ${high:,.2f} an hour by price lists of mid-2025{spot}; without disks and traffic"
    return [file.finding("price", "good", said)]


# --- Machines to rent, with their accelerators and list prices --------------------------------------------------------


_HOST_CHIPS = {"v5litepod": 4, "v6e": 4}  # chips of a host in slices of several hosts; single hosts have up to 8
_KINDS = {"v3": "TPU-V3", "v4": "TPU-V4", "v5litepod": "TPU-V5E", "v5p": "TPU-V5P", "v6e": "TPU-V6E"}
_BY_CHIP = ("v5litepod", "v6e")  # the number in their names counts chips; in others two cores for each chip


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """A machine, or a TPU slice of one or several hosts.

    Attributes:
        name: as the cloud writes it.
        cpus: virtual CPUs.
        memory_gib: memory of the host.
        kind: kind of accelerator, as in trainwright.core.cluster; empty without one.
        accelerators: their number.
        price: US dollars an hour on demand; None if it is not in the list.
        hosts: number of hosts of a TPU slice; 1 for machines.
    """

    name: str
    cpus: int = 0
    memory_gib: float = 0.0
    kind: str = ""
    accelerators: int = 0
    price: float | None = None
    hosts: int = 1

    @property
    def resource(self) -> str:
        """Return Ray's name of the device that computes."""
        return ACCELERATORS[self.kind].resource if self.kind else "CPU"

    @property
    def spot_price(self) -> float | None:
        """Return an estimate: the accelerator's usual share of the price on demand; a third without accelerator."""
        if self.price is None:
            return None
        known = ACCELERATORS.get(self.kind)
        share = known.spot_price / known.price if known and known.price and known.spot_price else 1 / 3
        return self.price * share


@cache
def instance_types(cloud: str) -> dict[str, InstanceType]:
    """Return machines by name for `aws` or `gcp`, or for `gpu` the accelerators to add to machines of Google Cloud."""
    text = (resources.files("trainwright.cluster_files") / "machines.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {row[1]: _parse_instance_type(row) for row in rows if row[0] == cloud}


def _parse_instance_type(row: list[str]) -> InstanceType:
    _, name, cpus, memory, kind, count, price = row
    return InstanceType(
        name=name,
        cpus=int(cpus),
        memory_gib=float(memory),
        kind="" if kind == "-" else kind,
        accelerators=int(count),
        price=None if price == "-" else float(price),
    )


def parse_tpu_slice(name: str) -> InstanceType | None:
    """Return the slice of an accelerator type such as `v5litepod-16` or `v4-8`; None for an unknown generation.

    The number counts chips for v5e and v6e, and cores, two for each chip, for the others (cloud.google.com/tpu/docs).
    """
    found = re.fullmatch(r"(v\d[a-z]*)-([1-9]\d*)", name)
    if found is None or found[1] not in _KINDS:
        return None
    kind = find_accelerator(_KINDS[found[1]])
    assert kind is not None and kind.price is not None, "TPUs are in the table with their prices"
    chips = int(found[2]) if found[1] in _BY_CHIP else int(found[2]) // 2
    if not chips:
        return None
    single = 8 if found[1] in _BY_CHIP else 4
    hosts = 1 if chips <= single else -(-chips // _HOST_CHIPS.get(found[1], 4))
    return InstanceType(name=name, kind=kind.name, accelerators=chips, price=kind.price * chips, hosts=hosts)


def tpu_generations() -> list[str]:
    """Return the generations of TPUs by Google Cloud's names."""
    return list(_KINDS)
