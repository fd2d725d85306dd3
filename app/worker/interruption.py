"""Which generation a rank takes part in, and which are over for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trainwright.core.errors import PeerLost
from trainwright.core.group import Generation


class Interruption:
    """Brings interrupts to the generation that they are for, and to no other.

    The driver's calls and its interrupts are carried out by different threads of this process: an interrupt may come
    before the call that it is for has begun, or when the next generation's has.

    Attributes:
        lock: held while an engine is interrupted; hold it to exchange the engine.
        current: the generation that this rank takes part in, or took part in last.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current = self._over = Generation(token=-1, number=0)

    def enter(self, generation: Generation) -> None:
        """Take part in a generation from now on. Raises PeerLost where it is over already."""
        with self.lock:
            self.current = generation
            if generation <= self._over:
                raise PeerLost(
                    f"generation {generation} was over before this rank had joined it",
                    remedy="look at the rank that failed first",
                )

    def end(self, generation: Generation, interrupt: Callable[[], object]) -> None:
        """A generation is over, and so are those before it: call `interrupt` where this rank takes part in one."""
        with self.lock:
            self._over = max(self._over, generation)
            if self.current <= generation:
                interrupt()
