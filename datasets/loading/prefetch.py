"""Reading ahead in a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_JOIN_S = 30.0


class ReadAhead(Generic[_Item], Iterator[_Item]):
    """Runs an iterator in a thread of its own, up to `depth` items ahead.

    What the iterator raises is raised in the consumer, after the items before it. `close` ends the thread; it is also
    called when nobody holds the object any more.

    Args:
        items: to run.
        depth: items ahead, at first.
        name: of the thread.
        size_of: bytes of an item. With it, the depth tunes itself as tf.data's prefetch does: it doubles when the
            consumer finds nothing ready though the depth was reached before.
        memory_bytes: that the items ahead may take; the depth does not grow beyond.
    """

    def __init__(
        self,
        items: Iterator[_Item],
        *,
        depth: int = 2,
        name: str = "read-ahead",
        size_of: Callable[[_Item], int] | None = None,
        memory_bytes: int = 64 << 20,
    ) -> None:
        self._shared = _Shared[_Item](depth, size_of, memory_bytes)
        self._thread = threading.Thread(target=_produce, args=(items, self._shared), name=name, daemon=True)
        self._thread.start()

    def __next__(self) -> _Item:
        return self._shared.take()

    @property
    def depth(self) -> int:
        """Items ahead, as chosen so far."""
        return self._shared.depth

    def close(self) -> None:
        """End the thread: at once, or when the read that is under way returns. Safe to call twice."""
        self._shared.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def __del__(self) -> None:
        self._shared.stop()


class _Shared(Generic[_Item]):
    """What the two threads share; it holds no reference to the consumer's side."""

    def __init__(self, depth: int, size_of: Callable[[_Item], int] | None, memory_bytes: int) -> None:
        self.depth = depth
        self._size_of, self._memory_bytes = size_of, memory_bytes
        self._largest_bytes = 0
        self._filled = False
        self._ready: deque[_Item] = deque()
        self._change = threading.Condition()
        self._stopped = self._ended = False
        self._error: BaseException | None = None

    def put(self, item: _Item) -> bool:
        """Wait for room. False: the consumer is gone."""
        with self._change:
            self._change.wait_for(lambda: self._stopped or len(self._ready) < self.depth)
            self._ready.append(item)
            self._filled |= len(self._ready) == self.depth
            self._largest_bytes = max(self._largest_bytes, self._size_of(item) if self._size_of else 0)
            self._change.notify_all()
            return not self._stopped

    def end(self, error: BaseException | None) -> None:
        """No more items come."""
        with self._change:
            self._ended, self._error = True, error
            self._change.notify_all()

    def take(self) -> _Item:
        """The next item; raises what the iterator raised, or StopIteration."""
        with self._change:
            if not self._ready:
                self._deepen()
            self._change.wait_for(lambda: self._stopped or self._ended or bool(self._ready))
            if self._ready and not self._stopped:
                item = self._ready.popleft()
                self._change.notify_all()
                return item
        if self._error is not None and not self._stopped:
            raise self._error
        raise StopIteration

    def _deepen(self) -> None:
        """Items were wanted faster than they came, for longer than the depth could make up for."""
        if self._size_of and self._filled and 2 * self.depth * self._largest_bytes <= self._memory_bytes:
            self.depth *= 2
            self._filled = False

    def stop(self) -> None:
        """The consumer wants no more."""
        with self._change:
            self._stopped = True
            self._ready.clear()
            self._change.notify_all()


def _produce(items: Iterator[_Item], shared: _Shared[_Item]) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not shared.put(item):
                break
    except BaseException as raised:  # it belongs to the consumer, whatever it is
        error = raised
    finally:
        shared.end(error)
