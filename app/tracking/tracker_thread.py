"""Sends a run to a tracker from a separate thread: a slow or failing tracker neither slows nor ends training."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainwright.core.events import Checkpointed, Evaluated, Event, RunEnded, RunStarted, Steps
from trainwright.core.redaction import redact
from trainwright.reporting.plan_view import plan_from
from trainwright.storage.object_store import Store
from trainwright.tracking.experiment_trackers import Row, RunResult, TrackedRun, Tracker
from trainwright.tracking.tensorboard import step_scalars

_MOST_WAITING_STEPS = 10_000  # steps that wait for a slow tracker
_CLOSE_TIMEOUT_S = 30.0  # for the last rows when the run has ended
_EMPTY = ("", "()", "None")
_RELEVANT_EVENTS = (RunStarted, Steps, Evaluated, Checkpointed, RunEnded)


class TrackerThread:
    """An event listener that sends the run to one tracker.

    Args:
        tracker: the tracker.
        store: where the run is stored; also keeps the identity of the tracker's record.
        run: name of the run.
        say: reports a line in the run.
        room_steps: limit of steps that wait; further steps are dropped, which is reported.
        patience_s: how long to wait for the tracker when the run has ended.
    """

    def __init__(
        self,
        tracker: Tracker,
        store: Store,
        run: str,
        *,
        say: Callable[[str], object],
        room_steps: int = _MOST_WAITING_STEPS,
        patience_s: float = _CLOSE_TIMEOUT_S,
    ) -> None:
        self._tracker, self._store, self._run, self._say = tracker, store, run, say
        self._name = type(tracker).__name__
        self._room_steps, self._patience_s = room_steps, patience_s
        self._change = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._waiting_steps = 0
        self._closing = self._off = self._lagging = False
        self._taken = _TrackerPosition()
        self._thread = threading.Thread(target=self._work, name=f"trainwright-{self._name}", daemon=True)

    def on(self, event: Event) -> None:
        """Queue an event for the thread."""
        if self._off or not isinstance(event, _RELEVANT_EVENTS):
            return
        with self._change:
            steps = len(event.step) if isinstance(event, Steps) else 0
            full = bool(steps) and self._waiting_steps + steps > self._room_steps
            if not full:
                self._waiting.append(event)
                self._waiting_steps += steps
                self._change.notify()
        if isinstance(event, RunStarted):
            self._thread.start()
        if full and not self._lagging:
            self._lagging = True
            self._say(f"the tracker {self._name} is too slow: some steps are not sent to it; training continues")

    def close(self) -> None:
        """Wait for the tracker, for a limited time."""
        with self._change:
            self._closing = True
            self._change.notify()
        if self._thread.ident is None:
            return  # the run did not start
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            self._off = True
            late = f"did not finish within {self._patience_s:.0f} s after the end of the run"
            self._say(f"the tracker {self._name} {late}; its last rows may be missing")

    def _work(self) -> None:
        try:
            while (events := self._next()) is not None:
                self._tell(events)
            self._tracker.end(self._taken.ending(self._store, self._run))
        except Exception as error:  # a tracker may raise any exception
            self._off = True
            cause = redact(f"{type(error).__name__}: {error}".strip())
            self._say(f"the tracker {self._name} failed and is switched off; training continues: {cause[:500]}")

    def _next(self) -> list[Event] | None:
        """Wait for events and return them; None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closing)
            events = list(self._waiting)
            self._waiting.clear()
            self._waiting_steps = 0
        return events or None

    def _tell(self, events: list[Event]) -> None:
        rows: list[Row] = []
        for event in events:
            if isinstance(event, RunStarted):
                known = TrackedRun(name=self._run, id=_identity(self._store, event), total_steps=event.total_steps)
                self._taken.begin(self._tracker.begin(known, params_of(event)))
            rows += self._taken.rows(event)
        if rows and not self._off:
            self._tracker.log(rows)


class _TrackerPosition:
    """What a tracker has recorded, so that each step is sent once, and the result for the end."""

    def __init__(self) -> None:
        self._step = self._evaluated = 0
        self._end = RunEnded(outcome="failed")
        self._checkpoint = ""

    def begin(self, step: int | None) -> None:
        """Set the last recorded step. The evaluation after this step may be missing."""
        self._step, self._evaluated = step or 0, (step or 0) - 1

    def rows(self, event: Event) -> Iterator[Row]:
        """Yield the rows of an event that are not recorded yet."""
        match event:
            case Steps():
                for step, values in step_scalars(event):
                    if step > self._step:
                        self._step = step
                        yield Row(step=step, time_s=event.time_s, values=values)
            case Evaluated() if event.step > self._evaluated:
                self._evaluated = event.step
                values = {f"evaluation/{name}": value for name, value in event.metrics.items() if value == value}
                yield Row(step=event.step, time_s=event.time_s, values=values)
            case Checkpointed():
                self._checkpoint = event.path
            case RunEnded():
                self._end = event

    def ending(self, store: Store, run: str) -> RunResult:
        """Return how the session of the driver ended."""
        paths = {"folder": run, "report": f"{run}/report.html"}
        if self._checkpoint:
            paths["checkpoint"] = f"{run}/{self._checkpoint}"
        state: Any = self._end.outcome
        return RunResult(state=state, links={name: redact(store.uri_of(path)) for name, path in paths.items()})


def params_of(event: RunStarted) -> Mapping[str, str]:
    """Return the facts of job and plan that are not empty."""
    plan = plan_from(event.plan)
    facts = {"plan": plan.name, "workers": str(plan.workers)} if plan else {}
    job = {f"job.{name}": str(value) for name, value in event.shown_job.items() if str(value) not in _EMPTY}
    return {name: redact(value) for name, value in {**job, **facts, "cluster": event.cluster}.items() if value}


def _identity(store: Store, event: RunStarted) -> str:
    """Return the identity of a run since its last fresh start: created by the first driver, read by later ones."""
    folder = f"{event.run}/trackers/"
    tokens = [int(path.rpartition("/")[2]) for path, _ in store.list(folder)]
    token = event.token if event.fresh else max(tokens, default=event.token)
    path = f"{folder}{token:08d}"
    store.create(path, f"{event.run}-{uuid.uuid4().hex[:8]}".encode())  # unless the thread of another tracker did
    return store.get(path).decode()
