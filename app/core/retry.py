"""Pauses between the attempts of an operation that may succeed later: exponential backoff with full jitter.

Full jitter draws each pause from 0 to a bound that doubles, so that a thousand workers that were throttled at the same
moment do not retry at the same moment (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 4.0
unseeded_random = random.SystemRandom().random  # each step seeds the global generator: all ranks would wait alike


class Backoff:
    """The pauses between the attempts of one operation. Its time starts when the object is made.

    Args:
        total_s: no pause ends later than this after the start.

    Attributes:
        attempts: how many failed attempts `wait` was called for.
    """

    def __init__(
        self,
        total_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = unseeded_random,
    ) -> None:
        self._clock, self._sleep, self._jitter = clock, sleep, jitter
        self._start_s, self._total_s, self._bound_s = clock(), total_s, FIRST_PAUSE_S
        self.attempts = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start_s

    def wait(self) -> bool:
        """Pause before the next attempt. Returns False at once where the time does not suffice for another one."""
        self.attempts += 1
        pause_s = self._bound_s * self._jitter()
        if self.elapsed_s + pause_s > self._total_s:
            return False
        self._sleep(pause_s)
        self._bound_s = min(2 * self._bound_s, LONGEST_PAUSE_S)
        return True
