"""Kill rank 1 of a training run several times, and measure from the time stamps what each kill cost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from stamps import Stamp, Stamps, read_stamps, set_last

LAST_STEPS = 10  # that a run trains on after it has recovered from the last kill


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When rank 1 is killed: once it has completed a step that is `offset` steps past a multiple of `every`.

    Attributes:
        kills: how many.
        every: steps between checkpoints, and the fewest steps between kills.
        offset: steps after a checkpoint.
        pause_s: that each rank waits after each step.
        settled: steps that a process completes before it may be killed.
    """

    kills: int
    every: int
    offset: int
    pause_s: float
    settled: int = 10

    def due(self, step: int, first: int, before: int) -> bool:
        """Return whether to kill a process at `step`; it began at `first`, the previous kill was at `before`. Pure."""
        return step >= max(before + self.every, first + self.settled) and step % self.every == self.offset


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How a run recovered from one kill.

    Attributes:
        next_step_s: from the kill to the next completed step that was not in progress before it.
        whole_s: from the kill to the first step that the replacement process completed.
        replayed: completed steps that were computed again.
        step_s: median time of a step of the killed process, pauses included; 0 where it completed only one.
    """

    next_step_s: float
    whole_s: float
    replayed: int
    step_s: float


def recovery_of(stamps: list[Stamp], victim: Stamp, killed_s: float, pause_s: float) -> Recovery:
    """Return how the run recovered from the kill of a process at `killed_s`. Pure.

    Args:
        stamps: of the whole run, in order of time.
        victim: the newest stamp of the killed process.
        killed_s: time of the kill, in seconds since the epoch.
        pause_s: that each rank waits after each step.
    """
    known = {stamp.pid for stamp in stamps if stamp.time_s <= killed_s}
    last = max(stamp for stamp in stamps if stamp.pid == victim.pid)
    after = [stamp for stamp in stamps if stamp.time_s > killed_s]
    replacement = next(stamp for stamp in after if stamp.pid not in known)
    # A process in its pause has not started the next step.
    new_step = last.step + (1 if killed_s - last.time_s < pause_s else 2)
    first = next(stamp for stamp in after if stamp.pid not in known or stamp.step >= new_step)
    return Recovery(
        next_step_s=first.time_s - killed_s,
        whole_s=replacement.time_s - killed_s,
        replayed=max(0, last.step - replacement.step + 1),
        step_s=_median_step_s([stamp.time_s for stamp in stamps if stamp.pid == victim.pid]),
    )


def _median_step_s(times: list[float]) -> float:
    return median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else 0.0


def measure_kills(
    folder: Path, schedule: Schedule, run: Callable[[], None], ready: Callable[[int], bool]
) -> list[Recovery]:
    """Run a training, kill its rank 1 as scheduled, and return how it recovered from each kill.

    Args:
        folder: in which the processes of the run stamp their steps.
        schedule: of the kills.
        run: starts the training and waits for its end.
        ready: whether the run has recovered from so many kills, so that the next kill or the end may follow.

    Raises:
        RuntimeError: the run ended before the last kill.
    """
    killer = Killer(folder, schedule, ready)
    killer.start()
    try:
        run()
    finally:
        killer.stop()
    if not killer.completed:
        raise RuntimeError(f"the run ended after {len(killer.kills)} of {schedule.kills} kills") from killer.error
    stamps = read_stamps(folder)
    return [recovery_of(stamps, victim, killed_s, schedule.pause_s) for victim, killed_s in killer.kills]


class Killer(threading.Thread):
    """A thread that reads the stamps, kills the process of rank 1 when a kill is due, and then ends the run.

    Attributes:
        kills: the newest stamp of each killed process, and when it was killed.
        completed: whether the run has recovered from all kills.
        error: that ended the thread too early.
    """

    def __init__(self, folder: Path, schedule: Schedule, ready: Callable[[int], bool]) -> None:
        super().__init__(daemon=True)
        self._folder, self._schedule, self._ready = folder, schedule, ready
        self._stamps = Stamps(folder)
        self._stopped = threading.Event()
        self._first: dict[int, int] = {}
        self.kills: list[tuple[Stamp, float]] = []
        self.completed = False
        self.error: Exception | None = None

    def run(self) -> None:
        """Kill as scheduled, until the run has recovered from the last kill or has ended."""
        try:
            self._watch()
        except Exception as error:  # raised by the thread that waits for the run
            self.error = error

    def stop(self) -> None:
        """Stop the thread, and wait for its end."""
        self._stopped.set()
        self.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            killed = {victim.pid for victim, _ in self.kills}
            fresh = [stamp for stamp in self._stamps.read_new() if stamp.rank == 1 and stamp.pid not in killed]
            if not fresh:
                continue
            if len(self.kills) == self._schedule.kills:
                if not self._ready(len(self.kills)):
                    continue
                set_last(self._folder, fresh[-1].step + LAST_STEPS)
                self.completed = True
                return
            before, newest = self.kills[-1][0].step if self.kills else 0, fresh[-1]
            first = self._first.setdefault(newest.pid, fresh[0].step)
            if self._schedule.due(newest.step, first, before) and self._ready(len(self.kills)):
                self.kills.append((newest, time.time()))
                os.kill(newest.pid, signal.SIGKILL)
