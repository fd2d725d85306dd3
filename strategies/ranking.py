"""All plans for a model on a cluster, best first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from trainwright.core.cluster import Cluster
from trainwright.core.plan import Estimate, Mesh, Placement, Plan, strategy_of
from trainwright.core.profile import ModelProfile
from trainwright.strategies.calibration import DEFAULT, Calibration
from trainwright.strategies.estimating import estimate, expected
from trainwright.strategies.memory import stage_memory
from trainwright.strategies.partition import divided
from trainwright.strategies.timing import layer_seconds
from trainwright.strategies.work import Machine, gathered, refusal, work_of

USABLE = 0.92  # of a device's memory: the rest is the framework's, and lost between blocks
KEPT = 20  # plans that get an interval
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A plan that cannot be, and why.

    Attributes:
        plan: that cannot be.
        reason: why.
        hint: what would make it possible.
        missing_bytes: of memory on its fullest stage; 0 where memory is not what is missing.
    """

    plan: Plan
    reason: str
    hint: str
    missing_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Plans that fit, best first, and those that do not."""

    plans: tuple[Plan, ...]
    misfits: tuple[Misfit, ...]


def rank(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch_size: int,
    precision: str,
    calibration: Calibration | None = None,
) -> list[Plan]:
    """The plans that fit, by predicted step, best first; the first ones have an estimate with an interval.

    Args:
        profile, cluster, batch_size, precision, calibration: as for `estimate`.

    Raises:
        ResourceError: nothing is known of an accelerator.
    """
    return list(ranking(profile, cluster, batch_size=batch_size, precision=precision, calibration=calibration).plans)


def ranking(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch_size: int,
    precision: str,
    calibration: Calibration | None = None,
) -> Ranking:
    """As `rank`, with the plans that do not fit, the nearest to fitting first."""
    known, machine = calibration or DEFAULT, Machine.of(cluster)
    room = USABLE * machine.device.memory_bytes
    fitting: list[tuple[float, Plan]] = []
    misfits: list[Misfit] = []
    for plan in _candidates(machine, profile, batch_size, precision):
        reason = refusal(profile, machine, plan, batch_size)
        memory = () if reason else stage_memory(profile, plan, batch_size=batch_size, precision=precision)
        if reason is not None or max(memory) > room:
            misfits.append(_misfit(plan, reason, memory, room))
            continue
        work = work_of(profile, machine, plan, batch_size=batch_size, precision=precision)
        terms = expected(work, known)
        step_s = sum(terms.values())
        found = Estimate(step_s=step_s, low_s=step_s, high_s=step_s, terms=terms, stage_memory_bytes=memory)
        fitting.append((step_s, replace(plan, estimate=found)))
    plans = [plan for _, plan in sorted(fitting, key=lambda item: item[0])]
    for number, plan in enumerate(plans[:KEPT]):
        sure = estimate(profile, cluster, plan, batch_size=batch_size, precision=precision, calibration=known)
        plans[number] = replace(plan, estimate=sure)
    return Ranking(plans=tuple(plans), misfits=tuple(sorted(misfits, key=lambda one: one.missing_bytes or math.inf)))


def _candidates(machine: Machine, profile: ModelProfile, batch_size: int, precision: str) -> Iterator[Plan]:
    """Every shape with every sensible micro-batch and recomputation."""
    from trainwright.strategies import OFFERS

    cuts = lru_cache(maxsize=None)(lambda mesh: _stages(profile, machine, mesh, precision))
    selective = any(layer.scores_numbers for layer in profile.layers)
    choices = ("none", "selective", "full") if selective else ("none", "full")
    place = Placement(cpus=1.0, accelerators=1, accelerator=machine.device.resource)
    for shape in (shape for offer in OFFERS for shape in offer.shapes(machine, profile)):
        mesh = shape.mesh
        share = -(-batch_size // mesh.data_ranks)
        plan = Plan(
            strategy=strategy_of(mesh),
            engine="",
            mesh=mesh,
            batch_size=batch_size,
            placement=place,
            precision=precision,
            schedule=shape.schedule,
            chunks=shape.chunks,
            zero=shape.zero,
            stages=cuts(Mesh(pipeline=mesh.pipeline, tensor=mesh.tensor)) if mesh.pipeline > 1 else (),
        )
        for micro_batch in [size for size in MICRO_BATCHES if size < share] + [share] * (share <= MICRO_BATCHES[-1]):
            for recompute in choices:
                yield replace(plan, micro_batch=micro_batch, recompute=recompute)


def _stages(profile: ModelProfile, machine: Machine, mesh: Mesh, precision: str) -> tuple[int, ...]:
    """Contiguous stages of which the slowest is as quick as can be."""
    alone = Plan.parse(f"tp={mesh.tensor}")
    work = work_of(profile, machine, alone, batch_size=1, precision=precision)
    return divided(layer_seconds(work)[gathered(profile).order].tolist(), mesh.pipeline)


def _misfit(plan: Plan, reason: tuple[str, str] | None, memory: tuple[int, ...], room: float) -> Misfit:
    if reason is not None:
        return Misfit(plan=plan, reason=reason[0], hint=reason[1])
    stage = max(range(len(memory)), key=memory.__getitem__)
    missing = int(memory[stage] - room)
    return Misfit(
        plan=plan,
        reason=f"out of memory by {missing / 2**30:.1f} GiB on stage {stage}",
        hint="recompute activations, shard over more devices, or use a smaller micro-batch",
        missing_bytes=missing,
    )
