"""A handle on a run: wait, stop, look at its history; load or export its model."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

from trainwright.core.engine import CheckpointChoice
from trainwright.core.job import Job
from trainwright.datasets.dataset import first_batch
from trainwright.driver.messages import FinishRun
from trainwright.planning.profiler import profiler_of
from trainwright.reporting.stored_run import StoredRun
from trainwright.storage.checkpoints import with_checkpoint
from trainwright.storage.event_log import EventListener
from trainwright.storage.object_store import Store
from trainwright.storage.weight_files import base_weights
from trainwright.strategies.distillation.multi_student import unwrap_student


class RunDriver(Protocol):
    """The driver of a run: in this process, or in an actor of the cluster."""

    @property
    def store(self) -> Store:
        """Where the run lives."""

    def run(self) -> FinishRun:
        """Drive the run to its end."""

    def stop(self, now: bool = False) -> None:
        """Ask the run to end."""

    def flush(self) -> None:
        """Write the events so far."""

    def listen(self, listener: EventListener) -> None:
        """Add a listener for every event. Raises TrainwrightError if the driver is in another process."""


class Run(StoredRun):
    """A run that was started here. Everything but `wait`, `stop` and `listen` is read from storage.

    Attributes:
        job: the job.
        plan: its plan.
        signal: number of the signal that stopped it, 0 for none.
        stop_asked: whether `stop` was called here; a run can also be stopped from elsewhere.
    """

    signal = 0
    stop_asked = False

    def __init__(self, job: Job, session: RunDriver, decision: Any) -> None:
        super().__init__(session.store, job.name)
        self.job, self.decision, self.plan = job, decision, decision.chosen
        self._session = session
        self._finish: FinishRun | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()  # in Python 3.11 a thread seems to have ended after an interrupted `join`
        threading.Thread(target=self._drive, name=f"trainwright-{job.name}", daemon=True).start()

    def _drive(self) -> None:
        try:
            self._finish = self._session.run()
        except BaseException as error:  # `wait` raises it
            self._error = error
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False when `timeout_s` passed first. An interrupt ends the waiting, and not the run.

        Raises:
            TrainwrightError: the run failed; the first failing rank's own error.
        """
        if not self._ended.wait(timeout_s):
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
        self.stop_asked = True
        self._session.stop(now)

    def listen(self, listener: EventListener) -> None:
        """Add a listener for every event, those so far first."""
        self._session.listen(listener)

    @property
    def state(self) -> str:
        """`running`, `done`, `stopped` or `failed`."""
        if not self._ended.is_set():
            return "running"
        return self._finish.outcome if self._finish is not None else "failed"

    def load_model(self, *, step: CheckpointChoice = None) -> Any:
        """Return the model with the weights of the newest checkpoint, or of the one that `step` selects."""
        return load_model(self.job, step)

    def _flush(self) -> None:
        self._session.flush()


# --- Stop on Ctrl-C and SIGTERM ---------------------------------------------------------------------------------------


FIRST_SIGNAL_TEXT = "stopping after this step, with a checkpoint; a second signal stops at once, without it"
SECOND_SIGNAL_TEXT = "stopping at once, without a checkpoint"
_STDERR = 2


class _Stoppable(Protocol):
    """A run that can be stopped."""

    def stop(self, now: bool = False) -> None:
        """Ask the run to end."""


class _SignalHandler:
    """Stops a run at a signal. `last` is the number of the newest signal, 0 for none."""

    def __init__(self, run: _Stoppable) -> None:
        self._run = run
        self.last = 0

    def take(self, number: int, _frame: FrameType | None) -> None:
        """Stop after a checkpoint, or at once at the second signal; say so."""
        self._run.stop(now=self.last != 0)
        text, self.last = SECOND_SIGNAL_TEXT if self.last else FIRST_SIGNAL_TEXT, number
        with contextlib.suppress(OSError):  # the terminal may be gone: that is why the signal came
            os.write(_STDERR, f"\n{text}\n".encode())  # the signal may have interrupted a print


@contextlib.contextmanager
def stop_on_signals(run: _Stoppable) -> Iterator[_SignalHandler]:
    """Let SIGINT and SIGTERM stop the run within a block; restore their handlers afterwards.

    Outside the main thread Python delivers no signals, and this does nothing.
    """
    stops = _SignalHandler(run)
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    old_handlers = {number: signal.signal(number, stops.take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stops
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def wait_for_run(run: Run) -> None:
    """Wait until a run has ended; signals stop it. Raises as `Run.wait`."""
    with stop_on_signals(run) as stops:
        while not run.wait(timeout_s=0.5):  # a join without a timeout would not let signals through
            continue
    run.signal = stops.last


# --- The trained model ------------------------------------------------------------------------------------------------


def load_model(job: Job, step: CheckpointChoice = None) -> Any:
    """Return the job's model with the weights of its run's newest checkpoint, or of the one that `step` selects.

    If the run trained several students and one of them is wanted (`StudentModels.alone`), return that student.

    Raises:
        CheckpointError: there is none, or it does not fit the model.
    """
    model = job.model()
    weights = base_weights(job)
    arguments = () if weights is None else (weights,)
    with_checkpoint(job, step, lambda reader: profiler_of(model).take_weights(model, reader, *arguments))
    return unwrap_student(model)


def export(job: Job, path: str, step: CheckpointChoice = None) -> str:
    """Write the trained model to a file or folder, in the format of the path's ending.

    Raises:
        JobError: the ending names no format, or the model cannot be written in it.
        CheckpointError: there is no checkpoint, or it does not fit the model.
        MissingFramework: a package for the format is not installed.
        DataError, UserCodeError: the format needs a row of the training data, which cannot be read.
    """
    model = load_model(job, step)
    spec = job.model_spec(1, lambda: first_batch(job.train, job.train.index(), job.columns))
    profiler_of(model).export(model, path, spec)
    return path


def loading_code(job: Job, file: str, overrides: list[str]) -> str:
    """Return the Python code that loads the model of a run that was started from a job file."""
    step = ', step="best"' if job.checkpointing.best else ""
    job_text = f"tw.load_job({file!r}, {overrides!r})" if overrides else repr(file)
    return f"import trainwright as tw; model = tw.load_model({job_text}{step})"
