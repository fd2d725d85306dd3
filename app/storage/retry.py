"""How long to try when a store fails, and the pauses in between: exponential, with full jitter.

Full jitter draws each pause from 0 to a bound that doubles, so that a thousand workers that were turned away together
do not come back together (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_S, LONGEST_S = 0.2, 4.0
_drawn = random.SystemRandom().random  # a step seeds the global generator


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to try.

    Attributes:
        connect_s: for one connection.
        silence_s: for the next bytes of one request.
        request_s: for one whole request, its data included.
        total_s: after which an operation that fails is not tried again; until then it is, however often.
        slowest_bytes_s: a file of several parts is given the time that a part takes at this rate on top of `total_s`.
    """

    connect_s: float = 5.0
    silence_s: float = 20.0
    request_s: float = 600.0
    total_s: float = 30.0
    slowest_bytes_s: float = 256 << 10


QUICK = Patience(connect_s=2.0, silence_s=3.0, request_s=3.0, total_s=4.0)
"""For what is worth little when it comes late: probes and heartbeats."""


class Pauses:
    """The pauses of one operation; its time runs from here on.

    Args:
        total_s: no pause ends later than this.
        clock: seconds, from any origin.
        sleep: waits some seconds.
        jitter: numbers in [0, 1).
    """

    def __init__(
        self,
        total_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = _drawn,
    ) -> None:
        self._clock, self._sleep, self._jitter = clock, sleep, jitter
        self._until_s, self._bound_s = clock() + total_s, FIRST_S

    def wait(self) -> bool:
        """Pause before the next attempt; False, at once, when there is to be none."""
        pause_s = self._bound_s * self._jitter()
        if self._clock() + pause_s > self._until_s:
            return False
        self._sleep(pause_s)
        self._bound_s = min(2 * self._bound_s, LONGEST_S)
        return True
