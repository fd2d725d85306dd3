"""Whether the driver that owns a run is alive, as far as a reader of storage can tell."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from trainwright.log import Entry
from trainwright.owner import HEARTBEAT_S, Owner, heartbeat_path, provably_dead
from trainwright.store import Store

_PATIENCE_S = 4 * HEARTBEAT_S


def owner_alive(
    store: Store,
    run: str,
    head: Entry | None,
    *,
    patience_s: float = _PATIENCE_S,
    wait: Callable[[float], Any] | None = None,
) -> bool:
    """Whether somebody owns the run and lives.

    A driver of this machine is known by its process. One elsewhere is known by its counter, which is watched for up to
    `patience_s`: no clock of another machine is trusted.

    Args:
        head: the newest entry of the run's log; None for a run that has none.
        wait: waits for so many seconds.
    """
    if head is None or not head.owned or provably_dead(head.owner):
        return False
    return _is_here(head.owner) or _beats(store, heartbeat_path(run, head.token), patience_s, wait)


def _is_here(owner: Owner) -> bool:
    """Whether the owner is a process of this machine; it lives, for it is not provably dead."""
    here = Owner.here()
    known = bool(owner.boot and owner.namespace and owner.pid and owner.started)
    return known and (owner.boot, owner.namespace) == (here.boot, here.namespace)


def _beats(store: Store, path: str, patience_s: float, wait: Callable[[float], Any] | None) -> bool:
    pause, waited_s, seen = wait or threading.Event().wait, 0.0, store.find(path)
    while waited_s < patience_s:
        pause(HEARTBEAT_S / 2)
        waited_s += HEARTBEAT_S / 2
        if store.find(path) != seen:
            return True
    return False
