"""Who is told of a run while it goes: `trackers=(tw.trackers.MLflow(...), tw.trackers.WandB(...))`, or one's own."""

from __future__ import annotations

from trainwright.tracking.experiment_trackers import MLflow as MLflow
from trainwright.tracking.experiment_trackers import Row as Row
from trainwright.tracking.experiment_trackers import RunResult as Ending
from trainwright.tracking.experiment_trackers import TrackedRun as Tracked
from trainwright.tracking.experiment_trackers import Tracker as Tracker
from trainwright.tracking.experiment_trackers import WandB as WandB

__all__ = ["Ending", "MLflow", "Row", "Tracked", "Tracker", "WandB"]
