"""The policy of a run: its size, length, checkpoints, tolerated failures and deadlines."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trainwright.core.data import PeakMemory
from trainwright.core.metric_goals import EarlyStop, goals_of
from trainwright.core.plan import Mesh, Plan
from trainwright.core.topology import Generation, RestartMode, Role, Topology, role_of
from trainwright.driver.messages import PlanSelector

CALL_DEADLINE_S = 180.0  # at least, to form a group and to load a checkpoint


@dataclass(frozen=True, kw_only=True)
class WorldPolicy:
    """The processes of a run: how many, in which roles and where."""

    workers: int  # world size at the start, in processes, servers included as everywhere here
    servers: int = 0  # parameter servers; they are the first ranks, after a chief
    tolerates: frozenset[Role] = frozenset()  # roles whose loss does not end a rendezvous epoch
    min_workers: int | None = None  # fewest processes to continue with when no replacement comes; None for all of them
    shrinks_at_once: bool = False  # the others do not wait for the replacement of a lost worker
    last_resort: int | None = None  # the same once `place_deadline_s` has passed; None for no fewer then either
    # number of processes to which the run grows when the cluster has resources; None for `workers`
    max_workers: int | None = None
    spares: int = 0  # warm standbys
    spares_stay: bool = False  # a standby takes only ranks of its own node, because it takes over their accelerators
    reform: RestartMode = "in_place"  # whether survivors keep their processes
    # topology of the engine. Rank 0 gets a stop request for all ranks, and reports each step.
    topology: Topology = "collective"
    threads: int = 1  # CPU threads of a worker
    devices: tuple[str, ...] = ("cpu",)  # names of the devices of each process, as it sees them
    mesh: Mesh | None = None  # mesh by which ranks are placed on nodes; None if their order does not matter
    # random bytes of this driver, from which the keys of its rendezvous epochs are derived
    secret: bytes = field(default=b"", repr=False)
    layouts: PlanSelector | None = None  # plans by number of workers; None if one plan fits any number

    @property
    def fewest(self) -> int:
        """Fewest workers that the run continues with."""
        return self.workers if self.min_workers is None else self.min_workers

    @property
    def most(self) -> int:
        """Most workers that the run uses."""
        return self.workers if self.max_workers is None else self.max_workers

    def key_of(self, generation: Generation) -> bytes:
        """Return the key of a rendezvous epoch's group; empty without a secret, which only a group of one accepts."""
        return hmac.digest(self.secret, str(generation).encode(), hashlib.sha256) if self.secret else b""

    def role_of(self, rank: int) -> Role:
        """Return the role of a rank."""
        return role_of(rank, self.topology, self.servers)

    def crew(self, total: int) -> tuple[int, int]:
        """Return how many of `total` processes are workers and servers; a coordinator's chief is neither."""
        roles = [self.role_of(rank) for rank in range(total)]
        return roles.count("worker"), roles.count("server")

    def spares_rank(self, rank: int) -> bool:
        """Whether the others continue without this rank's process."""
        return self.role_of(rank) in self.tolerates

    def ends_segment(self, rank: int) -> bool:
        """Whether a segment ends only when this rank has left it."""
        match self.topology:
            case "independent":
                return rank < self.servers
            case "coordinator":
                return rank == 0
        return True


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How long a run is, and when it evaluates."""

    total_steps: int  # steps of the whole run
    steps_per_epoch: int  # steps of an epoch. A checkpoint is due at the end of each if `checkpoint_steps` is None.
    stride: int = 1  # steps that a worker takes between two exchanges; ranks stop at multiples of it
    profile: range = range(0)  # steps (from 1) that the ranks trace; a segment ends with the last one
    evaluate_steps: int | None = None  # steps between evaluations, and one more at the end; None never evaluates
    # rows of the training set by step (from 1), rank, number of workers and plan, for error messages
    samples_of: Callable[[int, int, int, Plan | None], Sequence[int]] | None = None
    early_stop: EarlyStop | None = None  # ends the run when a metric no longer improves
    max_time_s: float | None = None  # seconds of all drivers of the run together, after which it ends; None for any


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """When checkpoints and in-memory copies are taken, and how long the store may fail."""

    checkpoint_steps: int | None = None  # steps between checkpoints
    checkpoint_auto: bool = False  # space checkpoints by their cost and the failures seen (see `checkpoint_interval_s`)
    keep_s: float | None = None  # seconds at least between two in-memory checkpoints; None takes none
    storage_attempts: int = 4  # failed uploads of the last step after which the run fails
    # seconds that an unreachable store has to come back; replaces `storage_attempts` then
    outage_deadline_s: float = 3600.0
    retry_s: float = 1.0  # seconds before the second attempt; doubles each time, up to a minute
    upload_deadline_s: float = 600.0  # seconds for an upload, once the run waits for nothing else
    # goal by which the checkpoint of the best evaluation is kept (see `core.metric_goals`); empty for none
    best: str = ""


@dataclass(frozen=True, kw_only=True)
class FailureLimits:
    """Which failures a run recovers from."""

    failures: int = 3  # failures in a row, without a new completed step, that the run recovers from
    failures_an_hour: int | None = None  # failures within an hour that the run recovers from; None for any number
    max_loss_ratio: float | None = None  # a loss more than this many times the median is a spike; None detects none
    spike_limit: int = 0  # loss spikes after which the run goes back; 0 ends the run at the first
    pass_limit: int = 0  # batches that may be skipped because their step fails again and again
    probe_share: float | None = None  # share of the run time that plan trials may take; None for any
    # what was predicted and used of a device that ran out of memory, and what to do, as texts: by plan (None for the
    # plan of the run), rank and peak
    explain_memory: Callable[[Plan | None, int, PeakMemory | None], tuple[str, str]] | None = None
    replan_memory: bool = False  # whether the run continues under another plan after a device ran out of memory
    # replace workers whose part of a step takes this many times that of the others; None replaces none
    replace_stragglers: float | None = None


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds until the driver gives up."""

    place_deadline_s: float = 300.0  # for all missing processes to start
    shrink_s: float = 30.0  # for them to start, if the others may continue without them
    preemption_s: float = 25.0  # from a preemption notice to the end of the process
    call_deadline_s: float = 90.0  # for reserve, form and restore
    leave_deadline_s: float = 15.0  # for survivors to leave a broken group, once one of them has
    interrupt_deadline_s: float = 5.0  # for ranks that hang to answer an interrupt
    # without a completed step, for a snapshot and for an evaluation; None learns it from the steps
    hang_deadline_s: float | None = 300.0


@dataclass(frozen=True, kw_only=True)
class RunPolicy:
    """What a run is to do, and how long the driver waits for what."""

    world: WorldPolicy  # the processes of a run: how many, in which roles and where
    length: RunLength  # how long a run is, and when it evaluates
    # when checkpoints and in-memory copies are taken, and how long the store may fail
    saving: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    limits: FailureLimits = field(default_factory=FailureLimits)  # which failures a run recovers from
    deadlines: Deadlines = field(default_factory=Deadlines)  # seconds until the driver gives up

    @classmethod
    def of(cls, *, workers: int, total_steps: int, steps_per_epoch: int, **changes: Any) -> RunPolicy:
        """Return a policy with defaults; fields of the parts are given by their own names."""
        length = RunLength(total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        return cls(world=WorldPolicy(workers=workers), length=length).with_fields(**changes)

    @property
    def goals(self) -> dict[str, str]:
        """The goals for evaluated metrics, by option."""
        return goals_of(self.saving.best, self.length.early_stop)

    def with_fields(self, **changes: Any) -> RunPolicy:
        """Return a copy with other values; fields of the parts are given by their own names."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            parts.setdefault(_PART_OF[name], {})[name] = value
        return replace(self, **{part: replace(getattr(self, part), **each) for part, each in parts.items()})


_PART_OF: Mapping[str, str] = {
    each.name: part
    for part, cls in (
        ("world", WorldPolicy),
        ("length", RunLength),
        ("saving", CheckpointPolicy),
        ("limits", FailureLimits),
        ("deadlines", Deadlines),
    )
    for each in fields(cls)
}
