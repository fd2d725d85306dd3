"""Whatever dies of a distillation, it goes on from where it was: bitwise the student of an unbroken one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.faults import distilling_world as world
from tests.faults.distilling_world import NAME, Fault, Marks, Script, distillation
from tests.support import processes, torch_jobs
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events
from trainwright.inference.batch_inference import is_part_name


@pytest.fixture(scope="module")
def whole(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> State:
    """The student of an unbroken run whose targets were stored before."""
    folder = tmp_path_factory.mktemp("whole") / "runs"
    assert tw.distill(distillation(folder, "offline")).state == "done"
    assert set(Marks(str(folder.parent)).asked().values()) == {1}
    return final_state(folder, NAME)


@contextmanager
def driver(folder: Path, way: str, script: Script) -> Iterator[Any]:
    """A driver in a process of its own, which is killed when the block is left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([world.__name__])
    process = context.Process(target=world.drive, args=(processes.address(), str(folder), way, script))
    process.start()
    try:
        yield process
        assert process.is_alive(), "the driver ended before it was killed"
    finally:
        process.kill()
        process.join(30)


def await_gone(marks: Marks) -> None:
    """Until no teacher of a dead driver's is left."""
    processes.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in marks.teachers() - {os.getpid()}), 30)


def await_held(marks: Marks, name: str, process: Any) -> None:
    """Until the run stands still there."""
    processes.wait_for(lambda: marks.held(name) or not process.is_alive())


def parts(folder: Path) -> dict[str, int]:
    """The parts of stored targets, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("part-*.parquet") if is_part_name(path.name)}


def rows_of(part: str) -> range:
    """The rows that a part holds."""
    start, stop = part.removesuffix(".parquet").split("-")[1:]
    return range(int(start), int(stop))


@pytest.mark.soak
def test_offline_everything_is_killed_once(folder: Path, whole: State) -> None:
    """An actor of the pool and the driver while targets are computed, the driver and a worker while it trains; and
    another actor of the pool freezes, which is found by what batches took before."""
    marks = Marks(str(folder.parent))
    kill = torch_jobs.Kill(rank=1, step=16, folder=marks.folder)
    pool = (300, "kill"), (800, "hold"), (900, "hold"), (900, "stop")
    script = Script(teacher=tuple(Fault(row=row, how=how) for row, how in pool), student=(kill,), hold=8)
    with driver(folder, "offline", script) as process:
        await_held(marks, "hold-800", process)
        processes.wait_for(lambda: len(parts(folder)) >= 3)
        before = parts(folder)
    assert marks.held("kill-300") and not (folder / NAME).exists()
    await_gone(marks)
    marks.release("hold-800")
    with driver(folder, "offline", script) as process:
        await_held(marks, "hold-900", process)
        processes.wait_for(lambda: world.heard(marks, process.pid).exists() or not process.is_alive())
        marks.release("hold-900")
        await_held(marks, "student", process)
        stored, asked = parts(folder), marks.asked()
    assert before.items() <= stored.items() and sum(map(len, map(rows_of, stored))) == world.ROWS
    for part in before:
        again = {asked[row] for row in rows_of(part)}
        assert again <= ({1, 2} if 300 in rows_of(part) else {1}), "a stored part was computed again"
    marks.release("student")
    assert tw.distill(distillation(folder, "offline", script)).state == "done"
    assert kill.mark.exists()
    assert parts(folder) == stored and marks.asked() == asked, "nothing was asked again"
    assert final_state(folder, NAME) == whole
    frozen = int(marks.path("stop-900").read_text())
    processes.wait_for(lambda: not Path(f"/proc/{frozen}").exists(), 20)
    notes = [event.text for event in told(folder, NAME, events.Noted)]  # type: ignore[attr-defined]
    (note,) = [text for text in notes if "no answer for" in text]
    assert note.startswith("rows 720 to 959 start again on another worker: no answer for 15 s, and no batch took")
    assert f"pid {frozen})" in note


@pytest.mark.soak
def test_online_everything_fails_once(folder: Path, whole: State) -> None:
    """The driver is killed; then an actor of the teacher, which is replaced, another one freezes, and a worker dies."""
    marks = Marks(str(folder.parent))
    kill = torch_jobs.Kill(rank=1, step=19, folder=marks.folder)
    faults = tuple(Fault(row=row, how=how, after="student") for row, how in ((100, "kill"), (500, "stop")))
    script = Script(teacher=faults, student=(kill,), hold=8)
    with driver(folder, "online", script) as process:
        await_held(marks, "student", process)
    await_gone(marks)
    marks.release("student")
    assert tw.distill(distillation(folder, "online", script)).state == "done"
    assert marks.held("kill-100") and kill.mark.exists()
    assert final_state(folder, NAME) == whole
    frozen = int(marks.path("stop-500").read_text())
    processes.wait_for(lambda: not Path(f"/proc/{frozen}").exists(), 20)
    notes = [event.text for event in told(folder, NAME, events.Noted)]  # type: ignore[attr-defined]
    (note,) = [text for text in notes if "hung" in text]
    assert f"pid {frozen}" in note and "within 15 s" in note and "it is replaced" in note
    (dead,) = [text for text in notes if "died" in text]
    assert "an actor of Speaking died" in dead and "it is replaced" in dead
    formed: Any = told(folder, NAME, events.Formed)
    assert [event.steps_lost for event in formed] == [0] * len(formed), "the workers outlived their driver"


def test_inline_a_worker_dies_with_its_teacher(folder: Path, whole: State) -> None:
    kill = torch_jobs.Kill(rank=1, step=12, folder=str(folder.parent))
    assert tw.distill(distillation(folder, "inline", Script(student=(kill,)))).state == "done"
    assert kill.mark.exists()
    assert final_state(folder, NAME) == whole
    formed: Any = told(folder, NAME, events.Formed)
    assert [event.source for event in formed] == ["initial", "replica"] and formed[-1].steps_lost == 0
