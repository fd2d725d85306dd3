"""How long a unit usually takes a worker, learnt from those that it did. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_NEW = 0.3  # weight of the newest
_OFF = 4.0  # mean deviations that are nothing out of the ordinary, as TCP has it (Jacobson, 1988)


@dataclass(kw_only=True, slots=True)
class _Times:
    mean_s: float
    off_s: float = 0.0

    def learn(self, spent_s: float) -> None:
        off_s = spent_s - self.mean_s
        self.mean_s += _NEW * off_s
        self.off_s += _NEW * (abs(off_s) - self.off_s)


class Usual:
    """Exponential means of seconds, by worker; those of all workers' where one is new."""

    def __init__(self) -> None:
        self._by_worker: dict[str, _Times] = {}
        self._of_all: _Times | None = None
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
        return times.mean_s + _OFF * times.off_s

    def learn(self, worker: str, spent_s: float) -> None:
        """A unit took a worker so long."""
        if self._of_all is None:
            self._of_all = _Times(mean_s=spent_s)
        times = self._by_worker.get(worker)
        if times is None:
            times = self._by_worker[worker] = _Times(mean_s=spent_s)
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
