"""Plans in words, clusters that are not there, stages, memory, estimates and the ranking of all plans."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainwright as tw
from trainwright.core.cluster import ACCELERATORS, Accelerator, find_accelerator
from trainwright.core.errors import PlanError, ResourceError
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.core.plan import InfeasiblePlan, Mesh, PlanConstraints
from trainwright.strategies import STRATEGIES
from trainwright.strategies.cost_model.machine_model import MachineModel, RankGroup, rank_group
from trainwright.strategies.cost_model.memory_estimate import layer_memory, micro_batches_in_flight, stage_memory
from trainwright.strategies.cost_model.plan_constraints import invalid_compile
from trainwright.strategies.cost_model.step_work import StepWork, even_partition, layer_vectors, planned_step_work
from trainwright.strategies.search.plan_ranking import Ranking, search_plans
from trainwright.strategies.search.plan_request import PlanRequest

GPT = tw.transformer_profile(hidden=2048, layers=24, heads=16, sequence=1024, vocabulary=51_200)
NODE, NODES = tw.Cluster.parse("8xA100-80GB"), tw.Cluster.parse("4x8xA100-80GB@800Gb")


def planned(text: str, batch: int, precision: str = "bf16") -> tw.Plan:
    return replace(tw.Plan.parse(text), batch_size=batch, precision=precision)


def estimated(plan: str, cluster: tw.Cluster = NODES, profile: ModelProfile = GPT, batch: int = 256) -> tw.Estimate:
    return tw.estimate(profile, cluster, tw.Plan.parse(plan), batch_size=batch, precision="bf16")


@pytest.mark.parametrize(("plan", "part"), [("dp=2", 1.0), ("fsdp=8", 1 / 8), ("fsdp=8,zero=2", 1 / 8)])
def test_an_average_of_weights_is_two_copies_of_the_parameters(plan: str, part: float) -> None:
    averaged, chosen = replace(GPT, weight_copies=2), planned(plan, 16, "fp32")
    (before,), (after,) = (stage_memory(each, chosen) for each in (GPT, averaged))
    assert after - before == pytest.approx(2 * 4 * GPT.parameters * part, rel=1e-6)


def test_a_worker_with_fewer_threads_than_its_share_is_slower() -> None:
    cluster, request = tw.Cluster.parse("16xCPU"), {"batch_size": 64, "precision": "fp32"}
    plan = tw.Plan.parse("dp=2")
    whole, one = (
        tw.estimate(GPT, cluster, replace(plan, placement=replace(plan.placement, threads=threads)), **request)
        for threads in (8, 1)
    )
    assert whole.terms == tw.estimate(GPT, cluster, plan, **request).terms, "a plan in words has its whole share"
    assert one.terms["compute"] == pytest.approx(8**0.8 * whole.terms["compute"], rel=0.02)


def test_a_plan_in_words() -> None:
    plan = tw.Plan.parse(" dp=8, tp=2,pp=4,micro_batch=4,schedule=gpipe,recompute=full")
    assert plan.mesh == Mesh(pipeline=4, data=8, tensor=2)
    assert (plan.micro_batch, plan.schedule, plan.recompute, plan.zero) == (4, "gpipe", "full", 0)
    assert plan.micro_batches(256) == (8, 4) and plan.micro_batches(100) == (4, 4)
    filled = tw.Plan.parse("pp=2")
    assert (filled.micro_batch, filled.schedule, filled.recompute) == (1, "1f1b", "none")
    assert tw.Plan.parse("").mesh == Mesh() and tw.Plan.parse("").strategy == "one_device"
    assert tw.Plan.parse("dp=2,fsdp=8").mesh == Mesh(data=2, shard=8) and tw.Plan.parse("fsdp=8").zero == 3
    assert tw.Plan.parse("dp=8,zero=1").mesh == Mesh(shard=8)
    assert tw.Plan.parse("schedule=interleaved,pp=4").chunks == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pd=2", "'pd' is not a part of a plan"),
        ("dp=0", "dp='0' must be a whole number from 1"),
        ("dp=two", "must be a whole number"),
        ("zero=4", "must be 0, 1, 2 or 3"),
        ("schedule=1f2b", "did you mean '1f1b'?"),
        ("recompute", "recompute='' is not known"),
    ],
)
def test_a_plan_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=r".") as raised:
        tw.Plan.parse(text)
    assert said in str(raised.value)


def test_a_cluster_in_words() -> None:
    cluster = tw.Cluster.parse("2x8xH100-80GB@3200Gb + 4xL4")
    assert [node.accelerators for node in cluster.nodes] == [8, 8, 4] and cluster.accelerators == 20
    assert cluster.kinds == ("H100-80GB", "L4-24GB") and cluster.nodes[0].network_bytes_per_s == 400e9
    slowest = MachineModel.of(cluster)
    assert (slowest.device.name, slowest.per_node, slowest.devices) == ("L4-24GB", 4, 20)
    cpus = tw.Cluster.parse("2x16xCPU")
    assert (cpus.cpus, cpus.accelerators) == (32, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [("8", "'8' is not a cluster"), ("0x8xA100", "is not a cluster"), ("4x8xH200O", "did you mean 'H200")],
)
def test_a_cluster_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(ResourceError) as raised:
        tw.Cluster.parse(text)
    assert said in str(raised.value)


def test_accelerators_are_found_however_they_are_spelt_and_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA A100-SXM4-80GB", "a100-80gb", "A100_80GB", "A100"):
        found = find_accelerator(name)
        assert found is not None and found.name == "A100-80GB"
    assert find_accelerator("B300") is None
    mine = replace(ACCELERATORS["H200-141GB"], name="B300", aliases=())
    monkeypatch.setitem(ACCELERATORS, "B300", mine)
    assert find_accelerator("NVIDIA B300") is mine and tw.Cluster.parse("8xB300").kinds == ("B300",)
    names = [name for item in ACCELERATORS.values() for name in {item.name, *item.aliases}]
    assert len(names) == len(set(names))


def test_what_is_known_of_each_accelerator() -> None:
    for item in ACCELERATORS.values():
        assert isinstance(item, Accelerator) and item.source
        assert item.rate("bf16") >= item.rate("fp32") > 1e12 and 10**11 < item.memory_bytes_per_s < 10**13
        assert item.price is None or item.spot_price is None or 0 < item.spot_price < item.price


def test_a_transformer_from_numbers() -> None:
    gpt3 = tw.transformer_profile(hidden=12288, layers=96, heads=96, sequence=2048, vocabulary=50257)
    assert gpt3.parameters == pytest.approx(174.6e9, rel=0.002)  # Brown et al. (2020), table 2.1
    tokens = 2048
    assert 3 * gpt3.flops / tokens == pytest.approx(6 * gpt3.parameters, rel=0.05)
    untied = tw.transformer_profile(hidden=64, layers=2, heads=4, sequence=8, vocabulary=100, tied=False)
    tied = tw.transformer_profile(hidden=64, layers=2, heads=4, sequence=8, vocabulary=100)
    assert untied.parameters - tied.parameters == 6400 and untied.flops == tied.flops
    with pytest.raises(ValueError, match="do not divide"):
        tw.transformer_profile(hidden=64, layers=2, heads=5, sequence=8, vocabulary=100)


def test_blocks_are_divided_as_people_do_it() -> None:
    assert even_partition(GPT, 4) == (7, 6, 6, 7) and even_partition(GPT, 5) == (6, 5, 5, 5, 5)
    layer = LayerCost(name="a", parameters=1, parameter_bytes=4, flops=1.0)
    plain = ModelProfile(framework="", layers=(replace(layer, flops=9.0), layer, replace(layer, flops=2.0)))
    assert even_partition(plain, 2) == (1, 2)


def test_who_reduces_with_whom() -> None:
    machine = MachineModel.of(NODES)
    assert rank_group(machine, 8, 1) == RankGroup(size=8, local=8)
    assert rank_group(machine, 4, 8) == RankGroup(size=4, local=1)
    assert rank_group(machine, 16, 2) == RankGroup(size=16, local=4)
    assert rank_group(machine, 16, 1).nodes == 2


def test_terms_add_up_and_the_interval_holds_the_step() -> None:
    for plan in ("dp=32", "dp=8,tp=4", "pp=4,dp=8,micro_batch=2", "fsdp=32,recompute=full", "pp=2,tp=8,dp=2,zero=1"):
        found = estimated(plan)
        assert sum(found.terms.values()) == pytest.approx(found.step_s) and min(found.terms.values()) > 0
        assert found.low_s < found.step_s < found.high_s
        assert len(found.stage_memory_bytes) == tw.Plan.parse(plan).mesh.pipeline


def test_what_costs_what() -> None:
    alone = estimated("", batch=8)
    assert set(alone.terms) == {"compute", "optimizer", "other"}
    assert "gradients" in estimated("dp=8").terms and "tensor_parallel" in estimated("tp=8").terms
    pipeline = estimated("pp=4,dp=8").terms
    assert {"bubble", "transfers"} <= pipeline.keys()
    assert estimated("pp=4,dp=8,schedule=zero_bubble").terms["bubble"] == pytest.approx(pipeline["bubble"] / 3)
    assert estimated("pp=4,dp=8,schedule=interleaved").terms["bubble"] == pytest.approx(pipeline["bubble"] / 2)
    full, none = estimated("dp=32,recompute=full"), estimated("dp=32")
    assert full.terms["recompute"] > 0.2 * full.terms["compute"] and full.step_s > none.step_s
    assert max(full.stage_memory_bytes) < max(none.stage_memory_bytes)
    slow = tw.Cluster.parse("4x8xA100-80GB@10Gb")
    assert estimated("dp=32", slow).step_s > 2 * none.step_s
    assert estimated("tp=8", slow, batch=32).step_s == pytest.approx(estimated("tp=8", batch=32).step_s)


def test_memory_of_each_stage() -> None:
    plan = planned("pp=4,dp=8,micro_batch=1", 256)
    first, *middle, last = stage_memory(GPT, plan)
    assert middle[0] > middle[1], "an earlier stage has more micro-batches in flight"
    assert first > middle[0] and last > middle[1], "embedding and logits"
    gpipe = stage_memory(GPT, replace(plan, schedule="gpipe"))
    assert gpipe[2] > middle[1]
    assert micro_batches_in_flight(plan, 32).tolist() == [4, 3, 2, 1] and micro_batches_in_flight(plan, 2).tolist() == [
        2,
        2,
        2,
        1,
    ]
    whole, third = (
        layer_memory(GPT, planned(text, 32)).states[layer_vectors(GPT).order].sum() for text in ("dp=32", "fsdp=32")
    )
    assert whole - third == pytest.approx(16 * GPT.parameters * 31 / 32, rel=0.01)


def test_memory_of_a_model_in_one_stage() -> None:
    """Layers of 1,000 parameters that keep as many numbers of a sample, one sample on each rank."""
    layer = LayerCost(name="l", parameters=1000, parameter_bytes=4000, flops=1e6, output_numbers=500, kept_numbers=1000)
    profile = ModelProfile(framework="torch", layers=(replace(layer, block_place=1),) * 10)

    def of(plan: str, batch: int = 1, *, apart: bool = True, profile: ModelProfile = profile) -> int:
        (found,) = stage_memory(profile, planned(plan, batch, "fp32"), apart=apart)
        return found

    grads = 4000  # of one layer
    assert of("", apart=False) == 10 * 12_000 + 10 * 4000 + 2 * 4000, "then the optimizer has the most"
    assert of("") == 10 * 12_000 + 10 * 4000 + 10 * 4000, "which on a GPU updates all layers at once"
    assert of("", 4) == 10 * 12_000 + 4 * 10 * 4000 + grads, "the last layer's while all activations are there"
    assert of("accumulation=4", 4) == 10 * 16_000 + 10 * 4000 + grads, "they stay, and new ones are added"
    assert of("dp=4", 4) == of("accumulation=4", 4), "as they do in the buckets of a reduction"
    assert of("fsdp=4", 4) == 10 * 3000 + 10 * 4000 + grads // 4 + 4 * 4000, "one layer is whole at a time"
    assert of("dp=4,zero=2", 4) == 10 * 7000 + 10 * 4000 + grads // 4 + 2 * 4000, "beside the whole the part"
    staged, divided = (planned(f"pp=2,{data},micro_batch=1", 4, "fp32") for data in ("dp=2", "fsdp=2"))
    whole, parts = (stage_memory(profile, each)[1] for each in (staged, divided))
    more = 5 * (2000 - 4000)  # its part of the parameters beside the whole, and the half of Adam's state less
    assert parts - 2 * 4000 == whole + more, "gradients add up whole"
    assert of("dp=4,zero=1", 4) == of("dp=4,zero=2", 4), "with one micro-batch they are divided as they come"
    summed = of("dp=4,zero=1,accumulation=4", 16)
    assert summed == 10 * (4000 + 4000 + 2000 + 1000) + 10 * 4000 + grads + 2 * 4000, "else at the end of the step"
    scored = replace(profile, layers=(replace(layer, scores_numbers=3000),) * 10)
    selective, plain = (stage_memory(each, planned("recompute=selective", 4, "fp32"))[0] for each in (scored, profile))
    assert selective == plain + 4 * 3000 * 4, "attention's scores of one layer at a time"
    assert of("recompute=full", 4) == 10 * 12_000 + 4 * (10 * 2000 + 4000) + grads, "what a layer makes again"
    pairs = replace(profile, layers=tuple(replace(layer, block_place=1 + place % 2) for place in range(10)))
    assert of("recompute=full", 8, profile=pairs) == 10 * 12_000 + 8 * (5 * 2000 + 8000) + grads, "a block of two"
    bare = replace(profile, layers=(layer,) * 10)
    assert of("recompute=full", 4, profile=bare) == of("", 4), "no block, nothing is made again"
    lossy = replace(profile, layers=(*profile.layers[:-1], replace(layer, loss_numbers=7000)))
    assert of("", 4, profile=lossy) == of("", 4) + 3 * 4 * 4 * 7000, "the loss keeps one copy and makes two gradients"


def test_memory_under_autocast() -> None:
    """Parameters, gradients and optimizer in full precision, a copy of each weight in half, activations in half."""
    layer = LayerCost(name="l", parameters=1000, parameter_bytes=4000, flops=1e6, output_numbers=500, kept_numbers=1000)
    profile = ModelProfile(framework="torch", layers=(replace(layer, block_place=1),) * 10)

    def of(plan: str, profile: ModelProfile = profile) -> int:
        (found,) = stage_memory(profile, planned(plan, 8))
        return found

    kept, cast, grads = 10 * 8 * 2000, 10 * 2000, 4000
    assert of("") == 10 * 12_000 + kept + cast + grads
    # ZeRO gathers in half precision, and no copy is kept: at one layer parameters twice, and the gradient twice.
    assert of("fsdp=4") == 10 * 3000 + kept // 4 + grads // 4 + 2 * 2000 + 2 * 4000
    assert of("fsdp=4,wire=bf16") == of("fsdp=4") - 2000, "gradients are sent from half as many bytes"
    assert of("dp=4,zero=2") == 10 * (1000 + 2000 + 2000) + kept // 4 + grads // 4 + 2 * 4000, "parts beside the whole"
    assert of("recompute=full") == 10 * 12_000 + kept // 2 + 8 * 2000 + cast // 10 + grads
    assert of("", replace(profile, framework="")) == 10 * 14_000 + kept + 2000, "as published systems keep it"


@pytest.mark.parametrize(
    ("plan", "batch", "said"),
    [
        ("dp=64", 256, "takes 64 devices, the cluster has 32"),
        ("dp=32", 16, "smaller than the 32 data ranks"),
        ("tp=3", 16, "does not divide 16 heads"),
        ("pp=27", 16, "27 stages for 26 layers"),
        ("pp=4,schedule=interleaved", 6, "6 micro-batches are not a multiple of the 4 stages"),
    ],
)
def test_plans_that_cannot_be(plan: str, batch: int, said: str) -> None:
    with pytest.raises(PlanError) as raised:
        estimated(plan, batch=batch)
    assert said in str(raised.value)


def test_zero_gathers_products_in_half_precision() -> None:
    table = LayerCost(name="t", parameters=300, parameter_bytes=1200, flops=0.0, output_numbers=500, kept_numbers=0)
    product = LayerCost(
        name="l", parameters=1000, parameter_bytes=4000, flops=1e6, output_numbers=500, kept_numbers=1000
    )
    profile = ModelProfile(framework="torch", layers=(table, product))

    def sent(plan: str, precision: str = "bf16", of: ModelProfile = profile) -> tuple[float, float]:
        state = planned_step_work(of, NODE, planned(plan, 64, precision)).state
        return float(state.gathered_bytes[0]), float(state.gradient_bytes[0])

    assert sent("fsdp=4") == sent("dp=4,zero=2") == (300 * 4 + 1000 * 2, 1300 * 4), "gradients in full precision"
    assert sent("fsdp=4,wire=bf16") == (300 * 4 + 1000 * 2, 1300 * 2)
    assert sent("fsdp=4", "fp32") == sent("dp=4") == (1300 * 4, 1300 * 4)
    assert sent("fsdp=4", of=replace(profile, framework="")) == (1300 * 2, 1300 * 2), "as published systems do"


def ranked(profile: tw.ModelProfile, cluster: tw.Cluster, *, batch_size: int, precision: str) -> Ranking:
    """As `tw.rank`, with the plans that do not fit."""
    return search_plans(PlanRequest(profile=profile, cluster=cluster, batch_size=batch_size, precision=precision))


def test_the_ranking_is_sorted_fits_and_says_why_the_others_do_not() -> None:
    found = ranked(GPT, NODE, batch_size=64, precision="bf16")
    alone = [plan for plan in found.plans if plan.topology == "independent"]
    steps = [plan.estimate.step_s for plan in found.plans if plan.estimate]
    together = steps[: len(steps) - len(alone)]
    assert len(steps) == len(found.plans) > 100 and together == sorted(together)
    assert alone and found.plans[-len(alone) :] == tuple(alone), "how many more samples they need is not known"
    room = ACCELERATORS["A100-80GB"].memory_bytes
    assert all(max(plan.estimate.stage_memory_bytes) < room for plan in found.plans if plan.estimate)
    best = found.plans[0].estimate
    assert best is not None and best.low_s < best.step_s < best.high_s
    rows = tw.rank(GPT, NODE, batch_size=64, precision="bf16")
    assert {plan.text for plan in rows} == {plan.text for plan in found.plans} and len(rows) == len(found.plans)
    strategies = {plan.strategy for plan in found.plans}
    near = {"local_sgd"}  # of which the nodes are too near to propose it
    assert strategies == {name for name in STRATEGIES if not name.startswith("tf_")} - near
    small = ranked(GPT, tw.Cluster.parse("8xT4"), batch_size=64, precision="fp16")
    full = [one for one in small.misfits if one.missing_bytes and one.plan and one.plan.topology == "collective"]
    assert "one_device" not in {plan.strategy for plan in small.plans}
    assert full and "out of memory by" in full[0].reason and "on stage" in full[0].reason
    assert [one.missing_bytes for one in full] == sorted(one.missing_bytes for one in full)


def test_a_model_that_fits_nowhere() -> None:
    trillion = tw.transformer_profile(hidden=25600, layers=128, heads=160, sequence=2048, vocabulary=51_200)
    found = ranked(trillion, NODE, batch_size=64, precision="bf16")
    assert not found.plans and found.misfits[0].plan is not None and found.misfits[0].plan.offload
    held = [one.missing_bytes for one in found.misfits if one.missing_bytes and one.plan and not one.plan.offload]
    assert min(held) > 10**12
    with pytest.raises(PlanError, match=r"no plan fits 1 node.*; the nearest, sharded, plan=.*: out of memory by"):
        tw.rank(trillion, NODE, batch_size=64, precision="bf16")


@settings(max_examples=10)
@given(batch=st.integers(1, 40), layers=st.integers(1, 6), devices=st.integers(1, 6))
def test_any_batch_model_and_number_of_devices_can_be_ranked(batch: int, layers: int, devices: int) -> None:
    profile = tw.transformer_profile(hidden=128, layers=layers, heads=4, sequence=64, vocabulary=1000)
    plans = tw.rank(profile, tw.Cluster.parse(f"{devices}xL4"), batch_size=batch, precision="fp32")
    assert plans and all(plan.mesh.data_ranks <= batch for plan in plans)


def test_a_thousand_accelerators_take_about_a_second() -> None:
    trillion = tw.transformer_profile(hidden=25600, layers=128, heads=160, sequence=2048, vocabulary=51_200)
    begun = time.process_time()
    plans = tw.rank(trillion, tw.Cluster.parse("128x8xH100-80GB"), batch_size=3072, precision="bf16")
    assert plans and time.process_time() - begun < 5.0, "measured: 0.6 s of one core"


def test_a_calibration_of_nothing_is_the_default_and_one_row_moves_it() -> None:
    assert tw.calibrate([]) == tw.Calibration()
    plan, batch = tw.Plan.parse("dp=8,micro_batch=4"), 64
    before = tw.estimate(GPT, NODE, plan, batch_size=batch, precision="bf16")
    row = tw.Measurement(
        profile=GPT, cluster=NODE, plan=plan, batch_size=batch, precision="bf16", step_s=2 * before.step_s
    )
    after = tw.estimate(GPT, NODE, plan, batch_size=batch, precision="bf16", calibration=tw.calibrate([row]))
    assert after.step_s == pytest.approx(row.step_s, rel=0.1)
    assert after.high_s / after.low_s < before.high_s / before.low_s
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        tw.calibrate([replace(row, step_s=0.0)])


def test_a_tensor_group_that_is_larger_than_a_node_is_refused_with_the_reason() -> None:
    profile = replace(GPT, framework="torch")
    question = PlanRequest(
        profile=profile,
        cluster=tw.Cluster.parse("2x4xH100-80GB"),
        batch_size=64,
        precision="bf16",
        pins=PlanConstraints.parse("tp=8"),
    )
    (found,) = STRATEGIES["tensor_parallel"].proposals(question)
    assert isinstance(found, InfeasiblePlan) and found.reason == "tp=8 is more than the 4 devices of a node"
    assert "tp=4 or less" in found.hint


def test_what_no_engine_does_with_a_compiled_model_is_not_proposed() -> None:
    profile = replace(GPT, framework="torch")
    question = PlanRequest(profile=profile, cluster=tw.Cluster.parse("4xA100-80GB"), batch_size=64, precision="bf16")
    for wanted in (False, True):
        asked = replace(question, compile="inductor") if wanted else question
        found = search_plans(asked)
        plans = [*found.plans, *(one.plan for one in found.misfits if one.plan)]
        assert ("selective" in {plan.recompute for plan in plans}) is not wanted
        assert ({plan.mesh.tensor for plan in plans} == {1}) is wanted
    (told,) = STRATEGIES["tensor_parallel"].proposals(asked.free)
    assert isinstance(told, InfeasiblePlan) and told.reason == 'compile="inductor" was not tried with it'


def test_what_the_engine_refuses_to_compute_again_compiled_is_refused_in_its_words() -> None:
    profile = replace(GPT, framework="torch", recounted="blocks.0.seen")
    pins, four = PlanConstraints.parse("recompute=full"), tw.Cluster.parse("4xA100-80GB")
    question = PlanRequest(profile=profile, cluster=four, batch_size=64, precision="bf16", pins=pins)
    assert search_plans(question).plans
    found = search_plans(replace(question, compile="inductor"))
    assert not found.plans and invalid_compile("full", "blocks.0.seen") in {
        (one.reason, one.hint) for one in found.misfits
    }


def test_replica_after_replica_fills_the_nodes() -> None:
    """Stages of a replica that fits into a node send nothing over the network, its replicas reduce over it."""
    cluster = tw.Cluster.parse("2x8xH100-80GB")

    def work(plan: str) -> StepWork:
        return planned_step_work(GPT, cluster, planned(plan, 64))

    inside = work("pp=2,dp=8")
    assert not inside.remote and inside.data == RankGroup(size=8, local=4)
    assert work("pp=16").remote and work("pp=3,dp=5").remote, "the third replica lies on both nodes"
    assert not work("pp=8").remote, "one node holds it"


def test_tokens_divided_over_tensor_ranks_leave_no_activation_whole() -> None:
    plan = tw.Plan.parse("tp=8,sequence=1,micro_batch=1")
    assert plan.sequence and plan.text == "tp=8,sequence=1,micro_batch=1" and tw.Plan.parse(plan.text) == plan
    plain = tw.Plan.parse("tp=8,micro_batch=1")
    kept = [layer_memory(GPT, planned(each.text, 1)).kept for each in (plan, plain)]
    whole = (
        2
        * layer_vectors(GPT).kept_numbers
        * np.where(layer_vectors(GPT).splits > 0, layer_vectors(GPT).shared_kept, 1.0)
    )
    assert kept[1] - kept[0] == pytest.approx(whole * 7 / 8)
    with pytest.raises(PlanError, match="sequence=1 divides tokens"):
        estimated("dp=8,sequence=1", NODE)
