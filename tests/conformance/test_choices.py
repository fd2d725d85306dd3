"""What a plan chooses beside its layout gives what one device gives without."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.conformance import problems, torch_case
from tests.conformance.harness import Pool
from tests.conformance.test_pipeline import plan, spec, trained
from tests.conformance.test_state import assert_same
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
    "parallel": plan(data=2, engine=f"{TORCH}.data_parallel:DataParallel"),
    "sharded": plan(engine=f"{TORCH}.sharded:Sharded", mesh=Mesh(shard=2), zero=3),
    "hybrid": plan(engine=f"{TORCH}.sharded:Sharded", mesh=Mesh(data=2, shard=2), zero=3),
    "stages": plan(2, schedule="zero_bubble", cuts=("blocks.1.out",)),
    "shards of stages": plan(2, schedule="1f1b", cuts=("blocks.1.out",), mesh=Mesh(pipeline=2, shard=2), zero=2),
}
Run = tuple[list[StepReport], dict[str, Any]]


def assert_near(found: Run, expected: Run, tolerance: float = 1e-9) -> None:
    """Losses, norms and parameters."""
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=tolerance)
    for key in expected[1].keys() - {"state.json"}:
        assert np.allclose(found[1][key], expected[1][key], rtol=tolerance, atol=tolerance), key


@pytest.mark.parametrize("layout", ["sharded", "stages", "shards of stages"])
def test_scores_computed_again(pool: Pool, layout: str) -> None:
    """Dropout is drawn alike by those who compute it again and by those who do not."""
    how = LAYOUTS[layout]
    found, expected = (trained(pool, replace(how, recompute=name), JOB) for name in ("selective", "none"))
    assert found[0] == expected[0]
    assert_same(expected[1], found[1])


@pytest.mark.parametrize("layout", ["sharded", "hybrid"])
def test_state_in_host_memory(pool: Pool, layout: str) -> None:
    how = LAYOUTS[layout]
    found, expected = (trained(pool, replace(how, offload=offload), JOB) for offload in (True, False))
    assert found[0] == expected[0]
    assert_same(expected[1], found[1])


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


@pytest.mark.parametrize("layout", [pytest.param("parallel", marks=pytest.mark.soak), "stages"])
def test_models_compiled_by_inductor(pool: Pool, layout: str) -> None:
    """Whole or by blocks; micro-batches of unequal rows are compiled once more."""
    how = replace(LAYOUTS[layout], cuts=("2.out",) if layout == "stages" else ())
    plain = replace(JOB, model=bent)
    found = trained(pool, how, replace(plain, compile="inductor"))
    assert_near(found, trained(pool, how, plain))


def large(outputs: Tensor, targets: Tensor) -> Tensor:
    """So that the first steps overflow."""
    return 100.0 * nn.functional.cross_entropy(outputs.float(), targets, reduction="none")


@pytest.fixture(scope="module")
def halved(pool: Pool) -> Run:
    """What one device does in fp16."""
    return trained(pool, replace(LAYOUTS["one"], precision="fp16"), HALF, "float32")


SINGLE = replace(problems.PROBLEMS["ragged"], dtype="float32")
HALF = replace(
    JOB, model=partial(Attentive, torch.float32, dropout=0.0), loss=large, sample=partial(torch_case.sample, SINGLE)
)


@pytest.mark.parametrize("layout", ["parallel", "sharded", "stages", "shards of stages"])
def test_one_scale_for_all_ranks(pool: Pool, layout: str, halved: Run) -> None:
    found = trained(pool, replace(LAYOUTS[layout], precision="fp16"), HALF, "float32")
    over = [report.overflowed for report in halved[0]]
    assert [report.overflowed for report in found[0]] == over and over[0] and not over[-1]
    assert json.loads(str(found[1]["state.json"]))["scale"] == [2.0 ** (16 - sum(over)), 6 - sum(over)]
    assert [one.loss for one in found[0]] == pytest.approx([one.loss for one in halved[0]], rel=1e-2)
