"""Who works together: generations, groups and what each rank says of its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Reform = Literal["in_place", "new_process"]
Topology = Literal["collective", "coordinator", "independent"]
Role = Literal["worker", "chief", "server", "evaluator"]


def role_of(rank: int, topology: Topology, servers: int) -> Role:
    """Of a process: a coordinator comes first, then servers, then workers."""
    if topology == "coordinator":
        return "chief" if rank == 0 else "server" if rank <= servers else "worker"
    return "server" if rank < servers else "worker"


@dataclass(frozen=True, kw_only=True, order=True)
class Generation:
    """One formation of the group. `token` is the driver's number in the log; later is greater."""

    token: int
    number: int

    def __str__(self) -> str:
        return f"{self.token}.{self.number}"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do. The core acts on these words and never on a strategy's name.

    Attributes:
        reform: whether a new generation forms in the surviving processes or in new ones.
        topology: `collective`: every rank steps together; `coordinator`: rank 0 leads the others;
            `independent`: ranks step alone, against servers or between outer steps.
        tolerates: roles that may die or join without a new generation.
        devices_per_worker: devices one actor drives; None means all of its node.
        static_shapes: every micro-batch must have the same number of rows.
        xla: it can compile steps by XLA.
        inductor: it can compile models by `torch.compile`.
        local_state: data ranks can keep buffers of their own.
        synchronized_batch_norm: batch norms can look at the whole batch.
    """

    reform: Reform = "in_place"
    topology: Topology = "collective"
    tolerates: frozenset[Role] = frozenset()
    devices_per_worker: int | None = 1
    static_shapes: bool = False
    xla: bool = False
    inductor: bool = False
    local_state: bool = False
    synchronized_batch_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a rank can be reached; the port came from the system."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One member of a group, as the others see it."""

    rank: int
    address: Address
    role: Role = "worker"
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A generation's members, as given to one of them.

    Attributes:
        rank: the receiver's own rank; `peers[rank]` is itself.
        peers: all members in rank order.
        key: random, of this generation: members prove by it to each other that they belong together. Empty only where a
            rank is alone.
        devices: the receiver's devices, such as `("cpu",)` or `("cuda:0",)`.
        slot: the receiver's room, for as long as it lives.
        accelerators: their ids on the node, which a process that was not given them must make visible to itself.
        threads: CPU threads the receiver may use; 0 where its process has others to serve and keeps those it has.
        deadline_s: seconds within which the group must have formed and any collective must end.
    """

    generation: Generation
    rank: int
    peers: tuple[Peer, ...]
    key: bytes = field(default=b"", repr=False)
    devices: tuple[str, ...] = ("cpu",)
    slot: int = 0
    accelerators: tuple[str, ...] = ()
    threads: int = 1
    deadline_s: float = 60.0

    @property
    def size(self) -> int:
        """Number of members (world size)."""
        return len(self.peers)


@dataclass(frozen=True, kw_only=True)
class StateTag:
    """What a rank holds.

    Attributes:
        step: number of completed steps; None for a state that was built and never trained or loaded.
        layout: name of the partition of the state, such as `replicated`; pieces of different layouts do not mix.
        pieces: names of the pieces held.
        total: number of pieces of the layout. Ranks hold the whole state together where their pieces are as many.
        sound: not interrupted inside the optimizer.
    """

    step: int | None
    layout: str = "replicated"
    pieces: frozenset[str] = frozenset({"state"})
    total: int = 1
    sound: bool = True


@dataclass(frozen=True, kw_only=True)
class Move:
    """Rank `source` sends `piece` to rank `target`."""

    source: int
    target: int
    piece: str


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The step that every rank will stand at, and the moves that bring it there."""

    step: int | None
    moves: tuple[Move, ...] = field(default=())
