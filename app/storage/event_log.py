"""Events on their way to storage.

One driver writes batches of JSON lines (`eventfiles`), which never change once they are written. A batch that could not
be written is kept and written again under the same number with the same bytes, so that a put which timed out and landed
after all does no harm. What happens meanwhile waits in memory, within the bounds of a `EventBuffer`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, Self

from trainwright.core.errors import StorageError, TrainwrightError
from trainwright.core.events import (
    CheckpointSkipped,
    Event,
    Measured,
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
_MINOR_EVENTS = (CheckpointSkipped, Measured, Prefetched, Printed, Stacks, Waiting)  # others say as much
_RECORDS_PER_EVENT = 1_000  # records of one event


class EventBuffer:
    """A list of events. One thread at a time.

    Records of steps (about 300 bytes each) are thinned when there are more than `most_steps`: every second one goes,
    the older ones again each time. Of events that matter less, the older half goes when there are more than
    `most_lesser`. All others are kept: there are few in any outage.

    Attributes:
        items: in the order they were added.
        steps_dropped: records of steps that went, since the last `take`.
        lesser_dropped: other events that went, since the last `take`.
    """

    def __init__(self, *, most_steps: int = _MOST_STEP_RECORDS, most_lesser: int = _MOST_MINOR_EVENTS) -> None:
        self._most_steps, self._most_lesser = most_steps, most_lesser
        self._steps = self._lesser = 0
        self.items: list[Event] = []
        self.steps_dropped = self.lesser_dropped = 0

    @property
    def dropping(self) -> bool:
        """Whether any went."""
        return bool(self.steps_dropped or self.lesser_dropped)

    def add(self, event: Event) -> None:
        """One more event; drops older ones where that is needed."""
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
        """All events, which are no longer here."""
        taken, self.items = self.items, []
        self._steps = self._lesser = self.steps_dropped = self.lesser_dropped = 0
        return taken

    def _thin(self) -> None:
        self.items = thin_steps(self.items)
        left = sum(len(item.step) for item in self.items if isinstance(item, Steps))
        self.steps_dropped += self._steps - left
        self._steps = left

    def _drop_lesser(self) -> None:
        places = [place for place, item in enumerate(self.items) if isinstance(item, _MINOR_EVENTS)]
        gone = set(places[: len(places) // 2])
        self.items = [item for place, item in enumerate(self.items) if place not in gone]
        self.lesser_dropped += len(gone)
        self._lesser -= len(gone)


def thin_steps(events: Iterable[Event]) -> list[Event]:
    """The same events with every second record of steps, the newest one included, in few events."""
    found: list[Event] = []
    odd = False  # whether the record before was dropped, from the newest one back
    for event in reversed(list(events)):
        if not isinstance(event, Steps):
            found.append(event)
            continue
        kept = event.every_second(last=not odd)
        odd = odd ^ (len(event.step) % 2 == 1)
        if not kept.step:
            continue
        newer = found[-1] if found else None
        if isinstance(newer, Steps) and newer.generation == kept.generation and len(newer.step) < _RECORDS_PER_EVENT:
            found[-1] = kept.followed_by(newer)
        else:
            found.append(kept)
    return found[::-1]


# --- Event log --------------------------------------------------------------------------------------------------------


# A batch is at most this old when it is written: seconds at first, so that a reader sees a young run move, then a
# hundredth of the run's age, so that a long run has few files.
_FLUSH_S, _FLUSH_MOST_S, _FLUSH_SHARE = 3.0, 30.0, 0.01
# So many batches or bytes are compacted: at a checkpoint, and at any time.
_FEW, _FEW_BYTES, _MANY, _MANY_BYTES = 8, 64 << 10, 64, 4 << 20


class EventListener(Protocol):
    """Hears every event of the run, in order, on the thread that writes it."""

    def on(self, event: Event) -> None:
        """Take one event; must be quick."""

    def close(self) -> None:
        """The run has ended."""


class EventLog:
    """One driver's events: kept for listeners, written to storage in batches by a thread of its own.

    Until `open` names the driver's token nothing is written. Use as a context manager or call `close`. All methods
    may be called from any thread.

    Args:
        store: where to write; only `put` is used.
        run: name of the run.
        clock: seconds since the epoch.
        flush_s: seconds between batches of a young run.
        backlog: makes a list of events that is bounded.
        compact: makes few files of the many in storage; it is called now and then, on the thread that writes.
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
        self._token = 0
        self._events, self._pending = backlog(), backlog()
        self._listeners: list[EventListener] = []
        self._sealed: bytes | None = None
        self._compact, self._committed = compact, False
        self._sequence = self._compacted = self._loose_bytes = 0
        self._failing = self._dropping = self._uncompacted = False
        self._lost_steps = self._lost_lesser = 0  # dropped before the batch that is on its way
        # Guards the lists; re-entrant, because a listener may write. The second lock keeps batches in order.
        self._lock, self._flushing = threading.RLock(), threading.Lock()
        self._closed, self._wake = threading.Event(), threading.Event()
        self._began_s = clock()
        self._thread = threading.Thread(target=self._flush_now_and_then, name="trainwright-journal", daemon=True)

    def open(self, token: int) -> None:
        """The log is ours: write to storage from now on, what was kept until here included."""
        self._token = token
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

    def listen(self, listener: EventListener) -> None:
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

    def _tell(self, listener: EventListener, event: Event) -> None:
        if listener in self._listeners:
            try:
                listener.on(event)
            except Exception as error:
                self._take_off(listener, error)

    def _take_off(self, listener: EventListener, error: Exception) -> None:
        self._listeners.remove(listener)
        cause = f"{type(error).__name__}: {error}"
        self.write(Noted(text=f"{type(listener).__name__} is switched off, training is not: {cause}"))

    def flush_soon(self, *, committed: bool = False) -> None:
        """Let the thread write what is pending, now, and return at once.

        Args:
            committed: the log names a new checkpoint: a good moment to compact what is in storage.
        """
        self._committed = self._committed or committed
        self._wake.set()

    def flush(self) -> bool:
        """Write what is pending and return when it is there. False: it could not be, and is kept."""
        if not self._token:
            return not self._pending.items
        with self._flushing:
            while self._seal():
                try:
                    self._store.put(batch_path(self._run, self._token, self._sequence), self._sealed or b"")
                except (StorageError, OSError) as error:
                    self._say_failing(error)
                    return False
                self._loose_bytes += len(self._sealed or b"")
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
                lines = (redact_json(event.to_json()) for event in self._pending.take())
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
                lost = _loss_message(self._lost_steps, self._lost_lesser)
                self._failing = self._dropping = False
                self._lost_steps = self._lost_lesser = 0
                self.write(Noted(text=f"events are written to storage again; {lost}"))

    def _flush_now_and_then(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self._interval_s())
            self._wake.clear()
            if not self._closed.is_set():
                committed, self._committed = self._committed, False
                if self.flush():
                    self._compact_if_due(at_leisure=committed)

    def _compact_if_due(self, *, at_leisure: bool) -> None:
        count, most_bytes = (_FEW, _FEW_BYTES) if at_leisure else (_MANY, _MANY_BYTES)
        if self._sequence - self._compacted >= count or self._loose_bytes >= most_bytes:
            self._compacted, self._loose_bytes = self._sequence, 0
            try:
                self._compact()
            except (StorageError, OSError) as error:
                if not self._uncompacted:
                    self._uncompacted = True
                    what = error.what if isinstance(error, TrainwrightError) else str(error)
                    self.write(Noted(text=f"events in storage cannot be compacted: {what}; they stay as they are"))

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
        if written:
            self._compact_if_due(at_leisure=True)
        elif self._token:
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
        while not (written := self.flush()) and self._token and time.monotonic() < deadline_s:
            pause.wait(min(0.5, patience_s))
        return written


def _loss_message(steps: int, lesser: int) -> str:
    """What was dropped, in words."""
    parts = [f"the records of {steps:,} steps"] if steps else []
    parts += [f"{lesser:,} lesser events"] if lesser else []
    return f"{' and '.join(parts)} did not fit into memory and are lost" if parts else "none was lost"
