"""Random numbers of rows whose code draws from the global generators, as torch's data sets do.

The generators are seeded by (seed, epoch, row) before each row, so that a row has the same values wherever and however
often it is computed, and others in the next epoch. They are put back afterwards, and held meanwhile: a step in another
thread draws from the same ones. So rows that draw are not computed while a step runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trainwright.core import random_state
from trainwright.core.data import fold

_HELD_S = 0.02  # after which a step may have the generators


class RowRandomness:
    """Asks for rows, with the global generators seeded for each.

    Attributes:
        seed: of the run.
        epoch: from 0.
        drawn: some row has drawn from the generators so far.
    """

    def __init__(self, seed: int = 0, epoch: int = 0) -> None:
        self.seed, self.epoch = seed, epoch
        self.drawn = False

    def ask(
        self,
        rows: Sequence[int],
        one: Callable[[int], Any],
        many: Callable[[Sequence[int]], list[Any]] | None = None,
    ) -> list[Any]:
        """What `one` gives for each row; or `many` for all of them, where none draws a random number."""
        found: list[Any] = []
        while len(found) < len(rows):
            with _held():
                found += self._some(rows[len(found) :], one, many)
        return found

    def _some(
        self, rows: Sequence[int], one: Callable[[int], Any], many: Callable[[Sequence[int]], list[Any]] | None
    ) -> list[Any]:
        """As many of the rows as take a moment."""
        until = time.monotonic() + _HELD_S
        if not self.drawn:
            random_state.seed(0)
            before = random_state.states()
            found = many(rows) if many else _until(until, rows, one)
            if random_state.states() == before:
                return found
            self.drawn = True
        return _until(until, rows, lambda row: self._seeded(row, one))

    def _seeded(self, row: int, one: Callable[[int], Any]) -> Any:
        random_state.seed(fold(self.seed, self.epoch, row))
        return one(row)


def _until(until: float, rows: Sequence[int], one: Callable[[int], Any]) -> list[Any]:
    """One row at least."""
    found = []
    for row in rows:
        found.append(one(row))
        if time.monotonic() > until:
            break
    return found


@contextmanager
def _held() -> Iterator[None]:
    """The generators are this thread's, and afterwards as they were."""
    with random_state.LOCK:
        again = random_state.kept()
        try:
            yield
        finally:
            again()
