"""Events of a run, as they are stored: one JSON object a line, with the class name in snake case as `kind`."""

from __future__ import annotations

import bisect
import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from trainwright.core.errors import escape_control_characters

_KINDS: dict[str, type[Event]] = {}
_RENAMED = {"failed": "failure"}  # a class that gets another name needs its former one here: files hold it
_TIMES = ("predicted", "refitted", "measured")


CODE_FIELD = "code"
"""Field of a stored job with the fingerprints of its code, which is not for people."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. `time_s` is seconds since the epoch on the driver's clock, filled in when emitted."""

    kind: ClassVar[str]
    time_s: float = 0.0

    def __init_subclass__(cls) -> None:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        cls.kind = _RENAMED.get(words, words)
        _KINDS[cls.kind] = cls

    @property
    def kept(self) -> Event:
        """What the log of events keeps of it."""
        return self

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"kind": self.kind, **asdict(self)}, separators=(",", ":"), default=str)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A driver took the run.

    `job`, `plan`, `versions`, `dashboard` are readable facts for the report, `timeline` is an SVG of an expected step.
    """

    run: str = ""
    token: int = 0
    job: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)
    cluster: str = ""
    dashboard: dict[str, str] = field(default_factory=dict)
    timeline: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    total_steps: int = 0
    steps_per_epoch: int = 0
    fresh: bool = False  # begun again: what earlier drivers did under this name is no longer part of the run

    @property
    def shown_job(self) -> dict[str, Any]:
        """The job's fields for people: without the table of code fingerprints."""
        return {name: value for name, value in self.job.items() if name != CODE_FIELD}


@dataclass(frozen=True, kw_only=True)
class Waiting(Event):
    """The run waits for something, `deadline_s` seconds at most."""

    what: str = ""
    deadline_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Placed(Event):
    """A worker process is up. A `spare` holds no rank yet."""

    worker: int = 0
    node: str = ""
    pid: int = 0
    spare: bool = False


@dataclass(frozen=True, kw_only=True)
class Promoted(Event):
    """A spare took the rank of a process that is lost."""

    worker: int = 0
    rank: int = 0
    slot: int = 0
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Leaving(Event):
    """A worker must hand its rank (-1: a spare without rank) to another process; `left_s` 0 means no hurry."""

    worker: int = 0
    rank: int = -1
    node: str = ""
    why: str = ""
    left_s: float = 0.0

    @property
    def text(self) -> str:
        """`rank 1 (node-a) is handed over: preemption notice, 25 s left`."""
        subject = f"rank {self.rank}" if self.rank >= 0 else "a spare"
        time_text = f", {self.left_s:.0f} s left" if self.left_s else ""
        verb = "is handed over" if self.rank >= 0 else "is let go"
        return f"{subject}{f' ({self.node})' if self.node else ''} {verb}: {self.why}{time_text}"


@dataclass(frozen=True, kw_only=True)
class Straggling(Event):
    """A straggler: its own part of a step takes `own_s`, the others' take `usual_s`, and they wait for it."""

    worker: int = 0
    rank: int = 0
    node: str = ""
    ratio: float = 1.0
    own_s: float = 0.0
    usual_s: float = 0.0

    @property
    def text(self) -> str:
        """`rank 1 (node-a) is a straggler: its part of a step takes 2.1 times the others' (42 ms, not 20 ms)`."""
        times = f"{self.ratio:.1f} times the others' ({self.own_s * 1e3:.0f} ms, not {self.usual_s * 1e3:.0f} ms)"
        return f"rank {self.rank} ({self.node}) is a straggler: its part of a step takes {times}"


@dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """A process joined without a pause, `seconds` after the request; `former` had its rank (-1: none)."""

    generation: int = 0
    worker: int = 0
    rank: int = 0
    node: str = ""
    former: int = -1
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """`rank 3 (node-a) works again after 4 s: nobody waited for it`."""
        verb = "works again" if self.former >= 0 else "works too"
        return f"rank {self.rank} ({self.node}) {verb} after {self.seconds:.0f} s: nobody waited for it"


@dataclass(frozen=True, kw_only=True)
class Resized(Event):
    """The next rendezvous epoch has another world size and the same global batch; `why` is a text."""

    workers: int = 0
    former: int = 0
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Replanned(Event):
    """The next rendezvous epoch has another plan, given in `plan`; the state comes from the newest copy."""

    plan: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    former: str = ""
    workers: int = 0
    why: str = ""

    @property
    def text(self) -> str:
        """`the plan changes from pipeline (pp=2) to one_device on 1 worker: ...`."""
        plural = "s" if self.workers != 1 else ""
        text = f"the plan changes from {self.former} to {self.name} on {self.workers} worker{plural}"
        return f"{text}: {self.why}" if self.why else f"{text}, as in the beginning"


@dataclass(frozen=True, kw_only=True)
class Probed(Event):
    """Plans were measured before the first step; the fastest one is used."""

    # plan, name: facts of the quickest, and its name
    plan: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    # of each, the quickest first: name, predicted_s, refitted_s (by the calibration with what was measured),
    # measured_s (of a step; None where it could not be), note
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0  # that it took

    @property
    def text(self) -> str:
        """`measured in 9 s before the first step: pipeline (pp=2) takes 10.1 ms (12 ms predicted), ...; it goes on`."""
        took = "; ".join(f"{row['name']} {self.told(row)}" for row in self.rows)
        return f"plans were measured in {self.seconds:.0f} s before the first step: {took}"

    @staticmethod
    def told(row: dict[str, Any]) -> str:
        """`takes 10.1 ms a step (12 ms predicted, 10.4 ms with what was measured), and goes on`."""
        if row["measured_s"] is None:
            return f"was set aside: {row['note']}"
        predicted, refitted, measured = (f"{1e3 * row[f'{name}_s']:.3g} ms" for name in _TIMES)
        goes_on = f", and {row['note']}" if row["note"] else ""
        return f"takes {measured} a step ({predicted} predicted, {refitted} with what was measured){goes_on}"


@dataclass(frozen=True, kw_only=True)
class Formed(Event):
    """A rendezvous epoch is ready to step. `source` is the origin of its state, `nodes` the ranks on each node."""

    generation: int = 0
    workers: int = 0
    servers: int = 0  # beside them
    step: int = 0
    source: str = "initial"  # initial | replica | keeper | checkpoint
    checkpoint: str = ""
    survivors: int = 0
    seconds: float = 0.0  # since the failure, or since the run was acquired
    steps_lost: int = 0  # completed steps that must be done again
    nodes: dict[str, str] = field(default_factory=dict)  # see `core.plan.ranks_by_node`


@dataclass(frozen=True, kw_only=True)
class Steps(Event):
    """Completed steps, parallel lists. `wait_s` is the part of `step_s` that waited for data; NaN where unknown.

    `logged` has a list for each value of `tw.log`; NaN in a step that did not log it.
    """

    generation: int = 0
    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    gradient_norm: list[float | None] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    logged: dict[str, list[float]] = field(default_factory=dict)

    def after(self, step: int) -> Steps:
        """Return only the steps after `step`."""
        return self._sliced(slice(bisect.bisect_right(self.step, step), None))

    def every_second(self, *, last: bool) -> Steps:
        """Return half of the steps: the last one and every second before it, or the others."""
        return self._sliced(slice((len(self.step) - last) % 2, None, 2))

    def followed_by(self, newer: Steps) -> Steps:
        """Return these steps and those of a newer event, at its time."""
        ours, theirs = vars(self), vars(newer)
        lists = {name: value + theirs[name] for name, value in ours.items() if isinstance(value, list)}
        blanks = [[math.nan] * len(each.step) for each in (self, newer)]
        names = {**self.logged, **newer.logged}
        logged = {name: self.logged.get(name, blanks[0]) + newer.logged.get(name, blanks[1]) for name in names}
        return replace(newer, **lists, logged=logged)

    def _sliced(self, part: slice) -> Steps:
        lists = {name: value[part] for name, value in vars(self).items() if isinstance(value, list)}
        return replace(self, **lists, logged={name: value[part] for name, value in self.logged.items()})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Prefetched(Event):
    """How far data is prefetched; see `core.data.PrefetchDepth`."""

    chunks: int = 0
    chunk_steps: int = 0
    chunk_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Measured(Event):
    """Median times of the last `steps` timed steps up to `step`, and their gradient noise."""

    step: int = 0
    steps: int = 0
    workers: int = 0  # the world size that it was measured with
    # seconds by phase of the rank that the others wait for; see `core.data.PhaseTimes`
    phases: dict[str, float] = field(default_factory=dict)
    data_s: float = 0.0  # that it waited for data
    sampled: int = 0  # steps whose gradients were looked at for their noise
    # the noise scale, fields of `core.data.NoiseScale`; empty while it cannot be trusted
    noise: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MemoryMeasured(Event):
    """Peak memory of the devices of some ranks, as parallel lists; reserved is 0 where the framework does not tell."""

    step: int = 0
    ranks: list[int] = field(default_factory=list)
    allocated_bytes: list[int] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Stale(Event):
    """Staleness of updates since the last such event: `topology.StalenessCounts`, with counts as pairs."""

    step: int = 0
    counts: list[list[int]] = field(default_factory=list)
    unit: str = "updates"
    dropped: int = 0
    again: int = 0


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Metrics over the whole evaluation set."""

    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Checkpointed(Event):
    """A checkpoint was committed. `blocked_s` is the time that steps lost, `seconds` the time of the upload."""

    step: int = 0
    path: str = ""
    size_bytes: int = 0
    blocked_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Kept(Event):
    """An in-memory checkpoint is complete on these nodes; times as in Checkpointed."""

    step: int = 0
    size_bytes: int = 0
    nodes: list[str] = field(default_factory=list)
    blocked_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TraceWritten(Event):
    """A rank's trace of the steps `first` to `last` is in the store, at a path within the run."""

    rank: int = 0
    node: str = ""
    first: int = 0
    last: int = 0
    path: str = ""
    size_bytes: int = 0

    @property
    def steps(self) -> str:
        """`steps 20 to 24`."""
        return f"steps {self.first} to {self.last}" if self.last > self.first else f"step {self.first}"

    @property
    def text(self) -> str:
        """`trace of rank 0 (node-a): steps 20 to 24, profile/steps-20-24/rank-0.trace.json.gz (1.2 MiB)`."""
        place = f" ({self.node})" if self.node else ""
        mib = self.size_bytes / 2**20
        size = f"{mib:,.1f} MiB" if mib >= 1 else f"{mib * 2**10:,.1f} KiB"
        return f"trace of rank {self.rank}{place}: {self.steps}, {self.path} ({size})"

    @property
    def folder(self) -> str:
        """The folder within the run that has the traces of all ranks."""
        return self.path.rpartition("/")[0]

    @property
    def viewer(self) -> str:
        """What opens it."""
        if self.path.endswith(".json.gz"):
            return "open one in https://ui.perfetto.dev, or in chrome://tracing"
        return f"open them with: tensorboard --logdir {self.path.partition('/')[0]} (with the package xprof)"


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A checkpoint was not taken or not stored; training continued."""

    step: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """Something failed; the run may recover. `step` is the newest completed step that the driver had heard of."""

    generation: int = 0
    worker: int = -1
    rank: int = -1
    node: str = ""
    pid: int = 0  # 0 for none
    cause: str = ""
    detail: str = ""
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Stacks(Event):
    """Stacks of the threads of a rank when the group hung."""

    worker: int = 0
    rank: int = 0
    node: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """A line for the user: a fall-back to an older checkpoint, for instance."""

    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Printed(Event):
    """A line that the job's own functions printed on a rank."""

    rank: int = 0
    line: str = ""

    @property
    def text(self) -> str:
        """`[rank 0] hello`."""
        return f"[rank {self.rank}] {self.line}"


@dataclass(frozen=True, kw_only=True)
class MediaLogged(Event):
    """A callback logged an image (PNG) or a text after a step. Listeners get it; the log of events keeps its name."""

    step: int = 0
    name: str = ""
    text: str = ""
    image: bytes = field(default=b"", repr=False)
    width: int = 0
    height: int = 0

    @property
    def kept(self) -> MediaLogged:
        """The event without image and text."""
        return replace(self, image=b"", text="")


@dataclass(frozen=True, kw_only=True)
class Judged(Event):
    """Students were compared with their teachers: facts of `reporting.scorecard.Scorecard`, and the conclusion."""

    text: str = ""
    verdict: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The driver released the run."""

    outcome: str = ""  # `done`, `stopped` or `failed`
    step: int = 0
    error: str = ""
    reason: str = ""  # why a run that is done ended before its last step; empty if it did not
    best: str = ""  # the best evaluation whose checkpoint is kept, in words; empty without `best=`


def from_json(line: str) -> Event:
    """Parse one line, without control characters and fields of later versions. Raises ValueError for other text."""
    data = escape_control_characters(json.loads(line))
    try:
        kind = _KINDS[data.pop("kind")]
    except (KeyError, AttributeError) as error:
        raise ValueError(f"not an event: {line[:80]!r}") from error
    return kind(**{name: value for name, value in data.items() if name in kind.__dataclass_fields__})
