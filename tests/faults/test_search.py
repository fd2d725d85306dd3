"""Whoever dies of a search, the same call goes on: what is done stays done, and it finds what an unbroken one does."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.faults import search_world as world
from tests.faults.distilling_world import Marks
from tests.faults.search_world import ALONE, BAD, FAIR, GOOD, NAME
from tests.soak import living_actors
from tests.support import processes
from tests.support.finished_runs import final_state, told
from trainwright.core import events
from trainwright.distillation.hyperparameter_search import SearchResult
from trainwright.runtime.takeover import run_name
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog

HELD = (FAIR, ALONE)
SOURCES = {GOOD: ["initial"], BAD: ["initial"], FAIR: ["initial", "replica"], ALONE: ["initial", "checkpoint"]}


@pytest.fixture(scope="module")
def whole(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchResult]:
    """An unbroken search."""
    folder = tmp_path_factory.mktemp("whole") / "runs"
    return folder / NAME, tw.search(world.search(folder))


@contextmanager
def driver(folder: Path, held: str) -> Iterator[int]:
    """A driver in a process of its own, until a run stands still whose first checkpoint is stored: then it is killed.

    Gives the process in which the run stands.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([world.__name__])
    marks = Marks(str(folder.parent))
    process = context.Process(target=world.drive, args=(processes.address(), str(folder), HELD))
    process.start()
    try:
        processes.wait_for(lambda: (marks.held(held) and committed(folder, held)) or not process.is_alive())
        assert process.is_alive(), "the driver ended before it was killed"
        yield int(marks.path(f"pid-{held}").read_text())
    finally:
        process.kill()
        process.join(30)


def committed(folder: Path, run: str) -> bool:
    """Whether the log names a checkpoint."""
    head = RunLog(open_store(str(folder / NAME)), run).head()
    return head is not None and bool(head.checkpoints)


def files(folder: Path, *runs: str) -> dict[Path, int]:
    """Of runs, and when each was written."""
    return {path: path.stat().st_mtime_ns for run in runs for path in (folder / NAME / run).rglob("*")}


def figures(found: SearchResult) -> SearchResult:
    """What does not depend on where and when it was found."""
    models = [replace(mark, latency_s={}) for mark in found.scorecard.marks]
    return replace(found, uri="", scorecard=replace(found.scorecard, marks=models, seconds=0.0))


@pytest.mark.soak
def test_a_killed_search_goes_on(folder: Path, whole: tuple[Path, SearchResult]) -> None:
    """The driver in the third run, after two are done; then driver and worker in the last one."""
    marks = Marks(str(folder.parent))
    with driver(folder, FAIR):
        ended = files(folder, GOOD, BAD)
        assert not (folder / NAME / ALONE).exists()
    marks.release(FAIR)
    with driver(folder, ALONE) as alone:
        assert files(folder, GOOD, BAD) == ended, "a run that had ended was touched"
        ended = files(folder, GOOD, BAD, FAIR)
        os.kill(alone, signal.SIGKILL)
    marks.release(ALONE)
    found = tw.search(world.search(folder, *HELD))
    names = [run_name(open_store(str(folder / NAME)).uri_of(run)) for run in SOURCES]
    assert not [each for each in living_actors() if any(name in each for name in names)], "room is left behind"
    assert files(folder, GOOD, BAD, FAIR) == ended, "a run that had ended was touched"
    home, unbroken = whole
    assert figures(found) == figures(unbroken)
    for run, sources in SOURCES.items():
        assert final_state(folder / NAME, run) == final_state(home, run)
        formed: Any = told(folder / NAME, run, events.Formed)
        assert [event.source for event in formed] == sources, run
