"""SIGKILL of one of two workers in the middle of a run: time to the next completed step, and steps done again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, compare
from machine import ray_cluster, settle
from peers import ray_train
from problem import BATCH_SIZE, WORKERS, job
from stamps import Stamp, read_stamps, stamping

import trainwright as tw

PAUSE_S = 0.1
CHECKPOINT_STEPS = 20
KILL_STEPS = (93, 173, 253, 333)
TARGET = 1 / 12
ROWS = 20 * BATCH_SIZE
NOTE = (
    f"The job of `step_time` with {WORKERS} workers on a Ray cluster that is up, a pause of {PAUSE_S:g} s after "
    f"each step and a checkpoint after each {CHECKPOINT_STEPS} steps (Ray Train's by `ray.train.report` with a "
    "FailureConfig, as its guides show), turn by turn; trainwright keeps one spare worker, as by default. When rank 1 "
    f"has stamped its steps {', '.join(map(str, KILL_STEPS))}, its process gets SIGKILL, 13 steps after a checkpoint. "
    "Every `optimizer.step()` is stamped by a hook with the clock that also times the kill. `next completed step` is "
    "the first stamp of a process that had stamped none before the kill, so that a step which the survivor had under "
    "way does not count; `next new step` is that process's first step which the victim had not completed. `steps done "
    "again` counts completed steps that were computed once more."
)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What one kill cost."""

    next_step_s: float
    new_step_s: float
    replayed: int


def measure(folder: Path, *, quick: bool) -> list[Figure]:
    """The figures of this benchmark."""
    rounds, kill_steps = (1, KILL_STEPS[:1]) if quick else (2, KILL_STEPS)
    ours: list[Recovery] = []
    theirs: list[Recovery] = []
    with ray_cluster():
        for number in range(rounds):
            for fit, found in ((_ours, ours), (_theirs, theirs)):
                found += _killed(fit, folder / f"{fit.__name__}-{number}", kill_steps)
                settle()
    seconds = {"next completed step": "next_step_s", "next new step": "new_step_s"}
    timed = [
        compare("recovery", f"SIGKILL to {what}, against TorchTrainer", "s", *(
            [getattr(item, name) for item in found] for found in (ours, theirs)
        ), target=TARGET)
        for what, name in seconds.items()
    ]  # fmt: skip
    slowest = ([max(item.next_step_s for item in found)] for found in (ours, theirs))
    timed.append(compare("recovery", "the same, the slowest of all kills", "s", *slowest, ratio=False))
    replayed = ([float(item.replayed) for item in found] for found in (ours, theirs))
    return [*timed, compare("recovery", "steps done again, against TorchTrainer", "steps", *replayed, ratio=False)]


def _ours(folder: Path, steps: int) -> None:
    epochs = steps * BATCH_SIZE // ROWS
    optimizer = stamping(folder, PAUSE_S)
    fields = {"optimizer": optimizer, "checkpoint_steps": CHECKPOINT_STEPS}
    tw.fit(job(folder / "runs", rows=ROWS, epochs=epochs, **fields))


def _theirs(folder: Path, steps: int) -> None:
    settings = ray_train.Settings(
        steps=steps,
        rows=ROWS,
        stamps=str(folder),
        pause_s=PAUSE_S,
        checkpoint_steps=CHECKPOINT_STEPS,
        max_failures=2 * len(KILL_STEPS),
    )
    ray_train.fit(folder, settings)


def _killed(fit: Callable[[Path, int], None], folder: Path, kill_steps: tuple[int, ...]) -> list[Recovery]:
    """One run in which rank 1 is killed at these steps, and what each kill cost."""
    folder.mkdir()
    killer = Killer(folder, kill_steps)
    killer.start()
    try:
        fit(folder, kill_steps[-1] + 27)
    finally:
        killer.stop()
    if len(killer.kills) < len(kill_steps):
        raise RuntimeError(f"the run ended after {len(killer.kills)} of {len(kill_steps)} kills")
    stamps = read_stamps(folder)
    return [recovery_of(stamps, victim, killed_s) for victim, killed_s in killer.kills]


def recovery_of(stamps: list[Stamp], victim: Stamp, killed_s: float) -> Recovery:
    """What the kill of the process of `victim`'s rank and pid at `killed_s` cost. Pure."""
    known = {stamp.pid for stamp in stamps if stamp.time_s <= killed_s}
    done = max(stamp.step for stamp in stamps if stamp.pid == victim.pid)
    newcomers = [stamp for stamp in stamps if stamp.pid not in known and stamp.time_s > killed_s]
    first = newcomers[0]
    return Recovery(
        next_step_s=first.time_s - killed_s,
        new_step_s=next(stamp.time_s for stamp in newcomers if stamp.step > done) - killed_s,
        replayed=max(0, done - first.step + 1),
    )


class Killer(threading.Thread):
    """Watches the stamps and kills the process of rank 1 when it has completed each of `steps`."""

    def __init__(self, folder: Path, steps: tuple[int, ...]) -> None:
        super().__init__(daemon=True)
        self._folder, self._steps = folder, steps
        self._through = threading.Event()
        self.kills: list[tuple[Stamp, float]] = []

    def run(self) -> None:
        """Until every kill is done, or the run is over."""
        for step in self._steps:
            victim = self._victim(step)
            if victim is None:
                return
            self.kills.append((victim, time.time()))
            os.kill(victim.pid, signal.SIGKILL)

    def stop(self) -> None:
        """The run is over."""
        self._through.set()
        self.join()

    def _victim(self, step: int) -> Stamp | None:
        while not self._through.wait(0.01):
            reached = [stamp for stamp in read_stamps(self._folder) if stamp.rank == 1 and stamp.step >= step]
            fresh = [stamp for stamp in reached if all(stamp.pid != victim.pid for victim, _ in self.kills)]
            if fresh:
                return fresh[-1]
        return None
