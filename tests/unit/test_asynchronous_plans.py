"""Workers that step alone: what a job says of them, what is proposed, and what that is predicted to cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import trainwright as tw
from tests.support.planner_cases import LAPTOP, PROFILE, decide, job
from trainwright.core.errors import JobError, PlanError
from trainwright.core.model_profile import ModelProfile
from trainwright.core.plan import Plan, PlanConstraints
from trainwright.core.topology import Consistency, GradientCompression, OuterOptimizer
from trainwright.reporting.plan_view import plan_rows
from trainwright.strategies.cost_model.estimator import estimate
from trainwright.strategies.search.plan_ranking import estimate_of

WORDS = (
    "dp=4,servers=2",
    "dp=4,servers=1,consistency=sync(backup=1)",
    "dp=2,servers=2,consistency=ssp(3),wire=topk(0.01)",
    "dp=8,servers=3,consistency=async(scaled),wire=int8",
    "dp=8,servers=3,consistency=async(pushes=4)",
    "dp=2,servers=1,local_steps=20,outer=nesterov(0.7,0.9)",
)


@pytest.mark.parametrize("text", WORDS)
def test_what_is_said_in_words_is_read_again(text: str) -> None:
    plan = Plan.parse(text)
    assert plan.text == text and Plan.parse(plan.text) == plan and PlanConstraints.parse(text).allow(plan)
    assert plan.topology == "independent" and plan.processes == plan.servers + plan.workers
    assert plan.strategy == ("local_sgd" if "local_steps" in text else "parameter_server")
    assert plan.consistency == str(Consistency.parse(plan.consistency))


@pytest.mark.parametrize("text", ["full", "fp16", "bf16", "int8", "topk(0.01)"])
def test_forms_on_the_wire(text: str) -> None:
    wire = GradientCompression.parse(text)
    assert str(wire) == text and 0 < wire.part <= 1
    assert (str(OuterOptimizer.parse("average")), str(OuterOptimizer.parse(" nesterov( .7 , 0.9 )"))) == (
        "average",
        "nesterov(0.7,0.9)",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"consistency": "ssp"}, "consistency='ssp' is not known: write \"sync\""),
        ({"consistency": "async(0.5)"}, "consistency='async(0.5)' is not known"),
        ({"consistency": "async(pushes=0)"}, "consistency='async(pushes=0)' is not known"),
        ({"wire": "fp8"}, "wire='fp8' is not known"),
        ({"wire": "topk(2)"}, "wire='topk(2)' is not known"),
        ({"local_steps": 4, "outer": "adam"}, "outer='adam' is not known"),
        ({"local_steps": 4, "outer": "nesterov(0.7,1)"}, "outer='nesterov(0.7,1)' is not known"),
        ({"outer": "average"}, "set local_steps=, or leave it out"),
        ({"consistency": "sync(backup=2)", "workers": 2}, "waits for none of workers=2"),
        ({"consistency": "async(scaled)", "local_steps": 4}, 'use "async"'),
        ({"consistency": "sync(backup=1)", "local_steps": 4}, "leave one of them out"),
        ({"consistency": "async", "run": "fit"}, 'consistency= cannot be used with run="fit"'),
    ],
)
def test_what_contradicts_itself_is_told(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        job(**fields)
    assert message in str(caught.value) and len(caught.value.problems) == 1


@pytest.mark.parametrize("fields", [{"plan": "dp=2,zero=2,wire=bf16"}, {"plan": "fsdp=2", "wire": "bf16"}])
def test_a_plan_that_divides_the_state_can_reduce_in_half_precision(fields: dict[str, Any]) -> None:
    chosen = decide(**fields).chosen
    assert (chosen.strategy, chosen.wire, chosen.topology) == ("sharded", "bf16", "collective")
    assert any("rounded to bf16" in note for note in chosen.notes)
    assert Plan.parse(chosen.text).wire == "bf16"
    assert decide(plan="dp=2,zero=2").chosen.wire == "full"
    assert decide(wire="bf16").chosen.strategy == "parameter_server", "where nothing says what is divided"
    with pytest.raises(PlanError):
        decide(plan="dp=2,zero=2,wire=int8")


def test_a_jobs_own_fields_pin_the_plan() -> None:
    chosen = decide(consistency=" ssp( 2 ) ", wire="fp16").chosen
    assert (chosen.strategy, chosen.consistency, chosen.wire) == ("parameter_server", "ssp(2)", "fp16")
    assert (chosen.workers, chosen.servers, chosen.topology) == (2, 1, "independent")
    rounds = decide(local_steps=8, plan="servers=2").chosen
    assert (rounds.strategy, rounds.local_steps, rounds.outer, rounds.servers) == ("local_sgd", 8, "average", 2)
    assert decide(consistency="sync").chosen.strategy == decide().chosen.strategy, "steps together are sync"
    assert decide(plan="dp=2,consistency=async", consistency="async").chosen.consistency == "async"
    with pytest.raises(PlanError, match=r"consistency='ssp\(1\)' is not the consistency=async"):
        decide(plan="consistency=async", consistency="ssp(1)")
    with pytest.raises(PlanError, match=r"consistency='async' is .* workers of .* are synchronous") as caught:
        decide(consistency="async", strategy="data_parallel")
    assert "use parameter_server or local_sgd" in str(caught.value)


def test_why_workers_cannot_step_alone() -> None:
    assert "workers=1 is pinned" in str(refused(workers=1, consistency="async"))
    assert "waits for none of 2 workers" in str(refused(consistency="sync(backup=3)"))
    assert "parts of a step that backup= leaves out" in str(refused(consistency="sync(backup=1)", wire="topk(0.1)"))
    assert "each worker holds the whole model" in str(refused(consistency="async", plan="dp=1,tp=2"))
    said = str(refused(consistency="async", wire="fp16", plan="chunks=3"))
    assert "does not match plan='chunks=3', consistency='async', wire='fp16'" in said, "by the fields that were set"
    near = {item.strategy: item for item in decide().infeasible}
    assert "near each other" in near["local_sgd"].reason and "local_steps" in near["local_sgd"].hint


def refused(profile: ModelProfile = PROFILE, **fields: Any) -> PlanError:
    with pytest.raises(PlanError) as caught:
        decide(LAPTOP, profile, **fields)
    return caught.value


def test_there_are_no_more_servers_than_the_model_fills() -> None:
    """Told and kept to before anything is started; a matrix of 3 rows and a bias make four pieces."""
    small = replace(PROFILE, trained=((3, 3960), (1, 40)))
    said = str(refused(profile=small, plan="servers=6", consistency="async"))
    assert "parameter_server: 2 of 6 servers would hold nothing to train (use plan='servers=4')" in said
    assert decide(profile=small, plan="servers=4", consistency="async").chosen.servers == 4
    cluster = tw.Cluster.parse("8x1xT4")
    free = decide(cluster, HEAVY, strategy="parameter_server", consistency="async").chosen
    few = decide(cluster, replace(HEAVY, trained=((3, 4000),)), strategy="parameter_server", consistency="async").chosen
    assert free.servers == 8 and few.servers == 3


def test_the_trade_offs_are_stated() -> None:
    notes = {word: " ".join(decide(consistency=word, strategy="parameter_server").chosen.notes) for word in FORMS}
    assert all("barrier" in text or "at checkpoints" in text for text in notes.values())
    assert all("a server's death" in text and "keeper_s" in text for text in notes.values())
    assert "old" in notes["async"] and "Hogwild" in notes["async"] and "by 3 steps at most" in notes["ssp(3)"]
    assert "old" not in notes["sync"] and "Hogwild" not in notes["sync"]
    assert "no run is like another" in notes["sync(backup=1)"]
    assert "mean of the next 4 pushes" in " ".join(decide(consistency="async(pushes=4)").chosen.notes)
    assert "largest numbers" in " ".join(decide(wire="topk(0.1)").chosen.notes)
    assert "drift apart" in " ".join(decide(local_steps=8).chosen.notes)


def test_sync_is_chosen_where_nothing_stale_is_far_ahead_of_it() -> None:
    equal = decide(tw.Cluster.parse("4xT4"), profile=HEAVY, strategy="parameter_server").chosen
    assert equal.consistency == "sync"
    mixed = decided("8xT4 + 8xV100-32GB", strategy="parameter_server")
    assert mixed.consistency == "ssp(3)" and any("ssp(3) was chosen" in note for note in mixed.notes)
    assert not any("was chosen" in note for note in decided("8xT4", consistency="async").notes), "it was asked for"


def test_what_larger_nodes_without_accelerators_have_to_spare_is_said() -> None:
    assert "nodes have 4 to 16 CPUs: each worker has as many" in " ".join(decided("4xCPU + 16xCPU").notes)


FORMS = ("sync", "sync(backup=1)", "ssp(3)", "async")


def test_a_cluster_says_where_its_nodes_are() -> None:
    far = tw.Cluster.parse("2x8xT4@10Gb/east + 8xT4/west:spot")
    assert far.far and far.uneven and far.preemptible == 1
    assert [node.region for node in far.nodes] == ["east", "east", "west"]
    assert str(far).endswith("24 T4-16GB, in 2 regions, 1 preemptible")
    assert not tw.Cluster.parse("4x8xT4").uneven and tw.Cluster.parse("2x8xT4@0.5Gb").far


LAYER = replace(PROFILE.layers[0], flops=4e10, parameters=4_000_000, parameter_bytes=16_000_000)
HEAVY = replace(PROFILE, layers=(LAYER,) * 10)


def decided(cluster: str, batch_size: int = 512, **fields: Any) -> Plan:
    return decide(tw.Cluster.parse(cluster), profile=HEAVY, batch_size=batch_size, **fields).chosen


@pytest.mark.parametrize("cluster", ["4xT4", "2x8xT4", "8xCPU", "4x4xCPU"])
def test_on_a_cluster_of_equals_that_are_near_workers_step_together(cluster: str) -> None:
    chosen = decided(cluster)
    assert chosen.strategy == "data_parallel" and not estimate_of(chosen).factors
    assert "stragglers" not in estimate_of(chosen).terms


def test_workers_that_are_not_alike_step_alone_where_that_is_quicker_to_the_same_loss() -> None:
    mixed = decided("8xT4 + 8xV100-32GB")
    assert (mixed.strategy, mixed.consistency) == ("parameter_server", "ssp(3)"), "the slow take two steps, not four"
    found = estimate_of(mixed)
    assert found.factors == {"staleness": pytest.approx(1 + 0.2 * 15 / 16)}
    assert found.target_s == pytest.approx(found.step_s * found.factors["staleness"])
    together = estimate_of(decided("8xT4 + 8xV100-32GB", strategy="data_parallel"))
    assert together.terms["stragglers"] > 0.2 * together.step_s and together.target_s > 1.1 * found.target_s
    assert ("to the same loss", "staleness x 1.19 (a model, not verified)") in plan_rows(mixed)


def test_quick_ones_alone_beat_many_that_add_little() -> None:
    chosen = decided("8xH100-80GB + 4xT4")
    assert chosen.topology == "collective" and "the H100-80GB alone are predicted" in chosen.notes[-1]


def test_where_nodes_are_far_apart_local_steps_save_what_is_sent() -> None:
    whole = replace(HEAVY, uncut="its forward asks for values: use masks")  # stages would send less still
    far, near = (
        decide(tw.Cluster.parse(cluster), profile=whole, batch_size=128).chosen
        for cluster in ("2x4xT4/east + 2x4xT4/west", "4x4xT4")
    )
    staged = decided("2x4xT4/east + 2x4xT4/west", 128)
    assert staged.strategy == "pipeline" and staged.mesh.pipeline == 4
    assert (far.strategy, far.consistency, far.outer) == ("local_sgd", "sync", "nesterov(0.7,0.9)")
    assert near.strategy == "data_parallel"
    assert estimate_of(far).terms["gradients"] < 0.2 * estimate_of(far).step_s
    assert estimate_of(far).factors["local_steps"] == pytest.approx(1.21)


def test_what_may_be_taken_back_costs_those_who_step_together_more() -> None:
    small = replace(HEAVY, layers=(replace(LAYER, flops=2e11, parameters=40_000, parameter_bytes=160_000),) * 10)
    spot = tw.Cluster.parse("96x1xT4:spot + 4x1xT4")
    decision = decide(spot, profile=small, batch_size=4096)
    assert (decision.chosen.strategy, decision.chosen.consistency) == ("parameter_server", "sync"), "nothing is stale"
    assert "preemptions" not in estimate_of(decision.chosen).factors, "the servers' nodes stay"
    steady = decide(tw.Cluster.parse("100x1xT4"), profile=small, batch_size=4096).chosen
    assert steady.strategy == "data_parallel"


def test_the_longer_the_leash_the_less_is_waited_for_the_slowest() -> None:
    waited = []
    for consistency in ("sync", "ssp(1)", "ssp(3)", "async"):
        plan = Plan.parse(f"dp=16,servers=2,consistency={consistency}")
        cluster = tw.Cluster.parse("8xT4 + 8xH100-80GB")
        found = estimate(HEAVY, cluster, plan, batch_size=512, precision="fp32")
        assert sum(found.terms.values()) == pytest.approx(found.step_s)
        waited.append(found.terms.get("stragglers", 0.0))
    assert waited == sorted(waited, reverse=True) and waited[0] > 0 and waited[-1] == 0


def test_servers_with_updates_of_several_pushes_have_less_to_do() -> None:
    cluster, forms = tw.Cluster.parse("4x8xH100-80GB"), ("async", "async(pushes=4)", "async(pushes=32)")
    plans = [Plan.parse(f"dp=32,servers=1,consistency={form}") for form in forms]
    each, some, all_ = (estimate(HEAVY, cluster, plan, batch_size=64, precision="bf16") for plan in plans)
    assert all_.terms["servers"] < some.terms["servers"] < each.terms["servers"]
    assert some.factors == each.factors, "the parameters are as old, in samples"


def test_a_narrower_wire_and_more_servers_take_less() -> None:
    def seconds(text: str) -> float:
        plan = Plan.parse(f"dp=32,{text}")
        return estimate(HEAVY, tw.Cluster.parse("4x8xT4@1Gb"), plan, batch_size=512, precision="fp32").step_s

    assert seconds("servers=4,wire=int8") < seconds("servers=4,wire=fp16") < seconds("servers=4")
    assert seconds("servers=4") < seconds("servers=2") < seconds("servers=1")
    assert seconds("servers=1,local_steps=8") < 0.5 * seconds("servers=1")


def test_servers_need_room_in_the_memory_of_their_nodes() -> None:
    wide = replace(HEAVY, layers=(replace(LAYER, parameters=3 * 10**8, parameter_bytes=12 * 10**8),) * 10)
    cluster = tw.Cluster.parse("2x8xA100-80GB")
    small = tw.Cluster(nodes=tuple(replace(node, memory_bytes=16 * 2**30) for node in cluster.nodes))
    assert decide(cluster, profile=wide, batch_size=512, strategy="parameter_server").chosen.servers
    with pytest.raises(PlanError, match=r"out of the host's memory by 12\.0 GiB for each device \(have more nodes"):
        decide(small, profile=wide, batch_size=512, strategy="parameter_server")
