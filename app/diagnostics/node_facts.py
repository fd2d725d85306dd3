"""Facts that the doctor collects: of machines, of storage and of the links between machines.

Other modules turn the facts into findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Software:
    """Python and packages.

    Attributes:
        needs_python: required version, such as `>=3.11`.
        packages: installed versions by name; empty text for a package that is not installed.
        needs: required versions by name, from the metadata of the installed trainwright.
        imports: import errors by package; empty text if the import works.
        torch_cuda: CUDA version of the installed torch; empty without torch or CUDA.
        cuda_works: whether torch can use a GPU; None if not tried.
        settings: environment variables that matter, without secrets.
        token: whether Ray finds an authentication token.
    """

    python: str
    needs_python: str
    packages: Mapping[str, str]
    needs: Mapping[str, str]
    imports: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str = ""
    cuda_works: bool | None = None
    digest: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    token: bool = False


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, as its driver reports it; None for values that the driver does not report.

    Attributes:
        ecc_errors: uncorrected memory errors since the driver was loaded.
        throttled: why the clock is throttled: heat or power.
        processes: number of processes that compute on it.
    """

    index: int
    kind: str
    driver: str
    memory_bytes: int
    used_bytes: int
    ecc_errors: int | None = None
    throttled: tuple[str, ...] = ()
    processes: int = 0


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """GPUs and TPUs.

    Attributes:
        fault: why nvidia-smi failed on a machine with GPUs.
        gpu_files: /dev/nvidia0 and so on.
        tpu_files: /dev/accel0 and so on, or VFIO groups.
    """

    devices: tuple[Device, ...] = ()
    fault: str = ""
    gpu_files: int = 0
    tpu_files: int = 0
    libtpu: str = ""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up and has an IPv4 address."""

    name: str
    address: str
    mtu: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """Name, addresses and ports of the machine.

    Attributes:
        address: address that trainwright gives to other nodes.
        ray_address: address that Ray uses; empty if Ray does not run.
        resolves: addresses of the host name on this machine.
        refused: errors of binding a port, by address.
        ports: first and last of the kernel's ephemeral ports; None if unknown.
        busy: ports of `ray start --head` on which a process listens.
    """

    host: str
    address: str
    ray_address: str = ""
    resolves: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, int] | None = None
    busy: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """Size and free space of a file system."""

    path: str
    size_bytes: int
    free_bytes: int

    @property
    def used(self) -> float:
        """Return the used share, 0 to 1."""
        return 1 - self.free_bytes / self.size_bytes if self.size_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class HostResources:
    """Memory, disk and limits.

    Attributes:
        cpus_allowed: limit of affinity and control group.
        memory_allowed_bytes: limit of the control group; the machine's memory if there is no limit.
        ray_cpus, ray_memory_bytes, ray_gpus: resources that Ray counts; None if Ray does not run.
        open_files: soft and hard limit.
        disks: by use: `shared memory`, `Ray's folder`, `/tmp`.
    """

    cpus: int
    cpus_allowed: float
    memory_bytes: int
    memory_allowed_bytes: int
    open_files: tuple[int, int]
    disks: Mapping[str, DiskSpace]
    ray_cpus: float | None = None
    ray_memory_bytes: int | None = None
    ray_gpus: float | None = None


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The wall clock.

    Attributes:
        time_s: seconds since the epoch.
        synchronized: whether the kernel reports that it is synchronized, as by NTP; None if unknown.
        installed_s: when trainwright's newest file was written; a correct clock shows a later time.
    """

    time_s: float
    synchronized: bool | None
    installed_s: float


@dataclass(frozen=True, kw_only=True)
class StorageResult:
    """Result of writing, reading and deleting a file in a storage.

    Attributes:
        creates_once: whether the second create-only write of a path was refused and the first was read back.
    """

    uri: str
    fault: str = ""
    remedy: str = ""
    creates_once: bool = True
    write_s: float = 0.0
    read_s: float = 0.0
    delete_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DataPath:
    """A path of data, and why it cannot be read; an empty fault if it can."""

    uri: str
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """All facts of one machine."""

    software: Software
    accelerators: Accelerators
    network: Network
    resources: HostResources
    clock: Clock
    storage: StorageResult | None = None
    data_paths: tuple[DataPath, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """What one node measured of its connection to another.

    Attributes:
        source, target: the node that measured, and the one that answered.
        fault: why the target was not reached; empty if it was.
        delay_s: shortest round trip.
        bytes_per_s: rate from target to source, on one TCP connection.
    """

    source: str
    target: str
    fault: str = ""
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class UnreachableNode:
    """A node that did not answer, or answered with other code."""

    reason: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """Facts of all nodes of a cluster.

    Attributes:
        machines, unreachable: by name of the node.
        links: measured connections, in both directions.
        seen: nodes whose test files in the storage each node saw, by name; empty if not tried.
        probed_s: wall-clock time of the asking machine before and after the nodes were probed, seconds since the epoch.
    """

    machines: Mapping[str, MachineFacts]
    unreachable: Mapping[str, UnreachableNode] = field(default_factory=dict)
    links: tuple[LinkMeasurement, ...] = ()
    seen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    probed_s: tuple[float, float] | None = None
