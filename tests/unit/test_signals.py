"""Signals as wishes to stop."""

from __future__ import annotations

import os
import signal

import pytest

from trainwright.runtime.signals import FIRST, SECOND, stopping


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
    with stopping(asked) as stops:
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err.split("\n") == ["", FIRST, ""]
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err.split("\n") == ["", SECOND, ""]
    assert asked.now == [False, True] and stops.last == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before
