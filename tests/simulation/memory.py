"""The nodes' memory, where copies of states outlive the processes that wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.processes import Process
from tests.simulation.store import Violation
from trainwright.core.engine import CheckpointFile
from trainwright.core.errors import StorageError
from trainwright.driver import messages as m

if TYPE_CHECKING:
    from tests.simulation.calls import Labour


class Memory:
    """Attributes: `full`, there is no room any more; `lost`, nothing can be read any more."""

    def __init__(self, labour: Labour) -> None:
        self._labour = labour
        self.kept: dict[tuple[int, str], tuple[int, int]] = {}  # by version and piece
        self.sealed: dict[int, m.MemoryCheckpoint | None] = {}  # by driver
        self.just_in_time: dict[int, m.MemoryCheckpoint] = {}  # the last copy that a leaving process told of, by driver
        self.full = self.lost = False

    def keep(self, process: Process, call: m.CallWorker) -> None:
        if "keep" not in process.copies:
            raise Violation("a copy is to be kept without a snapshot")
        self._labour.clock.after(
            self._labour.between(0.1, 1.0), self._delivered, process, call, process.copies.pop("keep")
        )

    def gone(self, kept: m.MemoryCheckpoint) -> bool:
        """Whether it cannot be read any more: the next driver's versions remove those of one that is fenced."""
        return self.lost or any((kept.version, item.file.name) not in self.kept for item in kept.files)

    def _delivered(self, process: Process, call: m.CallWorker, copy: tuple[str, int, int]) -> None:
        if not process.alive:
            return
        about: dict[str, Any] = {"worker": process.worker, "generation": call.generation, "verb": "keep"}
        order: m.MemoryCopyRequest = call.argument
        if self.full:
            failure = m.CallFailure(kind="storage", error=StorageError("no room"))
            self._labour.deliver(process.driver, m.CallRaised(**about, failure=failure))
            return
        taken = self._written(order, copy)
        if call.generation.token != process.driver.token:
            return  # the driver that asked is dead
        self._labour.deliver(process.driver, m.CallReturned(**about, value=taken))

    def _written(self, order: m.MemoryCopyRequest, copy: tuple[str, int, int]) -> m.MemoryCopyTaken:
        for key in [key for key in self.kept if key[0] < order.version and key[0] not in order.hold]:
            del self.kept[key]
        piece, *state = copy
        self.kept[order.version, piece] = (state[0], state[1])
        file = m.NodeMemoryFile(node="n", file=CheckpointFile(name=piece, size_bytes=8, sha256=""))
        return m.MemoryCopyTaken(files=(file,), step=copy[1])

    def copy_just_in_time(self, process: Process, order: m.MemoryCopyRequest) -> m.MemoryCopyTaken | None:
        """The copy of a process that leaves and will end; None where it never had a state."""
        if not process.step:
            return None
        if self.full or not process.sound:
            return m.MemoryCopyTaken(files=(), trouble="no room" if self.full else "half an update")
        return self._written(order, (process.piece, process.step, process.lineage))

    def told_just_in_time(self, process: Process, call: m.CallWorker, taken: m.MemoryCopyTaken | None) -> None:
        """A driver is told of the copy of a process that leaves."""
        if taken is not None and taken.files:
            copy = m.MemoryCheckpoint(version=call.argument.version, step=taken.step, files=taken.files)
            self.just_in_time[process.driver.token] = copy

    def check(self, wanted: m.RestorePlan, driver: Any) -> None:
        """What all keepers had told of is not passed over for an older checkpoint, unless a spike is in it."""
        known, spike = self.sealed.get(driver.token), driver.facts.back
        if known and spike and spike <= known.step:
            return
        if known and wanted.source in ("initial", "checkpoint") and wanted.step < known.step and not self.gone(known):
            raise Violation(
                f"restored at step {wanted.step} by {wanted.source}, although step {known.step} is in memory"
            )
        just_in_time, goals = self.just_in_time.get(driver.token), self._labour.scenario.settings.goals
        if (
            just_in_time
            and wanted.source != "join"
            and wanted.step < just_in_time.step
            and not (goals or spike or self.gone(just_in_time))
        ):
            raise Violation(
                f"restored at step {wanted.step} although a survivor left a copy of step {just_in_time.step}"
            )
