"""Carries out the driver's effects: actors, timers, the run log. Each answers with an event on one queue."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from trainwright.core import events
from trainwright.driver import messages as m
from trainwright.ray_cluster.placement_groups import WorkerPlacement
from trainwright.runtime.event_queue import EventQueue
from trainwright.runtime.run_storage import RunStorage
from trainwright.runtime.takeover import DriverLease, TakenOverActors, take_over
from trainwright.runtime.worker_actor import ArgumentPickler
from trainwright.runtime.worker_output import WorkerOutput
from trainwright.runtime.worker_registry import WorkerRegistry
from trainwright.storage.run_store import RunStore
from trainwright.worker.worker_config import WorkerConfig


class EffectExecutor:
    """Carries out effects and collects events, on one thread: callbacks of other threads only queue.

    Args:
        order: what every worker gets.
        ledger: the run's log.
        emit: takes each event of the run.
        elastic: the number of workers may change.
        fresh: the run starts again: surviving processes are ended.
        room: placement of the workers; by default placement groups of Ray.
    """

    def __init__(
        self,
        order: WorkerConfig,
        ledger: RunStore,
        emit: Callable[[events.Event], object],
        *,
        elastic: bool = False,
        fresh: bool = False,
        room: WorkerPlacement | None = None,
    ) -> None:
        self._arguments = ArgumentPickler()
        self._ledger, self._emit, self._fresh = ledger, emit, fresh
        self._lease = DriverLease(ledger, lambda: self._workers.all_actors())
        self._queue = EventQueue(self._lease)
        self._workers = WorkerRegistry(order, self._queue, self._lease, self._note, elastic=elastic, room=room)
        together = order.plan.topology == "collective"
        self._output = WorkerOutput(self._workers, self._queue, self._lease, emit, together=together)
        self._storage = RunStorage(ledger, self._queue, uri=order.storage, note=self._note)

    def put(self, event: m.DriverEvent) -> None:
        """Add an event; from any thread."""
        self._queue.put(event)

    def next(self) -> m.DriverEvent:
        """Wait for the next event; a timer that runs out is one. A driver that was replaced gets LeaseLost only."""
        return self._queue.next()

    def carry_out(self, effect: m.Effect) -> None:
        """Start one effect; never blocks for long. The caller handles FinishRun."""
        match effect:
            case m.AcquireLease():
                self._storage.submit(self._acquire)
            case m.StartWorker() if effect.after_s:
                self._queue.later(effect.after_s, lambda: self._workers.place(effect))
            case m.StartWorker():
                self._workers.place(effect)
            case m.KillWorker():
                self._workers.kill(effect.worker)
            case m.ExcludeNode():
                self._workers.exclude_node(effect.worker)
            case m.CallWorker():
                self._call(effect)
            case m.CommitCheckpoint():
                self._storage.commit(effect)
            case m.ReleaseLease():
                self._storage.release(effect)
            case m.MarkComplete():
                self._workers.mark_complete(self._arguments.common(effect.kept))
            case m.EmitEvent():
                self._emit(effect.event)
            case m.SetTimer():
                self._queue.set_timer(effect)
            case m.CancelTimer():
                self._queue.cancel_timer(effect.name)
            case m.FinishRun():
                self.close()

    def close(self) -> None:
        """End every worker and remove the placement groups, unless they are another driver's; safe to call twice."""
        self._workers.close()
        self._storage.close()

    def _note(self, text: str) -> None:
        self._emit(events.Noted(text=text))

    # --- calls --------------------------------------------------------------------------------------------

    def _call(self, effect: m.CallWorker) -> None:
        actor = self._workers.actor(effect.worker)
        if actor is None:
            return  # its end was reported
        if effect.verb == "heal" and effect.argument.source != "join":
            self._output.restart_at(effect.argument.step)
        if effect.verb == "form":
            self._output.listen_to(effect)
        if effect.verb == "reserve":
            self._workers.build_for(effect.argument.plan)
        if effect.verb == "run":
            self._output.watch(effect)
        if effect.verb == "stop":
            ref = actor.stop.remote(self._lease.token)
        elif effect.verb == "interrupt":
            generation = effect.generation
            ref = actor.interrupt.remote(generation.number, effect.argument, generation.token)
        else:
            if effect.verb == "keep":
                self._workers.guard(effect.worker)
            aside = {"upload": actor.upload, "keep": actor.keep}
            own, common = self._arguments.of(effect.argument)
            ref = aside.get(effect.verb, actor.call).remote(effect.verb, own, self._lease.token, common)
        answer = self._queue.then(ref, lambda done: self._answered(effect, done))
        if effect.verb == "upload":
            node = self._workers.node(effect.worker)
            self._storage.watch(f"worker {effect.worker} on {node} writes {effect.argument}", answer)

    def _answered(self, call: m.CallWorker, done: Future[Any]) -> None:
        if done.exception() is not None:
            self._workers.died(call.worker, done.exception())
            return
        value = done.result()
        about: dict[str, Any] = {"worker": call.worker, "generation": call.generation, "verb": call.verb}
        if isinstance(value, m.CallFailure):
            self._output.deliver(call, m.CallRaised(**about, failure=value))
        else:
            self._output.deliver(call, m.CallReturned(**about, value=value))

    # --- lease --------------------------------------------------------------------------------------------

    def _acquire(self) -> m.DriverEvent:
        """Take the lease, then the survivors of the previous driver.

        Without a previous driver, survivors belong to a run that was deleted.
        """
        token = self._ledger.acquire()
        fresh = self._fresh or token == 1
        found = take_over(self._workers.name, self._workers.config_ref, token, fresh=fresh, assure=self._ledger.assure)
        self._queue.put(lambda: self._welcome(token, found))  # heartbeats keep them alive meanwhile
        chain = self._ledger.chain()
        told = 0 if fresh else self._ledger.told()
        self._queue.put(lambda: self._know(told if found.workers else 0))
        living = tuple(survivor.living for survivor in found.workers)
        head, older = (chain[-1], chain[:-1]) if chain else (None, ())
        return m.LeaseAcquired(token=token, head=head, older=older, told=told, living=living, kept=found.kept)

    def _know(self, told: int) -> None:
        """The previous driver reported the steps up to this one."""
        self._output.reported = told

    def _welcome(self, token: int, found: TakenOverActors) -> None:
        self._lease.token = token
        self._workers.take_over(found)
