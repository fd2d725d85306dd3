"""One device: no communication, the floor that every other plan is held against."""

from __future__ import annotations

from trainwright.core.cluster import Cluster
from trainwright.core.job import Job
from trainwright.core.plan import Infeasible, Mesh, Plan
from trainwright.core.profile import ModelProfile
from trainwright.strategies import costs

ENGINES = {
    "torch": "trainwright.strategies.torch.one_device:OneDevice",
    "reference": "trainwright.strategies.reference.engine:Reference",
}


def propose(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """The whole global batch on one worker."""
    if job.workers not in (None, 1):
        return Infeasible(
            strategy="one_device", reason=f"workers={job.workers} is pinned", hint="set workers=1 or leave it out"
        )
    if profile.framework not in ENGINES or cluster.accelerator == "TPU":
        reason = costs.no_engine(profile, cluster)
        return Infeasible(strategy="one_device", reason=reason, hint="use torch on GPU or CPU")
    placement = costs.place(cluster, 1)
    return Plan(
        strategy="one_device",
        engine=ENGINES[profile.framework],
        mesh=Mesh(),
        batch_size=job.batch_size,
        placement=placement,
        accumulation=job.accumulation,
        precision=job.precision,
        estimate=costs.estimate(profile, job, placement, 1),
    )
