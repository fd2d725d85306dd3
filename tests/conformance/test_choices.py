"""What a plan chooses beside its layout gives what one device gives without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.conformance import problems, torch_case
from tests.conformance.harness import Pool
from tests.conformance.test_pipeline import plan, spec, trained
from tests.conformance.test_state import assert_same
from trainwright.core.plan import Mesh

TORCH = "trainwright.strategies.torch"
TOKENS, WIDTH = 3, 4


class Attention(nn.Module):
    """Attention that writes its scores, and an MLP."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self.norm, self.three = nn.LayerNorm(WIDTH, dtype=wide), nn.Linear(WIDTH, 3 * WIDTH, dtype=wide)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=wide)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.three(self.norm(hidden)).chunk(3, -1)
        weights = nn.functional.dropout((query @ key.mT / 2.0).softmax(-1), 0.1, self.training)
        outputs: Tensor = hidden + self.out(weights @ value)
        return outputs


class Attentive(nn.Module):
    """Blocks of attention."""

    def __init__(self, wide: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(problems.FEATURES // TOKENS, WIDTH, dtype=wide)
        self.blocks = nn.ModuleList(Attention(wide) for _ in range(4))
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
    "parallel": plan(data=2, engine=f"{TORCH}.data_parallel:DataParallel"),
    "sharded": plan(engine=f"{TORCH}.sharded:Sharded", mesh=Mesh(shard=2), zero=3),
    "stages": plan(2, schedule="zero_bubble", cuts=("blocks.1.out",)),
}


@pytest.mark.parametrize("layout", ["sharded", "stages"])
def test_scores_computed_again(pool: Pool, layout: str) -> None:
    """Dropout is drawn alike by those who compute it again and by those who do not."""
    how = LAYOUTS[layout]
    found, expected = (trained(pool, replace(how, recompute=name), JOB) for name in ("selective", "none"))
    assert found[0] == expected[0]
    assert_same(expected[1], found[1])


def test_state_in_host_memory(pool: Pool) -> None:
    how = LAYOUTS["sharded"]
    found, expected = (trained(pool, replace(how, offload=offload), JOB) for offload in (True, False))
    assert found[0] == expected[0]
    assert_same(expected[1], found[1])
