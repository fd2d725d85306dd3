"""README and docs are right: Python blocks run, commands and their options exist, the API page is complete."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.support.doc_examples import (
    PAGES,
    ROOT,
    Example,
    check_command,
    check_names,
    commands,
    completed_code,
    examples,
    named_commands,
)
from tests.support.doc_setups import NOT_RUN, SETUPS
from trainwright.planning.job_preparation import prepare
from trainwright.runtime import function_trial

PYTHON = [page for page in PAGES if examples(page, "python")]
RESULTS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("fit", "start", "open_run"), lambda: create_autospec(tw.Run, instance=True)),
    "load_model": lambda: nn.Linear(4, 2),
    **dict.fromkeys(("compare", "distill", "evaluate", "export", "generate", "plan", "predict", "tune"), MagicMock),
}
"""Functions that would start processes or read a run, and what stands for their result."""


def tried(job: tw.Job) -> None:
    """Take a step and an evaluation with the functions of a job, on one device in this process."""
    with torch.random.fork_rng():
        result = function_trial.run_trial(function_trial.task_of(prepare(job)))
    assert result.error is None, result.error
    assert not result.untried


def completed(**fields: Any) -> tw.Job:
    """A job of which the page shows these fields only."""
    data = tw.datasets.table({"x": np.zeros((16, 4), "float32"), "label": np.arange(16) % 2})
    base: dict[str, Any] = {
        "name": "example", "model": lambda: nn.Linear(4, 10), "loss": nn.CrossEntropyLoss(), "train": data,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "batch_size": 8,
        **({} if "step" in fields else {"inputs": "x", "targets": "label"}),
    }  # fmt: skip
    return tw.Job(**{**base, **({"loss": None} if "step" in fields else {}), **fields})


@pytest.fixture
def started_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace what starts processes or reads runs by functions with the same parameters; `tw.fit` tries the job."""
    monkeypatch.chdir(tmp_path)
    for name, result in RESULTS.items():
        signature = inspect.signature(getattr(tw, name))

        def called(*given: Any, _of: Any = (signature, result, name), **options: Any) -> Any:
            _of[0].bind(*given, **options)
            if _of[2] == "fit":
                tried(given[0])
            return _of[1]()

        monkeypatch.setattr(tw, name, called)


@pytest.mark.usefixtures("started_nothing")
@pytest.mark.parametrize("page", PYTHON)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page: str) -> None:
    names: dict[str, Any] = {"tw": tw, "torch": torch, "nn": nn, "np": np, "completed": completed, "tried": tried}
    blocks = examples(page, "python")
    for number in range(len(blocks) + 1):
        exec(compile(SETUPS.get((page, number), ""), f"setup {number} of {page}", "exec"), names)
        if number < len(blocks) and (page, number) not in NOT_RUN:
            exec(completed_code(blocks[number]), names)


@pytest.mark.parametrize("page", PYTHON)
def test_names_of_tw_and_their_arguments_exist_in_each_python_block(page: str) -> None:
    for example in examples(page, "python", "py"):  # `py` is what other trainers train
        check_names(example)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("tw.Job(..., batch_szie=2)", "tw.Job() has no batch_szie="),
        ("tw.fitt(job)", "trainwright has no fitt"),
        ("tw.datasets.parkett('x')", "trainwright has no datasets.parkett"),
        ("tw.fit(job, restart=True)", "tw.fit() has no restart="),
        ("tw.from_lightning(module, data, epoks=2)", "tw.from_lightning() has no epoks="),
    ],
)
def test_a_wrong_name_or_argument_is_found(code: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(problem)):
        check_names(Example(page="page.md", line=1, code=code))


def test_what_is_set_up_or_not_run_is_there() -> None:
    counts = {page: len(examples(page, "python")) for page in PYTHON}
    assert [key for key in NOT_RUN if not key[1] < counts.get(key[0], 0)] == []
    assert [key for key in SETUPS if not key[1] <= counts.get(key[0], -1)] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_accepted_by_the_command_line(page: str) -> None:
    for example in examples(page, "console", "bash"):
        for arguments in commands(example):
            check_command(example.where, arguments)
    for where, arguments in named_commands(page):
        check_command(where, arguments, whole=False)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("trainwright fitt job.py", "no such command"),
        ("trainwright fit job.py --wokers 2", "--wokers"),
        ("trainwright fit job.py --workers two", "two"),
        ("trainwright fit", "Missing parameter: file"),
        ("trainwright fit job.py --strategy shardet", "no strategy shardet"),
        ("trainwright fit job.py --set batch_szie=2", "no field batch_szie"),
        ("trainwright fit job.py --set plan=qp=2", "qp"),
        ("trainwright init --cluster awz", "awz"),
        ("trainwright plan job.py --cluster 8x8xH100-81TB", "H100-81TB"),
        ("trainwright chaos job.py --faults kil", "no fault kil"),
        ("ray job submit --working-dir . -- python -m trainwright fitt job.py", "no such command"),
        ("make setup && trainwright show run --jsonn", "--jsonn"),
    ],
)
def test_a_wrong_command_option_or_value_is_found(command: str, problem: str) -> None:
    example = Example(page="page.md", line=1, code=f"$ {command}    # says what it does\noutput of it\n")
    (arguments,) = commands(example)
    with pytest.raises(AssertionError, match=re.escape(problem)):
        check_command(example.where, arguments)


def test_the_drawings_are_those_of_their_script() -> None:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs/images/drawings.py")
    assert spec is not None and spec.loader is not None
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    for name in drawings.DRAWINGS:
        drawn = (ROOT / "docs/images" / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == drawings.drawn(name), "run `python docs/images/drawings.py`"


def test_the_page_of_the_python_api_has_every_public_name() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `tw\.([\w.]+)`$", text, re.MULTILINE)
    modules = {"datasets": tw.datasets.__all__, "schedules": (), "trackers": ()}
    expected = {*tw.__all__, *chain(*([f"{name}.{each}" for each in own] for name, own in modules.items()))}
    assert sorted(expected - set(modules) - set(listed)) == []
    assert len(listed) == len(set(listed))
