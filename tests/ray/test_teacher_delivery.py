"""Where the teachers of a run on a cluster are, and that a run keeps its way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support.distillation_jobs import job, narrow
from tests.support.small_distillation import wide
from trainwright.distillation import teacher_delivery
from trainwright.distillation.target_cache import stored_targets
from trainwright.storage.object_store import open_store


def distillation(folder: Path, **fields: Any) -> tw.Distillation:
    student = job(folder, "student", narrow, workers=1, strategy=None)
    return tw.Distillation(student=student, teachers=(tw.Teacher(name="big", model=wide, inputs="x"),), **fields)


@pytest.mark.usefixtures("ray_cluster")
def test_a_plan_says_where_teachers_run_and_why(tmp_path: Path) -> None:
    found = tw.plan(distillation(tmp_path))
    assert any(note.startswith("teachers run offline: they compute each row once") for note in found.chosen.notes)
    assert "teachers run offline" in repr(found) and "one_device" in repr(found)
    pinned = tw.plan(distillation(tmp_path, way="inline"))
    assert not any(note.startswith("teachers run") for note in pinned.chosen.notes)
    assert not open_store(str(tmp_path)).folders(), "nothing is stored"


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_takes_a_way_says_why_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = distillation(tmp_path)
    short = short.replace(student=short.student.replace(epochs=1))
    assert tw.distill(short).state == "done"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("teachers run")]
    assert line.startswith("teachers run inline: the run reads no row twice")
    monkeypatch.setattr(teacher_delivery, "DeliveryPlans", None)  # a run that continues keeps its way
    longer = short.replace(student=short.student.replace(epochs=3))
    assert tw.distill(longer).state == "done"
    monkeypatch.undo()
    kept = short.replace(student=short.student.replace(name="kept"))
    for teacher in kept.teachers:
        stored_targets(teacher, kept.student.train, folder=kept.folder, keep=kept.keep)
    assert teacher_delivery.choose_delivery(kept).way == "offline", "stored targets are used"
