"""Profiles of torch models that tests build."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainwright.core.model_profile import ModelProfile
from trainwright.planning.profiler import build_model
from trainwright.strategies.torch import profiling


def profile_model(model: Any, *arguments: Any, **options: Any) -> ModelProfile:
    """Profile a module, or one that a function builds, as planning does."""
    built = model if isinstance(model, nn.Module) else build_model(model)
    return profiling.profile_model(built, *arguments, **options)
