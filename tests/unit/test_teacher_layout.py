"""How workers hold a teacher: each all of it, or together what is too large for one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import trainwright as tw
from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, PlanError
from trainwright.core.plan import Plan
from trainwright.distillation.teacher_runner import TeacherRunner, teacher_inference_model
from trainwright.inference.inference_model import InferenceModel, inference_layout

WIDTH, LAYERS = 30_000, 8  # 29 GB in all: never built but on paper
DATA = tw.datasets.table({"x": np.zeros((64, WIDTH), np.float32)})


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 10))


def small() -> nn.Module:
    return nn.Linear(WIDTH, 10)


def subject(teacher: tw.Teacher) -> InferenceModel:
    """It, bound to a data set, before anything is computed."""
    bound = teacher_inference_model(TeacherRunner(teacher=teacher, sha256="0" * 64), DATA)
    assert teacher.model is not None
    return replace(bound, architecture=teacher.model)


def held(asked: InferenceModel, cluster: str, workers: int | None = None) -> tuple[Plan, int]:
    return inference_layout(asked, DATA.index(), 3, Cluster.parse(cluster), workers)


def test_a_model_that_fits_is_whole_on_each_worker() -> None:
    plan, size = held(subject(tw.Teacher(name="t", model=small, inputs="x", batch_size=16)), "2x4xT4")
    assert plan.mesh.size == 1 and size == 3


def test_a_model_that_no_accelerator_holds_is_divided_by_the_planner() -> None:
    asked = subject(tw.Teacher(name="t", model=large, inputs="x", batch_size=16))
    plan, size = held(asked, "2x4xT4")
    assert size == 0 and plan.mesh.size > plan.mesh.data
    assert plan.estimate is not None and max(plan.estimate.stage_memory_bytes) < plan.estimate.device_memory_bytes
    with pytest.raises(PlanError, match="no plan"):
        held(asked, "1x1xT4")
    with pytest.raises(PlanError, match="no plan"):
        held(asked, "2x4xT4", workers=2)


def test_what_is_not_trained_needs_room_for_its_weights_alone() -> None:
    plan, size = held(subject(tw.Teacher(name="t", model=large, inputs="x", batch_size=16)), "1x2xA100-40GB")
    assert plan.mesh.size == 1 and size == 2


def test_its_layers_need_it_whole() -> None:
    asked = subject(tw.Teacher(name="t", model=large, inputs="x", batch_size=16))
    with pytest.raises(JobError, match=r"hidden states are asked for, which the layout .* has on no worker whole"):
        held(replace(asked, whole_model_reason="hidden states are asked for"), "2x4xT4")
