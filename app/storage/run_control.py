"""Stop and remove runs from any machine that reaches their storage; the driver may be anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from trainwright.core.errors import RunConflict, StorageError, nearest
from trainwright.storage.object_store import Store
from trainwright.storage.run_log import RunLog, WaitFunction, owner_alive, owners_alive, stop_request_path

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
    check_run(store, run)
    head = RunLog(store, run).head()
    if head is None or not owner_alive(store, run, head, careful=True, wait=wait):
        state = "its driver is gone" if head is None or head.owned else f"it is {head.outcome}"
        raise RunConflict(
            f"run {run!r} is not running: {state}",
            where=store.uri_of(run),
            remedy=f"there is nothing to stop; `trainwright show {run} {_option(store)}` shows its state",
        )
    store.put(stop_request_path(run, head.token), b"now" if now else b"checkpoint")


def await_end(
    store: Store, run: str, *, timeout_s: float | None, wait: Callable[[float], object] | None = None
) -> bool:
    """Wait until the driver that has a run now has released it; return False when `timeout_s` passed first.

    Raises:
        RunConflict: the driver ended without a release, or another one has taken the run over.
        StorageError: the store cannot be read.
    """
    pause, began_s, log = wait or threading.Event().wait, time.monotonic(), RunLog(store, run)
    first = head = log.head()
    while first is not None and head is not None and head.owned:
        where = f"{head.owner}; {store.uri_of(run)}"
        if head.token != first.token:
            raise RunConflict(
                f"another driver has taken over run {run!r} meanwhile",
                where=where,
                remedy="a request to stop is for one driver: ask again",
            )
        if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
            return False
        if not owner_alive(store, run, head, careful=True, wait=wait):
            raise RunConflict(
                f"the driver of run {run!r} ended before it released the run",
                where=where,
                remedy="the same command as before continues the run from its newest checkpoint",
            )
        pause(_POLL_S)
        head = log.head()
    return True


def remove_run(store: Store, run: str, *, wait: WaitFunction | None = None) -> int:
    """Delete a run with all its files; return how many there were. An interrupted removal can be repeated.

    Raises:
        RunConflict: a driver of the run is alive.
        StorageError: the store cannot be used, or there is no such run.
    """
    check_run(store, run)
    check_ended(store, [run], wait=wait)
    return delete_run(store, run)


def delete_run(store: Store, run: str) -> int:
    """Delete the files of a run that has ended; return how many there were. Raises StorageError."""
    paths = [path for path, _ in store.list(run)]
    log = [path for path in paths if path.startswith(f"{run}/log/") and path.endswith(".json")]
    store.delete(path for path in paths if path not in frozenset(log))
    store.delete(log)  # last: what has entries in its log is a run, which can be removed
    store.delete_folder(run)
    return len(paths)


def check_ended(store: Store, runs: Iterable[str], *, wait: WaitFunction | None = None) -> None:
    """Raise RunConflict where a driver of one of the runs is alive, and StorageError where the store cannot be read."""
    heads = {run: head for run in runs if (head := RunLog(store, run).head()) is not None}
    for run in sorted(owners_alive(store, heads, careful=True, wait=wait)):
        raise RunConflict(
            f"run {run!r} is running",
            where=store.uri_of(run),
            remedy=f"stop it first: trainwright stop {run} {_option(store)}",
        )


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


def _option(store: Store) -> str:
    return f"--storage {store.uri_of('')}"
