"""What Ray reserves and gives, in its words."""

from __future__ import annotations

from typing import Any

from trainwright.core.plan import Placement, Plan


def resources(placement: Placement) -> dict[str, Any]:
    """What Ray gives a worker."""
    options: dict[str, Any] = {"num_cpus": placement.cpus}
    if placement.accelerator == "GPU":
        options["num_gpus"] = placement.accelerators
    elif placement.accelerator:
        options["resources"] = {placement.accelerator: placement.accelerators}
    return options


def bundle(placement: Placement) -> dict[str, float]:
    """What is reserved for a slot."""
    bundle = {"CPU": placement.cpus}
    if placement.accelerators:
        bundle[placement.accelerator] = float(placement.accelerators)
    return bundle


def devices(plan: Plan) -> tuple[str, ...]:
    """Devices of a worker by the framework's name; Ray shows a worker only its own, numbered from 0."""
    device = "cuda" if plan.placement.accelerator == "GPU" else "cpu"
    return tuple(f"{device}:{number}" if device != "cpu" else "cpu" for number in range(plan.devices_per_worker))
