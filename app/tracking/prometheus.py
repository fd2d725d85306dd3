"""Metrics of a run for Prometheus, exported by Ray's metrics agent.

`METRICS` lists all of them; `MetricCollector` computes their values from events.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

from trainwright.core.events import (
    Checkpointed,
    Event,
    Failed,
    Formed,
    Joined,
    Probed,
    Replanned,
    Resized,
    RunEnded,
    RunStarted,
    Steps,
)
from trainwright.reporting.event_messages import EventFormatter
from trainwright.reporting.plan_view import plan_from
from trainwright.storage.run_summary import RunSummary


class _MetricSink(Protocol):
    """Records values of metrics."""

    def record(self, metric: MetricSpec, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge, add to a counter or to a histogram; NaN ends the series of a gauge."""


class PrometheusListener:
    """An event listener that records metrics with Ray's metrics agent of this node, which Prometheus scrapes.

    It takes microseconds an event and makes no call: Ray sends the values every 10 s (`metrics_report_interval_ms`).
    The gauges of a run end with the run. Its counters stay until the cluster ends, as counters must. Ray drops the
    metrics of a dead driver after two reports.

    Args:
        sink: records the values; by default Ray.
    """

    def __init__(self, sink: _MetricSink | None = None) -> None:
        self._sink = sink or _RayMetrics()
        self._readings = MetricCollector()
        self._gauges: dict[str, Mapping[str, str]] = {}

    def on(self, event: Event) -> None:
        """Record the metrics that one event changes."""
        readings, strategy = list(self._readings.take(event)), self._readings.strategy
        if not self._readings.run:
            return  # the run has not started
        if any(labels["strategy"] != strategy for labels in self._gauges.values()):
            self._end_gauges()
        for reading in readings:
            self._record(reading, {"run": self._readings.run, "strategy": strategy})

    def _record(self, reading: _MetricSample, labels: dict[str, str]) -> None:
        metric = METRICS[reading.name]
        if not math.isfinite(reading.value) or (metric.kind == "counter" and reading.value <= 0):
            return
        if metric.kind == "gauge":
            self._gauges[metric.name] = labels
        if metric.labels:
            labels = {**labels, "source": reading.source}
        self._sink.record(metric, reading.value, labels)

    def close(self) -> None:
        """End the gauges: a finished run has neither throughput nor workers."""
        self._end_gauges()

    def _end_gauges(self) -> None:
        for name, labels in self._gauges.items():
            self._sink.record(METRICS[name], math.nan, labels)
        self._gauges.clear()


class _RayMetrics:
    """Ray's metrics of this process. They are created once and shared by all runs."""

    def record(self, metric: MetricSpec, value: float, labels: Mapping[str, str]) -> None:
        """See `_MetricSink.record`. Ray 2.60 does not export a gauge whose value is NaN."""
        made = _ray_metric(metric.name)
        match metric.kind:
            case "gauge":
                made.set(value, tags=dict(labels))
            case "counter":
                made.inc(value, tags=dict(labels))
            case "histogram":
                made.observe(value, tags=dict(labels))


@cache
def _ray_metric(name: str) -> Any:
    from ray.util import metrics

    metric = METRICS[name]
    options: dict[str, Any] = {"description": metric.text, "tag_keys": (*LABELS, *metric.labels)}
    if metric.kind == "histogram":
        return metrics.Histogram(metric.full_name, boundaries=list(_BUCKETS_S), **options)
    kind: Any = metrics.Gauge if metric.kind == "gauge" else metrics.Counter
    return kind(metric.full_name, **options)


# --- values from events -----------------------------------------------------------------------------------------------


GOODPUT_INTERVAL_S = 10.0  # between computations of goodput, which take milliseconds


@dataclass(frozen=True, kw_only=True)
class _MetricSample:
    """A value of a metric: set for a gauge, added for other kinds. `source` is only set for recoveries."""

    name: str
    value: float
    source: str = ""


class MetricCollector:
    """Computes metrics from the events of one driver, given in order.

    Loss, throughput and waiting are those of the progress bar. Goodput is that of the report, for this driver alone.

    Attributes:
        run, strategy: labels of all samples; empty before the run has started.
    """

    def __init__(self) -> None:
        self.run = self.strategy = ""
        self._formatter, self._folding, self._workers = EventFormatter(), RunSummary(), _WorkerCount()
        self._goodput_s = -math.inf

    def take(self, event: Event) -> Iterator[_MetricSample]:
        """Yield the metrics that one event changes. Exhaust the iterator before the next event."""
        folding = self._folding
        lost, recovered = folding.steps_lost, len(folding.recoveries)
        self._formatter.tell(event)
        folding.add(event)
        self._workers.take(event)
        match event:
            case RunStarted():
                self.run, self.strategy = event.run, str(event.plan.get("strategy", ""))
                yield _MetricSample(name="total_steps", value=event.total_steps)
            case Replanned() | Probed():
                self.strategy = str(event.plan.get("strategy", self.strategy))
            case Steps():
                yield from _step_samples(event)
            case Failed():
                yield _MetricSample(name="failures", value=1)
            case Formed() if len(folding.recoveries) > recovered:
                yield _MetricSample(name="recoveries", value=1, source=event.source)
                yield _MetricSample(name="recovery_seconds", value=event.seconds)
            case Checkpointed():
                yield from _checkpoint_samples(event)
        yield _MetricSample(name="steps_lost", value=folding.steps_lost - lost)
        yield from self._gauges(event)

    def _gauges(self, event: Event) -> Iterator[_MetricSample]:
        if isinstance(event, Steps | Formed):
            figures = self._formatter.figures
            yield _MetricSample(name="step", value=figures.step)
            yield _MetricSample(name="loss", value=figures.loss)
            yield _MetricSample(name="samples_per_second", value=figures.samples_per_s)
            yield _MetricSample(name="data_wait_share", value=figures.wait_share)
        if isinstance(event, RunStarted | Formed | Failed | Joined | Resized | Replanned | Probed):
            yield _MetricSample(name="workers", value=self._workers.workers)
            yield _MetricSample(name="workers_wanted", value=self._workers.wanted)
        if isinstance(event, RunEnded) or event.time_s >= self._goodput_s + GOODPUT_INTERVAL_S:
            self._goodput_s = event.time_s
            yield _MetricSample(name="goodput", value=self._folding.totals().goodput)


class _WorkerCount:
    """Counts the workers that take part and those that the plan asks for."""

    def __init__(self) -> None:
        self.wanted = self._formed = self._more = 0
        self._down: set[int] = set()

    @property
    def workers(self) -> int:
        """Workers that take part now."""
        return max(self._formed - len(self._down) + self._more, 0)

    def take(self, event: Event) -> None:
        match event:
            case RunStarted() | Probed():
                plan = plan_from(event.plan)
                self.wanted = plan.workers if plan else 0
            case Replanned():
                self.wanted = event.workers
            case Resized():
                self.wanted = max(self.wanted, event.workers)
            case Formed():
                self._formed, self._more, self._down = event.workers, 0, set()
            case Failed() if event.rank >= 0:
                self._down.add(event.rank)
            case Joined():
                self._more += event.rank not in self._down and event.former < 0
                self._down.discard(event.rank)


def _step_samples(event: Steps) -> Iterator[_MetricSample]:
    yield _MetricSample(name="steps", value=len(event.step))
    yield _MetricSample(name="samples", value=sum(event.samples))
    yield _MetricSample(name="data_wait_seconds", value=sum(value for value in event.wait_s if math.isfinite(value)))
    for seconds in event.step_s:
        yield _MetricSample(name="step_seconds", value=seconds)


def _checkpoint_samples(event: Checkpointed) -> Iterator[_MetricSample]:
    yield _MetricSample(name="checkpoints", value=1)
    yield _MetricSample(name="checkpoint_bytes", value=event.size_bytes)
    yield _MetricSample(name="checkpoint_seconds", value=event.seconds)
    yield _MetricSample(name="checkpoint_blocked_seconds", value=event.blocked_s)


# --- metrics ----------------------------------------------------------------------------------------------------------


LABELS = ("run", "strategy")  # every metric has these
_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: the name without prefix.
        kind: a gauge is the current value, a counter only grows, a histogram counts values by size.
        text: the description, with units.
        labels: in addition to those of every metric.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name for Ray."""
        return f"trainwright_{self.name}"

    @property
    def exported(self) -> tuple[str, ...]:
        """The names of the series that Prometheus scrapes."""
        endings = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        return tuple(f"ray_{self.full_name}{ending}" for ending in endings[self.kind])


METRICS = {
    metric.name: metric
    for metric in (
        MetricSpec(name="step", kind="gauge", text="Steps completed that count; less after a recovery that lost some"),
        MetricSpec(name="total_steps", kind="gauge", text="Steps of the whole run"),
        MetricSpec(name="loss", kind="gauge", text="Training loss, mean of the last 50 steps"),
        MetricSpec(
            name="samples_per_second", kind="gauge", text="Samples a second while stepping, over the last 50 steps"
        ),
        MetricSpec(
            name="data_wait_share", kind="gauge", text="Share of the last 50 steps that waited for data, 0 to 1"
        ),
        MetricSpec(
            name="goodput", kind="gauge", text="Share of this driver's time spent computing steps that count, 0 to 1"
        ),
        MetricSpec(name="workers", kind="gauge", text="Workers that take part now, without lost ones"),
        MetricSpec(name="workers_wanted", kind="gauge", text="Workers of the plan"),
        MetricSpec(name="checkpoint_bytes", kind="gauge", text="Size of the newest checkpoint in bytes"),
        MetricSpec(name="steps", kind="counter", text="Steps done, repeated ones included"),
        MetricSpec(name="samples", kind="counter", text="Samples trained on, those of repeated steps included"),
        MetricSpec(name="data_wait_seconds", kind="counter", text="Seconds of steps that waited for data"),
        MetricSpec(name="failures", kind="counter", text="Failures"),
        MetricSpec(
            name="recoveries", kind="counter", text="Recoveries by where the state came from", labels=("source",)
        ),
        MetricSpec(name="recovery_seconds", kind="counter", text="Seconds from failures to the next rendezvous"),
        MetricSpec(name="steps_lost", kind="counter", text="Completed steps that had to be repeated"),
        MetricSpec(name="checkpoints", kind="counter", text="Checkpoints committed"),
        MetricSpec(name="checkpoint_seconds", kind="counter", text="Seconds that it took to store checkpoints"),
        MetricSpec(name="checkpoint_blocked_seconds", kind="counter", text="Seconds that steps waited for checkpoints"),
        MetricSpec(name="step_seconds", kind="histogram", text="Seconds of a step"),
    )
}
