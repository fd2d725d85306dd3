"""What is measured of a GPU, and what a plan foretells of its memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.gpu.lone import GPU, ONE_DEVICE, Lone, Task
from trainwright.core.data import Batch, Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.strategies.cost_model.machine_model import EFFICIENCIES
from trainwright.strategies.cost_model.memory_estimate import stage_memory
from trainwright.strategies.torch.profiling import probe, profile_model

pytestmark = pytest.mark.gpu(stand_in=False)

WORDS = 8192


class Block(nn.Module):
    """Attention by torch's fused kernels, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.three(self.norms[0](hidden)).unflatten(-1, (3, self.heads, -1)).movedim(-2, 1).unbind(3)
        made = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(made.transpose(1, 2).flatten(2))
        outputs: Tensor = hidden + self.mlp(self.norms[1](hidden))
        return outputs


class Decoder(nn.Module):
    """A transformer that foretells the next word."""

    def __init__(self, width: int, layers: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(self.blocks(self.words(words) + self.places)))
        return outputs


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """One for each word."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def task(build: Callable[[], nn.Module], rows: int, tokens: int, plan: Plan) -> Task:
    """Three steps on random words."""
    words = np.random.default_rng(0).integers(0, WORDS, (rows, tokens + 1))
    columns = {"x": words[:, :-1].copy(), "y": words[:, 1:].copy()}
    batch = Batch(columns=columns, weights=np.ones(rows), samples=np.arange(rows))
    spec = ModelSpec(
        model=build, loss=losses, optimizer=torch.optim.AdamW, total_steps=3, inputs=("x",), targets=("y",)
    )
    feeds = [Feed(step=step, parts=((batch,),), data_ranks=range(1), total=1, rows=rows) for step in range(3)]
    return Task(spec=spec, plan=plan, feeds=feeds)


SIZES = {  # width, layers, heads, tokens, rows
    "0.1 B": (768, 12, 12, 512, 16),
    "1 B": (2048, 20, 16, 1024, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{}, {"precision": "bf16"}, {"precision": "bf16", "recompute": "full"}], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_peak_memory_is_near_what_the_plan_foretells(size: str, choices: dict[str, str]) -> None:
    width, layers, heads, tokens, rows = SIZES[size]
    build = partial(Decoder, width, layers, heads, tokens)
    plan = Plan(
        strategy="test", engine=ONE_DEVICE, mesh=Mesh(), batch_size=rows, placement=WorkerResources(cpus=1), **choices
    )  # type: ignore[arg-type]
    with torch.device("meta"):
        built = build()
    profile = profile_model(built, {"x": np.zeros((1, tokens), np.int64)}, ("x",))
    (foretold,) = stage_memory(profile, plan, batch_size=rows, precision=plan.precision)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with Lone(task(build, rows, tokens, plan), GPU) as lone:
        lone.train(0, 3)
    peak = torch.cuda.max_memory_allocated() - before
    assert foretold / 1.15 < peak < foretold * 1.15, f"{peak / 2**30:.2f} GiB, foretold were {foretold / 2**30:.2f}"


def test_a_probe_finds_what_events_of_the_device_say() -> None:
    """Events lie between kernels: no call, no wait for the host."""
    found = probe("MINE")
    assert found.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        left, right = (torch.randn(8192, 8192, dtype=kind, device=GPU) for _ in range(2))
        rate = 2.0 * 8192**3 / seconds_of(partial(torch.mm, left, right))
        assert found.flops_per_s[name] * EFFICIENCIES["matmul"].default == pytest.approx(rate, rel=0.1), name
    source, target = (torch.randn(2**28, device=GPU) for _ in range(2))
    rate = 2 * source.nbytes / seconds_of(partial(target.copy_, source))
    assert found.memory_bytes_per_s * EFFICIENCIES["traffic"].default == pytest.approx(rate, rel=0.1)


def seconds_of(work: Callable[[], object], times: int = 100) -> float:
    """The median of about as much work as a probe takes, which can lower the clock; after three that do not count."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 4)]
    for event in events:
        event.record()
        work()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) for one, other in pairwise(events[3:])) / 1e3
