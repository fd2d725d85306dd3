"""A driver stands still, another takes the run over, the first goes on: it must do nothing, and say why it ends."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray

import trainwright as tw
from tests.support import processes
from tests.support.driver_kills import killed_driver, lasting_actors, steps_told
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events
from trainwright.core.errors import FencedError
from trainwright.driver.messages import CallFailure
from trainwright.planning.job_file import load_job
from trainwright.runtime.takeover import NAMESPACE
from trainwright.runtime.worker_actor import MemoryStoreProcess, WorkerProcess
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import LogEntry, RunLog

STEP_S = 2.0  # so that 27 steps last for all stalls
Driver = subprocess.Popen[str]


class Stalls:
    """One run whose drivers are stopped one after the other.

    Args:
        fit: starts another driver of the run.
    """

    def __init__(self, folder: Path, fit: Callable[[], Driver]) -> None:
        self.folder, self._fit = folder, fit
        self.driver = fit()
        self.stalled: list[Driver] = []

    def happened(self, kind: type[events.Event]) -> int:
        """Events of a kind so far."""
        return len(told(self.folder, "faulty", kind)) if self.folder.exists() else 0

    def head(self) -> LogEntry | None:
        """The newest entry of the log."""
        return RunLog(open_store(str(self.folder)), "faulty").head() if self.folder.exists() else None

    def await_one_more(self, kind: type[events.Event]) -> None:
        """Until there is another event of a kind."""
        before = self.happened(kind)
        processes.wait_until(lambda: self.happened(kind) > before, self.driver)

    def take_over(self) -> None:
        """Stop the driver, have another one take its run, and let it go on when that one trains."""
        self.driver.send_signal(signal.SIGSTOP)
        self.stalled.append(self.driver)
        formed = self.happened(events.Formed)
        self.driver = self._fit()
        processes.wait_until(lambda: self.happened(events.Formed) > formed, self.driver)
        self.stalled[-1].send_signal(signal.SIGCONT)


def while_placing(run: Stalls) -> None:
    processes.wait_until(lambda: run.happened(events.Placed) > 0, run.driver)


def while_stepping(run: Stalls) -> None:
    processes.wait_until(lambda: steps_told(run.folder) > 0, run.driver)
    run.await_one_more(events.Steps)


def while_recovering(run: Stalls) -> None:
    processes.wait_until(lambda: run.happened(events.Steps) > 0, run.driver)
    placed: Any = told(run.folder, "faulty", events.Placed)
    os.kill(placed[-1].pid, signal.SIGKILL)


def while_saving(run: Stalls) -> None:
    run.await_one_more(events.Checkpointed)


def while_taking_over(run: Stalls) -> None:
    """The driver before is killed; the next one is stopped as soon as it has the log."""
    head = run.head()
    processes.kill(run.driver)
    run.driver = run._fit()
    processes.wait_until(lambda: run.head() != head, run.driver)


TEN = [
    while_placing, while_stepping, while_recovering, while_taking_over, while_saving, while_recovering,
    while_stepping, while_taking_over, while_recovering, while_saving,
]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moments", [[while_recovering], pytest.param(TEN, marks=pytest.mark.soak)], ids=["one", "ten"])
def test_a_driver_that_stood_still_harms_nothing(
    moments: list[Callable[[Stalls], None]],
    folder: Path,
    tmp_path: Path,
    unbroken: Callable[[int], State],
    ray_cluster: None,
) -> None:
    steps = 5 if while_saving in moments else 1000
    step_s = STEP_S * max(len(moments), 2) / 3
    file = processes.write_job(tmp_path, folder, step_s=step_s, checkpoint_steps=steps, keep=50, workers=2)
    with ExitStack() as stack:

        def fit() -> Driver:
            return stack.enter_context(processes.trainwright("fit", file, cluster=processes.address()))

        run = Stalls(folder, fit)
        for moment in moments:
            moment(run)
            run.take_over()
        for stalled in run.stalled:
            _, err = stalled.communicate(timeout=60)
            assert stalled.returncode == 1 and re.search("taken over|has taken", err), err
        (tmp_path / "quick").touch()
        _, err = run.driver.communicate(timeout=100)
        assert run.driver.returncode == 0, err
    assert final_state(folder, "faulty") == unbroken(2)
    formed: Any = told(folder, "faulty", events.Formed)
    assert [event.steps_lost for event in formed] == [0] * len(formed)
    assert {event.source for event in formed[1:]} == {"replica"}
    assert not lasting_actors()


CALLS: dict[str, dict[str, tuple[Any, ...]]] = {  # with the token of a driver before; all methods that take one
    "worker": {
        "call": ("leave", None, 0), "upload": ("upload", "checkpoints/00000099-0", 0), "keep": ("keep", None, 0),
        "watch": (0, 0.0, 0), "stop": (0,), "interrupt": (99, False, 0), "printed": (0.0, 1, 0), "live": (0,),
        "notice": (0,), "beat": (0,), "end": (0,), "adopt": (None, 0), "start_fork_server": ("an.engine", 1, 0),
    },
    "keeper": {"beat": (0,), "end": (0,), "seal": (b"", 0), "adopt": (0,), "remove": (0,)},
}  # fmt: skip
LATE = {"node_notice"}  # answers when a node is told to go


def test_processes_of_a_run_refuse_all_that_an_older_driver_asks(
    folder: Path, tmp_path: Path, unbroken: Callable[[int], State], ray_cluster: None
) -> None:
    """Whatever it asks, before it finds out that it was replaced."""
    file = processes.write_job(tmp_path, folder, step_s=0.5, checkpoint_steps=1000, workers=2, keeper_s=0.1)
    run, kinds = tw.start(load_job(str(file))), set[str]()
    processes.wait_for(lambda: bool(told(folder, "faulty", events.Kept)))
    for name in [item["name"] for item in lasting_actors()]:
        actor: Any = ray.get_actor(name, namespace=NAMESPACE)
        kinds.add(kind := re.split("[/-]", name)[2])
        methods = inspect.getmembers({"worker": WorkerProcess, "keeper": MemoryStoreProcess}[kind])
        taking = {method for method, code in methods if "token" in getattr(code, "__annotations__", ())}
        assert {method for method in taking if not method.startswith("_")} == CALLS[kind].keys() | (LATE & taking)
        for method, arguments in CALLS[kind].items():
            answer = ray.get(getattr(actor, method).remote(*arguments), timeout=60)
            assert isinstance(answer, CallFailure) and isinstance(answer.error, FencedError), (name, method, answer)
    (tmp_path / "quick").touch()
    assert kinds == set(CALLS) and run.wait(100) and final_state(folder, "faulty") == unbroken(2)
    assert not told(folder, "faulty", events.Failed)


SLOW_FILE = """
import os, time
import trainwright as tw
from tests.support import torch_jobs
from trainwright.runtime import takeover

def keep(row):
    if os.path.exists({slow!r}):
        os.remove({slow!r})
        time.sleep(24)  # twice as long as workers live without a driver
    return True

def step(model, batch, made=torch_jobs.make_step(())):
    takeover._DRIVER_TIMEOUT_S = 12.0
    if next(model.parameters()).device.type != "meta" and not os.path.exists({quick!r}):
        time.sleep(1)
    return made(model, batch)

train = tw.datasets.table(torch_jobs.data()).filter(keep)
job = torch_jobs.job({storage!r}, train=train, step=step, checkpoint_steps=1000)
"""


@pytest.mark.soak
def test_workers_outlive_a_driver_whose_successor_prepares_for_long(
    folder: Path, tmp_path: Path, unbroken: Callable[[int], State]
) -> None:
    slow, quick, file = tmp_path / "slow", tmp_path / "quick", tmp_path / "job.py"
    file.write_text(SLOW_FILE.format(slow=str(slow), quick=str(quick), storage=str(folder)))
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: bool(folder.exists()) and steps_told(folder) >= 3, driver)
        slow.touch()
        processes.kill(driver)
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: len(told(folder, "faulty", events.Formed)) == 2, driver)
        quick.touch()
        _, err = driver.communicate(timeout=100)
        assert driver.returncode == 0, err
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.steps_lost) for event in formed] == [("initial", 0), ("replica", 0)]
    assert final_state(folder, "faulty") == unbroken(2)


def test_steps_that_nobody_holds_any_more_are_told(
    folder: Path, tmp_path: Path, unbroken: Callable[[int], State]
) -> None:
    file = killed_driver(folder, tmp_path)
    lived: Any = told(folder, "faulty", events.Placed)
    before = steps_told(folder)
    for event in lived:
        os.kill(event.pid, signal.SIGKILL)
    (tmp_path / "quick").touch()
    code, _, err = processes.finish("fit", file, cluster=processes.address())
    assert code == 0 and f"{before} steps are repeated" in err, err
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.steps_lost) for event in formed] == [("initial", 0), ("initial", before)]
    assert final_state(folder, "faulty") == unbroken(2)
