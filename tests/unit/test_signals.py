"""Signals as wishes to stop."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.driver.messages import FinishRun
from trainwright.runtime.run_handle import FIRST_SIGNAL_TEXT, SECOND_SIGNAL_TEXT, Run, stop_on_signals


class Asked:
    """Remembers how it was asked to stop."""

    def __init__(self) -> None:
        self.now: list[bool] = []

    def stop(self, now: bool = False) -> None:
        """Ask for the end."""
        self.now.append(now)


def test_the_first_signal_waits_for_a_checkpoint_and_each_is_answered_at_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before, asked = signal.getsignal(signal.SIGINT), Asked()
    with stop_on_signals(asked) as stops:
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err.split("\n") == ["", FIRST_SIGNAL_TEXT, ""]
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err.split("\n") == ["", SECOND_SIGNAL_TEXT, ""]
    assert asked.now == [False, True] and stops.last == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_wait_leaves_the_run() -> None:
    finish = threading.Event()

    def drive() -> FinishRun:
        finish.wait()
        return FinishRun(outcome="done", step=1)

    job: Any = SimpleNamespace(name="demo")
    run = Run(job, SimpleNamespace(store=None, run=drive), SimpleNamespace(chosen=None))  # type: ignore[arg-type]
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert run.state == "running"
    finish.set()
    assert run.wait() and run.state == "done"
