"""The bundles that Ray Train gives a job, and options of a job that conflict with them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainwright.core import formatting
from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import PlanError, ResourceError
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.planning.decision import Decision


@dataclass(frozen=True, kw_only=True)
class TrainWorker:
    """One worker of Ray Train's.

    Attributes:
        rank: that Ray Train gave it.
        node_id: as Ray names its node.
        run: that it was called to train.
        accelerator: Ray's resource of what it holds, such as `GPU`; empty without any.
        accelerators: ids of them on that node.
    """

    rank: int
    node_id: str
    run: str
    accelerator: str = ""
    accelerators: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainWorkers:
    """All workers of Ray Train's, in the order of their ranks.

    Attributes:
        bundles: of Ray Train's placement group, in which each sits.
        cpus: of each, by `resources_per_worker`.
    """

    seats: tuple[TrainWorker, ...]
    bundles: tuple[int, ...]
    cpus: float

    @classmethod
    def of(
        cls, seats: Iterable[TrainWorker], bundle_nodes: Mapping[int, str], bundles: Sequence[Mapping[str, float]]
    ) -> TrainWorkers:
        """Who sits where.

        Args:
            bundle_nodes: Ray's id of the node of each bundle.
            bundles: resources of each; those on one node are alike.

        Raises:
            ResourceError: the ranks name several runs, share an accelerator, or hold TPUs.
        """
        ordered = tuple(sorted(seats, key=lambda seat: seat.rank))
        _check(ordered)
        free: dict[str, list[int]] = defaultdict(list)
        for bundle, node_id in sorted(bundle_nodes.items()):
            free[node_id].append(bundle)
        taken = tuple(free[seat.node_id].pop(0) for seat in ordered)
        return cls(seats=ordered, bundles=taken, cpus=min(bundles[bundle].get("CPU", 0.0) for bundle in taken))

    def cluster(self, nodes: Mapping[str, Node]) -> Cluster:
        """The cluster that consists of these seats alone.

        Args:
            nodes: the whole cluster's, by Ray's id.
        """
        here: dict[str, list[TrainWorker]] = defaultdict(list)
        for seat in self.seats:
            here[seat.node_id].append(seat)
        return Cluster(nodes=tuple(self._part(nodes[node_id], seats) for node_id, seats in here.items()))

    def _part(self, node: Node, seats: Sequence[TrainWorker]) -> Node:
        """What the seats have of their node; a seat without a CPU of its own still computes on one."""
        number = sum(len(seat.accelerators) for seat in seats)
        share = min(1.0, len(seats) * self.cpus / node.cpus)
        return replace(
            node,
            cpus=len(seats) * max(1.0, self.cpus),
            memory_bytes=int(node.memory_bytes * (share or 1.0)),
            accelerators=number,
            accelerator=seats[0].accelerator if number else "",
            kind=node.kind if number else "",
        )

    def job(self, job: Job) -> Job:
        """The job for as many workers as there are seats.

        Raises:
            ResourceError: it asks for another number.
        """
        size = len(self.seats)
        least, most = (
            job.scaling.min_workers or job.scaling.workers or 1,
            job.scaling.max_workers or job.scaling.workers or size,
        )
        if not least <= size <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise ResourceError(
                f"the job asks for {wanted} workers, and Ray Train started {size}",
                where="workers",
                remedy=f"leave workers= out, or set ScalingConfig(num_workers={least if size < least else most})",
            )
        return job.replace(workers=size, min_workers=None, max_workers=None)

    def seated(self, decision: Decision, *, data_cpus: float) -> Decision:
        """The decision with workers that compute on what their seats have.

        Args:
            data_cpus: of the cluster that are free for Ray Data.

        Raises:
            PlanError: the plan has not one worker for each seat, or leaves accelerators unused.
        """
        plans = [self._seated(plan, data_cpus) for plan in (decision.chosen, *decision.contenders)]
        return replace(decision, chosen=plans[0], contenders=tuple(plans[1:]))

    def _seated(self, plan: Plan, data_cpus: float) -> Plan:
        size, held = len(self.seats), len(self.seats[0].accelerators)
        used = plan.placement.accelerators
        if plan.workers != size:
            raise PlanError(
                f"{plan.strategy} is for {formatting.count(plan.workers, 'worker')}, and Ray Train started {size}",
                where="num_workers",
                remedy=f"set ScalingConfig(num_workers={plan.workers}), or leave strategy= and plan= out",
            )
        if used and used != held:
            raise PlanError(
                f"{plan.strategy} has workers of {formatting.count(used, plan.placement.accelerator)}, and those of "
                f"Ray Train have {held}",
                where="resources_per_worker",
                remedy=f"set resources_per_worker={{'{plan.placement.accelerator}': {used}}}, or devices={held}",
            )
        placement = replace(plan.placement, threads=max(1, int(self.cpus)), data_cpus=data_cpus)
        return replace(plan, placement=placement)


def _check(seats: Sequence[TrainWorker]) -> None:
    """Raises ResourceError for seats that no job can sit on together."""
    if others := [seat.run for seat in seats if seat.run != seats[0].run]:
        raise ResourceError(
            f"the ranks of Ray Train train other runs: {seats[0].run!r} and {others[0]!r}",
            where="the train function",
            remedy="call tw.fit with the same job on every rank",
        )
    if any(seat.accelerator == "TPU" for seat in seats):
        raise ResourceError(
            "trainwright does not train on TPUs inside Ray Train",
            remedy="call tw.fit outside of it: it places its own workers on them",
        )
    held = Counter((seat.node_id, number) for seat in seats for number in seat.accelerators)
    if shared := [number for (_, number), times in held.items() if times > 1]:
        raise ResourceError(
            f"workers of Ray Train share the {seats[0].accelerator} {shared[0]}",
            where="resources_per_worker",
            remedy=f"give each one of its own: resources_per_worker={{'{seats[0].accelerator}': 1}}",
        )


# --- Room for slots in the bundles that Ray Train reserved, whose resources its own workers hold ----------------------


class TrainPlacement:
    """A worker sits in its seat's bundle and asks Ray for nothing; servers, whose slots come first, beside workers.

    Ray ends all that is in a placement group when it is removed: nothing outlives Ray Train's workers there.

    Args:
        seating: one seat for each worker of the plan.
        group: Ray Train's.
    """

    def __init__(self, seating: TrainWorkers, group: PlacementGroup, plan: Plan) -> None:
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
