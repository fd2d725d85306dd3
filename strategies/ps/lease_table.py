"""The book of leases: which worker computes which unit, what is handed out again, and when a round of units is closed.

Kept by the first server. Pure: it has no clock of its own, `now_s` is whatever clock the caller has. A *round* is a
step, or several that a worker takes by itself; it is dealt into `shares` units. A round is closed once its units are
done, which means that every server has what was pushed for them; rounds close in order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainwright.core.topology import Consistency, WorkUnit

_WINDOW = 16  # rounds that `async` reads ahead of the first that is not complete
_SWEEP_ENTRIES = 256  # entries of a heap, before what is long done is looked for
OVERDUE_FACTOR = 4.0  # times what a unit at most usually takes its worker, after which it is handed out again
SPECULATION_FACTOR = (
    1.5  # times what it usually takes the idle worker: a unit that is expected to be out for longer is copied
)


class Grant(NamedTuple):
    """A unit for a worker.

    Attributes:
        unit: what to compute.
        at: the round in which it counts, from 0 for the book's first; a later one where it was dropped before.
        needs: rounds that the parameters must hold the updates of.
    """

    unit: WorkUnit
    at: int
    needs: int


@dataclass(frozen=True, kw_only=True)
class ClosedRound:
    """A round that is closed.

    Attributes:
        at: its number, from 0 for the book's first.
        step: its first.
        steps: how many.
        units: that count in it, in the order in which they are added up.
    """

    at: int
    step: int
    steps: int
    units: tuple[WorkUnit, ...]


@dataclass(kw_only=True)
class _Round:
    step: int
    steps: int
    units: set[WorkUnit]  # that are not done
    done: set[WorkUnit] = field(default_factory=set)


class _Lease(NamedTuple):
    unit: WorkUnit
    at: int
    since_s: float
    ends_s: float  # expected


class LeaseTable:
    """Leases of one generation.

    Args:
        shares: units of a round.
        start: the first step.
        consistency: when a unit may begin, and how many of a round are not waited for.
        local_steps: steps of a round; a segment's last round has fewer where they do not divide it.
        window: rounds that may be begun beyond the first that is not closed, where the consistency has no bound.
    """

    def __init__(
        self, *, shares: int, start: int, consistency: Consistency, local_steps: int = 1, window: int = _WINDOW
    ) -> None:
        assert 0 <= consistency.backup < shares, "a step needs at least one unit"
        self._shares, self._local_steps, self._consistency = shares, local_steps, consistency
        self._ahead = window if consistency.bound is None else consistency.bound
        self.until = start
        self.again = 0
        self._laid_steps, self._laid = start, 0  # the first step and the first round that nobody has begun
        self._first = 0  # round that is not closed
        self._rounds: dict[int, _Round] = {}
        self._next = [0] * shares  # by share, the first round of which nobody was given its unit
        self._others = [(0, share) for share in range(shares)]  # heap of the same
        self._free: list[tuple[int, WorkUnit]] = []  # heap of units that were given and are wanted again
        self._wanted: set[tuple[int, WorkUnit]] = set()  # those of the heap that still are
        self._leases: dict[str, _Lease] = {}
        self._holders: dict[WorkUnit, set[str]] = {}
        self._slowest: list[tuple[float, int, int, WorkUnit]] = []  # heap: expected end (negative), serial, round, unit
        self._sweep = _SWEEP_ENTRIES  # length of that heap at which it is swept
        self._dues: list[tuple[float, int, str, _Lease]] = []  # heap: when a lease is overdue, serial, worker
        self._undated: list[tuple[str, _Lease]] = []  # leases of a time when nothing was known
        self._serial = 0
        self._usual = _ServiceTimes()
        self._closed: list[ClosedRound] = []

    @property
    def step(self) -> int:
        """Steps before this are complete."""
        return self._rounds[self._first].step if self._first in self._rounds else self._laid_steps

    @property
    def over(self) -> bool:
        """Whether all steps before `until` are complete."""
        return self.step >= self.until

    def extend(self, until: int) -> None:
        """A segment: units of steps before `until` may be given."""
        self.until = max(until, self._laid_steps)

    def stop(self) -> None:
        """Begin no round any more: `until` becomes the end of the last that was begun."""
        self.until = self._laid_steps

    def lease(self, worker: str, prefer: int, now_s: float) -> Grant | None:
        """A unit for a worker that has nothing to do; None where nothing may be begun now.

        The oldest of: what was handed out and is wanted again, and the worker's own share `prefer`; where there is
        neither, what is nobody's. Where all is out: a copy of what would be out longer than a copy takes.
        What the worker held before is given to others.
        """
        self.release(worker)
        self._expire(now_s)
        found = self._unheld(prefer % self._shares) or self._copied(worker, now_s)
        return self._granted(worker, *found, now_s) if found else None

    def first(self, workers: Iterable[str], now_s: float) -> str | None:
        """The first of these workers, who have nothing to do, to whom `lease` gives something; None: to none."""
        self._expire(now_s)
        if self._wanted or self._may(self._oldest()[0]):
            return next(iter(workers), None)
        least_s = self._usual.least
        late_s = self._late_s(now_s)
        if least_s is None or late_s <= SPECULATION_FACTOR * least_s:
            return None
        return next((worker for worker in workers if self._sooner(worker, late_s)), None)

    def due_s(self) -> float | None:
        """When to ask `first` again although nothing happened: the next lease is overdue then. None: never."""
        while self._dues and self._leases.get(self._dues[0][2]) is not self._dues[0][3]:
            heapq.heappop(self._dues)
        return self._dues[0][0] if self._dues else None

    def done(self, worker: str, unit: WorkUnit, at: int, now_s: float) -> bool:
        """Every server has the unit's push. False where it did not count: it was done before, or its round closed."""
        self._timed(worker, unit, at, now_s)
        mine = self._rounds.get(at)
        if mine is None or unit not in mine.units:
            return False
        mine.units.remove(unit)
        mine.done.add(unit)
        self._wanted.discard((at, unit))
        self._holders.pop(unit, None)
        self._close()
        return True

    def wants(self, unit: WorkUnit, at: int) -> bool:
        """Whether a unit is not done and counts in that round."""
        return at in self._rounds and unit in self._rounds[at].units

    def knows(self, unit: WorkUnit, at: int) -> bool:
        """Whether a unit counts in that round, done or not, or came too late for it."""
        return at < self._first or (at in self._rounds and unit in self._rounds[at].units | self._rounds[at].done)

    def release(self, worker: str) -> None:
        """A worker has nothing to do; what only it held is wanted again."""
        lease = self._leases.pop(worker, None)
        if lease is None:
            return
        holders = self._holders.get(lease.unit, set())
        holders.discard(worker)
        if not holders:
            self._want(lease.at, lease.unit)

    def lost(self, worker: str) -> None:
        """A worker is gone: others are given what it held."""
        self.release(worker)
        self._usual.forget(worker)

    def closings(self) -> list[ClosedRound]:
        """Rounds that closed since this was asked last, in order."""
        closed, self._closed = self._closed, []
        return closed

    # --- what may be given ---

    def _may(self, at: int) -> bool:
        """Whether units of a round may begin."""
        return at <= self._first + self._ahead and (at < self._laid or self._laid_steps < self.until)

    def _oldest(self) -> tuple[int, int]:
        """Round and share of the oldest unit that was never given."""
        while self._others[0][0] != self._next[self._others[0][1]]:
            _, share = heapq.heappop(self._others)
            heapq.heappush(self._others, (self._next[share], share))
        return self._others[0]

    def _unheld(self, share: int) -> tuple[int, WorkUnit] | None:
        """What nobody holds, for the worker of a share; taken."""
        own = self._next[share] if self._may(self._next[share]) else None
        while self._free and self._free[0] not in self._wanted:
            heapq.heappop(self._free)
        if self._free and (own is None or self._free[0][0] < own):
            found = heapq.heappop(self._free)
            self._wanted.remove(found)
            self.again += 1
            return found
        at, share = (own, share) if own is not None else self._oldest()
        return (at, self._taken(at, share)) if self._may(at) else None

    def _taken(self, at: int, share: int) -> WorkUnit:
        """A share's unit of a round, given for the first time."""
        if at == self._laid:
            self._lay()
        self._next[share] = at + 1
        mine = self._rounds[at]
        return WorkUnit(mine.step, share, mine.steps)

    def _lay(self) -> None:
        """Begin the next round."""
        step, steps = self._laid_steps, min(self._local_steps, self.until - self._laid_steps)
        units = {WorkUnit(step, share, steps) for share in range(self._shares)}
        self._rounds[self._laid] = _Round(step=step, steps=steps, units=units)
        self._laid, self._laid_steps = self._laid + 1, step + steps

    def _copied(self, worker: str, now_s: float) -> tuple[int, WorkUnit] | None:
        """What one worker alone holds and will for longer than this one takes (Zaharia et al., OSDI 2008)."""
        if not self._sooner(worker, self._late_s(now_s)):
            return None
        _, _, at, unit = heapq.heappop(self._slowest)
        self.again += 1
        return at, unit

    def _sooner(self, worker: str, late_s: float) -> bool:
        """Whether a copy of what is out for so long would be done before."""
        usual_s = self._usual.of(worker)
        return usual_s is not None and late_s > SPECULATION_FACTOR * usual_s

    def _late_s(self, now_s: float) -> float:
        """For how long the unit is still out, as expected, that comes last of those that one worker holds."""
        while self._slowest:
            ends_s, _, at, unit = self._slowest[0]
            if len(self._holders.get(unit, ())) == 1 and self.wants(unit, at):
                return -ends_s - now_s
            heapq.heappop(self._slowest)
        return -math.inf

    # --- what is out ---

    def _granted(self, worker: str, at: int, unit: WorkUnit, now_s: float) -> Grant:
        usual_s = self._usual.of(worker)
        lease = _Lease(unit, at, now_s, now_s + (usual_s or 0.0))
        self._leases[worker] = lease
        self._holders.setdefault(unit, set()).add(worker)
        self._serial += 1
        if usual_s is None:
            self._undated.append((worker, lease))
        else:
            heapq.heappush(self._dues, (now_s + self._overdue_s(worker), self._serial, worker, lease))
            heapq.heappush(self._slowest, (-lease.ends_s, self._serial, at, unit))
            if len(self._slowest) > self._sweep:
                self._swept()
        bound = self._consistency.bound
        return Grant(unit, at, 0 if bound is None else max(0, at - bound))

    def _swept(self) -> None:
        """Forget what is done of the units that are out: where nobody ever waits, nobody else comes to it."""
        self._slowest = [entry for entry in self._slowest if self.wants(entry[3], entry[2])]
        heapq.heapify(self._slowest)
        self._sweep = max(_SWEEP_ENTRIES, 2 * len(self._slowest))

    def _overdue_s(self, worker: str) -> float:
        """After so long a worker is thought to be frozen."""
        return OVERDUE_FACTOR * self._usual.most(worker)

    def _want(self, at: int, unit: WorkUnit) -> None:
        """A unit that was given is to be given again, unless it is done."""
        if self.wants(unit, at) and (at, unit) not in self._wanted:
            self._wanted.add((at, unit))
            heapq.heappush(self._free, (at, unit))

    def _expire(self, now_s: float) -> None:
        """Leases that are overdue: others may have their units too."""
        while (due_s := self.due_s()) is not None and due_s <= now_s:
            _, _, _, lease = heapq.heappop(self._dues)
            self._want(lease.at, lease.unit)

    def _timed(self, worker: str, unit: WorkUnit, at: int, now_s: float) -> None:
        """The worker has ended its lease: learn how long such take."""
        lease = self._leases.get(worker)
        if lease is None or (lease.unit, lease.at) != (unit, at):
            return
        del self._leases[worker]
        self._holders.get(unit, set()).discard(worker)
        spent_s = now_s - lease.since_s
        known = self._usual.of(worker) is not None
        # of a worker that was frozen once it is not thought that this is how it is
        self._usual.learn(worker, min(spent_s, self._overdue_s(worker)) if known else spent_s)
        undated, self._undated = self._undated, []
        for other, held in undated:
            if self._leases.get(other) is held:
                self._date(other, held)

    def _date(self, worker: str, lease: _Lease) -> None:
        """Of a lease that was given before it was known how long one takes."""
        usual_s = self._usual.of(worker)
        assert usual_s is not None, "one was just learnt"
        self._serial += 1
        heapq.heappush(self._dues, (lease.since_s + self._overdue_s(worker), self._serial, worker, lease))
        heapq.heappush(self._slowest, (-(lease.since_s + usual_s), self._serial, lease.at, lease.unit))

    # --- what is closed ---

    def _close(self) -> None:
        """Close rounds in order, as far as enough of their units are done."""
        while (mine := self._rounds.get(self._first)) is not None:
            last = mine.step + mine.steps >= self.until
            if len(mine.units) > (0 if last else self._consistency.backup):
                return
            del self._rounds[self._first]
            units = tuple(sorted(mine.done))
            self._closed.append(ClosedRound(at=self._first, step=mine.step, steps=mine.steps, units=units))
            self._first += 1
            if mine.units:
                self._carry(mine)

    def _carry(self, dropped: _Round) -> None:
        """What was not waited for counts in the next round, from anew."""
        if self._first == self._laid:
            self._lay()
        for unit in dropped.units:
            self._holders.pop(unit, None)
            self._next[unit.share] = max(self._next[unit.share], self._first)
            self._rounds[self._first].units.add(unit)
            self._want(self._first, unit)


# --- How long a unit usually takes a worker, learnt from those that it did --------------------------------------------


_NEWEST_WEIGHT = 0.3  # weight of the newest
_DEVIATIONS = 4.0  # mean deviations that are nothing out of the ordinary, as TCP has it (Jacobson, 1988)


@dataclass(kw_only=True, slots=True)
class _ServiceTime:
    mean_s: float
    off_s: float = 0.0

    def learn(self, spent_s: float) -> None:
        off_s = spent_s - self.mean_s
        self.mean_s += _NEWEST_WEIGHT * off_s
        self.off_s += _NEWEST_WEIGHT * (abs(off_s) - self.off_s)


class _ServiceTimes:
    """Exponential means of seconds, by worker; those of all workers' where one is new."""

    def __init__(self) -> None:
        self._by_worker: dict[str, _ServiceTime] = {}
        self._of_all: _ServiceTime | None = None
        self._least: float | None = None  # where it is known

    @property
    def least(self) -> float | None:
        """The least that `of` gives; None while nothing is known."""
        if self._least is None and self._of_all is not None:
            self._least = min(one.mean_s for one in (self._of_all, *self._by_worker.values()))
        return self._least

    def of(self, worker: str) -> float | None:
        """A worker's mean; None while nothing is known of any."""
        times = self._by_worker.get(worker, self._of_all)
        return None if times is None else times.mean_s

    def most(self, worker: str) -> float:
        """What would be nothing out of the ordinary for a worker; `of` knows something."""
        times = self._by_worker.get(worker, self._of_all)
        assert times is not None, "learn comes first"
        return times.mean_s + _DEVIATIONS * times.off_s

    def learn(self, worker: str, spent_s: float) -> None:
        """A unit took a worker so long."""
        if self._of_all is None:
            self._of_all = _ServiceTime(mean_s=spent_s)
        times = self._by_worker.get(worker)
        if times is None:
            times = self._by_worker[worker] = _ServiceTime(mean_s=spent_s)
        for one in (times, self._of_all):
            before_s = one.mean_s
            one.learn(spent_s)
            self._changed(before_s, one.mean_s)

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        self._by_worker.pop(worker, None)
        self._least = None

    def _changed(self, before_s: float, after_s: float) -> None:
        """One of the means did: keep the least where that is clear, rather than look at all again."""
        if self._least is not None:
            if after_s <= self._least:
                self._least = after_s
            elif before_s == self._least:
                self._least = None
