"""The layout in which a trained run predicts: its plan on the present cluster, and the rows of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from trainwright.core.cluster import Cluster
from trainwright.core.data import Batch, Columns, Feed, FeedAssignment
from trainwright.core.errors import ResourceError
from trainwright.core.job import Job
from trainwright.core.plan import Mesh, Plan
from trainwright.planning.planner import grow_to_slots, usable_cluster
from trainwright.ray_cluster.discovery import connect, discover
from trainwright.reporting.plan_view import plan_from
from trainwright.storage.event_files import read_run_summary
from trainwright.storage.object_store import open_store
from trainwright.strategies import STRATEGIES
from trainwright.strategies.search.plan_request import placement_for, worker_capacity


def trained_plan(job: Job) -> Plan | None:
    """Return the plan that the job's run was last trained under; None where there is none. Raises StorageError.

    A plan without collective ranks becomes a plan of replicas: see `serving_plan`.
    """
    plan = plan_from(read_run_summary(open_store(job.storage), job.name).start.plan)
    return plan if plan is None or plan.topology == "collective" else serving_plan(plan)


def serving_plan(plan: Plan) -> Plan | None:
    """Return a plan of replicas on as many workers, or of one. Any layout can load a checkpoint."""
    for name, data in (("data_parallel", plan.mesh.data), ("one_device", 1), ("tf_one_device", 1)):
        for framework, engine in STRATEGIES[name].engines.items():
            if f".{framework}." in plan.engine:
                return replace(
                    plan, strategy=name, engine=engine, mesh=Mesh(data=data), topology="collective", servers=0,
                    consistency="", wire="full", local_steps=1, outer="",
                )  # fmt: skip
    return None


def single_replica(plan: Plan) -> Plan:
    """Return the plan for one replica of the model."""
    return plan.resized(max(1, plan.workers // plan.mesh.data))


def plan_on_cluster(plan: Plan, job: Job, verbose: bool = False) -> Plan:
    """As `fit_plan`, on the connected cluster."""
    connect(verbose)
    return fit_plan(discover(possible=True), plan, job)


def fit_plan(cluster: Cluster, plan: Plan, job: Job) -> Plan:
    """Return the plan for the nodes of this cluster, with fewer replicas where there is less room.

    Raises:
        ResourceError: there is no room for a whole replica.
    """
    room = usable_cluster(grow_to_slots(cluster, job, plan.workers * plan.devices_per_worker), job.on_one_device())
    most = worker_capacity(room) // (plan.devices_per_worker if room.accelerators else 1)
    for workers in range(min(plan.workers, most), 0, -1):
        try:
            fitting = plan.resized(workers)
        except ValueError:  # no whole number of replicas
            continue
        return replace(fitting, placement=placement_for(room, workers, plan.devices_per_worker))
    raise ResourceError(
        f"the run was trained as {plan.name}, which needs {single_replica(plan).workers} workers; the cluster has "
        f"room for {most}",
        where=f"{job.name}: {cluster}",
        remedy="connect to a cluster that has more, or use one device of this machine: here=True, or for "
        "predictions workers=",
    )


def split_into_feeds(plan: Plan, columns: Columns) -> list[tuple[Feed, ...]]:
    """Return the feed of each worker, so that the model gets these rows in their order.

    Every data rank has as many rows in a feed, no more than in a micro-batch of training; where they do not divide, the
    last one is repeated with weight 0.
    """
    rows = len(next(iter(columns.values())))
    most = plan.mesh.data_ranks * plan.micro_batches(plan.batch_size)[1]
    parts = [range(start, min(start + most, rows)) for start in range(0, rows, most)]
    return [tuple(_feed(plan.feed_of(worker), columns, part) for part in parts) for worker in range(plan.workers)]


def _feed(feeding: FeedAssignment, columns: Columns, given: range) -> Feed:
    """Return the rows of a worker."""
    each = -(-len(given) // feeding.total)
    batches = []
    for rank in feeding.data_ranks:
        places = np.arange(rank * each, (rank + 1) * each)
        samples = given.start + np.minimum(places, len(given) - 1)
        held = {name: column[samples] for name, column in columns.items()} if feeding.inputs else {}
        batches.append((Batch(columns=held, weights=np.where(places < len(given), 1.0, 0.0), samples=samples),))
    return Feed(
        step=0, parts=tuple(batches), data_ranks=feeding.data_ranks, total=feeding.total, rows=len(given)
    )  # fmt: skip


def gather_outputs(plan: Plan, answers: Sequence[Sequence[Columns]], feeds: Sequence[Feed]) -> Iterator[Columns]:
    """Return the outputs of all rows in their order, in pieces.

    Args:
        answers: of each worker, what it has for each feed; those with the outputs have some.
        feeds: of any worker.
    """
    holders = sorted((plan.feed_of(worker).data_ranks.start, worker) for worker, had in enumerate(answers) if any(had))
    for number, feed in enumerate(feeds):
        left = feed.rows
        for _, worker in holders:
            piece = {name: column[:left] for name, column in answers[worker][number].items()}
            rows = min(left, len(next(iter(piece.values()))))
            left -= rows
            if rows:
                yield piece
