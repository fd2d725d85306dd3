"""Sharded data parallelism: what each rank would hold whole is divided (ZeRO; Rajbhandari et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainwright.core.plan import InfeasiblePlan, Mesh, Plan
from trainwright.strategies.search.plan_request import PlanRequest, engine_for

FRAMEWORKS = ("torch",)
ENGINES: Mapping[str, str] = {"torch": "trainwright.strategies.torch.engines.fsdp:Sharded"}
OFFLOADS = True


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """Each stage of ZeRO over all ranks, and hybrid shard: ZeRO-3 inside a node, replicas between nodes.

    No engine divides the optimizer's state alone (ZeRO-1). Host memory holds ZeRO-2's and 3's (Ren et al., 2021).
    """
    ranks, engine = question.ranks, engine_for(ENGINES, question)
    refusal = question.alone("sharded") or question.unequal("sharded", ranks) or question.without_engine("sharded")
    if refusal:
        yield refusal
        return
    if ranks == 1:
        hint = "wait until there is room for two"
        yield InfeasiblePlan(strategy="sharded", reason="there is room for one worker only now", hint=hint)
        return
    for zero in (2, 3) if question.offload else (1, 2, 3):
        own = engine if zero > 1 else ""
        yield question.plan("sharded", own, Mesh(shard=ranks), zero=zero, offload=question.offload)
    for mesh in _hybrid(question):
        yield question.plan("sharded", engine, mesh, zero=3, offload=question.offload)


def _hybrid(question: PlanRequest) -> Iterator[Mesh]:
    """The mesh that the job pins, or with the parts inside a node."""
    pinned, inside = question.pins.mesh, question.per_node
    mesh = pinned or Mesh(data=question.ranks // inside, shard=inside)
    if mesh.data > 1 and mesh.shard > 1 and mesh.size == mesh.data_ranks == question.ranks:
        yield mesh
