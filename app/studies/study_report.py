"""What a study found: tables and charts with means over seeds and their 95% intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.reporting.html.run_charts import Band, bands_chart
from trainwright.reporting.html.templates import render_page, render_template
from trainwright.reporting.run_history import RunHistory
from trainwright.reporting.run_views import RunView
from trainwright.storage.run_summary import staleness_of
from trainwright.studies.study_trials import StudyKind, StudyTrial

_Place = Callable[[RunHistory, float], float]  # of an evaluation after a step, on the x axis

# 97.5% quantiles of Student's t distribution by degrees of freedom, 1 to 30; the last one is taken beyond.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over seeds with its 95% interval; that of one seed is NaN."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Return the mean of at least one value, by Student's t distribution; NaN where a value is not finite."""
        mean, count = fmean(values), len(values)
        if not math.isfinite(mean):
            return cls(mean=math.nan, low=math.nan, high=math.nan, count=count)
        if count == 1:
            return cls(mean=mean, low=math.nan, high=math.nan, count=1)
        quantile = _T[min(count - 2, len(_T) - 1)]
        apart = quantile * stdev(values) / math.sqrt(count)
        return cls(mean=mean, low=mean - apart, high=mean + apart, count=count)


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """A study that was run."""

    kind: StudyKind
    name: str  # of the job
    metric: str  # the metric that is compared, or `samples/s`
    trials: Sequence[StudyTrial]  # with their histories
    # samples/s of studies by workers, beyond the measured numbers, by curve
    predictions: Mapping[str, Sequence[Band]] = field(default_factory=dict)
    predicted_for: str = ""  # the cluster that they are for

    @property
    def x_name(self) -> str:
        """What is varied."""
        return "batch size" if self.kind == "batch" else "workers"

    @property
    def means(self) -> dict[tuple[str, int], Mean]:
        """The compared value by curve and x."""
        values: dict[tuple[str, int], list[float]] = {}
        for trial in self.trials:
            value = math.nan if trial.error else self._value(_history(trial))
            values.setdefault((trial.label, trial.x), []).append(value)
        return {key: Mean.of(found) for key, found in values.items()}

    def data(self) -> dict[str, Any]:
        """Return the study for programs."""
        rows = [
            {"curve": label, "x": x, "mean": formatting.finite(mean.mean), "low": formatting.finite(mean.low),
             "high": formatting.finite(mean.high), "seeds": mean.count}
            for (label, x), mean in self.means.items()
        ]  # fmt: skip
        predicted = [
            {"curve": label, **each._asdict(), "unit": "samples/s"}
            for label, bands in self.predictions.items()
            for each in bands
        ]
        runs = [
            {"curve": trial.label, "x": trial.x, "seed": trial.seed, "run": trial.job.name} for trial in self.trials
        ]
        return {
            "study": self.kind,
            "job": self.name,
            "metric": self.metric,
            "x": self.x_name,
            "rows": rows,
            "predicted": predicted,
            "runs": runs,
        }

    def view(self) -> RunView:
        """Return the table for a terminal, and the data."""
        headings, rows = self._table()
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
        for number, heading in enumerate(headings):
            table.add_column(Text(heading), justify="right" if number else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        notes = Text("\n".join(self._sentences()), style="dim")
        title = Text.assemble((f"{self.kind} study of {self.name}", "bold"))
        return RunView(data=self.data(), content=Group(title, Padding(table, (1, 0, 1, 2)), notes))

    def page(self) -> str:
        """Return charts and the table as an HTML page without scripts."""
        from markupsafe import Markup

        headings, rows = self._table()
        body = render_template(
            "tables.html.j2",
            headline=f"{self.kind} study of {self.name}",
            charts=[(title, Markup(svg)) for title, svg in self._charts()],
            tables=[("Figures", headings, rows)],
            numbers=headings[1:],
            sentences=self._sentences(),
        )
        return render_page(f"trainwright study {self.kind}", body)

    def _value(self, history: RunHistory) -> float:
        return history.samples_per_s if self.kind == "scaling" else history.metrics.get(self.metric, math.nan)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        headings = ["", self.x_name, self.metric, "95% interval", "seeds"]
        means, rows = self.means, []
        fewest, first = min(((x, mean.mean) for (_, x), mean in means.items()), key=itemgetter(0))
        for (label, x), mean in means.items():
            interval = f"{_figure(mean.low)} to {_figure(mean.high)}" if math.isfinite(mean.low) else "-"
            row = [label, f"{x:,}", _figure(mean.mean), interval, str(mean.count)]
            if self.kind == "scaling":
                times = mean.mean / first
                row += [f"{times:.2f}", formatting.percent(times * fewest / x)]
            elif self.kind == "convergence":
                spent = [_spent(_history(trial), math.inf) for trial in self._trials(label, x)]
                row += [formatting.duration(fmean(spent))]
            rows.append(row)
        for label, each in ((label, each) for label, bands in self.predictions.items() for each in bands):
            row = [f"{label}, predicted", f"{each.x:,}"]
            if self.kind == "scaling":
                times, interval = each.mean / first, f"{_figure(each.low)} to {_figure(each.high)}"
                row += [_figure(each.mean), interval, "-", f"{times:.2f}", formatting.percent(times * fewest / each.x)]
            else:
                samples = fmean(_samples(_history(trial), math.inf) for trial in self._widest(label))
                row += ["-", "-", "-", formatting.duration(samples / each.mean)]
            rows.append(row)
        more = {"scaling": ["speed-up", "efficiency"], "convergence": ["time of steps"], "batch": []}
        return [*headings, *more[self.kind]], rows

    def _trials(self, label: str, x: int) -> list[StudyTrial]:
        return [trial for trial in self.trials if (trial.label, trial.x) == (label, x)]

    def _widest(self, label: str) -> list[StudyTrial]:
        """Return the trials of a curve with the most workers."""
        return self._trials(label, max(x for name, x in self.means if name == label))

    def _charts(self) -> list[tuple[str, str]]:
        if self.kind == "convergence":
            predicted = {
                _curve_name(label, each.x): self._curve(self._widest(label), _at_rate(each.mean))
                for label, bands in self.predictions.items()
                for each in bands
            }
            return [
                (f"{self.metric} over time", self._curves("seconds of steps", _spent, predicted)),
                (f"{self.metric} over samples", self._curves("samples", _samples)),
            ]
        measured: dict[str, list[Band]] = {}
        for (label, x), mean in self.means.items():
            measured.setdefault(label, []).append(Band(x=x, mean=mean.mean, low=mean.low, high=mean.high))
        title = f"{self.metric} by {self.x_name}"
        if self.kind == "batch":
            scale = self._noise_scale()
            mark = ("gradient noise scale", scale) if scale is not None else None
            return [(title, bands_chart(title, measured, self.x_name, log=True, mark=mark))]
        points = list(chain(*measured.values(), *self.predictions.values()))
        first, largest = min(points, key=itemgetter(0)), max(point.x for point in points)
        ideal = [(first.x, first.mean), (largest, first.mean * largest / first.x)]
        beyond = {label: [*measured[label][-1:], *bands] for label, bands in self.predictions.items()}
        return [(title, bands_chart(title, measured, self.x_name, ideal=ideal, beyond=beyond))]

    def _curves(self, xlabel: str, place: _Place, beyond: Mapping[str, Sequence[Band]] | None = None) -> str:
        """Draw the metric of each number of workers."""
        curves = {_curve_name(label, x): self._curve(self._trials(label, x), place) for label, x in self.means}
        return bands_chart(f"{self.metric} by {xlabel}", curves, xlabel, beyond=beyond)

    def _curve(self, trials: Sequence[StudyTrial], place: _Place) -> list[Band]:
        """Return the metric by evaluation, the mean over seeds."""
        lines = [
            [(place(_history(trial), each.step), each.metrics[self.metric]) for each in _history(trial).evaluated]
            for trial in trials
        ]
        found = []
        for points in zip(*lines, strict=False):
            mean = Mean.of([value for _, value in points])
            at = fmean(where for where, _ in points)
            found.append(Band(x=at, mean=mean.mean, low=mean.low, high=mean.high))
        return found

    def _noise_scale(self) -> float | None:
        """Return the mean of the runs' gradient noise scales, in samples; None where none was measured."""
        known = [_history(trial).noise for trial in self.trials]
        scales = [noise[1].scale for noise in known if noise is not None]
        return fmean(scales) if scales else None

    def _sentences(self) -> list[str]:
        cluster = {_history(trial).summary.start.cluster for trial in self.trials}
        found = [f"Measured on: {'; '.join(sorted(cluster))}. Means over seeds, with 95% intervals by Student's t."]
        found += [
            f"{each.job.name} failed, so that its row has no figure: {each.error}" for each in self.trials if each.error
        ]
        if self.kind == "scaling":
            found.append("The global batch is the same everywhere. Speed-up is over the fewest workers.")
        if self.predictions:
            found.append(
                "Predicted rows were not run: their throughput is of the cost model, fitted to the measured steps, for "
                f"{self.predicted_for}."
            )
            if self.kind == "scaling":
                found.append("Nine of ten steps are expected in the interval.")
            else:
                found.append(
                    "Their curves are those of the most measured workers at that throughput: with the same global "
                    "batch, synchronous steps compute the same on any number of workers, apart from rounding, random "
                    "numbers, and batch norm over the rows of a worker."
                )
        if self.kind == "convergence":
            found.append("Time counts steps alone, not the start, evaluations and checkpoints.")
            if max(len(_history(trial).evaluated) for trial in self.trials) < 2:
                found.append("The runs were evaluated once, so that there are no curves: see evaluate_epochs=.")
            for label, x in self.means:
                stale = [staleness_of(_history(trial).summary.stale) for trial in self._trials(label, x)]
                if any(each.counts for each in stale):
                    mean = fmean(each.mean for each in stale)
                    found.append(f"Staleness, {label}, {formatting.count(x, 'worker')}: {mean:.2f} {stale[0].unit}.")
        if self.kind == "batch":
            scale = self._noise_scale()
            if scale is not None:
                found.append(f"Gradient noise scale: {scale:,.0f} samples (McCandlish et al., 2018), mean of the runs.")
        return found


def metric_of(trials: Sequence[StudyTrial], wanted: str | None) -> str:
    """Return the metric to compare: the wanted one, or the first that is not the loss.

    Raises KeyError with the known ones where the wanted one was not evaluated.
    """
    known = dict.fromkeys(name for trial in trials for name in _history(trial).metrics)
    if wanted is not None and wanted not in known:
        raise KeyError(", ".join(known))
    return wanted or next((name for name in known if name != "loss"), "loss")


def _history(trial: StudyTrial) -> RunHistory:
    assert trial.history is not None, "the trial was run"
    return trial.history


def _curve_name(label: str, workers: float) -> str:
    return f"{label}, {formatting.count(workers, 'worker')}"


def _spent(history: RunHistory, step: float) -> float:
    return sum(record.step_s for record in history.records if record.step <= step)


def _samples(history: RunHistory, step: float) -> float:
    return sum(record.samples for record in history.records if record.step <= step)


def _at_rate(samples_per_s: float) -> _Place:
    """Return the seconds that steps take at a throughput."""
    return lambda history, step: _samples(history, step) / samples_per_s


def _figure(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return formatting.metric(value) if abs(value) < 100 else f"{value:,.0f}"
