"""The driver is interrupted, preempted, doubled; test_driver_takeover.py and test_exactly_once.py kill it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import trainwright as tw
from tests.support import processes, torch_jobs
from tests.support.driver_kills import committed
from tests.support.finished_runs import State, final_state, told
from trainwright.core import events
from trainwright.core.errors import OwnedError
from trainwright.planning.job_file import load_job
from trainwright.runtime import launch

SLOW_S = 0.5  # long enough for a signal to overtake the end of the run on any machine


def test_ctrl_c_takes_a_checkpoint_and_the_same_job_goes_on(
    folder: Path, tmp_path: Path, unbroken: Callable[[int], State]
) -> None:
    file = processes.write_job(tmp_path, folder, checkpoint_steps=1000)
    with processes.trainwright("fit", file, step_s=SLOW_S, module=processes.FORKING) as driver:
        processes.wait_until(lambda: bool(folder.exists() and told(folder, "faulty", events.Steps)), driver)
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: Ray's processes hear it too
        _, err = driver.communicate(timeout=60)
    assert driver.returncode == 130, err
    stopped = committed(folder)
    assert 0 < stopped < 27
    tw.fit(load_job(str(file)))
    assert told(folder, "faulty", events.Formed)[-1].step == stopped
    assert final_state(folder, "faulty").files == unbroken(2).files


def test_a_second_ctrl_c_does_not_wait(folder: Path, tmp_path: Path, ray_cluster: None) -> None:
    file = processes.write_job(tmp_path, folder, step_s=20, checkpoint_steps=1000)
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: bool(folder.exists() and told(folder, "faulty", events.Placed)), driver)
        driver.send_signal(signal.SIGINT)
        driver.send_signal(signal.SIGINT)
        _, err = driver.communicate(timeout=15)
    assert driver.returncode == 130, err


def test_a_second_driver_is_refused_and_sigterm_is_a_preemption_notice_to_the_first(
    folder: Path, tmp_path: Path, ray_cluster: None
) -> None:
    file = processes.write_job(tmp_path, folder, step_s=2 * SLOW_S, checkpoint_steps=1000)
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: bool(folder.exists() and told(folder, "faulty", events.Steps)), driver)
        with pytest.raises(OwnedError) as caught, pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "prepare", None)  # it is refused before
            tw.fit(torch_jobs.job(folder), resume=True)
        assert str(driver.pid) in str(caught.value)
        driver.send_signal(signal.SIGTERM)
        _, err = driver.communicate(timeout=60)
    assert driver.returncode == 143, err
    assert committed(folder) > 0
