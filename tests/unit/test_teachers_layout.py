"""How workers hold a teacher: each all of it, or together what is too large for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import trainwright as tw
from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, PlanError
from trainwright.distilling.teachers import Lecturer
from trainwright.predicting import Question, ask, layout

WIDTH, LAYERS = 30_000, 8  # 29 GB in all: never built but on paper


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 10))


def small() -> nn.Module:
    return nn.Linear(WIDTH, 10)


def question(folder: Path, teacher: tw.Teacher) -> Question:
    """As before the first part is computed."""
    data = tw.datasets.table({"x": np.zeros((64, WIDTH), np.float32)})
    subject = teacher.bound(data, Lecturer(teacher=teacher, sha256="0" * 64))
    assert teacher.model is not None
    return ask(replace(subject, outline=teacher.model), to=str(folder))


def test_a_model_that_fits_is_whole_on_each_worker(tmp_path: Path) -> None:
    asked = question(tmp_path, tw.Teacher(name="t", model=small, inputs="x", batch_size=16))
    plan, size = layout(asked, Cluster.parse("2x4xT4"))
    assert plan.mesh.size == 1 and size == len(asked.waiting)


def test_a_model_that_no_accelerator_holds_is_divided_by_the_planner(tmp_path: Path) -> None:
    asked = question(tmp_path, tw.Teacher(name="t", model=large, inputs="x", batch_size=16))
    plan, size = layout(asked, Cluster.parse("2x4xT4"))
    assert size == 0 and plan.mesh.size > plan.mesh.data
    assert plan.estimate is not None and max(plan.estimate.stage_memory_bytes) < plan.estimate.device_memory_bytes
    with pytest.raises(PlanError, match="no plan"):
        layout(asked, Cluster.parse("1x1xT4"))
    with pytest.raises(PlanError, match="no plan"):
        layout(asked, Cluster.parse("2x4xT4"), workers=2)


def test_its_layers_need_it_whole(tmp_path: Path) -> None:
    asked = question(tmp_path, tw.Teacher(name="t", model=large, inputs="x", batch_size=16))
    torn = replace(asked, subject=replace(asked.subject, undivided="hidden states are asked for"))
    with pytest.raises(JobError, match=r"hidden states are asked for, which the layout .* has on no worker whole"):
        layout(torn, Cluster.parse("2x4xT4"))
