"""The report of a run as a file beside its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainwright.core.events import Event, RunStarted
from trainwright.reporting.html.run_report import render_report
from trainwright.reporting.run_history import RunHistory, read_history
from trainwright.storage.event_files import read_run_summary
from trainwright.storage.object_store import Store


def write_report(
    store: Store, run: str, *, history: RunHistory | None = None, clock: Callable[[], float] = time.time
) -> str:
    """Write `<run>/report.html` from storage, or from `history`, and return its URI. Raises StorageError."""
    path, history = f"{run}/report.html", history or read_history(store, run)
    store.put(path, render_report(history, uri=store.uri_of(run), now_s=clock()).encode())
    return store.uri_of(path)


class ReportListener:
    """An event listener that writes the report when the run has ended, with earlier sessions."""

    def __init__(self, store: Store, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._started = False

    def on(self, event: Event) -> None:
        """Remember that the run has started."""
        self._started = self._started or isinstance(event, RunStarted)

    def close(self) -> None:
        """Write the report; the events are in storage by now. Raises StorageError."""
        if self._started:
            # The driver ends here: no later event will report an outcome.
            summary = read_run_summary(self._store, self._run)
            history = RunHistory(summary=summary, state=summary.state(owner_alive=False))
            write_report(self._store, self._run, history=history, clock=self._clock)
