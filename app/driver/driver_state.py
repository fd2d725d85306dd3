"""What the driver knows: frozen, so that a decision is a new state and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from trainwright.core.data import PrefetchDepth
from trainwright.core.engine import CheckpointFile, CheckpointRef
from trainwright.core.events import Event, Failed
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
    """What the workers are doing as far as the driver knows.

    An unbroken run goes ACQUIRING, GATHERING, RESERVING, FORMING, HEALING, then RUNNING, SNAPSHOTTING and EVALUATING as
    the milestones want, WAITING for the last upload, CLOSING, RELEASING, FINISHED. Every failure leads to GATHERING;
    so does PROBING, which follows HEALING under each plan that is to be measured.
    """

    ACQUIRING = "acquiring"
    GATHERING = "gathering"  # processes start, survivors let go of the old group
    RESERVING = "reserving"
    FORMING = "forming"
    HEALING = "healing"
    PROBING = "probing"  # throwaway steps of a plan are measured
    READY = "ready"  # every rank stands at `State.step`, idle; only within a decision
    RUNNING = "running"
    SNAPSHOTTING = "snapshotting"
    EVALUATING = "evaluating"
    WAITING = "waiting"  # nothing is left to do but to make the last step durable
    CLOSING = "closing"  # the outcome is decided, an upload may still end
    RELEASING = "releasing"
    FINISHED = "finished"


STEADY_PHASES = frozenset({Phase.RUNNING, Phase.SNAPSHOTTING, Phase.EVALUATING, Phase.READY, Phase.WAITING})
RECOVERY_PHASES = frozenset({Phase.GATHERING, Phase.RESERVING, Phase.FORMING, Phase.HEALING, Phase.PROBING})
_NO_GENERATION = Generation(token=0, number=0)


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """The process that holds a rank.

    Attributes:
        slot: its room.
        home: Ray's id of the node.
        told: it was told its rank.
        fresh: until its first generation is ready.
        pieces: of the state, that it held when it was ready last.
        part: of a replica, that these are; -1 for none.
    """

    worker: int
    slot: int
    node: str = ""
    home: str = ""
    told: bool = False
    fresh: bool = True
    pieces: frozenset[str] = frozenset()
    part: int = -1


@dataclass(frozen=True, kw_only=True)
class StandbyWorker:
    """A process that waits for a rank. `ready` once it has rehearsed; a recruit has a `slot` of its own.

    `home` is Ray's id of the node.
    """

    slot: int | None = None
    node: str = ""
    home: str = ""
    ready: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointUpload:
    """The one checkpoint on its way to the store.

    Attributes:
        owing: workers whose files are not there yet; their answers are of its `generation`, others to one given up.
        trouble: why it will not become a checkpoint.
        committing: all files are stored and the log is being written.
    """

    step: int
    path: str
    owing: PersistentSet
    generation: Generation
    files: tuple[CheckpointFile, ...] = ()
    size_bytes: int = 0
    blocked_s: float = 0.0
    started_s: float = 0.0
    trouble: Exception | None = None
    committing: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryCopy:
    """The one state on its way into the nodes' memory.

    Attributes:
        owing: workers whose answer is not there yet. The next one begins only when there are none, so that an answer
            always belongs to this one.
        spoiled: some files will not come.
    """

    version: int
    step: int
    owing: PersistentSet
    spoiled: bool = False
    files: tuple[NodeMemoryFile, ...] = ()
    size_bytes: int = 0
    blocked_s: float = 0.0
    started_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FailureCause:
    """What the failure being recovered from is put down to. A lost peer (`peer`) yields to any other cause.

    `kind` names what can come of a step itself, and is compared with that of the failure before.
    """

    error: Exception
    event: Failed
    peer: bool = False
    kind: str = ""


PendingStage = Literal["start", "hold", "reserve", "form", "heal", "run", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class PendingMember:
    """What a member does that the others do not wait for (see `apart`).

    Attributes:
        doing: `start` (it was placed), `hold` (it is up and waits for its time), or the verb that it was called for.
        until_s: when it is given up; of `hold`, when it goes on.
        since_s: when it was wanted.
        former: worker that held its rank before; -1 for none.
        tries: to join that were in vain, of its process or of those before it.
        blame: a peer that it lost, where another's end may yet turn out to be the cause.
    """

    doing: PendingStage
    until_s: float
    since_s: float
    former: int = -1
    tries: int = 0
    blame: FailureCause | None = None


@dataclass(frozen=True, kw_only=True)
class CrashLoop:
    """Failures alike at one step, which was never completed. `cause` is the first one's, in words."""

    step: int
    rank: int
    kind: str
    cause: str
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class RepeatedError:
    """An error of code, as its last failure raised it: at which highest step, when, and how often in a row."""

    cause: str
    high: int
    failed_s: float
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class DriverState:
    """All that the driver knows.

    Attributes:
        members: by rank.
        plan: that the generation works under, or the one before; None where `Settings.layouts` is.
        trials: of plans, while they last.
        rank_of: rank by worker; a worker that is not in it is dead to the driver.
        starting: workers placed and not up yet.
        spares: those that wait, by worker, recruits among them; none of them is in `rank_of` or `starting`.
        spares_lost: spares that ended by themselves, since one was ready last.
        accelerators: of each slot, as its first process was given them.
        awaiting: workers that owe an answer on their thread of steps.
        answers: what came in this phase, by rank.
        apart: members that the others do not wait for, by worker.
        peers: of the generation.
        until: step to which the ranks were called to run last.
        judges: between how many the evaluation under way is dealt.
        losing: ranks whose processes, which the others do without, were lost since the last new step.
        step: at which every rank stood when the group was last idle.
        progress: newest completed step of this line of states, as far as known.
        high: highest step ever completed; only beyond it does a step clear `failures`.
        failures: in a row.
        failed_s: when each failure of the last hour came.
        suspect: the failure being recovered from, where a step may be the cause.
        loop: how often the last such failures were alike.
        repeated: the last error of code that a failure came of.
        passing: steps whose batch is passed by.
        losses: step and loss of the last steps, where spikes are looked for.
        spiked: the step that the ranks are to be taken back before; 0 for none.
        moved_s: when steps were last known to be running or complete.
        longest_s: longest time so far between news of steps.
        stacks: by rank, where its threads stood when the group did not move.
        since_s, phase_s: when the recovery, or the run, began, and when the phase did.
        head: newest committed checkpoint.
        older: those before it that the log still names, newest last.
        told: newest step that the driver before told of, until the first generation is ready.
        writers: ranks that together hold each piece once, the lowest ones.
        copying: what the snapshot under way is for.
        keepers: ranks that copy their pieces into their nodes' memory.
        keeping: the state on its way there.
        kept: the newest that is whole there.
        versions: number of the last one begun.
        keep_off: a node had no room for one.
        kept_s, copied_s: when one was begun last, or the ranks got their state, and what the steps lost to it.
        saved_s: when a checkpoint was begun last, or the run.
        saving_s, upload_s: what the steps lost to the last one, and what its upload took.
        considered: step whose checkpoint was taken or skipped last; -1 for none.
        evaluated: last evaluated step; -1 for none.
        uploads, named: number begun, for names that are never used twice, and highest step that one was named after.
        attempts, failing_s: uploads of the last step that failed, and when the first of them did.
        stopping: the run is to end.
        pausing: the ranks were asked to pause, since a recruit is up.
        leaving: when those who were told to go will be gone, by worker; some may be dead by now (see `leaving`).
        compared: step at which the ranks' paces were compared last.
        slow: how often in a row a worker was found slow.
        named_slow: workers that were said to be.
        relieved: when a slow worker of a node was replaced last, by node.
        skipped: samples in the quarantines of the workers, as last told.
        passed: steps whose loss was not finite and which changed nothing, as last told.
        overflowed: likewise, whose gradient was too large for `fp16`.
        prefetch: how far the ranks read ahead, as last told.
        advised: whether it was said that the batch is too large.
        timers: numbers of the timers that run, by name.
        clock: number of the last timer set.
    """

    settings: RunPolicy
    phase: Phase = Phase.ACQUIRING
    generation: Generation = _NO_GENERATION
    members: PersistentList[GroupMember] = field(default_factory=PersistentList)
    plan: Plan | None = None
    trials: PlanTrials | None = None
    rank_of: PersistentMap[int] = field(default_factory=PersistentMap)
    next_worker: int = 0
    starting: PersistentSet = field(default_factory=PersistentSet)
    spares: PersistentMap[StandbyWorker] = field(default_factory=PersistentMap)
    spares_lost: int = 0
    accelerators: PersistentMap[tuple[str, ...]] = field(default_factory=PersistentMap)
    awaiting: PersistentSet = field(default_factory=PersistentSet)
    answers: PersistentMap[Any] = field(default_factory=PersistentMap)
    apart: Mapping[int, PendingMember] = field(default_factory=dict)
    peers: tuple[Peer, ...] = ()
    until: int = 0
    judges: int = 0
    losing: frozenset[int] = frozenset()
    heal: RestorePlan | None = None
    step: int = 0
    progress: int = 0
    high: int = 0
    failures: int = 0
    failed_s: tuple[float, ...] = ()
    blame: FailureCause | None = None
    suspect: FailureCause | None = None
    loop: CrashLoop | None = None
    repeated: RepeatedError | None = None
    passing: tuple[SkippedBatch, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    spiked: int = 0
    moved_s: float = 0.0
    longest_s: float = 0.0
    stacks: PersistentMap[str] = field(default_factory=PersistentMap)
    since_s: float = 0.0
    phase_s: float = 0.0
    head: CheckpointRef | None = None
    older: tuple[CheckpointRef, ...] = ()
    told: int = 0
    writers: tuple[int, ...] = ()
    layout: str = ""
    copying: tuple[Literal["upload", "keep"], ...] = ()
    keepers: tuple[int, ...] = ()
    keeping: MemoryCopy | None = None
    kept: MemoryCheckpoint | None = None
    versions: int = 0
    keep_off: bool = False
    kept_s: float = 0.0
    copied_s: float = 0.0
    saved_s: float = 0.0
    saving_s: float = 0.0
    upload_s: float = 0.0
    considered: int = -1
    evaluated: int = -1
    upload: CheckpointUpload | None = None
    uploads: int = 0
    named: int = -1
    attempts: int = 0
    failing_s: float = 0.0
    trouble: Exception | None = None
    stopping: bool = False
    pausing: bool = False
    leaving: Mapping[int, float] = field(default_factory=dict)
    compared: int = 0
    slow: Mapping[int, int] = field(default_factory=dict)
    named_slow: frozenset[int] = frozenset()
    relieved: Mapping[str, float] = field(default_factory=dict)
    skipped: int = 0
    passed: int = 0
    overflowed: int = 0
    prefetch: PrefetchDepth | None = None
    advised: bool = False
    outcome: RunOutcome = "failed"
    error: Exception | None = None
    timers: Mapping[str, int] = field(default_factory=dict)
    clock: int = 0

    def seats(self, room: int) -> int:
        """How many of so many workers the run can use; 0 where there is no plan for them."""
        layouts = self.settings.layouts
        if layouts is None:
            return room
        plan = layouts.on(room, self.settings.fewest)
        return plan.workers if plan else 0

    def loses_state(self, workers: int) -> bool:
        """Whether so many workers would begin anew, in another layout than the generation's."""
        layouts = self.settings.layouts
        plan = layouts.on(workers, self.settings.fewest) if layouts else None
        return plan is not None and self.plan is not None and plan.layout != self.plan.layout

    @property
    def committed(self) -> int:
        """Step of the newest committed checkpoint; 0 without one, where every run begins."""
        return self.head.step if self.head else 0

    @property
    def copied(self) -> int:
        """Step of the newest copy of the state that outlives the workers: a checkpoint, or what is kept in memory."""
        return max(self.committed, self.kept.step if self.kept else 0)

    @property
    def ending(self) -> bool:
        """No step will be run after the one at which the ranks stand."""
        return self.stopping or self.step >= self.settings.total_steps


# --- One decision in the making ---------------------------------------------------------------------------------------


class Transition:
    """A draft of a decision. Attributes: `state`, `effects`, `now_s` (the clock of whoever calls `decide`)."""

    def __init__(self, state: DriverState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    @property
    def settings(self) -> RunPolicy:
        """The run's settings."""
        return self.state.settings

    def change(self, **fields: Any) -> None:
        """Replace fields of the state. Not `dataclasses.replace`: its constructor took half of a decision's time."""
        known = vars(self.state)
        assert fields.keys() <= known.keys(), f"no fields of State: {fields.keys() - known.keys()}"
        state = object.__new__(DriverState)
        vars(state).update(known, **fields)
        self.state = state

    def enter(self, phase: Phase, **fields: Any) -> None:
        """Begin a phase with no answers yet."""
        self.change(phase=phase, phase_s=self.now_s, answers=PersistentMap(), **fields)

    def want(self, effect: Effect) -> None:
        """Ask for an effect, after those already asked for."""
        self.effects.append(effect)

    def emit(self, event: Event) -> None:
        """Ask for an event of the run to be written."""
        self.effects.append(EmitEvent(event=event))

    def call(self, workers: Iterable[int], verb: Verb, argument: Any = None) -> None:
        """Call workers with the same argument; does not note that they owe an answer."""
        generation = self.state.generation
        self.effects.extend(
            CallWorker(worker=worker, generation=generation, verb=verb, argument=argument) for worker in workers
        )

    def call_all(self, verb: Verb, argument: Any = None) -> None:
        """Call every member that takes part, and await each of them."""
        workers = [member.worker for member in self.state.members if member.worker not in self.state.apart]
        self.change(awaiting=PersistentSet(workers))
        self.call(workers, verb, argument)

    def arm(self, name: str, after_s: float) -> None:
        """Set a timer; one of the same name is forgotten."""
        number = self.state.clock + 1
        self.change(clock=number, timers={**self.state.timers, name: number})
        self.want(SetTimer(name=name, number=number, after_s=after_s))

    def disarm(self, *names: str) -> None:
        """Forget those of the timers that run; all of them when none is named."""
        running = [name for name in names or self.state.timers if name in self.state.timers]
        if running:
            self.change(timers={name: number for name, number in self.state.timers.items() if name not in running})
            for name in running:
                self.want(CancelTimer(name=name))

    def reached(self, step: int) -> None:
        """A step is known to be complete. A new one clears the failures, except the one being recovered from."""
        state = self.state
        if step > state.high:
            failures = min(state.failures, 1) if state.phase in RECOVERY_PHASES else 0
            self.change(high=step, progress=step, failures=failures, losing=frozenset())
        elif step > state.progress:
            self.change(progress=step)
