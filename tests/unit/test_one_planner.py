"""`fit`, `plan --cluster` and `rank` give one answer, for models and clusters drawn at random."""

from __future__ import annotations

import random

import pytest

import trainwright as tw
from tests.support.planner_cases import job
from trainwright.core.errors import PlanError
from trainwright.core.plan import PlanConstraints
from trainwright.planning.planner import choose
from trainwright.planning.what_if import SizingRequest, what_if
from trainwright.strategies.search.plan_ranking import estimate_of

QUESTIONS, PARTS = 200, 20
KINDS = ("A100-80GB", "H100-80GB", "T4-16GB", "L4-24GB", "V100-16GB")


def question(number: int) -> tuple[tw.ModelProfile, tw.Cluster, int]:
    """A transformer of 10 million to 40 billion parameters, 1 to 32 accelerators, a batch of 1 to 2,048."""
    draw = random.Random(number)
    hidden, layers = 2 ** draw.randint(8, 13), draw.choice((2, 4, 12, 24, 48))
    profile = tw.transformer_profile(
        hidden=hidden, layers=layers, heads=hidden // 64, sequence=draw.choice((128, 1024, 4096)),
        vocabulary=draw.choice((1000, 51_200)), fused_attention=draw.random() < 0.5,
    )  # fmt: skip
    nodes, each = 2 ** draw.randint(0, 2), draw.choice((1, 2, 4, 8))
    network = draw.choice(("", "@25Gb", "@800Gb"))
    cluster = tw.Cluster.parse(f"{nodes}x{each}x{draw.choice(KINDS)}{network}")
    return profile, cluster, 2 ** draw.randint(0, 11)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, PARTS))])
def test_three_ways_to_ask_give_the_same_plan(part: int) -> None:
    found = 0
    for number in range(part, QUESTIONS, PARTS):
        profile, cluster, batch = question(number)
        request = SizingRequest(batch_size=batch, precision="bf16", steps=100)
        try:
            ranked = tw.rank(profile, cluster, batch_size=batch, precision="bf16")
        except PlanError as error:
            with pytest.raises(PlanError):
                choose(profile, cluster, job(batch_size=batch, precision="bf16"))
            assert "no plan fits" in error.what and error.remedy
            continue
        found += 1
        fitted = choose(profile, cluster, job(batch_size=batch, precision="bf16")).chosen
        texts = {ranked[0].text, fitted.text}
        if number // PARTS % 5 == 0:  # it looks at every size, which takes long
            sizes = {one.accelerators: one.plan for one in what_if(profile, cluster, request).sizes}
            texts.add(sizes[cluster.accelerators].text)
        assert len(texts) == 1, (number, profile, str(cluster), batch, texts)
        assert all(plan.engine for plan in ranked) and PlanConstraints.parse(fitted.text).allow(fitted)
        assert estimate_of(ranked[0]).step_s == estimate_of(fitted).step_s
    assert found > QUESTIONS / PARTS / 2
