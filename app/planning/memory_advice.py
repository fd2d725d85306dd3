"""What to say when a device runs out of memory: the prediction, the use, and plans that need less.

The module is pure: the driver calls it once, when it ends the run.
"""

from __future__ import annotations

from trainwright.core.data import PeakMemory
from trainwright.core.plan import Plan
from trainwright.strategies.search.plan_ranking import estimate_of, plans_within, suggest_changes
from trainwright.strategies.search.plan_request import PlanRequest

LESS_MEMORY = 0.9  # of the prediction that was too low, at most
_MOST_PLANS = 3
_GIB = 2**30


def explain_out_of_memory(
    request: PlanRequest, first: Plan, plan: Plan | None, rank: int, memory: PeakMemory | None
) -> tuple[str, str]:
    """Return what was predicted and used, and what to do, as texts; both empty where nothing was predicted.

    Another plan is named if it is predicted to need a tenth less than the one that failed, however little that was: the
    prediction was too low, so that a comparison with the device's memory says nothing.

    Args:
        request: of the job.
        first: the plan of the run.
        plan: under which the device ran out of memory; None for `first`.
        rank: whose device it was.
        memory: its peak, if it is known.
    """
    failed = plan or first
    if failed.estimate is None or not failed.estimate.stage_memory_bytes:
        return "", ""
    stages = failed.estimate.stage_memory_bytes
    predicted = stages[min(failed.mesh.stage_of(rank * failed.devices_per_worker), len(stages) - 1)]
    figures = f"the plan predicted {predicted / _GIB:.3g} GiB"
    if failed.estimate.device_memory_bytes:
        figures += f" of the device's {failed.estimate.device_memory_bytes / _GIB:.3g} GiB"
    if memory is not None:
        figures += f", and tensors used {memory.allocated_bytes / _GIB:.3g} GiB"
        figures += f" ({memory.reserved_bytes / _GIB:.3g} GiB reserved)" if memory.reserved_bytes else ""
    return figures, _remedy(request, failed, int(LESS_MEMORY * failed.memory_bytes))


def _remedy(request: PlanRequest, failed: Plan, room_bytes: int) -> str:
    """Name the quickest plans of a few strategies that are predicted to take less memory."""
    found = sorted(plans_within(request, room_bytes), key=lambda plan: estimate_of(plan).step_s)
    if not found:
        others = suggest_changes(request)
        return f"no plan on these nodes needs less memory: {others or 'use a smaller batch_size'}"
    named = [_described(plan, failed) for plan in found[:_MOST_PLANS]]
    return f"a plan that needs less memory: {'; or '.join(named)}"


def _described(plan: Plan, failed: Plan) -> str:
    """Return `strategy="sharded", plan="shard=8" (18 GiB, 1.2 times the step time)`."""
    needs = plan.memory_bytes / _GIB
    times = estimate_of(plan).step_s / estimate_of(failed).step_s
    return f'strategy="{plan.strategy}", plan="{plan.text}" ({needs:.3g} GiB, {times:.2g} times the step time)'
