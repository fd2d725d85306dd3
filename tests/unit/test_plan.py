"""Plans: mesh and feeding, what the planner chooses, refuses and says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from tests.support.planner_cases import GPUS, LAPTOP, PROFILE, decide, job
from trainwright.core.cluster import Cluster, Node
from trainwright.core.data import fold_seed
from trainwright.core.errors import JobError, PlanError, ResourceError
from trainwright.core.plan import Mesh, Plan, WorkerResources, tensor_workers
from trainwright.ray_cluster.placement_groups import node_bundles, worker_resources
from trainwright.reporting.plan_view import plan_rows
from trainwright.strategies.search.plan_request import placement_for


@given(*[st.integers(1, 4)] * 4)
def test_every_data_rank_is_fed_once_for_each_stage_and_tensor_rank(p: int, d: int, s: int, t: int) -> None:
    mesh = Mesh(pipeline=p, data=d, shard=s, tensor=t)
    plan = Plan(strategy="x", engine="m:C", mesh=mesh, batch_size=1, placement=WorkerResources(cpus=1))
    feedings = [plan.feed_of(rank) for rank in range(mesh.size)]
    for stage in range(p):
        fed = [next(iter(f.data_ranks)) for rank, f in enumerate(feedings) if mesh.stage_of(rank) == stage]
        assert sorted(fed) == sorted(list(range(d * s)) * t)
    assert all(f.inputs == (mesh.stage_of(r) == 0) for r, f in enumerate(feedings))
    assert [mesh.data_rank_of(r) for r in range(t)] == [0] * t, "tensor ranks are neighbours"


def test_a_coordinator_holds_all_data_ranks_and_two_devices_two() -> None:
    plan = Plan(strategy="x", engine="m:C", mesh=Mesh(data=4), batch_size=1, placement=WorkerResources(cpus=1))
    leader = replace(plan, topology="coordinator")
    assert [len(leader.feed_of(worker).data_ranks) for worker in range(4)] == [4, 0, 0, 0]
    pairs = replace(plan, devices_per_worker=2)
    assert pairs.workers == 2 and [pairs.feed_of(worker).data_ranks for worker in range(2)] == [range(2), range(2, 4)]


def test_two_workers_on_a_laptop_and_one_for_each_gpu() -> None:
    assert decide().chosen.workers == 2
    heavy = replace(PROFILE, layers=(replace(PROFILE.layers[0], flops=1e12),))
    chosen = decide(GPUS, profile=heavy).chosen
    assert chosen.workers == 2 and chosen.placement.accelerators == 1 and chosen.placement.accelerator == "GPU"


@pytest.mark.parametrize(
    ("name", "told"), [("ddp", "use data_parallel"), ("data-paralel", "did you mean 'data_parallel'")]
)
def test_an_unknown_strategy_is_refused_with_its_name_here(name: str, told: str) -> None:
    with pytest.raises(JobError, match=f"strategy='{name}' is unknown: {told}"):
        decide(strategy=name)


def test_the_threads_of_a_worker_are_its_share_of_a_node_or_what_the_job_says() -> None:
    for fields, threads in (({"workers": 1}, 2), ({"workers": 2}, 1), ({"workers": 1, "threads_per_worker": 1}, 1)):
        assert decide(**fields).chosen.placement.threads == threads


@given(cpus=st.integers(1, 64), nodes=st.integers(1, 4), workers=st.integers(1, 64))
def test_cpus_are_always_left_for_ray_data(cpus: int, nodes: int, workers: int) -> None:
    cluster = Cluster(nodes=tuple(Node(name=str(n), cpus=cpus, memory_bytes=0) for n in range(nodes)))
    placement = placement_for(cluster, workers)
    on_a_node = -(-workers // nodes)
    assert placement.cpus == 0.01 or placement.cpus * on_a_node <= cpus - min(1, cpus / 2) + 1e-9


@pytest.mark.parametrize("servers", [1, 2, 6, 20])
@pytest.mark.parametrize("cpus", [1, 2, 16])
def test_servers_fit_beside_their_workers_and_ray_data(cpus: int, servers: int) -> None:
    placement = placement_for(Cluster(nodes=(Node(name="a", cpus=cpus, memory_bytes=0),)), 2 + servers)
    assert 2 * placement.cpus + servers * placement.server_cpus + placement.data_cpus <= cpus + 1e-9


def test_a_demand_is_compared_with_the_cluster() -> None:
    with pytest.raises(ResourceError, match="needs 4 GPU, the cluster has 2") as caught:
        decide(GPUS, workers=4)
    assert "workers=2" in str(caught.value)
    with pytest.raises(ResourceError, match="needs 1 GPU, the cluster has 0"):
        decide(accelerator="gpu")
    assert decide(GPUS, accelerator="cpu").chosen.placement.accelerators == 0


def test_what_is_pinned_is_kept_and_said_when_it_is_not_the_best() -> None:
    heavy = replace(PROFILE, layers=(replace(PROFILE.layers[0], flops=1e9),))
    decision = decide(profile=heavy, strategy="one_device")
    assert decision.chosen.strategy == "one_device"
    reasons = {item.plan.strategy: item.reason for item in decision.rejected}
    assert "pinned" in reasons["data_parallel"] and "times as fast" in reasons["data_parallel"]
    assert "without strategy='one_device', data_parallel on 2 workers is predicted 1." in decision.chosen.notes[-1]
    assert "one_device" in str(decision) and "data_parallel" in decision._repr_html_()


def test_why_a_strategy_cannot_be() -> None:
    assert "workers=2 is pinned" in decide(workers=2).infeasible[0].reason
    assert decide(batch_size=1).chosen.strategy == "one_device"
    with pytest.raises(PlanError, match="no plan") as caught:
        decide(batch_size=2, workers=3)
    assert "batch_size=2 is smaller than the 3 data ranks" in str(caught.value)
    norms = replace(PROFILE, inexact=("batch_norm",))
    refused = decide(profile=norms)
    assert refused.chosen.strategy == "one_device" and "batch_norm" in refused.infeasible[0].reason
    accepted = decide(profile=norms, workers=2, inexact=("batch_norm",))
    assert "batch_norm" in accepted.chosen.notes[0]
    assert any('set batch_norm="sync"' in one.hint for one in refused.infeasible)


def test_batch_norm_over_the_whole_batch_and_local_state_need_replicas() -> None:
    norms = replace(PROFILE, inexact=("batch_norm",))
    together = decide(profile=norms, workers=2, batch_norm="sync").chosen
    assert (together.strategy, together.accumulation, together.notes) == ("data_parallel", 1, ())
    for fields, asked in (({"batch_norm": "sync"}, 'batch_norm="sync"'), ({"local_state": "seen"}, "local_state=")):
        with pytest.raises(PlanError, match=f"{asked} needs all of the model on each worker"):
            decide(workers=2, strategy="sharded", **fields)
        with pytest.raises(PlanError, match=f"{asked} is for torch models"):
            decide(profile=replace(norms, framework="tensorflow"), **fields)


def test_the_estimate_adds_up() -> None:
    for plan in (decide().chosen, decide(workers=1).chosen):
        assert plan.estimate is not None
        assert sum(plan.estimate.terms.values()) == pytest.approx(plan.estimate.step_s)
    assert "gradients" in decide(workers=2).chosen.estimate.terms  # type: ignore[union-attr]
    assert "gradients" not in decide(workers=1).chosen.estimate.terms  # type: ignore[union-attr]


def test_check_plan_refuses_fewer_samples_than_data_ranks() -> None:
    plan = Plan(strategy="x", engine="m:C", mesh=Mesh(data=4), batch_size=3, placement=WorkerResources(cpus=1))
    with pytest.raises(JobError, match="batch_size=3"):
        job(batch_size=3).check_plan(plan)


@given(st.lists(st.integers(-(2**70), 2**70), max_size=6), st.lists(st.integers(0, 99), max_size=6))
def test_folds_are_seeds_and_differ(left: list[int], right: list[int]) -> None:
    assert 0 <= fold_seed(*left) < 2**63
    if left != right and all(0 <= n < 2**64 for n in left):
        assert fold_seed(*left) != fold_seed(*right)
    assert fold_seed(1, 2, 3) == 2623250113353451629


def test_a_head_without_accelerators_is_no_place_for_a_worker() -> None:
    head = Node(name="head", cpus=8, memory_bytes=0)
    nodes = tuple(Node(name=n, cpus=8, memory_bytes=0, accelerators=4, accelerator="GPU") for n in "ab")
    heavy = replace(PROFILE, layers=(replace(PROFILE.layers[0], flops=1e12),))
    chosen = decide(Cluster(nodes=(head, *nodes)), profile=heavy).chosen
    assert chosen.workers == 8 and 4 * chosen.placement.cpus <= 7


def test_tpus_are_not_taken_and_then_left_idle() -> None:
    cluster = Cluster(nodes=(Node(name="t", cpus=8, memory_bytes=0, accelerators=4, accelerator="TPU"),))
    with pytest.raises(PlanError, match="no plan") as caught:
        decide(cluster)
    assert "no engine for torch on TPU yet" in str(caught.value)


def test_accelerators_that_would_be_quicker_without_the_slow_ones_are_named() -> None:
    mixed = tw.Cluster.parse("8xH100-80GB + 4xT4")
    heavy = replace(PROFILE, layers=(replace(PROFILE.layers[0], flops=1e12),))
    noted = decide(mixed, profile=heavy).chosen.notes[-1]
    assert "the H100-80GB alone are predicted" in noted and "wait for the slowest" in noted
    assert noted.endswith("accelerator='H100-80GB' uses these")
    decision = decide(mixed, profile=heavy, accelerator="H100")
    assert decision.chosen.workers == 8 and decision.used.kinds == ("H100-80GB",)
    assert decision.chosen.placement.kind == "H100-80GB" and not decision.chosen.notes
    held = {"num_gpus": 1, "resources": {"accelerator_type:H100-80GB": 0.001}}
    assert worker_resources(decision.chosen.placement).items() >= held.items()
    assert node_bundles(decision.chosen.placement, (8,))[0]["accelerator_type:H100-80GB"] == pytest.approx(0.008)
    with pytest.raises(ResourceError, match="accelerator='A100': the cluster has H100-80GB, T4-16GB"):
        decide(mixed, profile=heavy, accelerator="A100")
    assert not decide(tw.Cluster.parse("8xH100-80GB"), profile=heavy).chosen.notes


def test_a_model_of_accelerator_is_enforced_by_the_name_that_ray_has() -> None:
    nodes = tuple(replace(node, kind=kind) for node, kind in zip(GPUS.nodes, ("MyGPU", "T4"), strict=True))
    chosen = decide(Cluster(nodes=nodes), accelerator="MyGPU").chosen
    assert chosen.placement.kind == "MyGPU" and chosen.workers == 1
    spelled = tuple(replace(node, kind=kind) for node, kind in zip(GPUS.nodes, ("A100", "A100-80G"), strict=True))
    with pytest.raises(ResourceError, match="nodes have it as A100 and as A100-80G"):
        decide(Cluster(nodes=spelled), accelerator="A100")


@pytest.mark.parametrize("cluster", ["2x8xH100-80GB", "4x8xA100-80GB@10Gb"])
def test_ranks_that_divide_layers_fit_one_node_where_a_batch_fills_few(cluster: str) -> None:
    whole = tw.transformer_profile(hidden=512, layers=4, heads=8, sequence=64, vocabulary=1000)
    there = tw.Cluster.parse(cluster)
    for text in ("tp=8", "dp=2,tp=4"):
        chosen = decide(there, profile=whole, batch_size=2, plan=text).chosen
        assert tensor_workers(chosen.mesh) * chosen.placement.cpus <= there.nodes[0].cpus, chosen.placement


def test_a_small_batch_divides_no_model_that_one_cpu_holds() -> None:
    whole = tw.transformer_profile(hidden=512, layers=4, heads=8, sequence=64, vocabulary=1000)
    for cpus, batch in ((2, 1), (8, 1), (8, 3)):
        there = Cluster(nodes=(replace(LAPTOP.nodes[0], cpus=cpus, memory_bytes=2**34),))
        assert decide(there, profile=whole, batch_size=batch).chosen.strategy in ("one_device", "data_parallel")


def test_what_nothing_is_known_of_is_used_and_said() -> None:
    nodes = tuple(replace(node, kind="B9000") for node in GPUS.nodes)
    heavy = replace(PROFILE, layers=(replace(PROFILE.layers[0], flops=1e12),))
    chosen = decide(Cluster(nodes=nodes), profile=heavy).chosen
    assert chosen.workers == 2 and "the accelerator B9000 is missing from the built-in table" in chosen.notes[0]
    assert chosen.estimate is not None and chosen.estimate.high_s > 2 * chosen.estimate.step_s


def test_as_few_micro_batches_as_fit_in_memory() -> None:
    wide = replace(PROFILE, layers=(replace(PROFILE.layers[0], flops=1e12, output_numbers=1e8, kept_numbers=1e8),))
    cluster = tw.Cluster.parse("2xT4")  # 16 GiB, of which 0.4 GB are taken by each sample
    chosen = decide(cluster, profile=wide, batch_size=128).chosen
    assert chosen.accumulation == 2 and chosen.mesh.data == 2
    assert decide(cluster, profile=wide, batch_size=32).chosen.accumulation == 1
    assert decide(cluster, profile=wide, batch_size=128, accumulation=8).chosen.accumulation == 8
    with pytest.raises(PlanError, match="out of memory by 10"):
        decide(cluster, profile=wide, batch_size=128, accumulation=1)


def test_a_job_that_fits_nowhere_is_told_what_would_fit() -> None:
    huge = replace(PROFILE, layers=(replace(PROFILE.layers[0], parameters=15 * 10**6, flops=1e10),) * 100)
    with pytest.raises(PlanError, match=r"data_parallel: out of memory by 14\.5 GiB on stage 0"):
        decide(tw.Cluster.parse("2xT4"), profile=huge, strategy="data_parallel")
    asked = decide(tw.Cluster.parse("2xT4"), profile=huge, strategy="parameter_server").chosen
    assert asked.servers and asked.topology == "independent", "the optimizer's state is the servers'"
    large = replace(huge, layers=(replace(PROFILE.layers[0], parameters=13 * 10**6, flops=1e10),) * 100)
    assert decide(tw.Cluster.parse("2xT4"), profile=large).chosen.strategy == "sharded", "not unasked"
    normed = replace(PROFILE, inexact=("batch_norm",))
    wide = replace(normed, layers=(replace(PROFILE.layers[0], output_numbers=1e8, kept_numbers=1e8),))
    with pytest.raises(PlanError, match=r"-> use batch_size=32$"):
        decide(tw.Cluster.parse("1xT4"), profile=wide)


def test_a_models_state_is_kept_by_the_host_only_where_nothing_else_fits() -> None:
    layer = replace(PROFILE.layers[0], parameters=3 * 10**8, flops=1e9, kept_numbers=1e3)
    deep, two = replace(PROFILE, layers=(layer,) * 13), tw.Cluster.parse("2xT4")
    chosen = decide(two, profile=deep).chosen
    assert chosen.offload and chosen.engine.endswith("fsdp:Sharded") and chosen.text == "dp=2,zero=3,offload=1"
    assert ("in host memory", "parameters, gradients and optimizer state") in plan_rows(chosen)
    estimate = chosen.estimate
    assert estimate is not None and estimate.stage_memory_bytes[0] < 3.1 * 4 * 3 * 10**8
    assert estimate.terms["offload"] > 0.5 * 3 * 4 * 20 * 10**8 / 12e9 and estimate.terms["optimizer"] > 1.0
    shallow = replace(deep, layers=(layer,) * 4)
    assert not decide(two, profile=shallow).chosen.offload
    assert decide(two, profile=replace(deep, layers=(layer,) * 8)).chosen.text == "dp=2,zero=2,offload=1"
    pinned = decide(two, profile=shallow, plan="dp=2,zero=3,offload=1").chosen
    assert pinned.offload and "times as fast" in pinned.notes[-1]
    with pytest.raises(PlanError, match="out of the host's memory by"):
        decide(two, profile=replace(deep, layers=(layer,) * 14))
    with pytest.raises(PlanError, match=r"keep the model's state in host memory: plan='dp=2,zero=2,offload=1'"):
        decide(two, profile=shallow, plan="dp=2,zero=2")
    with pytest.raises(PlanError, match="it keeps the model's state on the device"):
        decide(two, strategy="data_parallel", plan="offload=1")
    with pytest.raises(PlanError, match="offload='2' must be 0 or 1"):
        decide(two, plan="offload=2")
    on_cpus = decide(plan="dp=2,zero=3,offload=1").chosen.estimate
    plain = decide(plan="dp=2,zero=3").chosen.estimate
    assert on_cpus is not None and plain is not None
    assert on_cpus.stage_memory_bytes == plain.stage_memory_bytes and on_cpus.terms == pytest.approx(plain.terms)


def test_parameters_of_16_bits_are_noted_where_they_are_trained_as_they_are() -> None:
    profile = replace(PROFILE, narrow="layers.0.weight")
    assert any("'layers.0.weight' is stored in 16 bits" in note for note in decide(profile=profile).chosen.notes)
    assert not any("16 bits" in note for note in decide(profile=profile, precision="bf16").chosen.notes)


def test_parts_of_a_model_that_stay_in_evaluation_mode_are_noted() -> None:
    (note,) = (note for note in decide(profile=replace(PROFILE, evaluating=("a", "b"))).chosen.notes if "'a'" in note)
    assert "in evaluation mode while the model trains: module 'a' and 1 more dropouts and batch norms" in note
    assert not any("evaluation mode" in note for note in decide().chosen.notes)


def test_fp16_is_for_models_of_torch() -> None:
    assert decide(precision="fp16").chosen.precision == "fp16"
    with pytest.raises(PlanError, match="is for models of torch"):
        decide(precision="fp16", profile=replace(PROFILE, framework="tensorflow"))


def test_a_model_is_divided_only_where_it_does_not_fit_otherwise() -> None:
    layer = PROFILE.layers[0]
    huge = replace(PROFILE, layers=(replace(layer, parameters=15 * 10**6, flops=1e10),) * 100)
    uncut = replace(huge, layers=(replace(layer, parameters=13 * 10**6, flops=1e10),) * 100, untraced="ValueError")
    chosen = decide(tw.Cluster.parse("2xT4"), profile=uncut).chosen
    assert (chosen.strategy, chosen.zero, chosen.mesh, chosen.recompute) == ("sharded", 3, Mesh(shard=2), "none")
    assert chosen.engine.endswith("fsdp:Sharded")
    fat = replace(PROFILE, layers=(replace(layer, parameters=10**8, parameter_bytes=4 * 10**8, flops=1e12),))
    decision = decide(tw.Cluster.parse("2xT4"), profile=fat, workers=2)
    (why,) = [item.reason for item in decision.rejected if item.plan.strategy == "sharded"]
    assert (
        decision.chosen.strategy == "data_parallel"
        and "divided only on accelerators, and where that is far quicker" in why
    )
    assert decide(profile=fat, plan="dp=2,zero=2").chosen.zero == 2
    assert decide(profile=fat, plan="dp=2,fsdp=3").chosen.mesh == Mesh(data=2, shard=3)
    assert decide(profile=fat, plan="dp=2,zero=1").chosen.zero == 1
    assert decide(profile=fat, strategy="sharded", min_workers=2).chosen.mesh.shard > 1
    with pytest.raises(PlanError, match="room for one worker only now"):
        decide(tw.Cluster.parse("1xT4"), profile=fat, strategy="sharded", min_workers=1, max_workers=2)


def test_a_batch_that_is_too_large_for_two_fits_more() -> None:
    wide = replace(PROFILE, inexact=("batch_norm",))
    wide = replace(wide, layers=(replace(PROFILE.layers[0], flops=1e9, output_numbers=1e8, kept_numbers=1e8),))
    with pytest.raises(PlanError, match=r"-> use batch_size=64, or use 2 T4-16GB more$"):
        decide(tw.Cluster.parse("2xT4"), profile=wide, batch_size=128, inexact=("batch_norm",), plan="accumulation=1")


def test_one_step_of_a_model_that_is_divided_as_the_job_says_is_drawn() -> None:
    roles = {PROFILE.layers[0].name: "gathered"}
    assert "<svg" in decide(plan="tp=2", workers=2, tensor_plan=roles).timeline
