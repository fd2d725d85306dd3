"""Where teachers run: what they cost within a step, which way the rule chooses, and which ways are refused."""

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
from trainwright.core.errors import JobError, OwnedError, PlanError, TrainwrightError
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.distillation import teacher_delivery
from trainwright.distillation.distillation_job import compose_job
from trainwright.distillation.distillation_spec import Delivery
from trainwright.distillation.teacher_delivery import DeliveryPlans
from trainwright.planning.planner import choose
from trainwright.planning.profiler import profile_job
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import Heartbeat, Owner, RunLog
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
    cluster, plan = tw.Cluster.parse("4x8xA100-80GB"), replace(tw.Plan.parse("dp=2,accumulation=2"), batch_size=64)
    both = replace(STUDENT, guests=(TEACHER, TEACHER))
    alone, beside = (stage_memory(each, plan) for each in (STUDENT, both))
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
        plan = replace(tw.Plan.parse(text), batch_size=32)
        alone, beside = (stage_memory(each, plan) for each in (STUDENT, both))
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


def plans(folder: Path, **fields: Any) -> DeliveryPlans:
    return DeliveryPlans.of(distillation(folder, **fields), CPUS)


@pytest.mark.parametrize(
    ("fields", "changes", "way", "why"),
    [
        ({}, {}, "offline", "teachers run offline: they compute each row once for 3 passes over the data, and "),
        ({"epochs": 1}, {}, "inline", "teachers run inline: the run reads no row twice, and they fit beside"),
        ({"epochs": 1}, {"missing": 0}, "offline", "teachers run offline: all their outputs are stored already"),
        ({"epochs": 1, "gpus": 1.0}, {}, "inline", "asks for 1 GPUs and 0 are left"),
        ({"train": tw.datasets.table(torch_jobs.data()).map(noisy)}, {}, "inline", "differs from epoch to epoch"),
        ({}, {"missing": None, "unstorable": "no rows by number"}, "inline", "offline is not possible: no rows by"),
    ],
)  # fmt: skip
def test_the_first_possible_way_is_taken(
    fields: dict[str, Any], changes: dict[str, Any], way: Delivery, why: str, tmp_path: Path
) -> None:
    chosen, decision, reasons = replace(plans(tmp_path, **fields), **changes).choose()
    assert chosen == way and why in "; ".join(reasons)
    assert decision.chosen.workers


def test_targets_much_larger_than_the_data_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_delivery, "_MAX_STORED_BYTES", 0.0)
    assert plans(tmp_path).choose()[0] == "offline", "they are smaller than the data"
    monkeypatch.setattr(teacher_delivery, "_MAX_STORED_RATIO", 0.0)
    way, _, (reason, *_) = plans(tmp_path).choose()
    assert way == "inline" and "stored targets would take" in reason


def test_few_samples_of_a_large_data_set_are_no_reason_to_store_all(tmp_path: Path) -> None:
    job = distillation(tmp_path).student
    assert plans(tmp_path, student=job.replace(epoch_samples=10)).choose()[0] == "inline"


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
    with pytest.raises(TrainwrightError) as error:
        plans(tmp_path, **fields).plan(way)
    assert why in str(error.value)


def test_inline_needs_the_columns_of_the_teacher_in_the_step(tmp_path: Path) -> None:
    rows = torch_jobs.data()
    train = tw.datasets.table({**rows, "z": rows["x"]})
    student = distillation(tmp_path, train=train).student.replace(collate=without_z)
    found = plans(tmp_path, student=student, teachers=(tw.Teacher(name="t", model=wide, inputs="z"),))
    with pytest.raises(JobError, match="is given z, which the student's step does not have"):
        found.plan("inline")


def test_where_no_way_is_possible_all_reasons_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: object) -> None:
        raise PlanError("out of memory", where="plan")

    monkeypatch.setattr(teacher_delivery, "choose", out_of_memory)
    found = replace(plans(tmp_path, cpus=0), missing=None, unstorable="no rows by number")
    with pytest.raises(JobError, match=r"(?s)offline.*no rows.*inline is not possible: out of memory.*online.*cpus=0"):
        found.choose()


def untrained(folder: Path, *names: str) -> tuple[tw.Teacher, ...]:
    job = distillation(folder).student
    return tuple(tw.Teacher(name=name, job=job.replace(name=f"run-{name}"), train=True) for name in names)


def test_a_distillation_is_not_planned_before_its_teachers_are_trained(tmp_path: Path) -> None:
    request = distillation(
        tmp_path, teachers=(tw.Teacher(name="c", model=wide, inputs="x"), *untrained(tmp_path, *"ab"))
    )
    for asked in (request, tw.TwoStage(distillation=request, unlabelled=request.student.train)):
        with pytest.raises(PlanError, match="not trained yet: a, b;") as caught:
            tw.plan(asked)
        assert caught.value.where == "run 'run-a', run 'run-b'" and "tw.distill(...) trains" in caught.value.remedy


def test_no_teacher_is_trained_for_a_student_that_another_driver_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = distillation(tmp_path, teachers=untrained(tmp_path, "a"))
    monkeypatch.setattr(
        "trainwright.distillation.distilled_run.train_teachers", lambda *_, **__: pytest.fail("too late")
    )
    store = open_store(str(tmp_path))
    heart = Heartbeat(store, "student", RunLog(store, "student").acquire(Owner.here(), {}).token)
    heart.start()
    with pytest.raises(OwnedError, match="run 'student' is in use by process"):
        tw.distill(request)
    heart.stop()


def test_the_plan_of_a_recipe_is_that_of_the_stage_whose_turn_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tw.SelfDistillation(distillation=distillation(tmp_path, teachers=()))
    assert "A100" in str(tw.plan(recipe, cluster="1x2xA100-80GB"))
    assert "the plan of student-generation-0, of the stages student-generation-0, student" in capsys.readouterr().err
    log = RunLog(open_store(str(tmp_path)), "student-generation-0")
    log.release(log.acquire(Owner.here(), {}).token, "done")
    with pytest.raises(PlanError, match="planned on the cluster where it runs"):  # it is a distillation's
        tw.plan(recipe, cluster="1x2xA100-80GB")
    assert "the plan of student, of" in capsys.readouterr().err


def test_a_search_has_no_plan(tmp_path: Path) -> None:
    request = distillation(tmp_path)
    student = request.student.replace(evaluate=request.student.train, metrics={"accuracy": right})
    with pytest.raises(PlanError, match="a Search is many runs"):
        tw.plan(tw.Search(distillation=request.replace(student=student)))  # type: ignore[call-overload]


def test_a_distillation_is_not_planned_for_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="planned on the cluster where it runs"):
        tw.plan(distillation(tmp_path), cluster="2x8xA100-80GB")  # type: ignore[call-overload]
