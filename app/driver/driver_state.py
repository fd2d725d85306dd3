"""The driver's state, immutable and in parts, and the draft of one decision (`Transition`).

One module writes each part of the state; `tests/unit/test_state_owners.py` checks it. Other modules change a part by
calling a function of its owner, or a method of `Transition`, which owns the general fields, the position and the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal

from trainwright.core.data import PeakMemory, PrefetchDepth
from trainwright.core.engine import CheckpointFile, CheckpointRef
from trainwright.core.events import Evaluated, Event, Failed
from trainwright.core.plan import Plan
from trainwright.core.topology import Generation, Peer
from trainwright.driver.messages import (
    CallWorker,
    CancelTimer,
    Effect,
    EmitEvent,
    MemoryCheckpoint,
    NodeMemoryFile,
    PlanTrials,
    RestorePlan,
    RunOutcome,
    SetTimer,
    SkippedBatch,
    Verb,
)
from trainwright.driver.persistent_collections import PersistentList, PersistentMap, PersistentSet
from trainwright.driver.run_policy import RunPolicy


class Phase(Enum):
    """What the workers do, as far as the driver knows.

    A run without failures goes through ACQUIRING, GATHERING, RESERVING, FORMING and RESTORING. RUNNING, SNAPSHOTTING
    and EVALUATING alternate until the last step. WAITING, CLOSING, RELEASING and FINISHED end the run. Each failure
    leads to GATHERING; so does PROBING, which follows RESTORING under each plan that is measured.
    """

    ACQUIRING = "acquiring"
    GATHERING = "gathering"  # processes start, survivors leave the old group
    RESERVING = "reserving"
    FORMING = "forming"
    RESTORING = "restoring"
    PROBING = "probing"  # throwaway steps of a plan are measured
    READY = "ready"  # every rank stands at `state.position.step`, idle; only within a decision
    RUNNING = "running"
    SNAPSHOTTING = "snapshotting"
    EVALUATING = "evaluating"
    WAITING = "waiting"  # the ranks are idle until an upload ends
    CLOSING = "closing"  # the outcome is decided, an upload may still end
    RELEASING = "releasing"
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are singletons; the hash of `Enum` runs in Python, several times a decision


STEADY_PHASES = frozenset({Phase.RUNNING, Phase.SNAPSHOTTING, Phase.EVALUATING, Phase.READY, Phase.WAITING})
RECOVERY_PHASES = frozenset({Phase.GATHERING, Phase.RESERVING, Phase.FORMING, Phase.RESTORING, Phase.PROBING})
_NO_GENERATION = Generation(token=0, number=0)
HANG_FACTOR = 30.0  # times the longest wait so far
MIN_HANG_DEADLINE_S = 120.0  # reads from a slow store are repeated for a minute, which is no hang
_MAX_HANG_DEADLINE_S = 900.0


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """The process that holds a rank."""

    worker: int
    slot: int  # its worker slot
    node: str = ""
    home: str = ""  # Ray's id of the node
    pid: int = 0
    told: bool = False  # whether it knows its rank
    fresh: bool = True  # whether its first rendezvous is still incomplete
    pieces: frozenset[str] = frozenset()  # pieces of the state that it held after the last rendezvous
    part: int = -1  # number of the replica's part that these pieces are; -1 for none


@dataclass(frozen=True, kw_only=True)
class StandbyWorker:
    """A process that waits for a rank: a warm standby, or a joining worker, which has a `slot` of its own.

    It is `ready` once it is warmed up. `home` is Ray's id of the node.
    """

    slot: int | None = None
    node: str = ""
    home: str = ""
    pid: int = 0
    ready: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointUpload:
    """The checkpoint that is being uploaded; there is one at most."""

    step: int
    path: str
    owing: PersistentSet  # workers whose files are missing
    files: tuple[CheckpointFile, ...] = ()
    size_bytes: int = 0
    blocked_s: float = 0.0
    started_s: float = 0.0
    trouble: Exception | None = None  # why it will not become a checkpoint
    committing: bool = False  # whether all files are stored and the run log is being written


@dataclass(frozen=True, kw_only=True)
class MemoryCopy:
    """The in-memory checkpoint under way."""

    version: int
    step: int
    # workers whose answer is missing. The next copy starts when there are none, so that each answer belongs to this
    # copy.
    owing: PersistentSet
    neighbours: tuple[tuple[str, str], ...] = ()  # as they were when it began
    spoiled: bool = False  # whether files are lost
    files: tuple[NodeMemoryFile, ...] = ()
    blocked_s: float = 0.0
    started_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JustInTimeCopy:
    """The copy of the state that a survivor makes after a failure, before its process is replaced."""

    worker: int
    version: int
    started_s: float
    taken: bool = False  # whether it is complete


@dataclass(frozen=True, kw_only=True)
class FailureCause:
    """The cause of the current failure. A lost peer (`peer`) is replaced by any other cause.

    `kind` names failures that a step itself can cause, and is compared with that of the previous failure.
    """

    error: Exception
    event: Failed
    peer: bool = False
    kind: str = ""


PendingStage = Literal["start", "hold", "reserve", "form", "restore", "run", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class PendingMember:
    """A dynamic member that the others do not wait for (see `DynamicMembers.apart`)."""

    # `start` (it was placed), `hold` (it is up and waits until `until_s`), or the verb that it was called for
    doing: PendingStage
    until_s: float  # deadline; when it joins, for `hold`
    since_s: float  # when a process was wanted for its rank
    former: int = -1  # worker that held its rank before; -1 for none
    tries: int = 0  # failed attempts to join, of this process and of those before it
    blame: FailureCause | None = None  # the peer that it lost, as long as the end of another process may explain that


@dataclass(frozen=True, kw_only=True)
class CrashLoop:
    """Equal failures at one step that was never completed. `cause` is the text of the first one."""

    step: int
    rank: int
    kind: str
    cause: str
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class RepeatedError:
    """The last error of the job's code, at which highest step and time, and how often in a row."""

    cause: str
    high: int
    failed_s: float
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The processes of the run and the ranks that they hold."""

    members: PersistentList[GroupMember] = field(default_factory=PersistentList)  # processes by rank
    # rank by worker; the driver counts a worker that is missing here as dead
    rank_of: PersistentMap[int] = field(default_factory=PersistentMap)
    next_worker: int = 0  # number of the next worker to be placed
    starting: PersistentSet = field(default_factory=PersistentSet)  # workers that are placed and not up yet
    # warm standbys and joining workers, by worker; none of them is in `rank_of` or `starting`
    spares: PersistentMap[StandbyWorker] = field(default_factory=PersistentMap)
    spares_lost: int = 0  # standbys that ended by themselves since the last one became ready
    # accelerators of each slot, as Ray gave them to its first process
    accelerators: PersistentMap[tuple[str, ...]] = field(default_factory=PersistentMap)
    # plan of this rendezvous epoch or of the one before; None if and only if `RunPolicy.layouts` is None
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True)
class DynamicMembers:
    """Members outside the collective group (parameter servers, asynchronous workers)."""

    # members that the others do not wait for, by worker
    apart: Mapping[int, PendingMember] = field(default_factory=dict)
    peers: tuple[Peer, ...] = ()  # peers of this rendezvous epoch


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The current rendezvous."""

    generation: Generation = _NO_GENERATION  # rendezvous epoch
    restore_plan: RestorePlan | None = None  # restore plan of this epoch


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Workers that leave or that are too slow."""

    # when each worker with a preemption notice ends, by worker; some may have ended already
    leaving: Mapping[int, float] = field(default_factory=dict)
    compared: int = 0  # step at which the paces of the ranks were compared last
    slow: Mapping[int, int] = field(default_factory=dict)  # how often in a row a worker was found slow, by worker
    named_slow: frozenset[int] = frozenset()  # workers that were reported as slow
    # when a slow worker of a node was replaced last, by node
    relieved: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the run is."""

    step: int = 0  # step at which every rank stood when the group was idle last
    progress: int = 0  # newest completed step since the last restore, as far as known
    high: int = 0  # highest step ever completed; only a higher step clears `failures`
    told: int = 0  # newest step that the previous driver reported; 0 once the first rendezvous is complete
    pausing: bool = False  # whether the ranks were asked to pause


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps and the evaluation that the ranks were called for, and what they reported."""

    until: int = 0  # step up to which the ranks were called to run
    judges: int = 0  # number of ranks that share the current evaluation
    # all evaluations up to the position, in order of steps. A step takes the metrics of its own start.
    evaluations: tuple[Evaluated, ...] = ()
    moved_s: float = 0.0  # when the last news of steps came, or when they started
    longest_s: float = 0.0  # longest time so far between two reports of steps
    skipped: int = 0  # samples in the quarantines of the workers, as last reported
    passed: int = 0  # steps without an update because the loss was not finite, as last reported
    overflowed: int = 0  # steps without an update because the gradient was too large for `fp16`, as last reported
    prefetch: PrefetchDepth | None = None  # how far the ranks read ahead, as last reported
    memory: Mapping[int, PeakMemory] = field(default_factory=dict)  # peaks by rank, as last told
    advised: bool = False  # whether the user was told that the batch is too large
    deadline_s: float = math.inf  # when the time of the run is over; infinite without a limit
    time_is_over: bool = False  # whether the run ends for that
    announcing: int = 0  # step of the checkpoint that is reported to callbacks before the first step


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """The failures so far and the one that the driver recovers from."""

    failures: int = 0  # failures in a row without a new step
    failed_s: tuple[float, ...] = ()  # when each failure of the last hour came
    losing: frozenset[int] = frozenset()  # ranks of dynamic members that were lost since the last new step
    blame: FailureCause | None = None  # cause of the failure that the driver recovers from
    suspect: FailureCause | None = None  # the same cause, if a step can be the reason for it
    loop: CrashLoop | None = None  # the last equal failures at one step
    repeated: RepeatedError | None = None  # last error that was raised by the code of the job
    passing: tuple[SkippedBatch, ...] = ()  # steps whose batch is skipped
    losses: tuple[tuple[int, float], ...] = ()  # step and loss of the last steps, to detect spikes
    spiked: int = 0  # step before which the ranks must be restored after a loss spike; 0 for none
    stacks: PersistentMap[str] = field(default_factory=PersistentMap)  # stack traces of the ranks that hung, by rank
    since_s: float = 0.0  # when the recovery, or the run, started


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Checkpoints in the run store."""

    head: CheckpointRef | None = None  # newest committed checkpoint
    older: tuple[CheckpointRef, ...] = ()  # earlier checkpoints that the run log still names, newest last
    writers: tuple[int, ...] = ()  # lowest ranks that together hold each piece of the state once
    copying: tuple[Literal["upload", "keep"], ...] = ()  # purposes of the snapshot under way
    saved_s: float = 0.0  # when the last checkpoint, or the run, started
    saving_s: float = 0.0  # seconds that the last checkpoint blocked the steps
    upload_s: float = 0.0  # seconds that its upload took
    considered: int = -1  # step whose checkpoint was taken or skipped last; -1 for none
    upload: CheckpointUpload | None = None  # checkpoint on its way to the store
    uploads: int = 0  # number of uploads started, so that no name is used twice
    named: int = -1  # highest step that an upload was named after
    attempts: int = 0  # failed uploads of the last step
    failing_s: float = 0.0  # when the first of them failed
    trouble: Exception | None = None  # error of the last failed upload
    announces: bool = False  # whether callbacks want to be told of checkpoints
    announced: int = 0  # step of the newest checkpoint that they were told of


@dataclass(frozen=True, kw_only=True)
class MemoryCheckpoints:
    """Copies of the state in the nodes' memory."""

    keepers: tuple[int, ...] = ()  # ranks that copy their pieces into the memory of their nodes
    neighbours: tuple[tuple[str, str], ...] = ()  # (node, the node that gets its copies too)
    keeping: MemoryCopy | None = None  # copy under way
    kept: MemoryCheckpoint | None = None  # newest complete copy
    versions: int = 0  # number of the last copy that was started
    keep_off: bool = False  # whether copies are off, because a node had no memory for one
    kept_s: float = 0.0  # when the last copy started, or when the ranks were restored
    copied_s: float = 0.0  # seconds that the last copy blocked the steps
    replicas: tuple[int, ...] = ()  # ranks that hold the whole state
    just_in_time: JustInTimeCopy | None = None  # requested since the ranks were restored last
    former: MemoryCheckpoint | None = None  # complete copy before that of a survivor, which may be on more nodes


@dataclass(frozen=True, kw_only=True)
class StepTraces:
    """Traces of chosen steps."""

    # by worker that is writing traces, the rank of each of them, oldest first
    tracing: PersistentMap[tuple[int, ...]] = field(default_factory=PersistentMap)
    restored: bool = False  # whether the ranks had a state before


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """The end of the run."""

    stopping: bool = False  # whether a stop was requested, or the time of the run is over
    outcome: RunOutcome = "failed"  # outcome of the run
    error: Exception | None = None  # error that ended the run


@dataclass(frozen=True, kw_only=True)
class DriverState:
    """All that the driver knows, in parts. One module writes each part."""

    settings: RunPolicy  # policy of the run
    phase: Phase = Phase.ACQUIRING  # current phase
    phase_s: float = 0.0  # when it started
    # workers that owe an answer on their thread of steps
    awaiting: PersistentSet = field(default_factory=PersistentSet)
    answers: PersistentMap[Any] = field(default_factory=PersistentMap)  # answers of this phase, by rank
    timers: Mapping[str, int] = field(default_factory=dict)  # numbers of the timers that run, by name
    clock: int = 0  # number of the last timer set
    trials: PlanTrials | None = None  # plans that are measured, until one is chosen
    membership: Membership = field(default_factory=Membership)  # the processes of the run and the ranks that they hold
    # members outside the collective group (parameter servers, asynchronous workers)
    dynamic: DynamicMembers = field(default_factory=DynamicMembers)
    epoch: Epoch = field(default_factory=Epoch)  # the current rendezvous
    handover: Handover = field(default_factory=Handover)  # workers that leave or that are too slow
    position: Position = field(default_factory=Position)  # where the run is
    # the steps and the evaluation that the ranks were called for, and what they reported
    segment: Segment = field(default_factory=Segment)
    # the failures so far and the one that the driver recovers from
    recovery: FailureRecord = field(default_factory=FailureRecord)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)  # checkpoints in the run store
    memory: MemoryCheckpoints = field(default_factory=MemoryCheckpoints)  # copies of the state in the nodes' memory
    traces: StepTraces = field(default_factory=StepTraces)  # traces of chosen steps
    shutdown: Shutdown = field(default_factory=Shutdown)  # the end of the run

    @classmethod
    def of(cls, settings: RunPolicy, **changes: Any) -> DriverState:
        """Return a first state; fields of parts are given by their own names."""
        return cls(settings=settings).with_fields(**changes)

    def with_fields(self, **changes: Any) -> DriverState:
        """Return a copy with other values; fields of parts are given by their own names.

        It bypasses `dataclasses.replace`, whose constructor call took half of a decision's time.
        """
        state = object.__new__(DriverState)
        old, new = self.__dict__, state.__dict__
        new.update(old)
        for name, value in changes.items():
            part = _PART_OF[name]
            if not part:
                new[name] = value
                continue
            copied = new[part]
            if copied is old[part]:
                copied = new[part] = object.__new__(copied.__class__)
                copied.__dict__.update(old[part].__dict__)
            copied.__dict__[name] = value
        return state

    def usable_workers(self, available: int) -> int:
        """Return how many of `available` workers the run can use; 0 if there is no plan for them."""
        layouts = self.settings.world.layouts
        if layouts is None:
            return available
        plan = layouts.on(available, self.settings.world.fewest)
        return plan.workers if plan else 0

    def loses_state(self, workers: int) -> bool:
        """Whether this number of workers needs another layout, so that they restart from a checkpoint."""
        layouts = self.settings.world.layouts
        plan = layouts.on(workers, self.settings.world.fewest) if layouts else None
        return plan is not None and self.membership.plan is not None and plan.layout != self.membership.plan.layout

    @property
    def committed(self) -> int:
        """Step of the newest committed checkpoint; 0 without one."""
        return self.checkpoints.head.step if self.checkpoints.head else 0

    @property
    def owes_announcement(self) -> bool:
        """Whether callbacks want to be told of the newest committed checkpoint, and may not have been."""
        return self.checkpoints.announces and self.checkpoints.announced < self.committed

    @property
    def copied(self) -> int:
        """Step of the newest checkpoint, in the store or in memory."""
        return max(self.committed, self.memory.kept.step if self.memory.kept else 0)

    @property
    def ending(self) -> bool:
        """Whether no step follows the current one."""
        last = self.position.step >= self.settings.length.total_steps
        return self.shutdown.stopping or last or bool(self.end_reason)

    @property
    def end_reason(self) -> str:
        """Why the run ends at the current step, before its last one; empty if it does not, or if the user wants it."""
        step, length = self.position.step, self.settings.length
        if step >= length.total_steps:
            return ""
        if self.segment.time_is_over:
            return f"stopped after step {step:,}: max_time of {length.max_time_s:g} s is over"
        if length.early_stop is None or self.evaluated != step:
            return ""
        return length.early_stop.reason(self.segment.evaluations)

    @property
    def evaluated(self) -> int:
        """Last evaluated step; -1 for none."""
        return self.segment.evaluations[-1].step if self.segment.evaluations else -1

    @property
    def hang_deadline_s(self) -> float:
        """Seconds without a completed step that are a hang: as the job says, or many times the longest wait so far.

        It is 15 minutes before the first step, which may compile, and for evaluations, whose time is not known.
        """
        given = self.settings.deadlines.hang_deadline_s
        if given is not None:
            return given
        if self.phase is Phase.EVALUATING or not self.segment.longest_s:
            return _MAX_HANG_DEADLINE_S
        return min(max(HANG_FACTOR * self.segment.longest_s, MIN_HANG_DEADLINE_S), _MAX_HANG_DEADLINE_S)


_PARTS: Mapping[str, type] = {
    "membership": Membership,
    "dynamic": DynamicMembers,
    "epoch": Epoch,
    "handover": Handover,
    "position": Position,
    "segment": Segment,
    "recovery": FailureRecord,
    "checkpoints": Checkpoints,
    "memory": MemoryCheckpoints,
    "traces": StepTraces,
    "shutdown": Shutdown,
}
_PART_OF: Mapping[str, str] = {each.name: "" for each in fields(DriverState) if each.name not in _PARTS} | {
    each.name: part for part, cls in _PARTS.items() for each in fields(cls)
}
"""The part of the state that each field belongs to; empty for a field of `DriverState` itself."""


# --- The draft of a decision ------------------------------------------------------------------------------------------


class Transition:
    """A draft of a decision. Attributes: `state`, `effects`, `now_s` (clock of the caller of `decide`)."""

    def __init__(self, state: DriverState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    @property
    def settings(self) -> RunPolicy:
        """The run's settings."""
        return self.state.settings

    def change(self, **changes: Any) -> None:
        """Replace fields of the state or of its parts, all given by their own names (see `DriverState.with_fields`)."""
        self.state = self.state.with_fields(**changes)

    def adjust_policy(self, **changes: Any) -> None:
        """Replace fields of the policy, all given by their own names."""
        self.change(settings=self.settings.with_fields(**changes))

    def enter(self, phase: Phase, **changes: Any) -> None:
        """Enter a phase. No answers have come yet, and no pause was requested."""
        self.change(phase=phase, phase_s=self.now_s, answers=PersistentMap(), pausing=False, **changes)

    def want(self, effect: Effect) -> None:
        """Add an effect to carry out."""
        self.effects.append(effect)

    def emit(self, event: Event) -> None:
        """Have an event of the run written."""
        self.effects.append(EmitEvent(event=event))

    def call(self, workers: Iterable[int], verb: Verb, argument: Any = None) -> None:
        """Call workers with the same argument, without waiting for their answers."""
        generation = self.state.epoch.generation
        self.effects.extend(
            CallWorker(worker=worker, generation=generation, verb=verb, argument=argument) for worker in workers
        )

    def call_all(self, verb: Verb, argument: Any = None) -> None:
        """Call every member of the collective group, and wait for all answers."""
        apart = self.state.dynamic.apart
        workers = [member.worker for member in self.state.membership.members if member.worker not in apart]
        self.await_workers(workers)
        self.call(workers, verb, argument)

    def await_workers(self, workers: Iterable[int]) -> None:
        """Wait for the answers of these workers, and of no others."""
        self.change(awaiting=PersistentSet(workers))

    def also_await(self, workers: Set[int]) -> None:
        """Wait for the answers of these workers too."""
        self.change(awaiting=self.state.awaiting | workers)

    def no_longer_await(self, workers: Set[int]) -> None:
        """Do not wait for answers of these workers."""
        self.change(awaiting=self.state.awaiting - workers)

    def put_answer(self, worker: int, answer: Any) -> None:
        """Keep the answer of a worker until the phase ends."""
        rank = self.state.membership.rank_of[worker]
        self.change(awaiting=self.state.awaiting - {worker}, answers=self.state.answers.put(rank, answer))

    def arm(self, name: str, after_s: float) -> None:
        """Set a timer; it replaces one of the same name."""
        number = self.state.clock + 1
        self.change(clock=number, timers={**self.state.timers, name: number})
        self.want(SetTimer(name=name, number=number, after_s=after_s))

    def disarm(self, *names: str) -> None:
        """Cancel timers by name; all of them if none is named."""
        running = [name for name in names or self.state.timers if name in self.state.timers]
        if running:
            self.change(timers={name: number for name, number in self.state.timers.items() if name not in running})
            for name in running:
                self.want(CancelTimer(name=name))

    # --- Position and end of the run ----------------------------------------------------------------------

    def reached(self, step: int) -> None:
        """Note a completed step."""
        position = self.state.position
        if step > position.progress:
            self.change(progress=step, high=max(step, position.high))

    def stand_at(self, step: int, told: int = 0) -> None:
        """Note that every rank is at a step; `told` is the newest step that the previous driver reported."""
        self.change(step=step, progress=step, high=max(step, self.state.position.high), told=told)

    def request_pause(self) -> None:
        """While steps run: have the ranks stop soon, all after the same step."""
        if not self.state.position.pausing:
            self.change(pausing=True)
            self.call([self.state.membership.members[0].worker], "stop")

    def request_stop(self) -> None:
        """Note that the run is to end before its last step."""
        self.change(stopping=True)

    def end_run(self, outcome: RunOutcome, error: Exception | None = None) -> None:
        """Decide the outcome. From now on, answers of workers are ignored, except to uploads and traces."""
        self.disarm()
        self.enter(Phase.CLOSING, outcome=outcome, error=error)
        self.await_workers(())
        if self.state.checkpoints.upload is not None and not self.state.checkpoints.upload.committing:
            self.arm("upload", self.settings.saving.upload_deadline_s)
