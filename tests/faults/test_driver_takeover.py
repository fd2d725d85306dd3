"""A killed driver's workers outlive it where the cluster does: the next driver takes them over, and no step is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import trainwright as tw
from tests.support import processes
from tests.support.driver_kills import STEP_S, killed_driver, lasting_actors, steps_told
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events
from trainwright.planning.job_file import load_job
from trainwright.planning.job_preparation import prepare
from trainwright.runtime.launch import RemoteRunController
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog


def test_the_next_driver_takes_over_those_who_live_and_replaces_the_dead(
    folder: Path, tmp_path: Path, unbroken: Callable[[int], State]
) -> None:
    file = killed_driver(folder, tmp_path, workers=3, spares=1, step_s=1.0)
    before: Any = told(folder, "faulty", events.Placed)
    pids = {event.worker: event.pid for event in before}
    for worker in (1, 2):
        os.kill(pids[worker], signal.SIGKILL)
    (tmp_path / "quick").touch()
    code, _, err = processes.finish("fit", file, cluster=processes.address())
    assert code == 0 and "took over 2 workers" in err, err
    assert final_state(folder, "faulty") == unbroken(3)
    formed: Any = told(folder, "faulty", events.Formed)
    assert [event.source for event in formed] == ["initial", "replica"]
    assert (formed[1].survivors, formed[1].steps_lost) == (1, 0) and formed[1].step >= 5
    placed: Any = told(folder, "faulty", events.Placed)[len(before) :]
    assert {event.worker: event.pid for event in placed if event.worker in pids} == {0: pids[0], 3: pids[3]}
    promoted: Any = told(folder, "faulty", events.Promoted)
    assert [(event.worker, event.rank) for event in promoted] == [(3, 1)], "a new process takes the other rank"
    assert not lasting_actors()


def test_a_driver_in_the_cluster_is_revived_and_takes_over(
    folder: Path, tmp_path: Path, unbroken: Callable[[int], State]
) -> None:
    job = load_job(str(processes.write_job(tmp_path, folder, step_s=STEP_S, checkpoint_steps=1000, workers=2)))
    run = tw.start(job, detached=True)
    processes.wait_for(lambda: steps_told(folder) >= 5)
    entry = RunLog(open_store(str(folder)), "faulty").head()
    assert entry is not None and entry.owner.pid != os.getpid()
    os.kill(entry.owner.pid, signal.SIGKILL)
    processes.wait_for(lambda: len(told(folder, "faulty", events.Formed)) == 2)
    (tmp_path / "quick").touch()
    assert run.wait(120) and run.state == "done"
    assert final_state(folder, "faulty") == unbroken(2)
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.steps_lost) for event in formed] == [("initial", 0), ("replica", 0)]
    assert not lasting_actors()


def test_a_detached_driver_whose_run_is_over_gives_its_name_back(folder: Path, tmp_path: Path) -> None:
    job = load_job(str(processes.write_job(tmp_path, folder, workers=1)))
    unheard = RemoteRunController(prepare(job), job, resume=False, fresh=False)
    assert ray.get(unheard._driver.end.remote()).outcome == "done" and lasting_actors()
    assert RemoteRunController(prepare(job, fresh=True), job, resume=False, fresh=True).run().outcome == "done"
    assert not lasting_actors()


CHANGED_JOB = """
import os, time
from tests.support import torch_jobs

FACTOR = 1.0

def scaled(losses):
    return losses * FACTOR

def slow(step):
    def wrapped(model, batch):
        if next(model.parameters()).device.type != "meta" and not os.path.exists({quick!r}):
            time.sleep({step_s})
        return scaled(step(model, batch))
    return wrapped

job = torch_jobs.job(
    {storage!r}, step=slow(torch_jobs.make_step(())), checkpoint_steps=1000, workers=2, spares=1, epochs=20
)
"""


@pytest.mark.soak
def test_workers_with_the_old_code_are_ended_where_the_job_changed(folder: Path, tmp_path: Path) -> None:
    """A helper's constant is changed: none of them may train beside workers with the new one."""
    file = tmp_path / "job.py"
    text = CHANGED_JOB.format(quick=str(tmp_path / "quick"), step_s=STEP_S, storage=str(folder))
    file.write_text(text)
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        started = 3  # two workers and a spare
        processes.wait_until(
            lambda: steps_told(folder) >= 5 and len(told(folder, "faulty", events.Placed)) == started, driver
        )
        processes.kill(driver)
    old: Any = told(folder, "faulty", events.Placed)
    assert lasting_actors()
    file.write_text(text.replace("FACTOR = 1.0", "FACTOR = 2.0"))
    code, _, err = processes.finish("fit", file, cluster=processes.address())
    assert code == 1 and "step: global FACTOR in job.py changed from 1.0 to 2.0" in err, err
    (tmp_path / "quick").touch()
    code, _, err = processes.finish("fit", file, "--resume", cluster=processes.address())
    assert code == 0 and "took over" not in err, err
    new: Any = told(folder, "faulty", events.Placed)[len(old) :]
    assert len({event.pid for event in old}) == started and len({event.pid for event in new}) >= 2
    assert not {event.pid for event in old} & {event.pid for event in new}
    assert not any(Path(f"/proc/{event.pid}").exists() for event in old)
    assert not lasting_actors()
