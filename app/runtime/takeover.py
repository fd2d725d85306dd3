"""Named, detached actors that outlive a driver, which the next driver of the run finds and takes over.

Workers and in-memory checkpoint stores carry the name of their run. They end by themselves if no driver has called for
`_DRIVER_TIMEOUT_S`. A killed driver costs no step if its cluster survives: the next one interrupts the workers, which
then form a new group.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from trainwright.core.errors import FencedError, TrainwrightError
from trainwright.driver.messages import CallFailure, MemoryCheckpoint, SurvivingWorker
from trainwright.storage.run_log import LEASE_S, boottime_s
from trainwright.storage.run_store import RunStore

NAMESPACE = "trainwright"
BEAT_S, _DRIVER_TIMEOUT_S = 10.0, 60.0
_TICK_S, _LONGEST_TICK_S = 1.0, 5.0  # of the watchdog's thread; in a longer tick the process was frozen
_ANSWER_S = 15.0
_log = logging.getLogger(__name__)


def run_name(uri: str) -> str:
    """Return the name of a run's actors in the cluster; `uri` names the run in its store."""
    return f"trainwright/{hashlib.sha256(uri.encode()).hexdigest()[:12]}"


def memory_store_name(run: str, node: str) -> str:
    """Return the actor name of a node's in-memory checkpoint store."""
    return f"{run}/keeper/{node}"


def placement_group_prefix(run: str) -> str:
    """Return the prefix of the names of a run's placement groups."""
    return f"{run}/room"


def detached_options(name: str) -> dict[str, Any]:
    """Return the options of an actor that outlives its driver."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


class DriverWatchdog:
    """Ends this process when no driver has called for a while, and releases its bundle of resources.

    Only time in which this process runs counts: a driver that was frozen too needs a moment to call again.

    Args:
        cleanup: called before the end.
        lent: whether the bundle belongs to another process, which releases it.
    """

    def __init__(self, cleanup: Callable[[], object] = lambda: None, *, lent: bool = False) -> None:
        self._cleanup = cleanup
        self._group: PlacementGroup | None = None if lent else ray.util.get_current_placement_group()
        self._ran_s = self._heard_s = 0.0  # both on the clock of this process, which stops where it is frozen
        threading.Thread(target=self._look, name="trainwright-watchdog", daemon=True).start()

    def heard(self) -> None:
        """Note that a driver called."""
        self._heard_s = self._ran_s

    def _look(self) -> None:
        tick = threading.Event()
        while self._ran_s - self._heard_s < _DRIVER_TIMEOUT_S:
            begun_s = time.monotonic()
            tick.wait(_TICK_S)
            self._ran_s += min(time.monotonic() - begun_s, _LONGEST_TICK_S)
        self.end()

    def end(self) -> None:
        """End this process now."""
        try:
            self._cleanup()
            if self._group is not None:  # other processes with bundles of this group have no driver either
                remove_placement_group(self._group)
        except Exception:
            _log.exception("cannot release the resources of this process")
        finally:
            os._exit(0)


@dataclass(frozen=True, kw_only=True)
class TakeoverAnswer:
    """The answer of a worker that belongs to a new driver from now on."""

    living: SurvivingWorker
    bundle: int  # slot in whose bundle it was placed
    group: PlacementGroup


@dataclass(frozen=True, kw_only=True)
class TakenOverActors:
    """The actors that outlived the previous driver."""

    workers: tuple[tuple[Any, TakeoverAnswer], ...] = ()  # with their actors
    keepers: dict[str, Any] = field(default_factory=dict)  # by node
    kept: MemoryCheckpoint | None = None


@contextmanager
def kept_alive(run: str) -> Iterator[None]:
    """Keep the processes of a run from ending by themselves while a driver prepares to take them over.

    The preparation can take any time: it may read all data once, or a long history.
    """
    over = threading.Event()

    def call() -> None:
        reported = False
        while not over.is_set():
            try:
                _keep_alive(run)
                reported = False
            except Exception as error:  # the thread goes on: without it the workers would end by themselves
                cause = f"{type(error).__name__}: {error}"
                if not reported:
                    _log.warning("cannot keep the workers of the previous driver alive: %s", cause)
                reported = True
            over.wait(BEAT_S)

    thread = threading.Thread(target=call, name="trainwright-keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BEAT_S)


def _keep_alive(run: str) -> None:
    for name in _names(run):
        actor = _actor(name)
        if actor is not None and not name.endswith("/driver"):
            actor.keep_alive.remote()


def take_over(
    run: str, order: Any, token: int, *, fresh: bool = False, assure: Callable[[], object] = lambda: None
) -> TakenOverActors:
    """Find and take over the actors of a run; end workers that belong to another job or do not answer.

    Placement groups of the run without a living worker are removed.

    Args:
        order: reference to the new WorkerConfig.
        token: fencing token of the new driver.
        fresh: end all actors, because the run starts again.
        assure: raises FencedError if another driver has the run; called before anything is ended.

    Raises:
        FencedError: another driver has taken them over since.
    """
    actors = {name: actor for name in _names(run) if (actor := _actor(name)) is not None}
    workers = [actor for name, actor in actors.items() if name.startswith(f"{run}/worker-")]
    prefix = memory_store_name(run, "")
    keepers = {name.removeprefix(prefix): actor for name, actor in actors.items() if name.startswith(prefix)}
    if fresh:
        assure()
        _end([*workers, *keepers.values()], token, give_back=True)
        _remove_unused_groups(run, ())
        return TakenOverActors()
    answers = _collect_answers([(actor, actor.adopt.remote(order, token)) for actor in workers])
    for _, answer in answers:
        if isinstance(answer, CallFailure):
            raise answer.error
    survivors = [(actor, answer) for actor, answer in answers if answer is not None]
    foreign = [actor for actor, answer in answers if answer is None]
    copies = [copy for _, copy in _collect_answers([(actor, actor.adopt.remote(token)) for actor in keepers.values()])]
    complete = [copy for copy in copies if isinstance(copy, MemoryCheckpoint)]
    assure()
    _end(foreign, token, give_back=not survivors)  # they may hold bundles of one group
    _remove_unused_groups(run, [answer.group for _, answer in survivors])
    return TakenOverActors(
        workers=tuple(sorted(survivors, key=lambda survivor: survivor[1].living.worker)),
        keepers=keepers,
        kept=max(complete, key=lambda copy: copy.version, default=None),
    )


def _end(actors: list[Any], token: int, *, give_back: bool) -> None:
    """End actors, even if they do not answer; with `give_back`, actors that answer release their bundles first."""
    if give_back:
        _collect_answers([(actor, actor.end.remote(token)) for actor in actors])
    for actor in actors:
        with suppress(RayError):
            ray.kill(actor, no_restart=True)


def _remove_unused_groups(run: str, inhabited: Iterable[PlacementGroup]) -> None:
    """Remove a run's other placement groups."""
    used_ids = {group.id.hex() for group in inhabited}
    table: dict[str, dict[str, Any]] = placement_group_table()
    for number, facts in table.items():
        empty = facts["name"].startswith(f"{placement_group_prefix(run)}/") and number not in used_ids
        if empty and facts["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))


def _names(run: str) -> list[str]:
    listed: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return sorted(item["name"] for item in listed if item["namespace"] == NAMESPACE and item["name"].startswith(run))


def _actor(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:  # it ended meanwhile
        return None


def _collect_answers(calls: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return each actor with its answer; None if it has died or does not answer."""
    if calls:
        ray.wait([ref for _, ref in calls], num_returns=len(calls), timeout=_ANSWER_S)
    answers = []
    for actor, ref in calls:
        try:
            answers.append((actor, ray.get(ref, timeout=0.1)))
        except RayError:
            answers.append((actor, None))
    return answers


class Heartbeats:
    """Sends heartbeats, and tracks unanswered ones. For one thread."""

    def __init__(self) -> None:
        self._unanswered: dict[int, tuple[Any, float]] = {}  # first heartbeat without an answer, and when it was sent

    def send(self, actors: Mapping[int, Any], token: int) -> Mapping[int, float]:
        """Send a heartbeat to each actor; return the seconds since the first unanswered one, by worker."""
        now_s = time.monotonic()
        new_beats = {number: (actor.beat.remote(token), now_s) for number, actor in actors.items()}
        pending = {number: beat for number, beat in self._unanswered.items() if not ray.wait([beat[0]], timeout=0)[0]}
        self._unanswered = {number: pending.get(number, new) for number, new in new_beats.items()}
        return {number: now_s - since_s for number, (_, since_s) in self._unanswered.items() if since_s < now_s}


# --- The lease of the driver ------------------------------------------------------------------------------------------


_BEAT_ANSWER_S = 1.0


class DriverLease:
    """The right of this driver to act on the run. For the driver's thread; `lose` may be called from any.

    Args:
        run_store: asked first whether the lease is valid.
        processes: returns the actors of the run, which are asked while the store cannot be reached.

    Attributes:
        token: fencing token of this driver; 0 before it has the lease.
        lost: why another driver has the run; None while this one has it.
    """

    def __init__(self, run_store: RunStore, processes: Callable[[], Sequence[Any]]) -> None:
        self.token = 0
        self.lost: TrainwrightError | None = None
        self._run_store, self._processes = run_store, processes
        self._asked_workers_s = 0.0

    def check(self) -> bool:
        """Return whether this driver may act."""
        if self.token and self.lost is None:
            try:
                if not self._run_store.assure():
                    self._ask_workers()
            except FencedError as error:
                self.lost = error
        return self.lost is None

    def lose(self, error: TrainwrightError) -> None:
        """Note that another driver has the run."""
        self.lost = error

    def _ask_workers(self) -> None:
        now_s = boottime_s()
        if now_s - self._asked_workers_s < LEASE_S:
            return
        refs = [actor.beat.remote(self.token) for actor in self._processes()]
        for ref in ray.wait(refs, num_returns=len(refs), timeout=_BEAT_ANSWER_S)[0] if refs else []:
            with suppress(RayError):  # the death of the process is reported elsewhere
                refusal = ray.get(ref)
                if refusal is not None:
                    raise refusal.error
        self._asked_workers_s = now_s
