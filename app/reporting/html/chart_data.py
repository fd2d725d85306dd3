"""Curves of a run as JSON values, which the script of the page draws.

Long runs have at most `_POINTS` points a curve, each the mean of several steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from trainwright.core import formatting
from trainwright.reporting.run_history import RunHistory
from trainwright.storage.run_summary import StepRecord, staleness_of

_POINTS, _BARS = 2000, 60
_MOST_LOGGED, _MOST_METRICS = 12, 4  # charts of logged values; metrics in one chart
_STEPS = "steps"  # stands for the x values that all curves of steps share


def chart_data(history: RunHistory) -> dict[str, Any]:
    """Return the charts of a run, and the steps of failures and recoveries that all of them mark.

    A chart has `tables`: x values, then the y values of each curve, None where there is none. For x values, `"steps"`
    stands for the list of that name.
    """
    records, summary = history.records, history.summary
    steps, _ = binned(records, lambda record: record.loss, _POINTS)
    charts = [_loss(history), *_metrics(history), *_of_steps(history), *_staleness(history)] if records else []
    return {
        "state": history.state,
        "steps": steps,
        "failures": [failure.step for failure in summary.failures],
        "recoveries": [recovery.formed.step for recovery in summary.recoveries],
        "charts": charts,
    }


def _loss(history: RunHistory) -> dict[str, Any]:
    _, losses = binned(history.records, lambda record: record.loss, _POINTS)
    points = [(each.step, each.metrics["loss"]) for each in history.evaluated if "loss" in each.metrics]
    series = [
        {"name": "training", "colour": "series-1", "faint": True},
        {"name": "training, smoothed", "colour": "series-1"},
    ]
    tables: list[list[Any]] = [[_STEPS, _values(losses), _values(smooth(losses, max(3, len(losses) // 25)))]]
    if points:
        series.append({"name": "evaluation", "colour": "series-2", "points": True})
        tables.append([[step for step, _ in points], _values(value for _, value in points)])
    shown = usual_range([*losses, *(value for _, value in points)])
    return {"name": "loss", "title": "Loss", "log": True, "range": shown, "series": series, "tables": tables}


def metric_names(history: RunHistory) -> list[str]:
    """Return the metrics to draw: all but the loss, at most four."""
    return _all_metric_names(history)[:_MOST_METRICS]


def undrawn_text(history: RunHistory) -> str:
    """Return how many metrics and logged values have no curve, and where they are; empty where all have one."""
    metrics = len(_all_metric_names(history)) - _MOST_METRICS
    logged = len(history.summary.steps.logged) - _MOST_LOGGED
    parts = [f"{formatting.count(metrics, 'more metric')} in run.evaluations"] * (metrics > 0)
    parts += [f"{formatting.count(logged, 'more logged value')} in run.history"] * (logged > 0)
    return f"Not drawn: {', '.join(parts)}." if parts else ""


def _all_metric_names(history: RunHistory) -> list[str]:
    return sorted({name for evaluation in history.evaluated for name in evaluation.metrics} - {"loss"})


def _metrics(history: RunHistory) -> list[dict[str, Any]]:
    names = metric_names(history)
    if not names:
        return []
    rows = [each for each in history.evaluated if any(name in each.metrics for name in names)]
    table = [[row.step for row in rows], *(_values(row.metrics.get(name, math.nan) for row in rows) for name in names)]
    series = [{"name": name, "colour": f"series-{n}", "points": True} for n, name in enumerate(names, 1)]
    title = "Metrics on the evaluation set"
    return [{"name": "metrics", "title": title, "series": series, "tables": [table]}]


def _of_steps(history: RunHistory) -> list[dict[str, Any]]:
    """Return small charts: throughput, waiting, learning rate, gradient norm and logged values."""
    pace = _pace(history.records) if history.summary.stale else {}
    of: list[tuple[str, Callable[[StepRecord], float]]] = [
        ("Samples/s", lambda record: pace.get(record.step, record.samples_per_s)),
        ("Waiting for data, % of the step", lambda r: 100 * r.wait_s / r.step_s if r.step_s > 0 else math.nan),
        ("Learning rate", lambda record: record.learning_rate),
    ]
    if not math.isfinite(history.wait_share):
        del of[1]
    if any(record.gradient_norm is not None for record in history.records):
        of.append(("Gradient norm before clipping", lambda r: math.nan if r.gradient_norm is None else r.gradient_norm))
    of += [(name, partial(_logged, name)) for name in [*history.summary.steps.logged][:_MOST_LOGGED]]
    return [
        {
            "name": f"step: {title}",
            "title": title,
            "small": True,
            "zero": True,
            "series": [{"name": "mean" if len(history.records) > _POINTS else "value", "colour": "series-1"}],
            "tables": [[_STEPS, _values(binned(history.records, value, _POINTS)[1])]],
        }
        for title, value in of
    ]


def _staleness(history: RunHistory) -> list[dict[str, Any]]:
    """Return a chart of the staleness of asynchronous workers' updates; none without different values."""
    staleness = staleness_of(history.summary.stale)
    counts = sorted(staleness.counts.items())
    if len(counts) < 2:
        return []
    total, width = sum(count for _, count in counts), max(1, math.ceil((counts[-1][0] + 1) / _BARS))
    heights: dict[int, float] = {}
    for age, count in counts:
        heights[age // width * width] = heights.get(age // width * width, 0.0) + 100 * count / total
    return [
        {
            "name": "staleness",
            "title": f"Staleness, % of what was pushed; mean {staleness.mean:.1f} {staleness.unit}",
            "small": True,
            "zero": True,
            "x": staleness.unit,
            "series": [{"name": "%", "colour": "series-1", "bars": True}],
            "tables": [[[*heights], _values(heights.values())]],
        }
    ]


def _logged(name: str, record: StepRecord) -> float:
    return record.logged.get(name, math.nan)


def _pace(records: Sequence[StepRecord]) -> dict[int, float]:
    """Return smoothed samples per second by step: steps of asynchronous workers may end at the same time."""
    window = max(5, len(records) // 25)
    samples = smooth([float(record.samples) for record in records], window)
    seconds = smooth([record.step_s for record in records], window)
    pairs = zip(records, samples, seconds, strict=True)
    return {record.step: count / took for record, count, took in pairs if took > 0}


def _values(values: Iterable[float]) -> list[float | None]:
    """Return values with six digits, as JSON has them: None for what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


# --- what static charts need too --------------------------------------------------------------------------------------


def binned(
    records: Sequence[StepRecord], value: Callable[[StepRecord], float], points: int
) -> tuple[list[int], list[float]]:
    """Return about `points` steps and means of groups of equally many steps; NaN where no value is finite."""
    size = max(1, math.ceil(sum(record.count for record in records) / points))
    steps, means, part = list[int](), list[float](), list[tuple[float, int]]()
    held = 0
    for record in records:
        part.append((value(record), record.count))
        held += record.count
        if held >= size or record is records[-1]:
            finite = [(number, count) for number, count in part if math.isfinite(number)]
            weight = sum(count for _, count in finite)
            steps.append(record.step)
            means.append(sum(number * count for number, count in finite) / weight if weight else math.nan)
            part, held = [], 0
    return steps, means


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the finite values in a centred window around each value."""
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    half, out = window // 2, []
    for place in range(len(values)):
        first, last = place - min(half, place), min(place + min(half, place) + 1, len(values))
        number = counts[last] - counts[first]
        out.append((sums[last] - sums[first]) / number if number else math.nan)
    return out


def usual_range(values: Sequence[float]) -> list[float | None] | None:
    """Return limits of the y axis by which a few huge losses, mostly at the start, do not flatten the curve."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if len(ordered) < 20:
        return None
    low, high = ordered[0], ordered[int(0.99 * (len(ordered) - 1))]
    margin = 0.08 * (high - low)
    return _values([low - margin, high + 2 * margin]) if high > low else None
