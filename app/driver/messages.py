"""The words between the pure driver and the world: events that happened, effects that it wants.

Verbs of `Call`, in the order of a run (the worker's methods of the same names):

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

from dataclasses import dataclass
from typing import Any, Literal

from trainwright.core import events
from trainwright.core.checkpoint import CheckpointRef, FileEntry
from trainwright.core.data import Prefetch
from trainwright.core.errors import TrainwrightError
from trainwright.core.gradient_noise import Noise
from trainwright.core.group import Generation, Move, StateTag
from trainwright.core.plan import Plan
from trainwright.core.staleness import Staleness
from trainwright.core.step_phases import Phases

Verb = Literal[
    "reserve", "form", "heal", "probe", "run", "evaluate", "snapshot", "upload", "keep", "stop", "interrupt", "leave"
]  # fmt: skip
FailureKind = Literal["user", "peer", "data", "storage", "internal"]
Outcome = Literal["done", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """A file of a state in a node's memory."""

    node: str
    file: FileEntry


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """A state in the nodes' memory. A file may be there several times, on different nodes."""

    version: int
    step: int
    files: tuple[KeptFile, ...]


@dataclass(frozen=True, kw_only=True)
class Copying:
    """A snapshot is wanted, for these verbs to come."""

    step: int
    verbs: tuple[Literal["upload", "keep"], ...]


@dataclass(frozen=True, kw_only=True)
class KeepOrder:
    """Put the last snapshot into the node's memory as this version; of older ones, those in `hold` stay."""

    version: int
    hold: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A step that is taken with weight 0 and without its batch, since that ends the workers. Counted from 1."""

    step: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Heal:
    """How a group gets its state: by moves between ranks, a keeper, a checkpoint, rank 0's build, or not (`join`).

    `passing` are all steps of the run whose batch is not to be touched.
    """

    step: int
    source: Literal["initial", "replica", "keeper", "checkpoint", "join"]
    moves: tuple[Move, ...] = ()
    kept: KeptState | None = None
    checkpoint: CheckpointRef | None = None
    passing: tuple[Passed, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SegmentReport:
    """The end of a `run`: of all ranks after the same step, which rank 0 tells where workers step alone.

    Attributes:
        stopped: a wish was heard.
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
    stopped: bool
    tag: StateTag
    skipped: int = 0
    passed: int = 0
    overflowed: int = 0
    prefetch: Prefetch | None = None
    own_s: float | None = None
    finished: bool = False
    phases: Phases | None = None
    sampled: int = 0
    noise: Noise | None = None
    staleness: Staleness | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy in host memory was taken."""

    step: int
    size_bytes: int
    blocked_s: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a call raised.

    Attributes:
        error: the original, picklable.
        step: of `run`: newest completed step that the process can tell of; -1 where that is not known.
    """

    kind: FailureKind
    error: TrainwrightError
    step: int = -1


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Living:
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
class Acquired:
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
    living: tuple[Living, ...] = ()
    kept: KeptState | None = None


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The log is not, or no longer, ours, or cannot be reached; `error` says why."""

    error: Exception


@dataclass(frozen=True, kw_only=True)
class Started:
    """A placed worker process is up and answers; a spare has rehearsed.

    `accelerators` are ids of those that Ray gave it, none for a spare beside others; `home` is Ray's id of the node.
    """

    worker: int
    node: str
    pid: int
    accelerators: tuple[str, ...] = ()
    home: str = ""


@dataclass(frozen=True, kw_only=True)
class Returned:
    """A call came back."""

    worker: int
    generation: Generation
    verb: Verb
    value: Any


@dataclass(frozen=True, kw_only=True)
class Raised:
    """A call raised."""

    worker: int
    generation: Generation
    verb: Verb
    failure: Failure


@dataclass(frozen=True, kw_only=True)
class Died:
    """A worker process ended, or its node did, or it could not be started."""

    worker: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """A worker process was told that it will be ended in `left_s` seconds (a preemption notice). It lives on."""

    worker: int
    left_s: float


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """Steps were completed, up to `step`; the last of them with these losses."""

    generation: Generation
    step: int
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The log names the checkpoint, and before it those in `older`, newest last."""

    checkpoint: CheckpointRef
    older: tuple[CheckpointRef, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CommitFailed:
    """The commit could not be written; the checkpoint does not exist."""

    step: int
    error: Exception


@dataclass(frozen=True, kw_only=True)
class StopAsked:
    """The user (or a preemption notice) wants the run to end. `now` does not wait for a checkpoint."""

    now: bool = False


@dataclass(frozen=True, kw_only=True)
class Expired:
    """A timer ran out. `number` is the one given to SetTimer; older ones are dropped."""

    name: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Released:
    """The log holds our release."""


Happening = (
    Acquired | Lost | Started | Returned | Raised | Died | Progressed | Committed | CommitFailed | StopAsked | Expired
    | Released | Noticed
)  # fmt: skip

# --- effects ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Acquire:
    """Take the run's log. Answers Acquired or Lost."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Start a process in bundle `slot`: Started or Died. A `spare` rehearses first; `beside` takes none of its room."""

    worker: int
    slot: int
    spare: bool = False
    beside: bool = False
    after_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End a worker process at once. Answers Died (once, also when it was dead already and that was not yet told)."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Shun:
    """Place nobody on this worker's node any more, as long as there is room elsewhere. No answer."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call a worker. Answers Returned, Raised or Died."""

    worker: int
    generation: Generation
    verb: Verb
    argument: Any = None


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Write the manifest and name the checkpoint in the log. Answers Committed, CommitFailed or Lost (fenced)."""

    step: int
    path: str
    files: tuple[FileEntry, ...]
    parent: str
    layout: str


@dataclass(frozen=True, kw_only=True)
class Seal:
    """Have the keepers remember that this state is whole, for a driver after us; None: that none is to be used."""

    kept: KeptState | None


@dataclass(frozen=True, kw_only=True)
class Release:
    """Give the log back. Answers Released, or Lost."""

    outcome: Outcome
    step: int


@dataclass(frozen=True, kw_only=True)
class Emit:
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
class Finish:
    """The driver is through: kill what is left of the workers and hand the outcome to the user."""

    outcome: Outcome
    step: int
    error: Exception | None = None


Effect = Acquire | Place | Kill | Shun | Call | Commit | Seal | Release | Emit | SetTimer | CancelTimer | Finish
