"""`checkpoint_steps="auto"`: checkpoints come by time, and a run whose workers all died goes on from the last one."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.support import torch_jobs
from tests.support.finished_runs import State, final_state, told
from tests.support.processes import wait_for
from tests.support.sample_run import Recorder
from trainwright.core import events
from trainwright.driver import checkpointing

STEP_S, LEAST_S, BETWEEN_S = 0.3, 0.4, 5.0


def test_a_run_goes_on_from_a_checkpoint_whose_time_had_come(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unbroken: Callable[[int], State]
) -> None:
    """The least time between two is 0.4 s instead of 10, and a failure is expected every 5 s instead of every day."""
    monkeypatch.setattr(checkpointing, "MIN_CHECKPOINT_INTERVAL_S", LEAST_S)
    monkeypatch.setattr(checkpointing, "ASSUMED_UPTIME_S", BETWEEN_S)
    made, quick, heard = torch_jobs.make_step(()), folder.parent / "quick", Recorder()

    def step(model: Any, batch: Any) -> torch.Tensor:
        if not quick.exists():
            time.sleep(STEP_S)
        return made(model, batch)

    run = tw.start(torch_jobs.job(folder, step=step, checkpoint_steps="auto"))
    run.listen(heard)
    wait_for(lambda: sum(isinstance(event, events.Checkpointed) for event in heard.heard) == 2)
    for event in heard.heard:
        if isinstance(event, events.Placed):
            os.kill(event.pid, signal.SIGKILL)
    quick.touch()
    assert run.wait(100) and final_state(folder, "faulty") == unbroken(2)
    *saved, last = told(folder, "faulty", events.Checkpointed)
    _, again = told(folder, "faulty", events.Formed)
    before: Any = [event for event in saved if event.time_s < again.time_s]
    assert (again.source, again.step) == ("checkpoint", before[-1].step) and len(before) >= 2
    assert last.step == 27 and any(event.step % 9 for event in before), "not at the ends of epochs"
    for one, other in pairwise(before):
        pays_s = max(math.sqrt(2 * one.blocked_s * BETWEEN_S), 2 * one.seconds, LEAST_S)
        apart_s = (other.time_s - other.seconds) - (one.time_s - one.seconds)
        assert apart_s > pays_s - 0.05, (one, other)
