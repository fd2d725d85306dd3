"""The peak memory of devices as ranks report it, beside what the plan predicted for them."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core import formatting
from trainwright.core.events import MemoryMeasured
from trainwright.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of the device of one rank."""

    rank: int
    predicted_bytes: int  # 0 where nothing was predicted
    used_bytes: int  # by tensors, at the peak
    reserved_bytes: int  # by the framework, at the peak; 0 where it does not tell

    @property
    def text(self) -> str:
        """`predicted 31.2 GiB, used 29.8 GiB (33.0 GiB reserved) on rank 3`."""
        predicted = f"predicted {formatting.size(self.predicted_bytes)}, " if self.predicted_bytes else ""
        reserved = f" ({formatting.size(self.reserved_bytes)} reserved)" if self.reserved_bytes else ""
        return f"{predicted}used {formatting.size(self.used_bytes)}{reserved} on rank {self.rank}"


def rank_memory(plan: Plan | None, event: MemoryMeasured | None) -> list[RankMemory]:
    """Return the memory of each rank that reported it, the fullest device first."""
    if event is None:
        return []
    found = [
        RankMemory(rank=rank, predicted_bytes=_predicted(plan, rank), used_bytes=used, reserved_bytes=reserved)
        for rank, used, reserved in zip(event.ranks, event.allocated_bytes, event.reserved_bytes, strict=True)
    ]
    return sorted(found, key=lambda each: (-each.used_bytes, each.rank))


def memory_text(plan: Plan | None, event: MemoryMeasured) -> str:
    """Return a line for the rank whose device is the fullest: `peak memory: predicted 31.2 GiB, used ...`."""
    ranks = rank_memory(plan, event)
    most = f", the most of {len(ranks)} ranks" if len(ranks) > 1 else ""
    return f"peak memory: {ranks[0].text}{most}" if ranks else "peak memory: no rank reported it"


def _predicted(plan: Plan | None, rank: int) -> int:
    """Return the predicted memory of a rank's device; 0 for servers, and without an estimate."""
    stages = plan.estimate.stage_memory_bytes if plan is not None and plan.estimate is not None else ()
    if plan is None or not stages or plan.servers:
        return stages[0] if plan is not None and stages and plan.role_of(rank) == "worker" else 0
    stage = plan.mesh.stage_of(rank * plan.devices_per_worker)
    return stages[stage] if stage < len(stages) else 0
