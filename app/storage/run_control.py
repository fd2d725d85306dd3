"""Stop and remove runs from any machine that reaches their storage; the driver may be anywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trainwright.core.errors import RunConflict, StorageError, nearest
from trainwright.storage.object_store import Store
from trainwright.storage.run_log import LogEntry, RunLog, WaitFunction, owner_alive, stop_request_path

_POLL_S = 1.0


def request_stop(store: Store, run: str, *, now: bool = False, wait: WaitFunction | None = None) -> None:
    """Ask the driver of a run to stop: after a checkpoint, or at once. It reads the request with its next heartbeat.

    Args:
        now: stop without a checkpoint.
        wait: waits for some seconds, to find out whether a driver on another machine is alive.

    Raises:
        RunConflict: no driver is alive.
        StorageError: the store cannot be used, or there is no such run.
    """
    head = _head(store, run)
    if head is None or not owner_alive(store, run, head, wait=wait):
        state = "its driver is gone" if head is None or head.owned else f"it is {head.outcome}"
        raise RunConflict(
            f"run {run!r} is not running: {state}",
            where=store.uri_of(run),
            remedy=f"nothing is to be stopped; `trainwright show {run}` shows where it stands",
        )
    store.put(stop_request_path(run, head.token), b"now" if now else b"checkpoint")


def await_end(store: Store, run: str, *, deadline_s: float, wait: Callable[[float], object] | None = None) -> None:
    """Wait until the driver that has a run now has released it.

    Raises:
        RunConflict: it did not within `deadline_s`, or it ended without a release.
        StorageError: the store cannot be read.
    """
    pause, waited_s, log = wait or threading.Event().wait, 0.0, RunLog(store, run)
    first = log.head()
    while (head := log.head()) is not None and head.owned and first is not None and head.token == first.token:
        if waited_s >= deadline_s:
            raise RunConflict(
                f"run {run!r} still runs after {deadline_s:g} s",
                where=f"{head.owner}; {store.uri_of(run)}",
                remedy=f"`trainwright show {run}` shows what it does; `trainwright stop {run} --now` stops it at once",
            )
        if not owner_alive(store, run, head, wait=wait):
            raise RunConflict(
                f"the driver of run {run!r} ended before it released the run",
                where=f"{head.owner}; {store.uri_of(run)}",
                remedy="the same command as before continues the run from its newest checkpoint",
            )
        pause(_POLL_S)
        waited_s += _POLL_S


def remove_run(store: Store, run: str, *, wait: WaitFunction | None = None) -> int:
    """Delete a run with all its files; return how many there were. An interrupted removal can be repeated.

    Raises:
        RunConflict: a driver of the run is alive.
        StorageError: the store cannot be used, or there is no such run.
    """
    if owner_alive(store, run, _head(store, run), wait=wait):
        raise RunConflict(
            f"run {run!r} is running", where=store.uri_of(run), remedy=f"stop it first: trainwright stop {run}"
        )
    paths = [path for path, _ in store.list(run)]
    log = [path for path in paths if path.startswith(f"{run}/log/")]
    store.delete(path for path in paths if path not in frozenset(log))
    store.delete(log)  # last: what has a log is a run, which can be removed
    store.delete_folder(run)
    return len(paths)


def is_run(store: Store, name: str) -> bool:
    """Whether a folder of a storage is a run."""
    return "log" in store.folders(name)


def check_run(store: Store, run: str) -> None:
    """Raise StorageError where there is no such run, and name the run with the most similar name."""
    names = store.folders()
    if run not in names or not is_run(store, run):
        others = [name for name in names if is_run(store, name)]
        remedy = nearest(run, others) if others else "there are no runs; check --storage"
        raise StorageError(f"there is no run {run!r}", where=store.uri_of(""), remedy=remedy)


def _head(store: Store, run: str) -> LogEntry | None:
    check_run(store, run)
    return RunLog(store, run).head()
