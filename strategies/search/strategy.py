"""The declaration of a strategy: its engines, what they can do, and a pure function that proposes plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from trainwright.core.plan import InfeasiblePlan, Plan
from trainwright.strategies.search.plan_request import PlanRequest

Proposals: TypeAlias = Iterator[Plan | InfeasiblePlan]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to divide training over workers. Instances are listed in `strategies.search.registry`.

    The number of micro-batches and the recomputation are left to the ranking.

    Attributes:
        name: as in a job's `strategy=`.
        engines: by framework, `module:class` of the engine. Its keys are the frameworks whose models the strategy is
            for. With an empty text plans are shown but not chosen.
        propose: yields plans, and reasons why others are impossible.
        fit: engine that runs Keras' `fit`; empty where there is none.
        no_fit: the reason why there is none.
        offloads: whether it can keep the model's state in host memory.
        asynchronous: whether its workers step without waiting for each other.
    """

    name: str
    engines: Mapping[str, str]
    propose: Callable[[Strategy, PlanRequest], Proposals]
    fit: str = ""
    no_fit: str = ""
    offloads: bool = False
    asynchronous: bool = False

    def proposals(self, request: PlanRequest) -> Proposals:
        """Yield the plans for a request, and reasons why others are impossible."""
        return self.propose(self, request)

    def engine(self, request: PlanRequest) -> str:
        """Return the engine for the model of a request; empty where there is none."""
        return self.engines.get(request.profile.framework, "")

    def refusal(self, reason: str, hint: str) -> InfeasiblePlan:
        """Return why this strategy has no plan, and what to do instead."""
        return InfeasiblePlan(strategy=self.name, reason=reason, hint=hint)
