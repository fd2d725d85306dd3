"""What a run is to do, and how patient it is: the part of the driver's knowledge that is given."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainwright.core.plan import Mesh, Plan
from trainwright.core.topology import Generation, RestartMode, Role, Topology, role_of
from trainwright.driver.messages import PlanSelector


@dataclass(frozen=True, kw_only=True)
class RunPolicy:
    """What a run is to do and how patient it is.

    Attributes:
        workers: world size at the start, in processes; servers are among them, as everywhere here.
        servers: processes that hold the parameters, the first ranks but for a chief's.
        tolerates: roles whose loss ends no generation.
        stride: steps that a worker takes alone between two exchanges; all others stand at multiples of it.
        min_workers: fewest to go on with where no replacement comes; None for all of them.
        last_resort: the same once `place_deadline_s` has passed without some; None for no fewer then either.
        max_workers: to which the world grows where there is room; None for `workers`.
        spares: processes that wait for a rank to become free, warmed up.
        spares_stay: a spare takes ranks of its own node alone, since it takes over their accelerators.
        total_steps: steps of the whole run.
        steps_per_epoch: a checkpoint is due at the end of each epoch where `checkpoint_steps` is None.
        reform: whether survivors keep their processes.
        topology: of the engine. Rank 0 hears a wish to stop for all, and tells each step.
        checkpoint_steps: steps between checkpoints.
        checkpoint_auto: between them by time: as often as pays, by their cost and the failures seen (see `milestones`).
        keep_s: between copies of the state in the nodes' memory, at least; None keeps none.
        evaluate_steps: steps between evaluations, one more at the end; None never evaluates.
        failures: failures in a row, without a new completed step in between, that are recovered from.
        failures_an_hour: failures within an hour that are recovered from; None for any number.
        max_loss_ratio: a loss more than so many times the usual one is a spike; None looks at none.
        spike_limit: spikes that the run is taken back from; 0 ends it.
        pass_limit: batches that may be passed by, where their step fails again and again.
        samples_of: rows of the training set, by step (from 1), rank, number of workers and plan: what errors name.
        layouts: plans by number of workers; None where one is for any number.
        probe_share: of the run's time, that measuring plans may take; None for any.
        place_deadline_s: for all missing processes to start.
        preemption_s: from a preemption notice to the end of the process.
        replace_stragglers: workers whose part of a step takes so many times that of the others; None replaces none.
        shrink_s: for them to start where the others may go on without them.
        call_deadline_s: for reserve, form and heal.
        leave_deadline_s: for survivors to let go of a broken group, once one of them has.
        interrupt_deadline_s: for ranks that did not move in time to answer when they are interrupted.
        hang_deadline_s: without a completed step while running, for a snapshot and for an evaluation; None learns it
            from the steps (see `milestones`).
        upload_deadline_s: for an upload, once nothing but it is waited for.
        storage_attempts: uploads of the last step that may fail before the run does.
        outage_deadline_s: for a store that is down to be back, instead of these.
        retry_s: pause before the second of them; doubles each time, up to a minute.
        threads: CPU threads of a worker.
        devices: names of the devices of each process, as it sees them.
        mesh: by which ranks are laid over the nodes; None where they may be in any order.
        secret: random, of this driver; the keys of its generations are derived from it.
    """

    workers: int
    total_steps: int
    steps_per_epoch: int
    servers: int = 0
    tolerates: frozenset[Role] = frozenset()
    stride: int = 1
    min_workers: int | None = None
    last_resort: int | None = None
    max_workers: int | None = None
    spares: int = 0
    spares_stay: bool = False
    reform: RestartMode = "in_place"
    topology: Topology = "collective"
    checkpoint_steps: int | None = None
    checkpoint_auto: bool = False
    keep_s: float | None = None
    evaluate_steps: int | None = None
    failures: int = 3
    failures_an_hour: int | None = None
    max_loss_ratio: float | None = None
    spike_limit: int = 0
    pass_limit: int = 0
    samples_of: Callable[[int, int, int, Plan | None], Sequence[int]] | None = None
    layouts: PlanSelector | None = None
    probe_share: float | None = None
    place_deadline_s: float = 300.0
    shrink_s: float = 30.0
    preemption_s: float = 25.0
    replace_stragglers: float | None = None
    call_deadline_s: float = 90.0
    leave_deadline_s: float = 15.0
    interrupt_deadline_s: float = 5.0
    hang_deadline_s: float | None = 300.0
    upload_deadline_s: float = 600.0
    storage_attempts: int = 4
    outage_deadline_s: float = 3600.0
    retry_s: float = 1.0
    threads: int = 1
    devices: tuple[str, ...] = ("cpu",)
    mesh: Mesh | None = None
    secret: bytes = field(default=b"", repr=False)

    @property
    def fewest(self) -> int:
        """Fewest workers to go on with."""
        return self.workers if self.min_workers is None else self.min_workers

    @property
    def most(self) -> int:
        """Workers where there is room for all that are wanted."""
        return self.workers if self.max_workers is None else self.max_workers

    def key_of(self, generation: Generation) -> bytes:
        """The key of a generation's group; empty without a secret, so that only a group of one can form."""
        return hmac.digest(self.secret, str(generation).encode(), hashlib.sha256) if self.secret else b""

    def role_of(self, rank: int) -> Role:
        """Of a rank."""
        return role_of(rank, self.topology, self.servers)

    def crew(self, total: int) -> tuple[int, int]:
        """How many of so many processes are workers and servers; a coordinator's chief is neither."""
        roles = [self.role_of(rank) for rank in range(total)]
        return roles.count("worker"), roles.count("server")

    def spares_rank(self, rank: int) -> bool:
        """Whether the others go on without this rank's process."""
        return self.role_of(rank) in self.tolerates

    def ends_segment(self, rank: int) -> bool:
        """Whether a stretch of steps is over only when this rank has left it."""
        match self.topology:
            case "independent":
                return rank < self.servers
            case "coordinator":
                return rank == 0
        return True
