"""The machine that measures, in words, and a Ray cluster on it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

CPUS = 2  # of a Ray cluster, unless a benchmark asks for another number
SETTLE_S = 2.0
SHARED = "BENCHMARK_RAY_CLUSTER"  # environment variable: address of a cluster to use in place of an own one
VERSIONS = ("trainwright", "ray", "torch", "numpy")


def facts(arguments: Sequence[str]) -> dict[str, str]:
    """Date, command, processor, memory, versions, and how busy the machine was before the first measurement."""
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {found.get(name, '(none)')}" for name in VERSIONS)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": f"`{shlex.join(['python', 'benchmarks/run.py', *arguments])}`",
        "machine": f"{len(os.sched_getaffinity(0))} cores, {_processor()}, {_memory_gib():.0f} GiB of memory{_gpus()}",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": versions,
        "load before": f"{os.getloadavg()[0]:.2f} (mean of the last minute; a quiet machine is near 0)",
    }


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else platform.machine()


def _gpus() -> str:
    """What the driver names, after the rest."""
    if not shutil.which("nvidia-smi"):
        return ""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    return "".join(f", {name}" for name in names)


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


@contextlib.contextmanager
def ray_cluster(object_store_bytes: int = 200 * 2**20, cpus: int = CPUS) -> Iterator[None]:
    """A local cluster of so many CPU slots that is up; its workers have the priority of any other process.

    Ray starts its workers with niceness 15, which on two cores would compare the scheduler, not the libraries. In a
    smoke run it may be a larger cluster that several benchmarks share.
    """
    os.environ |= {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    shared = os.environ.get(SHARED)
    own = {"num_cpus": cpus, "object_store_memory": object_store_bytes, "include_dashboard": False}
    ray.init(address=shared or "local", log_to_driver=False, logging_level="ERROR", **({} if shared else own))
    try:
        if not shared:
            answer = ray.remote(lambda: os.getpid())
            ray.get([answer.remote() for _ in range(cpus)], timeout=60)
            settle()
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def shared_cluster(cpus: int) -> Iterator[dict[str, str]]:
    """A Ray cluster for several benchmarks; gives the environment with which their processes use it."""
    with ray_cluster(object_store_bytes=2**30, cpus=cpus):
        import ray

        yield {SHARED: ray.get_runtime_context().gcs_address}


def settle() -> None:
    """Let the cluster end old processes and start its idle ones, so that no measurement pays for the one before."""
    time.sleep(SETTLE_S)
