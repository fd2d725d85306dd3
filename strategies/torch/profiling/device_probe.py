"""Benchmarks a device: large matrix products and copies, for about a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from trainwright.core.cluster import Accelerator
from trainwright.strategies.cost_model.machine_model import CPU_CORE, EFFICIENCIES, THREAD_EXPONENT

_SIDES = {"cpu": 1024, "cuda": 8192}  # of the matrices
_NUMBERS = {"cpu": 2**24, "cuda": 2**28}  # of a copy
_SECONDS = 0.3  # of each measurement
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_TYPES = ("fp32", "bf16")


def probe(kind: str, device: str = "cuda") -> Accelerator:
    """Measure a device and return its figures as a data sheet would give them.

    What is measured is divided by the share of a data sheet's figure that devices usually reach, since the estimator
    multiplies by it. Links and network are not measured: they are those of `CPU_CORE`, or of PCIe.

    Args:
        kind: what Ray calls it; `CPU_CORE` for one core.
        device: `cuda` or `cpu`.

    Raises:
        RuntimeError: torch cannot use the device.
    """
    on_cpu = device == "cpu"
    cores = torch.get_num_threads() ** THREAD_EXPONENT if on_cpu else 1.0
    rates = {name: _products(_SIDES[device], _TYPES[name], device) for name in (_CPU_TYPES if on_cpu else _TYPES)}
    copied = 2 * 4 * _NUMBERS[device] / _median_s(_copy(_NUMBERS[device], device), device)
    return Accelerator(
        name=kind,
        memory_bytes=0 if on_cpu else int(torch.cuda.get_device_properties(0).total_memory),
        flops_per_s={name: rate / EFFICIENCIES["matmul"].default / cores for name, rate in rates.items()},
        memory_bytes_per_s=copied / EFFICIENCIES["traffic"].default / cores,
        link_bytes_per_s=CPU_CORE.link_bytes_per_s if on_cpu else 12e9,
        network_bytes_per_s=CPU_CORE.network_bytes_per_s,
        host=CPU_CORE.host if on_cpu else 1.0,
        source=f"measured by a probe with torch {torch.__version__}; links and network are assumed",
        resource="CPU" if on_cpu else "GPU",
    )


def _products(side: int, kind: torch.dtype, device: str) -> float:
    """Return operations a second of square matrix products, of random numbers: a GPU is faster at equal ones."""
    left, right = (torch.randn(side, side, dtype=kind, device=device) for _ in range(2))
    return 2.0 * side**3 / _median_s(lambda: torch.mm(left, right), device)


def _copy(numbers: int, device: str) -> Callable[[], object]:
    source, target = (torch.ones(numbers, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _median_s(work: Callable[[], object], device: str) -> float:
    """Return the median seconds of a call, after one for warm-up."""
    done: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    work()
    done()
    spent: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(spent) < 3:
        begun = time.perf_counter()
        work()
        done()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)
