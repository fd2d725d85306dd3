"""Files on their way to the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.processes import Process
from tests.simulation.store import Violation
from trainwright.core.errors import StorageError
from trainwright.driver import messages as m

if TYPE_CHECKING:
    from tests.simulation.calls import Labour


class Uploads:
    """Attributes: `faults`, what befalls the next ones."""

    def __init__(self, labour: Labour) -> None:
        self._labour = labour
        self.faults: list[str] = []

    def begin(self, process: Process, call: m.CallWorker) -> None:
        """Files of a copy are to be stored."""
        if process.upload is not None:
            raise Violation(f"worker {process.worker} is asked for a second upload during one")
        if "upload" not in process.copies:
            raise Violation("an upload without a snapshot")
        process.upload = call
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "hangs":
            process.freeze()
            process.upload_hung = True
            return
        takes_s = self._labour.between(0.2, 4.0)
        begins_s = process.occupy(self._labour.clock.now_s, takes_s)
        if begins_s is None:  # behind a trace that hangs
            process.upload_hung = True
            return
        self._labour.clock.after(begins_s + takes_s, self._uploaded, process, call, fault)

    def _uploaded(self, process: Process, call: m.CallWorker, fault: str) -> None:
        if not process.alive or process.upload is not call:
            return
        process.upload = None
        about: dict[str, Any] = {"worker": process.worker, "generation": call.generation, "verb": "upload"}
        if fault == "internal":
            process.raised = True
            failure = m.CallFailure(kind="internal", error=RuntimeError("a bug"))
            self._labour.deliver(process.driver, m.CallRaised(**about, failure=failure))
        elif fault or self._labour.clock.now_s < self._labour.outage_until_s:
            failure = m.CallFailure(kind="storage", error=StorageError("the store did not answer"))
            self._labour.deliver(process.driver, m.CallRaised(**about, failure=failure))
        else:
            files = self._labour.store.write(call.argument, *process.copies.pop("upload"))
            self._labour.deliver(process.driver, m.CallReturned(**about, value=files))
