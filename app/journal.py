"""Events on their way to storage and back.

One driver writes `<run>/events/<token>-<seq>.jsonl`: batches of JSON lines, numbered from 0, never changed once they
are written. A batch that could not be written is kept and written again under the same number with the same bytes, so
that a put which timed out and landed after all does no harm. What happens meanwhile waits in memory, within the bounds
of a `Backlog`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, Self

from trainwright.backlog import Backlog
from trainwright.core.errors import StorageError, TrainwrightError
from trainwright.core.events import Event, Noted, from_json
from trainwright.core.secrets import json_without_secrets

# A batch is at most this old when it is written: seconds at first, so that a reader sees a young run move, then a
# hundredth of the run's age, so that a long run has few files.
_FLUSH_S, _FLUSH_MOST_S, _FLUSH_SHARE = 3.0, 30.0, 0.01
_READERS = 16
_NAME = re.compile(r"(\d+)-(\d+)\.jsonl")


class Puts(Protocol):
    """What a journal asks of a store."""

    def put(self, path: str, data: bytes) -> None:
        """Write a whole file; raises StorageError."""


class Listener(Protocol):
    """Hears every event of the run, in order, on the thread that writes it."""

    def on(self, event: Event) -> None:
        """Take one event; must be quick."""

    def close(self) -> None:
        """The run has ended."""


class Reads(Protocol):
    """What readers of events ask of a store."""

    def get(self, path: str) -> bytes:
        """A whole file; raises StorageError."""

    def list(self, prefix: str) -> Iterable[tuple[str, int]]:
        """Paths below a prefix, with sizes in bytes; raises StorageError."""


class Journal:
    """One driver's events: kept for listeners, written to storage in batches by a thread of its own.

    Until `open` names the driver's token nothing is written. Use as a context manager or call `close`. All methods
    may be called from any thread.

    Args:
        store: where to write; only `put` is used.
        run: name of the run.
        clock: seconds since the epoch.
        flush_s: seconds between batches of a young run.
        backlog: makes a list of events that is bounded.
    """

    def __init__(
        self,
        store: Puts,
        run: str,
        *,
        clock: Callable[[], float] = time.time,
        flush_s: float = _FLUSH_S,
        backlog: Callable[[], Backlog] = Backlog,
    ) -> None:
        self._store, self._run, self._clock, self._flush_s = store, run, clock, flush_s
        self._prefix = ""
        self._events, self._pending = backlog(), backlog()
        self._listeners: list[Listener] = []
        self._sealed: bytes | None = None
        self._sequence = 0
        self._failing = self._dropping = False
        self._lost_steps = self._lost_lesser = 0  # dropped before the batch that is on its way
        # Guards the lists; re-entrant, because a listener may write. The second lock keeps batches in order.
        self._lock, self._flushing = threading.RLock(), threading.Lock()
        self._closed, self._wake = threading.Event(), threading.Event()
        self._began_s = clock()
        self._thread = threading.Thread(target=self._flush_now_and_then, name="trainwright-journal", daemon=True)

    def open(self, token: int) -> None:
        """The log is ours: write to storage from now on, what was kept until here included."""
        self._prefix = f"{self._run}/events/{token:08d}"
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def events(self) -> tuple[Event, ...]:
        """All events of this driver so far; of a long run, steps are sparse."""
        with self._lock:
            return tuple(self._events.items)

    def listen(self, listener: Listener) -> None:
        """Call `listener.on` with each event, those already written first.

        A listener that raises is taken off, and a Noted event says so: what watches a run must not end it.
        """
        with self._lock:
            self._listeners.append(listener)
            for event in tuple(self._events.items):
                self._tell(listener, event)

    def write(self, event: Event) -> Event:
        """Keep an event for the next batch and tell the listeners; returns it with its time filled in."""
        with self._lock:
            stamped = event if event.time_s else replace(event, time_s=self._clock())
            self._events.add(stamped)
            self._pending.add(stamped)
            for listener in tuple(self._listeners):
                self._tell(listener, stamped)
            self._say_dropping()
            return stamped

    def _tell(self, listener: Listener, event: Event) -> None:
        if listener in self._listeners:
            try:
                listener.on(event)
            except Exception as error:
                self._take_off(listener, error)

    def _take_off(self, listener: Listener, error: Exception) -> None:
        self._listeners.remove(listener)
        cause = f"{type(error).__name__}: {error}"
        self.write(Noted(text=f"{type(listener).__name__} is switched off, training is not: {cause}"))

    def flush_soon(self) -> None:
        """Let the thread write what is pending, now, and return at once: the driver does so at each commit."""
        self._wake.set()

    def flush(self) -> bool:
        """Write what is pending and return when it is there. False: it could not be, and is kept."""
        if not self._prefix:
            return not self._pending.items
        with self._flushing:
            while self._seal():
                try:
                    self._store.put(f"{self._prefix}-{self._sequence:06d}.jsonl", self._sealed or b"")
                except (StorageError, OSError) as error:
                    self._say_failing(error)
                    return False
                self._sealed = None
                self._sequence += 1
                self._say_mended()
            return True

    def _seal(self) -> bool:
        """Make the next batch, if none is waiting to be written again; False when there is nothing to write."""
        with self._lock:
            if self._sealed is None and self._pending.items:
                self._lost_steps += self._pending.steps_dropped
                self._lost_lesser += self._pending.lesser_dropped
                lines = (json_without_secrets(event.to_json()) for event in self._pending.take())
                self._sealed = "".join(f"{line}\n" for line in lines).encode()
            return self._sealed is not None

    def _say_failing(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            what = error.what if isinstance(error, TrainwrightError) else str(error)
            self.write(Noted(text=f"events cannot be written to storage: {what}; they are kept and tried again"))

    def _say_dropping(self) -> None:
        """Said once, when it begins; what went is said when the store takes events again."""
        if not self._dropping and self._pending.dropping:
            self._dropping = True
            self.write(Noted(text="too many events wait for storage: of these steps only some are kept in the records"))

    def _say_mended(self) -> None:
        """A batch is there. Where events were dropped, the one they are missing from is still to come."""
        with self._lock:
            if (self._failing or self._dropping) and not self._pending.dropping:
                lost = _lost(self._lost_steps, self._lost_lesser)
                self._failing = self._dropping = False
                self._lost_steps = self._lost_lesser = 0
                self.write(Noted(text=f"events are written to storage again; {lost}"))

    def _flush_now_and_then(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self._interval_s())
            self._wake.clear()
            if not self._closed.is_set():
                self.flush()

    def _interval_s(self) -> float:
        age_s = self._clock() - self._began_s
        return max(self._flush_s, min(_FLUSH_MOST_S, age_s * _FLUSH_SHARE))

    def close(self, *, patience_s: float = 10.0) -> bool:
        """Write the rest, then close the listeners; a failing store is tried again for `patience_s`.

        False: some events could not be written, and are lost when the process ends; listeners are told. A second call
        does nothing new.
        """
        self._closed.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        written = self._flush_patiently(patience_s)
        if not written and self._prefix:
            self._say_lost()
        for listener in tuple(self._listeners):
            try:
                listener.close()
                self._listeners.remove(listener)
            except Exception as error:
                self._take_off(listener, error)
        return written and self.flush()

    def _say_lost(self) -> None:
        with self._lock:
            count = len(self._pending.items) + (self._sealed or b"").count(b"\n")
        self.write(Noted(text=f"the last {count:,} events could not be written to storage and are lost"))

    def _flush_patiently(self, patience_s: float) -> bool:
        deadline_s, pause = time.monotonic() + patience_s, threading.Event()
        while not (written := self.flush()) and self._prefix and time.monotonic() < deadline_s:
            pause.wait(min(0.5, patience_s))
        return written


class EventReader:
    """Reads a run's events from storage, each of them once: call `read` again for what came since."""

    def __init__(self, store: Reads, run: str) -> None:
        self._store, self._prefix = store, f"{run}/events/"
        self._seen: set[str] = set()

    def read(self) -> list[Event]:
        """Events of the batches that are new, in order of (token, number of the batch).

        A batch that is torn, which the last one of a dead driver may be, gives the events before the tear and a
        Noted event that says so. Raises StorageError when the store cannot be read.
        """
        names = self._new_names()
        self._seen.update(names)
        paths = [self._prefix + name for name in names]
        if len(paths) < 2:
            batches = [self._store.get(path) for path in paths]
        else:
            with ThreadPoolExecutor(min(_READERS, len(paths))) as pool:
                batches = list(pool.map(self._store.get, paths))
        return [event for path, data in zip(paths, batches, strict=True) for event in _parse(path, data)]

    def _new_names(self) -> list[str]:
        names = {path.rsplit("/", 1)[-1] for path, _ in self._store.list(self._prefix)} - self._seen
        return sorted((name for name in names if _NAME.fullmatch(name)), key=_order)


class Adds(Reads, Protocol):
    """What `append` asks of a store."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a whole file unless there is one; raises StorageError."""


def append(store: Adds, run: str, event: Event) -> Event:
    """Add what came to light after a run ended to what its last driver told. Raises StorageError."""
    stamped = event if event.time_s else replace(event, time_s=time.time())
    names = [path.rsplit("/", 1)[-1] for path, _ in store.list(f"{run}/events/")]
    token, sequence = max((_order(name) for name in names if _NAME.fullmatch(name)), default=(0, -1))
    while not store.create(f"{run}/events/{token:08d}-{sequence + 1:06d}.jsonl", f"{stamped.to_json()}\n".encode()):
        sequence += 1
    return stamped


def read_events(store: Reads, run: str) -> list[Event]:
    """All events of a run, of all its drivers, in order; see `EventReader.read`."""
    return EventReader(store, run).read()


def _lost(steps: int, lesser: int) -> str:
    """What was dropped, in words."""
    parts = [f"the records of {steps:,} steps"] if steps else []
    parts += [f"{lesser:,} lesser events"] if lesser else []
    return f"{' and '.join(parts)} did not fit into memory and are lost" if parts else "none was lost"


def _order(name: str) -> tuple[int, int]:
    token, sequence = name.removesuffix(".jsonl").split("-")
    return int(token), int(sequence)


def _parse(path: str, data: bytes) -> list[Event]:
    """Events of one batch, up to the first line that cannot be read."""
    events: list[Event] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            events.append(from_json(line.decode()))
        except (ValueError, TypeError):
            time_s = events[-1].time_s if events else 0.0
            text = f"{path} cannot be read from line {number} on: the events there are lost, training is not"
            return [*events, Noted(time_s=time_s, text=text)]
    return events
