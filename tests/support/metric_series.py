"""The names under which Prometheus scrapes a metric from Ray."""

from __future__ import annotations

from trainwright.tracking.listeners import MetricSpec

ENDINGS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def exported(metric: MetricSpec) -> tuple[str, ...]:
    """The series of one metric."""
    return tuple(f"ray_{metric.full_name}{ending}" for ending in ENDINGS[metric.kind])
