"""What Ray reserves and gives, in its words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.core.plan import Placement, Plan


def resources(placement: Placement, serves: bool = False) -> dict[str, Any]:
    """What Ray gives a worker, or a process that `serves` workers."""
    if serves:
        return {"num_cpus": placement.server_cpus}
    options: dict[str, Any] = {"num_cpus": placement.cpus}
    if placement.accelerator == "GPU":
        options["num_gpus"] = placement.accelerators
    elif placement.accelerator:
        options["resources"] = {placement.accelerator: placement.accelerators}
    return options


def bundle(placement: Placement, serves: bool = False) -> dict[str, float]:
    """What is reserved for a slot."""
    if serves:
        return {"CPU": placement.server_cpus}
    bundle = {"CPU": placement.cpus}
    if placement.accelerators:
        bundle[placement.accelerator] = float(placement.accelerators)
    return bundle


def bundles(placement: Placement, shares: Sequence[int]) -> list[dict[str, float]]:
    """One for each node's share of the slots; the first has the head of a TPU slice, which makes its host the first."""
    found = [{name: slots * amount for name, amount in bundle(placement).items()} for slots in shares]
    if placement.head:
        found[0][placement.head] = 1.0
    return found


def devices(plan: Plan) -> tuple[str, ...]:
    """Devices of a worker by the framework's name; Ray shows a worker only its own, numbered from 0."""
    device = {"GPU": "cuda", "TPU": "tpu"}.get(plan.placement.accelerator, "cpu")
    return tuple(f"{device}:{number}" if device != "cpu" else "cpu" for number in range(plan.devices_per_worker))
