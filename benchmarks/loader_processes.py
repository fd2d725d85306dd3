"""Time data loaders turn by turn, each in a process of its own, so that no loader affects the times of another."""

from __future__ import annotations

import contextlib
import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import numpy as np

Result = TypeVar("Result")
ProcessRunner = Callable[[Callable[[], Any]], Any]
_STORE_BYTES, _TOUCHED_BYTES = 2 << 30, 768 << 20
_JOIN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often loaders take turns.

    Attributes:
        counted: rounds that are measured.
        uncounted: rounds before them, which warm up.
        touched_bytes: memory that a process fills and frees before each of its turns.
    """

    counted: int
    uncounted: int = 1
    touched_bytes: int = _TOUCHED_BYTES


SMOKE_ROUNDS = Rounds(counted=1, uncounted=0, touched_bytes=0)


class Loader(Protocol):
    """A reader of a data set in batches. Picklable; it imports its libraries when it is used."""

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """Open the data, and yield for each epoch the number of rows of each batch as it arrives."""


@dataclass(frozen=True, kw_only=True)
class EpochTimes:
    """Times of one epoch of a loader.

    Attributes:
        wall_s: from the end of the previous epoch to the last batch; the first epoch includes opening the data.
        first_s: from the same start to the first batch.
        cpu_s: of the process, its threads and its child processes that have ended.
        rows: in all batches.
    """

    wall_s: float
    first_s: float
    cpu_s: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class LoaderTimer:
    """One turn of a loader: a function that reads all batches of some epochs as fast as possible, and drops them."""

    loader: Loader
    epochs: int
    touched_bytes: int

    def __call__(self) -> list[EpochTimes]:
        """Read all epochs, and return their times."""
        _touch_memory(self.touched_bytes)
        times = []
        begun, spent_s = time.perf_counter(), _cpu_s()
        for batches in self.loader.epochs(self.epochs):
            rows, first_s = 0, 0.0
            for size in batches:
                first_s = first_s or time.perf_counter() - begun
                rows += size
            ended, used_s = time.perf_counter(), _cpu_s()
            times.append(EpochTimes(wall_s=ended - begun, first_s=first_s, cpu_s=used_s - spent_s, rows=rows))
            begun, spent_s = ended, used_s
        return times


@contextlib.contextmanager
def start_process(*, cluster: bool = False) -> Iterator[ProcessRunner]:
    """Start a process, and yield a function that runs another function there and returns its result.

    That function raises EOFError if the process fails; the traceback is on stderr.

    Args:
        cluster: whether the process starts a Ray cluster first.
    """
    context = get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, cluster))  # not a daemon: DataLoader starts processes
    process.start()
    child_end.close()

    def run(function: Callable[[], Any]) -> Any:
        parent_end.send(function)
        return parent_end.recv()

    try:
        yield run
    finally:
        parent_end.close()
        process.join(_JOIN_S)
        process.kill()


def run_interleaved(turns: Mapping[str, Callable[[], Result]], rounds: Rounds) -> dict[str, list[Result]]:
    """Run functions in rounds, each round from another function on, and return the results of the counted rounds.

    Args:
        turns: the functions, by name.
        rounds: how many.
    """
    results: dict[str, list[Result]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(rounds.uncounted + rounds.counted):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            result = turns[name]()
            if number >= rounds.uncounted:
                results[name].append(result)
    return results


def _serve(connection: Connection, cluster: bool) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(EOFError))  # the pipe is closed
        if cluster:
            from machine import ray_cluster

            stack.enter_context(ray_cluster(object_store_bytes=_STORE_BYTES))
        while True:
            connection.send(connection.recv()())
            gc.collect()


def _touch_memory(size_bytes: int) -> None:
    """Fill and free memory, so that the hypervisor provides it before the turn starts.

    A virtual machine returns free memory to its hypervisor, and the next use of that memory is several times slower.
    Without this, that time would count against the loaders that hold data.
    """
    np.empty(size_bytes, dtype=np.uint8).fill(1)


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
