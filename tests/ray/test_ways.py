"""The three ways tried out on a cluster, and the one that a run takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support.distillation_jobs import job, narrow
from tests.support.small_distillation import wide
from trainwright.distillation import delivery_benchmark, teacher_delivery
from trainwright.distillation.target_cache import stored_targets
from trainwright.distillation.teacher_delivery import DeliveryComparison
from trainwright.storage.object_store import open_store


def distillation(folder: Path, **fields: Any) -> tw.Distillation:
    student = job(folder, "student", narrow, workers=1, strategy=None)
    return tw.Distillation(student=student, teachers=(tw.Teacher(name="big", model=wide, inputs="x"),), **fields)


@pytest.mark.soak
@pytest.mark.usefixtures("ray_cluster")
def test_the_three_ways_are_tried_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_benchmark, "SECONDS", 0.2)
    monkeypatch.setattr(delivery_benchmark, "AHEAD_S", 1.0)
    found = tw.plan(distillation(tmp_path))
    assert isinstance(found, DeliveryComparison) and found.tried_rows == 203
    by_way = {cost.way: cost for cost in found.costs}
    assert by_way.keys() == {"offline", "inline", "online"} and not any(cost.refused for cost in found.costs)
    assert all(0 < cost.step_s < 10 and 0 < cost.setup_s < 120 for cost in found.costs)
    assert by_way["offline"].setup_s > by_way["inline"].setup_s, "targets are computed first"
    assert "of a step" in by_way["inline"].note and "steps wait" in by_way["online"].note
    text = repr(found)
    assert "measured on 203 rows" in text and "one_device" in text and all(way in text for way in by_way)
    assert "measured on 203 rows" in found._repr_html_()
    assert not open_store(str(tmp_path)).folders(), "nothing stays"


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_takes_a_way_says_why_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = distillation(tmp_path)
    assert tw.distill(short).state == "done"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("teachers are asked")]
    assert line.startswith("teachers are asked inline") and "(estimated from operations)" in line, "too short to pay"
    monkeypatch.setattr(teacher_delivery, "compare_deliveries", None)  # a run that goes on asks nobody
    longer = short.replace(student=short.student.replace(epochs=3))
    assert tw.distill(longer).state == "done"
    monkeypatch.undo()
    kept = short.replace(student=short.student.replace(name="kept"))
    for teacher in kept.teachers:
        stored_targets(teacher, kept.student.train, folder=kept.folder, keep=kept.keep)
    assert teacher_delivery.choose_delivery(kept).way == "offline", "what is kept costs nothing"
