"""Run a job inside a train function of Ray Train, on its workers, and report to Ray Train."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from trainwright.core.errors import ResourceError


def inside_ray_train() -> bool:
    """Return whether this process is a worker of Ray Train. Imports nothing."""
    ray: Any = sys.modules.get("ray")
    train: Any = sys.modules.get("ray.train")
    if train is None or not ray.is_initialized() or ray.util.get_current_placement_group() is None:
        return False
    try:
        with warnings.catch_warnings(action="ignore"):  # of its first version, where there is no such context
            return train.get_context().get_world_size() is not None
    except (RuntimeError, DeprecationWarning):  # elsewhere, and in a function of Ray Tune's
        return False


def refuse_inside_ray_train(what: str, remedy: str) -> None:
    """Raise ResourceError inside Ray Train, where `what` is not possible."""
    if inside_ray_train():
        raise ResourceError(f"{what} cannot be called inside Ray Train", where="the train function", remedy=remedy)
