"""Reading ahead in a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
_JOIN_S = 30.0


class ReadAhead(Generic[Item], Iterator[Item]):
    """Runs an iterator in a thread of its own, up to `depth` items ahead.

    What the iterator raises is raised in the consumer, after the items before it. `close` ends the thread; it is also
    called when nobody holds the object any more.
    """

    def __init__(self, items: Iterator[Item], *, depth: int = 2, name: str = "read-ahead") -> None:
        self._shared = _Shared[Item](depth)
        self._thread = threading.Thread(target=_produce, args=(items, self._shared), name=name, daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        return self._shared.take()

    def close(self) -> None:
        """End the thread: at once, or when the read that is under way returns. Safe to call twice."""
        self._shared.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def __del__(self) -> None:
        self._shared.stop()


class _Shared(Generic[Item]):
    """What the two threads share; it holds no reference to the consumer's side."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._change = threading.Condition()
        self._stopped = self._ended = False
        self._error: BaseException | None = None

    def put(self, item: Item) -> bool:
        """Wait for room. False: the consumer is gone."""
        with self._change:
            self._change.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
            self._ready.append(item)
            self._change.notify_all()
            return not self._stopped

    def end(self, error: BaseException | None) -> None:
        """No more items come."""
        with self._change:
            self._ended, self._error = True, error
            self._change.notify_all()

    def take(self) -> Item:
        """The next item; raises what the iterator raised, or StopIteration."""
        with self._change:
            self._change.wait_for(lambda: self._stopped or self._ended or bool(self._ready))
            if self._ready and not self._stopped:
                item = self._ready.popleft()
                self._change.notify_all()
                return item
        if self._error is not None and not self._stopped:
            raise self._error
        raise StopIteration

    def stop(self) -> None:
        """The consumer wants no more."""
        with self._change:
            self._stopped = True
            self._ready.clear()
            self._change.notify_all()


def _produce(items: Iterator[Item], shared: _Shared[Item]) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not shared.put(item):
                break
    except BaseException as raised:  # it belongs to the consumer, whatever it is
        error = raised
    finally:
        shared.end(error)
