"""Every metric of a run: its name, what kind it is, what it means, and how Prometheus sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LABELS = ("run", "strategy")  # of every metric
BOUNDARIES_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class Metric:
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
        Metric(name="step", kind="gauge", text="Steps completed that count; less after a recovery that lost some"),
        Metric(name="total_steps", kind="gauge", text="Steps of the whole run"),
        Metric(name="loss", kind="gauge", text="Training loss, mean of the last 50 steps"),
        Metric(name="samples_per_second", kind="gauge", text="Samples a second while stepping, over the last 50 steps"),
        Metric(name="data_wait_share", kind="gauge", text="Share of the last 50 steps that waited for data, 0 to 1"),
        Metric(
            name="goodput", kind="gauge", text="Share of this driver's time spent computing steps that count, 0 to 1"
        ),
        Metric(name="workers", kind="gauge", text="Workers that take part now, without those that are lost"),
        Metric(name="workers_wanted", kind="gauge", text="Workers that the plan wants"),
        Metric(name="checkpoint_bytes", kind="gauge", text="Size of the newest checkpoint in bytes"),
        Metric(name="steps", kind="counter", text="Steps done, those done again included"),
        Metric(name="samples", kind="counter", text="Samples trained on, those of steps done again included"),
        Metric(name="data_wait_seconds", kind="counter", text="Seconds of steps that waited for data"),
        Metric(name="failures", kind="counter", text="Failures"),
        Metric(
            name="recoveries", kind="counter", text="Recoveries by where the state came from", labels=("source",)
        ),
        Metric(name="recovery_seconds", kind="counter", text="Seconds from failures to the group being formed again"),
        Metric(name="steps_lost", kind="counter", text="Completed steps that had to be done again"),
        Metric(name="checkpoints", kind="counter", text="Checkpoints committed"),
        Metric(name="checkpoint_seconds", kind="counter", text="Seconds that checkpoints took to be stored"),
        Metric(name="checkpoint_blocked_seconds", kind="counter", text="Seconds that steps waited for checkpoints"),
        Metric(name="step_seconds", kind="histogram", text="Seconds of a step"),
    )
}  # fmt: skip
