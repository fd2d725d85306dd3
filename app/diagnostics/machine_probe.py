"""Collect the facts of this machine: software, accelerators, memory, disks, clock, network, storage and data."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from trainwright.core.errors import StorageError, TrainwrightError
from trainwright.core.frameworks import EXTRAS
from trainwright.diagnostics.node_facts import (
    Accelerators,
    Clock,
    DataPath,
    Device,
    DiskSpace,
    HostResources,
    Interface,
    MachineFacts,
    Network,
    Software,
    StorageResult,
)
from trainwright.storage.object_store import open_store, probe_store
from trainwright.strategies.common.socket_transport import LOOPBACK, network_interfaces, own_host


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What to probe."""

    storage: str = ""  # absolute URI of a storage; empty for none
    data_paths: tuple[str, ...] = ()
    imports: bool = True  # whether to import Ray and the frameworks, which takes some seconds
    deadline_s: float = 60.0


def probe_machine(
    options: ProbeOptions, *, ray_address: str = "", ray_resources: Mapping[str, float] | None = None
) -> MachineFacts:
    """Collect the facts of this machine, with its address and its resources in Ray where Ray runs."""
    found = _probe_accelerators()
    return MachineFacts(
        software=_probe_software(imports=options.imports, gpus=bool(found.devices)),
        accelerators=found,
        network=_probe_network(ray_address),
        resources=_probe_resources(ray_resources),
        clock=_probe_clock(),
        storage=probe_storage(options.storage) if options.storage else None,
        data_paths=probe_data_paths(options.data_paths),
    )


# --- Python, packages, and whether they can be imported ---------------------------------------------------------------


_PACKAGES = ("ray", "torch", "tensorflow", "keras", "pandas", "pyarrow", "numpy")
_IMPORTED_PACKAGES = ("ray", "torch", "tensorflow")
_IMPORT_TIMEOUT_S = 120.0
_SETTINGS = (
    "OMP_NUM_THREADS", "RAY_AUTH_MODE", "RAY_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
)  # fmt: skip


def _probe_software(*, imports: bool, gpus: bool) -> Software:
    """Return Python and packages of this interpreter; with `gpus`, torch is asked whether it can use them."""
    needs_python, needs = requirements()
    packages = {name: _installed_version(name) for name in ("trainwright", *_PACKAGES)}
    cuda = _torch_cuda_version()
    tried = [name for name in _IMPORTED_PACKAGES if packages[name]] if imports else []
    return Software(
        python=platform.python_version(),
        needs_python=needs_python,
        packages=packages,
        needs=needs,
        imports=import_faults(tried),
        torch_cuda=cuda,
        cuda_works=_cuda_works() if imports and gpus and cuda else None,
        settings={name: os.environ[name] for name in _SETTINGS if os.environ.get(name)},
        token=_has_token(os.environ, Path.home()),
    )


def _installed_version(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def requirements() -> tuple[str, dict[str, str]]:
    """Return the requirements of the installed trainwright: Python, and packages by name."""
    try:
        found = metadata.metadata("trainwright")
    except metadata.PackageNotFoundError:
        return "", {}
    wanted = [item for item in map(Requirement, found.get_all("Requires-Dist") or ()) if item.name in _PACKAGES]
    needs = {item.name: str(item.specifier) for item in wanted if item.name in EXTRAS or item.marker is None}
    return (found.get_all("Requires-Python") or [""])[0], needs


@cache
def code_digest() -> str:
    """Return a digest of the trainwright code that this interpreter imports."""
    total = hashlib.sha256()
    for name in ("trainwright", "trainwright.strategies", "trainwright.datasets"):
        folder = _folder(name)
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).as_posix()
            if name == "trainwright" and inner.partition("/")[0] in ("strategies", "datasets", "clusters"):
                continue  # in a wheel these are folders of trainwright, in a checkout they are beside it
            total.update(f"{name}/{inner}\0".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, package
    return Path(spec.origin).parent


def _torch_cuda_version() -> str:
    """Return the CUDA version of torch from its version file, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).parent / "version.py"
    return parse_torch_cuda(file.read_text(encoding="utf-8")) if file.is_file() else ""


def parse_torch_cuda(text: str) -> str:
    """Return the CUDA version in the text of torch's version.py."""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else ""


def import_faults(packages: Sequence[str]) -> dict[str, str]:
    """Return import errors by package, empty for a package that works; each in a new process, all at once."""
    running = {name: _python(f"import {name}", os.environ) for name in packages}
    return {name: _import_error(process) for name, process in running.items()}


def _python(program: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _import_error(process: subprocess.Popen[str]) -> str:
    output = _output(process)
    if output is None:
        return f"took longer than {_IMPORT_TIMEOUT_S:.0f} s"
    lines = output[1].strip().splitlines() or [f"the process ended with code {process.returncode}"]
    return lines[-1][:200] if process.returncode else ""


def _output(process: subprocess.Popen[str]) -> tuple[str, str] | None:
    """Return stdout and stderr of a process when it has ended; None if it was killed for taking too long."""
    try:
        return process.communicate(timeout=_IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None


def _cuda_works() -> bool:
    """Return whether torch can use a GPU, also in a Ray task, from which Ray hides the GPUs."""
    visible = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    output = _output(_python("import torch; print(torch.cuda.is_available())", visible))
    return output is not None and output[0].strip().endswith("True")


def _has_token(environment: Mapping[str, str], home: Path) -> bool:
    """Return whether Ray's authentication token exists where Ray looks for it, without reading it."""
    path = environment.get("RAY_AUTH_TOKEN_PATH")
    return bool(environment.get("RAY_AUTH_TOKEN")) or (Path(path) if path else home / ".ray" / "auth_token").is_file()


# --- Accelerators, as their drivers report them -----------------------------------------------------------------------


_SMI_TIMEOUT_S = 20.0  # for nvidia-smi, which waits long for a GPU that fell off the bus
_SMI_FIELDS = (
    "index", "uuid", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown",
)  # fmt: skip
_THROTTLE_REASONS = ("hardware slowdown", "heat (hardware)", "heat (driver)", "power brake")


def _probe_accelerators() -> Accelerators:
    """Return GPUs and TPUs of this machine."""
    tpus = len([*Path("/dev").glob("accel[0-9]*")]) or len([*Path("/dev/vfio").glob("[0-9]*")])
    found = Accelerators(tpu_files=tpus, libtpu=_installed_version("libtpu"))
    if shutil.which("nvidia-smi") is None:
        return replace(found, fault="nvidia-smi is missing" if [*Path("/dev").glob("nvidia[0-9]*")] else "")
    try:
        queried, computing = (
            _query_smi(f"--query-gpu={','.join(_SMI_FIELDS)}"),
            _query_smi("--query-compute-apps=gpu_uuid"),
        )
        return replace(found, devices=parse_smi(queried, computing))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return replace(found, fault=_smi_error(error))


def parse_smi(queried: str, computing: str) -> tuple[Device, ...]:
    """Parse output of nvidia-smi, CSV without header and units. Raises ValueError for other text."""
    busy = Counter(line.strip() for line in computing.splitlines())
    return tuple(_parse_device(line.split(", "), busy) for line in queried.strip().splitlines())


def _parse_device(cells: list[str], busy: Counter[str]) -> Device:
    if len(cells) != len(_SMI_FIELDS):
        raise ValueError(f"nvidia-smi gave {len(cells)} fields instead of {len(_SMI_FIELDS)}")
    index, uuid, name, driver, total, used, ecc, *slow = cells
    return Device(
        index=int(index),
        kind=name,
        driver=driver,
        memory_bytes=_smi_number(total) << 20,
        used_bytes=_smi_number(used) << 20,
        ecc_errors=int(ecc) if ecc.isdigit() else None,
        throttled=tuple(
            reason for reason, cell in zip(_THROTTLE_REASONS, slow, strict=True) if cell.strip() == "Active"
        ),
        processes=busy[uuid],
    )


def _smi_number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0  # [N/A] if the GPU shares the memory of the CPU


def _query_smi(question: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", question, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True,
    )  # fmt: skip
    return done.stdout


def _smi_error(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi did not answer within {_SMI_TIMEOUT_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = f"{error.stdout}{error.stderr}".strip().splitlines()
        return f"nvidia-smi failed: {lines[0][:150] if lines else error.returncode}"
    return str(error)


# --- Memory, disk, limits and the clock of this machine ---------------------------------------------------------------


_TIME_ERROR = 5  # <sys/timex.h>: the clock is not synchronized
_TIMEX_BYTES = 512  # more than `struct timex` has on any machine
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def _probe_resources(ray_resources: Mapping[str, float] | None = None) -> HostResources:
    """Return memory, disks and limits; `ray_resources` are this node's resources in Ray."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpus = os.cpu_count() or 1
    memory_bytes, quota = cgroup_limits(_CGROUP_ROOT)
    ray_folder = os.environ.get("RAY_TMPDIR") or "/tmp/ray"
    return HostResources(
        cpus=cpus,
        cpus_allowed=min(float(len(os.sched_getaffinity(0))), quota or cpus),
        memory_bytes=pages,
        memory_allowed_bytes=min(pages, memory_bytes or pages),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        disks={
            "shared memory": disk_space("/dev/shm"),
            "Ray's folder": disk_space(ray_folder),
            "/tmp": disk_space("/tmp"),
        },
        ray_cpus=ray_resources.get("CPU", 0.0) if ray_resources is not None else None,
        ray_memory_bytes=int(ray_resources.get("memory", 0)) if ray_resources is not None else None,
        ray_gpus=ray_resources.get("GPU", 0.0) if ray_resources is not None else None,
    )


def cgroup_limits(groups: Path) -> tuple[int | None, float | None]:
    """Return bytes of memory and CPUs that a control group, version 2 or 1, allows; None for no limit."""
    memory = _read_number(groups / "memory.max") or _read_number(groups / "memory" / "memory.limit_in_bytes")
    with suppress(OSError, ValueError):
        quota, period = (groups / "cpu.max").read_text().split()
        return memory, int(quota) / int(period) if quota != "max" else None
    quota_us = _read_number(groups / "cpu" / "cpu.cfs_quota_us")
    period_us = _read_number(groups / "cpu" / "cpu.cfs_period_us")
    return memory, quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _read_number(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def disk_space(path: str) -> DiskSpace:
    """Return size and free space of a path's file system; 0 if there is none."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    if path.startswith("/dev/") and str(place) != path:
        return DiskSpace(path=path, size_bytes=0, free_bytes=0)
    usage = shutil.disk_usage(place)
    return DiskSpace(path=path, size_bytes=usage.total, free_bytes=usage.free)


def _probe_clock() -> Clock:
    """Return facts of the wall clock."""
    written_s = max((path.stat().st_mtime for path in _folder("trainwright").rglob("*.py")), default=0.0)
    return Clock(time_s=time.time(), synchronized=_is_clock_synchronized(), installed_s=written_s)


def _is_clock_synchronized() -> bool | None:
    """Return whether the kernel reports a synchronized clock; None if it may not be asked."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # mode 0 only asks
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


# --- Network ----------------------------------------------------------------------------------------------------------


_RAY_PORTS = (6379, 8265)  # of `ray start --head`: the cluster's own, and the dashboard's
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _probe_network(ray_address: str = "") -> Network:
    """Return name, addresses, interfaces and ports; `ray_address` is the address in Ray."""
    host, address = socket.gethostname(), own_host()
    return Network(
        host=host,
        address=address,
        ray_address=ray_address,
        resolves=resolve_host(host),
        interfaces=tuple(Interface(name=name, address=own, mtu=mtu) for name, own, mtu in network_interfaces()),
        refused=_refused_binds({LOOPBACK, address}),
        ports=port_range(_RANGE),
        busy=tuple(port for port in _RAY_PORTS if _is_listening(port)),
    )


def resolve_host(host: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of a host name; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _refused_binds(addresses: Iterable[str]) -> dict[str, str]:
    """Return errors of binding a port, by address, without addresses that work."""
    refused = {}
    for address in sorted(addresses):
        try:
            with socket.socket() as trial:
                trial.bind((address, 0))
        except OSError as error:
            refused[address] = error.strerror or str(error)
    return refused


def port_range(file: Path) -> tuple[int, int] | None:
    """Return the first and last ephemeral port; None if unknown."""
    with suppress(OSError, ValueError):
        first, last = map(int, file.read_text().split())
        return first, last
    return None


def _is_listening(port: int) -> bool:
    """Return whether a process listens at a port of this machine."""
    with socket.socket() as trial:
        trial.settimeout(1.0)
        return trial.connect_ex((LOOPBACK, port)) == 0


# --- Storage and paths of data ----------------------------------------------------------------------------------------


_PREFIX = "doctor-"
_DATA = b"trainwright doctor was here"


def probe_storage(uri: str) -> StorageResult:
    """Create a small file twice, read it and delete it, with about ten seconds for each."""
    try:
        with _without_new_folders(uri):
            once, (write_s, read_s, delete_s) = probe_store(open_store(uri).impatient())
            return StorageResult(uri=uri, creates_once=once, write_s=write_s, read_s=read_s, delete_s=delete_s)
    except StorageError as error:
        return StorageResult(uri=uri, fault=error.what, remedy=error.remedy or "use another storage")


@contextmanager
def _without_new_folders(uri: str) -> Iterator[None]:
    """Remove folders that did not exist before, unless another process has written into them."""
    made: list[Path] = []
    folder = Path(uri)
    while "://" not in uri and not folder.exists():
        made.append(folder)
        folder = folder.parent
    try:
        yield
    finally:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def write_mark(uri: str, visit: str, node: str) -> None:
    """Write a test file for other nodes to find. If that fails, no node sees it, which is then reported."""
    with suppress(StorageError):
        open_store(uri).impatient().put(f"{_PREFIX}{visit}/{node}", _DATA)


def read_marks(uri: str, visit: str) -> frozenset[str]:
    """Return the nodes whose test files of a visit are visible here; none if the storage cannot be read."""
    try:
        found = open_store(uri).impatient().list(f"{_PREFIX}{visit}")
    except StorageError:
        return frozenset()
    return frozenset(path.rpartition("/")[2] for path, _ in found)


def delete_marks(uri: str, visit: str) -> None:
    """Delete the visible test files of a visit, unless another node that shares the storage did."""
    with suppress(StorageError):
        open_store(uri).impatient().delete_folder(f"{_PREFIX}{visit}")


def dataset_paths(dataset: Any) -> Iterator[str]:
    """Yield the paths and URIs that a data set and its parts read."""
    path = getattr(dataset, "path", None)
    if isinstance(path, str):
        yield path
    elif isinstance(dataset, tuple | list):
        for item in dataset:
            yield from dataset_paths(item)
    elif is_dataclass(dataset):
        for each in fields(dataset):
            yield from dataset_paths(getattr(dataset, each.name))


def probe_data_paths(uris: Iterable[str]) -> tuple[DataPath, ...]:
    """Check that each path of data exists."""
    return tuple(DataPath(uri=uri, fault=_path_error(uri)) for uri in uris)


def _path_error(uri: str) -> str:
    import pyarrow.fs as pafs

    from trainwright.datasets.formats.file_system import glob_base, resolve_file_system

    try:
        system, path = resolve_file_system(uri)
        found = system.get_file_info(glob_base(path))
    except (OSError, TrainwrightError) as error:
        return str(getattr(error, "what", error)).partition("\n")[0][:200]
    return "it does not exist" if found.type == pafs.FileType.NotFound else ""
