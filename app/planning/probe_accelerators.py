"""Accelerators that nothing is known of, measured where they are."""

from __future__ import annotations

from typing import Any

from trainwright.core.accelerators import ACCELERATORS, Accelerator, accelerator
from trainwright.core.cluster import Cluster
from trainwright.core.errors import MissingFramework, ResourceError
from trainwright.core.frameworks import load

DEADLINE_S = 180.0  # for a process to start and measure


def probe(*, everything: bool = False) -> tuple[Accelerator, ...]:
    """Measure one device of each kind on the connected cluster, and put it into the table of this process.

    Args:
        everything: also those whose data sheet is known, and a core of a CPU.

    Raises:
        ResourceError: the cluster cannot be reached, or a device cannot be measured.
    """
    from trainwright.runtime.cluster_discovery import connect, discover

    connect()
    found = tuple(_measured(kind, resource) for kind, resource in _wanted(discover(), everything))
    ACCELERATORS.update({item.name: item for item in found})
    return found


def as_python(item: Accelerator) -> str:
    """A line for a job file that describes an accelerator."""
    rates = ", ".join(f'"{name}": {rate:.3g}' for name, rate in item.flops_per_s.items())
    fields = [
        f'name="{item.name}"', f"memory_bytes={item.memory_bytes}", f"flops_per_s={{{rates}}}",
        f"memory_bytes_per_s={item.memory_bytes_per_s:.3g}", f"link_bytes_per_s={item.link_bytes_per_s:.3g}",
        f"network_bytes_per_s={item.network_bytes_per_s:.3g}", f"host={item.host:g}", f'source="{item.source}"',
        f'resource="{item.resource}"',
    ]  # fmt: skip
    return f'ACCELERATORS["{item.name}"] = Accelerator({", ".join(fields)})'


def _wanted(cluster: Cluster, everything: bool) -> list[tuple[str, str]]:
    """Kinds to measure, with Ray's resource for each."""
    kinds = {node.kind: node.accelerator for node in cluster.nodes if node.accelerators}
    chosen = [(kind, name) for kind, name in kinds.items() if everything or accelerator(kind) is None]
    unnamed = [name for kind, name in chosen if not kind]
    if unnamed:
        raise ResourceError(
            f"Ray does not say which {unnamed[0]} the nodes have",
            where="cluster",
            remedy="name it where the node is started: ray start --resources='{\"accelerator_type:NAME\": 1}'",
        )
    return [*chosen, ("CPU", "CPU")] if everything else chosen


def _measured(kind: str, resource: str) -> Accelerator:
    """By a task that holds the device."""
    import ray

    if resource not in ("GPU", "CPU"):
        raise ResourceError(
            f"a {resource} cannot be measured yet",
            where=kind,
            remedy=f"describe it: trainwright.core.accelerators.ACCELERATORS[{kind!r}] = Accelerator(...)",
        )
    on_cpu = resource == "CPU"
    options: dict[str, Any] = {"num_cpus": 1}
    if not on_cpu:
        options |= {"num_gpus": 1, "resources": {f"accelerator_type:{kind}": 0.001}}
    task = ray.remote(max_retries=0, **options)(_run).remote(kind, "cpu" if on_cpu else "cuda")
    try:
        found: Accelerator = ray.get(task, timeout=DEADLINE_S)
    except ray.exceptions.GetTimeoutError as error:
        ray.cancel(task, force=True)
        raise ResourceError(
            f"no {kind} could be measured within {DEADLINE_S:.0f} s",
            where="cluster",
            remedy="wait until one is free, or describe it in trainwright.core.accelerators.ACCELERATORS",
        ) from error
    except ray.exceptions.RayError as error:
        raised = getattr(error, "cause", None)
        if isinstance(raised, MissingFramework):
            raise raised from error
        cause = str(error).strip().splitlines()[-1]
        raise ResourceError(
            f"the device could not be measured: {cause}", where=kind, remedy="look whether torch can use it there"
        ) from error
    return found


def _run(kind: str, device: str) -> Accelerator:
    measured: Accelerator = load("trainwright.strategies.torch.profiling.device_probe").probe(kind, device)
    return measured
