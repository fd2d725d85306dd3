"""The driver is killed, interrupted, preempted, doubled."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import trainwright as tw
from tests import jobs, processes
from tests.runs import State, final_state, told
from trainwright.core import events
from trainwright.core.errors import OwnedError
from trainwright.log import RunLog
from trainwright.store import open_store

STEP_S = 0.1
SLOW_S = 0.5  # long enough for a signal to overtake the end of the run on any machine


def committed(folder: Path) -> int:
    """Step of the newest checkpoint that the log names."""
    entry = RunLog(open_store(str(folder)), "faulty").head() if folder.exists() else None
    return entry.checkpoints[-1].step if entry and entry.checkpoints else 0


def test_a_killed_driver_is_started_again(folder: Path, tmp_path: Path, unbroken: Callable[[int], State]) -> None:
    file = processes.write_job(tmp_path, folder, workers=3)
    with processes.trainwright("fit", file, step_s=STEP_S, module=processes.FORKING) as driver:
        processes.wait_until(lambda: committed(folder) >= 10, driver)
        processes.kill(driver)
    code, _, err = processes.finish("fit", file, cluster=processes.address())
    assert code == 0, err
    assert re.search(r"resuming step 1[05]", err), err
    assert final_state(folder, "faulty") == unbroken(3)


def test_ctrl_c_takes_a_checkpoint_and_the_same_command_goes_on(
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
    code, _, err = processes.finish("fit", file, cluster=processes.address())
    assert code == 0 and f"resuming step {stopped}" in err, err
    assert final_state(folder, "faulty").files == unbroken(2).files


def test_a_second_ctrl_c_does_not_wait(folder: Path, tmp_path: Path, ray_cluster: None) -> None:
    file = processes.write_job(tmp_path, folder, step_s=20, checkpoint_steps=1000)
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: bool(folder.exists() and told(folder, "faulty", events.Placed)), driver)
        driver.send_signal(signal.SIGINT)
        driver.send_signal(signal.SIGINT)
        _, err = driver.communicate(timeout=15)
    assert driver.returncode == 130, err


def test_sigterm_is_a_preemption_notice(folder: Path, tmp_path: Path, ray_cluster: None) -> None:
    file = processes.write_job(tmp_path, folder, step_s=SLOW_S, checkpoint_steps=1000)
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: bool(folder.exists() and told(folder, "faulty", events.Steps)), driver)
        driver.send_signal(signal.SIGTERM)
        _, err = driver.communicate(timeout=60)
    assert driver.returncode == 143, err
    assert committed(folder) > 0


def test_a_second_driver_is_refused_while_the_first_lives(folder: Path, tmp_path: Path, ray_cluster: None) -> None:
    file = processes.write_job(tmp_path, folder)
    with processes.trainwright("fit", file, step_s=0.5, module=processes.FORKING) as driver:
        processes.wait_until(lambda: bool(folder.exists() and told(folder, "faulty", events.Placed)), driver)
        with pytest.raises(OwnedError) as caught:
            tw.fit(jobs.job(folder), resume=True)
        assert str(driver.pid) in str(caught.value)
        assert driver.poll() is None
