"""Every fault of the catalogue, given to real runs: what it does, what it costs, and that no bit changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.support import processes, torch_jobs
from trainwright.chaos_testing.run_observer import ProcessSignaller
from trainwright.core.errors import JobError
from trainwright.core.events import Placed

STEP_S = 0.1
STEP = torch_jobs.make_step(())


def test_a_kill_is_given_and_its_run_compared(folder: Path, tmp_path: Path, ray_cluster: None) -> None:
    job = processes.write_job(tmp_path, folder, step_s=STEP_S, epochs=2)
    found = tw.chaos(str(job), faults=["kill"], seed=5)
    assert found.passed and found.agrees and not found.missed
    assert {(cost.injected.fault, cost.source, cost.steps_lost) for cost in found.costs} == {("kill", "replica", 0)}
    assert not list(folder.iterdir())


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_command_gives_faults_that_take_every_state_and_a_store_that_fails(
    tmp_path: Path, forked_workers: None
) -> None:
    job = processes.write_job(tmp_path, tmp_path / "runs", step_s=STEP_S, epochs=6)
    faults = "driver,kill-two,storage"
    command = ("chaos", job, "--faults", faults, "--seed", 5, "--json")
    code, out, err = processes.finish(*command, timeout_s=280, module=processes.FORKING)
    assert code == 0, out + err
    found = json.loads(out)
    assert found["passed"] and found["agrees"] and not found["leftovers"] and not found["missed"]
    given = {fault["fault"]: fault for fault in found["faults"]}
    assert sorted(given) == sorted(faults.split(","))
    assert given["kill-two"]["source"] == "checkpoint"
    assert (given["driver"]["source"], given["driver"]["steps_lost"]) == ("replica", 0), "its workers are taken over"
    assert len(given["kill-two"]["whom"]) == 2
    assert given["storage"]["checkpoints_skipped"] > 0 and given["storage"]["recovery_s"] is None
    assert "the driver is started again" in err and "agrees bitwise" in found["verdict"]
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.soak
def test_a_job_that_fails_by_itself_is_told_by_its_own_error(folder: Path, ray_cluster: None) -> None:
    def failing(model: Any, batch: Any) -> torch.Tensor:
        raise ValueError("enough")

    with pytest.raises(tw.TrainwrightError, match="the run without faults failed") as caught:
        tw.chaos(torch_jobs.job(folder, step=failing), faults=["kill"])
    assert "ValueError: enough" in caught.value.detail
    assert not list(folder.iterdir())


def test_a_fault_that_does_not_fit_is_refused_before_anything_is_trained(folder: Path, ray_cluster: None) -> None:
    with pytest.raises(JobError, match="spares=1"):
        tw.chaos(torch_jobs.job(folder), faults=["spare", "kil"])
    assert not list(folder.iterdir())


def test_processes_of_other_nodes_are_reached_by_a_task_there(ray_cluster: None) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Sleeper:
        def where(self) -> Placed:
            import os
            import socket

            return Placed(worker=0, node=socket.gethostname(), pid=os.getpid())

    sleeper = Sleeper.remote()
    process = ray.get(sleeper.where.remote())
    hands = ProcessSignaller(here="another machine")
    hands.register(process)
    assert hands.is_alive(process) and hands.send(process, 9)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(sleeper.where.remote())
    processes.wait_for(lambda: not hands.is_alive(process))  # its node tells of its end before it is reaped
    assert not hands.send(Placed(worker=0, node="a node that is gone", pid=process.pid), 9)
