"""Synchronous data parallelism: a replica on each worker, gradients summed by all-reduce."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.cluster import Cluster
from trainwright.core.job import Job
from trainwright.core.plan import Infeasible, Mesh, Plan
from trainwright.core.profile import ModelProfile
from trainwright.strategies import costs
from trainwright.strategies.shapes import Shape
from trainwright.strategies.work import Machine

ENGINES = {
    "torch": "trainwright.strategies.torch.data_parallel:DataParallel",
    "reference": "trainwright.strategies.reference.engine:Reference",
}


def propose(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """One replica for each slot of the cluster, or for each of the workers that the job pins, where there is room."""
    return replicas("data_parallel", ENGINES[profile.framework], profile, cluster, job)


def shapes(machine: Machine, profile: ModelProfile) -> Iterator[Shape]:
    """A replica on each device."""
    if machine.devices > 1:
        yield Shape(mesh=Mesh(data=machine.devices))


def replicas(
    name: str, engine: str, profile: ModelProfile, cluster: Cluster, job: Job, devices: int = 1
) -> Plan | Infeasible:
    """A plan for several workers, each with so many devices and a replica on each of them."""
    workers = costs.workers_of(cluster, job, devices)
    refusal = _refusal(cluster, job, workers)
    if refusal:
        return Infeasible(strategy=name, reason=refusal[0], hint=refusal[1])
    unequal = costs.unequal(name, profile, job, workers * devices)
    if unequal:
        return unequal
    if cluster.accelerator == "TPU":
        return costs.no_engine(name, profile)
    placement = costs.place(cluster, workers, devices)
    return Plan(
        strategy=name,
        engine=engine,
        mesh=Mesh(data=workers * devices),
        batch_size=job.batch_size,
        placement=placement,
        accumulation=job.accumulation,
        devices_per_worker=devices,
        precision=job.precision,
        estimate=costs.estimate(profile, job, placement, workers * devices),
        notes=costs.inexact_notes(profile),
    )


def _refusal(cluster: Cluster, job: Job, workers: int) -> tuple[str, str] | None:
    """Why there are not several workers, and what would make it possible."""
    if workers == 1 and not job.elastic:
        why = "workers=1 is pinned" if job.workers else "there is room for one worker only"
        return why, "give the job two workers or more"
    return None
