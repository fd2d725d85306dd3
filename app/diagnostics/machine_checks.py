"""Turn the facts of one machine into findings: software, accelerators, storage, network, resources and clock.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from packaging.specifiers import SpecifierSet

from trainwright.core import formatting
from trainwright.core.errors import Finding
from trainwright.core.frameworks import EXTRAS
from trainwright.diagnostics.node_facts import (
    Accelerators,
    Clock,
    DataPath,
    Device,
    DiskSpace,
    HostResources,
    MachineFacts,
    Network,
    Software,
    StorageResult,
)
from trainwright.strategies.common.socket_transport import LOOPBACK

_SLOW_STORE_S = 1.0
_GPU_MEMORY_IN_USE = 0.1  # share of a GPU's memory that other processes may use


def check_machine(machine: MachineFacts, *, where: str = "", in_cluster: bool = False) -> list[Finding]:
    """Return the findings about one machine.

    Args:
        where: name of the node; empty for this machine.
        in_cluster: whether Ray runs on it.
    """
    found = [
        *_check_python(machine.software),
        *_check_packages(machine.software),
        *_check_ray(machine.software, in_cluster=in_cluster, cpus=machine.resources.cpus),
        *_check_accelerators(machine.accelerators, machine.software, machine.resources.ray_gpus),
        *(_check_storage(machine.storage) if machine.storage else ()),
        *map(_check_data_path, machine.data_paths),
        *_check_network(machine.network, machine.software.settings, in_cluster=in_cluster),
        *_check_resources(machine.resources),
        *_check_clock(machine.clock),
    ]
    return [replace(each, where=where) for each in found]


def _good(subject: str, what: str) -> Finding:
    return Finding(subject=subject, verdict="good", what=what)


def _doubtful(subject: str, what: str, remedy: str) -> Finding:
    return Finding(subject=subject, verdict="doubtful", what=what, remedy=remedy)


def _bad(subject: str, what: str, remedy: str) -> Finding:
    return Finding(subject=subject, verdict="bad", what=what, remedy=remedy)


def _check_python(software: Software) -> Iterator[Finding]:
    """Compare the interpreter with the requirement of trainwright."""
    if SpecifierSet(software.needs_python).contains(software.python, prereleases=True):
        yield _good("Python", software.python)
    else:
        yield _bad(
            "Python",
            f"{software.python}, trainwright needs {software.needs_python}",
            f"create an environment with Python {software.needs_python} and install trainwright there",
        )


def _check_packages(software: Software) -> Iterator[Finding]:
    """Compare packages with the requirements of trainwright, and report import errors."""
    has = {home: bool(software.packages.get(home)) for home in set(EXTRAS.values())}
    fine, missing = [f"trainwright {software.packages.get('trainwright') or 'from its folder'}"], []
    for name, needed in software.needs.items():
        version = software.packages.get(name, "")
        broken = software.imports.get(name, "")
        if not version and name in EXTRAS and any(has.values()):
            missing.append(name)
        elif not version:
            install = f"trainwright[{EXTRAS[name]}]" if name in EXTRAS else f"{name}{needed}"
            yield _bad(name, "is not installed", f"pip install '{install}'")
        elif not SpecifierSet(needed).contains(version, prereleases=True):
            yield _bad(name, f"{version}, trainwright needs {needed}", f"pip install '{name}{needed}'")
        elif broken:
            remedy = f"pip install --force-reinstall '{name}=={version}', and see: python -c 'import {name}'"
            yield _bad(name, f"{version} cannot be imported: {broken}", remedy)
        else:
            fine.append(f"{name} {version}")
    install = f"pip install 'trainwright[{','.join(sorted({EXTRAS[name] for name in missing}))}]'"
    other = f"; for jobs of {' and '.join(missing)}: {install}" if missing else ""
    yield _good("packages", ", ".join(fine) + other)


def _check_ray(software: Software, *, in_cluster: bool, cpus: int) -> Iterator[Finding]:
    """Check token authentication and the number of threads."""
    mode = software.settings.get("RAY_AUTH_MODE", "")
    if mode == "token" and not software.token:
        yield _bad(
            "Ray's token",
            "RAY_AUTH_MODE=token, but there is no token",
            "ray get-auth-token --generate, or copy ~/.ray/auth_token from the head node",
        )
    elif mode == "token":
        yield _good("Ray's token", "required and present")
    elif in_cluster:
        yield _doubtful(
            "Ray's token",
            "not required: anyone who reaches Ray's ports can run code",
            "on every node, before ray start: export RAY_AUTH_MODE=token; ray get-auth-token --generate on one, "
            "and its ~/.ray/auth_token on all",
        )
    threads = software.settings.get("OMP_NUM_THREADS", "")
    if threads and not (threads.isdigit() and 1 <= int(threads) <= cpus):
        yield _doubtful(
            "threads", f"OMP_NUM_THREADS={threads} on {formatting.count(cpus, 'CPU')}", "unset OMP_NUM_THREADS"
        )


def _check_accelerators(found: Accelerators, software: Software, ray_gpus: float | None) -> Iterator[Finding]:
    """Check GPUs and TPUs, and whether torch and Ray can use them."""
    if found.fault:
        yield _bad(
            "GPUs",
            found.fault,
            "run nvidia-smi and dmesg | grep -i nvrm; a reboot or a new installation of the driver often helps",
        )
    for device in found.devices:
        yield from _check_device(device)
    if found.devices:
        yield from _check_gpu_access(found, software, ray_gpus)
        kinds = sorted({device.kind for device in found.devices})
        drivers = sorted({device.driver for device in found.devices})
        memory = formatting.size(min(device.memory_bytes for device in found.devices))
        what = f"{len(found.devices)} x {', '.join(kinds)}, {memory}, driver {', '.join(drivers)}"
        yield _good("GPUs", what)
    if found.tpu_files and not found.libtpu:
        what = f"{formatting.count(found.tpu_files, 'device file')} of a TPU, but libtpu is not installed"
        yield _bad("TPU", what, "pip install libtpu")
    elif found.tpu_files:
        what = f"{formatting.count(found.tpu_files, 'device file')}, libtpu {found.libtpu}"
        yield _good("TPU", what)
    elif not found.devices and not found.fault:
        yield _good("accelerators", "none: workers compute on CPUs")


def _check_device(device: Device) -> Iterator[Finding]:
    name = f"GPU {device.index}"
    if device.ecc_errors:
        what = f"{formatting.count(device.ecc_errors, 'memory error')} that were not corrected"
        remedy = f"nvidia-smi -i {device.index} -r, or a reboot; if it happens again, replace the GPU"
        yield _bad(name, what, remedy)
    if device.throttled:
        what = f"its clock is throttled: {', '.join(device.throttled)}"
        remedy = f"check cooling and power: nvidia-smi -q -i {device.index} -d PERFORMANCE,TEMPERATURE,POWER"
        yield _doubtful(name, what, remedy)
    if device.processes or device.used_bytes > _GPU_MEMORY_IN_USE * device.memory_bytes > 0:
        who = f", by {device.processes} process{'es' if device.processes > 1 else ''}" if device.processes else ""
        what = f"{formatting.size(device.used_bytes)} of {formatting.size(device.memory_bytes)} are in use{who}"
        remedy = f"find the process, and end it if it is not needed: nvidia-smi -i {device.index}"
        yield _doubtful(name, what, remedy)


def _check_gpu_access(found: Accelerators, software: Software, ray_gpus: float | None) -> Iterator[Finding]:
    torch = software.packages.get("torch", "")
    if torch and not software.torch_cuda:
        what = f"torch {torch} is built without CUDA, on a machine with {formatting.count(len(found.devices), 'GPU')}"
        remedy = "pip install --force-reinstall torch, from the index for CUDA that pytorch.org names"
        yield _bad("torch", what, remedy)
    elif torch and software.cuda_works is False:
        what = (
            f"torch is built for CUDA {software.torch_cuda} and cannot use a GPU with driver {found.devices[0].driver}"
        )
        remedy = (
            "install a newer driver, or a torch for an older CUDA; see: python -c 'import torch; torch.cuda.init()'"
        )
        yield _bad("torch", what, remedy)
    if ray_gpus is not None and ray_gpus < len(found.devices):
        what = f"Ray uses {ray_gpus:g} of {formatting.count(len(found.devices), 'GPU')}"
        remedy = f"start this node with: ray start --num-gpus={len(found.devices)} and its other arguments"
        yield _doubtful("GPUs", what, remedy)


def _check_storage(stored: StorageResult) -> Iterator[Finding]:
    times = [
        f"{name} {formatting.duration(took)}"
        for name, took in (("write", stored.write_s), ("read", stored.read_s), ("delete", stored.delete_s))
    ]
    if stored.fault:
        what = f"{stored.uri}: {stored.fault}"
        yield _bad("storage", what, stored.remedy)
    elif not stored.creates_once:
        yield _bad(
            "storage",
            f"{stored.uri}: a create-only write succeeded twice: two drivers could write the same run",
            "use a store with conditional writes (If-None-Match), or a folder",
        )
    elif max(stored.write_s, stored.read_s, stored.delete_s) > _SLOW_STORE_S:
        what = f"{stored.uri} is slow for a file of a few bytes: {', '.join(times)}"
        remedy = "use a bucket in the region of the nodes, and check the network between them"
        yield _doubtful("storage", what, remedy)
    else:
        what = f"{stored.uri}: {', '.join(times)}; creates only once"
        yield _good("storage", what)


def _check_data_path(place: DataPath) -> Finding:
    if not place.fault:
        return _good("data", f"{place.uri} exists")
    remedy = "correct the path in the job, or put the data where every node can read it: a shared folder, s3://, gs://"
    return _bad("data", f"{place.uri}: {place.fault}", remedy)


# --- Network, resources and clock -------------------------------------------------------------------------------------


_VIRTUAL_INTERFACES = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "lxc")
_FEW_PORTS = 5_000
_OBJECT_STORE_SHARE = 0.3  # share of the memory that Ray's object store takes
_FULL, _NEARLY_FULL = 0.95, 0.9  # Ray writes nothing more to a disk that is 95% full
_LEAST_OPEN_FILES = 16_384
_DAY_S = 86_400.0


def _check_network(network: Network, settings: Mapping[str, str], *, in_cluster: bool) -> Iterator[Finding]:
    """Check name, address, interfaces and ports."""
    for address, why in network.refused.items():
        remedy = "see: ip -br address; ss -s; sysctl net.ipv4.ip_local_port_range"
        yield _bad("ports", f"no port can be bound at {address}: {why}", remedy)
    yield from _check_address(network, in_cluster=in_cluster)
    yield from _check_host_name(network)
    yield from _check_interface_settings(network, settings)
    if network.ports is not None:
        yield _check_port_range(*network.ports)
    for port in () if in_cluster else network.busy:
        option = "--port" if port == 6379 else "--dashboard-port"
        yield _doubtful(
            "ports",
            f"{port} is in use, and a cluster started here would need it",
            f"find the process: ss -ltnp 'sport = :{port}'; or: ray start --head {option}={port + 1}",
        )


def _check_address(network: Network, *, in_cluster: bool) -> Iterator[Finding]:
    own = next((each for each in network.interfaces if each.address == network.address), None)
    others = [each.name for each in network.interfaces if each not in (own, None) and each.address != LOOPBACK]
    if network.address == LOOPBACK:
        yield _doubtful(
            "network",
            "no network with a default route: other nodes cannot reach this one",
            "one machine needs none; otherwise add a route: ip route add default via GATEWAY",
        )
    elif own is not None and own.name.startswith(_VIRTUAL_INTERFACES):
        yield _doubtful(
            "network",
            f"other nodes get the address {network.address} of {own.name}, a network inside this machine",
            f"set the default route to the real network: ip route; others: {', '.join(others) or 'none'}",
        )
    else:
        at = f" at {own.name}, MTU {own.mtu:,}" if own else ""
        beside = f"; also {', '.join(others)}" if others else ""
        yield _good("network", f"{network.address}{at}{beside}")
    if in_cluster and network.ray_address and network.ray_address != network.address:
        yield _doubtful(
            "network",
            f"Ray is reached at {network.ray_address}, workers at {network.address}",
            f"start Ray with: ray start --node-ip-address={network.address} and its other arguments",
        )


def _check_host_name(network: Network) -> Iterator[Finding]:
    if network.address == LOOPBACK or network.address in network.resolves:
        return
    line = f"write '{network.address} {network.host}' into /etc/hosts"
    name = f"the host name {network.host}"
    if not network.resolves:
        yield _doubtful("host name", f"{name} does not resolve", line)
    elif all(address.startswith("127.") for address in network.resolves):
        first = network.resolves[0]
        given = "programs that use it give this address to other nodes (trainwright's workers do not)"
        yield _doubtful("host name", f"{name} resolves to {first}: {given}", f"{line}, instead of {first}")
    else:
        what = f"{name} resolves to {', '.join(network.resolves)}, not {network.address}"
        yield _doubtful("host name", what, line)


def _check_interface_settings(network: Network, settings: Mapping[str, str]) -> Iterator[Finding]:
    names = [each.name for each in network.interfaces]
    for setting in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = settings.get(setting, "")
        if value and not interface_setting_matches(value, names, exact=setting.startswith("GLOO")):
            yield _bad(
                setting,
                f"{value}: no interface of this name is up; up are {', '.join(names)}",
                f"unset {setting}: trainwright finds the interface by itself",
            )


def interface_setting_matches(value: str, names: list[str], *, exact: bool) -> bool:
    """Return whether a setting matches an interface.

    Names have commas between them. NCCL matches prefixes; `^` excludes and `=` matches whole names.
    """
    if exact:
        return all(name in names for name in value.split(","))
    excluded, rest = value.startswith("^"), value.removeprefix("^")
    whole, wanted = rest.startswith("="), tuple(rest.removeprefix("=").split(","))
    hits = [name for name in names if (name in wanted if whole else name.startswith(wanted))]
    return len(hits) < len(names) if excluded else bool(hits)


def _check_port_range(first: int, last: int) -> Finding:
    what = f"workers listen at ports {first}-{last}"
    if last - first + 1 >= _FEW_PORTS:
        return _good("ports", what)
    remedy = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
    return _doubtful("ports", f"{what}, which are few", remedy)


def _check_resources(host: HostResources) -> Iterator[Finding]:
    """Check memory, disks and limits."""
    yield from _check_compute(host)
    for use, space in host.disks.items():
        yield _check_shared_memory(space, host) if use == "shared memory" else _check_disk(use, space)
    soft, hard = host.open_files
    most = hard if hard >= 0 else soft  # Ray raises the soft limit to the hard one; -1 is no limit
    if 0 <= most < _LEAST_OPEN_FILES:
        what = f"a process may open {most:,} files"
        remedy = f"ulimit -Hn 65536 as root before ray start, or in /etc/security/limits.conf; now {soft:,} to {hard:,}"
        yield _doubtful("open files", what, remedy)
    else:
        what = f"up to {most:,}" if most >= 0 else "no limit"
        yield _good("open files", what)


def _check_compute(host: HostResources) -> Iterator[Finding]:
    cpus = host.cpus if host.ray_cpus is None else host.ray_cpus
    allowed = f"{host.cpus_allowed:g}"
    if host.ray_cpus is not None and cpus > host.cpus_allowed:
        what = f"Ray counts {cpus:g}, but the control group or affinity allows {allowed}"
        remedy = f"start this node with: ray start --num-cpus={max(1, int(host.cpus_allowed))} and its other arguments"
        yield _doubtful("CPUs", what, remedy)
    else:
        what = allowed if host.cpus_allowed == host.cpus else f"{allowed} of {host.cpus} may be used"
        yield _good("CPUs", what)
    memory = formatting.size(host.memory_allowed_bytes)
    if host.ray_memory_bytes is not None and host.ray_memory_bytes > host.memory_allowed_bytes:
        what = f"Ray counts {formatting.size(host.ray_memory_bytes)}, {memory} may be used"
        remedy = (
            f"start this node with: ray start --memory={int(0.7 * host.memory_allowed_bytes)}, and its other arguments"
        )
        yield _doubtful("memory", what, remedy)
    else:
        limited = host.memory_allowed_bytes < host.memory_bytes
        what = f"{memory} of {formatting.size(host.memory_bytes)} may be used" if limited else memory
        yield _good("memory", what)


def _check_shared_memory(space: DiskSpace, host: HostResources) -> Finding:
    wanted = _OBJECT_STORE_SHARE * host.memory_allowed_bytes
    size, free = formatting.size(space.size_bytes), formatting.size(space.free_bytes)
    gibibytes = -(-int(wanted) // 2**30)
    grow = f"mount -o remount,size={gibibytes}G /dev/shm (a container: docker run --shm-size={gibibytes}g)"
    if space.size_bytes < wanted:
        what = f"{space.path} has {size}, but Ray's object store needs {formatting.size(wanted)}, and checkpoints more"
        return _doubtful("shared memory", what, grow)
    if space.used > _NEARLY_FULL:
        what, remedy = f"{free} of {size} are free", "find what fills it: du -ah /dev/shm | sort -h | tail"
        return _doubtful("shared memory", what, remedy)
    return _good("shared memory", f"{free} of {size} free")


def _check_disk(use: str, space: DiskSpace) -> Finding:
    free = f"{formatting.size(space.free_bytes)} of {formatting.size(space.size_bytes)}"
    place = use if use == space.path else f"{use}, {space.path}"
    if space.used >= _NEARLY_FULL:
        what = f"{free} free for {place}: Ray stops writing when it is 95% full"
        remedy = (
            f"find what fills it: du -xh {space.path} | sort -h | tail; or set another folder: export RAY_TMPDIR=FOLDER"
        )
        return (_bad if space.used >= _FULL else _doubtful)("disk", what, remedy)
    return _good("disk", f"{free} free for {place}")


def _check_clock(clock: Clock) -> Iterator[Finding]:
    """Check the clock, as far as one machine can know."""
    keep = "timedatectl set-ntp true, or install chrony"
    if clock.time_s < clock.installed_s - _DAY_S:
        behind = formatting.duration(clock.installed_s - clock.time_s)
        what = f"shows a time {behind} before trainwright's files were written"
        yield _bad("clock", what, f"set it: {keep}")
    elif clock.synchronized is False:
        what = "not synchronized, as the kernel reports: object stores refuse a wrong clock"
        yield _doubtful("clock", what, keep)
    else:
        what = "synchronized" if clock.synchronized else "the kernel does not report whether it is synchronized"
        yield _good("clock", what)
