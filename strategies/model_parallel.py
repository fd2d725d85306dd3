"""Model parallelism without micro-batches: stages that work one after the other, as one large device would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainwright.core.plan import InfeasiblePlan, Plan
from trainwright.strategies.pipeline import indivisible, stages_of, whole
from trainwright.strategies.search.plan_request import PlanRequest, engine_for

FRAMEWORKS = ("torch",)
ENGINES: Mapping[str, str] = {"torch": "trainwright.strategies.torch.engines.pipeline:Pipeline"}


def propose(question: PlanRequest) -> Iterator[Plan | InfeasiblePlan]:
    """Numbers of stages that divide the ranks, and replicas of that; a share of the batch goes through at once."""
    meshes = [mesh for mesh in stages_of(question) if mesh.tensor == 1]
    refusal = whole("model_parallel", question)
    if refusal or not meshes:
        yield refusal or indivisible("model_parallel", question)
        return
    for mesh in meshes:
        yield question.unequal("model_parallel", mesh.data) or question.plan(
            "model_parallel", engine_for(ENGINES, question), mesh
        )
