"""What is wrong with a job and shows in the workers: its own error, from `fit`, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.support.regression_job import ROWS, job, squared
from trainwright.core.errors import DataError, JobError, UserCodeError


class Torn(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        raise ZeroDivisionError("torn on purpose")


class Tearing(nn.Linear):
    """Goes wrong in backward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        torn: torch.Tensor = Torn.apply(super().forward(inputs))  # type: ignore[no-untyped-call]
        return torn


STAGES = {"plan": "pp=2,schedule=1f1b,accumulation=2", "model": lambda: nn.Sequential(Tearing(3, 3), nn.Linear(3, 1))}


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        (STAGES, UserCodeError, "torn on purpose"),
        ({"loss": lambda outputs, targets: squared(outputs, targets).sum()}, JobError, "a mean over rows, but it is"),
        ({"model": lambda: nn.Linear(4, 1)}, UserCodeError, "shapes cannot be multiplied"),
        ({"metrics": {"bad": lambda outputs, targets: 1 / 0}, "evaluate": True}, UserCodeError, "ZeroDivisionError"),
        ({"optimizer": lambda parameters: None}, (JobError, UserCodeError), "optimizer"),
    ],
    ids=["backward of a stage", "sum", "wrong shape", "metric", "optimizer"],
)
def test_the_workers_own_error_ends_the_run(
    fields: dict[str, Any], kind: Any, message: str, tmp_path: Path, ray_cluster: None
) -> None:
    wrong = job(tmp_path)
    if "evaluate" in fields:
        fields = {**fields, "evaluate": wrong.train}
    with pytest.raises(kind, match=message) as caught:
        tw.fit(wrong.replace(**fields))
    assert "Connection closed" not in str(caught.value) and "rank" in caught.value.where


def test_transforms_make_columns_and_their_errors_name_the_row(tmp_path: Path, ray_cluster: None) -> None:
    raw = tw.datasets.table({"i": np.arange(ROWS)})

    def make(row: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {"x": np.full(3, row["i"] / ROWS, np.float32), "y": np.float32(1)}

    assert tw.fit(job(tmp_path, train=raw.map(make))).state == "done"

    def torn(row: dict[str, Any], rng: Any) -> dict[str, Any]:
        if row["i"] == 17:
            raise ValueError("no such word")
        return make(row, rng)

    with pytest.raises(UserCodeError, match="no such word") as caught:
        tw.fit(job(tmp_path, train=raw.map(torn), name="torn"))
    assert "17" in str(caught.value)


@pytest.mark.parametrize("path", ["none", "empty"])
def test_data_that_is_not_there_is_said_before_anything_starts(path: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        tw.fit(job(tmp_path, train=tw.datasets.parquet(str(tmp_path / path))))
    assert str(tmp_path / path) in str(caught.value)
