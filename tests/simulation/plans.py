"""The plans of a simulated run: stages of a model, and whatever fewer workers can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from trainwright.core.events import Probed
from trainwright.core.plan import Mesh, Plan, WorkerResources


def staged(stages: int, workers: int, strategy: str = "pipeline") -> Plan:
    """A plan of so many stages on so many workers."""
    mesh = Mesh(pipeline=stages, data=workers // stages)
    return Plan(
        strategy=strategy, engine=f"{strategy}:Engine", mesh=mesh, batch_size=64, placement=WorkerResources(cpus=1)
    )


@dataclass(frozen=True, kw_only=True)
class Plans:
    """Implements `driver.messages.PlanSelector`.

    Attributes:
        others: numbers of workers that there is a plan in one piece for.
        lean: the plan that needs less memory than the first.
    """

    plans: tuple[Plan, ...]
    others: frozenset[int] = frozenset()
    lean: Plan | None = None

    def on(self, available: int, fewest: int) -> Plan | None:
        """The first plan on as many as it can have, else another."""
        replica = self.plans[0].mesh.pipeline
        whole = available - available % replica
        if whole >= max(fewest, 1):
            return self.plans[0].resized(whole)
        fitting = [workers for workers in self.others if fewest <= workers <= available]
        return staged(1, max(fitting), "other") if fitting else None

    def lacking(self, available: int) -> str:
        """Why not; nothing where the first plan is there for them."""
        stages = self.plans[0].mesh.pipeline
        return f"{available} workers hold no {stages} stages" if available % stages else ""

    def measured(self, step_s: Mapping[int, float], aside: Mapping[int, str]) -> tuple[Plans, Probed]:
        """The quickest."""
        best = self.plans[min(step_s, key=step_s.__getitem__)]
        return replace(self, plans=(best,)), Probed(plan=asdict(best), name=best.name)

    def leaner(self, plan: Plan) -> Plans | None:
        """Those with the lean plan as the first; these where the first needs less than `plan` already."""
        if plan != self.plans[0]:
            return self
        return replace(self, plans=(self.lean,), lean=None) if self.lean is not None else None


def stage_piece(stage: int, stages: int) -> str:
    """What a rank of a stage holds."""
    return f"stage-{stage}-of-{stages}" if stages > 1 else "state"


def whole_of(stages: int) -> frozenset[str]:
    """What all stages hold."""
    return frozenset(stage_piece(stage, stages) for stage in range(stages))
