"""What a plan chooses beside its layout gives what one device gives without."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import trainwright as tw
from tests.support.conformance import torch_case
from tests.support.conformance.attention_model import HALF, JOB, LAYOUTS, Attentive, Run, assert_near, bent
from tests.support.conformance.harness import Pool
from tests.support.conformance.problems import CLASSES, FEATURES
from tests.support.conformance.staged_model import WIDTH, Deep, plan, spec, trained
from tests.support.conformance.unbroken_runs import assert_same

DIVIDED = pytest.param("shards of stages", marks=pytest.mark.soak)


@pytest.mark.parametrize("layout", ["sharded", "stages", DIVIDED])
def test_scores_computed_again(pool: Pool, layout: str) -> None:
    """Dropout is drawn alike by those who compute it again and by those who do not."""
    how = LAYOUTS[layout]
    found, expected = (trained(pool, replace(how, recompute=name), JOB) for name in ("selective", "none"))
    assert found[0] == expected[0]
    assert_same(expected[1], found[1])


@pytest.mark.parametrize("layout", ["sharded", pytest.param("hybrid", marks=pytest.mark.soak)])
def test_state_in_host_memory(pool: Pool, layout: str) -> None:
    how = LAYOUTS[layout]
    found, expected = (trained(pool, replace(how, offload=offload), JOB) for offload in (True, False))
    assert found[0] == expected[0]
    assert_same(expected[1], found[1])


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["parallel", "stages"])
def test_models_compiled_by_inductor(pool: Pool, layout: str) -> None:
    """Whole or by blocks; micro-batches of unequal rows are compiled once more."""
    how = replace(LAYOUTS[layout], cuts=("2.out",) if layout == "stages" else ())
    plain = replace(JOB, model=bent)
    found = trained(pool, how, replace(plain, compile="inductor"))
    assert_near(found, trained(pool, how, plain))


def by_kind(named_parameters: Any) -> torch.optim.Optimizer:
    """Weights and biases in a group each, by their names."""
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in named_parameters:
        kinds[name.endswith("weight")].append(parameter)
    return torch.optim.AdamW([{"params": kinds[True]}, {"params": kinds[False], "weight_decay": 0.0}], lr=0.05)


def annealed(outputs: torch.Tensor, targets: torch.Tensor, *, step: int, total_steps: int) -> torch.Tensor:
    """A loss whose weight grows with the step."""
    values: torch.Tensor = torch_case.cross_entropy(outputs, targets)
    return values * (step + 1) / total_steps


SCHEDULED = replace(
    JOB, loss=annealed, model=partial(Attentive, dropout=0.0), optimizer=by_kind,
    schedule=partial(OneCycleLR, max_lr=[0.05, 0.02]), total_steps=8, epochs=4,
    weight_average=tw.WeightAverage(start=1),
)  # fmt: skip


@pytest.fixture(scope="module")
def scheduled(pool: Pool) -> Run:
    """What one device does."""
    return trained(pool, LAYOUTS["one"], SCHEDULED)


@pytest.mark.parametrize("layout", ["parallel", "sharded", "stages", DIVIDED])
def test_a_scheduler_groups_by_name_and_averages_of_weights(pool: Pool, layout: str, scheduled: Run) -> None:
    found = trained(pool, LAYOUTS[layout], SCHEDULED)
    assert_near(found, scheduled)
    assert [one.learning_rate for one in found[0]] == [one.learning_rate for one in scheduled[0]]
    ours, theirs = (json.loads(str(run[1]["state.json"])) for run in (found, scheduled))
    assert ours["scheduler"] == theirs["scheduler"] and ours["options"] == theirs["options"]
    assert "average.safetensors/first.weight" in found[1]


@pytest.mark.parametrize("layout", ["sharded", "stages"])
def test_states_without_frozen_parameters(pool: Pool, layout: str) -> None:
    how = plan(2, cuts=("blocks.1",), schedule="1f1b") if layout == "stages" else LAYOUTS[layout]
    found, expected = trained(pool, how, spec(Deep, save_frozen=False)), trained(pool, plan(), spec(Deep))
    frozen = "model.safetensors/blocks.1.lift.bias"
    assert frozen in expected[1] and frozen not in found[1]
    assert found[1].keys() == expected[1].keys() - {frozen}
    assert_near(found, (expected[0], {key: value for key, value in expected[1].items() if key != frozen}))


def normed() -> torch.nn.Module:
    """Two layers, each before a batch norm."""
    layers = (torch.nn.Linear(FEATURES, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, CLASSES))
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(CLASSES)).double()


def test_batch_norms_in_stages(pool: Pool) -> None:
    job = spec(normed, loss=cross_entropy_of_logits)
    found = trained(pool, plan(2, cuts=("2",), schedule="1f1b", accumulation=1), job)
    assert_near(found, trained(pool, plan(accumulation=1), job))


def cross_entropy_of_logits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.fixture(scope="module")
def halved(pool: Pool) -> Run:
    """What one device does in fp16."""
    return trained(pool, replace(LAYOUTS["one"], precision="fp16"), HALF, "float32")


@pytest.mark.parametrize("layout", ["parallel", "sharded", "stages", DIVIDED])
def test_one_scale_for_all_ranks(pool: Pool, layout: str, halved: Run) -> None:
    found = trained(pool, replace(LAYOUTS[layout], precision="fp16"), HALF, "float32")
    over = [report.overflowed for report in halved[0]]
    assert [report.overflowed for report in found[0]] == over and over[0] and not over[-1]
    assert json.loads(str(found[1]["state.json"]))["scale"] == [2.0 ** (16 - sum(over)), 6 - sum(over)]
    assert [one.loss for one in found[0]] == pytest.approx([one.loss for one in halved[0]], rel=1e-2)
