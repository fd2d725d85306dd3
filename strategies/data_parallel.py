"""Synchronous data parallelism: a replica on each worker, gradients summed by all-reduce."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import InfeasiblePlan, Mesh, Plan
from trainwright.strategies.search.plan_request import PlanRequest, engine_for

FRAMEWORKS = ("torch",)
ENGINES = {"torch": "trainwright.strategies.torch.engines.data_parallel:DataParallel"}


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """One replica for each slot of the cluster, or for each of the workers that the job pins, where there is room."""
    yield replicas("data_parallel", engine_for(ENGINES, question), question)


def replicas(strategy: str, engine: str, question: PlanRequest, devices: int = 1) -> Plan | InfeasiblePlan:
    """A plan for several workers, each with so many devices and a replica on each of them."""
    workers = question.workers_of(devices)
    ranks = workers * devices
    if workers == 1 and not question.elastic:
        why = "workers=1 is pinned" if question.workers else "there is room for one worker only"
        return InfeasiblePlan(strategy=strategy, reason=why, hint="give the job two workers or more")
    refusal = question.unequal(strategy, ranks) or question.without_engine(strategy)
    return refusal or question.plan(strategy, engine, Mesh(data=ranks), devices=devices)
