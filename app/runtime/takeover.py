"""What outlives a driver: named, detached actors, which the next driver of the run finds and takes over.

Workers and keepers of a run carry its name; they end by themselves when no driver has called for `ORPHAN_S`. So a
killed driver costs no step where its cluster lives on: the next one interrupts the workers, and they form anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from trainwright.driver.messages import Failure, KeptState, Living

NAMESPACE = "trainwright"
BEAT_S, ORPHAN_S = 10.0, 60.0
ADOPT_S = 15.0
_log = logging.getLogger(__name__)


def run_name(uri: str) -> str:
    """How the actors of a run are called in the cluster; `uri` names the run in its store."""
    return f"trainwright/{hashlib.sha256(uri.encode()).hexdigest()[:12]}"


def keeper_name(run: str, node: str) -> str:
    """The name of a node's keeper."""
    return f"{run}/keeper/{node}"


def room_name(run: str) -> str:
    """With what the names of a run's placement groups begin."""
    return f"{run}/room"


def lasting(name: str) -> dict[str, Any]:
    """Options of an actor that outlives its driver."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


class Orphanage:
    """Ends this process when no driver has called for a while, and gives its bundle of resources back.

    Args:
        last: to do before.
        lent: the bundle is another's, who gives it back.
    """

    def __init__(self, last: Callable[[], object] = lambda: None, *, lent: bool = False) -> None:
        self._last = last
        self._group: PlacementGroup | None = None if lent else ray.util.get_current_placement_group()
        self._heard_s = time.monotonic()
        threading.Thread(target=self._look, name="trainwright-orphanage", daemon=True).start()

    def heard(self) -> None:
        """A driver called."""
        self._heard_s = time.monotonic()

    def _look(self) -> None:
        tick = threading.Event()
        while time.monotonic() - self._heard_s < ORPHAN_S:
            tick.wait(1.0)
        self.end()

    def end(self) -> None:
        """End this process now."""
        try:
            self._last()
            if self._group is not None:  # where others hold bundles of the same group, they are orphans too
                remove_placement_group(self._group)
        finally:
            os._exit(0)


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """A worker's answer to a new driver. `trouble`: why it is of no use."""

    living: Living | None = None
    node_id: str = ""
    group: PlacementGroup | None = None
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A worker that was taken over."""

    living: Living
    actor: Any
    node_id: str
    group: PlacementGroup


@dataclass(frozen=True, kw_only=True)
class Found:
    """What outlived the driver before."""

    workers: tuple[Survivor, ...] = ()
    keepers: dict[str, Any] = field(default_factory=dict)  # by node
    kept: KeptState | None = None


@contextmanager
def kept_alive(run: str) -> Iterator[None]:
    """Keep the processes of a run from ending by themselves while a driver prepares to take them over.

    What a driver does before that has no bound: it may read all data once, or a long history.
    """
    over = threading.Event()

    def call() -> None:
        told = False
        while not over.is_set():
            try:
                _keep_alive(run)
                told = False
            except Exception as error:  # the thread goes on: without it they would end by themselves
                cause = f"{type(error).__name__}: {error}"
                if not told:
                    _log.warning("workers of the driver before cannot be kept from ending: %s", cause)
                told = True
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
) -> Found:
    """Find the actors of a run and make them ours; workers that belong to another job, or do not answer, are ended.

    Room of the run in which none of them lives is given back: who was in it died with the driver.

    Args:
        order: reference to the new WorkOrder.
        token: of the new driver.
        fresh: end them all, since the run begins again.
        assure: raises FencedError where another driver has the run; called before anything is ended.

    Raises:
        FencedError: another driver has taken them over since.
    """
    actors = {name: actor for name in _names(run) if (actor := _actor(name)) is not None}
    workers = [actor for name, actor in actors.items() if name.startswith(f"{run}/worker-")]
    prefix = keeper_name(run, "")
    keepers = {name.removeprefix(prefix): actor for name, actor in actors.items() if name.startswith(prefix)}
    if fresh:
        assure()
        _end([*workers, *keepers.values()], token, give_back=True)
        _clear(run, ())
        return Found()
    survivors, foreign = [], []
    for actor, answer in _asked([(actor, actor.adopt.remote(order, token)) for actor in workers]):
        if isinstance(answer, Failure):
            raise answer.error
        if answer is None or answer.living is None:
            foreign.append(actor)
        else:
            survivors.append(Survivor(living=answer.living, actor=actor, node_id=answer.node_id, group=answer.group))
    kept = [kept for _, kept in _asked([(actor, actor.adopt.remote(token)) for actor in keepers.values()])]
    sealed = [found for found in kept if isinstance(found, KeptState)]
    assure()
    _end(foreign, token, give_back=not survivors)  # they may hold bundles of one group
    _clear(run, [survivor.group for survivor in survivors])
    return Found(
        workers=tuple(sorted(survivors, key=lambda survivor: survivor.living.worker)),
        keepers=keepers,
        kept=max(sealed, key=lambda kept: kept.version, default=None),
    )


def _end(actors: list[Any], token: int, *, give_back: bool) -> None:
    """End them, those who do not answer too; on the way they give their bundles back."""
    if give_back:
        _asked([(actor, actor.end.remote(token)) for actor in actors])
    for actor in actors:
        with suppress(RayError):
            ray.kill(actor, no_restart=True)


def _clear(run: str, inhabited: Iterable[PlacementGroup]) -> None:
    """Remove a run's other placement groups."""
    kept = {group.id.hex() for group in inhabited}
    table: dict[str, dict[str, Any]] = placement_group_table()
    for number, facts in table.items():
        empty = facts["name"].startswith(f"{room_name(run)}/") and number not in kept
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


def _asked(calls: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Each actor with its answer; None of one that has died or is silent."""
    if calls:
        ray.wait([ref for _, ref in calls], num_returns=len(calls), timeout=ADOPT_S)
    answers = []
    for actor, ref in calls:
        try:
            answers.append((actor, ray.get(ref, timeout=0.1)))
        except RayError:
            answers.append((actor, None))
    return answers


class Beats:
    """What was asked of whom, and is not answered yet. For one thread."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Any, float]] = {}

    def send(self, actors: Mapping[int, Any], token: int) -> Mapping[int, float]:
        """Send each a beat; gives, by process, for how many seconds those have not answered that still owe one."""
        now_s = time.monotonic()
        sent = {number: actor.beat.remote(token) for number, actor in actors.items()}
        self._asked = {number: self._owed(number) or (ref, now_s) for number, ref in sent.items()}
        return {number: now_s - since_s for number, (_, since_s) in self._asked.items() if since_s < now_s}

    def _owed(self, number: int) -> tuple[Any, float] | None:
        """The first beat that was not answered."""
        asked = self._asked.get(number)
        return None if asked is None or ray.wait([asked[0]], timeout=0)[0] else asked
