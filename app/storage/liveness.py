"""Whether the drivers that own runs are alive, as far as a reader of storage can tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from trainwright.storage.run_log import Entry
from trainwright.storage.run_owner import HEARTBEAT_S, Owner, heartbeat_path, provably_dead
from trainwright.storage.store import MissingFile, Store

_PATIENCE_S = 4 * HEARTBEAT_S
_LONG_AGO_S = 3600.0  # no clock is that wrong: object stores refuse requests of one that is a quarter of an hour off
_READERS = 32
Wait = Callable[[float], Any]


def owner_alive(
    store: Store, run: str, head: Entry | None, *, patience_s: float = _PATIENCE_S, wait: Wait | None = None
) -> bool:
    """Whether somebody owns the run and lives; see `owners_alive`.

    Args:
        head: the newest entry of the run's log; None for a run that has none.
    """
    heads = {} if head is None else {run: head}
    return run in owners_alive(store, heads, patience_s=patience_s, wait=wait)


def owners_alive(
    store: Store, heads: Mapping[str, Entry], *, patience_s: float = _PATIENCE_S, wait: Wait | None = None
) -> set[str]:
    """The runs that somebody owns who lives.

    A driver of this machine is known by its process. One elsewhere is known by its counter, which is watched for up to
    `patience_s`, that of all runs at the same time: no clock of another machine is trusted, but for a counter that was
    last written more than an hour ago.

    Args:
        heads: the newest entry of each run's log.
        wait: waits for so many seconds.
    """
    owned = {run: head for run, head in heads.items() if head.owned and not provably_dead(head.owner)}
    alive = {run for run, head in owned.items() if _is_here(head.owner)}
    paths = {run: heartbeat_path(run, head.token) for run, head in owned.items() if run not in alive}
    return alive | _beating(store, paths, patience_s, wait or threading.Event().wait) if paths else alive


def _is_here(owner: Owner) -> bool:
    """Whether the owner is a process of this machine; it lives, for it is not provably dead."""
    here = Owner.here()
    known = bool(owner.boot and owner.namespace and owner.pid and owner.started)
    return known and (owner.boot, owner.namespace) == (here.boot, here.namespace)


def _beating(store: Store, paths: Mapping[str, str], patience_s: float, pause: Wait) -> set[str]:
    """The runs whose counters, which are at these paths, go on."""
    alive: set[str] = set()
    with ThreadPoolExecutor(min(_READERS, len(paths))) as pool:
        first = dict(zip(paths, pool.map(store.find, paths.values()), strict=True))
        ages = zip(paths, pool.map(partial(_is_old, store), paths.values()), strict=True)
        watched, waited_s = [run for run, old in ages if not old], 0.0
        while waited_s < patience_s and (silent := [run for run in watched if run not in alive]):
            pause(HEARTBEAT_S / 2)
            waited_s += HEARTBEAT_S / 2
            seen = zip(silent, pool.map(store.find, [paths[run] for run in silent]), strict=True)
            alive |= {run for run, counter in seen if counter != first[run]}
    return alive


def _is_old(store: Store, path: str) -> bool:
    """Whether a counter was written last long ago; False where there is none: its owner may be about to start."""
    try:
        return time.time() - store.modified_s(path) > _LONG_AGO_S
    except MissingFile:
        return False
