"""What a step costs, as pure sums over a profile.

The rates are assumed, not measured: they order plans on one cluster and say so. Ring all-reduce as in Patarasuk and
Yuan (2009): 2 (n - 1) messages, 2 (n - 1) / n of the bytes over each link.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.core.cluster import Cluster
from trainwright.core.job import Job
from trainwright.core.plan import Estimate, Placement
from trainwright.core.profile import ModelProfile

FLOPS_PER_S: Mapping[str, float] = {"": 2e10, "GPU": 3e13, "TPU": 5e13}  # one thread, or one accelerator
LINK_BYTES_PER_S: Mapping[str, float] = {"": 1e9, "GPU": 2e10, "TPU": 5e10}
MESSAGE_S: Mapping[str, float] = {"": 1e-4, "GPU": 2e-5, "TPU": 1e-5}
THREAD_EXPONENT = 0.8  # n threads on one operation are worth n ** 0.8
UNSURE = 3.0  # the interval is step_s / UNSURE to step_s * UNSURE
RESERVED_CPUS = 1.0  # of each node, for Ray Data and the driver
CPU_WORKERS_PER_CPU = 4  # more than this on one CPU is a mistake


def no_engine(profile: ModelProfile, cluster: Cluster) -> str:
    """Why a framework cannot be run on a cluster yet."""
    return f"there is no engine for {profile.framework} on {cluster.accelerator or 'CPU'} yet"


def place(cluster: Cluster, workers: int) -> Placement:
    """What each of `workers` actors reserves, leaving CPU on every node for Ray Data."""
    nodes = len(cluster.nodes)
    cpus = min(node.cpus for node in cluster.nodes)
    reserved = RESERVED_CPUS if cpus >= 2 else cpus / 2
    on_a_node = max(1, -(-workers // nodes))
    share = int(100 * (cpus - reserved) / on_a_node) / 100
    return Placement(
        cpus=max(0.01, share),
        accelerators=1 if cluster.accelerators else 0,
        accelerator=cluster.accelerator,
        threads=max(1, int(cpus // on_a_node)),
        data_cpus=reserved * nodes,
    )


def estimate(profile: ModelProfile, job: Job, placement: Placement, data_ranks: int) -> Estimate:
    """Seconds of a step by term: compute (backward is twice forward), all-reduce, optimizer."""
    kind = placement.accelerator
    rate = FLOPS_PER_S[kind] * (1 if kind else placement.threads**THREAD_EXPONENT)
    rows = -(-job.batch_size // data_ranks)
    link, steps = LINK_BYTES_PER_S[kind], 2 * (data_ranks - 1)
    terms = {
        "compute": 3 * profile.flops * rows / rate,
        "all_reduce": steps * MESSAGE_S[kind] + steps / data_ranks * profile.parameter_bytes / link,
        "optimizer": 12 * profile.parameters / rate,
    }
    step_s = sum(terms.values())
    return Estimate(
        step_s=step_s,
        low_s=step_s / UNSURE,
        high_s=step_s * UNSURE,
        terms=terms,
        stage_memory_bytes=(4 * profile.parameter_bytes,),
    )
