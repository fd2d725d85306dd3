"""Asynchronous data parallelism: workers step alone against parameter servers (Dean et al., 2012; Li et al., 2014)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainwright.core.plan import Infeasible, Mesh, Plan
from trainwright.strategies.question import Question, engine_for

FRAMEWORKS = ("torch", "tensorflow", "reference")
ENGINES: Mapping[str, str] = {}


def propose(question: Question) -> Iterator[Plan | Infeasible]:
    """A worker on each rank, a server on each node. Updates come from parameters that are other workers' steps old."""
    ranks = question.ranks
    refusal = question.alone("parameter_server") or question.unequal("parameter_server", ranks)
    if refusal:
        yield refusal
        return
    servers = min(len(question.cluster.nodes), ranks)
    plan = question.plan(
        "parameter_server", engine_for(ENGINES, question), Mesh(data=ranks), servers=servers, topology="independent"
    )
    yield plan
