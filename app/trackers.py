"""Who is told of a run while it goes: `trackers=(tw.trackers.MLflow(...), tw.trackers.WandB(...))`, or one's own."""

from __future__ import annotations

from trainwright.watching.mlflow_tracker import MLflow as MLflow
from trainwright.watching.trackers import Ending as Ending
from trainwright.watching.trackers import Row as Row
from trainwright.watching.trackers import Tracked as Tracked
from trainwright.watching.trackers import Tracker as Tracker
from trainwright.watching.wandb_tracker import WandB as WandB

__all__ = ["Ending", "MLflow", "Row", "Tracked", "Tracker", "WandB"]
