"""What is known of a machine, of its storage and of the links between machines. Nothing here is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Software:
    """Python and packages.

    Attributes:
        needs_python: what trainwright asks for, such as `>=3.11`.
        packages: versions by name; a package that is asked for and not installed is empty.
        needs: ranges by name, of the metadata of the installed trainwright.
        imports: why a package cannot be imported, by name; empty where it can.
        torch_cuda: the CUDA version that torch was built for; empty for a build without CUDA, or no torch.
        cuda_works: whether torch reaches a GPU; None where that was not tried.
        digest: of trainwright's own code.
        settings: variables of the environment that matter, without secrets.
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
    """One GPU, as its driver tells. None is what the driver does not tell.

    Attributes:
        ecc_errors: that could not be corrected, since the driver was loaded.
        throttled: what slows the clock down, of heat and power.
        processes: that compute on it.
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
        fault: why the driver's own tool does not tell, where there are GPUs.
        gpu_files: /dev/nvidia0 and so on.
        tpu_files: /dev/accel0 and so on, or VFIO groups.
        libtpu: its version; empty where it is not installed.
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
    """How the machine is reached.

    Attributes:
        host: its own name.
        address: that trainwright gives to other nodes.
        ray_address: by which Ray reaches it; empty where Ray does not run.
        resolves: addresses that its own name stands for here.
        refused: why a port cannot be had, by address.
        ports: first and last that the system gives out; None where it does not say.
        busy: well-known ports that somebody listens at.
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
    """A file system: its size and what is free of it."""

    path: str
    size_bytes: int
    free_bytes: int

    @property
    def used(self) -> float:
        """Share that is taken, 0 to 1."""
        return 1 - self.free_bytes / self.size_bytes if self.size_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class HostResources:
    """Memory, disk and limits.

    Attributes:
        cpus: of the machine.
        cpus_allowed: by affinity and control group.
        memory_bytes: of the machine.
        memory_allowed_bytes: by the control group; the machine's where there is no limit.
        ray_cpus, ray_memory_bytes, ray_gpus: what Ray believes; None where Ray does not run.
        open_files: soft and hard limit.
        disks: by what they are for: `shared memory`, `Ray's folder`, `/tmp`.
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
        time_s: since the epoch.
        synchronized: whether the kernel says that something keeps it right; None where it does not say.
        installed_s: when trainwright's newest file was written: no clock that is right shows less.
    """

    time_s: float
    synchronized: bool | None
    installed_s: float


@dataclass(frozen=True, kw_only=True)
class StorageResult:
    """A storage that was tried.

    Attributes:
        uri: of it.
        fault: what went wrong; empty where nothing did.
        remedy: of the fault.
        once: whether a second create-only write of one path was refused, and the first was read back.
    """

    uri: str
    fault: str = ""
    remedy: str = ""
    once: bool = True
    write_s: float = 0.0
    read_s: float = 0.0
    delete_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DataPath:
    """A place of data, and why it cannot be read; empty where it can."""

    uri: str
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """All facts of one machine."""

    software: Software
    accelerators: Accelerators
    network: Network
    room: HostResources
    clock: Clock
    stored: StorageResult | None = None
    places: tuple[DataPath, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """What one node measured of its way to another.

    Attributes:
        fault: why the other was not reached; empty where it was.
        delay_s: shortest round trip.
        bytes_per_s: that came from the other.
        offset_s: the other's clock minus one's own; wrong by `delay_s` / 2 at most.
    """

    source: str
    target: str
    fault: str = ""
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    offset_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class UnreachableNode:
    """A node of which nothing, or not all, could be learned."""

    why: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """All that is known of a cluster.

    Attributes:
        machines: by the node's name.
        absent: nodes that did not answer, by name.
        links: in both directions between the pairs that were tried.
        seen: whose marks in the storage each node saw, by name; empty where that was not tried.
        sampled: whether only some pairs were tried.
    """

    machines: Mapping[str, MachineFacts]
    absent: Mapping[str, UnreachableNode] = field(default_factory=dict)
    links: tuple[LinkMeasurement, ...] = ()
    seen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sampled: bool = False
