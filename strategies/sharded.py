"""Sharded data parallelism: what each rank would hold whole is divided (ZeRO; Rajbhandari et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainwright.core.plan import Infeasible, Mesh, Plan
from trainwright.strategies.question import Question, engine_for

FRAMEWORKS = ("torch",)
ENGINES: Mapping[str, str] = {}


def propose(question: Question) -> Iterator[Plan | Infeasible]:
    """Each stage of ZeRO over all ranks, and hybrid shard: ZeRO-3 inside a node, replicas between nodes."""
    ranks, engine = question.ranks, engine_for(ENGINES, question)
    refusal = question.alone("sharded") or question.unequal("sharded", ranks)
    if refusal:
        yield refusal
        return
    for zero in (1, 2, 3):
        yield question.plan("sharded", engine, Mesh(shard=ranks), zero=zero)
    nodes, rest = divmod(ranks, question.per_node)
    if nodes > 1 and question.per_node > 1 and not rest:
        yield question.plan("sharded", engine, Mesh(data=nodes, shard=question.per_node), zero=3)
