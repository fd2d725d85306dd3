"""The lease table of the first server: which worker computes which unit, and when a round of units is closed.

Pure: `now_s` is any clock of the caller's. A *round* is a step, or several local steps; it has `shares` units. A round
is closed once its units are done, which means that every server has their pushes. Rounds close in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainwright.core.topology import Consistency, WorkUnit
from trainwright.strategies.ps.lease_times import HeldLeases

_WINDOW = 16  # rounds that `async` may start ahead of the first incomplete one


class Grant(NamedTuple):
    """A unit for a worker.

    Attributes:
        unit: what to compute.
        at: the round in which it counts, from 0 for the table's first; a later one if an earlier round dropped it.
        needs: rounds whose updates the parameters must hold.
    """

    unit: WorkUnit
    at: int
    needs: int


@dataclass(frozen=True, kw_only=True)
class ClosedRound:
    """A round that is closed.

    Attributes:
        at: its number, from 0 for the table's first.
        step: its first step.
        steps: its number of steps.
        units: the units that count in it, in the order in which they are added up.
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


class _Rounds:
    """The rounds that were started and are not closed, and the units that were never leased.

    Attributes:
        until: steps from this one on may not start.
        started_steps: first step that no round was started for.
        first: first round that is not closed.
    """

    def __init__(self, *, shares: int, start: int, consistency: Consistency, local_steps: int, window: int) -> None:
        self.shares, self._local_steps, self._backup = shares, local_steps, consistency.backup
        self._ahead = window if consistency.bound is None else consistency.bound
        self.until = self.started_steps = start
        self.first = self._started = 0  # the first round that is not closed, and the first that is not started
        self._open: dict[int, _Round] = {}
        self._next = [0] * shares  # by share, the first round whose unit was never leased
        self._heap = [(0, share) for share in range(shares)]  # of the same

    @property
    def step(self) -> int:
        """Steps before this one are complete."""
        return self._open[self.first].step if self.first in self._open else self.started_steps

    def wants(self, unit: WorkUnit, at: int) -> bool:
        """Whether a unit is not done and counts in that round."""
        return at in self._open and unit in self._open[at].units

    def knows(self, unit: WorkUnit, at: int) -> bool:
        """Whether a unit counts in that round, done or not, or came too late for it."""
        return at < self.first or (at in self._open and unit in self._open[at].units | self._open[at].done)

    def may_start(self, at: int) -> bool:
        """Whether units of a round may be leased."""
        return at <= self.first + self._ahead and (at < self._started or self.started_steps < self.until)

    def next_of(self, share: int) -> int:
        """Return the first round whose unit of a share was never leased."""
        return self._next[share]

    def oldest(self) -> tuple[int, int]:
        """Return round and share of the oldest unit that was never leased."""
        while self._heap[0][0] != self._next[self._heap[0][1]]:
            _, share = heapq.heappop(self._heap)
            heapq.heappush(self._heap, (self._next[share], share))
        return self._heap[0]

    def take(self, at: int, share: int) -> WorkUnit:
        """Return a share's unit of a round, leased for the first time."""
        if at == self._started:
            self._start()
        self._next[share] = at + 1
        mine = self._open[at]
        return WorkUnit(mine.step, share, mine.steps)

    def finish(self, unit: WorkUnit, at: int) -> None:
        """A unit that `wants` names is done."""
        mine = self._open[at]
        mine.units.remove(unit)
        mine.done.add(unit)

    def close_next(self) -> tuple[ClosedRound, set[WorkUnit]] | None:
        """Close the first round if enough of its units are done: the round, and units that now count in the next."""
        mine = self._open.get(self.first)
        if mine is None:
            return None
        last = mine.step + mine.steps >= self.until
        if len(mine.units) > (0 if last else self._backup):
            return None
        del self._open[self.first]
        units = tuple(sorted(mine.done))
        closed = ClosedRound(at=self.first, step=mine.step, steps=mine.steps, units=units)
        self.first += 1
        if mine.units:
            if self.first == self._started:
                self._start()
            for unit in mine.units:
                self._next[unit.share] = max(self._next[unit.share], self.first)
                self._open[self.first].units.add(unit)
        return closed, mine.units

    def _start(self) -> None:
        """Start the next round."""
        step, steps = self.started_steps, min(self._local_steps, self.until - self.started_steps)
        units = {WorkUnit(step, share, steps) for share in range(self.shares)}
        self._open[self._started] = _Round(step=step, steps=steps, units=units)
        self._started, self.started_steps = self._started + 1, step + steps


class LeaseTable:
    """Leases of one rendezvous epoch.

    Args:
        shares: units of a round.
        start: the first step.
        consistency: when a unit may start, and how many units of a round are not waited for.
        local_steps: steps of a round; a segment's last round has fewer if they do not divide it.
        window: rounds that may be started beyond the first open one, if the consistency has no bound.

    Attributes:
        again: units that were leased again or copied.
    """

    def __init__(
        self, *, shares: int, start: int, consistency: Consistency, local_steps: int = 1, window: int = _WINDOW
    ) -> None:
        assert 0 <= consistency.backup < shares, "a step needs at least one unit"
        self.again = 0
        self._bound = consistency.bound
        self._rounds = _Rounds(
            shares=shares, start=start, consistency=consistency, local_steps=local_steps, window=window
        )
        self._held = HeldLeases(self.wants)
        self._free: list[tuple[int, WorkUnit]] = []  # heap of units that were leased and are wanted again
        self._wanted: set[tuple[int, WorkUnit]] = set()  # the entries of the heap that still are
        self._closed: list[ClosedRound] = []

    @property
    def step(self) -> int:
        """Steps before this one are complete."""
        return self._rounds.step

    @property
    def until(self) -> int:
        """Steps from this one on may not start."""
        return self._rounds.until

    @property
    def over(self) -> bool:
        """Whether all steps before `until` are complete."""
        return self.step >= self.until

    def extend(self, until: int) -> None:
        """Start a segment: units of steps before `until` may be leased."""
        self._rounds.until = max(until, self._rounds.started_steps)

    def stop(self) -> None:
        """Start no more rounds: `until` becomes the end of the last one that was started."""
        self._rounds.until = self._rounds.started_steps

    def lease(self, worker: str, prefer: int, now_s: float) -> Grant | None:
        """Lease a unit to a worker that has nothing to do; None if nothing may start now.

        The oldest of the units that are wanted again and the worker's own share `prefer`; without these, the oldest
        unit that was never leased. If all are out: a copy of a unit that another worker would take longer for. The unit
        that the worker held before is leased to others.
        """
        self.release(worker)
        self._want_overdue(now_s)
        found = self._unheld(prefer % self._rounds.shares) or self._copied(worker, now_s)
        if found is None:
            return None
        at, unit = found
        self._held.add(worker, at, unit, now_s)
        return Grant(unit, at, 0 if self._bound is None else max(0, at - self._bound))

    def first(self, workers: Iterable[str], now_s: float) -> str | None:
        """Return the first of these idle workers to which `lease` gives a unit; None if to none."""
        self._want_overdue(now_s)
        if self._wanted or self._rounds.may_start(self._rounds.oldest()[0]):
            return next(iter(workers), None)
        return self._held.first_copier(workers, now_s)

    def due_s(self) -> float | None:
        """Return when to call `first` again although nothing happened: the next lease is overdue. None: never."""
        return self._held.due_s()

    def done(self, worker: str, unit: WorkUnit, at: int, now_s: float) -> bool:
        """Every server has the unit's push. Return False if it was done before, or its round is closed."""
        self._held.finish(worker, unit, at, now_s)
        if not self.wants(unit, at):
            return False
        self._rounds.finish(unit, at)
        self._wanted.discard((at, unit))
        self._held.forget_unit(unit)
        self._close()
        return True

    def wants(self, unit: WorkUnit, at: int) -> bool:
        """Whether a unit is not done and counts in that round."""
        return self._rounds.wants(unit, at)

    def knows(self, unit: WorkUnit, at: int) -> bool:
        """Whether a unit counts in that round, done or not, or came too late for it."""
        return self._rounds.knows(unit, at)

    def release(self, worker: str) -> None:
        """A worker has nothing to do; a unit that it alone held is wanted again."""
        lease = self._held.release(worker)
        if lease is not None:
            self._want(lease.at, lease.unit)

    def lost(self, worker: str) -> None:
        """A worker is lost: its unit is wanted again."""
        self.release(worker)
        self._held.forget_worker(worker)

    def closings(self) -> list[ClosedRound]:
        """Return the rounds that closed since the last call, in order."""
        closed, self._closed = self._closed, []
        return closed

    def _unheld(self, share: int) -> tuple[int, WorkUnit] | None:
        """Take a unit that no worker holds, for the worker of a share."""
        next_at = self._rounds.next_of(share)
        own = next_at if self._rounds.may_start(next_at) else None
        while self._free and self._free[0] not in self._wanted:
            heapq.heappop(self._free)
        if self._free and (own is None or self._free[0][0] < own):
            found = heapq.heappop(self._free)
            self._wanted.remove(found)
            self.again += 1
            return found
        at, share = (own, share) if own is not None else self._rounds.oldest()
        return (at, self._rounds.take(at, share)) if self._rounds.may_start(at) else None

    def _copied(self, worker: str, now_s: float) -> tuple[int, WorkUnit] | None:
        found = self._held.pop_copy(worker, now_s)
        self.again += found is not None
        return found

    def _want(self, at: int, unit: WorkUnit) -> None:
        """Lease a unit again, unless it is done."""
        if self.wants(unit, at) and (at, unit) not in self._wanted:
            self._wanted.add((at, unit))
            heapq.heappush(self._free, (at, unit))

    def _want_overdue(self, now_s: float) -> None:
        """Let other workers have the units of overdue leases too."""
        for lease in self._held.pop_overdue(now_s):
            self._want(lease.at, lease.unit)

    def _close(self) -> None:
        """Close rounds in order, as far as enough of their units are done."""
        while (found := self._rounds.close_next()) is not None:
            closed, dropped = found
            self._closed.append(closed)
            for unit in dropped:
                self._held.forget_unit(unit)
                self._want(self._rounds.first, unit)
