"""A decoder of any size, its steps alone on a device, and what a plan foretells of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.gpu.lone import ONE_DEVICE, Task
from trainwright.core.data import Batch, Feed
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.strategies.cost_model.memory_estimate import stage_memory
from trainwright.strategies.torch.profiling import profile_model


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

    def __init__(self, width: int, layers: int, heads: int, tokens: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(self.blocks(self.words(words) + self.places)))
        return outputs


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a decoder, and rows of a batch."""

    width: int
    layers: int
    heads: int
    tokens: int
    rows: int
    words: int = 8192

    def build(self) -> nn.Module:
        """The decoder."""
        return Decoder(self.width, self.layers, self.heads, self.tokens, self.words)

    def plan(self, **choices: Any) -> Plan:
        """One device."""
        return Plan(
            strategy="test",
            engine=ONE_DEVICE,
            mesh=Mesh(),
            batch_size=self.rows,
            placement=WorkerResources(cpus=1),
            **choices,
        )

    def foretold_bytes(self, plan: Plan, *, apart: bool) -> int:
        """The peak of a step."""
        with torch.device("meta"):
            built = self.build()
        profile = profile_model(built, {"x": np.zeros((1, self.tokens), np.int64)}, ("x",))
        (found,) = stage_memory(profile, plan, apart=apart)
        return found


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """One for each word."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def task(size: Size, plan: Plan) -> Task:
    """Three steps on random words."""
    rows = plan.batch_size
    words = np.random.default_rng(0).integers(0, size.words, (rows, size.tokens + 1))
    columns = {"x": words[:, :-1].copy(), "y": words[:, 1:].copy()}
    batch = Batch(columns=columns, weights=np.ones(rows), samples=np.arange(rows))
    spec = ModelSpec(
        model=size.build, loss=losses, optimizer=torch.optim.AdamW, total_steps=3, inputs=("x",), targets=("y",)
    )
    feeds = [
        Feed(step=step, parts=((batch,),), data_ranks=range(1), total=1, rows=plan.batch_size) for step in range(3)
    ]
    return Task(spec=spec, plan=plan, feeds=feeds)
