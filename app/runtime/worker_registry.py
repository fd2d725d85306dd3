"""The driver's queue of events, and the actors of a run: start, takeover, heartbeats, end."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainwright.core.errors import FencedError, TrainwrightError, WorkerLost
from trainwright.core.plan import Plan
from trainwright.driver import messages as m
from trainwright.driver.messages import CallFailure, DriverEvent, LeaseLost, SetTimer, TimerExpired
from trainwright.ray_cluster.placement_groups import PlacementGroups, WorkerPlacement
from trainwright.runtime.forked_workers import ForkedWorkers
from trainwright.runtime.preemption_watcher import PreemptionWatcher
from trainwright.runtime.takeover import (
    BEAT_S,
    DriverLease,
    Heartbeats,
    TakenOverActors,
    detached_options,
    memory_store_name,
    placement_group_prefix,
    run_name,
)
from trainwright.runtime.worker_actor import MEMORY_STORE_ACTOR, WORKER_ACTOR, WorkerSlot
from trainwright.storage.object_store import open_store
from trainwright.worker.worker_config import WorkerConfig

# --- The driver's events ----------------------------------------------------------------------------------------------


_QueueItem = DriverEvent | Callable[[], None]


class EventQueue:
    """The driver's events, timers, and calls for its thread. Other threads may use only `put` and `then`.

    Args:
        lease: of the driver. Once it is lost, `next` returns LeaseLost only.
    """

    def __init__(self, lease: DriverLease) -> None:
        self._lease = lease
        self._queue: queue.SimpleQueue[_QueueItem] = queue.SimpleQueue()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._timers: dict[str, int] = {}

    def put(self, item: _QueueItem) -> None:
        """Add an event or a call; from any thread."""
        self._queue.put(item)

    def next(self) -> DriverEvent:
        """Wait for the next event; a timer that runs out is one."""
        while True:
            item = self._wait()
            if not self._lease.check():
                assert self._lease.lost is not None, "a lease that may not be used is lost"
                return LeaseLost(error=self._lease.lost)
            if not callable(item):
                return item
            item()

    def then(self, ref: Any, action: Callable[[Future[Any]], None]) -> Future[Any]:
        """Call `action` with the answer to a remote call; give up the lease if another driver has the process."""
        answer: Future[Any] = ref.future()
        answer.add_done_callback(lambda done: self.put(lambda: self._settle(done, action)))
        return answer

    def _settle(self, done: Future[Any], action: Callable[[Future[Any]], None]) -> None:
        refused = done.result() if done.exception() is None else None
        if isinstance(refused, CallFailure) and isinstance(refused.error, FencedError):
            self.fence(refused.error)
        else:
            action(done)

    def fence(self, error: TrainwrightError) -> None:
        """Give up the lease, because another driver has the run; from any thread."""
        self._lease.lose(error)
        self.put(lambda: None)  # wakes up `next`

    def _wait(self) -> _QueueItem:
        timeout = max(0.0, self._alarms[0][0] - time.monotonic()) if self._alarms else None
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return heapq.heappop(self._alarms)[2]

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Make a call after some seconds."""
        heapq.heappush(self._alarms, (time.monotonic() + after_s, next(self._count), action))

    def set_timer(self, timer: SetTimer) -> None:
        """Put TimerExpired when the timer runs out; replaces the timer of that name."""
        self._timers[timer.name] = timer.number

        def expire() -> None:
            if self._timers.get(timer.name) == timer.number:
                del self._timers[timer.name]
                self.put(TimerExpired(name=timer.name, number=timer.number))

        self.later(timer.after_s, expire)

    def cancel_timer(self, name: str) -> None:
        """Forget a timer."""
        self._timers.pop(name, None)


# --- Worker actors ----------------------------------------------------------------------------------------------------


_REMOVE_S = 10.0
SILENT_S = 30.0  # without an answer to a heartbeat: the process does not run


class WorkerRegistry:
    """The actors of a run.

    Args:
        lease: of the driver; without it, the actors are another driver's.
        elastic: the number of workers may change.
        placement: placement of the workers; by default placement groups of Ray.

    Attributes:
        name: of the run, for names of actors.
    """

    def __init__(
        self,
        config: WorkerConfig,
        queue: EventQueue,
        lease: DriverLease,
        note: Callable[[str], None],
        *,
        elastic: bool,
        placement: WorkerPlacement | None,
    ) -> None:
        self._config, self.config_ref = config, ray.put(config)
        self._queue, self._lease, self._note = queue, lease, note
        self._uri = open_store(config.storage).uri_of(config.run)
        self.name = run_name(self._uri)
        self._plan = config.plan
        self._placement: WorkerPlacement = placement or PlacementGroups(
            config.plan, elastic=elastic, name=placement_group_prefix(self.name)
        )
        self._actors: dict[int, Any] = {}
        self._nodes: dict[int, tuple[str, str]] = {}  # name and Ray's id, by worker
        self._slots: dict[int, int] = {}  # slot whose bundle holds the worker, by worker
        self._keepers: dict[str, Any] = {}  # by name of the node
        self._unwanted: set[int] = set()  # killed before they were placed
        self._forking = ForkedWorkers(config.plan, queue.then, queue.later, lease, note, usable=placement is None)
        self._notices = PreemptionWatcher(
            self._actors,
            self._nodes,
            queue,
            lease,
            avoid=None if placement else self._placement.exclude_node,
            note=note,
        )
        self._closed = threading.Event()

    def actor(self, worker: int) -> Any:
        """Return a worker's actor; None once it has ended."""
        return self._actors.get(worker)

    def node(self, worker: int) -> str:
        """Return the name of a worker's node."""
        return self._nodes[worker][0]

    def all_actors(self) -> list[Any]:
        """Return all actors of the run."""
        return [*self._actors.values(), *self._keepers.values()]

    def exclude_node(self, worker: int) -> None:
        """Place no more workers on a worker's node."""
        self._placement.exclude_node(self._nodes[worker][1])

    def mark_complete(self, checkpoint: Any) -> None:
        """Tell the in-memory checkpoint stores which copy is complete."""
        for keeper in self._keepers.values():
            keeper.seal.remote(checkpoint, self._lease.token)

    def close(self) -> None:
        """End every worker and remove the placement groups, unless they are another driver's; safe to call twice."""
        self._closed.set()
        self._notices.close()
        for worker in list(self._actors):
            self.kill(worker)
        if self._lease.check():
            self._remove_copies()
            self._placement.give_back()

    def place(self, effect: m.StartWorker, *, prepared: bool = False) -> None:
        """Start a worker process in its slot. For a standby, the fork server of its node is started first."""
        home = self._placement.home(effect.slot) if effect.beside and not prepared else None
        host = next((worker for worker in self._actors if home and self._nodes.get(worker, ("", ""))[1] == home), None)
        if home is not None and host is not None:
            self._forking.start_server(home, self._actors[host], then=partial(self.place, effect, prepared=True))
            return
        if effect.worker in self._unwanted or self._closed.is_set():
            return
        self._slots[effect.worker] = effect.slot
        slot, lent = None if effect.beside else effect.slot, self._placement.lent(effect.slot)
        worker_slot = WorkerSlot(worker=effect.worker, slot=slot, bundle=effect.slot, run=self.name, lent=lent)
        actor = self._placement.process(effect.slot)
        if actor is None:
            options = self._placement.options(effect.slot, beside=effect.beside)
            forked = self._forking.options(self._placement.home(effect.slot))
            name = f"{self.name}/worker-{effect.worker}-{self._lease.token}{'-forked' if forked else ''}"
            options |= {**detached_options(name), **forked}
            actor = WORKER_ACTOR.options(**options).remote(self.config_ref, worker_slot, self._lease.token)
            if forked:
                group = options["scheduling_strategy"].placement_group
                self._forking.watch(actor, group, lambda: is_wanted(actor), partial(self.place, effect, prepared=True))
        else:
            actor.begin.remote(self.config_ref, worker_slot, self._lease.token)
        self._actors[effect.worker] = actor

        def is_wanted(process: Any) -> bool:
            return self._actors.get(effect.worker) is process  # not another one that was started in its place

        def on_hello(done: Future[Any]) -> None:
            if is_wanted(actor):
                self._on_hello(effect.worker, done)

        self._queue.then(actor.hello.remote(effect.spare), on_hello)

    def build_for(self, plan: Plan | None) -> None:
        """Build and warm up for this plan in workers that are placed from now on."""
        if plan is not None and plan.layout != self._config.plan.layout:
            self._config = replace(self._config, plan=plan)
            self.config_ref = ray.put(self._config)

    def _on_hello(self, worker: int, done: Future[Any]) -> None:
        if done.exception() is not None:
            self.died(worker, done.exception())
            return
        actor, hello = self._actors.get(worker), done.result()
        if isinstance(hello, str):
            self.died(worker, RuntimeError(hello))
        elif actor is not None:
            self._nodes[worker] = (hello.node, hello.home)
            self._placement.found(self._slots[worker], hello.home)
            self._queue.put(hello)
            self._await_end(worker)
            self._notices.watch(worker)
            self._forking.start_server_later(hello.home, partial(self.actor, worker))

    def _await_end(self, worker: int) -> None:
        actor = self._actors[worker]
        self._queue.then(actor.live.remote(self._lease.token), lambda end: self.died(worker, end.exception()))

    def guard(self, worker: int) -> None:
        """Start the in-memory checkpoint store of a worker's node unless it runs already."""
        node, node_id = self._nodes[worker]
        if node not in self._keepers:
            stay = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options = {
                **detached_options(memory_store_name(self.name, node)),
                "scheduling_strategy": stay,
                "get_if_exists": True,
            }
            self._keepers[node] = MEMORY_STORE_ACTOR.options(**options).remote(self._uri, self._lease.token)

    def _remove_copies(self) -> None:
        """Remove the in-memory checkpoints; the next run removes those of a node that is lost now."""
        removed = [keeper.remove.remote(self._lease.token) for keeper in self._keepers.values()]
        if removed:
            ray.wait(removed, num_returns=len(removed), timeout=_REMOVE_S)
        for keeper in self._keepers.values():
            ray.kill(keeper)
        self._keepers.clear()

    def kill(self, worker: int) -> None:
        """End a worker process, or never start it."""
        if worker not in self._slots:
            self._unwanted.add(worker)
        self.died(worker, None)

    def died(self, worker: int, error: BaseException | None) -> None:
        """Report the end of a worker once, whichever answer brought it first."""
        actor, cause = self._actors.pop(worker, None), exit_reason(error)
        if actor is None:
            return
        final = self._placement.lost(self._slots[worker], cause)
        if final is not None:
            if not self._closed.is_set():
                self._queue.fence(final)  # in-memory checkpoints stay for the next driver
            return
        if self._lease.check():  # otherwise it is another driver's
            with suppress(RayError):  # Ray may have failed to create it
                ray.kill(actor, no_restart=True)  # an unreachable worker must not come back
        self._queue.put(m.WorkerDied(worker=worker, cause=cause))

    def take_over(self, survivors: TakenOverActors) -> None:
        """Take over the survivors of the previous driver, and start the heartbeats."""
        self._keepers = dict(survivors.keepers)
        for actor, answer in survivors.workers:
            worker = answer.living.worker
            self._actors[worker] = actor
            self._nodes[worker] = (answer.living.node, answer.living.home)
            self._slots[worker] = answer.bundle
            self._placement.inherit(answer.bundle, answer.group)
            self._placement.found(answer.bundle, answer.living.home)
            self._await_end(worker)
        threading.Thread(target=self._beat, name="trainwright-beat", daemon=True).start()

    def watch_survivors(self) -> None:
        """Watch for notices for the workers that were taken over, once the driver knows them."""
        for worker in list(self._actors):
            self._notices.watch(worker)

    def _beat(self) -> None:
        """Send heartbeats to all actors, even while the driver's thread waits for a slow listener."""
        beats, reported = Heartbeats(), ""
        while not self._closed.is_set():
            try:
                self._beat_once(beats)
                reported = ""
            except Exception as error:  # without heartbeats all processes of the run would end
                text = f"cannot send heartbeats to the workers: {type(error).__name__}: {error}"
                if text != reported:
                    self._queue.put(partial(self._note, text))
                reported = text
            self._closed.wait(BEAT_S)

    def _beat_once(self, beats: Heartbeats) -> None:
        up = {worker: actor for worker, actor in [*self._actors.items()] if worker in self._nodes}
        for worker, silent_s in beats.send(up, self._lease.token).items():
            if silent_s > SILENT_S and self._is_expendable(worker):
                self._queue.put(partial(self.died, worker, WorkerLost(f"it did not answer for {silent_s:.0f} s")))
        for worker, actor in [*self._actors.items()]:
            if worker not in up:
                actor.beat.remote(self._lease.token)

        def answered(node: str, keeper: Any, beat: Future[Any]) -> None:
            ended = isinstance(beat.exception(), (ActorDiedError, ActorUnschedulableError))
            if ended and self._keepers.get(node) is keeper:
                del self._keepers[node]  # the next copy starts another, perhaps on another node of that name

        for node, keeper in [*self._keepers.items()]:
            self._queue.then(keeper.beat.remote(self._lease.token), partial(answered, node, keeper))

    def _is_expendable(self, worker: int) -> bool:  # an expendable worker that does not answer is replaced
        first_slot = 1 if self._plan.topology == "coordinator" else self._plan.processes - self._plan.workers
        return self._plan.topology != "collective" and self._slots.get(worker, 0) >= first_slot


# --- Why a process ended ----------------------------------------------------------------------------------------------


_EXIT_SIGNS = (
    ("NODE_OUT_OF_MEMORY", "Ray ended its process, because the node ran out of memory"),
    ("placement group was removed", "its place on the cluster was given back"),
    ("its node has died", "its node was lost"),
    ("node is dead", "its node was lost"),
    ("temporarily unavailable", "its process or node cannot be reached"),
    ("exit type: SYSTEM_ERROR", "its process was killed, ran out of memory or crashed"),
    ("exit type: USER_ERROR", "its process ended by itself"),
    ("exit type: INTENDED_USER_EXIT", "its process ended by itself"),
)


def exit_reason(error: BaseException | None) -> str:
    """Explain Ray's error about an actor; its first line if it is unknown. None: the driver ended the actor."""
    if error is None:
        return "killed by the driver"
    origin = error.cause if isinstance(error, RayTaskError) else error  # its own text begins with the name of the call
    text = str(origin).strip()
    reason = next((words for sign, words in _EXIT_SIGNS if sign in text), "")
    return reason or (text.splitlines()[0] if text else type(error).__name__)
