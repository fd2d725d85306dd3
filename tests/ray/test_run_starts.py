"""How a run begins on a cluster: an error before it does, which leaves nothing behind, and what its rank 0 prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.support.finished_runs import told
from trainwright.core import events
from trainwright.core.errors import JobError, UserCodeError
from trainwright.reporting.run_views import log_lines
from trainwright.runtime import function_trial
from trainwright.storage.object_store import open_store

ROWS = 32


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    print("loss of rank", rank)
    return (outputs[:, 0] - targets) ** 2


def model() -> nn.Module:
    print("the model is built")
    return nn.Linear(3, 1)


def job(folder: Path, **fields: Any) -> tw.Job:
    rows = tw.datasets.table({"x": np.ones((ROWS, 3), np.float32), "y": np.ones(ROWS, np.float32)})
    given: dict[str, Any] = {
        "name": "begun", "model": model, "loss": squared, "train": rows, "evaluate": rows, "inputs": "x",
        "targets": "y",
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "batch_size": 8, "workers": 2,
        "strategy": "data_parallel", "spares": 0, "keeper_s": 0, "storage": str(folder),
    }  # fmt: skip
    return tw.Job(**{**given, **fields})


def test_a_mended_job_goes_on_where_no_run_had_begun_and_rank_0_is_heard(
    tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_trial, "ray_is_connected", lambda: False)
    monkeypatch.setattr(
        function_trial, "start_method", lambda framework="": "fresh"
    )  # a fork may harm the connection of this process
    with pytest.raises(JobError, match="one value per sample") as caught:
        tw.fit(job(tmp_path, metrics={"close": lambda outputs, targets: (outputs[:, 0] - targets).mean()}))
    assert caught.value.where.endswith("rows before any worker started")
    assert next(open_store(str(tmp_path)).list("begun"), None) is None, "no run was begun"
    capsys.readouterr()
    assert tw.fit(job(tmp_path, metrics={"close": lambda outputs, targets: outputs[:, 0] - targets})).state == "done"
    shown = capsys.readouterr().err.splitlines()
    assert shown.count("[rank 0] the model is built") == 1, "the preflight's own is not told"
    assert shown.count("[rank 0] loss of rank 0") >= 8 and not [line for line in shown if "rank 1" in line], shown
    lines = [event.line for event in told(tmp_path, "begun", events.Printed) if isinstance(event, events.Printed)]
    assert len(lines) == len([line for line in shown if line.startswith("[rank 0]")]), "storage has them too"
    assert any("[rank 0] the model is built" in line for line in log_lines(str(tmp_path), "begun"))


def test_what_was_printed_before_an_error_is_shown_before_it(
    tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def torn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        print("just before")
        raise ValueError("enough")

    with pytest.raises(UserCodeError, match="enough"):
        tw.fit(job(tmp_path, name="torn", loss=torn, workers=1, strategy=None, preflight=False))
    shown = capsys.readouterr().err.splitlines()
    place = shown.index("[rank 0] just before")
    assert any("failed" in line for line in shown[place + 1 :]) and not any("failed" in line for line in shown[:place])
