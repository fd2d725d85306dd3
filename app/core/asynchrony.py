"""How far workers that step alone may be apart, what they are given to do, and how stale it was. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainwright.core.errors import PlanError

_FORM = re.compile(r"\s*(?P<kind>[a-z]+)\s*(\(\s*(?P<arguments>[^()]*?)\s*\))?\s*")
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


@dataclass(frozen=True, kw_only=True, order=True)
class Unit:
    """Work that is handed out at once: a data rank's share of a step, or of several that follow each other.

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
