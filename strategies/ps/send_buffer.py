"""Where a worker writes what it pushes to one server. Pure but for the memory.

A server keeps a push until its round is applied. It may leave it where it lies, and copy nothing, where the worker has
another half to write the next one into.
"""

from __future__ import annotations

from collections.abc import Callable

from trainwright.strategies.ps.tensor_placement import ALIGNMENT


class Outbox:
    """One push's memory, or two halves in turn once a server had to copy.

    Args:
        opened: makes zeroed memory of so many bytes that the server gets to see, instead of what was before.
        size_bytes: of a push.
    """

    def __init__(self, opened: Callable[[int], memoryview], size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._stride = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        self._held: list[int | None] = [None]
        self._half = 0
        self._memory = opened(size_bytes)

    @property
    def view(self) -> memoryview:
        """The next push."""
        return self._memory[self.offset :][: self.size_bytes]

    @property
    def offset(self) -> int:
        """Where that begins in the memory that the server sees."""
        return self._half * self._stride

    @property
    def keeps(self) -> bool:
        """Whether the server may leave the next push where it lies: there is room for the one after it."""
        return any(held is None for half, held in enumerate(self._held) if half != self._half)

    def pushed(self, opened: Callable[[int], memoryview], at: int, *, kept: bool, copied: bool) -> None:
        """The server has a push of round `at`, and left it where it lies, copied it, or needs it no more."""
        if kept:
            self._held[self._half] = at
            self._half = 1 - self._half
        elif copied and len(self._held) == 1:
            self._memory = opened(self._stride + self.size_bytes)
            self._held = [None, None]

    def applied(self, version: int) -> None:
        """The server says that it has applied so many rounds."""
        self._held = [None if held is not None and held < version else held for held in self._held]

    def reopen(self, opened: Callable[[int], memoryview]) -> None:
        """The connection is a new one: the next push is written there, others lie where the server knows them."""
        before, self._half = self.view, 0
        self._held = [None] * len(self._held)
        self._memory = opened(len(self._memory))
        self.view[:] = before
