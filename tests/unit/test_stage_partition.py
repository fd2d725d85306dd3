"""Contiguous stages: the slowest as quick as can be, none over its memory; held against trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.strategies.cost_model.estimator import estimate
from trainwright.strategies.cost_model.machine_model import MachineModel
from trainwright.strategies.cost_model.memory_estimate import stage_memory
from trainwright.strategies.cost_model.stage_partition import MemoryLimit, balanced_partition, partition_in_memory
from trainwright.strategies.search.plan_ranking import stage_sizes

Sizes = tuple[int, ...]
NODE = tw.Cluster.parse("8xA100-80GB")
GPT = tw.transformer_profile(hidden=2048, layers=24, heads=16, sequence=1024, vocabulary=51_200)
GIB = 2**30


def every(layers: int, stages: int) -> Iterator[Sizes]:
    """All divisions into stages that are not empty."""
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *inner, layers)))


def runs(values: Sequence[float], sizes: Sizes) -> list[Sequence[float]]:
    """The values of each stage."""
    return [values[begin:end] for begin, end in pairwise([0, *accumulate(sizes)])]


def slowest(costs: Sequence[float], sizes: Sizes) -> float:
    return max(sum(run) for run in runs(costs, sizes))


def fits(room: MemoryLimit, sizes: Sizes) -> bool:
    parts = (runs(values, sizes) for values in (room.fixed_bytes, room.kept_bytes, room.working_bytes))
    held = [
        sum(fixed) + flight * sum(kept) + max(working)
        for fixed, kept, working, flight in zip(*parts, room.in_flight, strict=True)
    ]
    return max(held) <= room.room_bytes


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_stages_are_as_quick_as_can_be(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    sizes = balanced_partition(costs, stages)
    assert sum(sizes) == len(costs) and min(sizes) >= 1 and len(sizes) == stages
    assert slowest(costs, sizes) == min(slowest(costs, other) for other in every(len(costs), stages))


@given(layers=st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=8), data=st.data())
def test_and_fit_their_memory(layers: list[tuple[int, int, int, int]], data: st.DataObject) -> None:
    costs, fixed, kept, working = ([layer[part] for layer in layers] for part in range(4))
    stages = data.draw(st.integers(1, len(layers)))
    flight = sorted(data.draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages)), reverse=True)
    room = MemoryLimit(
        fixed_bytes=fixed,
        kept_bytes=kept,
        working_bytes=working,
        in_flight=flight,
        room_bytes=data.draw(st.integers(0, 80)),
    )
    possible = [slowest(costs, sizes) for sizes in every(len(layers), stages) if fits(room, sizes)]
    found = partition_in_memory(costs, stages, room)
    assert (found is None) == (not possible)
    if found is not None:
        assert fits(room, found) and min(found) >= 1 and slowest(costs, found) == min(possible)


def test_what_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="3 stages for 2 layers"):
        balanced_partition([1.0, 2.0], 3)
    room = MemoryLimit(fixed_bytes=[1], kept_bytes=[1], working_bytes=[0], in_flight=[1, 2], room_bytes=9)
    with pytest.raises(ValueError, match="more micro-batches in flight"):
        partition_in_memory([1.0, 2.0], 2, room)


def cut(plan: tw.Plan, profile: ModelProfile, room_bytes: float, batch: int = 64) -> Sizes:
    plan = replace(plan, batch_size=batch, precision="bf16")
    return stage_sizes(profile, MachineModel.of(NODE), plan, room_bytes=room_bytes)


def step_s(plan: tw.Plan, profile: ModelProfile, batch: int = 64) -> float:
    return estimate(profile, NODE, plan, batch_size=batch, precision="bf16").step_s


def fullest(plan: tw.Plan, profile: ModelProfile, batch: int = 64) -> int:
    return max(stage_memory(profile, replace(plan, batch_size=batch, precision="bf16")))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_other_cut_of_a_small_model_takes_less_time_in_the_same_memory(recompute: str) -> None:
    small = tw.transformer_profile(hidden=1024, layers=7, heads=16, sequence=512, vocabulary=32_000, tied=False)
    plan = replace(tw.Plan.parse("pp=4,dp=2,micro_batch=2,schedule=1f1b"), recompute=recompute)
    tried = [replace(plan, stages=sizes) for sizes in every(len(small.layers), 4)]
    levels = sorted({fullest(one, small) for one in tried})
    for room_bytes in (80 * GIB, *levels[:6]):
        found = replace(plan, stages=cut(plan, small, room_bytes))
        fitting = [step_s(one, small) for one in tried if fullest(one, small) <= room_bytes]
        assert fullest(found, small) <= room_bytes
        assert step_s(found, small) == pytest.approx(min(fitting), rel=0.02)  # the bubble is not looked at


def test_memory_moves_layers_to_later_stages_and_where_nothing_fits_time_decides() -> None:
    plan = tw.Plan.parse("pp=4,dp=2,micro_batch=8")
    quickest = cut(plan, GPT, 80 * GIB)
    full = fullest(replace(plan, stages=quickest), GPT)
    tight = cut(plan, GPT, 0.9 * full)
    assert tight[0] < quickest[0] and fullest(replace(plan, stages=tight), GPT) <= 0.9 * full
    assert cut(plan, GPT, 1 * GIB) == quickest
    assert cut(tw.Plan.parse("dp=8"), GPT, 80 * GIB) == (len(GPT.layers),)


def test_a_wide_cut_is_gone_round() -> None:
    layer = LayerCost(name="a", parameters=10**6, parameter_bytes=4 * 10**6, flops=1e11, output_numbers=10**5)
    wide = replace(layer, output_numbers=10**9)
    plan = tw.Plan.parse("pp=2,micro_batch=1")
    even, uneven = (ModelProfile(framework="", layers=(layer, part, layer, layer)) for part in (layer, wide))
    assert cut(plan, even, 80 * GIB) == (2, 2) and cut(plan, uneven, 80 * GIB) in ((1, 3), (3, 1))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=3, max_size=9),
    st.integers(2, 3),
)
def test_each_stage_has_a_layer_that_is_trained(layers: list[tuple[int, bool]], stages: int) -> None:
    made = tuple(
        LayerCost(
            name=str(number), parameters=8, parameter_bytes=32, flops=1e9 * cost, output_numbers=8.0, cut_numbers=8.0,
            trained=trained,
        )
        for number, (cost, trained) in enumerate(layers)
    )  # fmt: skip
    profile = ModelProfile(framework="torch", layers=made)
    plan = replace(tw.Plan.parse(f"pp={stages},accumulation=4"), batch_size=16)
    sizes = stage_sizes(profile, MachineModel.of(NODE), plan, room_bytes=80 * GIB)
    trained = [trained for _, trained in layers]
    if sum(trained) >= stages:
        assert all(any(run) for run in runs(trained, sizes))
    else:
        assert profile.most_stages < stages
