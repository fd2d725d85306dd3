"""The lease table of the first server: which worker computes which unit, and when a round of units is closed.

Pure: `now_s` is any clock of the caller's. A *round* is a step, or several local steps; it has `shares` units. A round
is closed once its units are done, which means that every server has their pushes. Rounds close in order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainwright.core.topology import Consistency, WorkUnit

_WINDOW = 16  # rounds that `async` may start ahead of the first incomplete one
_OVERDUE_FACTOR = 4.0  # times the longest ordinary time of a worker: its unit is then leased again
_SPECULATION_FACTOR = 1.5  # times the mean time of an idle worker: a unit expected to take longer is copied to it
_SWEEP_ENTRIES = 256  # entries of a heap, before finished units are removed from it
_NEWEST_WEIGHT = 0.3  # of the newest time in a mean
_DEVIATIONS = 4.0  # mean deviations that are ordinary, as in TCP (Jacobson, 1988)


class Grant(NamedTuple):
    """A unit for a worker."""

    unit: WorkUnit  # what to compute
    at: int  # the round in which it counts, from 0 for the table's first; a later one if an earlier round dropped it
    needs: int  # rounds whose updates the parameters must hold


@dataclass(frozen=True, kw_only=True)
class ClosedRound:
    """A round that is closed."""

    at: int  # its number, from 0 for the table's first
    step: int  # its first step
    steps: int  # its number of steps
    units: tuple[WorkUnit, ...]  # the units that count in it, in the order in which they are added up


@dataclass(kw_only=True)
class _Round:
    step: int
    steps: int
    units: set[WorkUnit]  # units that are not done
    done: set[WorkUnit] = field(default_factory=set)


class _Rounds:
    """The rounds that were started and are not closed, and the units that were never leased.

    Attributes:
        until: steps from this one on may not start.
        started_steps: first step that no round was started for.
        first: first round that is not closed.
        next: by share, the first round whose unit was never leased.
    """

    def __init__(self, *, shares: int, start: int, consistency: Consistency, local_steps: int, window: int) -> None:
        self.shares, self._local_steps, self._backup = shares, local_steps, consistency.backup
        self._ahead = window if consistency.bound is None else consistency.bound
        self.until = self.started_steps = start
        self.first = self._started = 0  # the first round that is not closed, and the first that is not started
        self._open: dict[int, _Round] = {}
        self.next = [0] * shares
        self._heap = [(0, share) for share in range(shares)]  # heap of `next`, updated when it is read

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

    def oldest(self) -> tuple[int, int]:
        """Return round and share of the oldest unit that was never leased."""
        while self._heap[0][0] != self.next[self._heap[0][1]]:
            _, share = heapq.heappop(self._heap)
            heapq.heappush(self._heap, (self.next[share], share))
        return self._heap[0]

    def take(self, at: int, share: int) -> WorkUnit:
        """Return a share's unit of a round, leased for the first time."""
        if at == self._started:
            self._start()
        self.next[share] = at + 1
        current = self._open[at]
        return WorkUnit(current.step, share, current.steps)

    def finish(self, unit: WorkUnit, at: int) -> None:
        """A unit that `wants` names is done."""
        current = self._open[at]
        current.units.remove(unit)
        current.done.add(unit)

    def close_next(self) -> tuple[ClosedRound, set[WorkUnit]] | None:
        """Close the first round if enough units are done; return it, and its other units, which count in the next."""
        current = self._open.get(self.first)
        if current is None:
            return None
        is_last = current.step + current.steps >= self.until
        if len(current.units) > (0 if is_last else self._backup):
            return None
        del self._open[self.first]
        units = tuple(sorted(current.done))
        closed = ClosedRound(at=self.first, step=current.step, steps=current.steps, units=units)
        self.first += 1
        if current.units:
            if self.first == self._started:
                self._start()
            for unit in current.units:
                self.next[unit.share] = max(self.next[unit.share], self.first)
                self._open[self.first].units.add(unit)
        return closed, current.units

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
        self._leases = _ActiveLeases(self.wants)
        self._queue: list[tuple[int, WorkUnit]] = []  # heap of units to lease again
        self._queued: set[tuple[int, WorkUnit]] = set()  # the valid entries of the heap
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

        It is the oldest of the queued units and the worker's own share `prefer`; without these, the oldest unit that
        was never leased. If all units are leased, it is a copy of a unit that another worker would finish later. The
        unit that the worker held before is leased to others.
        """
        self.release(worker)
        self._requeue_overdue(now_s)
        candidate = self._take_free(prefer % self._rounds.shares) or self._take_copy(worker, now_s)
        if candidate is None:
            return None
        at, unit = candidate
        self._leases.add(worker, at, unit, now_s)
        return Grant(unit, at, 0 if self._bound is None else max(0, at - self._bound))

    def first(self, workers: Iterable[str], now_s: float) -> str | None:
        """Return the first of these idle workers to which `lease` gives a unit; None if to none."""
        self._requeue_overdue(now_s)
        if self._queued or self._rounds.may_start(self._rounds.oldest()[0]):
            return next(iter(workers), None)
        return self._leases.first_copier(workers, now_s)

    def due_s(self) -> float | None:
        """Return when the next lease is overdue: call `first` again then. None for never."""
        return self._leases.due_s()

    def done(self, worker: str, unit: WorkUnit, at: int, now_s: float) -> bool:
        """Every server has the unit's push. Return False if it was done before, or its round is closed."""
        self._leases.finish(worker, unit, at, now_s)
        if not self.wants(unit, at):
            return False
        self._rounds.finish(unit, at)
        self._queued.discard((at, unit))
        self._leases.forget_unit(unit)
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
        lease = self._leases.release(worker)
        if lease is not None:
            self._requeue(lease.at, lease.unit)

    def lost(self, worker: str) -> None:
        """A worker is lost: its unit is wanted again."""
        self.release(worker)
        self._leases.forget_worker(worker)

    def closings(self) -> list[ClosedRound]:
        """Return the rounds that closed since the last call, in order."""
        closed, self._closed = self._closed, []
        return closed

    def _take_free(self, share: int) -> tuple[int, WorkUnit] | None:
        """Take a unit that no worker holds, for the worker of a share."""
        next_at = self._rounds.next[share]
        own_round = next_at if self._rounds.may_start(next_at) else None
        while self._queue and self._queue[0] not in self._queued:
            heapq.heappop(self._queue)
        if self._queue and (own_round is None or self._queue[0][0] < own_round):
            entry = heapq.heappop(self._queue)
            self._queued.remove(entry)
            self.again += 1
            return entry
        at, share = (own_round, share) if own_round is not None else self._rounds.oldest()
        return (at, self._rounds.take(at, share)) if self._rounds.may_start(at) else None

    def _take_copy(self, worker: str, now_s: float) -> tuple[int, WorkUnit] | None:
        copy = self._leases.pop_copy(worker, now_s)
        self.again += copy is not None
        return copy

    def _requeue(self, at: int, unit: WorkUnit) -> None:
        """Lease a unit again, unless it is done."""
        if self.wants(unit, at) and (at, unit) not in self._queued:
            self._queued.add((at, unit))
            heapq.heappush(self._queue, (at, unit))

    def _requeue_overdue(self, now_s: float) -> None:
        """Let other workers have the units of overdue leases too."""
        for lease in self._leases.pop_overdue(now_s):
            self._requeue(lease.at, lease.unit)

    def _close(self) -> None:
        """Close rounds in order, as far as enough of their units are done."""
        while (closing := self._rounds.close_next()) is not None:
            closed, dropped = closing
            self._closed.append(closed)
            for unit in dropped:
                self._leases.forget_unit(unit)
                self._requeue(self._rounds.first, unit)


# --- Which worker holds which unit, since when, and how long that usually takes ---------------------------------------


class _Lease(NamedTuple):
    """A worker's hold on a unit."""

    unit: WorkUnit  # what the worker computes
    at: int  # the round in which it counts
    since_s: float  # when it was leased


class _ActiveLeases:
    """The active leases.

    Args:
        wants: (unit, round) -> whether the unit still counts in that round and is not done.
    """

    def __init__(self, wants: Callable[[WorkUnit, int], bool]) -> None:
        self._wants = wants
        self._leases: dict[str, _Lease] = {}  # by worker
        self._holders: dict[WorkUnit, set[str]] = {}
        self._slowest: list[tuple[float, int, int, WorkUnit]] = []  # heap: expected end (negative), serial, round, unit
        self._sweep = _SWEEP_ENTRIES  # length of that heap at which it is swept
        self._dues: list[tuple[float, int, str, _Lease]] = []  # heap: when a lease is overdue, serial, worker
        self._undated: list[tuple[str, _Lease]] = []  # leases from before any time was known
        self._serial = 0
        self._times = _ServiceTimes()

    def add(self, worker: str, at: int, unit: WorkUnit, now_s: float) -> None:
        """A worker gets a unit."""
        mean_s = self._times.of(worker)
        lease = _Lease(unit, at, now_s)
        self._leases[worker] = lease
        self._holders.setdefault(unit, set()).add(worker)
        if mean_s is None:
            self._undated.append((worker, lease))
            return
        self._set_due(worker, lease, mean_s)
        if len(self._slowest) > self._sweep:
            self._slowest = [entry for entry in self._slowest if self._wants(entry[3], entry[2])]
            heapq.heapify(self._slowest)
            self._sweep = max(_SWEEP_ENTRIES, 2 * len(self._slowest))

    def release(self, worker: str) -> _Lease | None:
        """End a worker's lease without its unit; return it if no other worker holds the unit."""
        lease = self._leases.pop(worker, None)
        if lease is None:
            return None
        holders = self._holders.get(lease.unit, set())
        holders.discard(worker)
        return None if holders else lease

    def finish(self, worker: str, unit: WorkUnit, at: int, now_s: float) -> None:
        """A worker has done a unit: end its lease, and learn how long such a lease takes."""
        lease = self._leases.get(worker)
        if lease is None or (lease.unit, lease.at) != (unit, at):
            return
        del self._leases[worker]
        self._holders.get(unit, set()).discard(worker)
        spent_s = now_s - lease.since_s
        has_mean = self._times.of(worker) is not None
        # one freeze of a worker does not count in full
        self._times.learn(worker, min(spent_s, self._overdue_s(worker)) if has_mean else spent_s)
        undated, self._undated = self._undated, []
        for holder, undated_lease in undated:
            if self._leases.get(holder) is undated_lease:
                mean_s = self._times.of(holder)
                assert mean_s is not None, "a time was just learnt"
                self._set_due(holder, undated_lease, mean_s)

    def forget_unit(self, unit: WorkUnit) -> None:
        """A unit is done or dropped: nobody holds it any more."""
        self._holders.pop(unit, None)

    def forget_worker(self, worker: str) -> None:
        """Drop the times of a lost worker."""
        self._times.forget(worker)

    def due_s(self) -> float | None:
        """Return when the next lease is overdue; None if none will be."""
        while self._dues and self._leases.get(self._dues[0][2]) is not self._dues[0][3]:
            heapq.heappop(self._dues)
        return self._dues[0][0] if self._dues else None

    def pop_overdue(self, now_s: float) -> list[_Lease]:
        """Return the leases that are overdue, each once; their workers keep them."""
        leases = []
        while (due_s := self.due_s()) is not None and due_s <= now_s:
            leases.append(heapq.heappop(self._dues)[3])
        return leases

    def pop_copy(self, worker: str, now_s: float) -> tuple[int, WorkUnit] | None:
        """Return round and unit of the slowest lease if a copy on this worker would be done before it, else None.

        Only units that one worker alone holds are copied (Zaharia et al., OSDI 2008).
        """
        if not self._faster(worker, self._slowest_s(now_s)):
            return None
        _, _, at, unit = heapq.heappop(self._slowest)
        return at, unit

    def first_copier(self, workers: Iterable[str], now_s: float) -> str | None:
        """Return the first of these workers for which `pop_copy` has a unit; None for none."""
        least_s, slowest_s = self._times.least, self._slowest_s(now_s)
        if least_s is None or slowest_s <= _SPECULATION_FACTOR * least_s:
            return None
        return next((worker for worker in workers if self._faster(worker, slowest_s)), None)

    def _set_due(self, worker: str, lease: _Lease, mean_s: float) -> None:
        """Enter when a lease is expected to end, and when it is overdue."""
        self._serial += 1
        heapq.heappush(self._dues, (lease.since_s + self._overdue_s(worker), self._serial, worker, lease))
        heapq.heappush(self._slowest, (-(lease.since_s + mean_s), self._serial, lease.at, lease.unit))

    def _overdue_s(self, worker: str) -> float:
        """Return the time after which a worker is presumed frozen."""
        return _OVERDUE_FACTOR * self._times.most(worker)

    def _faster(self, worker: str, slowest_s: float) -> bool:
        """Whether a worker would finish a copy before a lease that still takes `slowest_s`."""
        mean_s = self._times.of(worker)
        return mean_s is not None and slowest_s > _SPECULATION_FACTOR * mean_s

    def _slowest_s(self, now_s: float) -> float:
        """Return how long the slowest lease is still expected to take, of the units that one worker alone holds."""
        while self._slowest:
            ends_s, _, at, unit = self._slowest[0]
            if len(self._holders.get(unit, ())) == 1 and self._wants(unit, at):
                return -ends_s - now_s
            heapq.heappop(self._slowest)
        return -math.inf


@dataclass(kw_only=True, slots=True)
class _ServiceTime:
    mean_s: float
    off_s: float = 0.0

    def learn(self, spent_s: float) -> None:
        off_s = spent_s - self.mean_s
        self.mean_s += _NEWEST_WEIGHT * off_s
        self.off_s += _NEWEST_WEIGHT * (abs(off_s) - self.off_s)


class _ServiceTimes:
    """Exponential means of the seconds that a unit takes, by worker; the mean of all workers for a new one."""

    def __init__(self) -> None:
        self._by_worker: dict[str, _ServiceTime] = {}
        self._of_all: _ServiceTime | None = None
        self._least: float | None = None  # None: recompute

    @property
    def least(self) -> float | None:
        """The least mean; None while nothing is known."""
        if self._least is None and self._of_all is not None:
            self._least = min(times.mean_s for times in (self._of_all, *self._by_worker.values()))
        return self._least

    def of(self, worker: str) -> float | None:
        """Return a worker's mean; None while no worker has done a unit."""
        times = self._by_worker.get(worker, self._of_all)
        return None if times is None else times.mean_s

    def most(self, worker: str) -> float:
        """Return the longest ordinary time of a worker. Call it only if `of` returns a number."""
        times = self._by_worker.get(worker, self._of_all)
        assert times is not None, "learn comes first"
        return times.mean_s + _DEVIATIONS * times.off_s

    def learn(self, worker: str, spent_s: float) -> None:
        """Add the time of a unit to a worker's mean."""
        if self._of_all is None:
            self._of_all = _ServiceTime(mean_s=spent_s)
        times = self._by_worker.get(worker)
        if times is None:
            times = self._by_worker[worker] = _ServiceTime(mean_s=spent_s)
        for mean in (times, self._of_all):
            before_s = mean.mean_s
            mean.learn(spent_s)
            self._changed(before_s, mean.mean_s)

    def forget(self, worker: str) -> None:
        """Drop a lost worker."""
        self._by_worker.pop(worker, None)
        self._least = None

    def _changed(self, before_s: float, after_s: float) -> None:
        """Update the least mean after one changed; recompute it later if that is not enough."""
        if self._least is not None:
            if after_s <= self._least:
                self._least = after_s
            elif before_s == self._least:
                self._least = None
