"""A handle on a run: wait, stop, look at its history, use its model."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from trainwright.core.job import Job
from trainwright.driver.messages import FinishRun
from trainwright.reporting.run_history import RunHistory, read_history, read_steps
from trainwright.storage.event_log import EventListener
from trainwright.storage.object_store import Store

if TYPE_CHECKING:
    import pandas as pd


class RunDriver(Protocol):
    """Who drives a run: a session in this process, or a driver in the cluster."""

    @property
    def store(self) -> Store:
        """Where the run lives."""

    def run(self) -> FinishRun:
        """Returns when the run has ended."""

    def stop(self, now: bool = False) -> None:
        """Ask the run to end."""

    def flush(self) -> None:
        """Write the events so far."""

    def listen(self, listener: EventListener) -> None:
        """Add somebody who hears every event. Raises TrainwrightError where none can be heard."""


class Run:
    """A run that was started here. Everything but `wait`, `stop` and `listen` is read from storage.

    Attributes:
        job: what was started.
        plan: how it runs.
        signal: number of the signal that stopped it, 0 for none.
    """

    signal = 0

    def __init__(self, job: Job, session: RunDriver, decision: Any) -> None:
        self.job, self.decision, self.plan = job, decision, decision.chosen
        self._session = session
        self._finish: FinishRun | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._drive, name=f"trainwright-{job.name}", daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        try:
            self._finish = self._session.run()
        except BaseException as error:  # handed to whoever waits
            self._error = error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False when `timeout_s` passed first.

        Raises:
            TrainwrightError: the run failed; the first failing rank's own error.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        if self._finish is not None and self._finish.error is not None:
            raise self._finish.error
        return True

    @property
    def finish(self) -> FinishRun | None:
        """How the run ended; None while it runs."""
        return self._finish

    def stop(self, now: bool = False) -> None:
        """Ask for the end: at the next step after a checkpoint, or at once without one. Returns immediately."""
        self._session.stop(now)

    def listen(self, listener: EventListener) -> None:
        """Let somebody hear every event, those so far first."""
        self._session.listen(listener)

    @property
    def state(self) -> str:
        """`running`, `done`, `stopped` or `failed`."""
        if self._thread.is_alive():
            return "running"
        return self._finish.outcome if self._finish is not None else "failed"

    @property
    def history(self) -> pd.DataFrame:
        """One row a completed step: step, epoch, loss, learning_rate, gradient_norm, samples_per_s, wait_share."""
        self._session.flush()
        return read_steps(self._store, self.job.name)

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row an evaluation: step, and a column for each metric."""
        return self._read().evaluations

    @property
    def metrics(self) -> dict[str, float]:
        """The newest evaluation; empty when there was none."""
        return self._read().metrics

    @property
    def folder(self) -> str:
        """URI of the run's folder."""
        return self._store.uri_of(self.job.name)

    @property
    def report(self) -> str:
        """URI of the report."""
        return self._store.uri_of(f"{self.job.name}/report.html")

    def load_model(self) -> Any:
        """The model with the weights of the newest checkpoint, in this process."""
        from trainwright.runtime.model_loading import load_model

        return load_model(self.job)

    def _repr_html_(self) -> str:
        from trainwright.reporting.html.run_report import summary_html

        return summary_html(self._read())

    def __repr__(self) -> str:
        return f"Run({self.job.name!r}, {self.state}, {self.folder})"

    @property
    def _store(self) -> Store:
        return self._session.store

    def _read(self) -> RunHistory:
        self._session.flush()
        return read_history(self._store, self.job.name)


# --- Stop on Ctrl-C and SIGTERM ---------------------------------------------------------------------------------------


FIRST_SIGNAL_TEXT = "stopping after this step, with a checkpoint; a second signal stops at once, without it"
SECOND_SIGNAL_TEXT = "stopping at once, without a checkpoint"
_STDERR = 2


class _Stoppable(Protocol):
    """What can be asked to end."""

    def stop(self, now: bool = False) -> None:
        """Ask for the end."""


class _SignalHandler:
    """Which signals came. `last` is the number of the newest one, 0 for none."""

    def __init__(self, run: _Stoppable) -> None:
        self._run = run
        self.last = 0

    def take(self, number: int, _frame: FrameType | None) -> None:
        """First a checkpoint, then no more waiting; what is done is said at once."""
        self._run.stop(now=self.last != 0)
        told, self.last = SECOND_SIGNAL_TEXT if self.last else FIRST_SIGNAL_TEXT, number
        with contextlib.suppress(OSError):  # the terminal may be gone: that is why the signal came
            os.write(_STDERR, f"\n{told}\n".encode())  # a print may be what was interrupted


@contextlib.contextmanager
def stop_on_signals(run: _Stoppable) -> Iterator[_SignalHandler]:
    """Within it, SIGINT and SIGTERM stop the run; afterwards they are what they were.

    Outside the main thread Python delivers no signals, and this does nothing.
    """
    stops = _SignalHandler(run)
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    before = {number: signal.signal(number, stops.take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
