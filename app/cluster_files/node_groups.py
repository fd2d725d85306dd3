"""The nodes that a file asks for: what they cost, and whether a plan has room on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster_files.instance_catalogue import Machine
from trainwright.cluster_files.requirement import Need
from trainwright.cluster_files.yaml_tree import Item
from trainwright.core.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Group:
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

    item: Item
    name: str
    low: int
    high: int
    devices: dict[str, int]
    machine: Machine | None = None
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


def prices(file: Item, groups: Sequence[Group], limit: int) -> list[Finding]:
    """What the cluster costs an hour, at the least and with `limit` nodes beside the head, the dearest ones."""
    if not groups or any(group.price is None for group in groups if group.high):
        return []
    low = sum((group.price or 0.0) * group.low for group in groups)
    dearest = sorted((group.price or 0.0 for group in groups for _ in range(group.high - group.low)), reverse=True)
    high = low + sum(dearest[: max(limit + 1 - sum(group.low for group in groups), 0)])
    spot = ", spot prices as a usual share of the list's" if any(group.spot for group in groups) else ""
    said = f"${low:,.2f} to ${high:,.2f} an hour by lists of mid-2025{spot}; without disks and traffic"
    return [file.finding("price", "good", said)]


def room(file: Item, groups: Sequence[Group], need: Need, limit: int | None = None) -> list[Finding]:
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


def _most(groups: Sequence[Group], need: Need, limit: int | None) -> int:
    """Workers that fit at most: the nodes with the most room first."""
    left, total = limit if limit is not None else sum(group.high for group in groups), 0
    for group in sorted(groups, key=lambda group: -group.room(need, most=True) / max(group.high, 1)):
        nodes = min(left, group.high)
        total += group.room(need, most=True) * nodes // max(group.high, 1)
        left -= nodes
    return total
