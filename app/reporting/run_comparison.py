"""Several runs side by side: figures, curves, and what differs between their jobs. Read from storage alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.errors import PlanError
from trainwright.reporting.plan_view import plan_from
from trainwright.reporting.run_history import RunHistory
from trainwright.reporting.run_views import RunView, run_details
from trainwright.reporting.stored_run import StoredRun, open_run

_LONGEST = 200  # characters of a job's field in the terminal


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Runs side by side.

    Attributes:
        details: of each run, as `trainwright show --json` prints them, by name.
        histories: steps and evaluations of each run, by name.
        price: dollars an hour of one accelerator; None leaves the cost out.
    """

    details: Mapping[str, Mapping[str, Any]]
    histories: Mapping[str, RunHistory]
    price: float | None = None

    @property
    def differences(self) -> dict[str, dict[str, str]]:
        """Fields of the jobs, plans and versions that are not the same in all runs: their texts, by run."""
        given = {
            name: {
                **{field: str(value) for field, value in details["job"].items()},
                "plan": details["plan_line"],
                "cluster": details["cluster"],
                **{f"version of {package}": version for package, version in details["versions"].items()},
            }
            for name, details in self.details.items()
        }
        fields = dict.fromkeys(field for each in given.values() for field in each if field != "name")
        found = {field: {name: each.get(field, "") for name, each in given.items()} for field in fields}
        return {field: values for field, values in found.items() if len({*values.values()}) > 1}

    def view(self) -> RunView:
        """Return figures and differences for a terminal, and as data."""
        names = [*self.details]
        data = {"runs": [dict(each) for each in self.details.values()], "differences": self.differences}
        if self.price is not None:
            data["dollars"] = {name: self.price * _accelerator_hours(each) for name, each in self.details.items()}
        parts: list[RenderableType] = [_table(["", *names], self._figures(), right=True)]
        different = [[field, *(_short(values[name]) for name in names)] for field, values in self.differences.items()]
        if different:
            parts += [Text("\nDifferences", style="bold"), _table(["", *names], different, right=False)]
        else:
            parts.append(Text("\nthe jobs, plans and versions are the same", style="dim"))
        return RunView(data=data, content=Group(*(Padding(part, (0, 0, 0, 2)) for part in parts)))

    def page(self) -> str:
        """Return charts, figures and differences as an HTML page without scripts."""
        from trainwright.reporting.html.templates import render_page

        return render_page("trainwright compare", self._repr_html_())

    def __repr__(self) -> str:
        return f"RunComparison({', '.join(self.details)})"

    def _repr_html_(self) -> str:
        from markupsafe import Markup

        from trainwright.reporting.html.run_charts import curves_chart
        from trainwright.reporting.html.templates import render_template

        names = [*self.details]
        charts = [
            (title, Markup(curves_chart(title, curves, xlabel, log=False)))
            for title, xlabel, curves in self._curves()
            if any(curves.values())
        ]
        different = [(field, *(values[name] for name in names)) for field, values in self.differences.items()]
        return render_template(
            "tables.html.j2",
            headline=", ".join(names),
            charts=charts,
            tables=[
                ("Figures", ["", *names], self._figures()),
                *[("Differences", ["", *names], different)] * bool(different),
            ],
            numbers=(),
            sentences=[
                "Accelerator hours are the accelerators of the plan's workers times the hours of the whole run. "
                "Recoveries are counted, spares and parameter servers are not."
            ],
        )

    def _figures(self) -> list[list[str]]:
        """Return a row for each figure: its name and a cell for each run."""
        metrics = dict.fromkeys(name for each in self.details.values() for name in each["metrics"])
        rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
            ("state", lambda run: str(run["state"])),
            ("step", lambda run: f"{run['step']:,}/{run['total_steps']:,}"),
            ("training loss", lambda run: _number(run["loss"])),
            *((f"evaluation: {name}", lambda run, name=name: _number(run["metrics"].get(name))) for name in metrics),
            ("samples/s", lambda run: "-" if run["samples_per_s"] is None else f"{run['samples_per_s']:,.0f}"),
            ("MFU", lambda run: "-" if run["mfu"] is None else formatting.percent(run["mfu"])),
            ("time", lambda run: formatting.duration(run["seconds"]["wall"])),
            ("accelerator hours", lambda run: f"{_accelerator_hours(run):.3g}"),
            ("cost", self._cost),
            ("goodput", lambda run: "-" if run["goodput"] is None else formatting.percent(run["goodput"])),
            ("failures", lambda run: str(len(run["failures"]))),
            ("steps lost", lambda run: str(run["steps_lost"])),
        ]
        found = [[name, *(cell(run) for run in self.details.values())] for name, cell in rows]
        return [row for row in found if {*row[1:]} != {"-"}]

    def _cost(self, run: Mapping[str, Any]) -> str:
        return "-" if self.price is None else formatting.dollars(self.price * _accelerator_hours(run))

    def _curves(self) -> Iterator[tuple[str, str, dict[str, list[tuple[float, float]]]]]:
        """Yield title, label of the x axis, and the points of each run."""
        yield "Training loss by step, smoothed", "step", self._of(_by_step)
        yield "Training loss by time, smoothed", "seconds of steps", self._of(_by_time)
        for metric in dict.fromkeys(name for each in self.histories.values() for name in each.metrics):
            yield f"Evaluation: {metric} by step", "step", self._of(partial(_evaluated, metric))

    def _of(self, points: Callable[[RunHistory], list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
        return {name: points(history) for name, history in self.histories.items()}


def compare(*runs: str | StoredRun, storage: str = "runs", price: float | None = None) -> RunComparison:
    """Return runs side by side: their figures and curves, and how their jobs differ. Notebooks show it as a page.

    Args:
        runs: names, or handles such as `tw.fit` and `tw.open_run` return.
        storage: where runs are that are given by name: a folder or a URI.
        price: dollars an hour of one accelerator (GPU, TPU or CPU slot), which adds the cost of each run.

    Raises:
        PlanError: `price` is not a positive number.
        StorageError: there is no such run, or the store cannot be read.
    """
    if price is not None and not 0 < price < math.inf:
        remedy = "give the dollars an hour of one accelerator: 2.50"
        raise PlanError(f"price={price:g} must be above 0 and finite", where="price", remedy=remedy)
    opened = [open_run(run, storage) if isinstance(run, str) else run for run in dict.fromkeys(runs)]
    times = Counter(run.name for run in opened)
    named = {run.name if times[run.name] == 1 else run.folder: run for run in opened}
    histories = {name: run.read() for name, run in named.items()}
    details = {name: run_details(named[name].store, named[name].name, history) for name, history in histories.items()}
    return RunComparison(details=details, histories=histories, price=price)


def _by_step(history: RunHistory) -> list[tuple[float, float]]:
    return [*zip((record.step for record in history.records), _losses(history), strict=True)]


def _by_time(history: RunHistory) -> list[tuple[float, float]]:
    seconds = accumulate(record.step_s for record in history.records)
    return [*zip(seconds, _losses(history), strict=True)]


def _losses(history: RunHistory) -> list[float]:
    from trainwright.reporting.html.chart_data import smooth

    return smooth([record.loss for record in history.records], max(3, len(history.records) // 25))


def _evaluated(metric: str, history: RunHistory) -> list[tuple[float, float]]:
    return [(each.step, each.metrics[metric]) for each in history.evaluated if metric in each.metrics]


def _accelerator_hours(run: Mapping[str, Any]) -> float:
    plan = plan_from(run["plan"])
    hours: float = run["seconds"]["wall"] / 3600
    return hours * (plan.workers * plan.devices_per_worker if plan else 1)


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else formatting.metric(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(
            Text(heading),
            justify="right" if right and number else "left",
            style="" if number else "dim",
            no_wrap=right or not number,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table
