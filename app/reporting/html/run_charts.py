"""Charts as SVG, for pages that set the colours.

matplotlib draws with placeholder colours, which CSS variables replace, so figures suit light and dark pages. Curves of
a run are drawn here for notebooks, which may run no scripts; the report draws its own (`chart_data`). Long runs are
drawn with at most `_BINS` points, each the mean of several steps.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from trainwright.core import formatting
from trainwright.reporting.html.chart_data import binned, metric_names, smooth, usual_range
from trainwright.reporting.run_history import RunHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BINS = 500
_COLOURS = {
    "ink": "#010101", "soft": "#020202", "grid": "#030303", "series-1": "#040404", "series-2": "#050505",
    "series-3": "#060606", "series-4": "#070707", "bad": "#080808", "good": "#090909", "series-5": "#0a0a0a",
    "series-6": "#0b0b0b", "series-7": "#0c0c0c", "card": "#0d0d0d", "paper": "#0e0e0e",
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
_WIDE, _HALF, _SQUARE = (9.6, 3.3), (4.7, 2.7), (4.6, 4.2)
_MOST_NUMBERED_CLASSES = 10  # with more classes the cells are too small for numbers
_LEAST_SHARE = 0.01
_ROUND_S = [unit * times for unit in (1, 60, 3600, 86400) for times in (1, 2, 5, 10, 20)]  # and more days
_ROUND_S += [86400 * times for times in (50, 100, 200, 500, 1000, 10_000, 100_000)]
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


def loss_chart(history: RunHistory) -> str:
    """Draw the raw and the smoothed loss by step, with evaluations, failures and recoveries; empty without steps."""
    if not history.records:
        return ""
    wide = not metric_names(history)

    def draw(axes: Axes) -> None:
        steps, losses = binned(history.records, lambda record: record.loss, _BINS)
        axes.plot(steps, losses, color=_COLOURS["series-1"], alpha=0.28, linewidth=1.0)
        smoothed = smooth(losses, max(3, len(losses) // 25))
        # A line through one point is invisible, so it gets a marker.
        axes.plot(steps, smoothed, color=_COLOURS["series-1"], marker="o" if len(steps) == 1 else "", label="training")
        points = [(e.step, e.metrics["loss"]) for e in history.evaluated if "loss" in e.metrics]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=_COLOURS["series-2"], markersize=4, label="evaluation")
        if shown := usual_range(losses + [value for _, value in points]):
            axes.set_ylim(*shown)
        _mark_incidents(axes, history)
        if points or history.summary.failures:
            _legend(axes)

    return _svg("loss", _WIDE if wide else _HALF, draw, "step")


def metrics_chart(history: RunHistory) -> str:
    """Draw metrics by step, each line with its name and last value; empty without an evaluation."""
    names = metric_names(history)
    if not names:
        return ""

    def draw(axes: Axes) -> None:
        for number, name in enumerate(names, 1):
            points = [(e.step, e.metrics[name]) for e in history.evaluated if name in e.metrics]
            last = formatting.metric(points[-1][1])
            colour = _COLOURS[f"series-{number}"]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=_no_math(f"{name}  {last}"))
        axes.margins(y=0.15)
        _legend(axes)

    return _svg("metrics", _HALF, draw, "step")


def curves_chart(name: str, curves: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, *, log: bool) -> str:
    """Draw curves with their names; values that are not finite are left out."""

    def draw(axes: Axes) -> None:
        for number, (label, points) in enumerate(curves.items()):
            kept = [point for point in points if math.isfinite(point[1]) and (point[1] > 0 or not log)]
            if not kept:
                continue  # it keeps its colour for other figures
            dashed = (0, (4, 2)) if number >= len(_SERIES) else "-"
            colour, marker = _SERIES[number % len(_SERIES)], "o" if len(kept) == 1 else ""
            axes.plot(*zip(*kept, strict=True), color=colour, linestyle=dashed, marker=marker, label=_no_math(label))
        if log:
            axes.set_yscale("log")
        _legend(axes)

    return _svg(name, _WIDE, draw, xlabel, log=log)


def scaling_charts(counts: Sequence[int], times_s: Sequence[float], dollars: Sequence[float], chosen: int) -> list[str]:
    """Draw the time of a run by the number of accelerators, and its cost; nothing for one number.

    Args:
        times_s: for each of `counts`.
        dollars: likewise; empty where no price is known.
        chosen: index of the number that is marked.
    """
    if len(counts) < 2:
        return []
    ideal_s = [times_s[0] * counts[0] / count for count in counts]

    def draw(axes: Axes, values: Sequence[float]) -> None:
        from matplotlib.ticker import NullFormatter

        axes.set_xscale("log")
        axes.set_xticks(shown := counts[:: math.ceil(len(counts) / 8)], [f"{count:,}" for count in shown])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.plot(counts, values, "o-", color=_COLOURS["series-1"], markersize=4)
        axes.plot(counts[chosen], values[chosen], "o", color=_COLOURS["series-2"], markersize=8, label="chosen")
        _legend(axes)

    def draw_time(axes: Axes) -> None:
        from matplotlib.ticker import NullFormatter

        axes.set_yscale("log")
        axes.plot(counts, ideal_s, ":", color=_COLOURS["soft"], label="if each added as much as the first")
        draw(axes, times_s)
        low_s, high_s = axes.get_ylim()
        ticks_s = [seconds for seconds in _ROUND_S if low_s <= seconds <= high_s]
        axes.set_yticks(ticks_s := ticks_s[:: math.ceil(len(ticks_s) / 6) or 1], map(formatting.duration, ticks_s))
        axes.yaxis.set_minor_formatter(NullFormatter())

    def draw_cost(axes: Axes) -> None:
        draw(axes, dollars)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda cost, _: f"${cost:,.10g}")

    drawn = [("time of the run", draw_time, True), *([("cost of the run", draw_cost, False)] if dollars else [])]
    return [_svg(name, _HALF, function, f"{name}, by accelerators", log=log) for name, function, log in drawn]


def soft_targets_chart(model: str, chances: Sequence[Sequence[float]], classes: Sequence[int]) -> str:
    """Draw a model's mean probabilities: a row for each true class, a column for each predicted one.

    The shade of a cell is the square root of its probability, so that small probabilities are visible too.
    """

    def draw(axes: Axes) -> None:
        from matplotlib.patches import Rectangle

        look: dict[str, Any] = {"edgecolor": _COLOURS["paper"], "linewidth": 0.8, "clip_on": False}
        axes.add_patch(Rectangle((0, 0), len(classes), len(chances), facecolor=_COLOURS["card"], **look))
        for row, shares in enumerate(chances):
            for column, share in enumerate(shares):
                shade = math.sqrt(min(max(share, 0.0), 1.0))
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=(_COLOURS["series-1"], shade), **look))
                if share >= 0.005 and len(classes) <= _MOST_NUMBERED_CLASSES:
                    ink, number = _COLOURS["paper" if shade > 0.6 else "ink"], f"{100 * share:.0f}"
                    axes.text(column + 0.5, row + 0.52, number, color=ink, fontsize=8, ha="center", va="center")
        places, names = [place + 0.5 for place in range(len(classes))], [str(number) for number in classes]
        axes.set(xlim=(0, len(classes)), ylim=(len(classes), 0), xticks=places, yticks=places)
        axes.set_xticklabels(names)
        axes.set_yticklabels(names)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)

    side = 0.36 * len(classes) + 0.5
    return _svg(f"soft targets of {model}", (side, side), draw, "", widest_px=round(72 * side))


def reliability_chart(bins: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Draw accuracy by confidence, a line for each model; a calibrated model is on the diagonal.

    Args:
        bins: by model, the mean confidence, the accuracy and the share of all units of each bin. Bins of less than a
            hundredth of all units are left out.
    """

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import PercentFormatter

        axes.plot([0, 1], [0, 1], color=_COLOURS["soft"], linewidth=1.0, linestyle=(0, (4, 3)))
        for (model, rows), number in zip(bins.items(), range(1, 8), strict=False):
            shown = [row for row in rows if row[2] >= _LEAST_SHARE]
            if shown:
                confidences, accuracies, shares = zip(*shown, strict=True)
                colour, sizes = _COLOURS[f"series-{number}"], [(3 + 12 * math.sqrt(share)) ** 2 for share in shares]
                axes.plot(confidences, accuracies, color=colour, linewidth=1.6, label=_no_math(model))
                axes.scatter(confidences, accuracies, s=sizes, color=colour, alpha=0.75, linewidth=0, clip_on=False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0))
        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=_QUARTERS, yticks=_QUARTERS, ylabel="accuracy")
        _legend(axes)

    return _svg("reliability", _SQUARE, draw, "confidence", widest_px=440)


def _no_math(text: str) -> str:
    """Return a text that matplotlib shows as it is."""
    return text.replace("$", r"\$")


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
    name: str,
    inches: tuple[float, float],
    draw: Callable[[Axes], None],
    xlabel: str,
    *,
    log: bool = False,
    widest_px: int | None = None,
) -> str:
    """Draw one figure. Its ids depend on its name, so that a page can hold several figures."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    settings: Any = {**_SETTINGS, "svg.hashsalt": name}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if not log:
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        draw(axes)
        if axes.get_xscale() != "log":
            axes.set_xlim(left=0)
        axes.set_xlabel(xlabel)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata=_NO_METADATA)
    return _themed(out.getvalue(), name, widest_px)


_NO_METADATA: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}


def _themed(svg: str, name: str, widest_px: int | None) -> str:
    """Return the <svg> element without size and styles, with CSS variables for colours and the font of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    width = f' width="{widest_px}"' if widest_px else ""
    attributes = f'role="img" aria-label="{escape(name)}"{width} stroke-linejoin="round" stroke-linecap="butt"'
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        lambda found: f'<svg class="figure" viewBox="{found[1]}" {attributes}>',
        svg,
        count=1,
    )
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r' style="([^"]*)"', lambda found: _attributes(found[1]), svg)
    for variable, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", svg)


def _attributes(style: str) -> str:
    """Return the declarations of a style as attributes, which a page's policy does not forbid."""
    pairs = [part.split(":", 1) for part in style.split(";") if ":" in part]
    return "".join(f' {name.strip()}="{value.strip()}"' for name, value in pairs)


# --- Notebooks --------------------------------------------------------------------------------------------------------


def notebook_figure(width: float, height: float) -> Figure:
    """Return an empty matplotlib figure, in inches, that notebooks show although pyplot did not make it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure with the method that notebooks ask for a picture."""

        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            FigureCanvasAgg(self).print_figure(out, format="png")
            return out.getvalue()

    return Shown(figsize=(width, height), layout="constrained")


# --- Studies ----------------------------------------------------------------------------------------------------------


class Band(NamedTuple):
    """A point of a curve with its interval, whose ends may be NaN."""

    x: float
    mean: float
    low: float
    high: float


def bands_chart(
    name: str,
    curves: Mapping[str, Sequence[Band]],
    xlabel: str,
    *,
    log: bool = False,
    ideal: Sequence[tuple[float, float]] = (),
    mark: tuple[str, float] | None = None,
    beyond: Mapping[str, Sequence[Band]] | None = None,
) -> str:
    """Draw curves with intervals.

    Args:
        log: the x axis is logarithmic, to base 2.
        ideal: points of a dashed line.
        mark: name and place of a vertical line.
        beyond: predicted curves, drawn with dots; one with the name of a curve continues it from its last point on.
    """
    names = dict.fromkeys([*curves, *(beyond or {})])
    styles = {
        label: {"color": _SERIES[number % len(_SERIES)], "marker": "o", "markersize": 4}
        for number, label in enumerate(names)
    }

    def draw(axes: Axes) -> None:
        if log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        for number, (label, bands) in enumerate(curves.items()):
            style: dict[str, Any] = {**styles[label], "linestyle": (0, (4, 2)) if number >= len(_SERIES) else "-"}
            colour, x = style["color"], [band.x for band in bands]
            axes.plot(x, [band.mean for band in bands], label=_no_math(label), **style)
            known = [band for band in bands if math.isfinite(band.low)]
            at, lows, highs = ([getattr(band, name) for band in known] for name in ("x", "low", "high"))
            if len(known) == 1:
                axes.vlines(at, lows, highs, color=colour, linewidth=1.5, alpha=0.5)
            elif known:
                axes.fill_between(at, lows, highs, color=colour, alpha=0.18, linewidth=0)
        for label, more in (beyond or {}).items():
            style = {**styles[label], "linestyle": (0, (1, 2)), "markerfacecolor": "none"}
            x, means = [band.x for band in more], [band.mean for band in more]
            axes.plot(x, means, label=_no_math(f"{label}, predicted"), **style)
            lows, highs = [band.low for band in more], [band.high for band in more]
            axes.fill_between(x, lows, highs, color=style["color"], alpha=0.1)
        if ideal:
            dashed = (0, (4, 2))
            axes.plot(*zip(*ideal, strict=True), color=_COLOURS["soft"], linestyle=dashed, linewidth=1.2, label="ideal")
            shown = (*curves.values(), *(beyond or {}).values())
            axes.set_xticks(sorted({band.x for bands in shown for band in bands}))
        if mark is not None:
            axes.axvline(mark[1], color=_COLOURS["soft"], linestyle=(0, (2, 2)), linewidth=1.2, label=mark[0])
        _legend(axes)

    return _svg(name, _WIDE, draw, xlabel)
