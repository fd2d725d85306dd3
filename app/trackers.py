"""Who is told of a run while it goes: `trackers=(tw.trackers.MLflow(...), tw.trackers.WandB(...))`, or one's own."""

from __future__ import annotations

from trainwright.tracking.base import Ending as Ending
from trainwright.tracking.base import Row as Row
from trainwright.tracking.base import Tracked as Tracked
from trainwright.tracking.base import Tracker as Tracker
from trainwright.tracking.mlflow import MLflow as MLflow
from trainwright.tracking.wandb import WandB as WandB

__all__ = ["Ending", "MLflow", "Row", "Tracked", "Tracker", "WandB"]
