"""Ray Data's part in a run: what of the cluster is kept for heavy transforms, their feeder, who waits for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trainwright.core import formatting
from trainwright.core.cluster import Cluster
from trainwright.core.errors import ResourceError
from trainwright.core.events import Event, Steps
from trainwright.core.job import Job
from trainwright.datasets.dataset import Dataset, Index
from trainwright.datasets.loading.batch_loader import Fetcher
from trainwright.datasets.ops.row_transforms import function_name

_WARMUP_STEPS = 10  # steps after which waiting for data is no longer that for the first of them
_MIN_STEPS = 30  # steps whose waiting tells something
_MIN_WAIT_SHARE = 0.2  # share of their time


def reserve_for_transforms(cluster: Cluster, job: Job) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster without the GPUs that heavy transforms ask for, and a line for the plan.

    Raises:
        ResourceError: they leave too few for the workers.
    """
    wanted = [(name, need) for name, need in _wanted(job) if need]
    if not wanted or cluster.accelerator != "GPU" or job.accelerator == "cpu":
        return cluster, ()
    names = ", ".join(dict.fromkeys(name for name, _ in wanted))
    taken, there = math.ceil(sum(need for _, need in wanted) - 1e-6), cluster.accelerators
    if there - taken < (job.workers or 1):
        raise ResourceError(
            f"the transforms {names} ask for {formatting.count(taken, 'GPU')} and the workers for "
            f"{job.workers or 'at least 1'}; the cluster has {there}",
            where="map_batches",
            remedy="set fewer workers, give the transforms cpus= or a fraction of a GPU, or compute what they add once "
            "and store it",
        )
    nodes, left = list(cluster.nodes), taken
    for number, node in reversed(list(enumerate(nodes))):
        here = min(left, node.accelerators)
        nodes[number], left = replace(node, accelerators=node.accelerators - here), left - here
    kept = f"{formatting.count(taken, 'GPU')} {'is' if taken == 1 else 'are'} kept for {names}"
    return replace(cluster, nodes=tuple(nodes)), (kept,)


def _wanted(job: Job) -> list[tuple[str, float]]:
    """Transforms with the GPUs that they ask for: each class with its arguments, and the most that a function does."""
    classes: dict[Any, tuple[str, float]] = {}
    functions: dict[str, float] = {}
    for dataset in (job.train, job.evaluate):
        for step in dataset.transforms if dataset is not None else ():
            if step.heavy:
                name = function_name(step.function)
                if step.stateful:
                    classes[step.function.key, step.cpus, step.gpus] = name, step.gpus
                else:
                    functions[name] = max(functions.get(name, 0.0), step.gpus)
    most = max(functions, key=functions.__getitem__, default="")
    return [*classes.values(), *([(most, functions[most])] if most else [])]


class RayDataFeeder:
    """Starts the feeder of a run's heavy data sets, and tells once where the steps wait for it.

    Args:
        train, evaluate: indexes of the data sets.
        cpus, gpus: that the workers leave.

    Raises:
        ResourceError: the transforms ask for more.
    """

    def __init__(self, job: Job, train: Index, evaluate: Index | None, *, cpus: float, gpus: float) -> None:
        self._fetchers: dict[str, Any] = {}
        self._steps = self._counted = 0
        self._step_s = self._wait_s = 0.0
        self._told = False
        heavy: dict[str, tuple[Dataset, Index, dict[str, Any]]] = {}
        if job.train.heavy:
            heavy["train"] = job.train, train, job.ordering()
        if job.evaluate is not None and evaluate is not None and job.evaluate.heavy:
            heavy["evaluate"] = job.evaluate, evaluate, job.ordering(evaluate=True)
        if heavy:
            from trainwright.datasets.ray_data.ray_fetcher import DEADLINE_S, make_pipeline_spec, start_delivery

            recipes = [
                make_pipeline_spec(data, index, columns=job.columns, **order) for data, index, order in heavy.values()
            ]
            hang_s = job.hang_deadline_s or DEADLINE_S
            fetchers = start_delivery(recipes, cpus=cpus, gpus=gpus, deadline_s=max(hang_s, DEADLINE_S), hang_s=hang_s)
            self._fetchers = dict(zip(heavy, fetchers, strict=True))

    @property
    def train(self) -> Fetcher | None:
        """The training set's fetcher; None where the workers read it for themselves."""
        return self._fetchers.get("train")

    @property
    def evaluate(self) -> Fetcher | None:
        """The evaluation set's."""
        return self._fetchers.get("evaluate")

    def on(self, event: Event) -> None:
        """Take note of what steps waited."""
        if isinstance(event, Steps):
            for step_s, wait_s in zip(event.step_s, event.wait_s, strict=True):
                self._steps += 1
                if self._steps > _WARMUP_STEPS and math.isfinite(wait_s):
                    self._counted += 1
                    self._step_s, self._wait_s = self._step_s + step_s, self._wait_s + wait_s

    def news(self) -> list[str]:
        """Lines for people that were not told yet; waits for nothing."""
        told = [self.verdict()]
        for fetcher in list(self._fetchers.values())[:1]:  # all are of one
            told += fetcher.news()
        return [line for line in told if line]

    def verdict(self) -> str:
        """That steps wait for Ray Data, for which stage, and what helps; empty where they do not, or it was said."""
        share = self._wait_s / self._step_s if self._step_s > 0 else 0.0
        if self._told or "train" not in self._fetchers or self._counted < _MIN_STEPS or share < _MIN_WAIT_SHARE:
            return ""
        self._told = True
        stages = self._fetchers["train"].stages()
        return _bottleneck_text(share, stages) if stages else ""

    def close(self) -> None:
        """End the feeder with all that it started. Safe to call twice."""
        for fetcher in list(self._fetchers.values())[:1]:  # all are of one
            fetcher.close()
        self._fetchers.clear()


def _bottleneck_text(share: float, stages: Any) -> str:
    """What to do where steps wait for so large a share of their time; `stages` are those of a feeder."""
    slowest = max(stages, key=lambda stage: stage.seconds / stage.slots)
    at = "1 process" if slowest.slots == 1 else f"{slowest.slots} processes"
    busy = f"{slowest.name}: {at}, {formatting.percent(slowest.busy)} busy"
    if slowest is stages[0]:
        helps = "make the functions before the first heavy one heavy too, or store what they make"
    else:
        helps = "give it more (fewer CPUs or GPUs each, or fewer workers), or compute what it adds once and store it"
    return f"steps wait for data {formatting.percent(share)} of their time, for {busy}; {helps}"
