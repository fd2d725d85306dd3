"""A small attention model, the layouts that train it, and how near two of its runs are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.conformance import problems, torch_case
from tests.support.conformance.staged_model import plan, spec
from trainwright.core.data import StepReport
from trainwright.core.plan import Mesh

TORCH = "trainwright.strategies.torch"
TOKENS, WIDTH = 3, 4


class Attention(nn.Module):
    """Attention that writes its scores, and an MLP."""

    def __init__(self, wide: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm, self.three = nn.LayerNorm(WIDTH, dtype=wide), nn.Linear(WIDTH, 3 * WIDTH, dtype=wide)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=wide)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.three(self.norm(hidden)).chunk(3, -1)
        weights = nn.functional.dropout((query @ key.mT / 2.0).softmax(-1), self.dropout, self.training)
        outputs: Tensor = hidden + self.out(weights @ value)
        return outputs


class Attentive(nn.Module):
    """Blocks of attention."""

    def __init__(self, wide: torch.dtype = torch.float64, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(problems.FEATURES // TOKENS, WIDTH, dtype=wide)
        self.blocks = nn.ModuleList(Attention(wide, dropout) for _ in range(4))
        self.last = nn.Linear(WIDTH, problems.CLASSES, dtype=wide)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.view(len(inputs), TOKENS, -1))
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.last(hidden.mean(1))
        return outputs


JOB = spec(Attentive, loss=torch_case.cross_entropy)
LAYOUTS = {
    "one": plan(),
    "parallel": plan(data=2, engine=f"{TORCH}.engines.data_parallel:DataParallel"),
    "sharded": plan(engine=f"{TORCH}.engines.fsdp:Sharded", mesh=Mesh(shard=2), zero=3),
    "hybrid": plan(engine=f"{TORCH}.engines.fsdp:Sharded", mesh=Mesh(data=2, shard=2), zero=3),
    "stages": plan(2, schedule="zero_bubble", cuts=("blocks.1.out",)),
    "shards of stages": plan(2, schedule="1f1b", cuts=("blocks.1.out",), mesh=Mesh(pipeline=2, shard=2), zero=1),
}
Run = tuple[list[StepReport], dict[str, Any]]


def assert_near(found: Run, expected: Run, tolerance: float = 1e-9) -> None:
    """Losses, norms and parameters."""
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=tolerance)
    for key in expected[1].keys() - {"state.json"}:
        assert np.allclose(found[1][key], expected[1][key], rtol=tolerance, atol=tolerance), key


class Bent(nn.Module):
    """The least that has something to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.out(hidden))


def bent() -> nn.Module:
    ends = [nn.Linear(*sizes, dtype=torch.float64) for sizes in ((problems.FEATURES, WIDTH), (WIDTH, problems.CLASSES))]
    return nn.Sequential(ends[0], *(Bent() for _ in range(3)), ends[1])


def large(outputs: Tensor, targets: Tensor) -> Tensor:
    """So that the first steps overflow."""
    return 100.0 * nn.functional.cross_entropy(outputs.float(), targets, reduction="none")


SINGLE = replace(problems.PROBLEMS["ragged"], dtype="float32")
HALF = replace(
    JOB, model=partial(Attentive, torch.float32, dropout=0.0), loss=large, sample=partial(torch_case.sample, SINGLE)
)
