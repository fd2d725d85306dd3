"""What is measured of a GPU, and what a plan foretells of its memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.gpu.lone import GPU, Lone
from tests.support.decoder import Size, task
from trainwright.strategies.cost_model.machine_model import EFFICIENCIES
from trainwright.strategies.torch.profiling import probe

pytestmark = pytest.mark.gpu(stand_in=False)

SIZES = {
    "0.1 B": Size(width=768, layers=12, heads=12, tokens=512, rows=16),
    "1 B": Size(width=2048, layers=20, heads=16, tokens=1024, rows=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{}, {"precision": "bf16"}, {"precision": "bf16", "recompute": "full"}], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_peak_memory_is_near_what_the_plan_foretells(size: str, choices: dict[str, str]) -> None:
    plan = SIZES[size].plan(**choices)
    foretold = SIZES[size].foretold_bytes(plan, apart=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with Lone(task(SIZES[size], plan), GPU) as lone:
        lone.train(0, 3)
    peak = torch.cuda.max_memory_allocated() - before
    assert foretold / 1.15 < peak < foretold * 1.15, f"{peak / 2**30:.2f} GiB, foretold were {foretold / 2**30:.2f}"


def test_a_probe_finds_what_events_of_the_device_say() -> None:
    """Events lie between kernels: no call, no wait for the host. The clock may change: events before and after."""
    before = rates_by_events()
    found = probe("MINE")
    after = rates_by_events()
    assert found.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    probed = {name: rate * EFFICIENCIES["matmul"].default for name, rate in found.flops_per_s.items()}
    probed["copy"] = found.memory_bytes_per_s * EFFICIENCIES["traffic"].default
    for name, rate in probed.items():
        slow, quick = sorted((before[name], after[name]))
        assert slow * 0.9 < rate < quick * 1.1, (name, slow, rate, quick)


def rates_by_events() -> dict[str, float]:
    """Operations a second of each type, and copied bytes a second."""
    rates = {}
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        left, right = (torch.randn(8192, 8192, dtype=kind, device=GPU) for _ in range(2))
        rates[name] = 2.0 * 8192**3 / seconds_of(partial(torch.mm, left, right))
    source, target = (torch.randn(2**28, device=GPU) for _ in range(2))
    return rates | {"copy": 2 * source.nbytes / seconds_of(partial(target.copy_, source))}


def seconds_of(work: Callable[[], object], times: int = 100) -> float:
    """The median of about as much work as a probe takes, which can lower the clock; after three that do not count."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 4)]
    for event in events:
        event.record()
        work()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) for one, other in pairwise(events[3:])) / 1e3
