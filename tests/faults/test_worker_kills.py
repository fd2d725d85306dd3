"""SIGKILL of a worker at awkward moments: the recovered run is bitwise the unbroken one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from tests import exactly_once, jobs
from tests.processes import wait_for
from tests.runs import State, told
from tests.runs import final_state as state_of
from tests.samples import account_of
from trainwright.core import events
from trainwright.core.errors import WorkerLost

TOTAL = 27


def check_samples(state: State) -> None:
    """Each sample was counted once in each of the three epochs, inside the step."""
    # 8 batches of 24 and a last one of 11 samples: a sample's weight in its step is 1/24 or 1/11
    shares = -account_of(state) / 1e-2
    possible = [a / 24 + (3 - a) / 11 for a in range(4)]
    assert all(np.isclose(shares[:, None], possible, rtol=0, atol=1e-9).any(axis=1)), shares
    assert np.isclose(shares.sum(), TOTAL)


@pytest.mark.parametrize(("point", "workers"), [("synchronisation", 2), ("upload", 3)])
def test_a_killed_worker_costs_nothing(
    point: str, workers: int, folder: Path, unbroken: Callable[[int], State]
) -> None:
    victim, step = (0, 10) if point == "upload" else (1, 12)
    kill = jobs.Kill(rank=victim, step=step, point=point, folder=str(folder.parent))
    run = tw.fit(jobs.job(folder, (kill,), workers=workers))
    assert run.state == "done"
    pid = int(kill.mark.read_text())
    failed: Any = told(folder, "faulty", events.Failed)
    assert [event.rank for event in failed] == [victim]
    assert not Path(f"/proc/{pid}").exists()
    assert state_of(folder, "faulty") == unbroken(workers)
    check_samples(state_of(folder, "faulty"))
    placed = told(folder, "faulty", events.Placed)
    assert len({event.pid for event in placed}) == workers + 1, "only the dead worker was replaced"
    formed = told(folder, "faulty", events.Formed)
    assert [event.source for event in formed] == ["initial", "replica"]
    assert formed[-1].survivors == workers - 1 and formed[-1].steps_lost == 0
    assert formed[-1].step >= step if point == "upload" else formed[-1].step == step, "the moment of the kill"


def test_the_writer_dies_in_the_upload_of_the_last_step(folder: Path, unbroken: Callable[[int], State]) -> None:
    kill = jobs.Kill(rank=0, step=TOTAL, point="upload", folder=str(folder.parent))
    assert tw.fit(jobs.job(folder, (kill,))).state == "done"
    assert kill.mark.exists()
    assert state_of(folder, "faulty") == unbroken(2)


def test_all_workers_die_at_once(folder: Path, unbroken: Callable[[int], State]) -> None:
    kills = tuple(jobs.Kill(rank=rank, step=13, point="forward", folder=str(folder.parent)) for rank in (0, 1))
    tw.fit(jobs.job(folder, kills, paced=True))
    assert all(kill.mark.exists() for kill in kills)
    assert state_of(folder, "faulty") == unbroken(2)
    formed = told(folder, "faulty", events.Formed)
    assert formed[-1].source == "checkpoint" and formed[-1].step == 10


def test_a_frozen_worker_is_replaced_and_costs_no_step(folder: Path, unbroken: Callable[[int], State]) -> None:
    """The others wait for it in a collective: they are interrupted, and keep their processes and their state."""
    kill = jobs.Kill(rank=1, step=13, folder=str(folder.parent), number=signal.SIGSTOP)
    tw.fit(jobs.job(folder, (kill,), workers=3, hang_deadline_s=5.0))
    pid = int(kill.mark.read_text())
    assert not Path(f"/proc/{pid}").exists(), "the frozen process is gone"
    silence, culprit = told(folder, "faulty", events.Failed)
    assert "did not move for 5 s" in silence.cause and silence.rank == -1
    assert "rank 1 hung" in culprit.cause and culprit.rank == 1
    formed = told(folder, "faulty", events.Formed)[-1]
    assert (formed.source, formed.step, formed.steps_lost, formed.survivors) == ("replica", 13, 0, 2)
    assert state_of(folder, "faulty") == unbroken(3)


def test_a_worker_that_waits_for_ever_is_replaced_and_the_report_shows_where_it_stood(
    folder: Path, unbroken: Callable[[int], State]
) -> None:
    mark = folder.parent / "stuck"
    step = jobs.make_step(())

    def sometimes_stuck(model: Any, batch: Any) -> Any:
        if jobs.rank() == 1 and int(getattr(model, "module", model).steps) == 13 and not mark.exists():
            mark.touch()
            threading.Event().wait()
        return step(model, batch)

    tw.fit(jobs.job(folder, step=sometimes_stuck, hang_deadline_s=5.0))
    assert state_of(folder, "faulty") == unbroken(2)
    stood: Any = told(folder, "faulty", events.Stacks)
    assert {event.rank for event in stood} == {0, 1}
    assert "sometimes_stuck" in next(event.text for event in stood if event.rank == 1)
    culprit: Any = told(folder, "faulty", events.Failed)[-1]
    assert culprit.rank == 1 and "sometimes_stuck" in culprit.detail
    assert "sometimes_stuck" in (folder / "faulty" / "report.html").read_text()


def test_a_worker_that_always_dies_ends_the_run(folder: Path) -> None:
    def suicide(model: Any, batch: Any) -> Any:
        if jobs.rank() == 1:
            os.kill(os.getpid(), 9)
        return model(batch["x"]).sum(1)

    with pytest.raises(WorkerLost) as caught:
        tw.fit(jobs.job(folder, step=suicide, failures=1))
    assert "rank 1" in str(caught.value)


class Teacher:
    """A torch model on an actor, whose process is killed when it first meets a row, once in the life of the mark."""

    def __init__(self, mark: str, fatal: int = -1) -> None:
        torch.manual_seed(5)
        self.mark, self.fatal = Path(mark), fatal
        self.model = nn.Linear(jobs.WIDTH, jobs.WIDTH)
        (self.mark.parent / f"opened-{os.getpid()}").touch()

    @torch.no_grad()
    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self.fatal in columns["id"]:
            exactly_once.strike(self.mark, signal.SIGKILL)
        return {**columns, "x": columns["x"] + self.model(torch.from_numpy(columns["x"])).numpy()}


def test_heavy_transforms_are_computed_again_for_the_newcomer(folder: Path, ray_cluster: None) -> None:
    """A task, and a model on an actor that evaluation shares: bitwise an unbroken run, whichever process dies."""

    def heavy(columns: Any) -> Any:
        return {**columns, "x": columns["x"] * 2}

    def taught(**given: Any) -> dict[str, Any]:
        given = {"mark": str(folder.parent / "struck"), **given}
        rows = tw.datasets.table(jobs.data()).map_batches(heavy, cpus=0.5)
        data = rows.map_batches(Teacher, cpus=0.5, fn_constructor_kwargs=given)
        return {"train": data, "evaluate": data, "metrics": {}}

    kill = jobs.Kill(rank=1, step=12, folder=str(folder.parent))
    faulty = tw.fit(jobs.job(folder, (kill,), **taught(fatal=77)))
    assert kill.mark.exists() and (folder.parent / "struck").exists()
    unbroken = tw.fit(jobs.job(folder.parent / "unbroken", **taught()))
    state = state_of(folder, "faulty")
    assert state == state_of(folder.parent / "unbroken", "faulty")
    assert faulty.metrics == unbroken.metrics
    check_samples(state)
    processes = {int(mark.name.partition("-")[2]) for mark in folder.parent.glob("opened-*")} - {os.getpid()}
    assert len(processes) >= 3, "two runs, and a replacement"
    wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in processes), 20)
