"""`trainwright study` as a user types it: real runs, a page, and a repeated command that runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli_job import JOB
from tests.support.processes import address, finish


@pytest.mark.usefixtures("ray_cluster")
def test_batch_sizes_are_compared_and_a_repeated_command_runs_nothing(tmp_path: Path) -> None:
    file, page = tmp_path / "job.py", tmp_path / "page.html"
    file.write_text(JOB.format(storage=str(tmp_path / "runs")))
    command = ["study", "batch", file, "--sizes", "250", "--seeds", "1", "--set", "workers=1", "--set", "epochs=1"]
    code, out, err = finish(*command, "--html", page, "--json", cluster=address())
    assert code == 0, err
    data = json.loads(out)
    assert [(row["curve"], row["x"]) for row in data["rows"]] == [(rule, 250) for rule in ("same rate", "linear rule")]
    assert all(0.0 < row["mean"] <= 1.0 for row in data["rows"]) and data["metric"] == "accuracy"
    assert "accuracy by batch size" in page.read_text()
    code, out, err = finish(*command, "--json", cluster=address())
    assert code == 0 and err.count("it is finished already") == 2 and json.loads(out) == data, err
