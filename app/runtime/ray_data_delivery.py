"""The delivery of data sets with heavy transforms by Ray Data, and a warning if training steps wait for it."""

from __future__ import annotations

import math
from typing import Any

from trainwright.core import formatting
from trainwright.core.events import Event, Steps
from trainwright.core.job import Job
from trainwright.datasets.dataset import Dataset, Index
from trainwright.datasets.loading.batch_loader import Fetcher

_WARMUP_STEPS = 10  # steps after which waiting for data is no longer that for the first of them
_MIN_STEPS = 30  # steps whose waiting tells something
_MIN_WAIT_SHARE = 0.2  # share of their time


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
            hang_s = job.recovery.hang_deadline_s or DEADLINE_S
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
