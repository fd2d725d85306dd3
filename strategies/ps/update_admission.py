"""Update admission of one server: which pushes are applied, when, and in which order. Pure.

Pushes can come in any order, twice, late, and of units that were applied long ago. In `async` each unit is applied at
once. Otherwise a server keeps pushes until the first server closes the round and names the units that count in it: all
servers apply the same units, round after round, in the order of the units.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from trainwright.core.topology import Consistency, StalenessCounts, WorkUnit
from trainwright.strategies.ps.lease_table import ClosedRound

_T = TypeVar("_T")
_Decision = Literal["apply", "keep", "drop"]


@dataclass(frozen=True, kw_only=True)
class RoundUpdate(Generic[_T]):
    """An update to apply now.

    Attributes:
        closing: its round.
        pushes: of the units that count, in order.
    """

    closing: ClosedRound
    pushes: tuple[_T, ...]


class _PendingPush(NamedTuple, Generic[_T]):
    worker: str
    seen: int
    push: _T


class UpdateAdmission(Generic[_T]):
    """The pushes that one server has applied and keeps in this rendezvous epoch; T is the caller's type of a push.

    Args:
        shares: units of a round.
        consistency: whether an update is of a round or of one unit.

    Attributes:
        version: updates applied: rounds, or units in `async`.
    """

    def __init__(self, *, shares: int, consistency: Consistency) -> None:
        self._shares, self._waits = shares, consistency.waits
        self.version = 0
        self._open = 0  # the first round that is not complete here
        self._applied: dict[int, dict[int, str]] = {}  # by round and share, the worker; `async`
        self._kept: dict[int, dict[WorkUnit, _PendingPush[_T]]] = {}  # by round
        self._closings: dict[int, ClosedRound] = {}
        self._left_out: dict[str, list[tuple[int, WorkUnit]]] = {}  # by worker, kept pushes that did not count
        self._counts: Counter[int] = Counter()
        self._dropped = 0

    def offer(self, worker: str, unit: WorkUnit, at: int, seen: int) -> _Decision:
        """Decide about a push: apply it now, `keep` it, or drop it since its unit is here or it came too late.

        Args:
            worker: that pushes.
            unit: that it computed.
            at: the round in which the unit counts.
            seen: version of this server's parameters that it computed with.
        """
        first = self.first(unit, at)
        if self._waits:
            late = at < self.version or (at in self._closings and unit not in self._closings[at].units)
        else:
            late = at < self._open
        if late or first is not None:
            self._dropped += first != worker
            return "drop"
        if self._waits:
            return "keep"
        self._counts[max(0, self.version - seen)] += 1
        self._mark(worker, unit, at)
        return "apply"

    def first(self, unit: WorkUnit, at: int) -> str | None:
        """Return the worker whose push of a unit is here; None if there is none, or its round is complete."""
        if not self._waits:
            return self._applied.get(at, {}).get(unit.share)
        kept = self._kept[at].get(unit) if at in self._kept else None
        return None if kept is None else kept.worker

    def keep(self, worker: str, unit: WorkUnit, at: int, seen: int, push: _T) -> None:
        """Keep a push after `offer` returned `keep`; it must not change until its round is applied."""
        self._kept.setdefault(at, {})[unit] = _PendingPush(worker, seen, push)

    def close(self, closing: ClosedRound) -> None:
        """Close a round with the units that count in it, whose pushes are here or still come."""
        self._closings[closing.at] = closing

    def due(self) -> RoundUpdate[_T] | None:
        """Return the next round's update if the round is closed and complete. Call `applied` after it."""
        closing = self._closings.get(self.version)
        if closing is None:
            return None
        kept = self._kept.get(closing.at, {})
        if any(unit not in kept for unit in closing.units):
            return None
        return RoundUpdate(closing=closing, pushes=tuple(kept[unit].push for unit in closing.units))

    def applied(self, update: RoundUpdate[_T]) -> None:
        """The update of `due` is applied: drop its pushes."""
        at = update.closing.at
        counted = set(update.closing.units)
        for unit, kept in self._kept.pop(at, {}).items():
            if unit in counted:
                self._counts[max(0, at - kept.seen)] += 1
            else:
                self._dropped += 1
                self._left_out.setdefault(kept.worker, []).append((at, unit))
        del self._closings[at]
        self.version += 1

    def left_out(self, worker: str, since: int) -> list[tuple[int, WorkUnit]]:
        """Return rounds and units of a worker's pushes that were kept, but did not count in their round.

        Args:
            worker: that pushed.
            since: a round; earlier ones are dropped, since the worker knows them.
        """
        mine = [one for one in self._left_out.pop(worker, ()) if one[0] >= since]
        if mine:
            self._left_out[worker] = mine
        return mine

    @property
    def behind(self) -> bool:
        """Whether a round is closed and not applied."""
        return bool(self._closings)

    def staleness(self) -> StalenessCounts:
        """Return the staleness of the pushes applied since the last call."""
        counts, dropped = dict(self._counts), self._dropped
        self._counts, self._dropped = Counter(), 0
        unit: Literal["steps", "updates"] = "steps" if self._waits else "updates"
        return StalenessCounts(counts=counts, unit=unit, dropped=dropped)

    def _mark(self, worker: str, unit: WorkUnit, at: int) -> None:
        """Record an applied unit; complete rounds are forgotten."""
        self.version += 1
        self._applied.setdefault(at, {})[unit.share] = worker
        while len(self._applied.get(self._open, ())) == self._shares:
            del self._applied[self._open]
            self._open += 1
