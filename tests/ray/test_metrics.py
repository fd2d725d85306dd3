"""What Prometheus gets of a run from Ray's endpoint: each metric that the dashboard draws, with what the run did."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import ray

import trainwright as tw
from tests.conftest import CLUSTER
from tests.support import ray_clusters, torch_jobs
from tests.support.finished_runs import told
from tests.support.metric_series import exported
from tests.support.processes import ROOT, wait_for
from trainwright.core import events
from trainwright.reporting.run_history import RunHistory
from trainwright.reporting.utilization import UtilizationMeter
from trainwright.storage.event_files import read_events
from trainwright.storage.object_store import open_store
from trainwright.tracking import listeners
from trainwright.tracking.listeners import METRICS

RUN = "scraped"
STEPS, KILLED = 20, 12
PEAK = 1e6  # samples a second of a made-up accelerator
SERIES = re.compile(r"^(ray_trainwright_\w+)\{(.*)\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def cluster_with_metrics(ray_cluster: None) -> Iterator[None]:
    """A cluster whose nodes send metrics."""
    (connect,) = CLUSTER
    connect(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_clusters, "small_agents", False)
        connect(True)
    yield
    connect(False)
    connect(True)


def scraped() -> dict[str, float]:
    """Values of the run's series by name, and of those with labels of their own by name and label."""
    (node,) = (node for node in ray.nodes() if node["Alive"])
    with urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = {}
    for name, words, value in SERIES.findall(text):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', words))
        if labels["run"] == RUN:
            assert labels["strategy"] == "one_device"
            own = [f"{key}={labels[key]}" for key in ("source", "le") if key in labels]
            found[",".join([name, *own])] = float(value)
    return found


def summed(steps: list[Any], name: str) -> float:
    """Of one field of all steps."""
    return float(sum(sum(getattr(event, name)) for event in steps))


def expected(folder: Path) -> dict[str, float]:
    """The same from what the run has told in its folder."""
    steps: Any = told(folder, RUN, events.Steps)
    formed: Any = told(folder, RUN, events.Formed)
    saved: Any = told(folder, RUN, events.Checkpointed)
    before = max(max(event.step) for event in steps if event.time_s < formed[-1].time_s)
    late = [event for event in steps if event.step[0] > formed[-1].step and event.time_s > formed[-1].time_s]
    losses = [value for event in late for value in event.loss]
    pace, samples = summed(late, "samples") / summed(late, "step_s"), summed(steps, "samples")
    done, waited = sum(len(event.step) for event in steps), summed(steps, "wait_s")
    totals = RunHistory.fold(read_events(open_store(str(folder)), RUN)).totals
    return {
        "step": STEPS, "total_steps": 27, "workers": 1, "workers_wanted": 1, "loss": sum(losses) / len(losses),
        "samples_per_second": pace, "data_wait_share": summed(late, "wait_s") / summed(late, "step_s"),
        "goodput": totals.goodput, "model_flops_utilization": pace / PEAK,
        "checkpoint_bytes": saved[-1].size_bytes, "steps_total": done, "samples_total": samples,
        "data_wait_seconds_total": waited, "failures_total": 1, "recoveries_total,source=checkpoint": 1,
        "recovery_seconds_total": formed[-1].seconds, "steps_lost_total": before - formed[-1].step,
        "checkpoints_total": len(saved), "checkpoint_seconds_total": sum(event.seconds for event in saved),
        "checkpoint_blocked_seconds_total": sum(event.blocked_s for event in saved),
        "step_seconds_count": done,
    }  # fmt: skip


def heard(folder: Path) -> bool:
    """Whether the run has told of a step shortly before the kill, and of a checkpoint."""
    steps: Any = told(folder, RUN, events.Steps)
    return any(KILLED - 1 in event.step for event in steps) and bool(told(folder, RUN, events.Checkpointed))


def test_what_prometheus_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hands it on every ten seconds. The run waits for that at a step, since its gauges end with it; before, its
    worker is killed after steps that the driver has heard of."""
    monkeypatch.setattr(listeners, "GOODPUT_INTERVAL_S", 0.0)  # reckoned with each event, not every ten seconds
    monkeypatch.setattr(UtilizationMeter, "at", lambda self, pace: pace / PEAK)  # CPUs have no data sheet
    gate, folder = tmp_path / "gate", tmp_path / "runs"

    def held(step: int, total: int) -> float:
        tick = threading.Event()
        while (step == KILLED - 1 and not heard(folder)) or (step >= STEPS and not gate.exists()):
            tick.wait(0.02)
        return 1.0

    kill = torch_jobs.Kill(rank=0, step=KILLED, folder=str(tmp_path))
    run = tw.start(torch_jobs.job(folder, (kill,), name=RUN, workers=1, schedule=held))
    found: dict[str, float] = {}

    def differing() -> dict[str, tuple[float, float]]:
        found.update(scraped())
        should = {f"ray_trainwright_{name}": value for name, value in expected(folder).items()}
        pairs = {name: (found.get(name, -1.0), value) for name, value in should.items()}
        return {name: (ours, value) for name, (ours, value) in pairs.items() if ours != pytest.approx(value)}

    try:
        wait_for(lambda: found.get("ray_trainwright_step") == STEPS or bool(found.update(scraped())), 60)
        with contextlib.suppress(AssertionError):  # Ray hands on one gauge after the other
            wait_for(lambda: not differing(), 25)
        assert differing() == {}
    finally:
        gate.touch()
        run.wait()
    names = {name.partition(",")[0] for name in found}
    assert names == {series for metric in METRICS.values() for series in exported(metric)}
    board = json.loads((ROOT / "clusters" / "grafana.json").read_text())
    drawn = {
        name
        for panel in board["panels"]
        for each in panel.get("targets", ())
        for name in re.findall(r"ray_\w+", each["expr"])
    }
    assert drawn and drawn <= names
