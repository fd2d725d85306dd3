"""Groups of processes: roles, capabilities of engines, rendezvous epochs, state of ranks, and asynchronous updates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol

from trainwright.core.data import StepReport
from trainwright.core.errors import PlanError

RestartMode = Literal["in_place", "new_process"]
Topology = Literal["collective", "coordinator", "independent"]
Role = Literal["worker", "chief", "server", "evaluator"]


def role_of(rank: int, topology: Topology, servers: int) -> Role:
    """Return the role of a process: first a coordinator, then servers, then workers."""
    if topology == "coordinator":
        return "chief" if rank == 0 else "server" if rank <= servers else "worker"
    return "server" if rank < servers else "worker"


@dataclass(frozen=True, kw_only=True, order=True)
class Generation:
    """A rendezvous epoch of the group. `token` is the driver's fencing token; later ones are greater."""

    token: int
    number: int

    def __str__(self) -> str:
        return f"{self.token}.{self.number}"


class TraceRecorder(Protocol):
    """A framework's profiler, for one recording. Methods are called on the thread of steps, but `save`.

    Attributes:
        suffix: end of the name of a file.
        folder: folder of the files within the run.
    """

    suffix: ClassVar[str]
    folder: ClassVar[str]

    def start(self) -> None:
        """Start to record. Raises ResourceError where the framework cannot."""

    def step(self, number: int) -> AbstractContextManager[object]:
        """Return the context of a step, by whose number viewers know it."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context whose operations get a name."""

    def stop(self) -> None:
        """End the recording."""

    def save(self, path: Path) -> None:
        """Write the recording to a file, on any thread."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do. The core decides by capabilities, never by a strategy's name."""

    reform: RestartMode = "in_place"  # whether a new generation forms in the surviving processes or in new ones
    # `collective`: every rank steps together; `coordinator`: rank 0 leads the others; `independent`: ranks step
    # alone, against servers or between outer steps
    topology: Topology = "collective"
    tolerates: frozenset[Role] = frozenset()  # roles that may die or join without a new generation
    devices_per_worker: int | None = 1  # devices one actor drives; None means all of its node
    static_shapes: bool = False  # every micro-batch must have the same number of rows
    xla: bool = False  # it can compile steps by XLA
    inductor: bool = False  # it can compile models by `torch.compile`
    local_state: bool = False  # data ranks can keep buffers of their own
    synchronized_batch_norm: bool = False  # batch norms can look at the whole batch
    # it has schedulers of `torch.optim.lr_scheduler`, a function of the learning rate for each parameter group,
    # averages of weights, and callbacks of rank 0
    torch_training: bool = False
    custom_steps: bool = False  # a step may have several optimizers, or one that takes a closure
    # it can keep what a language model computed of earlier tokens: see `core.engine.DecodingEngine`
    decodes: bool = False
    tracer: Callable[[], TraceRecorder] | None = None  # makes what records steps for `profile=`; None for nothing


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of a rank; the operating system chose the port."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A member of a group as the other members see it."""

    rank: int
    address: Address
    role: Role = "worker"
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The members of a rendezvous epoch, as one of them gets them."""

    generation: Generation
    rank: int  # the receiver's own rank; `peers[rank]` is itself
    peers: tuple[Peer, ...]  # all members in rank order
    # random key of this epoch, by which members authenticate each other. Empty only for a single rank.
    key: bytes = field(default=b"", repr=False)
    devices: tuple[str, ...] = ("cpu",)  # the receiver's devices, such as `("cpu",)` or `("cuda:0",)`
    slot: int = 0  # the receiver's worker slot, for its whole life
    # their ids on the node; a process that Ray did not assign them must make them visible itself
    accelerators: tuple[str, ...] = ()
    threads: int = 1  # CPU threads of the receiver; 0 leaves the process as it is, where it also serves others
    deadline_s: float = 60.0  # seconds within which the group must have formed and any collective must end

    @property
    def size(self) -> int:
        """Number of members (world size)."""
        return len(self.peers)


@dataclass(frozen=True, kw_only=True)
class StateTag:
    """The state that a rank holds."""

    step: int | None  # number of completed steps; None for a state that was built and never trained or loaded
    # name of the partition of the state, such as `replicated`; pieces of different layouts do not mix
    layout: str = "replicated"
    pieces: frozenset[str] = frozenset({"state"})  # names of the pieces held
    # number of pieces of the layout. Ranks hold the whole state together where their pieces are as many.
    total: int = 1
    sound: bool = True  # not interrupted inside the optimizer
    report: StepReport | None = None  # of the last step that this process took, where the job has callbacks


@dataclass(frozen=True, kw_only=True)
class StateTransfer:
    """Rank `source` sends `piece` to rank `target`."""

    source: int
    target: int
    piece: str


@dataclass(frozen=True, kw_only=True)
class StateAgreement:
    """The step that all ranks restore, and the transfers that bring them there."""

    step: int | None
    moves: tuple[StateTransfer, ...] = field(default=())


# --- Asynchronous workers: consistency, units of work, staleness ------------------------------------------------------


_CONSISTENCY_FORM = re.compile(r"\s*(?P<kind>[a-z]+)\s*(\(\s*(?P<arguments>[^()]*?)\s*\))?\s*")
_NUMBER_PATTERN = r"\s*(\d+(?:\.\d+)?|\.\d+)\s*"
_CONSISTENCY_REMEDY = 'write "sync", "sync(backup=1)", "ssp(3)", "async", "async(scaled)" or "async(pushes=4)"'


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """When a worker may start a unit of work, and when its push is applied.

    `sync` and `ssp` apply one update of all units a step, in the order of steps (bounded delay: Li et al., OSDI 2014):
    a unit of step t starts from parameters with the updates of all steps before t - bound. `ssp(0)` is `sync`, which
    equals one device. `async` applies each unit when it arrives, or the mean of the next `pushes` units.
    """

    bound: int | None = 0  # most steps whose updates a unit's parameters may miss; None for any number (`async`)
    # number of slowest shares of a step that are dropped; their samples are used in a later step (Chen et al., 2016).
    # Only for `sync`.
    backup: int = 0
    # the learning rate of an update is divided by its staleness, where that is more than 1 (Zhang et al., IJCAI
    # 2016). Only for `async`.
    scaled: bool = False
    # number of pushes that make an update, whoever they come from (K-batch-async: Dutta et al., AISTATS 2018). Only
    # for `async`, and not with `scaled`.
    pushes: int = 1

    @classmethod
    def parse(cls, text: str) -> Consistency:
        """Parse `sync`, `sync(backup=k)`, `ssp(bound)`, `async`, `async(scaled)`, `async(pushes=k)`.

        Raises PlanError.
        """
        form = _CONSISTENCY_FORM.fullmatch(text)
        kind, arguments = (form["kind"], form["arguments"] or "") if form else ("", "")
        backup = re.fullmatch(r"backup\s*=\s*(\d+)", arguments)
        pushes = re.fullmatch(r"pushes\s*=\s*0*([1-9]\d*)", arguments)
        match kind:
            case "sync" if not arguments or backup:
                return cls(backup=int(backup[1]) if backup else 0)
            case "ssp" if arguments.isdecimal():
                return cls(bound=int(arguments))
            case "async" if arguments in ("", "scaled"):
                return cls(bound=None, scaled=bool(arguments))
            case "async" if pushes:
                return cls(bound=None, pushes=int(pushes[1]))
        raise PlanError(f"consistency={text!r} is not known", where="consistency", remedy=_CONSISTENCY_REMEDY)

    def __str__(self) -> str:
        if self.bound is None:
            return "async(scaled)" if self.scaled else f"async(pushes={self.pushes})" if self.pushes > 1 else "async"
        if self.bound:
            return f"ssp({self.bound})"
        return f"sync(backup={self.backup})" if self.backup else "sync"

    @property
    def waits(self) -> bool:
        """Whether an update is of a whole step instead of the next units that arrive."""
        return self.bound is not None


@dataclass(frozen=True, kw_only=True)
class GradientCompression:
    """The compression of pushes; numbers that `topk` leaves out are added to the next push."""

    # `full` (the gradient's own numbers), `fp16`, `bf16`, `int8` (one scale for each block) or `topk`
    kind: Literal["full", "fp16", "bf16", "int8", "topk"] = "full"
    share: float = 1.0  # of the numbers that `topk` sends: the largest, with their indices

    @classmethod
    def parse(cls, text: str) -> GradientCompression:
        """Parse `full`, `fp16`, `bf16`, `int8`, `topk(share)`. Raises PlanError."""
        match text.strip():
            case "full" | "fp16" | "bf16" | "int8" as kind:
                return cls(kind=kind)
        topk = re.fullmatch(rf"topk\({_NUMBER_PATTERN}\)", text.strip())
        if topk and 0 < float(topk[1]) <= 1:
            return cls(kind="topk", share=float(topk[1]))
        remedy = 'write "full", "fp16", "bf16", "int8" or "topk(0.01)"'
        raise PlanError(f"wire={text!r} is not known", where="wire", remedy=remedy)

    def __str__(self) -> str:
        return f"topk({self.share:g})" if self.kind == "topk" else self.kind

    @property
    def part(self) -> float:
        """Share of the bytes in single precision; a number of `topk` travels with its index."""
        return {"full": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 0.25, "topk": 2 * self.share}[self.kind]


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """How servers apply the mean difference of the workers' local steps.

    With rate 1 and without momentum the parameters become the workers' mean (local SGD: Stich, ICLR 2019); DiLoCo
    (Douillard et al., 2023) takes it as a gradient for Nesterov's method, with rate 0.7 and momentum 0.9.
    """

    rate: float = 1.0  # by which the mean is scaled
    momentum: float = 0.0  # of Nesterov's method; 0 for none

    @classmethod
    def parse(cls, text: str) -> OuterOptimizer:
        """Parse `average`, `nesterov(rate,momentum)`. Raises PlanError."""
        if text.strip() in ("average", ""):
            return cls()
        nesterov = re.fullmatch(rf"nesterov\({_NUMBER_PATTERN},{_NUMBER_PATTERN}\)", text.strip())
        if nesterov and float(nesterov[1]) > 0 and float(nesterov[2]) < 1:
            return cls(rate=float(nesterov[1]), momentum=float(nesterov[2]))
        remedy = 'write "average" or "nesterov(0.7,0.9)": a learning rate above 0, a momentum below 1'
        raise PlanError(f"outer={text!r} is not known", where="outer", remedy=remedy)

    def __str__(self) -> str:
        return "average" if self == OuterOptimizer() else f"nesterov({self.rate:g},{self.momentum:g})"


class WorkUnit(NamedTuple):
    """A unit of work: a data rank's share of one step, or of several consecutive steps.

    A tuple, since lease tables compare and look up several for each completed one.
    """

    step: int  # the first, from 0
    share: int  # data rank of the samples
    steps: int = 1  # number of steps; more than one for local steps, of which only the difference is pushed


@dataclass(frozen=True, kw_only=True)
class StalenessCounts:
    """The age of the parameters that pushes were computed on, over a part of a run."""

    counts: Mapping[int, int] = field(default_factory=dict)  # applied pushes by staleness
    # of the staleness: updates applied in between (`async`), or steps (`sync`, `ssp`)
    unit: Literal["updates", "steps"] = "updates"
    dropped: int = 0  # pushes that were not applied because another worker pushed the same unit first
    again: int = 0  # units that were leased again because their worker was lost or too slow

    def __add__(self, other: StalenessCounts) -> StalenessCounts:
        counts = dict(self.counts)
        for age, count in other.counts.items():
            counts[age] = counts.get(age, 0) + count
        return StalenessCounts(
            counts=counts, unit=other.unit, dropped=self.dropped + other.dropped, again=self.again + other.again
        )

    @property
    def mean(self) -> float:
        """Mean staleness; 0 where nothing was applied."""
        applied = sum(self.counts.values())
        return sum(age * count for age, count in self.counts.items()) / applied if applied else 0.0
