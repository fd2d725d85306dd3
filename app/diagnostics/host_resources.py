"""Memory, disk, limits and the clock of this machine."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainwright.diagnostics.facts import Clock, Room, Space
from trainwright.diagnostics.software import newest_s

_TIME_ERROR = 5  # <sys/timex.h>: the clock is not synchronized
_TIMEX_BYTES = 512  # more than `struct timex` has on any machine
GROUPS = Path("/sys/fs/cgroup")


def room(believed: Mapping[str, float] | None = None) -> Room:
    """Memory, disk and limits; `believed` are Ray's resources of this node."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpus = os.cpu_count() or 1
    memory_bytes, quota = group_limits(GROUPS)
    ray_folder = os.environ.get("RAY_TMPDIR") or "/tmp/ray"
    return Room(
        cpus=cpus,
        cpus_allowed=min(float(len(os.sched_getaffinity(0))), quota or cpus),
        memory_bytes=pages,
        memory_allowed_bytes=min(pages, memory_bytes or pages),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        disks={"shared memory": space("/dev/shm"), "Ray's folder": space(ray_folder), "/tmp": space("/tmp")},
        ray_cpus=believed.get("CPU", 0.0) if believed is not None else None,
        ray_memory_bytes=int(believed.get("memory", 0)) if believed is not None else None,
        ray_gpus=believed.get("GPU", 0.0) if believed is not None else None,
    )


def group_limits(groups: Path) -> tuple[int | None, float | None]:
    """Bytes of memory and CPUs that the control group allows, of version 2 or 1; None for no limit."""
    memory = _number(groups / "memory.max") or _number(groups / "memory" / "memory.limit_in_bytes")
    with suppress(OSError, ValueError):
        quota, period = (groups / "cpu.max").read_text().split()
        return memory, int(quota) / int(period) if quota != "max" else None
    quota_us = _number(groups / "cpu" / "cpu.cfs_quota_us")
    period_us = _number(groups / "cpu" / "cpu.cfs_period_us")
    return memory, quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def space(path: str) -> Space:
    """Of the file system that a path is, or would be, on; 0 where there is none."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    if path.startswith("/dev/") and str(place) != path:
        return Space(path=path, size_bytes=0, free_bytes=0)
    usage = shutil.disk_usage(place)
    return Space(path=path, size_bytes=usage.total, free_bytes=usage.free)


def clock() -> Clock:
    """The wall clock of this machine."""
    return Clock(time_s=time.time(), synchronized=synchronized(), installed_s=newest_s())


def synchronized() -> bool | None:
    """Whether the kernel says that something keeps the clock right; None where it may not be asked."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # no mode: only asks
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR
