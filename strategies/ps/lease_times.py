"""Which worker holds which unit, since when, and how long that usually takes: overdue leases and units worth copying.

Pure: `now_s` is any clock of the caller's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trainwright.core.topology import WorkUnit

OVERDUE_FACTOR = 4.0  # times the longest ordinary time of a worker: its unit is then leased again
SPECULATION_FACTOR = 1.5  # times the mean time of an idle worker: a unit expected to take longer is copied to it
_SWEEP_ENTRIES = 256  # entries of a heap, before finished units are removed from it
_NEWEST_WEIGHT = 0.3  # of the newest time in a mean
_DEVIATIONS = 4.0  # mean deviations that are ordinary, as in TCP (Jacobson, 1988)


class Lease(NamedTuple):
    """A worker's hold on a unit.

    Attributes:
        unit: what the worker computes.
        at: the round in which it counts.
        since_s: when it was leased.
        ends_s: when the worker is expected to be done.
    """

    unit: WorkUnit
    at: int
    since_s: float
    ends_s: float


class HeldLeases:
    """The leases that are out.

    Args:
        wants: (unit, round) -> whether the unit still counts in that round and is not done.
    """

    def __init__(self, wants: Callable[[WorkUnit, int], bool]) -> None:
        self._wants = wants
        self._leases: dict[str, Lease] = {}  # by worker
        self._holders: dict[WorkUnit, set[str]] = {}
        self._slowest: list[tuple[float, int, int, WorkUnit]] = []  # heap: expected end (negative), serial, round, unit
        self._sweep = _SWEEP_ENTRIES  # length of that heap at which it is swept
        self._dues: list[tuple[float, int, str, Lease]] = []  # heap: when a lease is overdue, serial, worker
        self._undated: list[tuple[str, Lease]] = []  # leases from before any time was known
        self._serial = 0
        self._times = _ServiceTimes()

    def add(self, worker: str, at: int, unit: WorkUnit, now_s: float) -> None:
        """A worker gets a unit."""
        mean_s = self._times.of(worker)
        lease = Lease(unit, at, now_s, now_s + (mean_s or 0.0))
        self._leases[worker] = lease
        self._holders.setdefault(unit, set()).add(worker)
        if mean_s is None:
            self._undated.append((worker, lease))
            return
        self._date(worker, lease, mean_s)
        if len(self._slowest) > self._sweep:
            self._slowest = [entry for entry in self._slowest if self._wants(entry[3], entry[2])]
            heapq.heapify(self._slowest)
            self._sweep = max(_SWEEP_ENTRIES, 2 * len(self._slowest))

    def release(self, worker: str) -> Lease | None:
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
        known = self._times.of(worker) is not None
        # one freeze of a worker does not count in full
        self._times.learn(worker, min(spent_s, self._overdue_s(worker)) if known else spent_s)
        undated, self._undated = self._undated, []
        for other, held in undated:
            if self._leases.get(other) is held:
                mean_s = self._times.of(other)
                assert mean_s is not None, "a time was just learnt"
                self._date(other, held, mean_s)

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

    def pop_overdue(self, now_s: float) -> list[Lease]:
        """Return the leases that are overdue, each once; their workers keep them."""
        found = []
        while (due_s := self.due_s()) is not None and due_s <= now_s:
            found.append(heapq.heappop(self._dues)[3])
        return found

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
        if least_s is None or slowest_s <= SPECULATION_FACTOR * least_s:
            return None
        return next((worker for worker in workers if self._faster(worker, slowest_s)), None)

    def _date(self, worker: str, lease: Lease, mean_s: float) -> None:
        """Enter when a lease is expected to end, and when it is overdue."""
        self._serial += 1
        heapq.heappush(self._dues, (lease.since_s + self._overdue_s(worker), self._serial, worker, lease))
        heapq.heappush(self._slowest, (-(lease.since_s + mean_s), self._serial, lease.at, lease.unit))

    def _overdue_s(self, worker: str) -> float:
        """Return the time after which a worker is presumed frozen."""
        return OVERDUE_FACTOR * self._times.most(worker)

    def _faster(self, worker: str, slowest_s: float) -> bool:
        """Whether a worker would be done with a copy before a lease that takes so much longer."""
        mean_s = self._times.of(worker)
        return mean_s is not None and slowest_s > SPECULATION_FACTOR * mean_s

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
            self._least = min(one.mean_s for one in (self._of_all, *self._by_worker.values()))
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
        """Take the time of a unit that a worker did."""
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
