"""Objects in the place of something else: the job says at once what to give instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.core.engine import stack_column
from trainwright.core.errors import DataError, JobError

SCHEDULER = torch.optim.lr_scheduler.StepLR


class Duck:
    """Rows by number, of no library's."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> int:
        return row


class Metric:
    """A metric with state."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Do nothing."""

    def compute(self) -> float:
        return 0.0


def adam() -> torch.optim.Adam:
    return torch.optim.Adam(nn.Linear(1, 1).parameters())


def job(**fields: Any) -> tw.Job:
    given: dict[str, Any] = {
        "name": "n", "model": dict, "optimizer": list, "loss": max, "inputs": "x", "batch_size": 1,
        "train": tw.datasets.table({"x": [[1.0]], "y": [0]}),
    }  # fmt: skip
    return tw.Job(**{**given, **fields})


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"train": iter}, "train= is not a data set, but a builtin_function_or_method: give tw.datasets"),
        ({"train": Duck()}, "tw.datasets.from_torch(dataset"),
        ({"train": {"x": [1]}}, "give tw.datasets.table({...})"),
        ({"train": np.ones(3)}, 'give tw.datasets.table({"x": array'),
        ({"train": "data"}, 'tw.datasets.parquet("path")'),
        ({"model": nn.Linear(2, 1)}, "model= is an instance of Linear: give a function that makes it"),
        ({"optimizer": adam()}, "optimizer= is an instance of Adam: give a function, lambda parameters: Adam("),
        ({"schedule": SCHEDULER(adam(), 3)}, "schedule= is an instance of StepLR: give a function"),
        ({"schedule": SCHEDULER}, "schedule= is StepLR, which needs step_size: give partial(StepLR, step_size=...)"),
        ({"metrics": {"f1": Metric()}}, "metrics= has an instance of Metric: give a function that makes it"),
        ({"callbacks": [1], "run": "fit"}, "callbacks=lambda: [...]"),
        ({"loss": "mse"}, "loss='mse' is a name: give a function"),
    ],
    ids=lambda value: "",
)
def test_what_to_give_instead_is_said(fields: dict[str, Any], advice: str) -> None:
    with pytest.raises(JobError) as caught:
        job(**fields)
    assert advice in str(caught.value) and "1 problem" in str(caught.value)


def test_functions_and_classes_that_make_things_are_what_they_should_be() -> None:
    made = job(model=nn.Identity, schedule=tw.schedules.cosine, optimizer=torch.optim.Adam)
    assert made.model is nn.Identity


def test_names_in_one_text_are_names() -> None:
    assert job(inexact="batch_norm").training.inexact == ("batch_norm",)
    assert job(inexact="batch_norm, dropout").training.inexact == ("batch_norm", "dropout")
    assert job(inexact=("batch_norm",)).training.inexact == ("batch_norm",) and job().training.inexact == ()


def test_ragged_rows_make_a_column_and_are_told_what_to_do_where_nothing_pads_them() -> None:
    rows = tw.datasets.table({"tokens": [[1, 2, 3], [4]], "y": [0, 1]})
    tokens = rows.read(rows.index(), [0, 1])["tokens"]
    assert [each.tolist() for each in tokens] == [[1, 2, 3], [4]]
    with pytest.raises(DataError, match="is ragged") as caught:
        stack_column("tokens", tokens)
    assert "pad={'tokens': tw.Pad()}" in caught.value.remedy


@pytest.mark.parametrize(
    ("method", "function", "said"),
    [
        ("map", lambda row: row, "cannot be called with (row, rng): too many positional arguments"),
        ("map", 3, "3 is not a function"),
        ("map_batches", lambda: None, "cannot be called with (columns)"),
        ("filter", lambda row, rng: True, "cannot be called with (row): missing a required argument: 'rng'"),
        ("filter_batches", lambda: True, "cannot be called with (columns)"),
        ("flat_map", lambda row, rng: [row], "cannot be called with (row)"),
    ],
)
def test_functions_of_rows_say_what_they_are_given(method: str, function: Any, said: str) -> None:
    rows = tw.datasets.table({"x": np.ones(4)})
    with pytest.raises(DataError) as caught:
        getattr(rows, method)(function)
    arguments = {"map": "row, rng", "map_batches": "columns", "filter_batches": "columns"}.get(method, "row")
    assert said in caught.value.what and caught.value.where == method
    assert caught.value.remedy.startswith(f"give {method} a function of ({arguments}): return ")


def test_functions_with_more_or_unknown_arguments_are_taken() -> None:
    rows = tw.datasets.table({"x": np.ones(4)})
    assert len(rows.map(lambda *given: given[0]).map(lambda row, rng, scale=1: row).map_batches(dict).transforms) == 3
