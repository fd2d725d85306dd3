"""Placement groups for the worker slots of a run, created with the first slot."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainwright.core.errors import TrainwrightError
from trainwright.core.plan import Plan, WorkerResources, slots_per_node, tensor_workers

PLACED_WITHIN_S = 3.0  # Ray reserves free resources at once, unless its head is busy
RETRY_PLACEMENT_S = 30.0  # before the next attempt
_KIND_SHARE = 0.001  # of Ray's resource of an accelerator model: each node has 1, and any number of workers may use it
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}  # Ray's options for resources that have one
_NODE_LABEL = "ray.io/node-id"
_STRATEGY = {True: "PACK", False: "SPREAD"}  # accelerators close together; CPU slots over the nodes, data beside them


class WorkerPlacement:
    """Where a run's processes are placed. By default each slot has a new process, which another one can replace."""

    name: str  # name of these resources if another process holds them; otherwise prefix of the run's placement groups

    def options(self, slot: int, *, beside: bool = False) -> dict[str, Any]:
        """Return Ray's options for a process in a slot; one `beside` another takes no resources."""
        raise NotImplementedError

    def lent(self, slot: int) -> tuple[str, ...] | None:
        """Return ids of accelerators that another process holds for a slot; None if Ray gives a slot its own."""

    def process(self, slot: int) -> Any:
        """Return the handle of a process that exists already for a slot; None to start one."""

    def lost(self, slot: int, cause: str) -> TrainwrightError | None:
        """Return the error that ends the run if the process of a slot cannot be replaced; None if it can."""

    def found(self, slot: int, node_id: str) -> None:
        """Note the node of a slot's process."""

    def home(self, slot: int) -> str | None:
        """Return Ray's id of the node of a slot; None where it is not known."""

    def exclude_node(self, node_id: str) -> None:
        """Place nothing on this node from now on, if there is another."""

    def inherit(self, slot: int, group: PlacementGroup) -> None:
        """Note the placement group of a worker that was taken over."""

    def give_back(self) -> None:
        """Release all resources."""


class PlacementGroups(WorkerPlacement):
    """The placement groups of a run: one with a bundle for each node, or one for each slot if the size may change.

    Ray never divides a bundle. If other jobs use the nodes too, a bundle holds the slots of one tensor group. Servers,
    whose slots come first, have a group of their own, over as many nodes as possible.

    Args:
        elastic: whether the number of workers may change.
        name: prefix of the groups' names, by which the next driver finds unused ones.
        lasting: whether the groups outlive the process that created them, so that another one can take over.
    """

    def __init__(self, plan: Plan, *, elastic: bool, name: str = "", lasting: bool = True) -> None:
        self._placement, self._elastic, self._workers = plan.placement, elastic, plan.workers
        self._first = plan.processes - plan.workers  # slot of a worker
        self._served: PlacementGroup | None = None
        self.name, self._lifetime = name, "detached" if lasting else None
        self._together = 1 if elastic else tensor_workers(plan.mesh, plan.devices_per_worker)
        self._ends: tuple[int, ...] = ()  # the first slot after each bundle of the one group
        self._groups: dict[int, PlacementGroup] = {}
        self._moved: dict[int, PlacementGroup] = {}  # by tensor group
        self._homes: dict[int, str] = {}  # Ray's id of the node, by tensor group
        self._excluded: set[str] = set()
        self._torn_until_s = self._full_until_s = 0.0  # no room for all of the one group, for one more tensor group

    def of(self, slot: int) -> PlacementGroupSchedulingStrategy:
        """Return where a slot's process runs: on no excluded node, if another has resources."""
        if slot < self._first:
            return self._of_server(slot)
        number = self._number(slot)
        if time.monotonic() >= self._full_until_s and (
            self._homes.get(number) in self._excluded or self._stuck(number)
        ):
            self._move(number)
        if number in self._moved:
            return PlacementGroupSchedulingStrategy(self._moved[number], placement_group_bundle_index=0)
        if self._elastic:
            if slot not in self._groups:
                self._groups[slot] = self._group([1])
            return PlacementGroupSchedulingStrategy(self._groups[slot], placement_group_bundle_index=0)
        if 0 not in self._groups:
            self._hold(self._reserve())
        index = bisect_right(self._ends, slot - self._first)
        return PlacementGroupSchedulingStrategy(self._groups[0], placement_group_bundle_index=index)

    def options(self, slot: int, *, beside: bool = False) -> dict[str, Any]:
        """Return Ray's options for a process in a slot; one `beside` another takes no resources."""
        held = {"num_cpus": 0} if beside else worker_resources(self._placement, serves=slot < self._first)
        return {**held, "scheduling_strategy": self.of(slot)}

    def found(self, slot: int, node_id: str) -> None:
        """Note the node of a slot's process."""
        if slot >= self._first:
            self._homes[self._number(slot)] = node_id

    def home(self, slot: int) -> str | None:
        """Return Ray's id of the node of a slot; None where it is not known."""
        return self._homes.get(self._number(slot)) if slot >= self._first else None

    def exclude_node(self, node_id: str) -> None:
        """Place nothing on this node from now on, if there is another."""
        self._excluded.add(node_id)

    def inherit(self, slot: int, group: PlacementGroup) -> None:
        """Note the group of a worker that was taken over: its slot's own, that of all, or one that it was moved to."""
        if slot < self._first:
            self._served = group
        elif self._elastic:
            self._groups[slot] = group
        elif sum(self._shares(group)) == self._workers:
            self._hold(group)
        else:
            self._groups[-1 - len(self._groups)] = self._moved[self._number(slot)] = group

    def give_back(self) -> None:
        """Release all resources."""
        if self._served is not None:
            remove_placement_group(self._served)
        while self._groups:
            remove_placement_group(self._groups.popitem()[1])

    def _number(self, slot: int) -> int:
        """Return the number of a slot's tensor group."""
        return (slot - self._first) // self._together

    def _of_server(self, slot: int) -> PlacementGroupSchedulingStrategy:
        if self._served is None:
            bundles = [_bundle(self._placement, serves=True)] * self._first
            self._served = self._new(bundles, strategy="SPREAD")
        return PlacementGroupSchedulingStrategy(self._served, placement_group_bundle_index=slot)

    # --- the one group ------------------------------------------------------------------------------------

    def _hold(self, group: PlacementGroup) -> None:
        self._groups[0], self._ends = group, tuple(accumulate(self._shares(group)))

    def _reserve(self) -> PlacementGroup:
        """Reserve a bundle for each node's share if the resources are free; otherwise one for each tensor group."""
        shares = [self._together * room for room in self._even() if room]
        if len(shares) > 1:
            group = self._group(shares)
            if _placed(group):
                return group
        return self._group([self._together] * (self._workers // self._together))

    def _even(self) -> tuple[int, ...]:
        """Return the tensor groups on each node; empty if the present nodes cannot hold all."""
        needs, groups = _bundle(self._placement, self._together), self._workers // self._together
        capacities = [
            min(int(resources.get(name, 0.0) / amount + 1e-6) for name, amount in needs.items())
            for resources in _alive().values()
        ]
        if sum(capacities) < groups:
            return ()
        return slots_per_node(capacities, groups, close=bool(self._placement.accelerators))

    def _group(self, shares: Sequence[int]) -> PlacementGroup:
        """Create a group with bundles of these numbers of slots."""
        return self._new(node_bundles(self._placement, shares), strategy=_STRATEGY[bool(self._placement.accelerators)])

    def _new(self, bundles: list[dict[str, float]], **options: Any) -> PlacementGroup:
        name = f"{self.name}/{uuid.uuid4().hex[:12]}"
        group: PlacementGroup = placement_group(bundles, name=name, lifetime=self._lifetime, **options)
        return group

    def _shares(self, group: PlacementGroup) -> list[int]:
        """Return the slots of each bundle of a group."""
        return [round(spec["CPU"] / self._placement.cpus) for spec in group.bundle_specs]

    # --- elsewhere ----------------------------------------------------------------------------------------

    def _stuck(self, number: int) -> bool:
        """Whether the node of a tensor group is lost, and no other one has resources for that node's share."""
        home = self._homes.get(number)
        if self._elastic or number in self._moved or home is None or home in _alive():
            return False
        if time.monotonic() >= self._torn_until_s and not self._groups[0].wait(PLACED_WITHIN_S):
            self._torn_until_s = time.monotonic() + RETRY_PLACEMENT_S
        return time.monotonic() < self._torn_until_s

    def _move(self, number: int) -> None:
        """Reserve a bundle on a node that is not excluded, if possible; the old one stays reserved, and empty."""
        elsewhere = [{_NODE_LABEL: f"!in({','.join(sorted(self._excluded))})"}] if self._excluded else None
        group = self._new([_bundle(self._placement, self._together)], bundle_label_selector=elsewhere)
        if _placed(group):
            self._groups[-1 - len(self._groups)] = self._moved[number] = group
            self._homes.pop(number, None)  # not known before the first of its processes is up there
        else:
            self._full_until_s = time.monotonic() + RETRY_PLACEMENT_S


def _placed(group: PlacementGroup) -> bool:
    """Whether a group gets its resources at once; otherwise, or if the wait is interrupted, it is removed."""
    placed = False
    try:
        placed = group.wait(PLACED_WITHIN_S)
    finally:
        if not placed:
            remove_placement_group(group)
    return placed


def _alive() -> dict[str, dict[str, float]]:
    """Return the resources of all living nodes, by Ray's id."""
    listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["Resources"] for node in listed if node["Alive"]}


# --- Resources in Ray's terms -----------------------------------------------------------------------------------------


def worker_resources(placement: WorkerResources, serves: bool = False) -> dict[str, Any]:
    """Return Ray's options for the resources of a worker, or of a process that `serves` workers."""
    bundle = _bundle(placement, serves=serves)
    options: dict[str, Any] = {_OPTIONS[name]: bundle.pop(name) for name in _OPTIONS if name in bundle}
    return {**options, "resources": bundle} if bundle else options


def _bundle(placement: WorkerResources, slots: int = 1, *, serves: bool = False) -> dict[str, float]:
    """Return the resources of some slots."""
    if serves:
        return {"CPU": placement.server_cpus}
    bundle = {"CPU": slots * placement.cpus}
    if placement.accelerators:
        bundle[placement.accelerator] = slots * placement.accelerators
    if placement.kind:
        bundle[f"accelerator_type:{placement.kind}"] = slots * _KIND_SHARE
    return bundle


def node_bundles(placement: WorkerResources, shares: Sequence[int]) -> list[dict[str, float]]:
    """Return a bundle for each node's share of the slots; the first one has the head of a TPU slice, if any."""
    found = [_bundle(placement, slots) for slots in shares]
    if placement.head:
        found[0][placement.head] = 1.0
    return found


def device_names(plan: Plan) -> tuple[str, ...]:
    """Return a worker's devices by the framework's names; Ray shows a worker only its own, numbered from 0."""
    device = {"GPU": "cuda", "TPU": "tpu"}.get(plan.placement.accelerator, "cpu")
    return tuple(f"{device}:{number}" if device != "cpu" else "cpu" for number in range(plan.devices_per_worker))
