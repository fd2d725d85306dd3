"""Every node of a cluster is looked at by tasks and actors that are pinned to it; none is waited for without end."""

from __future__ import annotations

import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from trainwright.core.errors import StorageError
from trainwright.diagnostics.facts import Absent, Fleet, Link, Machine
from trainwright.diagnostics.link_benchmark import KEY_BYTES, Listener, measure
from trainwright.diagnostics.link_schedule import ALL_PAIRS, rounds
from trainwright.diagnostics.machine_probe import Wish, visit
from trainwright.diagnostics.software import digest
from trainwright.diagnostics.storage_probe import leave_mark, marks, wipe_marks

LINK_S = 30.0  # for one measurement, with what Ray takes on top
_LOST = "look whether it is up: ray list nodes; its own words are in /tmp/ray/session_latest/logs/raylet.out there"
_SAME = "install the same trainwright on every node, restart Ray there, then ask again"


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A node to visit. `number` is Ray's, `believed` its resources."""

    name: str
    number: str
    address: str
    believed: Mapping[str, float]


def stops(listed: Iterable[Mapping[str, Any]]) -> tuple[Stop, ...]:
    """The living nodes of `ray.nodes()`, by names that differ."""
    alive = [facts for facts in listed if facts["Alive"]]
    hosts = Counter(facts["NodeManagerHostname"] for facts in alive)
    return tuple(
        Stop(
            name=facts["NodeManagerHostname"]
            if hosts[facts["NodeManagerHostname"]] == 1
            else f"{facts['NodeManagerHostname']}-{facts['NodeID'][:6]}",
            number=facts["NodeID"],
            address=facts["NodeManagerAddress"],
            believed=dict(facts["Resources"]),
        )
        for facts in alive
    )


def look(wish: Wish) -> Fleet:
    """All facts of the connected cluster."""
    import ray

    found = stops(ray.nodes())  # type: ignore[no-untyped-call]
    machines: dict[str, Machine] = {}
    absent: dict[str, Absent] = {}
    told = everywhere(found, _report, lambda stop: (wish, digest(), stop.address, dict(stop.believed)), wish.deadline_s)
    for name, answer in told.items():
        if isinstance(answer, Absent):
            absent[name] = answer
        elif answer[1] is None:
            absent[name] = Absent(why=f"runs other code of trainwright ({answer[0]}, here {digest()})", remedy=_SAME)
        else:
            machines[name] = answer[1]
    there = [stop for stop in found if stop.name in machines]
    seen = _shared(wish, there, machines) if wish.storage and len(there) > 1 else {}
    links = _links(there, wish.deadline_s) if len(there) > 1 else ()
    return Fleet(machines=machines, absent=absent, links=links, seen=seen, sampled=len(there) > ALL_PAIRS)


def _report(wish: Wish, expected: str, address: str, believed: Mapping[str, float]) -> tuple[str, Machine | None]:
    """On a node: the digest of its code, and its facts where they mean the same there as here."""
    own = digest()
    return own, visit(wish, ray_address=address, believed=believed) if own == expected else None


def everywhere(
    there: Sequence[Stop], function: Callable[..., Any], arguments: Callable[[Stop], tuple[Any, ...]], deadline_s: float
) -> dict[str, Any]:
    """What a function gives on each node, all at once; Absent for those that fail or do not answer in time."""
    import ray

    tasks = {
        ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=_pinned(stop))(function).remote(
            *arguments(stop)
        ): stop
        for stop in there
    }
    answers = awaited(list(tasks), deadline_s)
    for task, answer in answers.items():
        if isinstance(answer, Absent) and answer.why.startswith("did not answer"):
            with suppress(ray.exceptions.RayError):
                ray.cancel(task, force=True)
    return {stop.name: answers[task] for task, stop in tasks.items()}


def awaited(tasks: Sequence[Any], deadline_s: float) -> dict[Any, Any]:
    """Results by task; Absent for those that fail, or are not there by the deadline."""
    import ray

    ready, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=deadline_s)
    answers: dict[Any, Any] = {
        task: Absent(why=f"did not answer within {deadline_s:.0f} s", remedy=_LOST) for task in late
    }
    for task in ready:
        try:
            answers[task] = ray.get(task)
        except (ray.exceptions.RayError, RuntimeError, ImportError) as error:
            answers[task] = absent_of(error)
    return answers


def absent_of(error: Exception) -> Absent:
    """Why a node says nothing, of what Ray raised."""
    text = str(error)
    if "No module named 'trainwright" in text or "failed to import on the worker" in text:
        return Absent(why="trainwright cannot be imported there", remedy=_SAME)
    kind = type(error).__name__
    if any(word in kind for word in ("Died", "Crashed", "Unavailable", "Unschedulable", "NodeDied")):
        return Absent(why="was lost while it was looked at", remedy=_LOST)
    last = text.strip().splitlines()[-1:] or [kind]
    return Absent(why=f"the examination failed there: {last[0][:200]}", remedy=_LOST)


def _pinned(stop: Stop) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(stop.number, soft=False)


# --- storage ----------------------------------------------------------------------------------------------


def _shared(wish: Wish, there: Sequence[Stop], machines: Mapping[str, Machine]) -> dict[str, frozenset[str]]:
    """Whose marks each node sees, of the nodes that can write."""
    able = [stop for stop in there if (stored := machines[stop.name].stored) is not None and not stored.fault]
    names, visit_id = {stop.number: stop.name for stop in able}, uuid.uuid4().hex
    everywhere(able, _left, lambda stop: (wish.storage, visit_id, stop.number), wish.deadline_s)
    try:
        told = everywhere(able, _seen, lambda stop: (wish.storage, visit_id), wish.deadline_s)
    finally:
        everywhere(able, _wiped, lambda stop: (wish.storage, visit_id), wish.deadline_s)
    return {
        name: frozenset(names[number] for number in numbers if number in names)
        for name, numbers in told.items()
        if not isinstance(numbers, Absent)
    }


def _left(uri: str, visit_id: str, node: str) -> None:
    with suppress(StorageError):  # nobody will see it, which is then told
        leave_mark(uri, visit_id, node)


def _seen(uri: str, visit_id: str) -> frozenset[str]:
    try:
        return marks(uri, visit_id)
    except StorageError:
        return frozenset()


def _wiped(uri: str, visit_id: str) -> None:
    with suppress(StorageError):  # by another node, where they share it
        wipe_marks(uri, visit_id)


# --- links ------------------------------------------------------------------------------------------------


class Correspondent:
    """On a node: answers those who measure, and measures."""

    def __init__(self, key: bytes) -> None:
        self._key, self._listener = key, Listener(key)

    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._listener.address

    def measure(self, source: str, target: str, address: tuple[str, int]) -> Link:
        """The way to another."""
        return measure(source, target, address, self._key)


def _links(there: Sequence[Stop], deadline_s: float) -> tuple[Link, ...]:
    """Both directions of each pair, one after the other; in a round no node is in two pairs."""
    import ray

    key = secrets.token_bytes(KEY_BYTES)
    actors: dict[str, Any] = {}
    try:
        for stop in there:
            made: Any = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=_pinned(stop))(Correspondent)
            actors[stop.name] = made.remote(key)
        asked = {name: actor.address.remote() for name, actor in actors.items()}
        answers = awaited(list(asked.values()), deadline_s)
        addresses = {name: answers[task] for name, task in asked.items()}
        found: list[Link] = []
        for pairs in rounds([stop.name for stop in there]):
            for way in (pairs, tuple((target, source) for source, target in pairs)):
                found += _measured(way, actors, addresses)
        return tuple(found)
    finally:
        for actor in actors.values():
            ray.kill(actor)


def _measured(
    pairs: Iterable[tuple[str, str]], actors: Mapping[str, Any], addresses: Mapping[str, Any]
) -> Iterable[Link]:
    tasks, found = {}, []
    for source, target in pairs:
        absent = next((addresses[end] for end in (source, target) if isinstance(addresses[end], Absent)), None)
        link = Link(source=source, target=target)
        if absent is not None:
            found.append(replace(link, fault=f"its address: {absent.why}"))
        else:
            tasks[actors[source].measure.remote(source, target, addresses[target])] = link
    answers = awaited(list(tasks), LINK_S) if tasks else {}
    for task, link in tasks.items():
        answer = answers[task]
        fault = f"{addresses[link.target][0]}: {answer.why}" if isinstance(answer, Absent) else ""
        found.append(replace(link, fault=fault) if fault else answer)
    return found
