"""Students with teachers: whatever the layout, the steps are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance import problems, torch_case
from tests.conformance.harness import Pool
from tests.conformance.test_choices import LAYOUTS, WIDTH, Run, assert_near, bent
from tests.conformance.test_pipeline import plan, spec, trained
from trainwright.core.distillation import Match, SoftLoss
from trainwright.strategies.distilling import Distilled
from trainwright.strategies.likeness import Bridge
from trainwright.strategies.students import Students


def small() -> nn.Module:
    """A student that is also the other's teacher."""
    wide = torch.float64
    return nn.Sequential(
        nn.Linear(problems.FEATURES, 3, dtype=wide), nn.Tanh(), nn.Linear(3, problems.CLASSES, dtype=wide)
    )


LOSS = Distilled(
    soft=SoftLoss(alpha=0.3, matches=(Match(student="1", teacher="in", of="big", weight=0.5),), combine="learned"),
    hard=torch_case.cross_entropy,
    targets=("y", "teacher.big", "teacher.big/in"),
    labels=("y",),
    students=("deep", "small"),
    teachers=("big",),
    joint=("small",),
)
CLASS = Students(
    builders={"deep": bent, "small": small},
    loss=LOSS,
    bridges={"deep/match-0": Bridge(axis=1, given=WIDTH, wanted=problems.FEATURES)},
)
JOB = spec(CLASS, loss=LOSS, targets=("y", "t", "z"))
CUTS = {"stages": ("students.deep.2.out",), "shards of stages": ("students.deep.2",)}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Callable[[], Run]:
    """What one device does."""
    return cache(lambda: trained(pool, plan(), JOB))


@pytest.mark.parametrize("layout", ["parallel", "sharded", "stages", "shards of stages"])
def test_a_class_with_bridges_and_learned_weights_is_that_of_one_device(
    pool: Pool, layout: str, alone: Callable[[], Run]
) -> None:
    """Two ranks share 23 samples in four micro-batches each; the layer that is matched lies in the first stage."""
    how = replace(LAYOUTS[layout], cuts=CUTS.get(layout, ()))
    found = trained(pool, how, JOB)
    assert_near(found, alone())
    assert "model.safetensors/weighing" in found[1] and found[1]["model.safetensors/weighing"].any()


def masked(outputs: Any, targets: Any) -> Any:
    return torch_case.weighted(outputs, targets)


def test_weights_of_the_hard_loss_count_for_all_terms(pool: Pool) -> None:
    """One student, bare, with teachers weighted by confidence."""
    loss = Distilled(
        soft=SoftLoss(divergence="jensen_shannon", combine="confidence"),
        hard=masked, targets=("y", "w", "teacher.one", "teacher.two"), labels=("y", "w"), teachers=("one", "two"),
    )  # fmt: skip
    job = spec(bent, loss=loss, targets=("y", "w", "t", "m"))
    found, expected = (trained(pool, how, job) for how in (LAYOUTS["parallel"], plan()))
    assert_near(found, expected)
