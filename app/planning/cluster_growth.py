"""How far a cluster that starts nodes is asked to grow for a job. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from trainwright.core.cluster import ACCELERATORS, Cluster, Node
from trainwright.core.job import Job
from trainwright.core.plan_spec import Pins
from trainwright.planning.plan_file import SUFFIX


def expansions(cluster: Cluster, job: Job) -> Iterator[Cluster]:
    """What runs, with the fewest nodes more that have room for the workers that the job begins with; then larger ones.

    Whoever plans takes the first on which there is a plan: a model that does not fit asks for more by itself. An
    elastic job begins with its `min_workers`, and grows when more nodes have come.
    """
    kind = wanted(cluster, job)
    cluster = replace(cluster, possible=suited(cluster, kind))
    most = len(cluster.possible)
    number = fewest(cluster, kind, _needed(job))
    yield cluster.grown(number)
    step = 1
    while number < most:
        number, step = min(most, number + step), 2 * step
        yield cluster.grown(number)


def enough(cluster: Cluster, job: Job, slots: int) -> Cluster:
    """What runs, with the fewest nodes more that have so many slots; with all of them where these are too few."""
    kind = wanted(cluster, job)
    cluster = replace(cluster, possible=suited(cluster, kind))
    return cluster.grown(fewest(cluster, kind, slots))


def wanted(cluster: Cluster, job: Job) -> str:
    """The accelerator that the job names, that runs, or that could come; empty for CPUs."""
    if job.accelerator != "auto":
        return "" if job.accelerator == "cpu" else job.accelerator.upper()
    kinds = {node.accelerator for node in cluster.possible}
    return cluster.accelerator or next((name for name in ACCELERATORS if name in kinds), "")


def suited(cluster: Cluster, kind: str) -> tuple[Node, ...]:
    """The possible nodes of use; for CPUs those with accelerators come last."""
    if not kind:
        return tuple(sorted(cluster.possible, key=lambda node: node.accelerators > 0))
    return tuple(node for node in cluster.possible if node.accelerator == kind)


def fewest(cluster: Cluster, kind: str, slots: int) -> int:
    """How many of the possible nodes give so many slots of a kind; all where they are too few."""
    most = len(cluster.possible)
    for number in range(most):
        there = cluster.grown(number)
        usable = there.only(kind) if kind else there.without_accelerators()
        if usable.slots >= slots:
            return number
    return most


def told(cluster: Cluster, job: Job) -> Iterator[str]:
    """Notes of a plan: what has to be started for it, and what could be."""
    if cluster.unseen:
        yield f"only nodes that run are planned with: {cluster.unseen}"
    if cluster.coming:
        yield f"{_counted(cluster.coming)} to be started first, which can take minutes and cost money"
    possible = suited(cluster, wanted(cluster, job))
    if possible and not (job.workers or job.elastic or job.plan):
        yield f"the cluster can start {_counted(possible)} more: workers= asks for them, max_workers= grows into them"


def _needed(job: Job) -> int:
    """Slots that the job begins with."""
    pins = Pins.parse(job.plan) if job.plan and not job.plan.endswith(SUFFIX) else None
    workers = job.min_workers or job.workers
    if not workers and pins is not None and pins.mesh:
        return pins.mesh.size
    return (workers or 1) * (job.devices or 1)


def _counted(nodes: tuple[Node, ...]) -> str:
    """`2 nodes (gpu), 1 node (cpu)`."""
    counts = Counter(node.name.rpartition("#")[0] for node in nodes)
    return ", ".join(f"{count} node{'s' if count != 1 else ''} ({name})" for name, count in counts.items())
