"""Sharded data parallelism: what each rank would hold whole is divided (ZeRO; Rajbhandari et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainwright.core.plan import Infeasible, Mesh, Plan
from trainwright.strategies.question import Question, engine_for

FRAMEWORKS = ("torch",)
ENGINES: Mapping[str, str] = {"torch": "trainwright.strategies.torch.sharded:Sharded"}


def propose(question: Question) -> Iterator[Plan | Infeasible]:
    """Each stage of ZeRO over all ranks, and hybrid shard: ZeRO-3 inside a node, replicas between nodes.

    No engine divides the optimizer's state alone (ZeRO-1).
    """
    ranks, engine = question.ranks, engine_for(ENGINES, question)
    refusal = question.alone("sharded") or question.unequal("sharded", ranks) or question.without_engine("sharded")
    if refusal:
        yield refusal
        return
    if question.elastic:
        reason = "the model is divided over as many workers as there were in the beginning"
        yield Infeasible(strategy="sharded", reason=reason, hint="leave min_workers and max_workers out")
        return
    for zero in (1, 2, 3):
        yield question.plan("sharded", engine if zero > 1 else "", Mesh(shard=ranks), zero=zero)
    nodes, rest = divmod(ranks, question.per_node)
    if nodes > 1 and question.per_node > 1 and not rest:
        yield question.plan("sharded", engine, Mesh(data=nodes, shard=question.per_node), zero=3)
