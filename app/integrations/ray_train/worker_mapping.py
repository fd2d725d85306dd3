"""Which room Ray Train gives a job, and what of a job's wishes does not go with it. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import PlanError, ResourceError
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.planning.planner import Decision
from trainwright.reporting import formatting


@dataclass(frozen=True, kw_only=True)
class Seat:
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
class Seating:
    """All workers of Ray Train's, in the order of their ranks.

    Attributes:
        bundles: of Ray Train's placement group, in which each sits.
        cpus: of each, by `resources_per_worker`.
    """

    seats: tuple[Seat, ...]
    bundles: tuple[int, ...]
    cpus: float

    @classmethod
    def of(
        cls, seats: Iterable[Seat], bundle_nodes: Mapping[int, str], bundles: Sequence[Mapping[str, float]]
    ) -> Seating:
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
        here: dict[str, list[Seat]] = defaultdict(list)
        for seat in self.seats:
            here[seat.node_id].append(seat)
        return Cluster(nodes=tuple(self._part(nodes[node_id], seats) for node_id, seats in here.items()))

    def _part(self, node: Node, seats: Sequence[Seat]) -> Node:
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
        least, most = job.min_workers or job.workers or 1, job.max_workers or job.workers or size
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


def _check(seats: Sequence[Seat]) -> None:
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
