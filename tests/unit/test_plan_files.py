"""Plans pinned in words and in files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from tests.support.planner_cases import GPUS, LAPTOP, PROFILE, decide, job
from trainwright.core.errors import PlanError
from trainwright.core.plan import Mesh, Plan, PlanConstraints, WorkerResources
from trainwright.planning.planner import apply_plan_file, choose, write_plan

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "pipedream")
degree = st.integers(1, 4)


@given(degree, degree, degree, degree, st.integers(0, 3), st.sampled_from(SCHEDULES), st.integers(1, 5), st.data())
def test_a_plan_in_words_says_all_that_is_chosen(
    p: int, d: int, s: int, t: int, zero: int, schedule: str, count: int, data: st.DataObject
) -> None:
    staged = p > 1  # a pipeline has ZeRO-1 alone
    zero = int(s > 1) if s == 1 or staged else max(zero, 1) if d == 1 else 3
    plan = Plan(
        strategy="x", engine="", batch_size=960, placement=WorkerResources(cpus=1), accumulation=count,
        mesh=Mesh(pipeline=p, data=d, shard=s, tensor=t), zero=zero,
        schedule=schedule if p > 1 else "", chunks=2 if p > 1 and schedule == "interleaved" else 1,
        offload=data.draw(st.booleans()), recompute=data.draw(st.sampled_from(["none", "selective", "full"])),
    )  # fmt: skip
    read = Plan.parse(plan.text)
    for name in ("mesh", "zero", "offload", "schedule", "chunks", "recompute", "accumulation"):
        assert getattr(read, name) == getattr(plan, name), (name, plan.text)
    assert read.micro_batches(960) == plan.micro_batches(960)
    assert PlanConstraints.parse(plan.text).allow(plan)


def test_what_is_pinned_of_a_plan_is_kept() -> None:
    chosen = decide(batch_size=64, plan="accumulation=4").chosen
    assert chosen.accumulation == 4 and chosen.strategy == "data_parallel"
    assert decide(plan="dp=1").chosen.strategy == "one_device"
    lone = choose(PROFILE, LAPTOP, job(plan="dp=2,accumulation=4").on_one_device()).chosen
    assert (lone.strategy, lone.accumulation) == ("one_device", 4)
    four = decide(plan="dp=4").chosen
    assert four.workers == 4 and four.text == "dp=4"
    assert decide(GPUS, plan="dp=2,zero=1,accumulation=4").chosen.text == "dp=2,zero=1,accumulation=4"
    with pytest.raises(PlanError, match=r"zero=2: a pipeline sums .* whole, which is ZeRO-1") as caught:
        decide(GPUS, plan="dp=2,pp=2,zero=2")
    assert caught.value.remedy == "use zero=1"
    with pytest.raises(PlanError, match="dp= is given twice"):
        decide(plan="dp=2,dp=4")
    with pytest.raises(PlanError, match="schedule=1f1b is of a pipeline, and the plan has one stage"):
        decide(plan="dp=2,schedule=1f1b")
    with pytest.raises(PlanError, match="does not match plan='dp=2,chunks=3'"):
        decide(GPUS, plan="dp=2,chunks=3")
    with pytest.raises(PlanError, match="'dd' is not a part of a plan"):
        decide(plan="dd=2")
    with pytest.raises(PlanError, match="precision is a field of the job"):
        decide(plan="precision=bf16")


def test_a_file_asks_for_its_plan_again(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    decision = decide(strategy="one_device", accumulation=2)
    write_plan(path, decision)
    again = apply_plan_file(job(plan=path), PROFILE, LAPTOP)
    assert (again.planning.strategy, again.planning.plan) == ("one_device", "accumulation=2")
    assert apply_plan_file(job(plan="dp=2"), PROFILE, LAPTOP).planning.plan == "dp=2"


def test_a_file_for_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(str(path), decide())
    wider = replace(PROFILE, layers=(replace(PROFILE.layers[0], parameters=2000),))
    with pytest.raises(PlanError, match=r"model: parameters 1000, framework torch, .* in the file, parameters 2000"):
        apply_plan_file(job(plan=str(path)), wider, LAPTOP)
    with pytest.raises(
        PlanError, match="nodes 1, cpus 2, accelerators 0 in the file, nodes 2, cpus 16, accelerators 2"
    ):
        apply_plan_file(job(plan=str(path)), PROFILE, GPUS)
    with pytest.raises(PlanError, match="batch_size: 64 in the file, 128 now"):
        apply_plan_file(job(plan=str(path), batch_size=128), PROFILE, LAPTOP)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(PlanError, match="is not JSON"):
        apply_plan_file(job(plan=str(path)), PROFILE, LAPTOP)
    path.write_text(json.dumps({"plan": "dp=2"}))
    with pytest.raises(PlanError, match="has no plan of this version"):
        apply_plan_file(job(plan=str(path)), PROFILE, LAPTOP)
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        apply_plan_file(job(plan=str(tmp_path / "none.json")), PROFILE, LAPTOP)
    with pytest.raises(PlanError, match=r"must end in \.json"):
        write_plan(str(tmp_path / "plan.txt"), decide())
    with pytest.raises(PlanError, match="cannot be written"):
        write_plan(str(tmp_path / "no" / "plan.json"), decide())


def test_what_a_ranking_offers_can_be_asked_for_in_words() -> None:
    gpt = tw.transformer_profile(hidden=512, layers=6, heads=8, sequence=256, vocabulary=1000)
    for plan in tw.rank(gpt, tw.Cluster.parse("2x4xL4"), batch_size=64, precision="bf16"):
        assert PlanConstraints.parse(plan.text).allow(plan)
