"""Time data loaders turn by turn, each in a process of its own, so that no loader affects the times of another."""

from __future__ import annotations

import resource
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from processes import Rounds, run_interleaved, start_process


class Loader(Protocol):
    """A reader of a data set in batches. Picklable; it imports its libraries when it is used."""

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """Open the data, and yield for each epoch the number of rows of each batch as it arrives."""


@dataclass(frozen=True, kw_only=True)
class EpochTimes:
    """Times of one epoch of a loader.

    Attributes:
        wall_s: from the end of the previous epoch to the last batch; the first epoch includes opening the data.
        cpu_s: of the process, its threads and its child processes that have ended.
        rows: in all batches.
    """

    wall_s: float
    cpu_s: float
    rows: int


def time_loaders(
    loaders: Mapping[str, Loader], rounds: Rounds, *, on_cluster: Collection[str] = ()
) -> dict[str, list[list[EpochTimes]]]:
    """Return the times of two epochs of each loader, by its name and by round.

    Args:
        loaders: by name.
        rounds: in which they take turns.
        on_cluster: names of loaders that share a process, which starts a Ray cluster.
    """
    with ExitStack() as stack:
        runners = {name: stack.enter_context(start_process()) for name in loaders if name not in on_cluster}
        if on_cluster:
            runners |= dict.fromkeys(on_cluster, stack.enter_context(start_process(cluster=True)))
        turns = {name: partial(runners[name], partial(_time_epochs, each, rounds)) for name, each in loaders.items()}
        return run_interleaved(turns, rounds)


def _time_epochs(loader: Loader, rounds: Rounds) -> list[EpochTimes]:
    """Read all batches of two epochs as fast as possible, drop them, and return the times."""
    _touch_memory(rounds.touched_bytes)
    times = []
    begun, spent_s = time.perf_counter(), _cpu_s()
    for batches in loader.epochs(2):
        rows = sum(batches)
        ended, used_s = time.perf_counter(), _cpu_s()
        times.append(EpochTimes(wall_s=ended - begun, cpu_s=used_s - spent_s, rows=rows))
        begun, spent_s = ended, used_s
    return times


def _touch_memory(size_bytes: int) -> None:
    """Fill and free memory, so that the hypervisor provides it before the turn starts.

    A virtual machine returns free memory to its hypervisor, and the next use of that memory is several times slower.
    Without this, that time would count against the loaders that hold data.
    """
    np.empty(size_bytes, dtype=np.uint8).fill(1)


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
