"""Effects carried out: actors, timers, the log. Each answers with an event on one queue."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainwright.core import events, formatting
from trainwright.core.errors import FencedError, RunConflict, TrainwrightError, WorkerLost
from trainwright.core.plan import Plan
from trainwright.core.topology import Generation
from trainwright.driver import messages as m
from trainwright.driver.messages import DriverEvent, SetTimer, TimerExpired
from trainwright.ray_cluster.placement_groups import PlacementGroups, WorkerPlacement
from trainwright.ray_cluster.ray_compat import exit_reason
from trainwright.runtime.takeover import (
    BEAT_S,
    DriverLease,
    Heartbeats,
    LeaseLedger,
    TakenOverActors,
    detached_options,
    memory_store_name,
    placement_group_prefix,
    run_name,
    take_over,
)
from trainwright.runtime.worker_actor import MEMORY_STORE_ACTOR, WORKER_ACTOR, ArgumentPickler, WorkerSlot
from trainwright.storage.object_store import open_store
from trainwright.worker.worker_config import WorkerConfig

_POLL_S = 0.2
_WATCH_S = 5.0
_REMOVE_S = 10.0
OVERDUE_S = 120.0  # of a write that is not answered, before the user hears of it
_VERBS_AFTER_PRINTS = ("run", "evaluate")  # verbs whose answers follow what was printed meanwhile
SILENT_S = 30.0  # without an answer to a beat: a process that does not run


class EffectExecutor:
    """Carries out effects and collects what happens, on one thread: callbacks of others only queue.

    Args:
        order: what every worker gets.
        ledger: the run's log.
        emit: takes each event of the run.
        elastic: the number of workers may change.
        fresh: the run begins again: what lives of it is ended.
        room: for the workers; by default it is asked of Ray.
    """

    def __init__(
        self,
        order: WorkerConfig,
        ledger: LeaseLedger,
        emit: Callable[[events.Event], object],
        *,
        elastic: bool = False,
        fresh: bool = False,
        room: WorkerPlacement | None = None,
    ) -> None:
        self._work, self._order = order, ray.put(order)
        self._uri = open_store(order.storage).uri_of(order.run)
        self._name = run_name(self._uri)
        self._arguments = ArgumentPickler()
        self._told = 0
        self._lease = DriverLease(ledger, lambda: [*self._actors.values(), *self._keepers.values()])
        self._closed = threading.Event()
        self._nodes: dict[int, tuple[str, str]] = {}  # name and Ray's id, by worker
        self._slots: dict[int, int] = {}  # by worker
        self._keepers: dict[str, Any] = {}
        self._fresh = fresh
        self._plan = order.plan
        self._together = order.plan.topology == "collective"
        self._rooms: WorkerPlacement = room or PlacementGroups(
            order.plan, elastic=elastic, name=placement_group_prefix(self._name)
        )
        self._ledger, self._emit = ledger, emit
        self._queue = _EventQueue()
        self._storage = ThreadPoolExecutor(1, thread_name_prefix="log")
        self._actors: dict[int, Any] = {}
        self._unwanted: set[int] = set()  # before they were placed
        self._watched: tuple[int, Generation] | None = None
        self._speaker: tuple[int, int] | None = None  # the worker whose prints are told, and its rank

    # --- events -------------------------------------------------------------------------------------------

    def put(self, event: m.DriverEvent) -> None:
        """Something happened; from any thread."""
        self._queue.put(event)

    def next(self) -> m.DriverEvent:
        """Wait for the next event; a timer that runs out is one. A driver that was replaced gets no other than that."""
        while True:
            item = self._queue.wait()
            if not self._lease.check():
                assert self._lease.lost is not None, "a lease that may not be used is lost"
                return m.LeaseLost(error=self._lease.lost)
            if not callable(item):
                return item
            item()

    def _then(self, ref: Any, action: Callable[[Future[Any]], None]) -> Future[Any]:
        answer: Future[Any] = ref.future()
        answer.add_done_callback(lambda done: self._queue.put(lambda: self._settle(done, action)))
        return answer

    def _watch_write(self, what: str, answer: Future[Any], waited_s: float = 0.0) -> None:
        """Tell of a write that hangs, ever less often: a network folder may never answer, and gives no error."""
        after_s = max(OVERDUE_S, waited_s)

        def look() -> None:
            if answer.done():
                return
            text = (
                f"{what} for {formatting.duration(waited_s + after_s)} by now: the store at {self._work.storage} "
                "does not answer. Training goes on; no newer checkpoint is written before it does"
            )
            self.carry_out(m.EmitEvent(event=events.Noted(text=text)))
            self._watch_write(what, answer, waited_s + after_s)

        self._queue.later(after_s, look)

    def _settle(self, done: Future[Any], action: Callable[[Future[Any]], None]) -> None:
        """Act on an answer, unless it says that another driver has the process."""
        refused = done.result() if done.exception() is None else None
        if isinstance(refused, m.CallFailure) and isinstance(refused.error, FencedError):
            self._fence(refused.error)
        else:
            action(done)

    def _fence(self, error: TrainwrightError) -> None:
        self._lease.lose(error)
        self._queue.put(lambda: None)  # for whoever waits for an event

    # --- effects ------------------------------------------------------------------------------------------

    def carry_out(self, effect: m.Effect) -> None:
        """Start one effect; never blocks for long. Finish is the caller's."""
        match effect:
            case m.AcquireLease():
                self._in_storage(self._acquire)
            case m.StartWorker() if effect.after_s:
                self._queue.later(effect.after_s, lambda: self._place(effect))
            case m.StartWorker():
                self._place(effect)
            case m.KillWorker():
                self._kill(effect.worker)
            case m.ExcludeNode():
                self._rooms.shun(self._nodes[effect.worker][1])
            case m.CallWorker():
                self._call(effect)
            case m.CommitCheckpoint():
                committed = self._in_storage(lambda: self._commit(effect))
                self._watch_write(f"the driver commits the checkpoint of step {effect.step}", committed)
            case m.ReleaseLease():
                self._in_storage(lambda: self._release(effect))
            case m.MarkComplete():
                for keeper in self._keepers.values():
                    keeper.seal.remote(self._arguments.common(effect.kept), self._lease.token)
            case m.EmitEvent():
                self._emit(effect.event)
            case m.SetTimer():
                self._queue.set_timer(effect)
            case m.CancelTimer():
                self._queue.cancel_timer(effect.name)
            case m.FinishRun():
                self.close()

    def close(self) -> None:
        """End every worker and give back the placement group, unless they are another driver's; safe to call twice."""
        self._closed.set()
        for worker in list(self._actors):
            self._kill(worker)
        if self._lease.check():
            self._remove_copies()
            self._rooms.give_back()
        self._storage.shutdown(wait=False, cancel_futures=True)

    # --- workers ------------------------------------------------------------------------------------------

    def _place(self, effect: m.StartWorker) -> None:
        if effect.worker in self._unwanted:
            return
        self._slots[effect.worker] = effect.slot
        own, lent = None if effect.beside else effect.slot, self._rooms.lent(effect.slot)
        options = self._rooms.options(effect.slot, beside=effect.beside)
        options |= detached_options(f"{self._name}/worker-{effect.worker}-{self._lease.token}")
        berth = WorkerSlot(worker=effect.worker, slot=own, run=self._name, lent=lent)
        actor = WORKER_ACTOR.options(**options).remote(self._order, berth, self._lease.token)
        self._actors[effect.worker] = actor
        self._then(actor.hello.remote(effect.spare), lambda done: self._greeted(effect.worker, done))

    def _build_for(self, plan: Plan | None) -> None:
        """Whoever is placed from now on builds and rehearses for this plan."""
        if plan is not None and plan.layout != self._work.plan.layout:
            self._work = replace(self._work, plan=plan)
            self._order = ray.put(self._work)

    def _greeted(self, worker: int, done: Future[Any]) -> None:
        if done.exception() is not None:
            self._died(worker, done.exception())
            return
        actor, hello = self._actors.get(worker), done.result()
        if hello.trouble:
            self._died(worker, RuntimeError(hello.trouble))
        elif actor is not None:
            self._nodes[worker] = (hello.node, hello.node_id)
            self._rooms.found(self._slots[worker], hello.node_id)
            self.put(
                m.WorkerStarted(
                    worker=worker, node=hello.node, pid=hello.pid, accelerators=hello.accelerators, home=hello.node_id
                )
            )
            self._await_end(worker)

    def _await_end(self, worker: int) -> None:
        actor = self._actors[worker]
        self._then(actor.live.remote(self._lease.token), lambda end: self._died(worker, end.exception()))
        self._then(actor.notice.remote(self._lease.token), lambda came: self._noticed(worker, came))

    def _guard(self, worker: int) -> None:
        """Have a keeper on a worker's node, which gives its copies to other nodes and removes them at the end."""
        node, node_id = self._nodes[worker]
        if node not in self._keepers:
            stay = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options = {
                **detached_options(memory_store_name(self._name, node)),
                "scheduling_strategy": stay,
                "get_if_exists": True,
            }
            self._keepers[node] = MEMORY_STORE_ACTOR.options(**options).remote(self._uri, self._lease.token)

    def _remove_copies(self) -> None:
        """What a lost node or its keeper leaves undone is swept up there by the next run."""
        removed = [keeper.remove.remote(self._lease.token) for keeper in self._keepers.values()]
        if removed:
            ray.wait(removed, num_returns=len(removed), timeout=_REMOVE_S)
        for keeper in self._keepers.values():
            ray.kill(keeper)
        self._keepers.clear()

    def _kill(self, worker: int) -> None:
        if worker not in self._slots:
            self._unwanted.add(worker)
        self._died(worker, None)

    def _died(self, worker: int, error: BaseException | None) -> None:
        """Tell a death once, whichever future brought it first."""
        actor = self._actors.pop(worker, None)
        if actor is not None:
            if self._lease.check():  # otherwise it is another driver's
                with suppress(RayError):  # of one that Ray could not even create
                    ray.kill(actor, no_restart=True)  # unreachable is as good as dead, and must stay so
            self.put(m.WorkerDied(worker=worker, cause=exit_reason(error)))

    def _noticed(self, worker: int, came: Future[Any]) -> None:
        if came.exception() is None:  # else the end of `live` tells of it
            self.put(m.PreemptionNoticed(worker=worker, left_s=came.result()))

    def _call(self, effect: m.CallWorker) -> None:
        actor = self._actors.get(effect.worker)
        if actor is None:
            return  # its death has been told
        if effect.verb == "heal" and effect.argument.source != "join":
            self._told, self._watched = min(self._told, effect.argument.step), None
        if effect.verb == "form":
            self._listen_to(effect)
        if effect.verb == "reserve":
            self._build_for(effect.argument.plan)
        if effect.verb == "run":
            self._watch(effect)
        if effect.verb == "stop":
            ref = actor.stop.remote(self._lease.token)
        elif effect.verb == "interrupt":
            generation = effect.generation
            ref = actor.interrupt.remote(generation.number, effect.argument, generation.token)
        else:
            if effect.verb == "keep":
                self._guard(effect.worker)
            aside = {"upload": actor.upload, "keep": actor.keep}
            own, common = self._arguments.of(effect.argument)
            ref = aside.get(effect.verb, actor.call).remote(effect.verb, own, self._lease.token, common)
        answer = self._then(ref, lambda done: self._answered(effect, done))
        if effect.verb == "upload":
            node, _ = self._nodes[effect.worker]
            self._watch_write(f"worker {effect.worker} on {node} writes {effect.argument}", answer)

    def _answered(self, call: m.CallWorker, done: Future[Any]) -> None:
        if done.exception() is not None:
            self._died(call.worker, done.exception())
            return
        value = done.result()
        about: dict[str, Any] = {"worker": call.worker, "generation": call.generation, "verb": call.verb}
        failed = isinstance(value, m.CallFailure)
        event = m.CallRaised(**about, failure=value) if failed else m.CallReturned(**about, value=value)
        if (
            self._speaker is not None
            and self._speaker[0] == call.worker
            and (failed or call.verb in _VERBS_AFTER_PRINTS)
        ):
            self._tell_prints(lambda: self._pass_on(call, event))
        else:
            self._pass_on(call, event)

    def _pass_on(self, call: m.CallWorker, event: m.CallReturned | m.CallRaised) -> None:
        raised = (
            event if isinstance(event, m.CallRaised) and self._together else None
        )  # then every rank knows every step
        knows = raised is not None and not 0 <= raised.failure.step <= self._told
        if call.verb == "run" and (knows or self._watched == (call.worker, call.generation)):
            self._tell_rest(event)
        else:
            self.put(event)

    # --- news ---------------------------------------------------------------------------------------------

    def _listen_to(self, call: m.CallWorker) -> None:
        """Tell what the first rank that runs the job's functions prints, from when it is formed."""
        group = call.argument
        first = next((peer.rank for peer in group.peers if peer.role in ("worker", "chief")), 0)
        known = self._speaker is not None and self._speaker[0] == call.worker
        if group.rank == first and not known:
            self._speaker = (call.worker, first)
            self._ask_prints(self._speaker)
        elif group.rank != first and known:
            self._speaker = None

    def _ask_prints(self, speaker: tuple[int, int]) -> None:
        actor = self._actors.get(speaker[0])
        if actor is not None and self._speaker == speaker:
            self._then(actor.printed.remote(_WATCH_S, self._lease.token), lambda done: self._spoke(speaker, done))

    def _spoke(self, speaker: tuple[int, int], done: Future[Any]) -> None:
        """Pass lines on, and ask again a little later; the end of `live` tells of a death."""
        if done.exception() is None:
            self._emit_prints(speaker[1], done.result())
            self._queue.later(_POLL_S, lambda: self._ask_prints(speaker))

    def _tell_prints(self, then: Callable[[], None]) -> None:
        """Tell the last lines before what a verb came to."""
        assert self._speaker is not None, "somebody is listened to"
        worker, rank = self._speaker
        actor = self._actors.get(worker)

        def told(done: Future[Any]) -> None:
            if done.exception() is None:
                self._emit_prints(rank, done.result())
            then()

        if actor is None:
            then()
        else:
            self._then(actor.printed.remote(0.0, self._lease.token), told)

    def _emit_prints(self, rank: int, lines: list[str]) -> None:
        for line in lines:
            self._emit(events.Printed(rank=rank, line=line))

    def _watch(self, call: m.CallWorker) -> None:
        """Watch the oldest worker of a generation: it has been there longest and knows every step.

        Where not all of them step together, that is rank 0, which is called first.
        """
        watched = self._watched
        older = watched is not None and watched[0] > call.worker and self._together
        if watched is None or watched[1] != call.generation or older:
            self._watched = (call.worker, call.generation)
            self._ask(self._watched)

    def _ask(self, watched: tuple[int, Generation]) -> None:
        actor = self._actors.get(watched[0])
        if actor is not None and self._watched == watched:
            news = actor.watch.remote(self._told, _WATCH_S, self._lease.token)
            self._then(news, lambda done: self._heard(watched, done))

    def _heard(self, watched: tuple[int, Generation], done: Future[Any]) -> None:
        """Pass news on, and ask again a little later."""
        if done.exception() is not None:
            self._died(watched[0], done.exception())
        elif self._watched == watched:
            self._tell(watched[1], done.result())
            self._queue.later(_POLL_S, lambda: self._ask(watched))

    def _tell_rest(self, event: m.CallReturned | m.CallRaised) -> None:
        """Tell the last steps of a segment before its end."""

        def told(done: Future[Any]) -> None:
            if done.exception() is not None:
                self._died(event.worker, done.exception())
            else:
                self._tell(event.generation, done.result())
                self.put(event)

        actor = self._actors.get(event.worker)
        if actor is not None:
            self._then(actor.watch.remote(self._told, 0.0, self._lease.token), told)

    def _tell(self, generation: Generation, news: events.Steps) -> None:
        fresh = news.after(self._told)
        if fresh.step:
            self._told = fresh.step[-1]
            self._emit(fresh)
            self.put(m.StepsCompleted(generation=generation, step=self._told, losses=tuple(fresh.loss)))

    # --- storage ------------------------------------------------------------------------------------------

    def _in_storage(self, action: Callable[[], m.DriverEvent]) -> Future[None]:
        def run() -> None:
            try:
                self.put(action())
            except TrainwrightError as error:
                self._fence(error) if isinstance(error, RunConflict) else self.put(m.LeaseLost(error=error))
            except Exception as error:  # nobody else would hear of it, and the driver would wait for ever
                told = TrainwrightError(f"{type(error).__name__}: {error}", detail=traceback.format_exc())
                self.put(m.LeaseLost(error=told))

        return self._storage.submit(run)

    def _acquire(self) -> m.DriverEvent:
        """Take the log, then what lives of the driver before; where there was none, it is of a run that was deleted."""
        token = self._ledger.acquire()
        fresh = self._fresh or token == 1
        found = take_over(self._name, self._order, token, fresh=fresh, assure=self._ledger.assure)
        self._queue.put(lambda: self._welcome(token, found))  # which keeps them from ending while we read on
        chain = self._ledger.chain()
        told = 0 if fresh else self._ledger.told()
        self._queue.put(lambda: self._know(told if found.workers else 0))
        living = tuple(survivor.living for survivor in found.workers)
        head, older = (chain[-1], chain[:-1]) if chain else (None, ())
        return m.LeaseAcquired(token=token, head=head, older=older, told=told, living=living, kept=found.kept)

    def _know(self, told: int) -> None:
        """Steps up to this one were told by the driver before."""
        self._told = told

    def _welcome(self, token: int, found: TakenOverActors) -> None:
        """From now on the run is ours, and so are those who outlived the driver before."""
        self._lease.token, self._keepers = token, dict(found.keepers)
        for survivor in found.workers:
            worker, slot = survivor.living.worker, survivor.living.slot
            self._actors[worker] = survivor.actor
            self._nodes[worker] = (survivor.living.node, survivor.node_id)
            if slot is not None:
                self._slots[worker] = slot
                self._rooms.inherit(slot, survivor.group)
                self._rooms.found(slot, survivor.node_id)
            self._await_end(worker)
        threading.Thread(target=self._beat, name="trainwright-beat", daemon=True).start()

    def _beat(self) -> None:
        """Tell all that their driver lives, whatever its own thread waits for: a listener may write to a slow store."""
        beats, told = Heartbeats(), ""
        while not self._closed.is_set():
            try:
                self._beat_once(beats)
                told = ""
            except Exception as error:  # without beats all processes of the run would end by themselves
                text = f"the workers could not be told that their driver lives: {type(error).__name__}: {error}"
                if text != told:
                    self._queue.put(partial(self.carry_out, m.EmitEvent(event=events.Noted(text=text))))
                told = text
            self._closed.wait(BEAT_S)

    def _beat_once(self, beats: Heartbeats) -> None:
        up = {worker: actor for worker, actor in [*self._actors.items()] if worker in self._nodes}
        for worker, silent_s in beats.send(up, self._lease.token).items():
            if silent_s > SILENT_S and self._expendable(worker):
                self._queue.put(partial(self._died, worker, WorkerLost(f"it did not answer for {silent_s:.0f} s")))
        for number, actor in [*self._actors.items(), *self._keepers.items()]:
            if number not in up:
                actor.beat.remote(self._lease.token)

    def _expendable(self, worker: int) -> bool:  # one that does not answer is ended then, and replaced
        first = 1 if self._plan.topology == "coordinator" else self._plan.processes - self._plan.workers
        return not self._together and self._slots.get(worker, 0) >= first

    def _commit(self, effect: m.CommitCheckpoint) -> m.DriverEvent:
        try:
            return self._ledger.commit(effect)
        except FencedError:
            raise
        except TrainwrightError as error:
            return m.CommitFailed(step=effect.step, error=error)

    def _release(self, effect: m.ReleaseLease) -> m.DriverEvent:
        self._ledger.release(effect)
        return m.LeaseReleased()


# --- The driver's queue of events, with alarms ------------------------------------------------------------------------


_QueueItem = DriverEvent | Callable[[], None]


class _EventQueue:
    """Events, and calls that the waiting thread is to make. All but `put` are for that thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_QueueItem] = queue.SimpleQueue()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._timers: dict[str, int] = {}

    def put(self, item: _QueueItem) -> None:
        """Add an event or a call; from any thread."""
        self._queue.put(item)

    def wait(self) -> _QueueItem:
        """Wait for the next item, or for the next alarm."""
        timeout = max(0.0, self._alarms[0][0] - time.monotonic()) if self._alarms else None
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return heapq.heappop(self._alarms)[2]

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Have a call made after so many seconds."""
        heapq.heappush(self._alarms, (time.monotonic() + after_s, next(self._count), action))

    def set_timer(self, timer: SetTimer) -> None:
        """Put Expired when the timer runs out; replaces the timer of that name."""
        self._timers[timer.name] = timer.number

        def expire() -> None:
            if self._timers.get(timer.name) == timer.number:
                del self._timers[timer.name]
                self.put(TimerExpired(name=timer.name, number=timer.number))

        self.later(timer.after_s, expire)

    def cancel_timer(self, name: str) -> None:
        """Forget a timer."""
        self._timers.pop(name, None)
