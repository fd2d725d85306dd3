"""Profile a job's model, and benchmark accelerators that are missing from the built-in table.

The model is built once, without memory where the framework can do that, and its framework counts the costs.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainwright.core.cluster import ACCELERATORS, Accelerator, Cluster, find_accelerator
from trainwright.core.errors import JobError, MissingFramework, ResourceError, UserCodeError, user_traceback
from trainwright.core.frameworks import load_module, missing_framework
from trainwright.core.initial_weights import WeightSource
from trainwright.core.job import Job
from trainwright.core.loss_api import step_keywords, with_step
from trainwright.core.model_profile import ModelProfile
from trainwright.datasets.dataset import Dataset, Index, first_batch
from trainwright.strategies.distillation.distillation_loss import DistillationLoss

_log = logging.getLogger(__name__)

# The module of a model's class tells its framework; the module named here profiles and loads its models.
_FRAMEWORKS = {
    "keras.src.backend.tensorflow": "trainwright.strategies.tensorflow.training.keras_profile",
    "torch.nn": "trainwright.strategies.torch.profiling",
}


def profile_job(job: Job, dataset: Dataset, index: Index, weights: WeightSource | None = None) -> ModelProfile:
    """Profile the job's model, and those that run in its loss, on one sample of a data set.

    Args:
        weights: files that the model's weights are loaded from, whose names and shapes are compared with the model's.

    Raises:
        UserCodeError: `model()` raised.
        JobError: `model()` returned something that no engine knows, or the weights do not fit it.
    """
    sample = job.data.collation(first_batch(dataset, index, job.columns))
    model = build_model(job.model)
    if weights is not None and framework_of(model) == "torch":
        profiler_of(model).check_weights(model, weights)
    step = job.training.step
    if step is not None:
        step = with_step(step, step_keywords(step), 0, 1)
    profile: ModelProfile = profiler_of(model).profile_model(
        model, sample, job.arguments, keywords=job.keywords, step=step
    )
    if isinstance(job.loss, DistillationLoss):
        profile = replace(profile, guests=tuple(each.profile(sample) for each in job.loss.inline.values()))
    return profile if job.training.weight_average is None else replace(profile, weight_copies=2)


def build_model(build: Callable[[], Any]) -> Any:
    """Call `model()`, without memory where the user's code can do that. Raises UserCodeError."""
    try:
        with _meta_device():
            return build()
    except Exception as error:
        _log.info("model() is built with memory: without, it raised %s: %s", type(error).__name__, error)
    try:
        return build()
    except Exception as error:
        what = f"model() raised {type(error).__name__}: {error}"
        raised = UserCodeError(what, where="model", detail=user_traceback(error))
        raise missing_framework(error, "model") or raised from error


def profiler_of(model: Any) -> Any:
    """Return the profiler of a model's framework. Raises JobError for an object that is no model."""
    for kind in type(model).__mro__:
        for package, module in _FRAMEWORKS.items():
            if kind.__module__.startswith(package):
                return load_module(module)
    named = f"{type(model).__module__}.{type(model).__qualname__}"
    problem = f"model() returned {named}: return a torch.nn.Module, or a keras.Model on TensorFlow or torch"
    raise JobError([problem])


def framework_of(model: Any) -> str:
    """Return a model's framework: `torch` or `tensorflow`. Raises JobError for anything else."""
    name: str = profiler_of(model).__name__
    return name.split(".")[2]


def _meta_device() -> contextlib.AbstractContextManager[Any]:
    """Use torch's meta device where torch is loaded."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return contextlib.nullcontext()
    load_module("trainwright.strategies.torch.torch_compat")  # without it, normal_() there imports torch's compiler
    meta: contextlib.AbstractContextManager[Any] = torch.device("meta")
    return meta


# --- Benchmarks of accelerators missing from the built-in table -------------------------------------------------------


_BENCHMARK_DEADLINE_S = 180.0  # for a process to start and measure


def benchmark_accelerators(*, everything: bool = False) -> tuple[Accelerator, ...]:
    """Benchmark one device of each kind on the connected cluster, and add it to this process's table.

    Args:
        everything: also those whose data sheet is known, and a core of a CPU.

    Raises:
        ResourceError: the cluster cannot be reached, or a device cannot be measured.
    """
    from trainwright.ray_cluster.discovery import connect, discover

    connect()
    found = tuple(_benchmark(kind, resource) for kind, resource in _unknown_kinds(discover(), everything))
    ACCELERATORS.update({item.name: item for item in found})
    return found


def format_as_python(item: Accelerator) -> str:
    """Return a line for a job file that adds an accelerator to the table."""
    rates = ", ".join(f'"{name}": {rate:.3g}' for name, rate in item.flops_per_s.items())
    fields = [
        f'name="{item.name}"', f"memory_bytes={item.memory_bytes}", f"flops_per_s={{{rates}}}",
        f"memory_bytes_per_s={item.memory_bytes_per_s:.3g}", f"link_bytes_per_s={item.link_bytes_per_s:.3g}",
        f"network_bytes_per_s={item.network_bytes_per_s:.3g}", f"host={item.host:g}", f'source="{item.source}"',
        f'resource="{item.resource}"',
    ]  # fmt: skip
    return f'ACCELERATORS["{item.name}"] = Accelerator({", ".join(fields)})'


def _unknown_kinds(cluster: Cluster, everything: bool) -> list[tuple[str, str]]:
    """Return the kinds to measure, with Ray's resource for each."""
    kinds = {node.kind: node.accelerator for node in cluster.nodes if node.accelerators}
    chosen = [(kind, name) for kind, name in kinds.items() if everything or find_accelerator(kind) is None]
    unnamed = [name for kind, name in chosen if not kind]
    if unnamed:
        raise ResourceError(
            f"Ray does not say which {unnamed[0]} the nodes have",
            where="cluster",
            remedy="name it where the node is started: ray start --resources='{\"accelerator_type:NAME\": 1}'",
        )
    return [*chosen, ("CPU", "CPU")] if everything else chosen


def _benchmark(kind: str, resource: str) -> Accelerator:
    """Measure a device in a Ray task that holds it."""
    import ray

    if resource not in ("GPU", "CPU"):
        raise ResourceError(
            f"a {resource} cannot be measured yet",
            where=kind,
            remedy=f"describe it: trainwright.core.cluster.ACCELERATORS[{kind!r}] = Accelerator(...)",
        )
    on_cpu = resource == "CPU"
    options: dict[str, Any] = {"num_cpus": 1}
    if not on_cpu:
        options |= {"num_gpus": 1, "resources": {f"accelerator_type:{kind}": 0.001}}
    task = ray.remote(max_retries=0, **options)(_run_benchmark).remote(kind, "cpu" if on_cpu else "cuda")
    try:
        found: Accelerator = ray.get(task, timeout=_BENCHMARK_DEADLINE_S)
    except ray.exceptions.GetTimeoutError as error:
        ray.cancel(task, force=True)
        raise ResourceError(
            f"no {kind} could be measured within {_BENCHMARK_DEADLINE_S:.0f} s",
            where="cluster",
            remedy="wait until one is free, or describe it in trainwright.core.cluster.ACCELERATORS",
        ) from error
    except ray.exceptions.RayError as error:
        raised = getattr(error, "cause", None)
        if isinstance(raised, MissingFramework):
            raise raised from error
        cause = str(error).strip().splitlines()[-1]
        raise ResourceError(
            f"the device could not be measured: {cause}", where=kind, remedy="look whether torch can use it there"
        ) from error
    return found


def _run_benchmark(kind: str, device: str) -> Accelerator:
    measured: Accelerator = load_module("trainwright.strategies.torch.profiling").probe(kind, device)
    return measured
