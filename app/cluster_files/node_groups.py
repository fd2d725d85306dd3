"""The nodes that a file asks for: what they cost, and whether a plan has room on them."""

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
        item: where the file says so.
        name: of the type.
        low: nodes kept running.
        high: nodes at most.
        devices: of one node, by Ray's name; what the file or the list of machines says.
        machine: what is rented; None where the list does not know it.
        spot: whether it may be taken away.
    """

    item: YamlItem
    name: str
    low: int
    high: int
    devices: dict[str, int]
    machine: InstanceType | None = None
    spot: bool = False

    @property
    def price(self) -> float | None:
        """Dollars an hour of one."""
        if self.machine is None:
            return None
        return self.machine.spot_price if self.spot else self.machine.price

    def room(self, need: Need, *, most: bool) -> int:
        """Workers that fit on all nodes, with as many as there can be or as few."""
        hosts = self.machine.hosts if self.machine else 1
        have = self.devices.get(need.resource or self.resource, 0)
        return (self.high if most else self.low) * hosts * (have // need.each)

    @property
    def resource(self) -> str:
        """Ray's name for what these nodes compute with."""
        return next((name for name in ("GPU", "TPU") if self.devices.get(name)), "CPU")


def price_findings(file: YamlItem, groups: Sequence[NodeGroup], limit: int) -> list[Finding]:
    """What the cluster costs an hour, at the least and with `limit` nodes beside the head, the dearest ones."""
    if not groups or any(group.price is None for group in groups if group.high):
        return []
    low = sum((group.price or 0.0) * group.low for group in groups)
    dearest = sorted((group.price or 0.0 for group in groups for _ in range(group.high - group.low)), reverse=True)
    high = low + sum(dearest[: max(limit + 1 - sum(group.low for group in groups), 0)])
    spot = ", spot prices as a usual share of the list's" if any(group.spot for group in groups) else ""
    said = f"${low:,.2f} to ${high:,.2f} an hour by lists of mid-2025{spot}; without disks and traffic"
    return [file.finding("price", "good", said)]


def room(file: YamlItem, groups: Sequence[NodeGroup], need: Need, limit: int | None = None) -> list[Finding]:
    """Whether a plan's workers fit.

    Args:
        file: the whole file.
        groups: its nodes, the head's left out.
        need: of the plan.
        limit: nodes at most, over all groups.
    """
    if not groups:
        return []
    most = _most(groups, need, limit)
    least = sum(group.room(need, most=False) for group in groups)
    resource = need.resource or groups[0].resource
    wanted = f"{need.workers} worker{'s' if need.workers != 1 else ''} of {need.each} {resource}"
    if most < need.workers:
        return [
            file.finding(
                "workers",
                "bad",
                f"the plan needs {wanted}; at most {most} fit on the nodes of this file",
                "raise the most nodes of a type and of all, take larger machines, or plan with --workers",
            )
        ]
    kept = f", {least} of them on the nodes that are kept running" if least < most else ""
    return [file.finding("workers", "good", f"{wanted} fit; at most {most}{kept}")]


def _most(groups: Sequence[NodeGroup], need: Need, limit: int | None) -> int:
    """Workers that fit at most: the nodes with the most room first."""
    left, total = limit if limit is not None else sum(group.high for group in groups), 0
    for group in sorted(groups, key=lambda group: -group.room(need, most=True) / max(group.high, 1)):
        nodes = min(left, group.high)
        total += group.room(need, most=True) * nodes // max(group.high, 1)
        left -= nodes
    return total


# --- What a job's plan needs of a cluster -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a job's plan needs of a cluster.

    Attributes:
        workers: how many there are.
        each: devices of one worker; all of them are on one node.
        resource: Ray's name for the devices: GPU, TPU or CPU; empty for what the nodes have.
    """

    workers: int
    each: int = 1
    resource: str = ""


# --- Machines to rent, with their accelerators and list prices --------------------------------------------------------


_HOST_CHIPS = {"v5litepod": 4, "v6e": 4}  # of slices of several hosts; single hosts have up to 8
_KINDS = {"v3": "TPU-V3", "v4": "TPU-V4", "v5litepod": "TPU-V5E", "v5p": "TPU-V5P", "v6e": "TPU-V6E"}
_BY_CHIP = ("v5litepod", "v6e")  # the others count two cores for each chip


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """A machine, or a TPU slice of several.

    Attributes:
        name: of the offer.
        cpus: virtual ones.
        memory_gib: of all of it.
        kind: of accelerator, as in trainwright.core.cluster; empty without one.
        accelerators: how many.
        price: US dollars an hour on demand, by the list; None where it is not known.
        spot_price: that of one which may be taken away, roughly.
        hosts: machines that it is made of.
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
        """Ray's name for what it computes with."""
        return ACCELERATORS[self.kind].resource if self.kind else "CPU"

    @property
    def spot_price(self) -> float | None:
        """By the share of the price that the accelerator's spot price is; a third without one."""
        if self.price is None:
            return None
        known = ACCELERATORS.get(self.kind)
        share = known.spot_price / known.price if known and known.price and known.spot_price else 1 / 3
        return self.price * share


@cache
def instance_types(cloud: str) -> dict[str, InstanceType]:
    """By name, of `aws`, `gcp`, or `gpu`: what is added to machines of Google Cloud."""
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
    """The slice of an accelerator type such as `v5litepod-16` or `v4-8`; None where there is no such generation.

    The number counts chips from v5e on (not v5p), before two cores for each chip (cloud.google.com/tpu/docs).
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
    """Of TPUs, by the name that Google Cloud gives them."""
    return list(_KINDS)
