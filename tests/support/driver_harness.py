"""A driver told event by event, for its tests."""

from __future__ import annotations

from typing import Any, TypeVar

from trainwright.core.engine import CheckpointFile, CheckpointRef
from trainwright.core.topology import Address, StateTag
from trainwright.driver import messages as m
from trainwright.driver.run_policy import RunPolicy
from trainwright.driver.state_machine import begin_run, decide

E = TypeVar("E")
HEAD = CheckpointRef(step=4, path="checkpoints/00000004-1", manifest_sha256="00")
FILES = (CheckpointFile(name="state.npz", size_bytes=8, sha256="00"),)


class Story:
    """A driver and what it wanted since the last event."""

    def __init__(self, **changes: Any) -> None:
        fields: dict[str, Any] = {"workers": 2, "total_steps": 8, "steps_per_epoch": 4, **changes}
        self.now_s = 0.0
        self.state, self.wanted = begin_run(RunPolicy.of(**fields), self.now_s)

    def tell(self, *happenings: m.DriverEvent) -> Story:
        self.wanted = ()
        for event in happenings:
            self.now_s += 1.0
            self.state, effects = decide(self.state, event, self.now_s)
            self.wanted += effects
        return self

    def returns(self, verb: m.Verb, *values: Any, workers: list[int] | None = None) -> Story:
        """Answers of all members (or of the given ones), in the order of ranks."""
        names = workers if workers is not None else [member.worker for member in self.state.membership.members]
        values = values * len(names) if len(values) == 1 else values
        generation = self.state.epoch.generation
        return self.tell(
            *(
                m.CallReturned(worker=worker, generation=generation, verb=verb, value=value)
                for worker, value in zip(names, values, strict=True)
            )
        )

    def raises(self, worker: int, verb: m.Verb, kind: m.CallFailureKind, error: Exception) -> Story:
        failure = m.CallFailure(kind=kind, error=error)
        return self.tell(
            m.CallRaised(worker=worker, generation=self.state.epoch.generation, verb=verb, failure=failure)
        )

    def expires(self, name: str) -> Story:
        return self.tell(m.TimerExpired(name=name, number=self.state.timers[name]))

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.wanted if isinstance(effect, kind)]

    def calls(self, verb: m.Verb) -> list[m.CallWorker]:
        return [call for call in self.all(m.CallWorker) if call.verb == verb]

    def emitted(self, kind: type[E]) -> list[E]:
        return [emit.event for emit in self.all(m.EmitEvent) if isinstance(emit.event, kind)]

    def up(self, head: CheckpointRef | None = None) -> Story:
        """Acquired, placed and started."""
        self.tell(m.LeaseAcquired(token=3, head=head))
        return self.start()

    def start(self) -> Story:
        return self.tell(
            *(m.WorkerStarted(worker=w, node=f"n{w}", pid=w) for w in sorted(self.state.membership.starting))
        )

    def formed(self, *tags: StateTag) -> Story:
        self.returns("reserve", Address(host="h", port=1))
        return self.returns("form", *(tags or (StateTag(step=None),)))

    def running(self, head: CheckpointRef | None = None) -> Story:
        self.up(head).formed()
        assert self.state.epoch.restore_plan is not None
        return self.returns("restore", StateTag(step=self.state.epoch.restore_plan.step))

    def segment(self, step: int) -> Story:
        return self.returns("run", m.SegmentReport(step=step))

    def snapshot(self, step: int, worker: int = 0) -> Story:
        return self.returns("snapshot", m.SnapshotTaken(step=step, size_bytes=8, blocked_s=0.1), workers=[worker])

    def committed(self, step: int) -> Story:
        parent = self.state.checkpoints.head.path if self.state.checkpoints.head else ""
        assert self.state.checkpoints.upload is not None
        ref = CheckpointRef(step=step, path=self.state.checkpoints.upload.path, manifest_sha256="00", parent=parent)
        return self.tell(m.CheckpointCommitted(checkpoint=ref))


def progressed(story: Story, step: int) -> Story:
    return story.tell(m.StepsCompleted(generation=story.state.epoch.generation, step=step))
