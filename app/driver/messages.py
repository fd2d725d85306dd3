"""The messages between the pure driver and the effect executor: events that happened, effects to carry out.

Verbs of `CallWorker`, in the order of a run (the worker's methods of the same names):

| verb       | argument            | answers                  | thread |
|------------|---------------------|--------------------------|--------|
| reserve    | Reservation         | Address                  | steps  |
| form       | Group               | StateTag                 | steps  |
| heal       | Heal                | StateTag                 | steps  |
| probe      | Probing             | seconds of a step        | steps  |
| run        | steps: range        | SegmentReport            | steps  |
| evaluate   | Evaluation          | Sums                     | steps  |
| snapshot   | Copying             | Snapshot                 | steps  |
| upload     | checkpoint path     | tuple[FileEntry, ...]    | upload |
| keep       | KeepOrder           | tuple[FileEntry, ...]    | keep   |
| stop       | None                | None                     | watch  |
| interrupt  | explain: bool       | str: stacks, if explain  | watch  |
| leave      | None                | StateTag                 | steps  |

A verb that meets a lost peer raises PeerLost after it has left the group, so that the others notice too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trainwright.core import events
from trainwright.core.data import Columns, Feed, FeedAssignment, NoiseScale, PhaseTimes, PrefetchDepth
from trainwright.core.engine import CheckpointFile, CheckpointRef
from trainwright.core.errors import TrainwrightError
from trainwright.core.events import Probed
from trainwright.core.plan import Plan
from trainwright.core.topology import Address, Generation, Role, StalenessCounts, StateTransfer

Verb = Literal[
    "reserve", "form", "heal", "probe", "run", "evaluate", "snapshot", "upload", "keep", "stop", "interrupt", "leave"
]  # fmt: skip
CallFailureKind = Literal["user", "peer", "data", "storage", "internal"]
RunOutcome = Literal["done", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class NodeMemoryFile:
    """A file of a state in a node's memory."""

    node: str
    file: CheckpointFile


@dataclass(frozen=True, kw_only=True)
class MemoryCheckpoint:
    """A state in the nodes' memory. A file may be there several times, on different nodes."""

    version: int
    step: int
    files: tuple[NodeMemoryFile, ...]


@dataclass(frozen=True, kw_only=True)
class SnapshotRequest:
    """A snapshot is wanted, for these verbs to come."""

    step: int
    verbs: tuple[Literal["upload", "keep"], ...]


@dataclass(frozen=True, kw_only=True)
class MemoryCopyRequest:
    """Put the last snapshot into the node's memory as this version; of older ones, those in `hold` stay."""

    version: int
    hold: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SkippedBatch:
    """A step that is taken with weight 0 and without its batch, since that ends the workers. Counted from 1."""

    step: int
    why: str


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """How a group gets its state: by moves between ranks, a keeper, a checkpoint, rank 0's build, or not (`join`).

    `passing` are all steps of the run whose batch is not to be touched.
    """

    step: int
    source: Literal["initial", "replica", "keeper", "checkpoint", "join"]
    moves: tuple[StateTransfer, ...] = ()
    kept: MemoryCheckpoint | None = None
    checkpoint: CheckpointRef | None = None
    passing: tuple[SkippedBatch, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SegmentReport:
    """The end of a `run`: all ranks after the same step, or rank 0 for all if workers step independently.

    Attributes:
        finished: nothing is left to train, though steps may be left.
        skipped: samples that this process has put into the quarantine so far.
        passed, overflowed: steps that changed nothing so far: their loss was not finite, or their gradient too large.
        prefetch: how far it reads ahead by now.
        own_s: median over its last steps of what it does before it waits for others; None where that is not known.
        phases: what its last steps took; None where too few were timed since it was told last.
        sampled: steps whose gradients were looked at for their noise.
        noise: the gradient noise scale; None while it cannot be trusted.
        staleness: of what was pushed; of rank 0, where workers step alone.
    """

    step: int
    skipped: int = 0
    passed: int = 0
    overflowed: int = 0
    prefetch: PrefetchDepth | None = None
    own_s: float | None = None
    finished: bool = False
    phases: PhaseTimes | None = None
    sampled: int = 0
    noise: NoiseScale | None = None
    staleness: StalenessCounts | None = None


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken:
    """A copy in host memory was taken."""

    step: int
    size_bytes: int
    blocked_s: float


@dataclass(frozen=True, kw_only=True)
class CallFailure:
    """Why a call raised.

    Attributes:
        error: the original, picklable.
        step: of `run`: newest completed step that the process can tell of; -1 where that is not known.
    """

    kind: CallFailureKind
    error: TrainwrightError
    step: int = -1


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SurvivingWorker:
    """A worker process that outlived the driver before us, has let go of what it did, and is ours now.

    Attributes:
        slot: of which it holds the bundle; None for a spare beside others.
        waiting: it has never held a rank.
        rank: that it held last; -1 for none.
        home: Ray's id of the node.
        plan: whose part of the state it holds, after `step` steps; None where it holds none.
    """

    worker: int
    node: str
    pid: int
    slot: int | None = None
    waiting: bool = False
    rank: int = -1
    accelerators: tuple[str, ...] = ()
    home: str = ""
    plan: Plan | None = None
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class LeaseAcquired:
    """The log is ours.

    Attributes:
        head: the newest checkpoint that has all its files, which whoever loads it verifies; `older` are those before.
        told: newest step that storage has an event of.
        living: workers of the driver before.
        kept: the newest state that is whole in the nodes' memory.
    """

    token: int
    head: CheckpointRef | None
    older: tuple[CheckpointRef, ...] = ()
    told: int = 0
    living: tuple[SurvivingWorker, ...] = ()
    kept: MemoryCheckpoint | None = None


@dataclass(frozen=True, kw_only=True)
class LeaseLost:
    """The log is not, or no longer, ours, or cannot be reached; `error` says why."""

    error: Exception


@dataclass(frozen=True, kw_only=True)
class WorkerStarted:
    """A placed worker process is up and answers; a spare has rehearsed.

    `accelerators` are ids of those that Ray gave it, none for a spare beside others; `home` is Ray's id of the node.
    """

    worker: int
    node: str
    pid: int
    accelerators: tuple[str, ...] = ()
    home: str = ""


@dataclass(frozen=True, kw_only=True)
class CallReturned:
    """A call came back."""

    worker: int
    generation: Generation
    verb: Verb
    value: Any


@dataclass(frozen=True, kw_only=True)
class CallRaised:
    """A call raised."""

    worker: int
    generation: Generation
    verb: Verb
    failure: CallFailure


@dataclass(frozen=True, kw_only=True)
class WorkerDied:
    """A worker process ended, or its node did, or it could not be started."""

    worker: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class PreemptionNoticed:
    """A worker process was told that it will be ended in `left_s` seconds (a preemption notice). It lives on."""

    worker: int
    left_s: float


@dataclass(frozen=True, kw_only=True)
class StepsCompleted:
    """Steps were completed, up to `step`; the last of them with these losses."""

    generation: Generation
    step: int
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted:
    """The log names the checkpoint, and before it those in `older`, newest last."""

    checkpoint: CheckpointRef
    older: tuple[CheckpointRef, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CommitFailed:
    """The commit could not be written; the checkpoint does not exist."""

    step: int
    error: Exception


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """The user (or a preemption notice) wants the run to end. `now` does not wait for a checkpoint."""

    now: bool = False


@dataclass(frozen=True, kw_only=True)
class TimerExpired:
    """A timer ran out. `number` is the one given to SetTimer; older ones are dropped."""

    name: str
    number: int


@dataclass(frozen=True, kw_only=True)
class LeaseReleased:
    """The log holds our release."""


DriverEvent = (
    LeaseAcquired
    | LeaseLost
    | WorkerStarted
    | CallReturned
    | CallRaised
    | WorkerDied
    | StepsCompleted
    | CheckpointCommitted
    | CommitFailed
    | StopRequested
    | TimerExpired
    | LeaseReleased
    | PreemptionNoticed
)

# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AcquireLease:
    """Take the run's log. Answers Acquired or Lost."""


@dataclass(frozen=True, kw_only=True)
class StartWorker:
    """Start a process in bundle `slot`: Started or Died. A `spare` rehearses first; `beside` takes none of its room."""

    worker: int
    slot: int
    spare: bool = False
    beside: bool = False
    after_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KillWorker:
    """End a worker process at once. Answers Died (once, also when it was dead already and that was not yet told)."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class ExcludeNode:
    """Place no more workers on this worker's node, unless no other node has resources. No answer."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class CallWorker:
    """Call a worker. Answers Returned, Raised or Died."""

    worker: int
    generation: Generation
    verb: Verb
    argument: Any = None


@dataclass(frozen=True, kw_only=True)
class CommitCheckpoint:
    """Write the manifest and name the checkpoint in the log. Answers Committed, CommitFailed or Lost (fenced)."""

    step: int
    path: str
    files: tuple[CheckpointFile, ...]
    parent: str
    layout: str


@dataclass(frozen=True, kw_only=True)
class MarkComplete:
    """Tell the in-memory stores which checkpoint is complete, for the next driver; None if none may be used."""

    kept: MemoryCheckpoint | None


@dataclass(frozen=True, kw_only=True)
class ReleaseLease:
    """Give the log back. Answers Released, or Lost."""

    outcome: RunOutcome
    step: int


@dataclass(frozen=True, kw_only=True)
class EmitEvent:
    """Write an event of the run."""

    event: events.Event


@dataclass(frozen=True, kw_only=True)
class SetTimer:
    """Answer Expired after `after_s`; replaces the timer of that name."""

    name: str
    number: int
    after_s: float


@dataclass(frozen=True, kw_only=True)
class CancelTimer:
    """Forget a timer."""

    name: str


@dataclass(frozen=True, kw_only=True)
class FinishRun:
    """The driver is through: kill what is left of the workers and hand the outcome to the user."""

    outcome: RunOutcome
    step: int
    error: Exception | None = None


Effect = (
    AcquireLease
    | StartWorker
    | KillWorker
    | ExcludeNode
    | CallWorker
    | CommitCheckpoint
    | MarkComplete
    | ReleaseLease
    | EmitEvent
    | SetTimer
    | CancelTimer
    | FinishRun
)


# --- Plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReserveRequest:
    """A generation to come, and the plan that it works under; None for the one that every process was given.

    A process that has built for another layout begins anew, and holds no state then.

    Attributes:
        role: that the process will have.
        former: the address of the process before it at its rank, in this very generation, for engines whose groups
            know each other by fixed addresses: it is to be bound again; None for any.
    """

    generation: Generation
    plan: Plan | None = None
    role: Role = "worker"
    former: Address | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Measure throwaway steps of the plan: `steps` at most, and none is begun after `seconds`, but for the first two.

    They train, so that all of a step is timed; the process builds anew before it trains on.
    """

    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """The evaluation set is to be judged at a step, by those who have its shares.

    Attributes:
        feeding: the receiver's share; None for that of its rank in the plan.
    """

    step: int
    feeding: FeedAssignment | None = None


@dataclass(frozen=True, kw_only=True)
class PredictRequest:
    """The model's outputs are wanted for some feeds.

    Attributes:
        place: along the second dimension, the only one that is kept of outputs (rows, places, ...), others stay as they
            are; None for all.
    """

    feeds: tuple[Feed, ...]
    place: int | None = None

    def chosen(self, outputs: Columns) -> Columns:
        """What is wanted of a feed's outputs."""
        if self.place is None:
            return outputs
        kept = slice(self.place, self.place + 1)
        return {name: value[:, kept] if value.ndim > 2 else value for name, value in outputs.items()}


class PlanSelector(Protocol):
    """The plans of a run, all with one device in each worker. Pure: the same question gives the same answer."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of the run, then those that it is measured against before the first step."""

    def on(self, room: int, fewest: int) -> Plan | None:
        """For at most `room` and at least `fewest` workers: the run's plan, smaller where it must be, else another."""

    def lacking(self, room: int) -> str:
        """Why the run's own plan is none for so many workers, and why no other is either where that is so."""

    def measured(self, step_s: Mapping[int, float], aside: Mapping[int, str]) -> tuple[PlanSelector, Probed]:
        """The same with the best measured of `plans` as the run's, and an event that tells of it.

        Args:
            step_s: seconds of a step by place in `plans`; at least one.
            aside: why the others could not be measured.
        """


@dataclass(frozen=True, kw_only=True)
class PlanTrials:
    """Plans that are measured before the first step, by their places in `Layouts.plans`.

    Attributes:
        left: that are still to be measured, in order.
        step_s: seconds of a step.
        aside: why one cannot be measured.
        first: the error of the first that was set aside.
        trying: the first of `left` has been begun with.
        since_s: when the first of all was begun with; 0 before.
    """

    left: tuple[int, ...]
    since_s: float = 0.0
    step_s: Mapping[int, float] = field(default_factory=dict)
    aside: Mapping[int, str] = field(default_factory=dict)
    first: Exception | None = None
    trying: bool = False
