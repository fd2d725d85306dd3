"""Kills rank 1 of a training run again and again, and reads from the stamps what each kill cost."""

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

LAST_STEPS = 10  # that a run goes on for after the last kill is recovered from


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When rank 1 is killed: as it stamps a step that is `offset` past a multiple of `every`.

    Attributes:
        kills: how many.
        every: steps between checkpoints, and between kills at least.
        offset: steps after a checkpoint.
        settled: steps that a process completes before it may be killed.
        pause_s: that each rank waits after each stamped step.
    """

    kills: int
    every: int
    offset: int
    pause_s: float
    settled: int = 10

    def due(self, step: int, first: int, before: int) -> bool:
        """Whether to kill at `step` a process that began with `first`, when the kill before was at `before`. Pure."""
        return step >= max(before + self.every, first + self.settled) and step % self.every == self.offset


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What one kill cost.

    Attributes:
        next_step_s: from the kill to the next completed step that was not under way before it.
        whole_s: from the kill to the first step that a newcomer completed.
        replayed: completed steps that were computed once more.
        step_s: what a step took before, the median of the victim's own, pauses included; 0 where it made one only.
    """

    next_step_s: float
    whole_s: float
    replayed: int
    step_s: float


def recovery_of(stamps: list[Stamp], victim: Stamp, killed_s: float, pause_s: float) -> Recovery:
    """What the kill of the process of `victim`'s rank and pid at `killed_s` cost. Pure."""
    known = {stamp.pid for stamp in stamps if stamp.time_s <= killed_s}
    last = max(stamp for stamp in stamps if stamp.pid == victim.pid)
    after = [stamp for stamp in stamps if stamp.time_s > killed_s]
    newcomer = next(stamp for stamp in after if stamp.pid not in known)
    # In its pause a process has given nothing yet to the step that comes.
    new_step = last.step + (1 if killed_s - last.time_s < pause_s else 2)
    first = next(stamp for stamp in after if stamp.pid not in known or stamp.step >= new_step)
    return Recovery(
        next_step_s=first.time_s - killed_s,
        whole_s=newcomer.time_s - killed_s,
        replayed=max(0, last.step - newcomer.step + 1),
        step_s=_pace([stamp.time_s for stamp in stamps if stamp.pid == victim.pid]),
    )


def _pace(times: list[float]) -> float:
    return median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else 0.0


def measured(folder: Path, schedule: Schedule, run: Callable[[], None], ready: Callable[[int], bool]) -> list[Recovery]:
    """What each kill costs the training that `run` starts and waits for; its processes stamp into `folder`.

    `ready` says whether the next kill may come, or the end, after so many.
    """
    killer = Killer(folder, schedule, ready)
    killer.start()
    try:
        run()
    finally:
        killer.stop()
    if not killer.through:
        raise RuntimeError(f"the run ended after {len(killer.kills)} of {schedule.kills} kills") from killer.error
    stamps = read_stamps(folder)
    return [recovery_of(stamps, victim, killed_s, schedule.pause_s) for victim, killed_s in killer.kills]


class Killer(threading.Thread):
    """Watches the stamps and kills the process of rank 1 when that is due; then tells the run to end.

    Attributes:
        kills: the newest stamp of each victim, and when it was killed.
        through: whether every kill was done and recovered from.
        error: what ended the thread too early.
    """

    def __init__(self, folder: Path, schedule: Schedule, ready: Callable[[int], bool]) -> None:
        super().__init__(daemon=True)
        self._folder, self._schedule, self._ready = folder, schedule, ready
        self._stamps = Stamps(folder)
        self._stopped = threading.Event()
        self._first: dict[int, int] = {}
        self.kills: list[tuple[Stamp, float]] = []
        self.through = False
        self.error: Exception | None = None

    def run(self) -> None:
        """Until the run has recovered from the last kill, or is over."""
        try:
            self._watch()
        except Exception as error:  # told by the thread that waits for the run
            self.error = error

    def stop(self) -> None:
        """The run is over."""
        self._stopped.set()
        self.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            dead = {victim.pid for victim, _ in self.kills}
            fresh = [stamp for stamp in self._stamps.news() if stamp.rank == 1 and stamp.pid not in dead]
            if not fresh:
                continue
            if len(self.kills) == self._schedule.kills:
                if not self._ready(len(self.kills)):
                    continue
                set_last(self._folder, fresh[-1].step + LAST_STEPS)
                self.through = True
                return
            before, newest = self.kills[-1][0].step if self.kills else 0, fresh[-1]
            first = self._first.setdefault(newest.pid, fresh[0].step)
            if self._schedule.due(newest.step, first, before) and self._ready(len(self.kills)):
                self.kills.append((newest, time.time()))
                os.kill(newest.pid, signal.SIGKILL)
