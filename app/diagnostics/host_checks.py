"""What the facts of one machine come to: its network, memory, disks, limits and clock. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainwright.core.finding import Finding
from trainwright.diagnostics.facts import Clock, Interface, Network, Room, Space
from trainwright.reporting import formatting
from trainwright.strategies.common.host_address import LOOPBACK

LOOK_ALIKES = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "lxc")
FEW_PORTS = 5_000
STORE_SHARE = 0.3  # of the memory: Ray's object store
FULL, NEARLY_FULL = 0.95, 0.9  # Ray writes nothing more to a disk that is 95% full
LEAST_FILES = 16_384
_DAY_S = 86_400.0


def judge_network(network: Network, settings: Mapping[str, str], *, in_cluster: bool) -> Iterator[Finding]:
    """Name, address, interface and ports."""
    for address, why in network.refused.items():
        remedy = "see: ip -br address; ss -s; sysctl net.ipv4.ip_local_port_range"
        yield Finding(subject="ports", verdict="bad", what=f"no port can be had at {address}: {why}", remedy=remedy)
    yield from _judge_address(network, in_cluster=in_cluster)
    yield from _judge_name(network)
    yield from _judge_settings(network, settings)
    if network.ports is not None:
        yield _judge_range(*network.ports)
    for port in () if in_cluster else network.busy:
        option = "--port" if port == 6379 else "--dashboard-port"
        yield Finding(
            subject="ports",
            verdict="doubtful",
            what=f"{port} is taken, a cluster started here would want it",
            remedy=f"see who it is: ss -ltnp 'sport = :{port}'; or: ray start --head {option}={port + 1}",
        )


def _judge_address(network: Network, *, in_cluster: bool) -> Iterator[Finding]:
    own = next((each for each in network.interfaces if each.address == network.address), None)
    others = [each.name for each in network.interfaces if each not in (own, None) and each.address != LOOPBACK]
    if network.address == LOOPBACK:
        yield Finding(
            subject="network",
            verdict="doubtful",
            what="no network with a default route: other nodes cannot reach this one",
            remedy="for one machine it will do; else give it a route: ip route add default via GATEWAY",
        )
    elif own is not None and own.name.startswith(LOOK_ALIKES):
        yield Finding(
            subject="network",
            verdict="doubtful",
            what=f"other nodes are told {network.address}, which is of {own.name}, a network inside this machine",
            remedy=f"let the default route leave by the real network: ip route; others: {', '.join(others) or 'none'}",
        )
    else:
        beside = f"; beside it {', '.join(others)}" if others else ""
        yield Finding(subject="network", verdict="good", what=f"{network.address}{_by(own)}{beside}")
    if in_cluster and network.ray_address and network.ray_address != network.address:
        yield Finding(
            subject="network",
            verdict="doubtful",
            what=f"Ray is reached at {network.ray_address}, workers at {network.address}",
            remedy=f"start Ray with: ray start --node-ip-address={network.address} and its other arguments",
        )


def _by(interface: Interface | None) -> str:
    return f" at {interface.name}, MTU {interface.mtu:,}" if interface else ""


def _judge_name(network: Network) -> Iterator[Finding]:
    if network.address == LOOPBACK or network.address in network.resolves:
        return
    line = f"write '{network.address} {network.host}' into /etc/hosts"
    if not network.resolves:
        what = f"{network.host}, its own name, stands for no address here"
        remedy = line
    elif all(address.startswith("127.") for address in network.resolves):
        what = (
            f"{network.host}, its own name, stands for {network.resolves[0]}: programs that go by it tell other nodes "
            "that (trainwright's workers do not)"
        )
        remedy = f"{line}, in the place of {network.resolves[0]}"
    else:
        what = f"{network.host}, its own name, stands for {', '.join(network.resolves)}, not {network.address}"
        remedy = line
    yield Finding(subject="host name", verdict="doubtful", what=what, remedy=remedy)


def _judge_settings(network: Network, settings: Mapping[str, str]) -> Iterator[Finding]:
    names = [each.name for each in network.interfaces]
    for setting in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = settings.get(setting, "")
        if value and not fits(value, names, exact=setting.startswith("GLOO")):
            yield Finding(
                subject=setting,
                verdict="bad",
                what=f"{value}: no interface of that name is up; there are {', '.join(names)}",
                remedy=f"unset {setting}: trainwright finds the interface by itself",
            )


def fits(value: str, names: list[str], *, exact: bool) -> bool:
    """Whether a setting leaves an interface: names with commas; NCCL's are beginnings, `^` excludes, `=` is exact."""
    if exact:
        return all(name in names for name in value.split(","))
    excluded, rest = value.startswith("^"), value.removeprefix("^")
    whole, wanted = rest.startswith("="), tuple(rest.removeprefix("=").split(","))
    hits = [name for name in names if (name in wanted if whole else name.startswith(wanted))]
    return len(hits) < len(names) if excluded else bool(hits)


def _judge_range(first: int, last: int) -> Finding:
    what = f"workers listen at ports {first}-{last}"
    if last - first + 1 >= FEW_PORTS:
        return Finding(subject="ports", verdict="good", what=what)
    remedy = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
    return Finding(subject="ports", verdict="doubtful", what=f"{what}, which are few", remedy=remedy)


def judge_room(room: Room) -> Iterator[Finding]:
    """Memory, disks and limits."""
    yield from _judge_compute(room)
    for use, space in room.disks.items():
        yield _judge_memory(space, room) if use == "shared memory" else _judge_disk(use, space)
    soft, hard = room.open_files
    most = hard if hard >= 0 else soft  # Ray raises the soft limit to the hard one; -1 is no limit
    if 0 <= most < LEAST_FILES:
        what = f"a process may open {most:,} files"
        remedy = f"ulimit -Hn 65536 as root before ray start, or in /etc/security/limits.conf; now {soft:,} to {hard:,}"
        yield Finding(subject="open files", verdict="doubtful", what=what, remedy=remedy)
    else:
        what = f"up to {most:,}" if most >= 0 else "no limit"
        yield Finding(subject="open files", verdict="good", what=what)


def _judge_compute(room: Room) -> Iterator[Finding]:
    cpus = room.cpus if room.ray_cpus is None else room.ray_cpus
    allowed = f"{room.cpus_allowed:g}"
    if room.ray_cpus is not None and cpus > room.cpus_allowed:
        what = f"Ray counts {cpus:g}, the control group or affinity allows {allowed}"
        remedy = f"start this node with: ray start --num-cpus={max(1, int(room.cpus_allowed))} and its other arguments"
        yield Finding(subject="CPUs", verdict="doubtful", what=what, remedy=remedy)
    else:
        what = allowed if room.cpus_allowed == room.cpus else f"{allowed} of {room.cpus} may be used"
        yield Finding(subject="CPUs", verdict="good", what=what)
    memory = formatting.size(room.memory_allowed_bytes)
    if room.ray_memory_bytes is not None and room.ray_memory_bytes > room.memory_allowed_bytes:
        what = f"Ray counts {formatting.size(room.ray_memory_bytes)}, {memory} may be used"
        remedy = (
            f"start this node with: ray start --memory={int(0.7 * room.memory_allowed_bytes)}, and its other arguments"
        )
        yield Finding(subject="memory", verdict="doubtful", what=what, remedy=remedy)
    else:
        limited = room.memory_allowed_bytes < room.memory_bytes
        what = f"{memory} of {formatting.size(room.memory_bytes)} may be used" if limited else memory
        yield Finding(subject="memory", verdict="good", what=what)


def _judge_memory(space: Space, room: Room) -> Finding:
    wanted = STORE_SHARE * room.memory_allowed_bytes
    size, free = formatting.size(space.size_bytes), formatting.size(space.free_bytes)
    gibibytes = -(-int(wanted) // 2**30)
    grow = f"mount -o remount,size={gibibytes}G /dev/shm (a container: docker run --shm-size={gibibytes}g)"
    if space.size_bytes < wanted:
        what = f"{space.path} has {size}, Ray's object store wants {formatting.size(wanted)} and keepers more"
        return Finding(subject="shared memory", verdict="doubtful", what=what, remedy=grow)
    if space.used > NEARLY_FULL:
        what, remedy = f"{free} of {size} are free", "see what fills it: du -ah /dev/shm | sort -h | tail"
        return Finding(subject="shared memory", verdict="doubtful", what=what, remedy=remedy)
    return Finding(subject="shared memory", verdict="good", what=f"{free} of {size} free")


def _judge_disk(use: str, space: Space) -> Finding:
    free = f"{formatting.size(space.free_bytes)} of {formatting.size(space.size_bytes)}"
    place = use if use == space.path else f"{use}, {space.path}"
    if space.used >= NEARLY_FULL:
        what = f"{free} free for {place}: from 95% full on Ray writes nothing there"
        remedy = (
            f"see what fills it: du -xh {space.path} | sort -h | tail; or give Ray another: export RAY_TMPDIR=FOLDER"
        )
        return Finding(subject="disk", verdict="bad" if space.used >= FULL else "doubtful", what=what, remedy=remedy)
    return Finding(subject="disk", verdict="good", what=f"{free} free for {place}")


def judge_clock(clock: Clock) -> Iterator[Finding]:
    """The clock, as far as one machine can know."""
    keep = "timedatectl set-ntp true, or install chrony"
    if clock.time_s < clock.installed_s - _DAY_S:
        behind = formatting.duration(clock.installed_s - clock.time_s)
        what = f"shows a time {behind} before trainwright's files were written"
        yield Finding(subject="clock", verdict="bad", what=what, remedy=f"set it: {keep}")
    elif clock.synchronized is False:
        what = "nothing keeps it right, the kernel says: object stores refuse a clock that is off"
        yield Finding(subject="clock", verdict="doubtful", what=what, remedy=keep)
    else:
        what = "kept right by the system" if clock.synchronized else "not known whether anything keeps it right"
        yield Finding(subject="clock", verdict="good", what=what)
