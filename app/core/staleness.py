"""How far workers that step alone may be apart, what they are given to do, and how stale it was. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from trainwright.core.errors import PlanError

_FORM = re.compile(r"\s*(?P<kind>[a-z]+)\s*(\(\s*(?P<arguments>[^()]*?)\s*\))?\s*")
_NUMBER = r"\s*(\d+(?:\.\d+)?|\.\d+)\s*"
_REMEDY = 'write "sync", "sync(backup=1)", "ssp(3)", "async" or "async(scaled)"'


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """When a worker may begin a unit of work, and when what it pushes is applied.

    `sync` and `ssp` apply one update a step, of all its units, in the order of steps, whoever computed them (bounded
    delay: Li et al., OSDI 2014): a unit of step t begins at parameters that hold the updates of all steps before
    t - bound, so that `ssp(0)` is `sync`, which equals one device. `async` applies each unit when it comes.

    Attributes:
        bound: steps that a unit's parameters may lack at most; None for any number (`async`).
        backup: shares of a step that are not waited for: the slowest are dropped, and their samples handed out again
            with a later step (Chen et al., 2016). Only for `sync`.
        scaled: the learning rate of an update is divided by its staleness, where that is more than 1 (Zhang et al.,
            IJCAI 2016). Only for `async`.
    """

    bound: int | None = 0
    backup: int = 0
    scaled: bool = False

    @classmethod
    def parse(cls, text: str) -> Consistency:
        """`sync`, `sync(backup=k)`, `ssp(bound)`, `async`, `async(scaled)`. Raises PlanError."""
        found = _FORM.fullmatch(text)
        kind, arguments = (found["kind"], found["arguments"] or "") if found else ("", "")
        backup = re.fullmatch(r"backup\s*=\s*(\d+)", arguments)
        match kind:
            case "sync" if not arguments or backup:
                return cls(backup=int(backup[1]) if backup else 0)
            case "ssp" if arguments.isdecimal():
                return cls(bound=int(arguments))
            case "async" if arguments in ("", "scaled"):
                return cls(bound=None, scaled=bool(arguments))
        raise PlanError(f"consistency={text!r} is not known", where="consistency", remedy=_REMEDY)

    def __str__(self) -> str:
        if self.bound is None:
            return "async(scaled)" if self.scaled else "async"
        if self.bound:
            return f"ssp({self.bound})"
        return f"sync(backup={self.backup})" if self.backup else "sync"

    @property
    def waits(self) -> bool:
        """Whether an update is of a whole step, and not of one unit."""
        return self.bound is not None


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The form in which workers push what they computed; what `topk` leaves over is added to their next push.

    Attributes:
        kind: `full` (the gradient's own numbers), `fp16`, `bf16`, `int8` (one scale for each block) or `topk`.
        share: of the numbers that `topk` sends, those that are largest, with their places.
    """

    kind: Literal["full", "fp16", "bf16", "int8", "topk"] = "full"
    share: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Wire:
        """`full`, `fp16`, `bf16`, `int8`, `topk(share)`. Raises PlanError."""
        match text.strip():
            case "full" | "fp16" | "bf16" | "int8" as kind:
                return cls(kind=kind)
        found = re.fullmatch(rf"topk\({_NUMBER}\)", text.strip())
        if found and 0 < float(found[1]) <= 1:
            return cls(kind="topk", share=float(found[1]))
        remedy = 'write "full", "fp16", "bf16", "int8" or "topk(0.01)"'
        raise PlanError(f"wire={text!r} is not known", where="wire", remedy=remedy)

    def __str__(self) -> str:
        return f"topk({self.share:g})" if self.kind == "topk" else self.kind

    @property
    def part(self) -> float:
        """Bytes, of those of single-precision numbers; a number of `topk` takes its place along."""
        return {"full": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 0.25, "topk": 2 * self.share}[self.kind]


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How servers apply the mean of what workers' local steps came to.

    With rate 1 and without momentum the parameters become the workers' mean (local SGD: Stich, ICLR 2019); DiLoCo
    (Douillard et al., 2023) takes it as a gradient for Nesterov's method, with rate 0.7 and momentum 0.9.

    Attributes:
        rate: by which the mean is scaled.
        momentum: of Nesterov's method; 0 for none.
    """

    rate: float = 1.0
    momentum: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Outer:
        """`average`, `nesterov(rate,momentum)`. Raises PlanError."""
        if text.strip() in ("average", ""):
            return cls()
        found = re.fullmatch(rf"nesterov\({_NUMBER},{_NUMBER}\)", text.strip())
        if found and float(found[1]) > 0 and float(found[2]) < 1:
            return cls(rate=float(found[1]), momentum=float(found[2]))
        remedy = 'write "average" or "nesterov(0.7,0.9)": a learning rate above 0, a momentum below 1'
        raise PlanError(f"outer={text!r} is not known", where="outer", remedy=remedy)

    def __str__(self) -> str:
        return "average" if self == Outer() else f"nesterov({self.rate:g},{self.momentum:g})"


def choices_of(consistency: str | None, wire: str, local_steps: int, outer: str | None) -> dict[str, Any]:
    """What a job's fields of these names pin of its plan, in the plan's own words; nothing where they are left out."""
    given: dict[str, Any] = {"consistency": str(Consistency.parse(consistency))} if consistency else {}
    if Wire.parse(wire) != Wire():
        given["wire"] = str(Wire.parse(wire))
    if local_steps > 1:
        given |= {"local_steps": local_steps, "outer": str(Outer.parse(outer or "average"))}
    return given


class Unit(NamedTuple):
    """Work that is handed out at once: a data rank's share of a step, or of several that follow each other.

    A tuple, since books of leases compare and look up several for each that is done.

    Attributes:
        step: the first, from 0.
        share: data rank whose samples they are.
        steps: how many; more than one where steps are local, and only what they come to is pushed.
    """

    step: int
    share: int
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """How old the parameters were on which pushes were computed, over a stretch of a run.

    Attributes:
        counts: applied pushes by staleness.
        unit: what that is counted in: updates applied in between (`async`), or steps (`sync`, `ssp`).
        dropped: pushes that were not applied, since another worker's of the same unit was.
        again: units that were handed out again, since their worker was lost or too slow.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    unit: Literal["updates", "steps"] = "updates"
    dropped: int = 0
    again: int = 0

    def __add__(self, other: Staleness) -> Staleness:
        counts = dict(self.counts)
        for age, count in other.counts.items():
            counts[age] = counts.get(age, 0) + count
        return Staleness(
            counts=counts, unit=other.unit, dropped=self.dropped + other.dropped, again=self.again + other.again
        )

    @property
    def mean(self) -> float:
        """Mean staleness; 0 where nothing was applied."""
        applied = sum(self.counts.values())
        return sum(age * count for age, count in self.counts.items()) / applied if applied else 0.0
