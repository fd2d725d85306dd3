"""Which way teachers are asked: what they cost within a step, what each way comes to, and which cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainwright as tw
from tests.support import torch_jobs
from tests.support.small_distillation import distillation, wide
from trainwright.core.cluster import Cluster, Node
from trainwright.core.errors import JobError, PlanError
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.distillation.distillation_job import compose_job
from trainwright.distillation.distillation_spec import DELIVERIES, Delivery
from trainwright.distillation.teacher_delivery import (
    START_S,
    DeliveryComparison,
    DeliveryCost,
    DeliveryEstimator,
    rank_deliveries,
)
from trainwright.planning.planner import choose
from trainwright.planning.profiler import profile_job
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import Owner, RunLog
from trainwright.strategies.cost_model.memory_estimate import stage_memory

CPUS = Cluster(nodes=(Node(name="one", cpus=4.0, memory_bytes=8 * 2**30),))
LAYER = LayerCost(
    name="l", parameters=10**6, parameter_bytes=4 * 10**6, flops=2e6, output_numbers=1000, kept_numbers=1000
)
STUDENT = ModelProfile(framework="torch", layers=(LAYER,) * 4)
TEACHER = ModelProfile(framework="torch", layers=(replace(LAYER, flops=2e8, output_numbers=3000),) * 2)


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


def noisy(row: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
    return {**row, "x": row["x"] + rng.normal(size=row["x"].shape).astype(np.float32)}


def test_a_teacher_in_the_loss_takes_memory_and_time_forward_alone() -> None:
    cluster, plan = tw.Cluster.parse("4x8xA100-80GB"), tw.Plan.parse("dp=2,accumulation=2")
    both = replace(STUDENT, guests=(TEACHER, TEACHER))
    alone, beside = (stage_memory(each, plan, batch_size=64, precision="fp32") for each in (STUDENT, both))
    rows = 64 // 2 // 2
    assert beside[0] - alone[0] == 2 * (8 * 10**6 + 4 * rows * 4000), "its parameters, and what its largest layer needs"
    own = tw.estimate(both, cluster, plan, batch_size=64, precision="fp32")
    without = tw.estimate(STUDENT, cluster, plan, batch_size=64, precision="fp32")
    assert own.step_s - without.step_s == pytest.approx(own.terms["teachers"]) and own.terms["teachers"] > 0
    once = tw.estimate(replace(STUDENT, guests=(TEACHER,)), cluster, plan, batch_size=64, precision="fp32")
    assert own.terms["teachers"] == pytest.approx(2 * once.terms["teachers"])
    trained = tw.estimate(TEACHER, cluster, plan, batch_size=64, precision="fp32")
    assert once.terms["teachers"] < trained.terms["compute"] / 2, "nothing of it is trained"


def test_of_a_pipeline_the_stage_with_the_loss_holds_the_teacher() -> None:
    both = replace(STUDENT, guests=(TEACHER,))
    for text, stage in (("pp=2,micro_batch=4", 1), ("pp=2,micro_batch=4,chunks=2,schedule=zbv", 0)):
        plan = tw.Plan.parse(text)
        alone, beside = (stage_memory(each, plan, batch_size=32, precision="fp32") for each in (STUDENT, both))
        more = [one - other for one, other in zip(beside, alone, strict=True)]
        assert more[stage] == 8 * 10**6 + 4 * 4 * 4000 and more[1 - stage] == 0


def test_a_teacher_that_does_not_fit_beside_the_student_is_not_planned(tmp_path: Path) -> None:
    job = distillation(tmp_path).student
    huge = replace(TEACHER, layers=(replace(LAYER, parameter_bytes=90 * 2**30),))
    for guests in ((), (huge,)):
        profile = replace(profile_job(job, job.train, job.train.index()), guests=guests)
        cluster = tw.Cluster.parse("1x2xA100-80GB")
        if guests:
            with pytest.raises(PlanError, match="out of memory"):
                choose(profile, cluster, job)
        else:
            assert choose(profile, cluster, job).chosen


def test_the_job_of_the_inline_way_is_planned_with_its_teachers(tmp_path: Path) -> None:
    job = compose_job(distillation(tmp_path, way="inline")).job
    (guest,) = profile_job(job, job.train, job.train.index()).guests
    assert guest.parameters == sum(each.numel() for each in wide().parameters())
    assert guest.flops >= 2 * 512 * torch_jobs.WIDTH


def cost(folder: Path, way: Delivery, cluster: Cluster = CPUS, **fields: Any) -> DeliveryCost:
    return DeliveryEstimator.of(distillation(folder, **fields), cluster).cost(way)


def test_what_each_way_comes_to(tmp_path: Path) -> None:
    offline, inline, online = (cost(tmp_path, way) for way in DELIVERIES)
    assert not offline.refused and not inline.refused and not online.refused
    assert offline.step_s < inline.step_s and offline.step_s <= online.step_s, "the teacher is not asked in the steps"
    assert offline.setup_s > inline.setup_s == START_S
    assert offline.stored_bytes == torch_jobs.ROWS * torch_jobs.CLASSES * 2
    assert f"{torch_jobs.ROWS} rows of targets" in offline.note and "1 actor" in online.note


def without_z(columns: dict[str, Any]) -> Mapping[str, Any]:
    return {"x": columns["x"], "y": columns["y"]}


@pytest.mark.parametrize(
    ("way", "fields", "why"),
    [
        ("offline", {"train": tw.datasets.table(torch_jobs.data()).map(noisy)}, "differs from epoch to epoch"),
        ("online", {"cpus": 0}, "nothing to run on"),
        ("online", {"cpus": 3.0}, "asks for 3 CPUs and 1 are left"),
        ("online", {"gpus": 1.0}, "asks for 1 GPUs and 0 are left"),
    ],
)
def test_a_way_that_cannot_be_says_why(way: Delivery, fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert why in cost(tmp_path, way, **fields).refused


def test_inline_needs_the_columns_of_the_teacher_in_the_step(tmp_path: Path) -> None:
    rows = torch_jobs.data()
    train = tw.datasets.table({**rows, "z": rows["x"]})
    student = distillation(tmp_path, train=train).student.replace(collate=without_z)
    found = cost(tmp_path, "inline", student=student, teachers=(tw.Teacher(name="t", model=wide, inputs="z"),))
    assert "is given z, which the student's step has not" in found.refused


def plain(way: Delivery, step_s: float = 1.0, setup_s: float = 0.0, refused: str = "") -> DeliveryCost:
    return DeliveryCost(way=way, step_s=step_s, setup_s=setup_s, refused=refused)


@pytest.mark.parametrize(
    ("costs", "steps", "order"),
    [
        ((plain("offline", 1.0, 60.0), plain("inline", 1.1, 5.0), plain("online", 1.8)), 10, "inline online offline"),
        ((plain("offline", 1.0, 60.0), plain("inline", 1.5, 5.0), plain("online", 1.2)), 1000, "offline online inline"),
        ((plain("offline", 1.04), plain("inline", 1.03), plain("online", 1.0)), 100, "offline online inline"),
        ((plain("offline", refused="no"), plain("inline", 3.0), plain("online", 2.0)), 100, "online inline offline"),
    ],
)  # fmt: skip
def test_the_quickest_for_the_whole_run_is_taken(costs: tuple[DeliveryCost, ...], steps: int, order: str) -> None:
    found = rank_deliveries(costs, steps)
    assert [cost.way for cost in found] == order.split()


def test_where_no_way_can_be_all_reasons_are_told() -> None:
    with pytest.raises(JobError, match=r"(?s)offline cannot be: a.*online cannot be: b"):
        rank_deliveries([plain("offline", refused="a"), plain("online", refused="b")], 1)


def test_the_choice_in_a_line() -> None:
    costs = plain("offline", 0.01, 20.0), plain("inline", 0.02, 8.0), plain("online", refused="no CPUs")
    line = DeliveryComparison(costs=rank_deliveries(costs, 10_000), batch_size=32, steps=10_000, tried_rows=8192).line
    assert line == (
        "teachers are asked offline: 2 min 00 s in all, 3,200 samples/s after 20.0 s; inline: 3 min 28 s in all, "
        "1,600 samples/s after 8.0 s; online cannot be: no CPUs (measured on 8,192 rows)"
    )


def untrained(folder: Path, *names: str) -> tuple[tw.Teacher, ...]:
    job = distillation(folder).student
    return tuple(tw.Teacher(name=name, job=job.replace(name=f"run-{name}"), train=True) for name in names)


def test_ways_to_ask_teachers_that_are_not_trained_yet_are_not_planned(tmp_path: Path) -> None:
    wish = distillation(tmp_path, teachers=(tw.Teacher(name="c", model=wide, inputs="x"), *untrained(tmp_path, *"ab")))
    for asked in (wish, tw.TwoStage(distillation=wish, unlabelled=wish.student.train)):
        with pytest.raises(PlanError, match="not trained yet: a, b;") as caught:
            tw.plan(asked)
        assert caught.value.where == "run 'run-a', run 'run-b'" and "tw.distill(...) trains" in caught.value.remedy


def test_the_plan_of_a_recipe_is_that_of_the_stage_whose_turn_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tw.SelfDistillation(distillation=distillation(tmp_path, teachers=()))
    assert "A100" in str(tw.plan(recipe, cluster="1x2xA100-80GB"))
    assert "the plan of student-generation-0, of the stages student-generation-0, student" in capsys.readouterr().err
    log = RunLog(open_store(str(tmp_path)), "student-generation-0")
    log.release(log.acquire(Owner.here(), {}).token, "done")
    with pytest.raises(PlanError, match="tried where it runs"):  # it is a distillation's
        tw.plan(recipe, cluster="1x2xA100-80GB")
    assert "the plan of student, of" in capsys.readouterr().err


def test_a_search_has_no_plan(tmp_path: Path) -> None:
    wish = distillation(tmp_path)
    student = wish.student.replace(evaluate=wish.student.train, metrics={"accuracy": right})
    with pytest.raises(PlanError, match="a Search is many runs"):
        tw.plan(tw.Search(distillation=wish.replace(student=student)))  # type: ignore[call-overload]


def test_the_ways_are_not_planned_for_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="tried where it runs"):
        tw.plan(distillation(tmp_path), cluster="2x8xA100-80GB")  # type: ignore[call-overload]
