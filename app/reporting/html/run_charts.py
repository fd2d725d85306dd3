"""Curves as SVG for a page that sets the colours: matplotlib draws with stand-in colours, CSS variables replace them.

So one figure suits light and dark. Long runs are drawn in at most `_BINS` points, each the mean of its steps.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainwright.core import formatting
from trainwright.reporting.run_history import RunHistory
from trainwright.storage.run_records import StepRecord, staleness_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS, _BARS = 500, 60
_COLOURS = {
    "ink": "#010101", "soft": "#020202", "grid": "#030303", "series-1": "#040404", "series-2": "#050505",
    "series-3": "#060606", "series-4": "#070707", "bad": "#080808", "good": "#090909",
}  # fmt: skip
_SERIES = [_COLOURS[f"series-{number}"] for number in range(1, 5)]
_SETTINGS = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": _COLOURS["grid"],
    "axes.labelcolor": _COLOURS["soft"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _COLOURS["grid"],
    "grid.linewidth": 0.7,
    "text.color": _COLOURS["ink"],
    "xtick.color": _COLOURS["soft"],
    "ytick.color": _COLOURS["soft"],
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
_WIDE, _HALF, _SMALL = (9.6, 3.3), (4.7, 2.7), (2.7, 1.5)


def loss_chart(history: RunHistory) -> str:
    """Loss by step, smoothed over the raw one, with evaluations, failures and recoveries; empty without steps."""
    if not history.records:
        return ""
    wide = not _metrics_chart_names(history)

    def draw(axes: Axes) -> None:
        steps, losses = _binned(history.records, lambda record: record.loss)
        axes.plot(steps, losses, color=_COLOURS["series-1"], alpha=0.28, linewidth=1.0)
        smoothed = smooth(losses, max(3, len(losses) // 25))
        # A line through one point is invisible, so it gets a marker.
        axes.plot(steps, smoothed, color=_COLOURS["series-1"], marker="o" if len(steps) == 1 else "", label="training")
        points = [(e.step, e.metrics["loss"]) for e in history.evaluated if "loss" in e.metrics]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=_COLOURS["series-2"], markersize=4, label="evaluation")
        _clip_outliers(axes, losses + [value for _, value in points])
        _mark_incidents(axes, history)
        if points or history.summary.failures:
            _legend(axes)

    return _svg("loss", _WIDE if wide else _HALF, draw, "step")


def _metrics_chart_names(history: RunHistory) -> list[str]:
    """Metrics that get a curve: all but the loss, at most four."""
    names = sorted({name for evaluation in history.evaluated for name in evaluation.metrics})
    return [name for name in names if name != "loss"][:4]


def metrics_chart(history: RunHistory) -> str:
    """Metrics by step, each line labelled with its name and last value; empty without an evaluation."""
    names = _metrics_chart_names(history)
    if not names:
        return ""

    def draw(axes: Axes) -> None:
        for number, name in enumerate(names, 1):
            points = [(e.step, e.metrics[name]) for e in history.evaluated if name in e.metrics]
            last = formatting.metric(points[-1][1])
            colour = _COLOURS[f"series-{number}"]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=f"{name}  {last}")
        axes.margins(y=0.15)
        _legend(axes)

    return _svg("metrics", _HALF, draw, "step")


def small_charts(history: RunHistory) -> list[tuple[str, str]]:
    """Titles and figures of what is watched beside the loss; empty without steps."""
    if not history.records:
        return []
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
    found = [(title, _small(f"small-{number}", history, value)) for number, (title, value) in enumerate(of)]
    stale = staleness_chart(history)
    return [*found, ("Staleness, % of what was pushed", stale)] if stale else found


def _pace(records: Sequence[StepRecord]) -> dict[int, float]:
    """Samples a second by step, over those around it: of workers that step alone, several end at once."""
    window = max(5, len(records) // 25)
    samples = smooth([float(record.samples) for record in records], window)
    seconds = smooth([record.step_s for record in records], window)
    pairs = zip(records, samples, seconds, strict=True)
    return {record.step: count / took for record, count, took in pairs if took > 0}


def _small(name: str, history: RunHistory, value: Callable[[StepRecord], float]) -> str:
    def draw(axes: Axes) -> None:
        steps, values = _binned(history.records, value)
        axes.plot(steps, values, color=_COLOURS["series-1"], linewidth=1.3, marker="o" if len(steps) == 1 else "")
        finite = [number for number in values if math.isfinite(number)]
        if finite:
            axes.set_ylim(0, max(max(finite) * 1.12, 1e-12))

    return _svg(name, _SMALL, draw, "")


def staleness_chart(history: RunHistory) -> str:
    """How stale the updates were that workers which step alone made; empty where no update was."""
    staleness = staleness_of(history.summary.stale)
    counts = sorted(staleness.counts.items())
    if len(counts) < 2:
        return ""

    def draw(axes: Axes) -> None:
        total, width = sum(count for _, count in counts), max(1, math.ceil((counts[-1][0] + 1) / _BARS))
        heights: dict[int, float] = {}
        for age, count in counts:
            heights[age // width] = heights.get(age // width, 0.0) + 100 * count / total
        places = [(number + 0.5) * width for number in heights]  # a bar begins at its age: none is cut at 0
        axes.bar(places, list(heights.values()), width=0.86 * width, color=_COLOURS["series-1"])
        axes.axvline(
            staleness.mean + 0.5, color=_COLOURS["series-2"], linewidth=1.4, label=f"mean {staleness.mean:.1f}"
        )
        _legend(axes)

    return _svg("staleness", _SMALL, draw, staleness.unit)


def curves_chart(name: str, curves: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, *, log: bool) -> str:
    """Curves with their names, such as of what was simulated; heights that are no numbers are left out."""

    def draw(axes: Axes) -> None:
        for number, (label, points) in enumerate(curves.items()):
            kept = [point for point in points if math.isfinite(point[1]) and (point[1] > 0 or not log)]
            if not kept:
                continue  # it has its colour in another figure
            dashed = (0, (4, 2)) if number >= len(_SERIES) else "-"
            axes.plot(*zip(*kept, strict=True), color=_SERIES[number % len(_SERIES)], linestyle=dashed, label=label)
        if log:
            axes.set_yscale("log")
        _legend(axes)

    return _svg(name, _WIDE, draw, xlabel, log=log)


def _binned(
    records: Sequence[StepRecord], value: Callable[[StepRecord], float], most: int = _BINS
) -> tuple[list[float], list[float]]:
    """Steps and finite means of about `most` runs of as many steps at most; NaN where none is finite."""
    size = max(1, math.ceil(sum(record.count for record in records) / most))
    steps, means, part = list[float](), list[float](), list[tuple[float, int]]()
    for record in records:
        part.append((value(record), record.count))
        if sum(count for _, count in part) >= size or record is records[-1]:
            finite = [(number, count) for number, count in part if math.isfinite(number)]
            weight = sum(count for _, count in finite)
            steps.append(float(record.step))
            means.append(sum(number * count for number, count in finite) / weight if weight else math.nan)
            part = []
    return steps, means


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the finite values in a window around each; centred, so that a falling curve does not lag."""
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


def _clip_outliers(axes: Axes, values: Sequence[float]) -> None:
    """Keep a few huge losses, at the very start mostly, from pressing the curve flat."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if len(ordered) >= 20:
        low, high = ordered[0], ordered[int(0.99 * (len(ordered) - 1))]
        margin = 0.08 * (high - low)
        if high > low:
            axes.set_ylim(low - margin, high + 2 * margin)


def _mark_incidents(axes: Axes, history: RunHistory) -> None:
    for number, failure in enumerate(history.summary.failures):
        label = "failure" if number == 0 else None
        axes.axvline(failure.step, color=_COLOURS["bad"], linewidth=1.1, linestyle=(0, (3, 2)), label=label)
    back = [recovery.formed.step for recovery in history.summary.recoveries]
    if back:
        colour, feet = _COLOURS["good"], [0.0] * len(back)
        foot = axes.get_xaxis_transform()
        axes.plot(back, feet, "^", color=colour, markersize=7, transform=foot, clip_on=False, label="recovered at")


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, labelcolor=_COLOURS["ink"], fontsize=9.5, handlelength=1.4, borderaxespad=0.2)


def _svg(
    name: str, inches: tuple[float, float], draw: Callable[[Axes], None], xlabel: str, *, log: bool = False
) -> str:
    """Draw one figure; ids carry its name, so that several figures live in one page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    settings: Any = {**_SETTINGS, "svg.hashsalt": name}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6 if inches != _SMALL else 4, integer=True))
        if not log:
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5 if inches != _SMALL else 3))
        draw(axes)
        axes.set_xlim(left=0)
        axes.set_xlabel(xlabel)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata=_NO_METADATA)
    return _themed(out.getvalue(), name)


_NO_METADATA: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}


def _themed(svg: str, name: str) -> str:
    """The bare <svg> element, sized by the page, with CSS variables for colours and the page's own font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    opening = rf'<svg class="figure" viewBox="\1" role="img" aria-label="{name}">'
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', opening, svg, count=1)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    for variable, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", svg)
