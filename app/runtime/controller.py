"""The driver's loop: take an event, decide, carry out the effects, until the run has ended.

Effects start actors' calls, timers and writes to the run log. Each of them answers with an event on one queue.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from trainwright.core import events, formatting
from trainwright.core.errors import FencedError, RunConflict, StorageError, TrainwrightError
from trainwright.core.topology import Generation
from trainwright.driver import messages as m
from trainwright.driver.state_machine import begin_run, decide
from trainwright.ray_cluster.placement_groups import WorkerPlacement
from trainwright.runtime.run_setup import RunSetup
from trainwright.runtime.takeover import DriverLease, TakenOverActors, take_over
from trainwright.runtime.worker_actor import ArgumentPickler
from trainwright.runtime.worker_registry import EventQueue, WorkerRegistry
from trainwright.storage.event_log import EventListener
from trainwright.storage.object_store import Store
from trainwright.storage.run_store import RunStore
from trainwright.worker.worker_config import WorkerConfig

_COLLECT_AFTER = 100_000  # new objects
_FLUSHED = (
    *(events.Probed, events.Replanned, events.Evaluated),  # so that nothing is measured or evaluated again
    *(events.Failed, events.Promoted, events.Formed, events.Joined),  # so that viewers see failures at once
)


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Let the garbage collector run rarely: with 10,000 workers it would take half of a recovery's time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(max(_COLLECT_AFTER, thresholds[0]) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class RunController:
    """Drives one run. `run` blocks; `stop` may be called from any thread.

    Args:
        setup: job, plan and data of the run.
        fresh: start the run of this name again.
        notes: for the user, written as events of the run.
    """

    def __init__(self, setup: RunSetup, *, fresh: bool = False, notes: Sequence[str] = ()) -> None:
        self._setup, self._fresh, self._notes = setup, fresh, notes
        job = setup.prepared.job
        self._event_log = setup.event_log()
        self._run_store = RunStore(
            self.store,
            job.name,
            job=setup.prepared.description,
            keep=job.checkpointing.keep,
            fresh=fresh,
            note=self.say,
            begin=self._open_event_log,
            tell=self.flush,
            stop=self._on_stop_requested,
        )
        row = setup.example_row()  # first, because the feeder's actors take resources that it needs
        self._feeding = setup.start_feeder()
        self._event_log.listen(self._feeding)
        config, write = setup.worker_config(self._feeding, row), self._event_log.write
        self._executor = EffectExecutor(
            config, self._run_store, write, elastic=job.scaling.elastic, fresh=fresh, placement=setup.placement
        )

    @property
    def store(self) -> Store:
        """Where the run lives."""
        return self._setup.prepared.store

    def listen(self, listener: EventListener) -> None:
        """Add a listener for every event, those so far first."""
        self._event_log.listen(listener)

    def say(self, text: str) -> None:
        """Write a note for the user."""
        self._event_log.write(events.Noted(text=text))

    def stop(self, now: bool = False) -> None:
        """Ask the run to end: after a checkpoint, or at once."""
        self._executor.put(m.StopRequested(now=now))

    def _on_stop_requested(self, now: bool) -> None:
        self.say(f"asked to stop, {'at once' if now else 'after a checkpoint'}, by `trainwright stop`")
        self.stop(now)

    def flush(self) -> None:
        """Write the events so far, so that readers see them."""
        self._event_log.flush()

    def run(self) -> m.FinishRun:
        """Drive the run to its end; workers, files and timers are gone when it returns."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(collecting_rarely())
            stack.callback(self._event_log.close)
            stack.callback(self._run_store.close)
            stack.callback(self._feeding.close)
            stack.callback(self._executor.close)
            try:
                return self._drive()
            except BaseException:
                self._run_store.give_up()
                raise

    def _drive(self) -> m.FinishRun:
        event: m.DriverEvent | None = None
        state, effects = begin_run(self._setup.policy(), time.monotonic())
        while True:
            for effect in effects:
                if isinstance(effect, m.FinishRun):
                    return effect
                self._executor.carry_out(effect)
                if isinstance(effect, m.EmitEvent) and isinstance(effect.event, _FLUSHED):
                    self._event_log.flush_soon()
            if isinstance(event, m.CheckpointCommitted):
                self._event_log.flush_soon(committed=True)  # including events about the checkpoint
            for text in self._feeding.news():
                self._event_log.write(events.Noted(text=text))
            event = self._executor.next()
            state, effects = decide(state, event, time.monotonic())

    def _open_event_log(self, token: int) -> None:
        self._event_log.open(token)
        self._event_log.write(self._setup.started(token, fresh=self._fresh))
        for text in self._notes:
            self._event_log.write(events.Noted(text=text))
        self._event_log.flush()
        try:
            self._setup.store_metadata()
        except StorageError as error:  # a resumed run may have to read the files again
            self.say(f"the metadata of the data files could not be stored: {error.what}")


# --- Effects ----------------------------------------------------------------------------------------------------------


OVERDUE_S = 120.0  # time for the store to answer a write, before the user is told


class EffectExecutor:
    """Carries out effects and collects events, on one thread: callbacks of other threads only add to the queue.

    Args:
        order: configuration that every worker gets.
        elastic: whether the number of workers may change.
        fresh: whether the run starts again, so that surviving processes are ended.
        placement: placement of the workers; by default placement groups of Ray.
    """

    def __init__(
        self,
        order: WorkerConfig,
        run_store: RunStore,
        emit: Callable[[events.Event], object],
        *,
        elastic: bool = False,
        fresh: bool = False,
        placement: WorkerPlacement | None = None,
    ) -> None:
        self._arguments = ArgumentPickler()
        self._run_store, self._emit, self._fresh = run_store, emit, fresh
        self._lease = DriverLease(run_store, lambda: self._workers.all_actors())
        self._queue = EventQueue(self._lease)
        self._workers = WorkerRegistry(
            order, self._queue, self._lease, self._note, elastic=elastic, placement=placement
        )
        together = order.plan.topology == "collective"
        self._output = WorkerOutput(self._workers, self._queue, self._lease, emit, together=together)
        self._uri, self._log_thread = order.storage, ThreadPoolExecutor(1, thread_name_prefix="log")

    def put(self, event: m.DriverEvent) -> None:
        """Add an event; from any thread."""
        self._queue.put(event)

    def next(self) -> m.DriverEvent:
        """Wait for the next event; a timer that runs out is one. A driver that was replaced gets LeaseLost only."""
        return self._queue.next()

    def carry_out(self, effect: m.Effect) -> None:
        """Start one effect; never block for long. The caller handles FinishRun."""
        match effect:
            case m.AcquireLease():
                self._submit(self._acquire)
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
                committed = self._submit(partial(self._commit, effect))
                self._report_overdue(f"the driver commits the checkpoint of step {effect.step}", committed)
            case m.ReleaseLease():
                self._submit(partial(self._release, effect))
            case m.MarkComplete():
                self._workers.mark_complete(self._arguments.common(effect.kept))
            case m.EmitEvent():
                self._emit(effect.event)
            case m.SetTimer():
                self._queue.set_timer(effect)
            case m.CancelTimer():
                self._queue.cancel_timer(effect.name)

    def close(self) -> None:
        """End every worker and remove the placement groups, unless they are another driver's; safe to call twice."""
        self._workers.close()
        self._log_thread.shutdown(wait=False, cancel_futures=True)

    def _note(self, text: str) -> None:
        self._emit(events.Noted(text=text))

    # --- calls --------------------------------------------------------------------------------------------

    def _call(self, effect: m.CallWorker) -> None:
        actor = self._workers.actor(effect.worker)
        if actor is None:
            return  # its end was reported
        if effect.verb == "restore" and effect.argument.source != "join":
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
            if effect.verb == "keep" or _copies_state(effect):
                self._workers.guard(effect.worker)
            aside = {"upload": actor.upload, "keep": actor.keep, "trace": actor.upload}
            own_part, common = self._arguments.of(effect.argument)
            ref = aside.get(effect.verb, actor.call).remote(effect.verb, own_part, self._lease.token, common)
        answer = self._queue.then(ref, lambda done: self._on_answer(effect, done))
        if effect.verb == "upload":
            node = self._workers.node(effect.worker)
            self._report_overdue(f"worker {effect.worker} on {node} writes {effect.argument}", answer)

    def _on_answer(self, call: m.CallWorker, done: Future[Any]) -> None:
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

    def _acquire(self) -> Callable[[], None]:
        """Take the lease, then the survivors of the previous driver; return a call that puts the event.

        Without a previous driver, survivors belong to a deleted run.
        """
        token = self._run_store.acquire()
        fresh = self._fresh or token == 1
        survivors = take_over(
            self._workers.name, self._workers.config_ref, token, fresh=fresh, assure=self._run_store.assure
        )
        self._queue.put(lambda: self._take_over(token, survivors))  # heartbeats keep them alive meanwhile
        chain = self._run_store.chain()
        history = self._run_store.past()
        living = tuple(answer.living for _, answer in survivors.workers)
        head, older = (chain[-1], chain[:-1]) if chain else (None, ())
        event = m.LeaseAcquired(
            token=token, head=head, older=older, told=history.told, living=living, kept=survivors.kept,
            evaluations=history.ordered_evaluations, spent_s=history.time.wall_s,
        )  # fmt: skip
        return lambda: self._put_lease(event)

    def _put_lease(self, event: m.LeaseAcquired) -> None:
        """Put the event, with the survivors that are still alive."""
        self._output.reported = event.told if event.living else 0
        living = tuple(survivor for survivor in event.living if self._workers.actor(survivor.worker) is not None)
        self._queue.put(replace(event, living=living))
        self._workers.watch_survivors()  # the driver would drop notices for workers that it does not know yet

    def _take_over(self, token: int, survivors: TakenOverActors) -> None:
        self._lease.token = token
        self._workers.take_over(survivors)

    # --- the run log --------------------------------------------------------------------------------------

    def _submit(self, action: Callable[[], m.DriverEvent | Callable[[], None]]) -> Future[None]:
        """Run an action on the thread of the run log, and put its event or call; an error loses the lease."""

        def run() -> None:
            try:
                self._queue.put(action())
            except TrainwrightError as error:
                if isinstance(error, RunConflict):
                    self._queue.fence(error)
                else:
                    self._queue.put(m.LeaseLost(error=error))
            except Exception as error:  # it would vanish in the thread, and the driver would wait forever
                fault = TrainwrightError(f"{type(error).__name__}: {error}", detail=traceback.format_exc())
                self._queue.put(m.LeaseLost(error=fault))

        return self._log_thread.submit(run)

    def _commit(self, effect: m.CommitCheckpoint) -> m.DriverEvent:
        try:
            return self._run_store.commit(effect)
        except FencedError:
            raise
        except TrainwrightError as error:
            return m.CommitFailed(step=effect.step, error=error)

    def _release(self, effect: m.ReleaseLease) -> m.DriverEvent:
        self._run_store.release(effect)
        return m.LeaseReleased()

    def _report_overdue(self, activity: str, answer: Future[Any], waited_s: float = 0.0) -> None:
        """Report a write that hangs to the user, ever less often: a network folder may neither answer nor fail."""
        after_s = max(OVERDUE_S, waited_s)

        def look() -> None:
            if answer.done():
                return
            self._note(
                f"{activity} for {formatting.duration(waited_s + after_s)} by now: the store at {self._uri} "
                "does not answer. Training goes on; no newer checkpoint is written before it does"
            )
            self._report_overdue(activity, answer, waited_s + after_s)

        self._queue.later(after_s, look)


# --- Completed steps and printed lines --------------------------------------------------------------------------------


_POLL_S = 0.2
_WATCH_S = 5.0
_VERBS_AFTER_PRINTS = ("run", "evaluate")  # verbs whose answers are delivered after their prints


def _copies_state(call: m.CallWorker) -> bool:
    """Whether a worker is to copy its state into memory before its process ends."""
    return call.verb == "leave" and call.argument is not None


class WorkerOutput:
    """Completed steps of one worker, and prints and logs of the same or another worker.

    Args:
        together: whether all ranks step together, so that each rank knows every step.

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
        self._speaker: tuple[int, int] | None = None  # the worker whose output is shown, and its rank
        self._polls: dict[int, list[Callable[[], None]]] = {}  # by polled worker: flushes that wait for its answer
        self._flushes = 0  # number of requests to flush prints

    def restart_at(self, step: int) -> None:
        """Report the steps after this one again, and choose again which worker to poll."""
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
        watched = call.verb == "run" and (knows or self._watched == (call.worker, call.generation))
        if watched or _copies_state(call):  # the process ends then, and only it knows its last steps
            self._flush_steps(event)
        else:
            self._queue.put(event)

    def listen_to(self, call: m.CallWorker) -> None:
        """Print the output of the first rank that runs the job's functions, from the rendezvous on."""
        group = call.argument
        first_rank = next((peer.rank for peer in group.peers if peer.role in ("worker", "chief")), 0)
        listening = self._speaker is not None and self._speaker[0] == call.worker
        if group.rank == first_rank and not listening:
            self._speaker = (call.worker, first_rank)
            self._poll_prints(self._speaker)
        elif group.rank != first_rank and listening:
            self._speaker = None

    def _poll_prints(self, speaker: tuple[int, int]) -> None:
        actor = self._workers.actor(speaker[0])
        if actor is not None and self._speaker == speaker:
            poll = actor.printed.remote(_WATCH_S, self._flushes, self._lease.token)
            self._polls.setdefault(speaker[0], [])
            self._queue.then(poll, lambda done: self._on_prints(speaker, done))

    def _on_prints(self, speaker: tuple[int, int], done: Future[Any]) -> None:
        """Show the output and poll again; the answer to `live` reports the end of the worker."""
        if done.exception() is None:
            output = done.result()
            self._emit_output(speaker[1], output)
            awaited = any(isinstance(item, events.MediaLogged) for item in output)  # a callback waits for the next call
            self._queue.later(0.0 if awaited else _POLL_S, lambda: self._poll_prints(speaker))
        for flushed in self._polls.pop(speaker[0], ()):
            flushed()

    def _flush_prints(self, then: Callable[[], None]) -> None:
        """Show the last output of the current speaker, then call `then`."""
        assert self._speaker is not None, "no worker's output is shown"
        worker, rank = self._speaker
        actor = self._workers.actor(worker)

        def show(done: Future[Any]) -> None:
            if done.exception() is None:
                self._emit_output(rank, done.result())
            then()

        def on_flush(done: Future[Any]) -> None:
            if worker in self._polls:  # the pending poll has older output; the flush has ended its wait
                self._polls[worker].append(lambda: show(done))
            else:
                show(done)

        if actor is None:
            then()
        else:
            self._flushes += 1
            self._queue.then(actor.printed.remote(0.0, self._flushes, self._lease.token), on_flush)

    def _emit_output(self, rank: int, output: list[str | events.MediaLogged]) -> None:
        for item in output:
            self._emit(events.Printed(rank=rank, line=item) if isinstance(item, str) else item)

    def watch(self, call: m.CallWorker) -> None:
        """Poll the oldest worker of a rendezvous epoch for completed steps: it knows all of them.

        If ranks step independently, rank 0 is polled, which is called first.
        """
        watched = self._watched
        older = watched is not None and watched[0] > call.worker and self._together
        if watched is None or watched[1] != call.generation or older:
            self._watched = (call.worker, call.generation)
            self._poll_steps(self._watched)

    def _poll_steps(self, watched: tuple[int, Generation]) -> None:
        actor = self._workers.actor(watched[0])
        if actor is not None and self._watched == watched:
            news = actor.watch.remote(self.reported, _WATCH_S, self._lease.token)
            self._queue.then(news, lambda done: self._on_steps(watched, done))

    def _on_steps(self, watched: tuple[int, Generation], done: Future[Any]) -> None:
        """Report the steps and poll again."""
        if done.exception() is not None:
            self._workers.died(watched[0], done.exception())
        elif self._watched == watched:
            self._report(watched[1], done.result())
            self._queue.later(_POLL_S, lambda: self._poll_steps(watched))

    def _flush_steps(self, event: m.CallReturned | m.CallRaised) -> None:
        """Report the last steps of a segment, then put the event that ends it."""

        def on_steps(done: Future[Any]) -> None:
            if done.exception() is not None:
                self._workers.died(event.worker, done.exception())
            else:
                self._report(event.generation, done.result())
                self._queue.put(event)

        actor = self._workers.actor(event.worker)
        if actor is not None:
            self._queue.then(actor.watch.remote(self.reported, 0.0, self._lease.token), on_steps)

    def _report(self, generation: Generation, news: events.Steps) -> None:
        fresh = news.after(self.reported)
        if fresh.step:
            self.reported = fresh.step[-1]
            self._emit(fresh)
            self._queue.put(m.StepsCompleted(generation=generation, step=self.reported, losses=tuple(fresh.loss)))
