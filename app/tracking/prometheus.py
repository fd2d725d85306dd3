"""A run's metrics at Ray's own Prometheus endpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

from trainwright.core.events import Event
from trainwright.tracking.metric_catalogue import BOUNDARIES_S, LABELS, METRICS, Metric
from trainwright.tracking.metric_values import Reading, Readings


class Sink(Protocol):
    """Takes values of metrics."""

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge, add to a counter or to a histogram; NaN ends the series of a gauge."""


class Metrics:
    """A listener that tells Ray's metrics agent of this node, which Prometheus scrapes.

    It costs the driver microseconds an event and no call: Ray sends what was recorded every 10 s
    (`metrics_report_interval_ms`). The gauges of a run end with it, its counters stay until the cluster ends, as
    counters must; those of a driver that died are dropped by Ray after two reports.

    Args:
        sink: takes the values; by default Ray.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink or RayMetrics()
        self._readings = Readings()
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

    def _record(self, reading: Reading, labels: dict[str, str]) -> None:
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


class RayMetrics:
    """Ray's own metrics of this process; made once, whatever number of runs records into them."""

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """See `Sink.record`. Ray 2.60 exports a gauge no more that is not a number."""
        made = _made(metric.name)
        match metric.kind:
            case "gauge":
                made.set(value, tags=dict(labels))
            case "counter":
                made.inc(value, tags=dict(labels))
            case "histogram":
                made.observe(value, tags=dict(labels))


@cache
def _made(name: str) -> Any:
    from ray.util import metrics

    metric = METRICS[name]
    options: dict[str, Any] = {"description": metric.text, "tag_keys": (*LABELS, *metric.labels)}
    if metric.kind == "histogram":
        return metrics.Histogram(metric.full_name, boundaries=list(BOUNDARIES_S), **options)
    kind: Any = metrics.Gauge if metric.kind == "gauge" else metrics.Counter
    return kind(metric.full_name, **options)
