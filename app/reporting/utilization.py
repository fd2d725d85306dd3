"""Model FLOPs utilization (MFU) of a run, from the estimate of its plan and its samples per second.

MFU is the model's own operations a second over the peak rate of the accelerators (Chowdhery et al., 2022, appendix B):
those of forward and backward, without what is recomputed. The peak is that of a data sheet, in the plan's precision.
The built-in table has them: nothing is shown for CPUs and for accelerators that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from trainwright.core.events import Event, Formed, Probed, Replanned, RunStarted
from trainwright.storage.run_summary import RunSummary


class UtilizationMeter:
    """Follows the plan and the number of workers of a run."""

    def __init__(self) -> None:
        self._plan: Mapping[str, Any] = {}
        self._workers = 0

    @classmethod
    def of(cls, summary: RunSummary) -> Self:
        """Return a meter of a run as it is now."""
        found = cls()
        found._plan, found._workers = summary.start.plan, summary.workers
        return found

    def on(self, event: Event) -> None:
        """Take a new plan, or a new number of workers."""
        match event:
            case RunStarted():
                self._plan, self._workers = event.plan, 0
            case Replanned() | Probed():
                self._plan = event.plan
            case Formed():
                self._workers = event.workers

    def at(self, samples_per_s: float) -> float:
        """Return the MFU at a throughput, from 0 to 1; NaN where it is not known."""
        estimate = self._plan.get("estimate") or {}
        peak = estimate.get("peak_flops_per_s", 0.0) * self._workers * self._plan.get("devices_per_worker", 1)
        flops = estimate.get("sample_flops", 0.0)
        return samples_per_s * flops / peak if peak and flops else math.nan
