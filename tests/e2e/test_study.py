"""`trainwright study` as a user types it: real runs, a page, and a repeated command that runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli_job import JOB
from tests.support.processes import address, finish

DIVERGES = 'reduction="none") * (float("nan") if len(labels) == 500 else 1)'


@pytest.mark.usefixtures("ray_cluster")
def test_batch_sizes_are_compared_and_a_repeated_command_runs_nothing(tmp_path: Path) -> None:
    """Two at a time, then in turn; with the largest batch the loss is not finite."""
    file, page = tmp_path / "job.py", tmp_path / "page.html"
    file.write_text(JOB.replace('reduction="none")', DIVERGES).format(storage=str(tmp_path / "runs")))
    command = ["study", "batch", file, "--sizes", "250,500", "--seeds", "1", "--set", "workers=1", "--set", "epochs=1"]
    code, out, err = finish(*command, "--concurrent", "2", "--html", page, "--json", cluster=address())
    assert code == 0, err
    data = json.loads(out)
    rows = {(row["curve"], row["x"]): row["mean"] for row in data["rows"]}
    assert all(0.0 < rows[rule, 250] <= 1.0 for rule in ("same rate", "linear rule")) and data["metric"] == "accuracy"
    assert len(rows) == 4 and rows["same rate", 500] is rows["linear rule", 500] is None
    assert "accuracy by batch size" in page.read_text()
    assert "4 runs, at most 2 at a time" in err and err.count(" is finished\n") == 2
    assert err.count("failed: the loss became nan in step 1") == 2, err
    code, out, err = finish(*command, "--json", cluster=address())
    assert code == 0 and err.count("it is finished already") == 2 and json.loads(out) == data, err
