"""Bytes that each pipeline stage holds on one device: never an average, the fullest stage decides.

Model states as in Rajbhandari et al. (2020), table 1: with Adam 16 bytes a parameter, in half precision 2 for it, 2 for
its gradient and 12 for the optimizer's full-precision copies; in full precision 4, 4 and 8. Activations as in
Korthikanti et al. (2022).
"""

from __future__ import annotations

import numpy as np

from trainwright.core.plan import Plan
from trainwright.core.profile import ModelProfile
from trainwright.strategies.work import NUMBER_BYTES, even, gathered

_STATES = {2: (2.0, 2.0, 12.0), 4: (4.0, 4.0, 8.0)}  # parameter, gradient, optimizer, by bytes of a number


def model_state_bytes(parameters: float, *, zero: int, degree: int, precision: str) -> float:
    """Of one device.

    Args:
        parameters: that its share of the model has before ZeRO divides it.
        zero: 0 to 3.
        degree: ranks that ZeRO divides over.
        precision: of the step.
    """
    own = _STATES[NUMBER_BYTES.get(precision, 4)]
    whole = [part / degree if zero >= stage else part for part, stage in zip(own, (3, 2, 1), strict=True)]
    return parameters * sum(whole)


def stage_memory(profile: ModelProfile, plan: Plan, *, batch_size: int, precision: str) -> tuple[int, ...]:
    """Bytes of each stage: model states, activations of the micro-batches in flight, and what one layer works with."""
    mesh, width = plan.mesh, NUMBER_BYTES.get(precision, 4)
    micro_batches, rows = plan.micro_batches(batch_size)
    layers = gathered(profile)
    counts, parameters = layers.placed(plan.stages or even(profile, mesh.pipeline))
    kept = layers.kept(mesh.tensor, plan.recompute)
    working = layers.kept(mesh.tensor, "none") if plan.recompute == "full" else np.zeros_like(kept)
    served = _STATES[width][2] if plan.servers else 0.0  # the optimizer's state is the servers'
    degree = mesh.shard if mesh.shard > 1 else mesh.data
    each = model_state_bytes(1.0, zero=plan.zero, degree=degree, precision=precision) - served
    states = each * parameters / mesh.tensor
    flight = np.array([in_flight(plan, stage, micro_batches) for stage in range(mesh.pipeline)])
    most = np.where(counts > 0, working, 0.0).max(axis=1)
    return tuple(int(each) for each in states + rows * width * (flight * (counts @ kept) + most))


def in_flight(plan: Plan, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, in the order of `orders.order`.

    ZB-H1 keeps them until the gradients of weights are made, which later stages put off for longer.
    """
    stages, chunks = plan.mesh.pipeline, plan.chunks
    if stages == 1:
        return 1.0
    if plan.schedule == "interleaved":
        return min(micro_batches * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1) / chunks
    most = {"": 1, "gpipe": micro_batches, "zero_bubble": stages}.get(plan.schedule, stages - stage)
    return float(min(micro_batches, most))
