"""A first pass over data without an index: here where it is short, else as tasks on the Ray cluster that there is."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from trainwright.core.errors import DataError, TrainwrightError
from trainwright.core.pickling import dumps, loads
from trainwright.datasets.formats.file_metadata import current

Item = TypeVar("Item")
Value = TypeVar("Value")

MIN_PASS_S = 2.0  # of the pass, before its length is judged
LONG_PASS_S = 10.0  # what is left of a pass that is worth tasks
_PARTS = 4  # tasks for each CPU of the cluster, so that all end together
_PART_ITEMS = 256


def first_pass(work: Callable[[Item], Value], items: Sequence[Item], *, threads: int = 1) -> list[Value]:
    """work(item) of each item, in order.

    Args:
        work: picklable by value. The first error that is met ends the pass.
        threads: that it is of use to call it in at a time in this process.

    Raises:
        TrainwrightError: as the work raised it.
    """
    begun_s, done, going = time.monotonic(), list[Value](), deque[Future[Value]]()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="trainwright-pass")
    try:
        while len(done) < len(items):
            started = len(done) + len(going)
            if started < len(items) and _long(time.monotonic() - begun_s, len(done), len(items)) and connected():
                return [*done, *(future.result() for future in going), *on_ray(work, items[started:])]
            going.extend(pool.submit(work, item) for item in items[started : len(done) + 2 * threads])
            done.append(going.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)
    return done


def _long(spent_s: float, done: int, total: int) -> bool:
    """Whether so much is left that tasks pay."""
    return done > 0 and spent_s > MIN_PASS_S and spent_s / done * (total - done) > LONG_PASS_S


def connected() -> bool:
    """Whether a Ray cluster is there, which is connected to now where the run has one to connect to."""
    connect = current().connect
    if connect is not None:
        connect()
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def on_ray(work: Callable[[Item], Value], items: Sequence[Item]) -> list[Value]:
    """The same as tasks, spread over the nodes, no more at a time than there are CPUs.

    They ask for no CPU, so that they run even where a job has taken all.
    """
    import ray

    stored = ray.put(dumps(work))
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cpus = max(int(resources.get("CPU", 1)), 1)
    size = min(max(len(items) // (_PARTS * cpus), 1), _PART_ITEMS)
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    task: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_part)
    running: dict[Any, int] = {}
    found: dict[int, list[Value]] = {}
    for number, part in enumerate(parts):
        running[task.remote(stored, part)] = number
        while len(running) >= cpus or (running and number == len(parts) - 1):
            (ended,), _ = ray.wait(list(running), num_returns=1)
            found[running.pop(ended)] = _result(ended)
    return [value for number in range(len(parts)) for value in found[number]]


def _result(ended: Any) -> list[Any]:
    import ray

    try:
        values: list[Any] | TrainwrightError = ray.get(ended)
    except ray.exceptions.RayError as error:
        raise DataError(
            "a task that passes over the data failed",
            where="Ray",
            remedy="install what the functions import on every node, and let every node see the files",
            detail=str(error),
        ) from error
    if isinstance(values, TrainwrightError):
        raise values
    return values


def _part(packed: bytes, items: Sequence[Any]) -> list[Any] | TrainwrightError:
    """Runs as a task of Ray."""
    work = loads(packed)
    try:
        return [work(item) for item in items]
    except TrainwrightError as error:
        return error
