"""Virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Virtual time: actions in order of time, then of request."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something later."""
        self._number += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._number, action, arguments))

    def tick(self) -> bool:
        """Do the next thing; False when there is none."""
        if not self._queue:
            return False
        self.now_s, _, action, arguments = heapq.heappop(self._queue)
        action(*arguments)
        return True
