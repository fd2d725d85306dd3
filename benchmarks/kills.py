"""Kill rank 1 of a training run several times, and measure from the time stamps what each kill cost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from machine import settle
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
    """Run a training after a rest, kill its rank 1 as scheduled, and return how it recovered from each kill.

    Args:
        folder: made for the stamps of the run's processes.
        schedule: of the kills.
        run: starts the training and waits for its end.
        ready: whether the run has recovered from so many kills, so that the next kill or the end may follow.

    Raises:
        RuntimeError: the run ended before the last kill.
    """
    folder.mkdir()
    settle()
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill, folder, schedule, ready, ended)
        try:
            run()
        finally:
            ended.set()
        kills = killing.result()
    stamps = read_stamps(folder)
    return [recovery_of(stamps, victim, killed_s, schedule.pause_s) for victim, killed_s in kills]


def _kill(
    folder: Path, schedule: Schedule, ready: Callable[[int], bool], ended: threading.Event
) -> list[tuple[Stamp, float]]:
    """Kill the process of rank 1 whenever it is due, then let the run end.

    Returns:
        The newest stamp of each killed process, and when it was killed.
    """
    stamps, kills, first = Stamps(folder), list[tuple[Stamp, float]](), dict[int, int]()
    while not ended.wait(0.01):
        killed = {victim.pid for victim, _ in kills}
        fresh = [stamp for stamp in stamps.read_new() if stamp.rank == 1 and stamp.pid not in killed]
        if not fresh:
            continue
        newest = fresh[-1]
        if len(kills) == schedule.kills:
            if ready(len(kills)):
                set_last(folder, newest.step + LAST_STEPS)
                return kills
            continue
        before = kills[-1][0].step if kills else 0
        if schedule.due(newest.step, first.setdefault(newest.pid, fresh[0].step), before) and ready(len(kills)):
            kills.append((newest, time.time()))
            os.kill(newest.pid, signal.SIGKILL)
    raise RuntimeError(f"the run ended after {len(kills)} of {schedule.kills} kills")
