"""Runs recorded in memory, and views of them as text."""

from __future__ import annotations

import io
import itertools

from rich.console import Console

from trainwright.core import events
from trainwright.core.engine import CheckpointRef
from trainwright.reporting import run_views
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import Owner, RunLog

_NUMBERS = itertools.count()
ALIVE = Owner.here()


def storage() -> str:
    return f"memory://views-{next(_NUMBERS)}"


def record(
    uri: str,
    happened: list[events.Event],
    *,
    name: str = "demo",
    owner: Owner = ALIVE,
    outcome: str = "",
    fresh: bool = False,
    checkpoint: str = "",
) -> None:
    """Write a run as its driver would have; its log names the folder `checkpoint`, whose files are not written."""
    store = open_store(uri)
    log = RunLog(store, name)
    token = log.acquire(owner, {"name": name}, fresh=fresh).token
    with EventLog(store, name, flush_s=3600) as journal:
        journal.open(token)
        for event in happened:
            journal.write(event)
    if checkpoint:
        step = int(checkpoint.rpartition("/")[2].partition("-")[0])
        log.commit(token, CheckpointRef(step=step, path=checkpoint, manifest_sha256="", parent=""), keep=1)
    if outcome:
        log.release(token, outcome)  # type: ignore[arg-type]


def printed(view: run_views.RunView) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(view)
    return out.getvalue()
