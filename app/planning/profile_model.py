"""What the user's model costs: builds it once, without memory where the framework can, and asks its framework."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainwright.core.errors import JobError, UserCodeError
from trainwright.core.frameworks import load, missing
from trainwright.core.job import Job
from trainwright.core.model_profile import ModelProfile
from trainwright.datasets.dataset import Dataset, Index
from trainwright.strategies.distillation.losses import Distilled

_log = logging.getLogger(__name__)

# A framework's models are told by the modules of their classes; the module named here profiles and loads them.
_FRAMEWORKS = {
    "keras.src.backend.tensorflow": "trainwright.strategies.tensorflow.training.profile",
    "torch.nn": "trainwright.strategies.torch.profiling.model_profile",
    "trainwright.strategies.reference": "trainwright.strategies.reference.profile",
}


def profile_job(job: Job, dataset: Dataset, index: Index) -> ModelProfile:
    """Profile the job's model, and those that run in its loss, on one sample of a data set.

    Raises:
        UserCodeError: `model()` raised.
        JobError: `model()` returned something that no engine knows.
    """
    sample = job.collation(dataset.row(index, job.columns))
    model = built(job.model)
    profile: ModelProfile = profiler_of(model).profile_model(
        model, sample, job.arguments, keywords=job.keywords, step=job.step
    )
    if isinstance(job.loss, Distilled):
        profile = replace(profile, guests=tuple(each.profile(sample) for each in job.loss.inline.values()))
    return profile


def built(build: Callable[[], Any]) -> Any:
    """What `model()` gives, without memory where the user's code can do that. Raises UserCodeError."""
    try:
        with _without_memory():
            return build()
    except Exception as error:
        _log.info("model() is built with memory: without, it raised %s: %s", type(error).__name__, error)
    try:
        return build()
    except Exception as error:
        absent, trace = missing(error, "model"), error.__traceback__
        detail = "".join(traceback.format_exception(type(error), error, trace.tb_next if trace else None))
        what = f"model() raised {type(error).__name__}: {error}"
        raise absent or UserCodeError(what, where="model", detail=detail) from error


def profiler_of(model: Any) -> Any:
    """The module that knows a model's framework. Raises JobError for what is no model."""
    for kind in type(model).__mro__:
        for package, module in _FRAMEWORKS.items():
            if kind.__module__.startswith(package):
                return load(module)
    named = f"{type(model).__module__}.{type(model).__qualname__}"
    problem = f"model() returned {named}: return a torch.nn.Module, or a keras.Model on TensorFlow or torch"
    raise JobError([problem])


def framework_of(model: Any) -> str:
    """A model's framework: `torch`, `tensorflow` or `reference`. Raises JobError for what is no model."""
    name: str = profiler_of(model).__name__
    return name.split(".")[2]


def _without_memory() -> contextlib.AbstractContextManager[Any]:
    """Torch's meta device where torch is in use."""
    torch = sys.modules.get("torch")
    return torch.device("meta") if torch is not None else contextlib.nullcontext()
