"""Tensor parallelism: each layer divided over the ranks of a node (Shoeybi et al., 2019), and replicas of that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainwright.core.plan import InfeasiblePlan, Mesh, Plan
from trainwright.strategies.search.plan_request import PlanRequest, divisors, engine_for

FRAMEWORKS = ("torch",)
ENGINES: Mapping[str, str] = {"torch": "trainwright.strategies.torch.engines.tensor_parallel:TensorParallel"}
SHARDED: Mapping[str, str] = {"torch": "trainwright.strategies.torch.engines.fsdp:Sharded"}


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """Degrees that divide the heads and fit a node, alone, with replicas and with ZeRO over these.

    No engine divides the optimizer's state alone (ZeRO-1).
    """
    ranks, engine, sharded = question.ranks, engine_for(ENGINES, question), engine_for(SHARDED, question)
    refusal = question.without_engine("tensor_parallel") or _across_nodes(question)
    if refusal:
        yield refusal
        return
    found = [degree for degree in degrees(question) if degree > 1 and not ranks % degree]
    if not found:
        yield question.alone("tensor_parallel") or _indivisible(question)
    for tensor in found:
        data = ranks // tensor
        yield question.unequal("tensor_parallel", data) or question.plan(
            "tensor_parallel", engine, Mesh(data=data, tensor=tensor)
        )
        if data > 1 and not question.unequal("tensor_parallel", data):
            for zero in (1, 2, 3):
                named = sharded if zero > 1 else ""
                yield question.plan("tensor_parallel", named, Mesh(shard=data, tensor=tensor), zero=zero)
            pinned = question.pins.mesh
            if (
                pinned
                and min(pinned.data, pinned.shard) > 1
                and pinned == Mesh(data=pinned.data, shard=data // pinned.data, tensor=tensor)
            ):
                yield question.plan("tensor_parallel", sharded, pinned, zero=3)


def degrees(question: PlanRequest) -> Iterator[int]:
    """Tensor degrees that this model, how it is compiled and a node allow."""
    profile = question.profile
    if question.compile == "inductor" or profile.indivisible or not any(layer.splits for layer in profile.layers):
        yield 1
        return
    yield from (each for each in divisors(question.per_node) if not profile.heads % each)


def _indivisible(question: PlanRequest) -> InfeasiblePlan:
    heads, per_node = question.profile.heads, question.per_node
    reason = "no layer of this model is known to be divisible"
    hint = "use data parallelism or a pipeline"
    if any(layer.splits for layer in question.profile.layers):
        reason = f"no degree from 2 divides {heads} heads and the {per_node} devices of a node"
        hint = "use a number of workers on each node that shares a divisor with the heads"
    if question.profile.indivisible:
        reason, hint = question.profile.indivisible, "use sharded or data parallelism, or a pipeline"
    if question.compile == "inductor":
        reason, hint = 'compile="inductor" was not tried with it', "leave compile out, or use tp=1"
    return InfeasiblePlan(strategy="tensor_parallel", reason=reason, hint=hint)


def _across_nodes(question: PlanRequest) -> InfeasiblePlan | None:
    """Tensor ranks exchange something in every layer, for which the network between nodes is too slow."""
    tensor, per_node = question.pins.mesh.tensor if question.pins.mesh else 1, question.per_node
    if tensor <= per_node:
        return None
    reason = f"tp={tensor} is more than the {per_node} devices of a node"
    hint = f"use tp={per_node} or less, and a pipeline or ZeRO over the nodes"
    return InfeasiblePlan(strategy="tensor_parallel", reason=reason, hint=hint)
