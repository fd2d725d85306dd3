"""Where slots are placed after a node is excluded or lost, told without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.ray_cluster import placement_groups

A, B, C = "a", "b", "c"


@dataclass
class Group:
    """A placement group that is placed or not."""

    bundle_specs: list[dict[str, float]]
    selector: list[dict[str, str]] | None
    placed: Callable[[Group], bool]
    waits: list[float]
    lifetime: str | None
    removed: bool = False

    def wait(self, timeout_s: float) -> bool:
        placed = self.placed(self)
        if not placed:
            self.waits.append(timeout_s)
        return placed


@dataclass
class Place:
    """The cluster as `rooms` sees it: which nodes live, and which groups find room."""

    alive: tuple[str, ...] = (A, B)
    placed: Callable[[Group], bool] = lambda group: True
    groups: list[Group] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    now_s: float = 0.0

    def group(
        self,
        bundles: Any,
        *,
        name: str,
        lifetime: str | None,
        bundle_label_selector: Any = None,
        strategy: str = "PACK",
    ) -> Group:
        made = Group(bundles, bundle_label_selector, lambda group: self.placed(group), self.waits, lifetime)
        self.groups.append(made)
        return made

    def remove(self, group: Group) -> None:
        group.removed = True


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    found = Place()
    monkeypatch.setattr(placement_groups, "placement_group", found.group)
    monkeypatch.setattr(placement_groups, "remove_placement_group", found.remove)
    monkeypatch.setattr(
        placement_groups, "PlacementGroupSchedulingStrategy", lambda group, **index: (group, *index.values())
    )
    monkeypatch.setattr(placement_groups, "_alive", lambda: {node: {"CPU": 4.0} for node in found.alive})
    monkeypatch.setattr(placement_groups, "time", SimpleNamespace(monotonic=lambda: found.now_s))
    return found


def held(mesh: Mesh, **how: bool) -> placement_groups.PlacementGroups:
    """Room for a plan, half of its slots on each of two nodes."""
    plan = Plan(strategy="", engine="", mesh=mesh, batch_size=8, placement=WorkerResources(cpus=1.0))
    found = placement_groups.PlacementGroups(plan, elastic=False, **how)
    for slot in range(plan.workers):
        found.of(slot)
        found.found(slot, (A, B)[2 * slot // plan.workers])
    return found


def test_a_tensor_group_leaves_a_node_as_one(place: Place) -> None:
    found = held(Mesh(data=2, tensor=2))
    found.exclude_node(B)
    spots: list[Any] = [found.of(slot) for slot in (2, 3)]
    assert spots[0] == spots[1] and spots[0][0] is place.groups[-1] and len(place.groups) == 2
    assert place.groups[-1].selector == [{"ray.io/node-id": "!in(b)"}]


def test_a_node_lost_on_a_full_cluster_is_waited_for_once_and_in_its_own_bundle(place: Place) -> None:
    found = held(Mesh(data=8))
    own, place.alive, place.placed = place.groups[0], (A,), lambda group: False
    spots: list[Any] = [found.of(slot) for slot in range(4, 8)]
    assert [group is own for group, _ in spots] == [True] * 4 and sum(
        place.waits
    ) <= 2 * placement_groups.PLACED_WITHIN_S
    assert all(group.removed for group in place.groups[1:]), "none stands in the queue before the node that comes"
    place.now_s = placement_groups.RETRY_PLACEMENT_S + 1.0
    found.of(4)
    assert len(place.waits) == 4, "after a while room is looked for again"


def test_a_node_lost_where_others_have_room_is_waited_for_once(place: Place) -> None:
    found = held(Mesh(data=8))
    own, place.alive, place.placed = place.groups[0], (A, C), lambda group: group is not own
    spots: list[Any] = [found.of(slot) for slot in range(4, 8)]
    assert [group for group, _ in spots] == place.groups[1:] and place.waits == [placement_groups.PLACED_WITHIN_S]
    assert all(group.selector is None for group in place.groups), "no node is excluded"


def test_a_wait_for_room_that_is_broken_off_leaves_none_held(place: Place) -> None:
    def broken(group: Group) -> bool:
        raise KeyboardInterrupt

    found = held(Mesh(data=2, tensor=2))
    place.placed = broken
    with pytest.raises(KeyboardInterrupt):
        held(Mesh(data=8))
    found.exclude_node(B)
    with pytest.raises(KeyboardInterrupt):
        found.of(2)
    assert [group.removed for group in place.groups] == [False, True, True]


@pytest.mark.parametrize(("lasting", "lifetime"), [(True, "detached"), (False, None)])
def test_room_that_nobody_will_take_over_ends_with_who_asked_for_it(
    place: Place, lasting: bool, lifetime: str | None
) -> None:
    found = held(Mesh(data=2, tensor=2), lasting=lasting)
    found.exclude_node(B)
    found.of(2)
    assert [group.lifetime for group in place.groups] == [lifetime] * 2


def test_servers_have_a_group_of_their_own_over_the_nodes(place: Place) -> None:
    placement = WorkerResources(cpus=1.0, accelerators=1, accelerator="GPU", server_cpus=0.5)
    plan = Plan(strategy="", engine="", mesh=Mesh(data=2), batch_size=8, placement=placement, servers=3)
    found = placement_groups.PlacementGroups(plan, elastic=True)
    spots: list[Any] = [found.of(slot) for slot in range(plan.processes)]
    assert [index for _, index in spots] == [0, 1, 2, 0, 0]
    assert place.groups[0].bundle_specs == [{"CPU": 0.5}] * 3
    assert [group.bundle_specs for group in place.groups[1:]] == [[{"CPU": 1.0, "GPU": 1.0}]] * 2
    found.give_back()
    assert all(group.removed for group in place.groups)
