"""What the driver knows: frozen, so that a decision is a new state and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trainwright.core.checkpoint import CheckpointRef, FileEntry
from trainwright.core.data import Prefetch
from trainwright.core.events import Failed
from trainwright.core.group import Generation, Reform, Topology
from trainwright.driver.messages import Heal, Outcome


class Phase(Enum):
    """What the workers are doing as far as the driver knows.

    An unbroken run goes ACQUIRING, GATHERING, RESERVING, FORMING, HEALING, then RUNNING, SNAPSHOTTING and EVALUATING as
    the milestones want, WAITING for the last upload, CLOSING, RELEASING, FINISHED. Every failure leads to GATHERING.
    """

    ACQUIRING = "acquiring"
    GATHERING = "gathering"  # processes start, survivors let go of the old group
    RESERVING = "reserving"
    FORMING = "forming"
    HEALING = "healing"
    READY = "ready"  # every rank stands at `State.step`, idle; only within a decision
    RUNNING = "running"
    SNAPSHOTTING = "snapshotting"
    EVALUATING = "evaluating"
    WAITING = "waiting"  # nothing is left to do but to make the last step durable
    CLOSING = "closing"  # the outcome is decided, an upload may still end
    RELEASING = "releasing"
    FINISHED = "finished"


RECOVERING = frozenset({Phase.GATHERING, Phase.RESERVING, Phase.FORMING, Phase.HEALING})
NO_GENERATION = Generation(token=0, number=0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is to do and how patient it is.

    Attributes:
        workers: world size, in processes.
        spares: processes that wait for a rank to become free, warmed up.
        spares_stay: a spare takes ranks of its own node alone, since it takes over their accelerators.
        total_steps: steps of the whole run.
        steps_per_epoch: a checkpoint is due at the end of each epoch where `checkpoint_steps` is None.
        reform: whether survivors keep their processes.
        topology: of the engine; in `collective` and `coordinator` rank 0 hears a wish to stop for all.
        checkpoint_steps: steps between checkpoints.
        evaluate_steps: steps between evaluations, one more at the end; None never evaluates.
        failures: failures in a row, without a new completed step in between, that are recovered from.
        failures_an_hour: failures within an hour that are recovered from; None for any number.
        place_deadline_s: for all missing processes to start.
        call_deadline_s: for reserve, form, heal and snapshot.
        leave_deadline_s: for survivors to let go of a broken group, once one of them has.
        interrupt_deadline_s: for ranks that did not move in time to answer when they are interrupted.
        hang_deadline_s: without a completed step while running, and for an evaluation; None learns it from the steps
            (see `milestones`).
        upload_deadline_s: for an upload, once nothing but it is waited for.
        storage_attempts: uploads of the last step that may fail before the run does.
        retry_s: pause before the second of them; doubles each time.
        threads: CPU threads of a worker.
        devices: names of the devices of each rank; empty for one CPU each.
    """

    workers: int
    total_steps: int
    steps_per_epoch: int
    spares: int = 0
    spares_stay: bool = False
    reform: Reform = "in_place"
    topology: Topology = "collective"
    checkpoint_steps: int | None = None
    evaluate_steps: int | None = None
    failures: int = 3
    failures_an_hour: int | None = None
    place_deadline_s: float = 300.0
    call_deadline_s: float = 90.0
    leave_deadline_s: float = 15.0
    interrupt_deadline_s: float = 5.0
    hang_deadline_s: float | None = 300.0
    upload_deadline_s: float = 600.0
    storage_attempts: int = 4
    retry_s: float = 1.0
    threads: int = 1
    devices: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Member:
    """The process that holds a rank. `fresh` until its first generation is ready."""

    worker: int
    node: str = ""
    fresh: bool = True


@dataclass(frozen=True, kw_only=True)
class Spare:
    """A process that waits for a rank. `ready` once it has rehearsed."""

    node: str = ""
    ready: bool = False


@dataclass(frozen=True, kw_only=True)
class Upload:
    """The one checkpoint on its way to the store.

    Attributes:
        owing: workers whose files are not there yet. The slot is taken until it is empty, so that an answer
            always belongs to the newest upload.
        trouble: why it will not become a checkpoint.
        committing: all files are stored and the log is being written.
    """

    step: int
    path: str
    owing: frozenset[int]
    files: tuple[FileEntry, ...] = ()
    size_bytes: int = 0
    blocked_s: float = 0.0
    started_s: float = 0.0
    trouble: Exception | None = None
    committing: bool = False


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What the failure being recovered from is put down to. A lost peer (`peer`) yields to any other cause."""

    error: Exception
    event: Failed
    peer: bool = False


@dataclass(frozen=True, kw_only=True)
class State:
    """All that the driver knows.

    Attributes:
        members: by rank.
        rank_of: rank by worker; a worker that is not in it is dead to the driver.
        starting: workers placed and not up yet.
        spares: by worker; none of them is in `rank_of` or `starting`.
        spares_lost: spares that ended by themselves, since one was ready last.
        accelerators: of each rank, as its first process was given them.
        awaiting: workers that owe an answer on their thread of steps.
        answers: what came in this phase, by rank.
        step: at which every rank stood when the group was last idle.
        progress: newest completed step of this line of states, as far as known.
        high: highest step ever completed; only beyond it does a step clear `failures`.
        failures: in a row.
        failed_s: when each failure of the last hour came.
        moved_s: when steps were last known to be running or complete.
        longest_s: longest time so far between news of steps.
        stacks: by rank, where its threads stood when the group did not move.
        since_s: when the recovery, or the run, began.
        phase_s: when the phase began.
        head: newest committed checkpoint.
        writers: ranks that together hold each piece once, the lowest ones.
        considered: step whose checkpoint was taken or skipped last; -1 for none.
        evaluated: last evaluated step; -1 for none.
        uploads: number begun, for names that are never used twice.
        named: highest step that a path was named after.
        attempts: uploads of the last step that failed.
        skipped: samples in the quarantines of the workers, as last told.
        passed: steps whose loss was not finite and which changed nothing, as last told.
        prefetch: how far the ranks read ahead, as last told.
        timers: numbers of the timers that run, by name.
        clock: number of the last timer set.
    """

    settings: Settings
    phase: Phase = Phase.ACQUIRING
    generation: Generation = NO_GENERATION
    members: tuple[Member, ...] = ()
    rank_of: Mapping[int, int] = field(default_factory=dict)
    next_worker: int = 0
    starting: frozenset[int] = frozenset()
    spares: Mapping[int, Spare] = field(default_factory=dict)
    spares_lost: int = 0
    accelerators: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    awaiting: frozenset[int] = frozenset()
    answers: Mapping[int, Any] = field(default_factory=dict)
    heal: Heal | None = None
    step: int = 0
    progress: int = 0
    high: int = 0
    failures: int = 0
    failed_s: tuple[float, ...] = ()
    blame: Blame | None = None
    moved_s: float = 0.0
    longest_s: float = 0.0
    stacks: Mapping[int, str] = field(default_factory=dict)
    since_s: float = 0.0
    phase_s: float = 0.0
    head: CheckpointRef | None = None
    writers: tuple[int, ...] = ()
    layout: str = ""
    considered: int = -1
    evaluated: int = -1
    upload: Upload | None = None
    uploads: int = 0
    named: int = -1
    attempts: int = 0
    trouble: Exception | None = None
    stopping: bool = False
    skipped: int = 0
    passed: int = 0
    prefetch: Prefetch | None = None
    outcome: Outcome = "failed"
    error: Exception | None = None
    timers: Mapping[str, int] = field(default_factory=dict)
    clock: int = 0

    @property
    def committed(self) -> int:
        """Step of the newest committed checkpoint; 0 without one, where every run begins."""
        return self.head.step if self.head else 0

    @property
    def ending(self) -> bool:
        """No step will be run after the one at which the ranks stand."""
        return self.stopping or self.step >= self.settings.total_steps
