"""Room for slots in the bundles that Ray Train reserved, whose resources its own workers hold."""

from __future__ import annotations

from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainwright.core.plan import Plan
from trainwright.integrations.ray_train.worker_mapping import Seating


class SeatRoom:
    """A worker sits in its seat's bundle and asks Ray for nothing; servers, whose slots come first, beside workers.

    Ray ends all that is in a placement group when it is removed: nothing outlives Ray Train's workers there.

    Args:
        seating: one seat for each worker of the plan.
        group: Ray Train's.
    """

    def __init__(self, seating: Seating, group: PlacementGroup, plan: Plan) -> None:
        self._seating, self._group = seating, group
        self._first = plan.processes - plan.workers  # slot of a worker

    @property
    def name(self) -> str:
        """Of this room and no other."""
        return str(self._group.id.hex())

    def options(self, slot: int, *, beside: bool = False) -> dict[str, Any]:
        """Ray's options for a slot's process."""
        bundle = self._seating.bundles[self._seat(slot)]
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": 0, "scheduling_strategy": where}

    def lent(self, slot: int) -> tuple[str, ...]:
        """Ids of the accelerators of a slot's seat; a server has none."""
        return self._seating.seats[self._seat(slot)].accelerators if slot >= self._first else ()

    def found(self, slot: int, node_id: str) -> None:
        """A slot's process runs where its seat is."""

    def shun(self, node_id: str) -> None:
        """There is no other room: Ray Train replaces its workers, or nobody does."""

    def inherit(self, slot: int, group: PlacementGroup) -> None:
        """Nobody outlives this room."""

    def give_back(self) -> None:
        """It is Ray Train's."""

    def _seat(self, slot: int) -> int:
        return (slot - self._first) % len(self._seating.seats)
