"""Facts that the doctor collects: of machines, of storage and of the links between machines.

Other modules turn the facts into findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Software:
    """Python and packages."""

    python: str
    needs_python: str  # required version, such as `>=3.11`
    packages: Mapping[str, str]  # installed versions by name; empty text for a package that is not installed
    needs: Mapping[str, str]  # required versions by name, from the metadata of the installed trainwright
    imports: Mapping[str, str] = field(default_factory=dict)  # import errors by package; empty text if the import works
    torch_cuda: str = ""  # CUDA version of the installed torch; empty without torch or CUDA
    cuda_works: bool | None = None  # whether torch can use a GPU; None if not tried
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables that matter, without secrets
    token: bool = False  # whether Ray finds an authentication token


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, as its driver reports it; None for values that the driver does not report."""

    index: int
    kind: str
    driver: str
    memory_bytes: int
    used_bytes: int
    ecc_errors: int | None = None  # uncorrected memory errors since the driver was loaded
    throttled: tuple[str, ...] = ()  # why the clock is throttled: heat or power
    processes: int = 0  # number of processes that compute on it


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """GPUs and TPUs."""

    devices: tuple[Device, ...] = ()
    fault: str = ""  # why nvidia-smi failed on a machine with GPUs
    tpu_files: int = 0  # /dev/accel0 and so on, or VFIO groups
    libtpu: str = ""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up and has an IPv4 address."""

    name: str
    address: str
    mtu: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """Name, addresses and ports of the machine."""

    host: str
    address: str  # address that trainwright gives to other nodes
    ray_address: str = ""  # address that Ray uses; empty if Ray does not run
    resolves: tuple[str, ...] = ()  # addresses of the host name on this machine
    interfaces: tuple[Interface, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)  # errors of binding a port, by address
    ports: tuple[int, int] | None = None  # first and last of the kernel's ephemeral ports; None if unknown
    busy: tuple[int, ...] = ()  # ports of `ray start --head` on which a process listens


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
    """Memory, disk and limits."""

    cpus: int
    cpus_allowed: float  # limit of affinity and control group
    memory_bytes: int
    memory_allowed_bytes: int  # limit of the control group; the machine's memory if there is no limit
    open_files: tuple[int, int]  # soft and hard limit
    disks: Mapping[str, DiskSpace]  # by use: `shared memory`, `Ray's folder`, `/tmp`
    # ray_cpus, ray_memory_bytes, ray_gpus: resources that Ray counts; None if Ray does not run
    ray_cpus: float | None = None
    ray_memory_bytes: int | None = None
    ray_gpus: float | None = None


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The wall clock."""

    time_s: float  # seconds since the epoch
    synchronized: bool | None  # whether the kernel reports that it is synchronized, as by NTP; None if unknown
    installed_s: float  # when trainwright's newest file was written; a correct clock shows a later time


@dataclass(frozen=True, kw_only=True)
class StorageResult:
    """Result of writing, reading and deleting a file in a storage."""

    uri: str
    fault: str = ""
    remedy: str = ""
    creates_once: bool = True  # whether the second create-only write of a path was refused and the first was read back
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
    """What one node measured of its connection to another."""

    # source, target: the node that measured, and the one that answered
    source: str
    target: str
    fault: str = ""  # why the target was not reached; empty if it was
    delay_s: float = 0.0  # shortest round trip
    bytes_per_s: float = 0.0  # rate from target to source, on one TCP connection


@dataclass(frozen=True, kw_only=True)
class UnreachableNode:
    """A node that did not answer, or answered with other code."""

    reason: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """Facts of all nodes of a cluster."""

    # machines, unreachable: by name of the node
    machines: Mapping[str, MachineFacts]
    unreachable: Mapping[str, UnreachableNode] = field(default_factory=dict)
    links: tuple[LinkMeasurement, ...] = ()  # measured connections, in both directions
    # nodes whose test files in the storage each node saw, by name; empty if not tried
    seen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # wall-clock time of the asking machine before and after the nodes were probed, seconds since the epoch
    probed_s: tuple[float, float] | None = None
