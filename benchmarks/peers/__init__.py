"""The peers, written the way their own documentation shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a peer trains.

    Attributes:
        steps: at most; fewer where the folder of stamps tells which one is the last.
        rows: of the data.
        workers: of the run.
        stamps: folder for stamps of completed steps; empty for none.
        pause_s: after each stamped step.
        checkpoint_steps: a checkpoint after each so many steps; 0 for none.
        max_failures: that Ray Train recovers from.
        times: file for the seconds of each step, as rank 0 of TorchTrainer saw them; empty for none.
    """

    steps: int
    rows: int
    workers: int
    stamps: str = ""
    pause_s: float = 0.0
    checkpoint_steps: int = 0
    max_failures: int = 0
    times: str = ""


def fit_with_ray(
    trainer: Callable[..., Any], loop: Callable[[dict[str, Any]], None], storage: Path, settings: Settings
) -> None:
    """Train with a trainer of Ray Train to the end; raises what it raises."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    trainer(
        loop,
        train_loop_config=asdict(settings),
        scaling_config=ScalingConfig(num_workers=settings.workers),
        run_config=RunConfig(
            name="benchmark",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=settings.max_failures),
        ),
    ).fit()
