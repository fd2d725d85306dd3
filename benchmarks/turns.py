"""Loaders take turns, each in a process of its own: what one leaves behind does not change what another measures."""

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
Run = Callable[[Callable[[], Any]], Any]
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


SMOKE = Rounds(counted=1, uncounted=0, touched_bytes=0)


class Loader(Protocol):
    """Gives a data set's batches. Picklable; it imports what it needs when it is used."""

    def epochs(self, count: int) -> Iterator[Iterator[int]]:
        """Open the data anew; for each epoch, the number of rows of each batch as it comes."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One epoch of a loader.

    Attributes:
        wall_s: to its last batch, from the end of the epoch before; in the first, opening the data is included.
        first_s: to its first batch.
        cpu_s: of the process, all threads and the child processes that have ended.
        rows: that came.
    """

    wall_s: float
    first_s: float
    cpu_s: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A turn of a loader: all its batches of so many epochs, as fast as they come; nothing is done with them."""

    loader: Loader
    epochs: int
    touched_bytes: int

    def __call__(self) -> list[Pass]:
        """Seconds of each epoch."""
        _touch_memory(self.touched_bytes)
        passes = []
        begun, spent_s = time.perf_counter(), _cpu_s()
        for batches in self.loader.epochs(self.epochs):
            rows, first_s = 0, 0.0
            for size in batches:
                first_s = first_s or time.perf_counter() - begun
                rows += size
            ended, used_s = time.perf_counter(), _cpu_s()
            passes.append(Pass(wall_s=ended - begun, first_s=first_s, cpu_s=used_s - spent_s, rows=rows))
            begun, spent_s = ended, used_s
        return passes


@contextlib.contextmanager
def host(*, cluster: bool = False) -> Iterator[Run]:
    """A new process, on request with a Ray cluster that is up; gives a function that calls another one there.

    The function raises EOFError when the process has failed; its traceback is on stderr.
    """
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, cluster))  # not a daemon: DataLoader starts processes
    process.start()
    there.close()

    def run(function: Callable[[], Any]) -> Any:
        here.send(function)
        return here.recv()

    try:
        yield run
    finally:
        here.close()
        process.join(_JOIN_S)
        process.kill()


def interleaved(turns: Mapping[str, Callable[[], Result]], rounds: Rounds) -> dict[str, list[Result]]:
    """The results of each in every counted round; each round starts with another one."""
    found: dict[str, list[Result]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(rounds.uncounted + rounds.counted):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            result = turns[name]()
            if number >= rounds.uncounted:
                found[name].append(result)
    return found


def _serve(connection: Connection, cluster: bool) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(EOFError))  # nobody wants anything more
        if cluster:
            from machine import ray_cluster

            stack.enter_context(ray_cluster(object_store_bytes=_STORE_BYTES))
        while True:
            connection.send(connection.recv()())
            gc.collect()


def _touch_memory(size_bytes: int) -> None:
    """Have free memory backed by the machine below.

    A virtual machine gives free memory back, and what is taken again costs several times the work on it: so a loader
    that holds data would be charged for the time since the turn before.
    """
    np.empty(size_bytes, dtype=np.uint8).fill(1)


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
