"""A run's metrics at Ray's own Prometheus endpoint."""

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
    """Takes values of metrics."""

    def record(self, metric: MetricSpec, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge, add to a counter or to a histogram; NaN ends the series of a gauge."""


class PrometheusListener:
    """A listener that tells Ray's metrics agent of this node, which Prometheus scrapes.

    It costs the driver microseconds an event and no call: Ray sends what was recorded every 10 s
    (`metrics_report_interval_ms`). The gauges of a run end with it, its counters stay until the cluster ends, as
    counters must; those of a driver that died are dropped by Ray after two reports.

    Args:
        sink: takes the values; by default Ray.
    """

    def __init__(self, sink: _MetricSink | None = None) -> None:
        self._sink = sink or _RayMetrics()
        self._readings = MetricCollector()
        self._gauges: dict[str, Mapping[str, str]] = {}

    def on(self, event: Event) -> None:
        """Record what one event changes."""
        readings, strategy = list(self._readings.take(event)), self._readings.strategy
        if not self._readings.run:
            return  # nothing is told before the run has begun
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
        """End the gauges: a run that has ended has no throughput, and no worker."""
        self._end_gauges()

    def _end_gauges(self) -> None:
        for name, labels in self._gauges.items():
            self._sink.record(METRICS[name], math.nan, labels)
        self._gauges.clear()


class _RayMetrics:
    """Ray's own metrics of this process; made once, whatever number of runs records into them."""

    def record(self, metric: MetricSpec, value: float, labels: Mapping[str, str]) -> None:
        """See `Sink.record`. Ray 2.60 exports a gauge no more that is not a number."""
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


# --- What a run's events come to in metrics ---------------------------------------------------------------------------


GOODPUT_INTERVAL_S = 10.0  # between sums over all of them, which take milliseconds


@dataclass(frozen=True, kw_only=True)
class _MetricSample:
    """A value of a metric of the catalogue: set for a gauge, added for others. `source` only of recoveries."""

    name: str
    value: float
    source: str = ""


class MetricCollector:
    """Folds one driver's events, which come in order.

    Loss, throughput and waiting are those of the progress bar, goodput is the report's of what this driver did.

    Attributes:
        run, strategy: labels of all readings; empty before the run has started.
    """

    def __init__(self) -> None:
        self.run = self.strategy = ""
        self._narrator, self._folding, self._crew = EventFormatter(), RunSummary(), _WorkerCount()
        self._goodput_s = -math.inf

    def take(self, event: Event) -> Iterator[_MetricSample]:
        """What one event changes. Exhaust it before the next."""
        folding = self._folding
        lost, recovered = folding.steps_lost, len(folding.recoveries)
        self._narrator.tell(event)
        folding.add(event)
        self._crew.take(event)
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
            figures = self._narrator.figures
            yield _MetricSample(name="step", value=figures.step)
            yield _MetricSample(name="loss", value=figures.loss)
            yield _MetricSample(name="samples_per_second", value=figures.samples_per_s)
            yield _MetricSample(name="data_wait_share", value=figures.wait_share)
        if isinstance(event, RunStarted | Formed | Failed | Joined | Resized | Replanned | Probed):
            yield _MetricSample(name="workers", value=self._crew.workers)
            yield _MetricSample(name="workers_wanted", value=self._crew.wanted)
        if isinstance(event, RunEnded) or event.time_s >= self._goodput_s + GOODPUT_INTERVAL_S:
            self._goodput_s = event.time_s
            yield _MetricSample(name="goodput", value=self._folding.totals().goodput)


class _WorkerCount:
    """Who takes part."""

    def __init__(self) -> None:
        self.wanted = self._formed = self._more = 0
        self._down: set[int] = set()

    @property
    def workers(self) -> int:
        """That take part now."""
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


# --- Every metric of a run --------------------------------------------------------------------------------------------


LABELS = ("run", "strategy")  # of every metric
_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: without what comes before it.
        kind: a gauge is the value now, a counter only grows, a histogram counts values by size.
        text: its meaning, units included.
        labels: beside those of every metric.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As it is given to Ray."""
        return f"trainwright_{self.name}"

    @property
    def exported(self) -> tuple[str, ...]:
        """Names of the series that Prometheus scrapes."""
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
        MetricSpec(name="workers", kind="gauge", text="Workers that take part now, without those that are lost"),
        MetricSpec(name="workers_wanted", kind="gauge", text="Workers that the plan wants"),
        MetricSpec(name="checkpoint_bytes", kind="gauge", text="Size of the newest checkpoint in bytes"),
        MetricSpec(name="steps", kind="counter", text="Steps done, those done again included"),
        MetricSpec(name="samples", kind="counter", text="Samples trained on, those of steps done again included"),
        MetricSpec(name="data_wait_seconds", kind="counter", text="Seconds of steps that waited for data"),
        MetricSpec(name="failures", kind="counter", text="Failures"),
        MetricSpec(
            name="recoveries", kind="counter", text="Recoveries by where the state came from", labels=("source",)
        ),
        MetricSpec(
            name="recovery_seconds", kind="counter", text="Seconds from failures to the group being formed again"
        ),
        MetricSpec(name="steps_lost", kind="counter", text="Completed steps that had to be done again"),
        MetricSpec(name="checkpoints", kind="counter", text="Checkpoints committed"),
        MetricSpec(name="checkpoint_seconds", kind="counter", text="Seconds that checkpoints took to be stored"),
        MetricSpec(name="checkpoint_blocked_seconds", kind="counter", text="Seconds that steps waited for checkpoints"),
        MetricSpec(name="step_seconds", kind="histogram", text="Seconds of a step"),
    )
}
