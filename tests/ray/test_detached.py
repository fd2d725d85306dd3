"""`trainwright fit --detach`: the command and its process are over; the cluster drives the run, and tells of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import trainwright as tw
from tests.support import processes
from tests.support.finished_runs import final_state, told
from tests.support.processes import wait_for
from trainwright.core.events import Noted
from trainwright.planning.job_file import load_job
from trainwright.runtime.takeover import NAMESPACE
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS, GATE = 27, 10
# Its data are too large for Ray to carry in one piece. Until the gate is open it waits at a step.
JOB = """
import os, pathlib, threading
import numpy as np
import trainwright as tw
from tests.support import torch_jobs
from trainwright.core.errors import JobError

folder = pathlib.Path({folder!r})

class Lines:
    def __init__(self, path, only_here):
        self.path, self.here = path, os.getpid() if only_here else 0

    def check(self):
        if self.here not in (0, os.getpid()):
            raise JobError(["no key for the tracker where the driver runs"])

    def tell(self, *words):
        with open(self.path, "a") as file:
            print(*words, file=file)

    def begin(self, run, params):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.tell("begin", run.id, os.getpid())
        return max((int(line.split()[1]) for line in lines if line.startswith("step")), default=0)

    def log(self, rows):
        for row in rows:
            self.tell("step", row.step)

    def end(self, ending):
        self.tell("end", ending.state)

def held(step, total):
    tick = threading.Event()
    while step >= {gate} and not (folder / "gate").exists():
        tick.wait(0.02)
    return 1.0

rows = {{**torch_jobs.data(), "more": np.random.default_rng(0).normal(size=(torch_jobs.ROWS, 400))}}
job = torch_jobs.job(
    folder / "runs", workers=1, schedule=held, train=tw.datasets.table(rows),
    trackers=(Lines(folder / "lines", {only_here}),),
)
"""


def written(folder: Path, *, only_here: bool = False) -> Path:
    file = folder / "job.py"
    file.write_text(JOB.format(folder=str(folder), gate=GATE, only_here=only_here))
    return file


@pytest.fixture(autouse=True)
def ended(ray_cluster: None) -> Iterator[None]:
    """No driver stays, for callers that may ask how it ended."""
    yield
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE and named["name"].endswith("/driver"):
            ray.kill(ray.get_actor(named["name"], namespace=NAMESPACE), no_restart=True)


def test_it_outlives_the_command_and_its_own_death_and_tells_each_step_once(tmp_path: Path) -> None:
    code, _, err = processes.finish("fit", written(tmp_path), "--detach", cluster=processes.address())
    assert code == 0, err
    lines = tmp_path / "lines"
    wait_for(lambda: lines.exists() and f"step {GATE}\n" in lines.read_text())
    entry = RunLog(open_store(str(tmp_path / "runs")), "faulty").head()
    assert entry is not None
    os.kill(entry.owner.pid, signal.SIGKILL)
    (tmp_path / "gate").touch()
    wait_for(lambda: "end" in lines.read_text())
    told = [line.split() for line in lines.read_text().splitlines()]
    assert [int(words[1]) for words in told if words[0] == "step"] == list(range(1, STEPS + 1))
    assert [words[1:] for words in told if words[0] == "end"] == [["done"]]
    (first, one), (second, other) = (words[1:] for words in told if words[0] == "begin")
    assert first == second and one == str(entry.owner.pid) and other not in (one, str(os.getpid()))
    assert final_state(tmp_path / "runs", "faulty").step == STEPS


def test_it_is_stopped_and_removed_from_elsewhere(tmp_path: Path) -> None:
    code, _, err = processes.finish("fit", written(tmp_path), "--detach", cluster=processes.address())
    assert code == 0, err
    runs, lines = str(tmp_path / "runs"), tmp_path / "lines"
    wait_for(lambda: lines.exists() and f"step {GATE}\n" in lines.read_text())
    code, _, err = processes.finish("stop", "faulty", "--storage", runs, "--no-wait")
    assert code == 0 and err.startswith("asked the driver of faulty to stop"), err
    wait_for(lambda: "asked to stop, after a checkpoint" in str(told(runs, "faulty", Noted)))
    (tmp_path / "gate").touch()
    wait_for(lambda: "end stopped" in lines.read_text())
    stopped = final_state(runs, "faulty")
    assert GATE <= stopped.step < STEPS
    code, out, err = processes.finish("rm", "faulty", "--storage", runs, "--yes")
    assert code == 0 and out.startswith("deleted faulty: "), err
    assert not (tmp_path / "runs" / "faulty").exists()


def test_what_keeps_the_driver_from_beginning_is_said_by_the_command(tmp_path: Path) -> None:
    """Here a tracker that only looks well where the command was typed."""
    file = written(tmp_path, only_here=True)
    code, _, err = processes.finish("fit", file, "--detach", cluster=processes.address())
    assert code == 2 and "no key for the tracker where the driver runs" in err, err
    assert not (tmp_path / "lines").exists()


def test_a_thread_that_waits_for_the_end_is_not_within_ray(tmp_path: Path) -> None:
    """The process of `--detach` exits while this thread waits, and one that is within Ray then crashes it at times."""
    run = tw.start(load_job(str(written(tmp_path))), detached=True)
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "trainwright-faulty"]

    def modules() -> list[str]:
        assert waiting.ident is not None
        frame = sys._current_frames().get(waiting.ident)
        return [each.f_globals["__name__"] for each, _ in traceback.walk_stack(frame)]

    wait_for(lambda: modules()[0] in ("threading", "ray._private.worker"))
    assert not [name for name in modules() if name.partition(".")[0] == "ray"]
    (tmp_path / "gate").touch()
    assert run.wait(100) and run.state == "done"
