"""Effects carried out: actors, timers, the log. Each answers with an event on one queue."""

from __future__ import annotations

import heapq
import itertools
import queue
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainwright.actors import WORKER
from trainwright.causes import cause_of
from trainwright.core import events
from trainwright.core.errors import FencedError, TrainwrightError
from trainwright.core.group import Generation
from trainwright.core.plan import Placement
from trainwright.driver import messages as m
from trainwright.worker import WorkOrder

NEWS_EVERY_S = 0.2
WATCH_S = 5.0
_STRATEGY = {True: "PACK", False: "SPREAD"}  # accelerators close together; CPU slots over the nodes, data beside them


class Ledger(Protocol):
    """The run's log and checkpoints, as the world needs them."""

    def acquire(self) -> m.Acquired:
        """Take the run; raises RunConflict or StorageError."""

    def commit(self, commit: m.Commit) -> m.Committed:
        """Write the manifest and name the checkpoint; raises FencedError or StorageError."""

    def release(self, release: m.Release) -> None:
        """Give the run back."""


class World:
    """Carries out effects and collects what happens, on one thread: callbacks of others only queue.

    Args:
        order: what every worker gets.
        ledger: the run's log.
        emit: takes each event of the run.
    """

    def __init__(self, order: WorkOrder, ledger: Ledger, emit: Callable[[events.Event], object]) -> None:
        self._order = ray.put(order)
        self._plan = order.plan
        self._ledger = ledger
        self._emit = emit
        self._queue: queue.SimpleQueue[m.Happening | Callable[[], None]] = queue.SimpleQueue()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._timers: dict[str, int] = {}
        self._storage = ThreadPoolExecutor(1, thread_name_prefix="log")
        self._group: PlacementGroup | None = None
        self._actors: dict[int, Any] = {}
        self._watched: tuple[int, Generation] | None = None
        self._told = 0

    # --- events -------------------------------------------------------------------------------------------

    def put(self, event: m.Happening) -> None:
        """Something happened; from any thread."""
        self._queue.put(event)

    def next(self) -> m.Happening:
        """Wait for the next event; a timer that runs out is one."""
        while True:
            timeout = max(0.0, self._alarms[0][0] - time.monotonic()) if self._alarms else None
            try:
                item = self._queue.get(timeout=timeout)
            except queue.Empty:
                item = heapq.heappop(self._alarms)[2]
            if not callable(item):
                return item
            item()

    def _later(self, after_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._alarms, (time.monotonic() + after_s, next(self._count), action))

    def _then(self, ref: Any, action: Callable[[Future[Any]], None]) -> None:
        ref.future().add_done_callback(lambda done: self._queue.put(lambda: action(done)))

    def _set_timer(self, timer: m.SetTimer) -> None:
        self._timers[timer.name] = timer.number

        def expire() -> None:
            if self._timers.get(timer.name) == timer.number:
                del self._timers[timer.name]
                self.put(m.Expired(name=timer.name, number=timer.number))

        self._later(timer.after_s, expire)

    # --- effects ------------------------------------------------------------------------------------------

    def carry_out(self, effect: m.Effect) -> None:
        """Start one effect; never blocks for long. Finish is the caller's."""
        match effect:
            case m.Acquire():
                self._in_storage(self._ledger.acquire)
            case m.Place():
                self._place(effect)
            case m.Kill():
                self._kill(effect.worker)
            case m.Call():
                self._call(effect)
            case m.Commit():
                self._in_storage(lambda: self._commit(effect))
            case m.Release():
                self._in_storage(lambda: self._release(effect))
            case m.Emit():
                self._emit(effect.event)
            case m.SetTimer():
                self._set_timer(effect)
            case m.CancelTimer():
                self._timers.pop(effect.name, None)
            case m.Finish():
                self.close()

    def close(self) -> None:
        """End every worker and give back the placement group; safe to call twice."""
        for worker in list(self._actors):
            self._kill(worker)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        self._storage.shutdown(wait=False, cancel_futures=True)

    # --- workers ------------------------------------------------------------------------------------------

    def _place(self, effect: m.Place) -> None:
        if self._group is None:
            bundles = [_bundle(self._plan.placement)] * self._plan.workers
            self._group = placement_group(bundles, strategy=_STRATEGY[bool(self._plan.placement.accelerators)])
        options = {"num_cpus": 0} if effect.spare else _resources(self._plan.placement)
        spot = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=effect.slot)
        actor = WORKER.options(scheduling_strategy=spot, **options).remote(self._order, effect.worker)
        self._actors[effect.worker] = actor
        self._then(actor.hello.remote(effect.spare), lambda done: self._greeted(effect.worker, done))

    def _greeted(self, worker: int, done: Future[Any]) -> None:
        if done.exception() is not None:
            self._died(worker, done.exception())
            return
        actor, hello = self._actors.get(worker), done.result()
        if hello.trouble:
            self._died(worker, RuntimeError(hello.trouble))
        elif actor is not None:
            self.put(m.Started(worker=worker, node=hello.node, pid=hello.pid, accelerators=hello.accelerators))
            self._then(actor.live.remote(), lambda end: self._died(worker, end.exception()))

    def _kill(self, worker: int) -> None:
        self._died(worker, None)

    def _died(self, worker: int, error: BaseException | None) -> None:
        """Tell a death once, whichever future brought it first."""
        actor = self._actors.pop(worker, None)
        if actor is not None:
            ray.kill(actor, no_restart=True)  # unreachable is as good as dead, and must stay so
            self.put(m.Died(worker=worker, cause=cause_of(error)))

    def _call(self, effect: m.Call) -> None:
        actor = self._actors.get(effect.worker)
        if actor is None:
            return  # its death has been told
        if effect.verb == "heal":
            self._told, self._watched = min(self._told, effect.argument.step), None
        if effect.verb == "run":
            self._watch(effect)
        if effect.verb == "stop":
            ref = actor.stop.remote()
        elif effect.verb == "interrupt":
            ref = actor.interrupt.remote(effect.generation.number, effect.argument)
        else:
            ref = (actor.upload if effect.verb == "upload" else actor.call).remote(effect.verb, effect.argument)
        self._then(ref, lambda done: self._answered(effect, done))

    def _answered(self, call: m.Call, done: Future[Any]) -> None:
        if done.exception() is not None:
            self._died(call.worker, done.exception())
            return
        value = done.result()
        about: dict[str, Any] = {"worker": call.worker, "generation": call.generation, "verb": call.verb}
        failed = isinstance(value, m.Failure)
        event = m.Raised(**about, failure=value) if failed else m.Returned(**about, value=value)
        if call.verb == "run" and (failed or self._watched == (call.worker, call.generation)):
            self._tell_rest(event)  # every rank knows every step
        else:
            self.put(event)

    # --- news ---------------------------------------------------------------------------------------------

    def _watch(self, call: m.Call) -> None:
        """Watch the oldest worker of a generation: it has been there longest and knows every step."""
        watched = self._watched
        if watched is None or watched[1] != call.generation or watched[0] > call.worker:
            self._watched = (call.worker, call.generation)
            self._ask(self._watched)

    def _ask(self, watched: tuple[int, Generation]) -> None:
        actor = self._actors.get(watched[0])
        if actor is not None and self._watched == watched:
            self._then(actor.watch.remote(self._told, WATCH_S), lambda done: self._heard(watched, done))

    def _heard(self, watched: tuple[int, Generation], done: Future[Any]) -> None:
        """Pass news on, and ask again a little later."""
        if done.exception() is not None:
            self._died(watched[0], done.exception())
        elif self._watched == watched:
            self._tell(watched[1], done.result())
            self._later(NEWS_EVERY_S, lambda: self._ask(watched))

    def _tell_rest(self, event: m.Returned | m.Raised) -> None:
        """Tell the last steps of a segment before its end."""

        def told(done: Future[Any]) -> None:
            if done.exception() is not None:
                self._died(event.worker, done.exception())
            else:
                self._tell(event.generation, done.result())
                self.put(event)

        actor = self._actors.get(event.worker)
        if actor is not None:
            self._then(actor.watch.remote(self._told, 0.0), told)

    def _tell(self, generation: Generation, news: events.Steps) -> None:
        fresh = news.after(self._told)
        if fresh.step:
            self._told = fresh.step[-1]
            self._emit(fresh)
            self.put(m.Progressed(generation=generation, step=self._told))

    # --- storage ------------------------------------------------------------------------------------------

    def _in_storage(self, action: Callable[[], m.Happening]) -> None:
        def run() -> None:
            try:
                self.put(action())
            except TrainwrightError as error:
                self.put(m.Lost(error=error))
            except Exception as error:  # nobody else would hear of it, and the driver would wait for ever
                told = TrainwrightError(f"{type(error).__name__}: {error}", detail=traceback.format_exc())
                self.put(m.Lost(error=told))

        self._storage.submit(run)

    def _commit(self, effect: m.Commit) -> m.Happening:
        try:
            return self._ledger.commit(effect)
        except FencedError:
            raise
        except TrainwrightError as error:
            return m.CommitFailed(step=effect.step, error=error)

    def _release(self, effect: m.Release) -> m.Happening:
        self._ledger.release(effect)
        return m.Released()


def _resources(placement: Placement) -> dict[str, Any]:
    """What Ray gives a worker."""
    options: dict[str, Any] = {"num_cpus": placement.cpus}
    if placement.accelerator == "GPU":
        options["num_gpus"] = placement.accelerators
    elif placement.accelerator:
        options["resources"] = {placement.accelerator: placement.accelerators}
    return options


def _bundle(placement: Placement) -> dict[str, float]:
    bundle = {"CPU": placement.cpus}
    if placement.accelerators:
        bundle[placement.accelerator] = float(placement.accelerators)
    return bundle
