"""A worker's error that quotes a secret: nothing that is stored or said has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import trainwright as tw
from tests.support.regression_job import job, squared
from trainwright.core.errors import UserCodeError
from trainwright.core.redaction import REDACTED
from trainwright.reporting.run_views import log_lines, run_view

CANARY = "canary-of-a-worker/7+x="


def telling(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    os.environ["CANARY_API_KEY"] = CANARY  # as the node's environment has it
    if outputs.requires_grad:
        raise PermissionError(f"403 for key {os.environ['CANARY_API_KEY']}")
    return squared(outputs, targets)


def test_a_secret_in_a_workers_error_is_told_to_nobody(
    tmp_path: Path, ray_cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserCodeError, match="403 for key") as caught:
        tw.fit(job(tmp_path, loss=telling, failures=0))
    assert REDACTED in str(caught.value)
    storage = str(tmp_path / "runs")
    lines = [*log_lines(storage, "wrong", as_json=True)]
    said = f"{caught.value}{run_view(storage, 'wrong').data}{lines}{capfd.readouterr()}"
    stored = {str(path): path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert "403 for key" in said and CANARY not in said
    assert any(b"403 for key" in data for data in stored.values()), "the run tells of the error"
    assert [path for path, data in stored.items() if CANARY.encode() in data] == []
