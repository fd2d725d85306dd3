"""What the facts of several nodes come to side by side. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from statistics import median, median_low

from trainwright.core.finding import Finding
from trainwright.diagnostics.facts import Fleet, Link, Machine
from trainwright.reporting import formatting

SLOW = 0.5  # of the median bandwidth, below which a pair is slower than the others
LATE, LATE_S = 3.0, 1e-3  # times the median round trip, and longer than this
OFF_S, REFUSED_S = 0.5, 300.0  # of a clock; object stores refuse requests whose time is off by 5 to 15 minutes
ALIKE = ("ray", "torch", "tensorflow", "keras", "trainwright", "pyarrow", "numpy", "pandas")
MATTERS_LESS = ("pandas", "numpy", "pyarrow")

Clocks = Mapping[str, tuple[float, float]]
"""By node: seconds ahead of the first one, and by how much that may be wrong."""


def judge_fleet(fleet: Fleet) -> list[Finding]:
    """Findings that need more than one node."""
    found = [*judge_absent(fleet)]
    if len(fleet.machines) > 1:
        found += [*judge_versions(fleet.machines), *judge_kinds(fleet.machines), *judge_shared(fleet)]
        found += [*judge_links(fleet), *judge_clocks(fleet)]
    return found


def judge_absent(fleet: Fleet) -> Iterator[Finding]:
    """Nodes of which nothing could be learned."""
    for name, absent in fleet.absent.items():
        yield Finding(subject="node", verdict="bad", what=absent.why, where=name, remedy=absent.remedy)


def judge_versions(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Python and packages, which must be the same; a node with other code of trainwright is an absent one."""
    odd = False
    for subject, value in _compared():
        for name, own, usual in _strangers(machines, value):
            odd = True
            yield Finding(
                subject=subject,
                verdict="doubtful" if subject in MATTERS_LESS else "bad",
                what=f"{own or 'not installed'}, most nodes have {usual or 'none'}",
                where=name,
                remedy=_same(subject, usual),
            )
    if not odd:
        what = "Python, Ray, frameworks and trainwright's code are the same on all nodes"
        yield Finding(subject="versions", verdict="good", what=what, where=_all(machines))


def _compared() -> Iterator[tuple[str, Callable[[Machine], str]]]:
    yield "Python", lambda machine: machine.software.python
    for package in ALIKE:
        yield package, partial(_version, package)


def _version(package: str, machine: Machine) -> str:
    return machine.software.packages.get(package, "")


def _same(subject: str, usual: str) -> str:
    if subject == "Python":
        return f"make the environment with Python {usual}"
    return f"pip install '{subject}=={usual}', then restart Ray there" if usual else f"pip uninstall {subject}"


def _strangers(machines: Mapping[str, Machine], value: Callable[[Machine], str]) -> list[tuple[str, str, str]]:
    """Nodes whose value is not that of most, with theirs and the usual one; of equals the first counts."""
    values = {name: value(machine) for name, machine in machines.items()}
    usual = Counter(values.values()).most_common(1)[0][0]
    return [(name, own, usual) for name, own in values.items() if own != usual]


def judge_kinds(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Accelerators and MTU, which are best alike."""
    for name, own, usual in _strangers(machines, _devices):
        remedy = "workers wait for the slowest: train on nodes of one kind, or see nvidia-smi where GPUs are missing"
        what = f"{own}, most nodes have {usual}"
        yield Finding(subject="accelerators", verdict="doubtful", what=what, where=name, remedy=remedy)
    for name, own, usual in _strangers(machines, _mtu):
        if own and usual:
            remedy = f"give both ends the same: ip link set dev INTERFACE mtu {usual}"
            what = f"MTU {own}, most nodes have {usual}: large packets may be lost"
            yield Finding(subject="network", verdict="doubtful", what=what, where=name, remedy=remedy)


def _devices(machine: Machine) -> str:
    kinds = Counter(device.kind for device in machine.accelerators.devices)
    tpus = machine.accelerators.tpu_files
    named = [f"{count} x {kind}" for kind, count in sorted(kinds.items())] + ([f"{tpus} TPU files"] if tpus else [])
    return ", ".join(named) or "no accelerator"


def _mtu(machine: Machine) -> str:
    found = [each.mtu for each in machine.network.interfaces if each.address == machine.network.address]
    return str(found[0]) if found else ""


def judge_shared(fleet: Fleet) -> Iterator[Finding]:
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


def _stores(machine: Machine) -> bool:
    return machine.stored is not None and not machine.stored.fault


def judge_links(fleet: Fleet) -> Iterator[Finding]:
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


def _is_slow(link: Link, rate: float, delay_s: float) -> bool:
    return link.bytes_per_s < SLOW * rate or link.delay_s > max(LATE * delay_s, LATE_S)


def _figures(bytes_per_s: float, delay_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g} Gb/s and {formatting.duration(delay_s)}"


def _unreachable(link: Link, machines: Mapping[str, Machine]) -> Finding:
    ports = machines[link.target].network.ports if link.target in machines else None
    wide = f"{ports[0]}-{ports[1]}" if ports else "32768-60999"
    return Finding(
        subject="link",
        verdict="bad",
        what=f"cannot reach {link.target} at {link.fault}",
        where=link.source,
        remedy=f"open TCP {wide} (workers), 6379 and 10002-19999 (Ray) between the nodes in the firewall",
    )


def clocks(links: Iterable[Link]) -> Clocks:
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


def judge_clocks(fleet: Fleet) -> Iterator[Finding]:
    """Clocks that are off: beside that of the middle one."""
    known = clocks(fleet.links)
    if len(known) < 2:
        return
    middle_s = median_low(ahead_s for ahead_s, _ in known.values())
    off = False
    for name, (ahead_s, doubt_s) in known.items():
        apart_s = ahead_s - middle_s
        if abs(apart_s) - doubt_s <= OFF_S:
            continue
        off = True
        yield Finding(
            subject="clock",
            verdict="bad" if abs(apart_s) - doubt_s > REFUSED_S else "doubtful",
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


def _all(machines: Mapping[str, Machine]) -> str:
    return formatting.count(len(machines), "node")
