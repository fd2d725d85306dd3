"""Feeds of the units that a worker leases: its own share is read ahead, any other is read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainwright.core.data import Feed, Prefetch
from trainwright.core.staleness import Unit
from trainwright.datasets.loading.loader import Feeds, Stream

_SKIPPED = 64  # steps of its own share, done by others, that are read and left out rather than begun anew after


class Units:
    """What one worker that steps alone is fed. Close it, or use it in a `with`.

    Args:
        stream: of the worker's own share, or of several; it has one as a rule.
        others: opens a stream of the same data that reads other shares, the first time that it is needed.
    """

    def __init__(self, stream: Stream, others: Callable[[], Stream]) -> None:
        self._stream, self._open = stream, others
        self._others: Stream | None = None
        self._ahead: tuple[int, Feeds] | None = None  # the step that comes next, and the feeds from there on

    def feeds(self, unit: Unit) -> Iterator[Feed]:
        """The feeds of the unit's steps, in order."""
        for step in range(unit.step, unit.step + unit.steps):
            yield self._own(step) if unit.share in self._stream.feeding.data_ranks else self._other(step, unit.share)

    @property
    def prefetch(self) -> Prefetch | None:
        """How far the own share is read ahead by now; None before it is."""
        return self._ahead[1].prefetch if self._ahead else None

    def close(self) -> None:
        """Read no further ahead. Safe to call twice."""
        if self._ahead is not None:
            self._ahead[1].close()
        self._ahead = None

    def __enter__(self) -> Units:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own(self, step: int) -> Feed:
        if self._ahead is not None and step < self._ahead[0]:
            return self._other(step, self._stream.feeding.data_ranks.start)  # it was handed out before, and is again
        if self._ahead is None or step - self._ahead[0] > _SKIPPED:
            self.close()
            self._ahead = step, self._stream.feeds(step)
        first, feeds = self._ahead
        self._ahead = step + 1, feeds
        for _ in range(first, step):
            next(feeds)
        return next(feeds)

    def _other(self, step: int, share: int) -> Feed:
        if self._others is None:
            self._others = self._open()
        return self._others.feed(step, share)
