"""Records traces of chosen steps on one rank, and writes them to the store beside the run.

The framework's profiler runs from the first of the steps to the last one, on the thread of steps. Another thread writes
the file. A failed trace is reported and does not end the run.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from trainwright.core.errors import ResourceError, TrainwrightError
from trainwright.core.topology import TraceRecorder
from trainwright.driver.messages import StoredTrace
from trainwright.storage.object_store import Store

_LOG = logging.getLogger(__name__)


class StepProfiler:
    """Records the chosen steps of one rank. All methods but `save` and `choose` run on the thread of steps.

    Args:
        steps: to record, from 1.
    """

    def __init__(self, store: Store, run: str, steps: range) -> None:
        self._store, self._run, self._steps = store, run, steps
        self._recorder: TraceRecorder | None = None
        self._recorded_steps: list[int] = []  # steps that are in the recording
        self._finished: tuple[TraceRecorder, range] | None = None  # to be saved
        self._trouble = ""  # why chosen steps are not recorded
        self._reported = False  # whether the driver knows of the finished recording, or of the trouble

    def choose(self, steps: range) -> None:
        """Record these steps from now on, for another driver. On any thread: `drop` follows on the thread of steps."""
        self._trouble, self._reported = "", False
        if steps != self._steps:
            self._steps, self._finished = steps, None

    def step(self, number: int, tracer: Callable[[], TraceRecorder] | None) -> AbstractContextManager[None]:
        """Return the context of a step, which is recorded if it was chosen.

        Args:
            tracer: makes a recorder of the engine's framework; None where it has none.
        """
        if number not in self._steps:
            if self._recorder is not None:
                self._finish()
            return nullcontext()
        # Asynchronous workers may get a part of a step after a part of a later step.
        chosen = self._finished is None and not self._trouble
        return self._record_step(number, tracer) if chosen else nullcontext()

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context whose operations get a name in the trace, if there is one."""
        return nullcontext() if self._recorder is None else self._recorder.span(name)

    def report(self, reached: int, *, over: bool) -> tuple[range | None, str]:
        """Return the steps of a finished recording, and why there is none; report either only once.

        Args:
            reached: the step at which a segment ends.
            over: whether it is the last segment, so that a recording ends with it.
        """
        if self._recorder is not None and (over or reached >= self._steps[-1]):
            self._finish()
        reported, self._reported = self._reported, True
        if reported:
            return None, ""
        return (None if self._finished is None else self._finished[1]), self._trouble

    def _finish(self) -> None:
        """End a recording, so that it can be saved."""
        recorder, steps = self._recorder, self._recorded_steps
        self._recorder, self._recorded_steps = None, []
        if recorder is not None and self._try_call(recorder.stop) and steps:
            self._finished, self._reported = (recorder, range(min(steps), max(steps) + 1)), False

    def drop(self) -> None:
        """End and forget a recording that a failure cuts off; a finished recording stays."""
        recorder = self._recorder
        self._recorder, self._recorded_steps = None, []
        if recorder is not None:
            self._try_call(recorder.stop)

    def save(self, rank: int) -> StoredTrace:
        """Write the finished recording to the store. Raises TrainwrightError where it cannot be written."""
        if self._finished is None:
            raise ResourceError("there is no recording", where=f"rank {rank}")
        (recorder, steps), self._finished = self._finished, None
        name = f"steps-{steps[0]}-{steps[-1]}/rank-{rank}{recorder.suffix}"
        with tempfile.TemporaryDirectory(prefix="trainwright-trace-") as folder:
            file = Path(folder) / "trace"
            recorder.save(file)
            data = file.read_bytes()
        path = f"{recorder.folder}/{name}"
        self._store.put(f"{self._run}/{path}", data)
        return StoredTrace(steps=steps, path=path, size_bytes=len(data))

    @contextmanager
    def _record_step(self, number: int, tracer: Callable[[], TraceRecorder] | None) -> Iterator[None]:
        if self._recorder is None:
            self._recorder = self._start_recorder(tracer)
        if self._recorder is None:
            yield
            return
        try:
            with self._recorder.step(number):
                yield
        except BaseException:
            self.drop()
            raise
        self._recorded_steps.append(number)

    def _start_recorder(self, tracer: Callable[[], TraceRecorder] | None) -> TraceRecorder | None:
        """Return a started recorder; None if the engine has none, or it fails to start."""
        if tracer is None:
            self._trouble, self._reported = "the engine of this plan has no profiler", False
            return None
        recorder = tracer()
        return recorder if self._try_call(recorder.start) else None

    def _try_call(self, action: Callable[[], object]) -> bool:
        """Call an action of the recorder; note its error instead of raising, since a trace must not end a run."""
        try:
            action()
        except Exception as error:
            self._reported = False
            self._trouble = error.summary if isinstance(error, TrainwrightError) else f"{type(error).__name__}: {error}"
            _LOG.warning("steps are not traced", exc_info=True)
            return False
        return True
