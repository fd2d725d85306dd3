"""What a run's events come to in metrics, where its dashboard is, and the file for Grafana."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.metric_series import exported
from tests.support.run_views import printed, record, storage
from tests.support.sample_run import started, stepped, whole_run
from trainwright.core import events
from trainwright.ray_cluster.ray_compat import dashboard_facts
from trainwright.reporting import run_views as views
from trainwright.reporting.run_history import RunHistory
from trainwright.reporting.run_views import dashboard_text
from trainwright.storage.run_summary import MOST_ROWS
from trainwright.tracking import listeners
from trainwright.tracking.listeners import LABELS, METRICS, MetricSpec, PrometheusListener

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "clusters/grafana.json").read_text(encoding="utf-8"))
COLUMNS = 24
OWN_LABELS = {"le"}  # that Prometheus adds to a histogram


class Shelf:
    """Keeps what is recorded, as Prometheus would see it."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.observed: list[float] = []

    def record(self, metric: MetricSpec, value: float, labels: Mapping[str, str]) -> None:
        assert set(labels) == {*LABELS, *metric.labels}
        key = (metric.name, *(labels[name] for name in metric.labels), labels["strategy"])
        if metric.kind == "histogram":
            self.observed.append(value)
        elif metric.kind == "counter":
            assert value > 0, "Ray refuses others"
            self.values[key] = self.values.get(key, 0.0) + value
        elif math.isnan(value):
            del self.values[key]
        else:
            self.values[key] = value


def told(happened: list[events.Event]) -> Shelf:
    """All that these events record."""
    shelf = Shelf()
    metrics = PrometheusListener(shelf.record)
    for event in happened:
        metrics.on(event)
    return shelf


def on_accelerators() -> list[events.Event]:
    """The whole run, with a plan that knows the peak rate of its devices."""
    begun: Any = whole_run()[0]
    estimate = {**begun.plan["estimate"], "sample_flops": 1.0, "peak_flops_per_s": 2560.0}
    return [replace(begun, plan={**begun.plan, "estimate": estimate}), *whole_run()[1:]]


def test_a_whole_run() -> None:
    shelf = told(on_accelerators())
    history = RunHistory.fold(whole_run())
    dp = "data_parallel"
    assert shelf.values == {
        ("step", dp): 20, ("total_steps", dp): 20, ("workers", dp): 2, ("workers_wanted", dp): 2,
        ("loss", dp): pytest.approx(0.05), ("samples_per_second", dp): pytest.approx(2560),
        ("data_wait_share", dp): pytest.approx(0.2), ("model_flops_utilization", dp): pytest.approx(0.5),
        ("goodput", dp): history.totals.goodput,
        ("checkpoint_bytes", dp): 2048, ("checkpoints", dp): 2, ("checkpoint_seconds", dp): 2,
        ("checkpoint_blocked_seconds", dp): pytest.approx(0.2),
        ("steps", dp): 22, ("samples", dp): 22 * 256, ("data_wait_seconds", dp): pytest.approx(0.44),
        ("failures", dp): 1, ("recoveries", "checkpoint", dp): 1, ("recovery_seconds", dp): 2, ("steps_lost", dp): 2,
    }  # fmt: skip
    assert shelf.observed == [0.1] * 22
    assert {key[0] for key in shelf.values} | {"step_seconds"} == set(METRICS), "no metric is without a value"


def test_the_end_leaves_counters_alone() -> None:
    shelf = Shelf()
    metrics = PrometheusListener(shelf.record)
    for event in whole_run():
        metrics.on(event)
    metrics.close()
    assert {METRICS[key[0]].kind for key in shelf.values} == {"counter"}


def test_a_worker_that_is_lost_is_missed_until_the_group_forms_again() -> None:
    run = whole_run()
    failed = next(number for number, event in enumerate(run) if isinstance(event, events.Failed))
    assert told(run[: failed + 1]).values["workers", "data_parallel"] == 1
    assert told(run[: failed + 2]).values["workers", "data_parallel"] == 2


def test_workers_that_step_alone_come_and_go() -> None:
    alone = events.Formed(time_s=104, workers=2)
    gone = events.Failed(time_s=105, rank=1, cause="killed")
    back = events.Joined(time_s=106, rank=1, former=1)
    more = events.Joined(time_s=107, rank=2)
    quiet = replace(stepped([1, 2], time_s=108), wait_s=[math.nan, math.nan])
    run = [started(), alone, gone, back, more, quiet]
    counts = [told(run[:number]).values["workers", "data_parallel"] for number in range(2, 6)]
    assert counts == [2, 1, 2, 3]
    values = told(run).values
    assert ("data_wait_share", "data_parallel") not in values and values["samples_per_second", "data_parallel"] == 2560


def test_another_plan_ends_the_gauges_of_the_one_before() -> None:
    plan = {**started().plan, "strategy": "one_device"}
    run = [started(), events.Formed(time_s=104, workers=2), stepped([1], time_s=105)]
    run += [events.Replanned(time_s=106, plan=plan, workers=1), events.Formed(time_s=107, workers=1, step=1)]
    values = told(run).values
    gauges = {key for key in values if METRICS[key[0]].kind == "gauge"}
    assert {key[-1] for key in gauges} == {"one_device"}
    assert values["workers_wanted", "one_device"] == 1


def test_nothing_is_told_before_the_run_has_begun() -> None:
    assert told([events.Noted(time_s=1, text="early")]).values == {}


def test_a_long_run_keeps_few_steps_and_its_goodput() -> None:
    run: list[events.Event] = [started(total=20_000), events.Formed(time_s=104, workers=2, seconds=4)]
    logged = {"kl": [0.5] * 10}
    run += [
        replace(stepped(range(first, first + 10), time_s=105 + first / 10), logged=logged)
        for first in range(1, 19_991, 10)
    ]
    run += [
        events.Failed(time_s=2206, rank=0, cause="killed"),
        events.Formed(time_s=2208, workers=2, step=19_980, seconds=2, source="replica"),
        stepped(range(19_981, 20_001), time_s=2211),
        events.RunEnded(time_s=2212, outcome="done", step=20_000),
    ]
    reader = listeners.MetricCollector()
    last: dict[str, float] = {}
    for event in run:
        last |= dict(reader.take(event))
    assert last["goodput"] == pytest.approx(20_000 * 0.08 / 2112)
    assert len(reader._summary.steps) <= MOST_ROWS and not reader._summary.steps.logged


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:8265", "http://127.0.0.1:8265/#/jobs/01000000"),
        ("10.0.0.5:8265", "http://10.0.0.5:8265/#/jobs/01000000"),
        ("https://me:word@ray.example.org/cluster/?token=secret", "https://ray.example.org/cluster/#/jobs/01000000"),
        ("[::1]:8265", "http://[::1]:8265/#/jobs/01000000"),
    ],
)
def test_the_dashboard_of_a_job(address: str, url: str) -> None:
    assert dashboard_facts(address, "01000000", "10.0.0.5:6379") == {"url": url, "job": "01000000", "node": "10.0.0.5"}


def test_no_dashboard() -> None:
    assert dashboard_facts("", "01000000", "10.0.0.5:6379") == {} and dashboard_text({}) == ""


def test_show_leads_to_the_dashboard() -> None:
    uri = storage()
    record(uri, [replace(started(), dashboard=dashboard_facts("127.0.0.1:8265", "01000000", "10.0.0.5:6379"))])
    view = views.run_view(uri, "demo")
    assert view.data["dashboard"] == {
        "url": "http://127.0.0.1:8265/#/jobs/01000000",
        "job": "01000000",
        "node": "10.0.0.5",
    }
    text = printed(view)
    assert "http://127.0.0.1:8265/#/jobs/01000000 on 10.0.0.5" in text
    assert "ssh -L 8265:127.0.0.1:8265 10.0.0.5" in " ".join(text.split())
    assert (
        dashboard_text(dashboard_facts("10.0.0.5:8265", "01000000", "10.0.0.5:1"))
        == "http://10.0.0.5:8265/#/jobs/01000000"
    )


def test_show_without_a_dashboard() -> None:
    uri = storage()
    record(uri, whole_run(), outcome="done")
    view = views.run_view(uri, "demo")
    assert view.data["dashboard"] is None and "dashboard" not in printed(view)


def panels() -> Iterator[dict[str, Any]]:
    """Those of the file that show something."""
    return (panel for panel in BOARD["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_board_is_one_that_grafana_imports() -> None:
    assert BOARD["schemaVersion"] >= 39 and BOARD["id"] is None and BOARD["uid"] and BOARD["title"]
    assert BOARD["time"] == {"from": "now-1h", "to": "now"}
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert variables["run"]["type"] == "query" and variables["run"]["multi"] and variables["run"]["includeAll"]
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["title"] and panel["description"] and panel["type"] in ("timeseries", "stat", "heatmap")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        names = [target["refId"] for target in panel["targets"]]
        assert names and len(set(names)) == len(names)
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_no_panel_covers_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = set(itertools.product(columns, rows))
        assert not cells & taken, panel["title"]
        taken |= cells


def test_each_expression_names_what_is_exported() -> None:
    labels_of = {
        series: {*LABELS, *metric.labels, *(OWN_LABELS if series.endswith("_bucket") else ())}
        for metric in METRICS.values()
        for series in exported(metric)
    }
    for expression in [*expressions(), BOARD["templating"]["list"][1]["query"]["query"]]:
        found = re.findall(r"(ray_\w+)(?:\{([^}]*)\})?", expression)
        assert found, expression
        for series, selector in found:
            assert series in labels_of, f"{series} is not exported"
            assert set(re.findall(r"(\w+)=", selector)) <= labels_of[series], expression
        grouped = {name for names in re.findall(r"by \(([^)]*)\)", expression) for name in re.split(r", *", names)}
        assert grouped <= set.intersection(*(labels_of[series] for series, _ in found)), expression


def test_every_metric_is_on_a_panel_and_every_panel_is_of_the_chosen_runs() -> None:
    shown = set(re.findall(r"ray_\w+", " ".join(expressions())))
    assert [metric.name for metric in METRICS.values() if not shown & set(exported(metric))] == []
    assert all('{run=~"$run"' in expression for expression in expressions())
