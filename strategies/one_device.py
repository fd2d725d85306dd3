"""One device: no communication, the floor that every other plan is held against."""

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
    "torch": "trainwright.strategies.torch.one_device:OneDevice",
    "reference": "trainwright.strategies.reference.engine:Reference",
}


def propose(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """The whole global batch on one device of one worker."""
    return one_worker("one_device", ENGINES[profile.framework], profile, cluster, job)


def shapes(machine: Machine, profile: ModelProfile) -> Iterator[Shape]:
    """One device of the cluster."""
    yield Shape(mesh=Mesh())


def one_worker(
    name: str, engine: str, profile: ModelProfile, cluster: Cluster, job: Job, devices: int = 1
) -> Plan | Infeasible:
    """A plan for one worker that drives so many devices, a data rank each."""
    if job.elastic:
        hint = "leave min_workers and max_workers out"
        return Infeasible(strategy=name, reason="the number of workers may change", hint=hint)
    if job.workers not in (None, 1):
        return Infeasible(
            strategy=name, reason=f"workers={job.workers} is pinned", hint="set workers=1 or leave it out"
        )
    if cluster.accelerator == "TPU":
        return costs.no_engine(name, profile)
    placement = costs.place(cluster, 1, devices)
    return Plan(
        strategy=name,
        engine=engine,
        mesh=Mesh(data=devices),
        batch_size=job.batch_size,
        placement=placement,
        accumulation=job.accumulation,
        devices_per_worker=devices,
        precision=job.precision,
        estimate=costs.estimate(profile, job, placement, devices),
        notes=costs.inexact_notes(profile) if devices > 1 else (),
    )
