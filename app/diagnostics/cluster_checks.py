"""What the facts of several nodes come to side by side. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from statistics import median, median_low

from trainwright.core import formatting
from trainwright.core.errors import Finding
from trainwright.diagnostics.node_facts import ClusterFacts, LinkMeasurement, MachineFacts

_SLOW = 0.5  # of the median bandwidth, below which a pair is slower than the others
_LATE, _LATE_S = 3.0, 1e-3  # times the median round trip, and longer than this
_OFFSET_S, _REFUSED_S = 0.5, 300.0  # of a clock; object stores refuse requests whose time is off by 5 to 15 minutes
_SAME_PACKAGES = ("ray", "torch", "tensorflow", "keras", "trainwright", "pyarrow", "numpy", "pandas")
_MINOR_PACKAGES = ("pandas", "numpy", "pyarrow")

_ClockOffsets = Mapping[str, tuple[float, float]]
"""By node: seconds ahead of the first one, and by how much that may be wrong."""


def check_cluster(fleet: ClusterFacts) -> list[Finding]:
    """Findings that need more than one node."""
    found = [*check_unreachable(fleet)]
    if len(fleet.machines) > 1:
        found += [*_check_versions(fleet.machines), *_check_hardware(fleet.machines), *_check_shared_storage(fleet)]
        found += [*_check_links(fleet), *_check_clocks(fleet)]
    return found


def check_unreachable(fleet: ClusterFacts) -> Iterator[Finding]:
    """Nodes of which nothing could be learned."""
    for name, absent in fleet.absent.items():
        yield Finding(subject="node", verdict="bad", what=absent.why, where=name, remedy=absent.remedy)


def _check_versions(machines: Mapping[str, MachineFacts]) -> Iterator[Finding]:
    """Python and packages, which must be the same; a node with other code of trainwright is an absent one."""
    odd = False
    for subject, value in _compared():
        for name, own, usual in _outliers(machines, value):
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


def _compared() -> Iterator[tuple[str, Callable[[MachineFacts], str]]]:
    yield "Python", lambda machine: machine.software.python
    for package in _SAME_PACKAGES:
        yield package, partial(_version, package)


def _version(package: str, machine: MachineFacts) -> str:
    return machine.software.packages.get(package, "")


def _same(subject: str, usual: str) -> str:
    if subject == "Python":
        return f"make the environment with Python {usual}"
    return f"pip install '{subject}=={usual}', then restart Ray there" if usual else f"pip uninstall {subject}"


def _outliers(machines: Mapping[str, MachineFacts], value: Callable[[MachineFacts], str]) -> list[tuple[str, str, str]]:
    """Nodes whose value is not that of most, with theirs and the usual one; of equals the first counts."""
    values = {name: value(machine) for name, machine in machines.items()}
    usual = Counter(values.values()).most_common(1)[0][0]
    return [(name, own, usual) for name, own in values.items() if own != usual]


def _check_hardware(machines: Mapping[str, MachineFacts]) -> Iterator[Finding]:
    """Accelerators and MTU, which are best alike."""
    for name, own, usual in _outliers(machines, _devices):
        remedy = "workers wait for the slowest: train on nodes of one kind, or see nvidia-smi where GPUs are missing"
        what = f"{own}, most nodes have {usual}"
        yield Finding(subject="accelerators", verdict="doubtful", what=what, where=name, remedy=remedy)
    for name, own, usual in _outliers(machines, _mtu):
        if own and usual:
            remedy = f"give both ends the same: ip link set dev INTERFACE mtu {usual}"
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


def _check_shared_storage(fleet: ClusterFacts) -> Iterator[Finding]:
    """Whether each node sees in the storage what the others wrote there."""
    wrote = [name for name, machine in fleet.machines.items() if _stores(machine) and name in fleet.seen]
    apart = [name for name in wrote if not fleet.seen[name].issuperset(wrote)]
    for name in apart:
        missing = [other for other in wrote if other not in fleet.seen[name]]
        yield Finding(
            subject="storage",
            verdict="bad",
            what=f"does not see what {', '.join(missing)} wrote: it is not the same storage",
            where=name,
            remedy="give a storage that all nodes share: s3://, gs://, az://, or a folder mounted from one server",
        )
    if len(wrote) > 1 and not apart:
        what = "each node sees what the others wrote"
        yield Finding(subject="storage", verdict="good", what=what, where=formatting.count(len(wrote), "node"))


def _stores(machine: MachineFacts) -> bool:
    return machine.stored is not None and not machine.stored.fault


def _check_links(fleet: ClusterFacts) -> Iterator[Finding]:
    """Pairs that do not reach each other, and those that are slower than the others."""
    for link in fleet.links:
        if link.fault:
            yield _unreachable(link, fleet.machines)
    sound = [link for link in fleet.links if not link.fault]
    if not sound:
        return
    rate, delay_s = median(link.bytes_per_s for link in sound), median(link.delay_s for link in sound)
    slow = [link for link in sound if len(sound) > 2 and _is_slow(link, rate, delay_s)]
    for link in slow:
        yield Finding(
            subject="link",
            verdict="doubtful",
            what=f"{_figures(link.bytes_per_s, link.delay_s)}, the middle pair has {_figures(rate, delay_s)}",
            where=f"{link.source} from {link.target}",
            remedy="measure again when nothing runs; then see the port and the cable: ethtool INTERFACE, ip -s link",
        )
    worst = _figures(min(link.bytes_per_s for link in sound), max(link.delay_s for link in sound))
    which = "a ring and some random pairs" if fleet.sampled else "all pairs"
    many = f"{_figures(rate, delay_s)} in the middle, {worst} at worst" if len(sound) > 2 else worst
    what = f"{many} ({which}, one TCP connection)"
    yield Finding(subject="links", verdict="good", what=what, where=_all(fleet.machines))


def _is_slow(link: LinkMeasurement, rate: float, delay_s: float) -> bool:
    return link.bytes_per_s < _SLOW * rate or link.delay_s > max(_LATE * delay_s, _LATE_S)


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


def clock_offsets(links: Iterable[LinkMeasurement]) -> _ClockOffsets:
    """Each node's clock beside that of the first one, breadth-first along the quickest links.

    A round trip tells an offset that is wrong by half of its length at most (RFC 5905, section 8); these add up.
    """
    sound = [link for link in links if not link.fault]
    if not sound:
        return {}
    known = {sound[0].source: (0.0, 0.0)}
    waiting = deque(known)
    while waiting:
        here = waiting.popleft()
        ahead_s, doubt_s = known[here]
        for link in sorted(sound, key=lambda link: link.delay_s):
            if here not in (link.source, link.target):
                continue
            there, sign = (link.target, 1) if link.source == here else (link.source, -1)
            if there not in known:
                known[there] = ahead_s + sign * link.offset_s, doubt_s + link.delay_s / 2
                waiting.append(there)
    return known


def _check_clocks(fleet: ClusterFacts) -> Iterator[Finding]:
    """Clocks that are off: beside that of the middle one."""
    known = clock_offsets(fleet.links)
    if len(known) < 2:
        return
    middle_s = median_low(ahead_s for ahead_s, _ in known.values())
    off = False
    for name, (ahead_s, doubt_s) in known.items():
        apart_s = ahead_s - middle_s
        if abs(apart_s) - doubt_s <= _OFFSET_S:
            continue
        off = True
        yield Finding(
            subject="clock",
            verdict="bad" if abs(apart_s) - doubt_s > _REFUSED_S else "doubtful",
            what=f"{formatting.duration(abs(apart_s))} {'ahead of' if apart_s > 0 else 'behind'} the others "
            f"(+- {formatting.duration(doubt_s)}): object stores refuse a clock that is off",
            where=name,
            remedy="timedatectl set-ntp true, or install chrony; now: chronyc makestep",
        )
    if not off:
        apart_s = max(ahead for ahead, _ in known.values()) - min(ahead for ahead, _ in known.values())
        doubt_s = max(doubt for _, doubt in known.values())
        what = f"within {formatting.duration(apart_s)} of each other (+- {formatting.duration(doubt_s)})"
        yield Finding(subject="clocks", verdict="good", what=what, where=formatting.count(len(known), "node"))


def _all(machines: Mapping[str, MachineFacts]) -> str:
    return formatting.count(len(machines), "node")
