"""The example of workers that step alone, as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainwright as tw
from tests.support.processes import ROOT
from trainwright.planning.job_file import load_job
from trainwright.reporting.run_views import run_view


@pytest.mark.parametrize("form", ["async", "local"])
def test_the_example_learns_in_every_form(
    form: str, ray_cluster: None, forked_workers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = load_job(str(ROOT / "examples" / "parameter_server.py"), [f"form={form}", "spares=0"])
    run = tw.fit(job)
    assert run.metrics["accuracy"] > 0.9, run.metrics
    assert tw.evaluate(job, here=True)["accuracy"] == pytest.approx(run.metrics["accuracy"]), "of its checkpoint"
    shown = run_view("runs", f"parameter-server-{form}").data
    pushed = sum(shown["staleness"]["counts"].values())
    assert pushed == 2 * (40 if form == "local" else 320), "each share of each step once"
    assert shown["wait_share"] is None, "the servers that tell of steps know nothing of the workers' waiting"
