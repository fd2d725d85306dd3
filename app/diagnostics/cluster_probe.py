"""Probe every node of a Ray cluster by pinned tasks and actors with deadlines, measure links, and compare the nodes.

Links are measured over plain TCP. The client sends the key of the probe, then single letters: `p` is answered with one
byte, `b` with bytes until the client closes the connection.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from trainwright.core import formatting
from trainwright.core.errors import Finding
from trainwright.diagnostics.machine_probe import (
    ProbeOptions,
    code_digest,
    delete_marks,
    probe_machine,
    read_marks,
    write_mark,
)
from trainwright.diagnostics.node_facts import ClusterFacts, LinkMeasurement, MachineFacts, UnreachableNode
from trainwright.strategies.common.socket_transport import bind_socket, own_host

_LINK_TIMEOUT_S = 30.0  # for one measurement, with Ray's own time
_LOST_REMEDY = (
    "check whether it is alive: ray list nodes; its log is /tmp/ray/session_latest/logs/raylet.out on that node"
)
_INSTALL_REMEDY = "install the same trainwright on every node, restart Ray there, then run the doctor again"


@dataclass(frozen=True, kw_only=True)
class _ProbedNode:
    """A node to probe. `node_id` and `ray_resources` are Ray's."""

    name: str
    node_id: str
    address: str
    ray_resources: Mapping[str, float]


def living_nodes(listed: Iterable[Mapping[str, Any]]) -> tuple[_ProbedNode, ...]:
    """Return the living nodes of `ray.nodes()` with unique names."""
    alive = [facts for facts in listed if facts["Alive"]]
    hosts = Counter(facts["NodeManagerHostname"] for facts in alive)
    found = []
    for facts in alive:
        host, node_id = facts["NodeManagerHostname"], facts["NodeID"]
        name = host if hosts[host] == 1 else f"{host}-{node_id[:6]}"
        address, ray_resources = facts["NodeManagerAddress"], dict(facts["Resources"])
        found.append(_ProbedNode(name=name, node_id=node_id, address=address, ray_resources=ray_resources))
    return tuple(found)


def probe_cluster(options: ProbeOptions) -> ClusterFacts:
    """Probe all nodes of the connected cluster."""
    import ray

    found = living_nodes(ray.nodes())  # type: ignore[no-untyped-call]
    start_s = time.time()
    machines: dict[str, MachineFacts] = {}
    absent: dict[str, UnreachableNode] = {}
    told = run_on_nodes(
        found,
        _probe_node,
        lambda stop: (options, code_digest(), stop.address, dict(stop.ray_resources)),
        options.deadline_s,
    )
    for name, answer in told.items():
        if isinstance(answer, UnreachableNode):
            absent[name] = answer
        elif answer[1] is None:
            absent[name] = UnreachableNode(
                reason=f"runs other code of trainwright ({answer[0]}, here {code_digest()})", remedy=_INSTALL_REMEDY
            )
        else:
            machines[name] = answer[1]
    probed_s = (start_s, time.time())
    there = [stop for stop in found if stop.name in machines]
    seen = _probe_shared_storage(options, there, machines) if options.storage and len(there) > 1 else {}
    links = _measure_links(there, options.deadline_s) if len(there) > 1 else ()
    return ClusterFacts(machines=machines, unreachable=absent, links=links, seen=seen, probed_s=probed_s)


def _probe_node(
    options: ProbeOptions, expected: str, address: str, ray_resources: Mapping[str, float]
) -> tuple[str, MachineFacts | None]:
    """Run on a node: return the digest of its code, and its facts if the digest is the expected one."""
    own = code_digest()
    return own, probe_machine(options, ray_address=address, ray_resources=ray_resources) if own == expected else None


def run_on_nodes(
    there: Sequence[_ProbedNode],
    function: Callable[..., Any],
    arguments: Callable[[_ProbedNode], tuple[Any, ...]],
    deadline_s: float,
) -> dict[str, Any]:
    """Run a function on each node at once; UnreachableNode for nodes that fail or do not answer in time."""
    import ray

    tasks = {
        ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=_pinned(stop))(function).remote(
            *arguments(stop)
        ): stop
        for stop in there
    }
    answers = _await_results(list(tasks), deadline_s)
    for task, answer in answers.items():
        if isinstance(answer, UnreachableNode) and answer.reason.startswith("did not answer"):
            with suppress(ray.exceptions.RayError):
                ray.cancel(task, force=True)
    return {stop.name: answers[task] for task, stop in tasks.items()}


def _await_results(tasks: Sequence[Any], deadline_s: float) -> dict[Any, Any]:
    """Return results by task; UnreachableNode for tasks that fail or miss the deadline."""
    import ray

    ready, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=deadline_s)
    answers: dict[Any, Any] = {
        task: UnreachableNode(reason=f"did not answer within {deadline_s:.0f} s", remedy=_LOST_REMEDY) for task in late
    }
    for task in ready:
        try:
            answers[task] = ray.get(task)
        except (ray.exceptions.RayError, RuntimeError, ImportError) as error:
            answers[task] = failure_reason(error)
    return answers


def failure_reason(error: Exception) -> UnreachableNode:
    """Return why a node gave no facts, from the error that Ray raised."""
    text = str(error)
    if "No module named 'trainwright" in text or "failed to import on the worker" in text:
        return UnreachableNode(reason="trainwright cannot be imported there", remedy=_INSTALL_REMEDY)
    kind = type(error).__name__
    if any(word in kind for word in ("Died", "Crashed", "Unavailable", "Unschedulable", "NodeDied")):
        return UnreachableNode(reason="was lost while it was probed", remedy=_LOST_REMEDY)
    last = text.strip().splitlines()[-1:] or [kind]
    return UnreachableNode(reason=f"the probe failed there: {last[0][:200]}", remedy=_LOST_REMEDY)


def _pinned(stop: _ProbedNode) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(stop.node_id, soft=False)


# --- Shared storage ---------------------------------------------------------------------------------------------------


def _probe_shared_storage(
    options: ProbeOptions, there: Sequence[_ProbedNode], machines: Mapping[str, MachineFacts]
) -> dict[str, frozenset[str]]:
    """Return the nodes whose test files each node sees, for the nodes that can write."""
    able = [stop for stop in there if (stored := machines[stop.name].storage) is not None and not stored.fault]
    names, visit_id = {stop.node_id: stop.name for stop in able}, uuid.uuid4().hex
    run_on_nodes(able, write_mark, lambda stop: (options.storage, visit_id, stop.node_id), options.deadline_s)
    try:
        told = run_on_nodes(able, read_marks, lambda stop: (options.storage, visit_id), options.deadline_s)
    finally:
        run_on_nodes(able, delete_marks, lambda stop: (options.storage, visit_id), options.deadline_s)
    return {
        name: frozenset(names[number] for number in numbers if number in names)
        for name, numbers in told.items()
        if not isinstance(numbers, UnreachableNode)
    }


# --- Links between nodes ----------------------------------------------------------------------------------------------


def _measure_links(there: Sequence[_ProbedNode], deadline_s: float) -> tuple[LinkMeasurement, ...]:
    """Measure the links of a ring in both directions; in a round each node is in one pair at most."""
    import ray

    key = secrets.token_bytes(_KEY_BYTES)
    actors: dict[str, Any] = {}
    try:
        for stop in there:
            made: Any = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=_pinned(stop))(LinkServer)
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
            found.append(replace(link, fault=f"its address: {absent.reason}"))
        else:
            tasks[actors[source].measure.remote(source, target, addresses[target])] = link
    answers = _await_results(list(tasks), _LINK_TIMEOUT_S) if tasks else {}
    for task, link in tasks.items():
        answer = answers[task]
        fault = f"{addresses[link.target][0]}: {answer.reason}" if isinstance(answer, UnreachableNode) else ""
        found.append(replace(link, fault=fault) if fault else answer)
    return found


def measurement_rounds(nodes: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the pairs of a ring in up to three rounds; in a round each node is in one pair at most."""
    ring = [(node, nodes[(number + 1) % len(nodes)]) for number, node in enumerate(nodes)]
    if len(nodes) == 2:
        return ((ring[0],),)
    last = [ring.pop()] if len(nodes) % 2 else []
    return tuple(tuple(pairs) for pairs in (ring[::2], ring[1::2], last) if pairs)


# --- A link between two nodes, over plain TCP -------------------------------------------------------------------------


_KEY_BYTES = 16
_CONNECT_S = 3.0
_SOCKET_TIMEOUT_S = 5.0
_TRIPS = 20
_MOST_BYTES, _LONGEST_S = 256 << 20, 0.5
_PIECE = bytes(1 << 18)


class LinkServer:
    """Answers link measurements on a free port until it is closed, and measures links to other servers."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._socket = bind_socket(own_host())
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="doctor", daemon=True).start()

    def address(self) -> tuple[str, int]:
        """Return the address on which it listens."""
        return own_host(), int(self._socket.getsockname()[1])

    def measure(self, source: str, target: str, address: tuple[str, int]) -> LinkMeasurement:
        """Measure the link to another node."""
        return measure_link(source, target, address, self._key)

    def close(self) -> None:
        """Stop answering."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(caller,), name="doctor-answer", daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with caller, suppress(OSError):  # a client that closes the connection is done
            caller.settimeout(_SOCKET_TIMEOUT_S)
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not secrets.compare_digest(_receive(caller, _KEY_BYTES), self._key):
                return
            while letter := caller.recv(1):
                caller.sendall(letter if letter == b"p" else _PIECE)
                while letter == b"b":
                    caller.sendall(_PIECE)


def measure_link(source: str, target: str, address: tuple[str, int], key: bytes) -> LinkMeasurement:
    """Measure the link from this node to another in about ten seconds; errors become the fault of the measurement."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_S) as line:
            line.settimeout(_SOCKET_TIMEOUT_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(key)
            delay_s = min(_round_trip(line) for _ in range(_TRIPS))
            return LinkMeasurement(source=source, target=target, delay_s=delay_s, bytes_per_s=_bytes_per_s(line))
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return LinkMeasurement(source=source, target=target, fault=f"{address[0]} port {address[1]}: {why}")


def _round_trip(line: socket.socket) -> float:
    """Return the seconds of one round trip."""
    start = time.perf_counter()
    line.sendall(b"p")
    _receive(line, 1)
    return time.perf_counter() - start


def _bytes_per_s(line: socket.socket) -> float:
    line.sendall(b"b")
    buffer, total = bytearray(1 << 20), 0
    start = time.perf_counter()
    while total < _MOST_BYTES and time.perf_counter() - start < _LONGEST_S:
        count = line.recv_into(buffer)
        if not count:
            raise ConnectionResetError("the connection was closed")
        total += count
    return total / (time.perf_counter() - start)


def _receive(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return data


# --- Findings that compare nodes: versions, hardware, shared storage, links and clocks --------------------------------


_SLOW_SHARE = 0.5  # a link below this share of the median rate is slow
_LATE_FACTOR, _LATE_S = 3.0, 1e-3  # a link is also slow if its round trip exceeds this factor of the median and time
_CLOCK_DOUBTFUL_S, _CLOCK_BAD_S = 60.0, 300.0  # object stores refuse a clock that is wrong by 5 to 15 minutes
_SAME_PACKAGES = ("ray", "torch", "tensorflow", "keras", "trainwright", "pyarrow", "numpy", "pandas")
_MINOR_PACKAGES = ("pandas", "numpy", "pyarrow")


def check_cluster(cluster: ClusterFacts) -> list[Finding]:
    """Return the findings that compare nodes."""
    found = [*check_unreachable(cluster)]
    if len(cluster.machines) > 1:
        found += [*_check_versions(cluster.machines), *_check_hardware(cluster.machines)]
        found += [*_check_shared_storage(cluster), *_check_links(cluster)]
    return [*found, *_check_clocks(cluster)]


def check_unreachable(cluster: ClusterFacts) -> Iterator[Finding]:
    """Yield a finding for each node that did not answer."""
    for name, absent in cluster.unreachable.items():
        yield Finding(subject="node", verdict="bad", what=absent.reason, where=name, remedy=absent.remedy)


def _check_versions(machines: Mapping[str, MachineFacts]) -> Iterator[Finding]:
    """Compare Python and packages; a node with other code of trainwright is already among the absent ones."""
    odd = False
    for subject in ("Python", *_SAME_PACKAGES):
        for name, own, usual in _outliers(machines, partial(_version, subject)):
            odd = True
            yield Finding(
                subject=subject,
                verdict="doubtful" if subject in _MINOR_PACKAGES else "bad",
                what=f"{own or 'not installed'}, most nodes have {usual or 'none'}",
                where=name,
                remedy=_same(subject, usual),
            )
    if not odd:
        what = "Python, Ray, frameworks and trainwright's code are the same on all nodes"
        yield Finding(subject="versions", verdict="good", what=what, where=_all(machines))


def _version(subject: str, machine: MachineFacts) -> str:
    return machine.software.python if subject == "Python" else machine.software.packages.get(subject, "")


def _same(subject: str, usual: str) -> str:
    if subject == "Python":
        return f"create the environment with Python {usual}"
    return f"pip install '{subject}=={usual}', then restart Ray there" if usual else f"pip uninstall {subject}"


def _outliers(machines: Mapping[str, MachineFacts], value: Callable[[MachineFacts], str]) -> list[tuple[str, str, str]]:
    """Return (node, its value, most common value) for nodes that differ; in a tie the first value counts as common."""
    values = {name: value(machine) for name, machine in machines.items()}
    usual = Counter(values.values()).most_common(1)[0][0]
    return [(name, own, usual) for name, own in values.items() if own != usual]


def _check_hardware(machines: Mapping[str, MachineFacts]) -> Iterator[Finding]:
    """Compare accelerators and MTU."""
    for name, own, usual in _outliers(machines, _devices):
        remedy = "workers wait for the slowest: use nodes of one kind, or run nvidia-smi there if GPUs are missing"
        what = f"{own}, most nodes have {usual}"
        yield Finding(subject="accelerators", verdict="doubtful", what=what, where=name, remedy=remedy)
    for name, own, usual in _outliers(machines, _mtu):
        if own and usual:
            remedy = f"set the same MTU on both ends: ip link set dev INTERFACE mtu {usual}"
            what = f"MTU {own}, most nodes have {usual}: large packets may be lost"
            yield Finding(subject="network", verdict="doubtful", what=what, where=name, remedy=remedy)


def _devices(machine: MachineFacts) -> str:
    kinds = Counter(device.kind for device in machine.accelerators.devices)
    tpus = machine.accelerators.tpu_files
    named = [f"{count} x {kind}" for kind, count in sorted(kinds.items())] + ([f"{tpus} TPU files"] if tpus else [])
    return ", ".join(named) or "no accelerator"


def _mtu(machine: MachineFacts) -> str:
    found = [each.mtu for each in machine.network.interfaces if each.address == machine.network.address]
    return str(found[0]) if found else ""


def _check_shared_storage(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check that each node sees the test files of the others in the storage."""
    stored = {name: machine.storage for name, machine in cluster.machines.items() if name in cluster.seen}
    wrote = [name for name, result in stored.items() if result is not None and not result.fault]
    separate = [name for name in wrote if not cluster.seen[name].issuperset(wrote)]
    for name in separate:
        missing = [other for other in wrote if other not in cluster.seen[name]]
        yield Finding(
            subject="storage",
            verdict="bad",
            what=f"does not see what {', '.join(missing)} wrote: it is not the same storage",
            where=name,
            remedy="use a storage that all nodes share: s3://, gs://, az://, or a folder mounted from one server",
        )
    if len(wrote) > 1 and not separate:
        what = "each node sees what the others wrote"
        yield Finding(subject="storage", verdict="good", what=what, where=formatting.count(len(wrote), "node"))


def _check_links(cluster: ClusterFacts) -> Iterator[Finding]:
    """Find links that do not connect, and links that are slower than the others."""
    for link in cluster.links:
        if link.fault:
            yield _unreachable(link, cluster.machines)
    sound = [link for link in cluster.links if not link.fault]
    if not sound:
        return
    rate, delay_s = median(link.bytes_per_s for link in sound), median(link.delay_s for link in sound)
    longest_s = max(_LATE_FACTOR * delay_s, _LATE_S)
    slow = [link for link in sound if link.bytes_per_s < _SLOW_SHARE * rate or link.delay_s > longest_s]
    for link in slow if len(sound) > 2 else ():
        yield Finding(
            subject="link",
            verdict="doubtful",
            what=f"{_figures(link.bytes_per_s, link.delay_s)}, the median link has {_figures(rate, delay_s)}",
            where=f"{link.source} from {link.target}",
            remedy="measure again when nothing runs; then check port and cable: ethtool INTERFACE, ip -s link",
        )
    worst = _figures(min(link.bytes_per_s for link in sound), max(link.delay_s for link in sound))
    many = f"median {_figures(rate, delay_s)}, worst {worst}" if len(sound) > 2 else worst
    what = f"{many} (ring, one TCP connection)"
    yield Finding(subject="links", verdict="good", what=what, where=_all(cluster.machines))


def _figures(bytes_per_s: float, delay_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g} Gb/s and {formatting.duration(delay_s)}"


def _unreachable(link: LinkMeasurement, machines: Mapping[str, MachineFacts]) -> Finding:
    ports = machines[link.target].network.ports if link.target in machines else None
    wide = f"{ports[0]}-{ports[1]}" if ports else "32768-60999"
    return Finding(
        subject="link",
        verdict="bad",
        what=f"cannot reach {link.target} at {link.fault}",
        where=link.source,
        remedy=f"open TCP {wide} (workers), 6379 and 10002-19999 (Ray) between the nodes in the firewall",
    )


def _check_clocks(cluster: ClusterFacts) -> Iterator[Finding]:
    """Compare each node's clock with the time at which this machine probed the nodes."""
    if cluster.probed_s is None:
        return
    start_s, end_s = cluster.probed_s
    wrong = False
    for name, machine in cluster.machines.items():
        time_s = machine.clock.time_s
        off_s = max(start_s - time_s, time_s - end_s)
        if off_s <= _CLOCK_DOUBTFUL_S:
            continue
        wrong = True
        yield Finding(
            subject="clock",
            verdict="bad" if off_s > _CLOCK_BAD_S else "doubtful",
            what=f"at least {formatting.duration(off_s)} {'behind' if time_s < start_s else 'ahead of'} this machine: "
            "object stores refuse a wrong clock",
            where=name,
            remedy="timedatectl set-ntp true, or install chrony; now: chronyc makestep",
        )
    if not wrong:
        what = f"within {formatting.duration(_CLOCK_DOUBTFUL_S)} of this machine's clock"
        yield Finding(subject="clocks", verdict="good", what=what, where=_all(cluster.machines))


def _all(machines: Mapping[str, MachineFacts]) -> str:
    return formatting.count(len(machines), "node")
