"""Ray Train's workers as a cluster and as the placement of a run, and job options that conflict with them. Pure."""

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
    """One worker of Ray Train.

    Attributes:
        accelerator: Ray's resource of its accelerators, such as `GPU`; empty without any.
        accelerators: their ids on that node.
    """

    rank: int
    node_id: str
    run: str
    accelerator: str = ""
    accelerators: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainWorkers:
    """All workers of Ray Train, in the order of their ranks.

    Attributes:
        bundles: the bundle of each worker in Ray Train's placement group.
        cpus: of each worker, by `resources_per_worker`.
    """

    workers: tuple[TrainWorker, ...]
    bundles: tuple[int, ...]
    cpus: float

    @classmethod
    def of(
        cls, workers: Iterable[TrainWorker], bundle_nodes: Mapping[int, str], bundles: Sequence[Mapping[str, float]]
    ) -> TrainWorkers:
        """Assign each worker a bundle on its node.

        Args:
            bundle_nodes: Ray's id of the node of each bundle.
            bundles: resources of each; those on one node are alike.

        Raises:
            ResourceError: the ranks name several runs, share an accelerator, or have TPUs.
        """
        ordered = tuple(sorted(workers, key=lambda worker: worker.rank))
        _check(ordered)
        free: dict[str, list[int]] = defaultdict(list)
        for bundle, node_id in sorted(bundle_nodes.items()):
            free[node_id].append(bundle)
        taken = tuple(free[worker.node_id].pop(0) for worker in ordered)
        return cls(workers=ordered, bundles=taken, cpus=min(bundles[bundle].get("CPU", 0.0) for bundle in taken))

    def cluster(self, nodes: Mapping[str, Node]) -> Cluster:
        """Return the cluster that has only the resources of these workers; `nodes` of the whole one, by Ray's id."""
        here: dict[str, list[TrainWorker]] = defaultdict(list)
        for worker in self.workers:
            here[worker.node_id].append(worker)
        return Cluster(nodes=tuple(self._part(nodes[node_id], workers) for node_id, workers in here.items()))

    def _part(self, node: Node, workers: Sequence[TrainWorker]) -> Node:
        """Return what workers have of their node; a worker without a CPU of its own still computes on one."""
        number = sum(len(worker.accelerators) for worker in workers)
        share = min(1.0, len(workers) * self.cpus / node.cpus)
        return replace(
            node,
            cpus=len(workers) * max(1.0, self.cpus),
            memory_bytes=int(node.memory_bytes * (share or 1.0)),
            accelerators=number,
            accelerator=workers[0].accelerator if number else "",
            kind=node.kind if number else "",
        )

    def job(self, job: Job) -> Job:
        """Return the job for as many workers. Raises ResourceError if it asks for another number."""
        size, scaling = len(self.workers), job.scaling
        least = scaling.min_workers or scaling.workers or 1
        most = scaling.max_workers or scaling.workers or size
        if not least <= size <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise ResourceError(
                f"the job asks for {wanted} workers, and Ray Train started {size}",
                where="workers",
                remedy=f"leave workers= out, or set ScalingConfig(num_workers={least if size < least else most})",
            )
        return job.replace(workers=size, min_workers=None, max_workers=None)

    def placed(self, decision: Decision, *, data_cpus: float) -> Decision:
        """Return the decision with plans that use the resources of these workers.

        Args:
            data_cpus: CPUs of the cluster that are free for Ray Data.

        Raises:
            PlanError: the plan has another number of workers, or leaves accelerators unused.
        """
        plans = [self._placed(plan, data_cpus) for plan in (decision.chosen, *decision.contenders)]
        return replace(decision, chosen=plans[0], contenders=tuple(plans[1:]))

    def _placed(self, plan: Plan, data_cpus: float) -> Plan:
        size, held = len(self.workers), len(self.workers[0].accelerators)
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


def _check(workers: Sequence[TrainWorker]) -> None:
    """Raise ResourceError for workers that cannot train one job together."""
    if others := [worker.run for worker in workers if worker.run != workers[0].run]:
        raise ResourceError(
            f"the ranks of Ray Train train different runs: {workers[0].run!r} and {others[0]!r}",
            where="the train function",
            remedy="call tw.fit with the same job on every rank",
        )
    if any(worker.accelerator == "TPU" for worker in workers):
        raise ResourceError(
            "trainwright does not train on TPUs inside Ray Train",
            remedy="call tw.fit outside of it: it places its own workers on them",
        )
    held = Counter((worker.node_id, number) for worker in workers for number in worker.accelerators)
    if shared := [number for (_, number), times in held.items() if times > 1]:
        raise ResourceError(
            f"workers of Ray Train share the {workers[0].accelerator} {shared[0]}",
            where="resources_per_worker",
            remedy=f"give each one of its own: resources_per_worker={{'{workers[0].accelerator}': 1}}",
        )


# --- Placement in the bundles that Ray Train reserved, whose resources its own workers hold ---------------------------


class TrainPlacement:
    """Places each worker in the bundle of one of Ray Train's workers, without resources. Implements `WorkerPlacement`.

    Servers, whose slots come first, share bundles with workers. Ray ends all that is in a placement group when it is
    removed: no process outlives Ray Train's workers.

    Args:
        workers: one for each worker of the plan.
    """

    def __init__(self, workers: TrainWorkers, group: PlacementGroup, plan: Plan) -> None:
        self._workers, self._group = workers, group
        self._first = plan.processes - plan.workers  # slot of a worker

    @property
    def name(self) -> str:
        """The id of the placement group."""
        return str(self._group.id.hex())

    def options(self, slot: int, *, beside: bool = False) -> dict[str, Any]:
        """Return Ray's options for a slot's process."""
        bundle = self._workers.bundles[self._worker(slot)]
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": 0, "scheduling_strategy": where}

    def lent(self, slot: int) -> tuple[str, ...]:
        """Return the ids of the accelerators of a slot's worker; none for a server."""
        return self._workers.workers[self._worker(slot)].accelerators if slot >= self._first else ()

    def found(self, slot: int, node_id: str) -> None:
        """Do nothing: the bundle's node is known."""

    def shun(self, node_id: str) -> None:
        """Do nothing: only Ray Train can replace its workers."""

    def inherit(self, slot: int, group: PlacementGroup) -> None:
        """Do nothing: no process outlives the placement group."""

    def give_back(self) -> None:
        """Do nothing: the placement group belongs to Ray Train."""

    def _worker(self, slot: int) -> int:
        return (slot - self._first) % len(self._workers.workers)
