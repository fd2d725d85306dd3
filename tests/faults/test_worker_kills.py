"""SIGKILL of a worker at awkward moments: the recovered run is bitwise the unbroken one."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import State, told
from tests.support.finished_runs import final_state as state_of
from tests.support.sample_counts import account_of
from trainwright.core import events
from trainwright.core.errors import WorkerLost
from trainwright.driver import driver_state

TOTAL = 27
LONG_STEP_S = 3.0


def check_samples(state: State) -> None:
    """Each sample was counted once in each of the three epochs, inside the step."""
    # 8 batches of 24 and a last one of 11 samples: a sample's weight in its step is 1/24 or 1/11
    shares = -account_of(state) / 1e-2
    possible = [a / 24 + (3 - a) / 11 for a in range(4)]
    assert all(np.isclose(shares[:, None], possible, rtol=0, atol=1e-9).any(axis=1)), shares
    assert np.isclose(shares.sum(), TOTAL)


def test_a_killed_worker_costs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unbroken: Callable[[int], State]
) -> None:
    """Its successor runs the code that the run began with, though a module was changed that steps import themselves."""
    kill = torch_jobs.Kill(rank=1, step=12, point="synchronisation", folder=str(folder.parent))
    file = folder.parent / "late.py"
    file.write_text("FACTOR = 1.0")
    monkeypatch.syspath_prepend(str(folder.parent))
    made = torch_jobs.make_step((kill,))

    def step(model: Any, batch: Any) -> Any:
        import late

        if torch_jobs.rank() == 1 and int(getattr(model, "module", model).steps) == 12:
            file.write_text("FACTOR = 2.0")
        return made(model, batch) * late.FACTOR

    run = tw.fit(torch_jobs.job(folder, (kill,), step=step))
    sys.modules.pop("late", None)
    assert run.state == "done"
    pid = int(kill.mark.read_text())
    failed: Any = told(folder, "faulty", events.Failed)
    assert [event.rank for event in failed] == [1]
    assert not Path(f"/proc/{pid}").exists()
    assert state_of(folder, "faulty") == unbroken(2)
    check_samples(state_of(folder, "faulty"))
    placed = told(folder, "faulty", events.Placed)
    assert len({event.pid for event in placed}) == 3, "only the dead worker was replaced"
    formed = told(folder, "faulty", events.Formed)
    assert [event.source for event in formed] == ["initial", "replica"]
    assert (formed[-1].survivors, formed[-1].steps_lost, formed[-1].step) == (1, 0, 12)


class DeviceFailure(torch_jobs.Kill):
    """An error after which a process cannot use its GPU."""

    def strike(self) -> None:
        if not self.mark.exists():
            self.mark.write_text(str(os.getpid()))
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore of CUDA's advice")


def test_a_failed_device_ends_its_process_and_costs_nothing(folder: Path, unbroken: Callable[[int], State]) -> None:
    failure = DeviceFailure(rank=1, step=12, folder=str(folder.parent))
    assert tw.fit(torch_jobs.job(folder, (failure,))).state == "done"
    failed: Any = told(folder, "faulty", events.Failed)
    assert [(event.rank, event.step) for event in failed] == [(1, 12)]
    assert failed[0].cause == "the accelerator failed: CUDA error: an illegal memory access was encountered"
    assert not Path(f"/proc/{failure.mark.read_text()}").exists()
    assert state_of(folder, "faulty") == unbroken(2)
    formed: Any = told(folder, "faulty", events.Formed)
    assert [(event.source, event.steps_lost) for event in formed] == [("initial", 0), ("replica", 0)]


def test_a_loader_of_the_users_own_gives_the_bits_of_the_same_rows_by_number(
    folder: Path, unbroken: Callable[[int], State]
) -> None:
    """A worker is killed in the middle of a pass: its successor reads the pass's earlier rows again."""
    kill = torch_jobs.Kill(rank=1, step=13, folder=str(folder.parent))
    run = tw.fit(torch_jobs.job(folder, (kill,), train=torch_jobs.loader()))
    assert run.state == "done" and kill.mark.exists()
    assert "train= is a DataLoader: rows come in its own order, every worker iterates all of them" in repr(run.plan)
    assert state_of(folder, "faulty") == unbroken(2)
    check_samples(state_of(folder, "faulty"))


def test_a_scheduler_gets_the_metric_of_each_evaluation_once(folder: Path) -> None:
    """One worker dies in the first step after an evaluation, and all of them in the first step after the next."""
    falling = partial(ReduceLROnPlateau, patience=0, factor=0.5, threshold=1e3, threshold_mode="abs")
    fields = {"schedule": falling, "schedule_metric": "loss", "evaluate": tw.datasets.table(torch_jobs.data())}
    kills = tuple(torch_jobs.Kill(rank=r, step=s, folder=str(folder.parent)) for r, s in ((1, 9), (0, 18), (1, 18)))
    tw.fit(torch_jobs.job(folder, kills, **fields, checkpoint_steps=9))
    evaluated: Any = told(folder, "faulty", events.Evaluated)
    metrics = {event.step: event.metrics for event in evaluated}  # step 18 is evaluated again where its state was lost
    assert [*metrics] == [9, 18, 27] and all(event.metrics == metrics[event.step] for event in evaluated)
    tw.fit(torch_jobs.job(folder.parent / "unbroken", **fields, checkpoint_steps=9))
    assert state_of(folder, "faulty") == state_of(folder.parent / "unbroken", "faulty")
    report = json.loads(state_of(folder, "faulty").files["state.json"])
    assert report["options"][0]["lr"] == 0.005 and report["scheduler"]["best"] == evaluated[0].metrics["loss"]


def test_the_writer_dies_in_the_upload_of_the_last_step(folder: Path, unbroken: Callable[[int], State]) -> None:
    kill = torch_jobs.Kill(rank=0, step=TOTAL, point="upload", folder=str(folder.parent))
    assert tw.fit(torch_jobs.job(folder, (kill,))).state == "done"
    assert kill.mark.exists()
    assert state_of(folder, "faulty") == unbroken(2)


def test_a_frozen_worker_is_replaced_and_costs_no_step(folder: Path, unbroken: Callable[[int], State]) -> None:
    """The others wait for it in a collective: they are interrupted, and keep their processes and their state."""
    kill = torch_jobs.Kill(rank=1, step=13, folder=str(folder.parent), number=signal.SIGSTOP)
    tw.fit(torch_jobs.job(folder, (kill,), workers=3, hang_deadline_s=10.0))
    pid = int(kill.mark.read_text())
    assert not Path(f"/proc/{pid}").exists(), "the frozen process is gone"
    silence, culprit = told(folder, "faulty", events.Failed)
    assert "did not move for 10 s" in silence.cause and silence.rank == -1
    assert "rank 1 hung" in culprit.cause and culprit.rank == 1
    formed = told(folder, "faulty", events.Formed)[-1]
    assert (formed.source, formed.step, formed.steps_lost, formed.survivors) == ("replica", 13, 0, 2)
    assert state_of(folder, "faulty") == unbroken(3)


def test_a_worker_that_waits_for_ever_is_replaced_and_the_report_shows_where_it_stood(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unbroken: Callable[[int], State]
) -> None:
    """How long it may wait is learnt from the steps before: 3 times the longest wait here, and not 30 times."""
    monkeypatch.setattr(driver_state, "HANG_FACTOR", 3.0)
    monkeypatch.setattr(driver_state, "MIN_HANG_DEADLINE_S", 2 * LONG_STEP_S)
    mark = folder.parent / "stuck"
    step = torch_jobs.make_step(())

    def sometimes_stuck(model: Any, batch: Any) -> Any:
        now = int(getattr(model, "module", model).steps) if torch_jobs.rank() == 1 else 0
        if now == 7:
            time.sleep(LONG_STEP_S)  # no hang, however quick the others were
        if now == 13 and not mark.exists():
            mark.touch()
            threading.Event().wait()
        return step(model, batch)

    tw.fit(torch_jobs.job(folder, step=sometimes_stuck, hang_deadline_s=None))
    assert state_of(folder, "faulty") == unbroken(2)
    stood: Any = told(folder, "faulty", events.Stacks)
    assert {event.rank for event in stood} == {0, 1}
    assert "sometimes_stuck" in next(event.text for event in stood if event.rank == 1)
    silence, culprit = told(folder, "faulty", events.Failed)
    learnt_s = float(re.search(r"did not move for ([\d.]+) s while running", silence.cause)[1])
    assert 2 * LONG_STEP_S <= learnt_s < 60, "steps are told of each 0.2 s"
    before: Any = [event for event in told(folder, "faulty", events.Steps) if event.time_s < silence.time_s]
    assert before[-1].step[-1] == 13 and silence.time_s - before[-1].time_s > learnt_s - 0.5
    assert culprit.rank == 1 and "sometimes_stuck" in culprit.detail
    assert "sometimes_stuck" in (folder / "faulty" / "report.html").read_text()


def test_a_worker_that_always_dies_ends_the_run(folder: Path) -> None:
    def suicide(model: Any, batch: Any) -> Any:
        if torch_jobs.rank() == 1:
            os.kill(os.getpid(), 9)
        return model(batch["x"]).sum(1)

    with pytest.raises(WorkerLost) as caught:
        tw.fit(torch_jobs.job(folder, step=suicide, failures=1))
    assert "rank 1" in str(caught.value)
