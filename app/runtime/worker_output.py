"""Polls workers for completed steps and printed lines, and turns them into events."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from trainwright.core import events
from trainwright.core.topology import Generation
from trainwright.driver import messages as m
from trainwright.runtime.event_queue import EventQueue
from trainwright.runtime.takeover import DriverLease
from trainwright.runtime.worker_registry import WorkerRegistry

_POLL_S = 0.2
_WATCH_S = 5.0
_VERBS_AFTER_PRINTS = ("run", "evaluate")  # verbs whose answers follow what was printed meanwhile


class WorkerOutput:
    """Completed steps of one worker and printed lines of another.

    Args:
        workers: actors of the run.
        queue: that gets the driver's events.
        lease: of the driver.
        emit: takes each event of the run.
        together: whether all ranks step together, so that each knows every step.

    Attributes:
        reported: newest step that was reported.
    """

    def __init__(
        self,
        workers: WorkerRegistry,
        queue: EventQueue,
        lease: DriverLease,
        emit: Callable[[events.Event], object],
        *,
        together: bool,
    ) -> None:
        self._workers, self._queue, self._lease, self._emit = workers, queue, lease, emit
        self._together = together
        self.reported = 0
        self._watched: tuple[int, Generation] | None = None
        self._speaker: tuple[int, int] | None = None  # the worker whose prints are shown, and its rank

    def restart_at(self, step: int) -> None:
        """Report steps after this one again, and choose the worker to poll anew."""
        self.reported, self._watched = min(self.reported, step), None

    def deliver(self, call: m.CallWorker, event: m.CallReturned | m.CallRaised) -> None:
        """Put the answer to a call, after the prints and steps that came before it."""
        failed = isinstance(event, m.CallRaised)
        speaks = self._speaker is not None and self._speaker[0] == call.worker
        if speaks and (failed or call.verb in _VERBS_AFTER_PRINTS):
            self._flush_prints(lambda: self._deliver_after_steps(call, event))
        else:
            self._deliver_after_steps(call, event)

    def _deliver_after_steps(self, call: m.CallWorker, event: m.CallReturned | m.CallRaised) -> None:
        raised = event if isinstance(event, m.CallRaised) and self._together else None
        knows = raised is not None and not 0 <= raised.failure.step <= self.reported
        if call.verb == "run" and (knows or self._watched == (call.worker, call.generation)):
            self._flush_steps(event)
        else:
            self._queue.put(event)

    def listen_to(self, call: m.CallWorker) -> None:
        """Print the output of the first rank that runs the job's functions, from the rendezvous on."""
        group = call.argument
        first = next((peer.rank for peer in group.peers if peer.role in ("worker", "chief")), 0)
        known = self._speaker is not None and self._speaker[0] == call.worker
        if group.rank == first and not known:
            self._speaker = (call.worker, first)
            self._ask_prints(self._speaker)
        elif group.rank != first and known:
            self._speaker = None

    def _ask_prints(self, speaker: tuple[int, int]) -> None:
        actor = self._workers.actor(speaker[0])
        if actor is not None and self._speaker == speaker:
            self._queue.then(actor.printed.remote(_WATCH_S, self._lease.token), lambda done: self._spoke(speaker, done))

    def _spoke(self, speaker: tuple[int, int], done: Future[Any]) -> None:
        """Print the lines and poll again; the answer to `live` reports the end of the worker."""
        if done.exception() is None:
            self._emit_prints(speaker[1], done.result())
            self._queue.later(_POLL_S, lambda: self._ask_prints(speaker))

    def _flush_prints(self, then: Callable[[], None]) -> None:
        """Print the last lines of the rank that is listened to, then call `then`."""
        assert self._speaker is not None, "somebody is listened to"
        worker, rank = self._speaker
        actor = self._workers.actor(worker)

        def told(done: Future[Any]) -> None:
            if done.exception() is None:
                self._emit_prints(rank, done.result())
            then()

        if actor is None:
            then()
        else:
            self._queue.then(actor.printed.remote(0.0, self._lease.token), told)

    def _emit_prints(self, rank: int, lines: list[str]) -> None:
        for line in lines:
            self._emit(events.Printed(rank=rank, line=line))

    def watch(self, call: m.CallWorker) -> None:
        """Poll the oldest worker of a rendezvous epoch for completed steps: it knows all of them.

        If ranks step independently, rank 0 is polled, which is called first.
        """
        watched = self._watched
        older = watched is not None and watched[0] > call.worker and self._together
        if watched is None or watched[1] != call.generation or older:
            self._watched = (call.worker, call.generation)
            self._ask(self._watched)

    def _ask(self, watched: tuple[int, Generation]) -> None:
        actor = self._workers.actor(watched[0])
        if actor is not None and self._watched == watched:
            news = actor.watch.remote(self.reported, _WATCH_S, self._lease.token)
            self._queue.then(news, lambda done: self._heard(watched, done))

    def _heard(self, watched: tuple[int, Generation], done: Future[Any]) -> None:
        """Report the steps and poll again."""
        if done.exception() is not None:
            self._workers.died(watched[0], done.exception())
        elif self._watched == watched:
            self._report(watched[1], done.result())
            self._queue.later(_POLL_S, lambda: self._ask(watched))

    def _flush_steps(self, event: m.CallReturned | m.CallRaised) -> None:
        """Report the last steps of a segment, then put the event that ends it."""

        def told(done: Future[Any]) -> None:
            if done.exception() is not None:
                self._workers.died(event.worker, done.exception())
            else:
                self._report(event.generation, done.result())
                self._queue.put(event)

        actor = self._workers.actor(event.worker)
        if actor is not None:
            self._queue.then(actor.watch.remote(self.reported, 0.0, self._lease.token), told)

    def _report(self, generation: Generation, news: events.Steps) -> None:
        fresh = news.after(self.reported)
        if fresh.step:
            self.reported = fresh.step[-1]
            self._emit(fresh)
            self._queue.put(m.StepsCompleted(generation=generation, step=self.reported, losses=tuple(fresh.loss)))
