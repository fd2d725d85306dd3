"""One local Ray cluster for all fault tests, and the unbroken runs that recovered ones are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import State, final_state


@pytest.fixture(scope="session")
def unbroken(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], State]:
    """The state of an unbroken run with so many workers."""
    states: dict[int, State] = {}

    def state(workers: int) -> State:
        if workers not in states:
            folder = tmp_path_factory.mktemp(f"unbroken-{workers}")
            tw.fit(torch_jobs.job(folder, workers=workers))
            states[workers] = final_state(folder, "faulty")
        return states[workers]

    return state


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A storage folder."""
    yield tmp_path / "runs"
