"""One device: no communication, the floor that every other plan is held against."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import InfeasiblePlan, Mesh, Plan
from trainwright.strategies.search.plan_request import PlanRequest, engine_for

FRAMEWORKS = ("torch",)
ENGINES = {"torch": "trainwright.strategies.torch.engines.one_device:OneDevice"}


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """The whole global batch on one device of one worker."""
    yield one_worker("one_device", engine_for(ENGINES, question), question)


def one_worker(strategy: str, engine: str, question: PlanRequest, devices: int = 1) -> Plan | InfeasiblePlan:
    """A plan for one worker that drives so many devices, a data rank each."""
    if question.elastic:
        hint = "leave min_workers and max_workers out"
        return InfeasiblePlan(strategy=strategy, reason="the number of workers may change", hint=hint)
    if question.workers not in (None, 1):
        reason = f"workers={question.workers} is pinned"
        return InfeasiblePlan(strategy=strategy, reason=reason, hint="set workers=1 or leave it out")
    refusal = question.unequal(strategy, devices) or question.without_engine(strategy)
    return refusal or question.plan(strategy, engine, Mesh(data=devices), devices=devices)
