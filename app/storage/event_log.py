"""The event log of a driver, and the buffer of events that wait for storage.

A driver writes batches of JSON lines (`event_files`), which never change. A batch that could not be written is written
again under the same number with the same bytes, so that a put which timed out but succeeded does no harm. Later events
wait in memory meanwhile, within the limits of an `EventBuffer`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, Self

from trainwright.core.errors import StorageError, headline
from trainwright.core.events import (
    CheckpointSkipped,
    Event,
    Measured,
    MediaLogged,
    Noted,
    Prefetched,
    Printed,
    Stacks,
    Steps,
    Waiting,
)
from trainwright.core.redaction import redact_json
from trainwright.storage.event_files import batch_path
from trainwright.storage.object_store import Store

_MOST_STEP_RECORDS, _MOST_MINOR_EVENTS = 100_000, 10_000
_MINOR_EVENTS = (
    CheckpointSkipped,
    Measured,
    MediaLogged,
    Prefetched,
    Printed,
    Stacks,
    Waiting,
)  # later ones replace them
_RECORDS_PER_EVENT = 1_000
# Age of a batch when it is written: a few seconds at first, so that readers see a young run progress, then a hundredth
# of the run's age, so that a long run has few files.
_FLUSH_S, _FLUSH_MOST_S, _FLUSH_SHARE = 3.0, 30.0, 0.01
# Batches or bytes from which on files are compacted: after a checkpoint, and at any time.
_FEW, _FEW_BYTES, _MANY, _MANY_BYTES = 8, 64 << 10, 64, 4 << 20


class EventBuffer:
    """A bounded list of events. Not thread-safe.

    When there are more than `most_steps` records of steps (about 300 bytes each), every second one is dropped. When
    there are more than `most_lesser` less important events, the older half of these is dropped. All other events are
    kept: an outage brings few of them.

    Attributes:
        steps_dropped: records of steps dropped since the last `take`.
        lesser_dropped: other events dropped since the last `take`.
    """

    def __init__(self, *, most_steps: int = _MOST_STEP_RECORDS, most_lesser: int = _MOST_MINOR_EVENTS) -> None:
        self._most_steps, self._most_lesser = most_steps, most_lesser
        self._steps = self._lesser = 0
        self.items: list[Event] = []
        self.steps_dropped = self.lesser_dropped = 0

    @property
    def dropping(self) -> bool:
        """Whether events were dropped since the last `take`."""
        return bool(self.steps_dropped or self.lesser_dropped)

    def add(self, event: Event) -> None:
        """Add an event; drop older ones where there are too many."""
        self.items.append(event)
        if isinstance(event, Steps):
            self._steps += len(event.step)
            if self._steps > self._most_steps:
                self._thin()
        elif isinstance(event, _MINOR_EVENTS):
            self._lesser += 1
            if self._lesser > self._most_lesser:
                self._drop_lesser()

    def take(self) -> list[Event]:
        """Return all events and remove them."""
        items, self.items = self.items, []
        self._steps = self._lesser = self.steps_dropped = self.lesser_dropped = 0
        return items

    def _thin(self) -> None:
        self.items = thin_steps(self.items)
        step_count = sum(len(item.step) for item in self.items if isinstance(item, Steps))
        self.steps_dropped += self._steps - step_count
        self._steps = step_count

    def _drop_lesser(self) -> None:
        places = [place for place, item in enumerate(self.items) if isinstance(item, _MINOR_EVENTS)]
        dropped = set(places[: len(places) // 2])
        self.items = [item for place, item in enumerate(self.items) if place not in dropped]
        self.lesser_dropped += len(dropped)
        self._lesser -= len(dropped)


def thin_steps(events: Iterable[Event]) -> list[Event]:
    """Return the events with every second record of steps, the newest one included, joined into few events."""
    thinned: list[Event] = []
    odd = False  # whether the record before was dropped, from the newest one back
    for event in reversed(list(events)):
        if not isinstance(event, Steps):
            thinned.append(event)
            continue
        steps = event.every_second(last=not odd)
        odd = odd ^ (len(event.step) % 2 == 1)
        if not steps.step:
            continue
        newer = thinned[-1] if thinned else None
        if isinstance(newer, Steps) and newer.generation == steps.generation and len(newer.step) < _RECORDS_PER_EVENT:
            thinned[-1] = steps.followed_by(newer)
        else:
            thinned.append(steps)
    return thinned[::-1]


class EventListener(Protocol):
    """Receives every event of the run, in order, on the thread that writes it."""

    def on(self, event: Event) -> None:
        """Take one event. Must return quickly."""

    def close(self) -> None:
        """The run has ended."""


class EventLog:
    """The events of one driver: passed to listeners, and written to storage in batches by a background thread.

    Nothing is written to storage before `open` sets the driver's fencing token. Use as a context manager or call
    `close`. All methods may be called from any thread.

    Args:
        flush_s: seconds between batches of a young run.
        compact: merges the files in storage into few; called on the background thread.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        clock: Callable[[], float] = time.time,
        flush_s: float = _FLUSH_S,
        backlog: Callable[[], EventBuffer] = EventBuffer,
        compact: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._run, self._clock, self._flush_s = store, run, clock, flush_s
        self._token = self._sequence = 0
        self._events, self._pending = backlog(), backlog()
        self._sealed: bytes | None = None  # the batch that is to be written next
        self._listeners = _Listeners(self._note)
        self._compaction = _CompactionSchedule(compact, self._note)
        self._failing = self._dropping = self._committed = False
        self._lost_steps = self._lost_lesser = 0  # dropped before the batch that is to be written next
        # The first lock guards the lists. It is re-entrant: a listener may write. The second keeps batches in order.
        self._lock, self._flushing = threading.RLock(), threading.Lock()
        self._closed, self._wake = threading.Event(), threading.Event()
        self._start_s = clock()
        self._thread = threading.Thread(target=self._flush_periodically, name="trainwright-event-log", daemon=True)

    def open(self, token: int) -> None:
        """Start to write to storage, with the events so far. Called when the driver has acquired the run."""
        self._token = token
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def listen(self, listener: EventListener) -> None:
        """Call `listener.on` with each event, the events so far included.

        A listener that raises is removed, and a Noted event reports it: an observer must not end the run.
        """
        with self._lock:
            self._listeners.add(listener, self._events.items)

    def write(self, event: Event) -> Event:
        """Add an event to the next batch and pass it to the listeners. Returns it with its time filled in."""
        with self._lock:
            stamped = event if event.time_s else replace(event, time_s=self._clock())
            self._events.add(stamped.kept)
            self._pending.add(stamped.kept)
            self._listeners.tell(stamped)
            self._report_dropping()
            return stamped

    def _note(self, text: str) -> None:
        self.write(Noted(text=text))

    def flush_soon(self, *, committed: bool = False) -> None:
        """Wake the background thread to write the pending events, and return at once.

        Args:
            committed: the run log names a new checkpoint, which is a good moment to compact the files in storage.
        """
        self._committed = self._committed or committed
        self._wake.set()

    def flush(self) -> bool:
        """Write the pending events and return True; False where storage fails and the events stay pending."""
        if not self._token:
            return not self._pending.items
        with self._flushing:
            while self._seal():
                try:
                    self._store.put(batch_path(self._run, self._token, self._sequence), self._sealed or b"")
                except (StorageError, OSError) as error:
                    self._report_failing(error)
                    return False
                self._compaction.count(len(self._sealed or b""))
                self._sealed = None
                self._sequence += 1
                self._report_recovery()
            return True

    def _seal(self) -> bool:
        """Make the next batch, unless one waits to be written again. Returns False when there is nothing to write."""
        with self._lock:
            if self._sealed is None and self._pending.items:
                self._lost_steps += self._pending.steps_dropped
                self._lost_lesser += self._pending.lesser_dropped
                lines = (redact_json(event.to_json()) for event in self._pending.take())
                self._sealed = "".join(f"{line}\n" for line in lines).encode()
            return self._sealed is not None

    def _report_failing(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            self._note(f"events cannot be written to storage: {headline(error)}; they are kept and tried again")

    def _report_dropping(self) -> None:
        """Report once that events are dropped; how many is reported when storage works again."""
        if not self._dropping and self._pending.dropping:
            self._dropping = True
            self._note("too many events wait for storage: only some of these steps are kept in the records")

    def _report_recovery(self) -> None:
        """Report that a batch was written after failures, once the last batch with missing events was written."""
        with self._lock:
            if (self._failing or self._dropping) and not self._pending.dropping:
                lost = _loss_message(self._lost_steps, self._lost_lesser)
                self._failing = self._dropping = False
                self._lost_steps = self._lost_lesser = 0
                self._note(f"events are written to storage again; {lost}")

    def _flush_periodically(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self._interval_s())
            self._wake.clear()
            if not self._closed.is_set():
                committed, self._committed = self._committed, False
                if self.flush():
                    self._compaction.run_if_due(early=committed)

    def _interval_s(self) -> float:
        age_s = self._clock() - self._start_s
        return max(self._flush_s, min(_FLUSH_MOST_S, age_s * _FLUSH_SHARE))

    def close(self, *, patience_s: float = 10.0) -> bool:
        """Write the rest, then close the listeners; a failing store is tried again for `patience_s`.

        Returns False where some events could not be written: they are lost when the process ends, and listeners are
        told so. A second call repeats only what failed.
        """
        self._closed.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        written = self._flush_until(patience_s)
        if written:
            self._compaction.run_if_due(early=True)
        elif self._token:
            with self._lock:
                count = len(self._pending.items) + (self._sealed or b"").count(b"\n")
            self._note(f"the last {count:,} events could not be written to storage and are lost")
        self._listeners.close()
        return written and self.flush()

    def _flush_until(self, patience_s: float) -> bool:
        deadline_s, pause = time.monotonic() + patience_s, threading.Event()
        while not (written := self.flush()) and self._token and time.monotonic() < deadline_s:
            pause.wait(min(0.5, patience_s))
        return written


class _Listeners:
    """The listeners of an event log. One that raises is removed."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._listeners: list[EventListener] = []
        self._note = note

    def add(self, listener: EventListener, events: Iterable[Event]) -> None:
        """Add a listener and pass it the events so far."""
        self._listeners.append(listener)
        for event in tuple(events):
            self._tell(listener, event)

    def tell(self, event: Event) -> None:
        """Pass an event to all listeners."""
        for listener in tuple(self._listeners):
            self._tell(listener, event)

    def close(self) -> None:
        """Close and remove all listeners."""
        for listener in tuple(self._listeners):
            try:
                listener.close()
                self._listeners.remove(listener)
            except Exception as error:
                self._remove(listener, error)

    def _tell(self, listener: EventListener, event: Event) -> None:
        if listener in self._listeners:
            try:
                listener.on(event)
            except Exception as error:
                self._remove(listener, error)

    def _remove(self, listener: EventListener, error: Exception) -> None:
        self._listeners.remove(listener)
        cause = f"{type(error).__name__}: {error}"
        self._note(f"{type(listener).__name__} failed and is switched off; training continues: {cause}")


class _CompactionSchedule:
    """Compacts the files in storage when many batches or bytes were written since the last time."""

    def __init__(self, compact: Callable[[], object], note: Callable[[str], object]) -> None:
        self._compact, self._note = compact, note
        self._batches = self._bytes = 0
        self._failed = False

    def count(self, size_bytes: int) -> None:
        """Count a batch that was written."""
        self._batches, self._bytes = self._batches + 1, self._bytes + size_bytes

    def run_if_due(self, *, early: bool) -> None:
        """Compact when there is enough to compact; with `early` when there is at least something."""
        batches, most_bytes = (_FEW, _FEW_BYTES) if early else (_MANY, _MANY_BYTES)
        if self._batches >= batches or self._bytes >= most_bytes:
            self._batches = self._bytes = 0
            try:
                self._compact()
            except (StorageError, OSError) as error:
                if not self._failed:
                    self._failed = True
                    self._note(f"events in storage cannot be compacted: {headline(error)}; they stay as they are")


def _loss_message(steps: int, lesser: int) -> str:
    """`the records of 12 steps and 3 lesser events did not fit into memory and are lost`."""
    parts = [f"the records of {steps:,} steps"] if steps else []
    parts += [f"{lesser:,} lesser events"] if lesser else []
    return f"{' and '.join(parts)} did not fit into memory and are lost" if parts else "none was lost"
