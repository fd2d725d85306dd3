"""What the facts of one machine come to: software, accelerators and storage here, the rest in `judging_host`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from packaging.specifiers import SpecifierSet

from trainwright.core.finding import Finding
from trainwright.core.frameworks import EXTRAS
from trainwright.diagnostics.facts import Accelerators, Device, Machine, Place, Software, Stored
from trainwright.diagnostics.host_checks import judge_clock, judge_network, judge_room
from trainwright.reporting import formatting

SLOW_STORE_S = 1.0
HELD = 0.1  # of a GPU's memory, by others


def judge(machine: Machine, *, where: str = "", in_cluster: bool = False) -> list[Finding]:
    """All findings of one machine.

    Args:
        where: name of the node; empty for the machine that asks.
        in_cluster: Ray runs on it.
    """
    found = [
        *judge_python(machine.software),
        *judge_packages(machine.software),
        *judge_ray(machine.software, in_cluster=in_cluster, cpus=machine.room.cpus),
        *judge_accelerators(machine.accelerators, machine.software, machine.room.ray_gpus),
        *(judge_storage(machine.stored) if machine.stored else ()),
        *map(judge_place, machine.places),
        *judge_network(machine.network, machine.software.settings, in_cluster=in_cluster),
        *judge_room(machine.room),
        *judge_clock(machine.clock),
    ]
    return [replace(each, where=where) for each in found]


def judge_python(software: Software) -> Iterator[Finding]:
    """The interpreter, against what trainwright asks for."""
    if SpecifierSet(software.needs_python).contains(software.python, prereleases=True):
        yield Finding(subject="Python", verdict="good", what=software.python)
    else:
        yield Finding(
            subject="Python",
            verdict="bad",
            what=f"{software.python}, trainwright needs {software.needs_python}",
            remedy=f"make an environment with Python {software.needs_python} and install trainwright there",
        )


def judge_packages(software: Software) -> Iterator[Finding]:
    """Versions against the ranges of the installed trainwright, and whether they can be imported."""
    has = {home: bool(software.packages.get(home)) for home in set(EXTRAS.values())}
    fine, lacking = [f"trainwright {software.packages.get('trainwright') or 'from its folder'}"], []
    for name, needed in software.needs.items():
        version = software.packages.get(name, "")
        broken = software.imports.get(name, "")
        if not version and name in EXTRAS and any(has.values()):
            lacking.append(name)
        elif not version:
            install = f"trainwright[{EXTRAS[name]}]" if name in EXTRAS else f"{name}{needed}"
            yield _bad_package(name, "is not installed", f"pip install '{install}'")
        elif not SpecifierSet(needed).contains(version, prereleases=True):
            yield _bad_package(name, f"{version}, trainwright needs {needed}", f"pip install '{name}{needed}'")
        elif broken:
            remedy = f"pip install --force-reinstall '{name}=={version}', and see: python -c 'import {name}'"
            yield _bad_package(name, f"{version} cannot be imported: {broken}", remedy)
        else:
            fine.append(f"{name} {version}")
    install = f"pip install 'trainwright[{','.join(sorted({EXTRAS[name] for name in lacking}))}]'"
    lacks = f"; for jobs of {' and '.join(lacking)}: {install}" if lacking else ""
    yield Finding(subject="packages", verdict="good", what=", ".join(fine) + lacks)


def _bad_package(name: str, what: str, remedy: str) -> Finding:
    return Finding(subject=name, verdict="bad", what=what, remedy=remedy)


def judge_ray(software: Software, *, in_cluster: bool, cpus: int) -> Iterator[Finding]:
    """Token authentication, and threads that a setting asks for."""
    mode = software.settings.get("RAY_AUTH_MODE", "")
    if mode == "token" and not software.token:
        yield Finding(
            subject="Ray's token",
            verdict="bad",
            what="RAY_AUTH_MODE=token, but there is no token",
            remedy="ray get-auth-token --generate, or copy ~/.ray/auth_token from the head node",
        )
    elif mode == "token":
        yield Finding(subject="Ray's token", verdict="good", what="asked for, and there")
    elif in_cluster:
        yield Finding(
            subject="Ray's token",
            verdict="doubtful",
            what="not asked for: whoever reaches Ray's ports can run code here",
            remedy="on every node, before ray start: export RAY_AUTH_MODE=token; ray get-auth-token --generate on one, "
            "and its ~/.ray/auth_token on all",
        )
    threads = software.settings.get("OMP_NUM_THREADS", "")
    if threads and not (threads.isdigit() and 1 <= int(threads) <= cpus):
        yield Finding(
            subject="threads",
            verdict="doubtful",
            what=f"OMP_NUM_THREADS={threads} on {formatting.count(cpus, 'CPU')}",
            remedy="unset OMP_NUM_THREADS",
        )


def judge_accelerators(found: Accelerators, software: Software, ray_gpus: float | None) -> Iterator[Finding]:
    """GPUs and TPUs, and whether torch and Ray know of them."""
    if found.fault:
        yield Finding(
            subject="GPUs",
            verdict="bad",
            what=found.fault,
            remedy="run nvidia-smi and dmesg | grep -i nvrm; a reboot, or the driver installed again, often mends it",
        )
    for device in found.devices:
        yield from _judge_device(device)
    if found.devices:
        yield from _judge_use(found, software, ray_gpus)
        kinds = sorted({device.kind for device in found.devices})
        drivers = sorted({device.driver for device in found.devices})
        memory = formatting.size(min(device.memory_bytes for device in found.devices))
        what = f"{len(found.devices)} x {', '.join(kinds)}, {memory}, driver {', '.join(drivers)}"
        yield Finding(subject="GPUs", verdict="good", what=what)
    if found.tpu_files and not found.libtpu:
        what = f"{formatting.count(found.tpu_files, 'device file')} of a TPU, but libtpu is not installed"
        yield Finding(subject="TPU", verdict="bad", what=what, remedy="pip install libtpu")
    elif found.tpu_files:
        what = f"{formatting.count(found.tpu_files, 'device file')}, libtpu {found.libtpu}"
        yield Finding(subject="TPU", verdict="good", what=what)
    elif not found.devices and not found.fault:
        yield Finding(subject="accelerators", verdict="good", what="none: workers compute on CPUs")


def _judge_device(device: Device) -> Iterator[Finding]:
    name = f"GPU {device.index}"
    if device.ecc_errors:
        what = f"{formatting.count(device.ecc_errors, 'memory error')} that could not be corrected"
        remedy = f"nvidia-smi -i {device.index} -r, or a reboot; if it comes back, have the GPU exchanged"
        yield Finding(subject=name, verdict="bad", what=what, remedy=remedy)
    if device.throttled:
        what = f"its clock is slowed down: {', '.join(device.throttled)}"
        remedy = f"see cooling and power: nvidia-smi -q -i {device.index} -d PERFORMANCE,TEMPERATURE,POWER"
        yield Finding(subject=name, verdict="doubtful", what=what, remedy=remedy)
    if device.processes or device.used_bytes > HELD * device.memory_bytes > 0:
        who = f", by {device.processes} process{'es' if device.processes > 1 else ''}" if device.processes else ""
        what = f"{formatting.size(device.used_bytes)} of {formatting.size(device.memory_bytes)} are taken{who}"
        remedy = f"see who it is, and end it if it is a leftover: nvidia-smi -i {device.index}"
        yield Finding(subject=name, verdict="doubtful", what=what, remedy=remedy)


def _judge_use(found: Accelerators, software: Software, ray_gpus: float | None) -> Iterator[Finding]:
    torch = software.packages.get("torch", "")
    if torch and not software.torch_cuda:
        what = f"torch {torch} is built without CUDA, on a machine with {formatting.count(len(found.devices), 'GPU')}"
        remedy = "pip install --force-reinstall torch, from the index for CUDA that pytorch.org names"
        yield Finding(subject="torch", verdict="bad", what=what, remedy=remedy)
    elif torch and software.cuda_works is False:
        what = f"torch is built for CUDA {software.torch_cuda} and reaches no GPU with driver {found.devices[0].driver}"
        remedy = (
            "install a newer driver, or a torch for an older CUDA; see: python -c 'import torch; torch.cuda.init()'"
        )
        yield Finding(subject="torch", verdict="bad", what=what, remedy=remedy)
    if ray_gpus is not None and ray_gpus < len(found.devices):
        what = f"Ray gives out {ray_gpus:g} of {formatting.count(len(found.devices), 'GPU')}"
        remedy = f"start this node with: ray start --num-gpus={len(found.devices)} and its other arguments"
        yield Finding(subject="GPUs", verdict="doubtful", what=what, remedy=remedy)


def judge_storage(stored: Stored) -> Iterator[Finding]:
    """A storage that was tried."""
    times = [
        f"{name} {formatting.duration(took)}"
        for name, took in (("write", stored.write_s), ("read", stored.read_s), ("delete", stored.delete_s))
    ]
    if stored.fault:
        what = f"{stored.uri}: {stored.fault}"
        yield Finding(subject="storage", verdict="bad", what=what, remedy=stored.remedy)
    elif not stored.once:
        yield Finding(
            subject="storage",
            verdict="bad",
            what=f"{stored.uri}: a create-only write did not happen once: two drivers could write the same run",
            remedy="use a store with conditional writes (If-None-Match), or a folder",
        )
    elif max(stored.write_s, stored.read_s, stored.delete_s) > SLOW_STORE_S:
        what = f"{stored.uri} is slow for a file of some bytes: {', '.join(times)}"
        remedy = "use a bucket in the region of the nodes, and see the network between them"
        yield Finding(subject="storage", verdict="doubtful", what=what, remedy=remedy)
    else:
        what = f"{stored.uri}: {', '.join(times)}; creates only once"
        yield Finding(subject="storage", verdict="good", what=what)


def judge_place(place: Place) -> Finding:
    """A place of data."""
    if not place.fault:
        return Finding(subject="data", verdict="good", what=f"{place.uri} is there")
    remedy = "mend the path in the job, or bring the data to where every node reads it: a shared folder, s3://, gs://"
    return Finding(subject="data", verdict="bad", what=f"{place.uri}: {place.fault}", remedy=remedy)
