"""What a step costs, as pure sums over a profile.

The rates are assumed, not measured: they order plans on one cluster and say so. Ring all-reduce as in Patarasuk and
Yuan (2009): 2 (n - 1) messages, 2 (n - 1) / n of the bytes over each link.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.core.cluster import Cluster
from trainwright.core.job import Job
from trainwright.core.plan import Estimate, Infeasible, Placement
from trainwright.core.profile import ModelProfile

FLOPS_PER_S: Mapping[str, float] = {"": 2e10, "GPU": 3e13, "TPU": 5e13}  # one thread, or one accelerator
LINK_BYTES_PER_S: Mapping[str, float] = {"": 1e9, "GPU": 2e10, "TPU": 5e10}
MESSAGE_S: Mapping[str, float] = {"": 1e-4, "GPU": 2e-5, "TPU": 1e-5}
THREAD_EXPONENT = 0.8  # n threads on one operation are worth n ** 0.8
UNSURE = 3.0  # the interval is step_s / UNSURE to step_s * UNSURE
RESERVED_CPUS = 1.0  # of each node, for Ray Data and the driver
CPU_WORKERS_PER_CPU = 4  # more than this on one CPU is a mistake


def no_engine(name: str, profile: ModelProfile) -> Infeasible:
    """A framework cannot be run on TPUs yet."""
    reason = f"there is no engine for {profile.framework} on TPU yet"
    return Infeasible(strategy=name, reason=reason, hint="use GPU or CPU")


def unequal(name: str, profile: ModelProfile, job: Job, data_ranks: int) -> Infeasible | None:
    """Why so many data ranks cannot do what one device does; None where they can, or the job accepts the difference."""
    if job.batch_size < data_ranks:
        reason = f"batch_size={job.batch_size} is smaller than the {data_ranks} data ranks"
        return Infeasible(strategy=name, reason=reason, hint=f"set batch_size={data_ranks} or more")
    undeclared = tuple(item for item in profile.inexact if item not in job.inexact)
    if undeclared:
        reason = f"{', '.join(undeclared)} would give another result than one device"
        hint = f"use a layer that looks at one sample (group or layer norm), or accept it: inexact={undeclared}"
        return Infeasible(strategy=name, reason=reason, hint=hint)
    return None


def inexact_notes(profile: ModelProfile) -> tuple[str, ...]:
    """What is not equal to one device."""
    return tuple(f"{item}: computed over each device's own share, as the job accepts" for item in profile.inexact)


def devices_of(cluster: Cluster, job: Job) -> int:
    """Devices of a worker that drives all of its node's: accelerators, or logical devices of a CPU."""
    return job.devices or min((node.accelerators for node in cluster.nodes if node.accelerators), default=1)


def room_of(cluster: Cluster) -> int:
    """Workers that the cluster can hold: one for each accelerator, a few for each CPU where there is none."""
    return cluster.accelerators or int(cluster.cpus * CPU_WORKERS_PER_CPU)


def workers_of(cluster: Cluster, job: Job, devices: int = 1) -> int:
    """Workers to begin with: what the job pins, or one for each slot; an elastic job begins with what there is.

    Args:
        devices: of each worker; on a CPU they share a slot.
    """
    shared = devices if cluster.accelerators else 1
    slots, room = max(1, cluster.slots // shared), max(1, room_of(cluster) // shared)
    if not job.elastic:
        return job.workers or min(slots, job.batch_size)
    wanted = job.workers or min(slots, job.max_workers or job.batch_size)
    return max(min(wanted, room), job.min_workers or 1)


def place(cluster: Cluster, workers: int, devices: int = 1) -> Placement:
    """What each of `workers` actors with so many devices reserves, leaving CPU on every node for Ray Data."""
    nodes = len(cluster.nodes)
    cpus = min(node.cpus for node in cluster.nodes)
    reserved = RESERVED_CPUS if cpus >= 2 else cpus / 2
    on_a_node = max(1, -(-workers // nodes))
    share = int(100 * (cpus - reserved) / on_a_node) / 100
    return Placement(
        cpus=max(0.01, share),
        accelerators=devices if cluster.accelerators else 0,
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
