"""How long a unit usually takes a worker, learnt from those that it did. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_NEW = 0.3  # weight of the newest
_OFF = 4.0  # mean deviations that are nothing out of the ordinary, as TCP has it (Jacobson, 1988)


@dataclass(frozen=True, kw_only=True)
class _Times:
    mean_s: float
    off_s: float = 0.0

    def learn(self, spent_s: float) -> _Times:
        off_s = self.off_s + _NEW * (abs(spent_s - self.mean_s) - self.off_s)
        return _Times(mean_s=self.mean_s + _NEW * (spent_s - self.mean_s), off_s=off_s)


class Usual:
    """Exponential means of seconds, by worker; those of all workers' where one is new."""

    def __init__(self) -> None:
        self._by_worker: dict[str, _Times] = {}
        self._of_all: _Times | None = None

    @property
    def least(self) -> float | None:
        """The least that `of` gives; None while nothing is known."""
        return None if self._of_all is None else min(one.mean_s for one in (self._of_all, *self._by_worker.values()))

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
        first = _Times(mean_s=spent_s)
        self._by_worker[worker] = self._by_worker.get(worker, first).learn(spent_s)
        self._of_all = (self._of_all or first).learn(spent_s)

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        self._by_worker.pop(worker, None)
