"""What the servers of a plan do with what is pushed."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Plan
from trainwright.core.staleness import Consistency


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The same on all servers.

    Attributes:
        shares: units of a round.
        consistency: when units begin, and whether an update is of a round or of one unit.
        local_steps: steps of a round.
        clip_norm: the job's; None does not clip.
        clips: the servers clip, since an update is of several workers' gradients; else each worker clips its own.
    """

    shares: int
    consistency: Consistency
    local_steps: int = 1
    clip_norm: float | None = None
    clips: bool = False

    @classmethod
    def of(cls, plan: Plan, spec: ModelSpec) -> Rules:
        """Those of a plan. Raises PlanError for a consistency that is not known."""
        consistency = Consistency.parse(plan.consistency or "sync")
        return cls(
            shares=plan.mesh.data_ranks,
            consistency=consistency,
            local_steps=plan.local_steps,
            clip_norm=spec.clip_norm,
            clips=spec.clip_norm is not None and consistency.waits and not plan.outer,
        )
