"""Runs side by side, and a handle on a run by its storage alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainwright as tw
from tests.support.html_pages import Balance
from tests.support.run_views import printed, record, storage
from tests.support.sample_run import PLAN, started, stepped, whole_run
from trainwright.cli.main import app
from trainwright.core import events
from trainwright.core.errors import PlanError, RunConflict, StorageError
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import stop_request_path


def longer() -> list[events.Event]:
    """A run of another batch size and of other versions, without failures and evaluations."""
    begun = started(total=40)
    changed = replace(begun, job={**begun.job, "batch_size": "512"}, versions={"python": "3.12"})
    return [changed, events.Formed(time_s=101), stepped(range(1, 41), time_s=102)]


@pytest.fixture
def uri() -> str:
    where = storage()
    record(where, whole_run(), name="short", outcome="done")
    record(where, longer(), name="long", outcome="stopped")
    return where


def test_figures_and_differences_stand_side_by_side(uri: str) -> None:
    found = tw.compare("short", "long", storage=uri)
    assert found.differences["batch_size"] == {"short": "256", "long": "512"}
    assert found.differences["version of python"] == {"short": "3.11", "long": "3.12"}
    assert "plan" not in found.differences and "name" not in found.differences
    rows = [line for line in printed(found.view()).splitlines() if line.strip()]
    lines = {row.split("  ")[1].strip(): row.split()[-2:] for row in rows}
    assert lines["state"] == ["done", "stopped"] and lines["step"] == ["20/20", "40/40"]
    assert lines["evaluation: accuracy"] == ["0.9000", "-"] and lines["failures"] == ["1", "0"]
    assert lines["steps lost"] == ["2", "0"] and lines["batch_size"] == ["256", "512"]
    assert "MFU" not in lines, "it is known of none"


def test_a_price_of_an_accelerator_gives_the_cost_of_each_run(uri: str) -> None:
    found = tw.compare("short", "long", storage=uri, price=1800.0).view()
    assert isinstance(found.data, dict)
    for run in found.data["runs"]:
        accelerators_s = PLAN.workers * PLAN.devices_per_worker * run["seconds"]["wall"]
        assert found.data["dollars"][run["name"]] == pytest.approx(accelerators_s / 2)
    cost = next(line for line in printed(found).splitlines() if line.strip().startswith("cost")).split()[1:]
    assert cost == [f"${value:,.2f}" for value in found.data["dollars"].values()]
    for price in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="must be above 0"):
            tw.compare("short", "long", storage=uri, price=price)


def test_equal_jobs_are_said_to_be_equal_and_a_run_is_shown_once(uri: str) -> None:
    record(uri, whole_run(), name="again", outcome="done")
    found = tw.compare("short", tw.open_run("again", uri), "short", storage=uri)
    assert [*found.details] == ["short", "again"] and not found.differences
    assert "the jobs, plans and versions are the same" in printed(found.view())


def test_runs_of_one_name_are_told_apart_by_their_folders(uri: str) -> None:
    other = storage()
    record(other, longer(), name="short", outcome="done")
    found = tw.compare(tw.open_run("short", uri), tw.open_run("short", other))
    assert [*found.details] == [f"{uri}/short", f"{other}/short"]
    bracketed = replace(
        found,
        details={"a[/b]": found.details[f"{uri}/short"]},
        histories={"a[/b]": found.histories[f"{uri}/short"]},
    )
    assert "a[/b]" in printed(bracketed.view()), "a folder's name is no markup"


def test_the_command_writes_a_page_without_scripts_and_data_for_programs(tmp_path: Path) -> None:
    for name, happened in {"short": whole_run(), "<b>": longer()}.items():
        record(str(tmp_path), happened, name=name, outcome="done")
    page = tmp_path / "page.html"
    command = ["compare", "short", "<b>", "--storage", str(tmp_path), "--html", str(page)]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert [run["name"] for run in data["runs"]] == ["short", "<b>"] and "batch_size" in data["differences"]
    assert "dollars" not in data
    html, read = page.read_text(), Balance()
    read.feed(html)
    assert read.open == [] and "script" not in read.tags and "b" not in read.tags
    assert all(target.startswith("#") for target in read.fetched)
    for told in ("Training loss by step", "Evaluation: accuracy by step", "512", "accelerator hours"):
        assert told in html
    missing = CliRunner().invoke(app, ["compare", "short", "shrt", "--storage", str(tmp_path)])
    assert isinstance(missing.exception, StorageError) and "did you mean 'short'" in str(missing.exception)


def test_a_finished_run_is_opened_by_its_name(uri: str) -> None:
    run = tw.open_run("short", uri)
    assert (run.state, run.metrics["accuracy"], run.folder) == ("done", 0.9, f"{uri}/short")
    assert list(run.history["step"]) == list(range(1, 21)) and list(run.evaluations["step"]) == [10, 20]
    assert repr(run) == f"StoredRun('short', done, {uri}/short)" and "0.9000" in run._repr_html_()
    assert run.wait(), "it has ended"
    with pytest.raises(RunConflict, match="is not running: it is done"):
        run.stop()
    with pytest.raises(StorageError, match=r"no run 'shor'(.|\n)*did you mean 'short'"):
        tw.open_run("shor", uri)


def test_a_running_one_is_stopped_from_elsewhere(uri: str) -> None:
    record(uri, whole_run()[:8], name="live")
    run = tw.open_run("live", uri)
    assert run.state == "running"
    run.stop()
    assert open_store(uri).get(stop_request_path("live", 1)) == b"checkpoint"
    assert not run.wait(0.0)


def test_each_curve_has_its_own_axes(uri: str) -> None:
    figure: Any = tw.open_run("short", uri).plot()
    assert figure._repr_png_().startswith(b"\x89PNG"), "what a notebook shows"
    labels: Any = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss", "accuracy", "samples/s"]
    assert [axes.get_ylabel() for axes in tw.open_run("long", uri).plot().axes] == ["loss", "samples/s"]
