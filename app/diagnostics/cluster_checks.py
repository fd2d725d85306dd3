"""Turn the facts of several nodes into findings: versions, hardware, shared storage, links and clocks.

The functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median

from trainwright.core import formatting
from trainwright.core.errors import Finding
from trainwright.diagnostics.node_facts import ClusterFacts, LinkMeasurement, MachineFacts

_SLOW_SHARE = 0.5  # a link below this share of the median rate is slow
_LATE_FACTOR, _LATE_S = (
    3.0,
    1e-3,
)  # a link is also slow if its round trip exceeds this factor of the median and this time
_CLOCK_DOUBTFUL_S, _CLOCK_BAD_S = 60.0, 300.0  # object stores refuse a clock that is wrong by 5 to 15 minutes
_SAME_PACKAGES = ("ray", "torch", "tensorflow", "keras", "trainwright", "pyarrow", "numpy", "pandas")
_MINOR_PACKAGES = ("pandas", "numpy", "pyarrow")


def check_cluster(cluster: ClusterFacts) -> list[Finding]:
    """Return the findings that compare nodes."""
    found = [*check_unreachable(cluster)]
    if len(cluster.machines) > 1:
        found += [
            *_check_versions(cluster.machines),
            *_check_hardware(cluster.machines),
            *_check_shared_storage(cluster),
        ]
        found += _check_links(cluster)
    found += _check_clocks(cluster)
    return found


def check_unreachable(cluster: ClusterFacts) -> Iterator[Finding]:
    """Yield a finding for each node that did not answer."""
    for name, absent in cluster.unreachable.items():
        yield Finding(subject="node", verdict="bad", what=absent.reason, where=name, remedy=absent.remedy)


def _check_versions(machines: Mapping[str, MachineFacts]) -> Iterator[Finding]:
    """Compare Python and packages; a node with other code of trainwright is already among the absent ones."""
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
    wrote = [name for name, machine in cluster.machines.items() if _stores(machine) and name in cluster.seen]
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


def _stores(machine: MachineFacts) -> bool:
    return machine.storage is not None and not machine.storage.fault


def _check_links(cluster: ClusterFacts) -> Iterator[Finding]:
    """Find links that do not connect, and links that are slower than the others."""
    for link in cluster.links:
        if link.fault:
            yield _unreachable(link, cluster.machines)
    sound = [link for link in cluster.links if not link.fault]
    if not sound:
        return
    rate, delay_s = median(link.bytes_per_s for link in sound), median(link.delay_s for link in sound)
    slow = [link for link in sound if len(sound) > 2 and _is_slow(link, rate, delay_s)]
    for link in slow:
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


def _is_slow(link: LinkMeasurement, rate: float, delay_s: float) -> bool:
    return link.bytes_per_s < _SLOW_SHARE * rate or link.delay_s > max(_LATE_FACTOR * delay_s, _LATE_S)


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
