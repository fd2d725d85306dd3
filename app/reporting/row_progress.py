"""How far a prediction has come, on stderr."""

from __future__ import annotations

import math
import sys
import time
from typing import Self

from trainwright.reporting import formatting


class Meter:
    """Rows done on stderr: a bar in a terminal, elsewhere a line after each tenth of the rows and every ten seconds.

    Args:
        total: rows.
        done: rows that were there at the start.
    """

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(file=sys.stderr)
        self._total, self._done, self._shown = total, done, done
        self._shown_s = time.monotonic()
        self._first: tuple[int, float] | None = None  # rows and time of the first news: starting up is no rate
        self._bar: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None))
            self._bar = Progress(*columns, console=self._console, expand=True, transient=True)
            self._task = self._bar.add_task(self._text(), total=total, completed=done)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, rows: int) -> None:
        """Rows were computed, or, where negative, lost again."""
        self._done += rows
        now = time.monotonic()
        self._first = self._first or (self._done, now)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self._text())
        elif self._done - self._shown >= self._total / 10 or now - self._shown_s >= 10.0 or self._done == self._total:
            self._shown, self._shown_s = self._done, now
            self.note(self._text())

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _text(self) -> str:
        rows, since_s = self._first or (self._done, 0.0)
        spent_s = time.monotonic() - since_s
        rate = (self._done - rows) / spent_s if self._done > rows and spent_s > 0 else math.nan
        left_s = (self._total - self._done) / rate
        return f"rows {self._done:,}/{self._total:,}, {formatting.rate(rate)}, {formatting.clock(left_s)} left"
