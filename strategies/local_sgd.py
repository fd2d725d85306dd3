"""Local SGD and DiLoCo: workers take steps by themselves, and only what these came to is sent.

Local SGD averages parameters (Stich, ICLR 2019); DiLoCo (Douillard et al., 2023) takes their mean difference as a
gradient for an outer Nesterov step.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.core.plan import InfeasiblePlan, Plan
from trainwright.strategies.parameter_server import ENGINES as ENGINES
from trainwright.strategies.parameter_server import NO_FIT as NO_FIT
from trainwright.strategies.parameter_server import refused, served
from trainwright.strategies.search.plan_request import PlanRequest

FRAMEWORKS = ("torch",)
ALONE = True
STEPS = (8, 32, 128)  # local ones, where the job does not say
DRIFT = (
    "workers drift apart for {0} local steps at a time: not equal to one device; the optimizer's state stays with each "
    "worker and is lost with it"
)


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """As many local steps as the job says; else some, where nodes are far apart, so that sending is what costs."""
    refusal = refused("local_sgd", question)
    if refusal:
        yield refusal
        return
    pinned = question.pins.choices.get("local_steps", 1)
    if pinned == 1 and not question.cluster.far:
        hint = "set local_steps=8, for one"
        reason = "the nodes are near each other: gradients of each step are quick to send"
        yield InfeasiblePlan(strategy="local_sgd", reason=reason, hint=hint)
        return
    consistency = question.pins.choices.get("consistency", "sync")
    for steps in (pinned,) if pinned > 1 else STEPS:
        outer = question.pins.choices.get("outer", "average" if pinned > 1 else "nesterov(0.7,0.9)")
        for plan in served("local_sgd", question, consistency, local_steps=steps, outer=outer):
            yield plan.noted(DRIFT.format(steps))
