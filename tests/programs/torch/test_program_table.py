"""The programs of `docs/programs.md` equal their plain loops: on one worker, on two, and from a checkpoint on."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.program_runs import RANKS, Trained, continued, in_float64, job_of, on_one_worker, on_rank, plain
from tests.support.program_table import PROGRAMS, Program
from tests.support.rank_processes import run_ranks
from trainwright.planning.job_preparation import prepare
from trainwright.runtime.function_trial import run_trial, task_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft 0.21 asks transformers 5.23
]
each = pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])


@pytest.fixture(scope="module", autouse=True)
def float64() -> Iterator[None]:
    with in_float64():
        yield


@functools.cache
def expected(name: str) -> Trained:
    return plain(name)


def same(found: Trained, program: Program) -> None:
    losses, evaluations = expected(program.name)
    assert len(set(losses)) > len(losses) // 2, "nothing is trained"
    np.testing.assert_allclose(found[0], losses, rtol=program.rtol)
    assert len(found[1]) == len(evaluations)
    for ours, theirs in zip(found[1], evaluations, strict=True):
        assert ours == pytest.approx(theirs, rel=program.rtol)


@each
def test_one_worker_is_a_plain_loop(program: Program) -> None:
    same(on_one_worker(program.name), program)


@each
def test_a_checkpoint_in_the_middle_goes_on_bit_by_bit(program: Program) -> None:
    resumed, unbroken = continued(program.name)
    assert json.loads(resumed.pop("state.json")) == json.loads(unbroken.pop("state.json"))
    assert resumed == unbroken


@each
def test_the_trial_before_workers_start_finds_nothing(program: Program, tmp_path: Path) -> None:
    found = run_trial(task_of(prepare(job_of(program.name).replace(storage=str(tmp_path)))))
    assert (found.error, found.divided, found.untried) == (None, None, "")


QUICK = ("mnist", "vae", "text_classification", "lora", "translation")  # in both layouts; `make soak` runs the others
ON_TWO = [
    pytest.param(
        program, layout, id=f"{program.name}-{layout}",
        marks=() if layout == "data_parallel" or program.name in QUICK else pytest.mark.soak,
    )
    for program in PROGRAMS
    for layout in program.layouts
]  # fmt: skip


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest) -> Any:
    """What the chosen programs give on two ranks; one pair of processes runs all, since imports take longest."""
    layouts: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == request.path and "on_two" in item.fixturenames:
            layouts.setdefault(item.callspec.params["program"].name, []).append(item.callspec.params["layout"])
    return run_ranks(functools.partial(on_rank, layouts=layouts), RANKS, answer_s=400.0)


@pytest.mark.parametrize(("program", "layout"), ON_TWO)
@pytest.mark.timeout(600)
def test_two_workers_are_a_plain_loop(program: Program, layout: str, on_two: list[Any]) -> None:
    for result in on_two:
        found = result[program.name, layout]
        assert not isinstance(found, str), found
        same(found, program)
