"""Run functions in processes of their own, and in turn."""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
ProcessRunner = Callable[[Callable[[], Any]], Any]
_STORE_BYTES, _TOUCHED_BYTES = 2 << 30, 768 << 20
_JOIN_S = 20.0


@contextlib.contextmanager
def start_processes(*functions: Callable[[Connection], object]) -> Iterator[list[Connection]]:
    """Start a process for each function, which is called with one end of a pipe, and yield the other ends.

    `recv` raises EOFError if the process has failed; the traceback is on stderr. At the end the pipes are closed.

    Args:
        functions: picklable. An EOFError ends them silently.
    """
    spawn = get_context("spawn")
    pipes = [spawn.Pipe() for _ in functions]
    processes = [  # not daemons: DataLoader starts processes
        spawn.Process(target=_call, args=(function, child_end))
        for function, (_, child_end) in zip(functions, pipes, strict=True)
    ]
    for process, (_, child_end) in zip(processes, pipes, strict=True):
        process.start()
        child_end.close()
    parent_ends = [parent_end for parent_end, _ in pipes]
    try:
        yield parent_ends
    finally:
        for parent_end in parent_ends:
            parent_end.close()
        for process in processes:
            process.join(_JOIN_S)
            process.kill()


def _call(function: Callable[[Connection], object], pipe: Connection) -> None:
    with contextlib.suppress(EOFError):  # the pipe is closed
        function(pipe)


def share_messages(pipes: Sequence[Connection]) -> None:
    """Receive a message from each process, and send the list of them to all."""
    messages = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(messages)


@contextlib.contextmanager
def start_process(*, cluster: bool = False) -> Iterator[ProcessRunner]:
    """Start a process, and yield a function that runs another function there and returns its result.

    Args:
        cluster: whether the process starts a Ray cluster first.
    """
    with start_processes(_run_on_cluster if cluster else _run_functions) as (pipe,):

        def run(function: Callable[[], Any]) -> Any:
            pipe.send(function)
            return pipe.recv()

        yield run


def _run_on_cluster(pipe: Connection) -> None:
    from machine import ray_cluster

    with ray_cluster(object_store_bytes=_STORE_BYTES):
        _run_functions(pipe)


def _run_functions(pipe: Connection) -> None:
    while True:
        pipe.send(pipe.recv()())
        gc.collect()


def run_alone(function: Callable[[], Any]) -> Any:
    """Run a function in a process of its own, and return its result."""
    with start_process() as run:
        return run(function)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often functions take turns.

    Attributes:
        counted: rounds that are measured.
        uncounted: rounds before them, which warm up.
        touched_bytes: memory that a process fills and frees before each turn of a loader.
    """

    counted: int
    uncounted: int = 1
    touched_bytes: int = _TOUCHED_BYTES


SMOKE_ROUNDS = Rounds(counted=1, uncounted=0, touched_bytes=0)


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


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a function, and by how many bytes the peak of its process's memory has grown."""

    seconds: float
    grown_bytes: int


def measured(function: Callable[[], object]) -> Cost:
    """Call a function, and return its cost."""
    before, begun = _peak_bytes(), time.perf_counter()
    function()
    return Cost(seconds=time.perf_counter() - begun, grown_bytes=_peak_bytes() - before)


def _peak_bytes() -> int:
    """Return the peak of memory of this process; `ru_maxrss` would include that of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", status)[0])
