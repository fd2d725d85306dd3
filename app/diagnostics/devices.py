"""Accelerators, as their drivers tell. No framework is asked."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

from trainwright.diagnostics.facts import Accelerators, Device
from trainwright.diagnostics.software import version_of

DEADLINE_S = 20.0  # for nvidia-smi, which waits long for a GPU that fell off the bus
_FIELDS = (
    "index", "uuid", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown",
)  # fmt: skip
_REASONS = ("hardware slowdown", "heat (hardware)", "heat (driver)", "power brake")


def accelerators() -> Accelerators:
    """GPUs and TPUs of this machine."""
    files = len([*Path("/dev").glob("nvidia[0-9]*")])
    tpus = len([*Path("/dev").glob("accel[0-9]*")]) or len([*Path("/dev/vfio").glob("[0-9]*")])
    found = Accelerators(gpu_files=files, tpu_files=tpus, libtpu=version_of("libtpu"))
    if shutil.which("nvidia-smi") is None:
        fault = "nvidia-smi is not there" if files else ""
        return Accelerators(**{**vars(found), "fault": fault})
    try:
        devices = parsed(_asked(f"--query-gpu={','.join(_FIELDS)}"), _asked("--query-compute-apps=gpu_uuid"))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Accelerators(**{**vars(found), "fault": _reason(error)})
    return Accelerators(**{**vars(found), "devices": devices})


def parsed(queried: str, computing: str) -> tuple[Device, ...]:
    """What nvidia-smi said, as CSV without head and units. Raises ValueError where that is no such table."""
    busy = Counter(line.strip() for line in computing.splitlines())
    return tuple(_device(line.split(", "), busy) for line in queried.strip().splitlines())


def _device(cells: list[str], busy: Counter[str]) -> Device:
    if len(cells) != len(_FIELDS):
        raise ValueError(f"nvidia-smi gave {len(cells)} fields in the place of {len(_FIELDS)}")
    index, uuid, name, driver, total, used, ecc, *slow = cells
    return Device(
        index=int(index),
        kind=name,
        driver=driver,
        memory_bytes=_number(total) << 20,
        used_bytes=_number(used) << 20,
        ecc_errors=int(ecc) if ecc.isdigit() else None,
        throttled=tuple(reason for reason, cell in zip(_REASONS, slow, strict=True) if cell.strip() == "Active"),
        processes=busy[uuid],
    )


def _number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0  # machines whose GPU shares the memory of the CPU say [N/A]


def _asked(question: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", question, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    return done.stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi did not answer within {DEADLINE_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = f"{error.stdout}{error.stderr}".strip().splitlines()
        return f"nvidia-smi failed: {lines[0][:150] if lines else error.returncode}"
    return str(error)
