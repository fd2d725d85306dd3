"""Synchronous data parallelism: a replica on each worker, gradients summed by all-reduce."""

from __future__ import annotations

from trainwright.core.cluster import Cluster
from trainwright.core.job import Job
from trainwright.core.plan import Infeasible, Mesh, Plan
from trainwright.core.profile import ModelProfile
from trainwright.strategies import costs

ENGINES = {
    "torch": "trainwright.strategies.torch.data_parallel:DataParallel",
    "reference": "trainwright.strategies.reference.engine:Reference",
}


def propose(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """One replica for each slot of the cluster, or for each of the workers that the job pins."""
    workers = job.workers or min(cluster.slots, job.batch_size)
    refusal = _refusal(profile, cluster, job, workers)
    if refusal:
        return Infeasible(strategy="data_parallel", reason=refusal[0], hint=refusal[1])
    placement = costs.place(cluster, workers)
    return Plan(
        strategy="data_parallel",
        engine=ENGINES[profile.framework],
        mesh=Mesh(data=workers),
        batch_size=job.batch_size,
        placement=placement,
        accumulation=job.accumulation,
        precision=job.precision,
        estimate=costs.estimate(profile, job, placement, workers),
        notes=_notes(profile, job),
    )


def _refusal(profile: ModelProfile, cluster: Cluster, job: Job, workers: int) -> tuple[str, str] | None:
    """Why it cannot be, and what would make it possible."""
    if profile.framework not in ENGINES or cluster.accelerator == "TPU":
        return costs.no_engine(profile, cluster), "use torch on GPU or CPU"
    if workers == 1:
        why = "workers=1 is pinned" if job.workers else "there is room for one worker only"
        return why, "give the job two workers or more"
    if job.batch_size < workers:
        return f"batch_size={job.batch_size} is smaller than the {workers} workers", f"set batch_size={workers} or more"
    undeclared = [item for item in profile.inexact if item not in job.inexact]
    if undeclared:
        return (
            f"{', '.join(undeclared)} would give another result than one device",
            f"use a layer that looks at one sample (group or layer norm), or accept it: inexact={tuple(undeclared)}",
        )
    return None


def _notes(profile: ModelProfile, job: Job) -> tuple[str, ...]:
    """What is not equal to one device, and what one should know."""
    return tuple(f"{item}: computed over each worker's own share, as the job accepts" for item in profile.inexact)
