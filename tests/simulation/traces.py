"""Recordings of chosen steps, by the profiler of real workers, and traces on their way to the store."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tests.simulation.processes import Process
from trainwright.core.errors import PeerLost, StorageError, TrainwrightError
from trainwright.driver import messages as m
from trainwright.worker.step_profiler import StepProfiler

if TYPE_CHECKING:
    from tests.simulation.calls import Labour


class Traces:
    """Attributes: `faults`, what befalls the next ones."""

    def __init__(self, labour: Labour) -> None:
        self._labour, self._steps = labour, labour.scenario.settings.length.profile
        self.faults: list[str] = []

    def _profiler(self, process: Process) -> StepProfiler:
        if process.profiler is None:
            process.profiler = StepProfiler(_Void(), "run", self._steps)  # type: ignore[arg-type]
        return process.profiler

    # --- recording ----------------------------------------------------------------------------------------

    def step(self, process: Process, number: int) -> None:
        """A process has taken a step."""
        if self._steps:
            with self._profiler(process).step(number, _Recorder):
                pass

    def fail(self, process: Process, number: int) -> None:
        """A step fails, which drops a recording of it."""
        if self._steps:
            with suppress(PeerLost), self._profiler(process).step(number, _Recorder):
                raise PeerLost("gone")

    def drop(self, process: Process) -> None:
        """It is to join a group."""
        self._profiler(process).drop()

    def renew(self, process: Process) -> None:
        """Another driver takes it over."""
        self._profiler(process).choose(self._steps)

    def report(self, process: Process, reached: int, *, stopped: bool = False) -> range | None:
        """What it tells at the end of a segment."""
        if not self._steps:
            return None
        over = stopped or reached >= self._labour.scenario.settings.length.total_steps
        return self._profiler(process).report(reached, over=over)[0]

    # --- writing ------------------------------------------------------------------------------------------

    def begin(self, process: Process, call: m.CallWorker) -> None:
        """A trace is to be stored, once the thread that also uploads is free."""
        fault = self.faults.pop(0) if self.faults else ""
        takes_s = self._labour.between(0.2, 6.0)
        begins_s = process.occupy(self._labour.clock.now_s, takes_s)
        if begins_s is None:
            process.trace_hung = True
            return
        if fault == "hangs":
            process.freeze()
        self._labour.clock.after(begins_s, self._write, process, process.driver, call, fault, takes_s)

    def _write(self, process: Process, driver: Any, call: m.CallWorker, fault: str, takes_s: float) -> None:
        if not process.alive or process.driver is not driver:
            return  # calls of a driver that was replaced are refused
        trace = self._profiler(process).save(call.argument)
        about: dict[str, Any] = {"worker": process.worker, "generation": call.generation, "verb": "trace"}
        answer: m.DriverEvent = m.CallReturned(**about, value=trace)
        if fault == "hangs":
            process.trace_hung = True
            return
        if fault == "internal":
            answer = m.CallRaised(**about, failure=m.CallFailure(kind="internal", error=TrainwrightError("a bug")))
        elif fault or self._labour.clock.now_s < self._labour.outage_until_s:
            error = StorageError("the store did not answer")
            answer = m.CallRaised(**about, failure=m.CallFailure(kind="storage", error=error))
        self._labour.clock.after(takes_s, self._written, process, driver, answer)

    def _written(self, process: Process, driver: Any, answer: m.DriverEvent) -> None:
        if process.alive and process.driver is driver:
            self._labour.deliver(driver, answer)


class _Void:
    """A store that keeps nothing."""

    def put(self, path: str, data: bytes) -> None:
        """Take a file."""


class _Recorder:
    """Records nothing."""

    suffix: ClassVar[str] = ".json"
    folder: ClassVar[str] = "profile"

    def start(self) -> None:
        """Begin."""

    def step(self, number: int) -> AbstractContextManager[object]:
        """Return the context of a step."""
        return nullcontext()

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return the context of a part of a step."""
        return nullcontext()

    def stop(self) -> None:
        """End."""

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_bytes(b"")
