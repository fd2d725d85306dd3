"""Every node of a cluster is looked at by tasks and actors that are pinned to it; none is waited for without end.

The one who measures connects and proves by a key that it belongs to the examination. Then it sends single letters:
`t` is answered with the other's clock, `b` with bytes until it hangs up.
"""

from __future__ import annotations

import random
import secrets
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from trainwright.core.errors import StorageError
from trainwright.diagnostics.machine_probe import ProbeOptions, code_digest, probe_machine
from trainwright.diagnostics.node_facts import ClusterFacts, LinkMeasurement, MachineFacts, UnreachableNode
from trainwright.diagnostics.storage_probe import delete_marks, read_marks, write_mark
from trainwright.strategies.common.host_address import bind_socket, own_host

_LINK_TIMEOUT_S = 30.0  # for one measurement, with what Ray takes on top
_LOST_REMEDY = (
    "look whether it is up: ray list nodes; its own words are in /tmp/ray/session_latest/logs/raylet.out there"
)
_INSTALL_REMEDY = "install the same trainwright on every node, restart Ray there, then ask again"


@dataclass(frozen=True, kw_only=True)
class _ProbedNode:
    """A node to visit. `number` is Ray's, `believed` its resources."""

    name: str
    number: str
    address: str
    believed: Mapping[str, float]


def living_nodes(listed: Iterable[Mapping[str, Any]]) -> tuple[_ProbedNode, ...]:
    """The living nodes of `ray.nodes()`, by names that differ."""
    alive = [facts for facts in listed if facts["Alive"]]
    hosts = Counter(facts["NodeManagerHostname"] for facts in alive)
    return tuple(
        _ProbedNode(
            name=facts["NodeManagerHostname"]
            if hosts[facts["NodeManagerHostname"]] == 1
            else f"{facts['NodeManagerHostname']}-{facts['NodeID'][:6]}",
            number=facts["NodeID"],
            address=facts["NodeManagerAddress"],
            believed=dict(facts["Resources"]),
        )
        for facts in alive
    )


def probe_cluster(wish: ProbeOptions) -> ClusterFacts:
    """All facts of the connected cluster."""
    import ray

    found = living_nodes(ray.nodes())  # type: ignore[no-untyped-call]
    machines: dict[str, MachineFacts] = {}
    absent: dict[str, UnreachableNode] = {}
    told = run_on_nodes(
        found, _probe_node, lambda stop: (wish, code_digest(), stop.address, dict(stop.believed)), wish.deadline_s
    )
    for name, answer in told.items():
        if isinstance(answer, UnreachableNode):
            absent[name] = answer
        elif answer[1] is None:
            absent[name] = UnreachableNode(
                why=f"runs other code of trainwright ({answer[0]}, here {code_digest()})", remedy=_INSTALL_REMEDY
            )
        else:
            machines[name] = answer[1]
    there = [stop for stop in found if stop.name in machines]
    seen = _probe_shared_storage(wish, there, machines) if wish.storage and len(there) > 1 else {}
    links = _measure_links(there, wish.deadline_s) if len(there) > 1 else ()
    return ClusterFacts(machines=machines, absent=absent, links=links, seen=seen, sampled=len(there) > _ALL_PAIRS)


def _probe_node(
    wish: ProbeOptions, expected: str, address: str, believed: Mapping[str, float]
) -> tuple[str, MachineFacts | None]:
    """On a node: the digest of its code, and its facts where they mean the same there as here."""
    own = code_digest()
    return own, probe_machine(wish, ray_address=address, believed=believed) if own == expected else None


def run_on_nodes(
    there: Sequence[_ProbedNode],
    function: Callable[..., Any],
    arguments: Callable[[_ProbedNode], tuple[Any, ...]],
    deadline_s: float,
) -> dict[str, Any]:
    """What a function gives on each node, all at once; Absent for those that fail or do not answer in time."""
    import ray

    tasks = {
        ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=_pinned(stop))(function).remote(
            *arguments(stop)
        ): stop
        for stop in there
    }
    answers = _await_results(list(tasks), deadline_s)
    for task, answer in answers.items():
        if isinstance(answer, UnreachableNode) and answer.why.startswith("did not answer"):
            with suppress(ray.exceptions.RayError):
                ray.cancel(task, force=True)
    return {stop.name: answers[task] for task, stop in tasks.items()}


def _await_results(tasks: Sequence[Any], deadline_s: float) -> dict[Any, Any]:
    """Results by task; Absent for those that fail, or are not there by the deadline."""
    import ray

    ready, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=deadline_s)
    answers: dict[Any, Any] = {
        task: UnreachableNode(why=f"did not answer within {deadline_s:.0f} s", remedy=_LOST_REMEDY) for task in late
    }
    for task in ready:
        try:
            answers[task] = ray.get(task)
        except (ray.exceptions.RayError, RuntimeError, ImportError) as error:
            answers[task] = failure_reason(error)
    return answers


def failure_reason(error: Exception) -> UnreachableNode:
    """Why a node says nothing, of what Ray raised."""
    text = str(error)
    if "No module named 'trainwright" in text or "failed to import on the worker" in text:
        return UnreachableNode(why="trainwright cannot be imported there", remedy=_INSTALL_REMEDY)
    kind = type(error).__name__
    if any(word in kind for word in ("Died", "Crashed", "Unavailable", "Unschedulable", "NodeDied")):
        return UnreachableNode(why="was lost while it was looked at", remedy=_LOST_REMEDY)
    last = text.strip().splitlines()[-1:] or [kind]
    return UnreachableNode(why=f"the examination failed there: {last[0][:200]}", remedy=_LOST_REMEDY)


def _pinned(stop: _ProbedNode) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(stop.number, soft=False)


# --- storage ----------------------------------------------------------------------------------------------


def _probe_shared_storage(
    wish: ProbeOptions, there: Sequence[_ProbedNode], machines: Mapping[str, MachineFacts]
) -> dict[str, frozenset[str]]:
    """Whose marks each node sees, of the nodes that can write."""
    able = [stop for stop in there if (stored := machines[stop.name].stored) is not None and not stored.fault]
    names, visit_id = {stop.number: stop.name for stop in able}, uuid.uuid4().hex
    run_on_nodes(able, _leave_mark, lambda stop: (wish.storage, visit_id, stop.number), wish.deadline_s)
    try:
        told = run_on_nodes(able, _read_marks, lambda stop: (wish.storage, visit_id), wish.deadline_s)
    finally:
        run_on_nodes(able, _delete_marks, lambda stop: (wish.storage, visit_id), wish.deadline_s)
    return {
        name: frozenset(names[number] for number in numbers if number in names)
        for name, numbers in told.items()
        if not isinstance(numbers, UnreachableNode)
    }


def _leave_mark(uri: str, visit_id: str, node: str) -> None:
    with suppress(StorageError):  # nobody will see it, which is then told
        write_mark(uri, visit_id, node)


def _read_marks(uri: str, visit_id: str) -> frozenset[str]:
    try:
        return read_marks(uri, visit_id)
    except StorageError:
        return frozenset()


def _delete_marks(uri: str, visit_id: str) -> None:
    with suppress(StorageError):  # by another node, where they share it
        delete_marks(uri, visit_id)


# --- links ------------------------------------------------------------------------------------------------


class _LinkActor:
    """On a node: answers those who measure, and measures."""

    def __init__(self, key: bytes) -> None:
        self._key, self._listener = key, LinkServer(key)

    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._listener.address

    def measure(self, source: str, target: str, address: tuple[str, int]) -> LinkMeasurement:
        """The way to another."""
        return measure_link(source, target, address, self._key)


def _measure_links(there: Sequence[_ProbedNode], deadline_s: float) -> tuple[LinkMeasurement, ...]:
    """Both directions of each pair, one after the other; in a round no node is in two pairs."""
    import ray

    key = secrets.token_bytes(_KEY_BYTES)
    actors: dict[str, Any] = {}
    try:
        for stop in there:
            made: Any = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=_pinned(stop))(_LinkActor)
            actors[stop.name] = made.remote(key)
        asked = {name: actor.address.remote() for name, actor in actors.items()}
        answers = _await_results(list(asked.values()), deadline_s)
        addresses = {name: answers[task] for name, task in asked.items()}
        found: list[LinkMeasurement] = []
        for pairs in measurement_rounds([stop.name for stop in there]):
            for way in (pairs, tuple((target, source) for source, target in pairs)):
                found += _measure_round(way, actors, addresses)
        return tuple(found)
    finally:
        for actor in actors.values():
            ray.kill(actor)


def _measure_round(
    pairs: Iterable[tuple[str, str]], actors: Mapping[str, Any], addresses: Mapping[str, Any]
) -> Iterable[LinkMeasurement]:
    tasks, found = {}, []
    for source, target in pairs:
        absent = next((addresses[end] for end in (source, target) if isinstance(addresses[end], UnreachableNode)), None)
        link = LinkMeasurement(source=source, target=target)
        if absent is not None:
            found.append(replace(link, fault=f"its address: {absent.why}"))
        else:
            tasks[actors[source].measure.remote(source, target, addresses[target])] = link
    answers = _await_results(list(tasks), _LINK_TIMEOUT_S) if tasks else {}
    for task, link in tasks.items():
        answer = answers[task]
        fault = f"{addresses[link.target][0]}: {answer.why}" if isinstance(answer, UnreachableNode) else ""
        found.append(replace(link, fault=fault) if fault else answer)
    return found


# --- Which nodes measure their link, and when -------------------------------------------------------------------------


_ALL_PAIRS = 16  # nodes, up to which every pair is measured
_EXTRA_ROUNDS = 4  # random pairings beside the ring

_Pair = tuple[str, str]
_PairRound = tuple[_Pair, ...]


def measurement_rounds(nodes: Sequence[str], *, seed: int = 0) -> tuple[_PairRound, ...]:
    """Rounds of pairs: all of them up to 16 nodes, else those of a ring and some at random.

    All pairs come by the circle method: one node stays, the others turn
    (https://en.wikipedia.org/wiki/Round-robin_tournament#Circle_method).
    """
    return _tournament(nodes) if len(nodes) <= _ALL_PAIRS else _sampled(nodes, seed)


def _tournament(nodes: Sequence[str]) -> tuple[_PairRound, ...]:
    seats: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        found.append(tuple((one, other) for one, other in facing if one is not None and other is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(each for each in found if each)


def _sampled(nodes: Sequence[str], seed: int) -> tuple[_PairRound, ...]:
    """The ring in two rounds, or three where the nodes are odd; then pairings at random, without those met before."""
    ring = [(node, nodes[(number + 1) % len(nodes)]) for number, node in enumerate(nodes)]
    last = [ring.pop()] if len(nodes) % 2 else []
    found, met = [tuple(ring[::2]), tuple(ring[1::2]), tuple(last)], {frozenset(pair) for pair in (*ring, *last)}
    drawn = random.Random(seed)
    for _ in range(_EXTRA_ROUNDS):
        shuffled = drawn.sample(list(nodes), len(nodes))
        pairs = [(one, other) for one, other in zip(shuffled[::2], shuffled[1::2], strict=False)]
        new = tuple(pair for pair in pairs if frozenset(pair) not in met)
        met |= {frozenset(pair) for pair in new}
        found.append(new)
    return tuple(each for each in found if each)


# --- The way from one node to another over plain TCP ------------------------------------------------------------------


_KEY_BYTES = 16
_CONNECT_S = 3.0
_SOCKET_TIMEOUT_S = 5.0
_TRIPS = 20
_MOST_BYTES, _LONGEST_S = 256 << 20, 0.5
_PIECE = bytes(1 << 18)
_TIME = struct.Struct("!d")


class LinkServer:
    """Answers those who measure, at a port that the system chooses, until it is closed."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._socket = bind_socket(own_host())
        self._socket.listen(64)
        self.address = own_host(), int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="doctor", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(caller,), name="doctor-answer", daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with caller, suppress(OSError):  # whoever hangs up has what it wanted
            caller.settimeout(_SOCKET_TIMEOUT_S)
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not secrets.compare_digest(_received(caller, _KEY_BYTES), self._key):
                return
            while letter := caller.recv(1):
                caller.sendall(_TIME.pack(time.time()) if letter == b"t" else _PIECE)
                while letter == b"b":
                    caller.sendall(_PIECE)


def measure_link(source: str, target: str, address: tuple[str, int], key: bytes) -> LinkMeasurement:
    """What this node finds of its way to another, within about ten seconds. Nothing is raised: a fault is a finding."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_S) as line:
            line.settimeout(_SOCKET_TIMEOUT_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(key)
            delay_s, offset_s = min(_round_trip(line) for _ in range(_TRIPS))
            return LinkMeasurement(
                source=source, target=target, delay_s=delay_s, offset_s=offset_s, bytes_per_s=_bytes_per_s(line)
            )
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return LinkMeasurement(source=source, target=target, fault=f"{address[0]} port {address[1]}: {why}")


def _round_trip(line: socket.socket) -> tuple[float, float]:
    """Seconds of a round trip, and what the other's clock is ahead if it was read in the middle of it."""
    start, start_wall = time.perf_counter(), time.time()
    line.sendall(b"t")
    (other,) = _TIME.unpack(_received(line, _TIME.size))
    delay_s = time.perf_counter() - start
    return delay_s, other - (start_wall + delay_s / 2)


def _bytes_per_s(line: socket.socket) -> float:
    line.sendall(b"b")
    buffer, total = bytearray(1 << 20), 0
    start = time.perf_counter()
    while total < _MOST_BYTES and time.perf_counter() - start < _LONGEST_S:
        count = line.recv_into(buffer)
        if not count:
            raise ConnectionResetError("the connection broke off")
        total += count
    return total / (time.perf_counter() - start)


def _received(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the connection broke off")
        data += piece
    return data
