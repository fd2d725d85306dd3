"""What stands at this moment, folded from a run's events. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trainwright.core.events import Checkpointed, Event, Failed, Formed, Placed, Promoted, RunEnded, RunStarted, Steps


@dataclass(frozen=True, kw_only=True)
class Process:
    """A worker's process. A `spare` holds no rank."""

    worker: int
    node: str
    pid: int
    spare: bool = False

    def __str__(self) -> str:
        return f"{'spare' if self.spare else 'worker'} {self.worker} (pid {self.pid} on {self.node})"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run as its newest events tell it.

    Attributes:
        processes: that were placed and are not known to be gone, by number of the worker.
        formed: a generation is ready to step.
        ever_formed: this driver has formed one.
        step: the newest completed step.
        formed_step: at which the newest generation began.
        committed: step of the newest checkpoint.
        ended: the driver has let go of the run.
    """

    processes: Mapping[int, Process] = field(default_factory=dict)
    formed: bool = False
    ever_formed: bool = False
    step: int = 0
    formed_step: int = 0
    committed: int = 0
    ended: bool = False

    @property
    def workers(self) -> tuple[Process, ...]:
        """Processes that hold a rank, or are to hold one."""
        return tuple(process for process in self.processes.values() if not process.spare)

    @property
    def spares(self) -> tuple[Process, ...]:
        """Processes that wait for a rank."""
        return tuple(process for process in self.processes.values() if process.spare)

    def after(self, event: Event) -> Scene:
        """The scene after one more event."""
        match event:
            case RunStarted():
                return replace(self, processes={}, formed=False, ever_formed=False, ended=False)
            case Placed():
                process = Process(worker=event.worker, node=event.node, pid=event.pid, spare=event.spare)
                return replace(self, processes={**self.processes, event.worker: process})
            case Promoted():
                return self._promoted(event)
            case Failed():
                rest = {worker: process for worker, process in self.processes.items() if worker != event.worker}
                return replace(self, processes=rest, formed=False)
            case Formed():
                return replace(self, formed=True, ever_formed=True, formed_step=event.step, step=event.step)
            case Steps() if event.step:
                return replace(self, step=event.step[-1])
            case Checkpointed():
                return replace(self, committed=event.step)
            case RunEnded():
                return replace(self, ended=True, formed=False)
        return self

    def _promoted(self, event: Promoted) -> Scene:
        spare = self.processes.get(event.worker)
        if spare is None:
            return self  # it was to be a spare and is not up yet: it is placed as a worker
        return replace(self, processes={**self.processes, event.worker: replace(spare, spare=False)})
