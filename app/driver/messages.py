"""The messages between the pure driver and the effect executor: events that happened, effects to carry out.

Verbs of `CallWorker`, in the order of a run. They are methods of `Worker`, which run on the given thread:

| verb       | argument            | answers                  | thread |
|------------|---------------------|--------------------------|--------|
| reserve    | ReserveRequest      | Address                  | steps  |
| form       | Group               | StateTag                 | steps  |
| restore    | RestorePlan         | StateTag                 | steps  |
| probe      | ProbeRequest        | seconds of a step        | steps  |
| run        | RunRequest          | SegmentReport            | steps  |
| evaluate   | EvaluateRequest     | MetricSums               | steps  |
| snapshot   | SnapshotRequest     | SnapshotTaken            | steps  |
| upload     | checkpoint path     | CheckpointFile, ...      | upload |
| keep       | MemoryCopyRequest   | MemoryCopyTaken          | keep   |
| trace      | rank: int           | StoredTrace              | upload |
| stop       | None                | None                     | watch  |
| interrupt  | explain: bool       | str: stacks, if explain  | watch  |
| leave      | MemoryCopyRequest   | MemoryCopyTaken, or None | steps  |

If a verb loses a peer, it leaves the group, so that the others notice too, and raises PeerLost. `leave` gets a request
where the process is to copy its state into memory before it ends; otherwise None, and answers None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trainwright.core import events
from trainwright.core.data import (
    Columns,
    Feed,
    FeedAssignment,
    MetricSums,
    NoiseScale,
    PeakMemory,
    PhaseTimes,
    PrefetchDepth,
    StepReport,
)
from trainwright.core.engine import CheckpointFile, CheckpointRef
from trainwright.core.errors import TrainwrightError
from trainwright.core.events import Probed
from trainwright.core.plan import Plan
from trainwright.core.topology import Generation, Role, StalenessCounts, StateTransfer

Verb = Literal[
    "reserve", "form", "restore", "probe", "run", "evaluate", "snapshot", "upload", "keep", "trace", "stop",
    "interrupt", "leave",
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
    """A state in the nodes' memory. The same file may be on several nodes."""

    version: int
    step: int
    files: tuple[NodeMemoryFile, ...]


@dataclass(frozen=True, kw_only=True)
class SnapshotRequest:
    """Take a snapshot, which the given verbs will write."""

    step: int
    verbs: tuple[Literal["upload", "keep"], ...]


@dataclass(frozen=True, kw_only=True)
class MemoryCopyRequest:
    """Write the last snapshot to the node's memory as this version; delete older versions that are not in `hold`."""

    version: int
    hold: tuple[int, ...] = ()
    # (node, another node): whose memory gets the files of which node too, because no other node writes the same
    neighbours: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class MemoryCopyTaken:
    """What a rank has written to the memory of its node, and of the neighbour that it was told."""

    files: tuple[NodeMemoryFile, ...]
    step: int = -1  # completed steps of the state; -1 for none
    trouble: str = ""  # why the neighbour has no copy, or this node none


@dataclass(frozen=True, kw_only=True)
class SkippedBatch:
    """A step (from 1) that is taken with weight 0 and without its batch, because the batch ends the workers."""

    step: int
    why: str


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """Where a group gets its state: other ranks, an in-memory checkpoint (`keeper`), a checkpoint or rank 0's build.

    A member that joins others gets none (`join`). `passing` are all steps of the run whose batch is skipped. `report`
    is that of the step, from a rank that took it: a lost rank 0 may not have called its callbacks for it.
    """

    step: int
    source: Literal["initial", "replica", "keeper", "checkpoint", "join"]
    moves: tuple[StateTransfer, ...] = ()
    kept: MemoryCheckpoint | None = None
    checkpoint: CheckpointRef | None = None
    passing: tuple[SkippedBatch, ...] = ()
    report: StepReport | None = None


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Take these steps."""

    steps: range  # none where the run is over but for the callbacks of its last checkpoint
    metrics: Mapping[str, float] | None = None  # of the evaluation after `steps.start` steps; None if there was none
    checkpoints: tuple[CheckpointRef, ...] = ()  # those that callbacks may not have been told of, newest last


@dataclass(frozen=True, kw_only=True)
class SegmentReport:
    """The answer to `run`: from all ranks after the same step, or from rank 0 if workers step independently."""

    step: int
    skipped: int = 0  # samples that this process put into the quarantine so far
    # passed, overflowed: steps without an update so far: their loss was not finite, or their gradient too large
    passed: int = 0
    overflowed: int = 0
    prefetch: PrefetchDepth | None = None  # how far it reads ahead
    # median seconds of its own part of the last steps, before it waits for others; None if unknown
    own_s: float | None = None
    finished: bool = False  # whether training ended before its last step
    announces: bool = False  # whether callbacks want to be told of checkpoints
    phases: PhaseTimes | None = None  # times of its last steps; None if too few were timed since the last report
    sampled: int = 0  # steps whose gradients were sampled for the noise scale
    noise: NoiseScale | None = None  # the gradient noise scale; None while it is not reliable
    staleness: StalenessCounts | None = None  # of applied updates; from rank 0 if workers step independently
    memory: PeakMemory | None = None  # of its device; None on a CPU
    traced: range | None = None  # steps of a finished recording, which `trace` writes
    untraced: str = ""  # why chosen steps were not recorded


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken:
    """A copy of the state in host memory."""

    step: int
    size_bytes: int
    blocked_s: float


@dataclass(frozen=True, kw_only=True)
class StoredTrace:
    """The trace of a rank in the store, at a path within the run."""

    steps: range
    path: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CallFailure:
    """Why a call raised."""

    kind: CallFailureKind
    error: TrainwrightError  # the original error, which can be pickled
    step: int = -1  # newest completed step that the process can report, for `run`; -1 if unknown
    memory: PeakMemory | None = None  # of its device, where that is full


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SurvivingWorker:
    """A worker of the previous driver that this driver has taken over."""

    worker: int
    node: str
    pid: int
    slot: int | None = None  # slot whose bundle it holds; None for a warm standby
    waiting: bool = False  # whether it has never held a rank
    rank: int = -1  # rank that it held last; -1 for none
    accelerators: tuple[str, ...] = ()
    home: str = ""  # Ray's id of the node
    plan: Plan | None = None  # plan whose part of the state it holds, after `step` steps; None if it holds none
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class LeaseAcquired:
    """This driver has the lease of the run."""

    token: int
    head: CheckpointRef | None  # newest checkpoint with all its files, which are verified when they are loaded
    older: tuple[CheckpointRef, ...] = ()  # checkpoints before it, newest last
    told: int = 0  # newest step of the stored events
    living: tuple[SurvivingWorker, ...] = ()  # workers of the previous driver
    kept: MemoryCheckpoint | None = None  # newest complete in-memory checkpoint
    evaluations: tuple[events.Evaluated, ...] = ()  # stored evaluations of the run, in order of steps
    spent_s: float = 0.0  # seconds of earlier drivers of the run


@dataclass(frozen=True, kw_only=True)
class LeaseLost:
    """The lease could not be acquired, was lost, or the store cannot be reached; `error` says why."""

    error: Exception


@dataclass(frozen=True, kw_only=True)
class WorkerStarted:
    """A placed worker process is up; a standby is warmed up.

    `accelerators` are ids of those that Ray gave it, none for a warm standby; `home` is Ray's id of the node.
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
    """A worker process will be ended in `left_s` seconds, infinite if nobody knows when. `why`: what announced it."""

    worker: int
    left_s: float
    why: str = "preemption notice"


@dataclass(frozen=True, kw_only=True)
class StepsCompleted:
    """Steps up to `step` were completed; `losses` are those of the last ones."""

    generation: Generation
    step: int
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted:
    """The run log names the checkpoint, and those in `older` before it, newest last."""

    checkpoint: CheckpointRef
    older: tuple[CheckpointRef, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CommitFailed:
    """The commit could not be written; the checkpoint does not exist."""

    step: int
    error: Exception


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """The user wants the run to end. `now` does not wait for a checkpoint."""

    now: bool = False


@dataclass(frozen=True, kw_only=True)
class TimerExpired:
    """A timer expired. `number` is that of SetTimer; timers that were replaced are dropped."""

    name: str
    number: int


@dataclass(frozen=True, kw_only=True)
class LeaseReleased:
    """The run log holds the release of the lease."""


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
    """Acquire the lease of the run. Answers LeaseAcquired or LeaseLost."""


@dataclass(frozen=True, kw_only=True)
class StartWorker:
    """Start a process in a slot: WorkerStarted or WorkerDied. A `spare` warms up first; `beside` takes no resources."""

    worker: int
    slot: int
    spare: bool = False
    beside: bool = False
    after_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KillWorker:
    """End a worker process at once. Answers WorkerDied, unless that was already reported."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class ExcludeNode:
    """Place no more workers on this worker's node, unless no other node has resources. No answer."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class CallWorker:
    """Call a worker. Answers CallReturned, CallRaised or WorkerDied."""

    worker: int
    generation: Generation
    verb: Verb
    argument: Any = None


@dataclass(frozen=True, kw_only=True)
class CommitCheckpoint:
    """Write the manifest and name the checkpoint in the run log: CheckpointCommitted, CommitFailed or LeaseLost.

    `hold` are paths of checkpoints that stay, however many are newer.
    """

    step: int
    path: str
    files: tuple[CheckpointFile, ...]
    parent: str
    hold: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MarkComplete:
    """Tell the in-memory checkpoint stores which copy the next driver may use; None for none."""

    kept: MemoryCheckpoint | None


@dataclass(frozen=True, kw_only=True)
class ReleaseLease:
    """Release the lease. Answers LeaseReleased or LeaseLost."""

    outcome: RunOutcome
    step: int


@dataclass(frozen=True, kw_only=True)
class EmitEvent:
    """Write an event of the run."""

    event: events.Event


@dataclass(frozen=True, kw_only=True)
class SetTimer:
    """Answer TimerExpired after `after_s`; replaces the timer of that name."""

    name: str
    number: int
    after_s: float


@dataclass(frozen=True, kw_only=True)
class CancelTimer:
    """Forget a timer."""

    name: str


@dataclass(frozen=True, kw_only=True)
class FinishRun:
    """End the remaining workers and return the outcome to the user."""

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
    """Prepare for a rendezvous epoch."""

    generation: Generation
    # plan of the epoch; None for the plan that every process was started with. A process that was built for another
    # layout rebuilds its engine, and holds no state then.
    plan: Plan | None = None
    role: Role = "worker"  # role that the process will have


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Time throwaway steps: at least two, then until `steps` were taken or `seconds` have passed.

    They train, so that complete steps are timed. The process rebuilds its engine afterwards.
    """

    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """Evaluate a share of the evaluation set at a step."""

    step: int
    feeding: FeedAssignment | None = None  # share of the receiver; None for that of its rank in the plan
    # sums of all ranks, whose metrics with state the receiver computes instead, and gives to callbacks
    evaluated: MetricSums | None = None


Decoding = Literal["", "first", "next"]
"""Whether the model keeps what it computed of tokens: no, from these on, or from an earlier request on."""


@dataclass(frozen=True, kw_only=True)
class PredictRequest:
    """Compute the model's outputs for some feeds."""

    feeds: tuple[Feed, ...]
    # index along the second dimension to return, for outputs (rows, places, ...); None for all. Other outputs are
    # returned completely.
    place: int | None = None
    decoding: Decoding = ""  # see `Decoding`; with "next", the feeds have one more token of each row

    def chosen(self, outputs: Columns) -> Columns:
        """Return the requested part of a feed's outputs."""
        if self.place is None:
            return outputs
        kept = slice(self.place, self.place + 1)
        return {name: value[:, kept] if value.ndim > 2 else value for name, value in outputs.items()}


class PlanSelector(Protocol):
    """The plans of a run, all with one device in each worker. Pure: the same call gives the same answer."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of the run, then those that are tried against it before the first step."""

    def on(self, available: int, fewest: int) -> Plan | None:
        """Return a plan for `fewest` to `available` workers: the run's plan, smaller if needed, else another."""

    def lacking(self, available: int) -> str:
        """Return why the run's own plan does not fit so many workers, and why no other does if that is so."""

    def measured(self, step_s: Mapping[int, float], aside: Mapping[int, str]) -> tuple[PlanSelector, Probed]:
        """Return a selector with the fastest measured plan as the run's, and an event that reports it.

        Args:
            step_s: seconds of a step by index in `plans`; at least one.
            aside: why the others could not be measured.
        """

    def leaner(self, plan: Plan) -> PlanSelector | None:
        """Return a selector whose plan, for as many workers, is predicted to need at least a tenth less memory.

        That is this one if its plans do already. None if no other plan does.
        """


@dataclass(frozen=True, kw_only=True)
class PlanTrials:
    """Plans that are measured before the first step, by their index in `PlanSelector.plans`."""

    left: tuple[int, ...]  # plans that are still to be measured, in order
    since_s: float = 0.0  # when the first trial started; 0 before
    step_s: Mapping[int, float] = field(default_factory=dict)  # seconds of a step
    aside: Mapping[int, str] = field(default_factory=dict)  # why a plan cannot be measured
    first: Exception | None = None  # error of the first plan that was set aside
    trying: bool = False  # whether the trial of the first plan of `left` has started
