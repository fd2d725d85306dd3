"""What Ray prints about its nodes goes to stderr: stdout is for results."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private import worker

from trainwright.ray_cluster.ray_compat import errors_to_stderr


def test_what_a_node_reports_is_printed_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # and back
    for _ in range(2):
        errors_to_stderr()
    said = {"ip": "10.0.0.1", "job": None, "actor_name": "", "task_name": "", "is_err": False}
    worker.print_to_stdstream({"lines": ["a worker died"], "pid": "raylet", **said}, ignore_prefix=False)
    worker.print_to_stdstream({"lines": ["a worker says"], "pid": 12, **said}, ignore_prefix=False)
    out, err = capsys.readouterr()
    assert "a worker says" in out and "died" not in out
    assert err.count("a worker died") == 1
