"""One call distils, whichever way the teachers' outputs come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

import trainwright as tw
from tests.support import torch_jobs
from tests.support.distillation_jobs import TEACHER_EPOCHS, cross_entropy, job, narrow, wide
from tests.support.finished_runs import told
from trainwright.core import events
from trainwright.core.errors import JobError
from trainwright.distillation import student_evaluation


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> tw.Teacher:
    """A teacher that was trained by a run."""
    of = job(tmp_path_factory.mktemp("teacher"), "teacher", wide, epochs=TEACHER_EPOCHS)
    tw.fit(of)
    return tw.Teacher(name="big", job=of)


def distillation(taught: tw.Teacher, folder: Path, way: str, **fields: Any) -> tw.Distillation:
    soft = fields.pop("loss", tw.SoftLoss(alpha=0.3, temperature=3.0))
    student = job(folder, f"student-{way}", narrow)
    return tw.Distillation(student=student, teachers=(taught,), loss=soft, way=way, keep="fp32", **fields)


def weights(run: tw.Run) -> dict[str, np.ndarray]:
    return {name: each.numpy() for name, each in run.load_model().state_dict().items()}


def by_hand(taught: tw.Teacher, folder: Path) -> dict[str, np.ndarray]:
    """A run whose loss says it all."""
    teacher = tw.load_model(taught.job).eval()

    def loss(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        labels, x = targets
        with torch.no_grad():
            said = torch.softmax(teacher(x) / 3.0, 1)
        apart = functional.kl_div(torch.log_softmax(outputs / 3.0, 1), said, reduction="none").sum(1)
        return 0.3 * cross_entropy(outputs, labels) + 0.7 * 9.0 * apart

    alone = job(folder, "by-hand", narrow, loss=loss, targets=("y", "x"), metrics={}, evaluate=None)
    return weights(tw.fit(alone))


def test_each_way_gives_the_same_student(taught: tw.Teacher, tmp_path: Path) -> None:
    expected = by_hand(taught, tmp_path)
    verdicts: list[Any] = []
    for way in ("offline", "online", "inline"):
        run = tw.distill(distillation(taught, tmp_path, way))
        for name, value in weights(run).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-5, err_msg=f"{way}: {name}")
        (judged,) = told(tmp_path, f"student-{way}", events.Evaluated)[-1:]
        verdicts.append(run.verdict)
        accuracy = judged.metrics["accuracy"]  # type: ignore[attr-defined]
        assert verdicts[-1].mark("student").metrics["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    for verdict in verdicts[1:]:
        assert verdict.mark("big").scores == pytest.approx(verdicts[0].mark("big").scores, rel=1e-5)
        assert verdict.pairs[0].scores == pytest.approx(verdicts[0].pairs[0].scores, rel=1e-3)


def test_what_was_stored_is_not_computed_again(
    taught: tw.Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it by a verdict, whose students are judged by a pool as they are here."""
    tw.distill(distillation(taught, tmp_path, "offline"), judge=False)
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "targets").rglob("*.parquet")}
    again = distillation(taught, tmp_path, "offline", loss=tw.SoftLoss(alpha=0.9))
    run = tw.distill(again, fresh=True)
    assert parts and run.state == "done"
    here = run.verdict
    monkeypatch.setattr(student_evaluation, "LOCAL_FLOPS", 0)
    pooled = run.judge()
    assert [*(tmp_path / "student-offline" / "judged").rglob("*.parquet")] and here is not None
    for one, other in zip(here.marks, pooled.marks, strict=True):
        assert other.scores == pytest.approx(one.scores, rel=1e-5) and other.metrics == pytest.approx(one.metrics)
    assert run.verdict == pooled
    assert parts == {path: path.stat().st_mtime_ns for path in (tmp_path / "targets").rglob("*.parquet")}


@pytest.mark.soak
def test_several_students_on_one_pass_are_each_as_alone(taught: tw.Teacher, tmp_path: Path) -> None:
    alone = weights(tw.distill(distillation(taught, tmp_path / "alone", "offline")))
    both = distillation(taught, tmp_path / "both", "offline", students={"other": wide})
    run = tw.distill(both)
    held = weights(run)
    for name, value in alone.items():
        np.testing.assert_allclose(held[f"students.student.{name}"], value, rtol=1e-5, atol=1e-5, err_msg=name)
    (judged,) = told(tmp_path / "both", "student-offline", events.Evaluated)[-1:]
    metrics: Any = judged.metrics  # type: ignore[attr-defined]
    for name, student in run.students.items():
        assert metrics[f"{name}/accuracy"] == pytest.approx(student.evaluate(here=True)["accuracy"], abs=1e-12)
    other = {name.removeprefix("students.other."): value for name, value in held.items() if ".other." in name}
    assert {name: value.tolist() for name, value in run.students["other"].load_model().state_dict().items()} == {
        name: value.tolist() for name, value in other.items()
    }
    verdict = run.verdict
    assert verdict is not None and verdict.step == len(run.history)
    for name in ("student", "other"):
        mark = verdict.mark(name)
        assert mark.scores["top-1"] == pytest.approx(metrics[f"{name}/accuracy"], abs=1e-12)
        assert mark.metrics["accuracy"] == mark.scores["top-1"] and mark.parameters
    assert verdict.mark("big").scores["top-1"] > verdict.mark("student").scores["top-1"]
    assert "Students compared with their teachers" in Path(run.report).read_text()
    again = tw.students(both)["student"]
    assert again.export(str(tmp_path / "small.safetensors")).endswith("small.safetensors")
    assert load_file(tmp_path / "small.safetensors").keys() == alone.keys()
    said = again.predict(to=str(tmp_path / "said"), workers=1).dataset()
    assert said.read(said.index(), range(torch_jobs.ROWS))["output"].shape == (torch_jobs.ROWS, torch_jobs.CLASSES)


def test_layers_that_are_matched_come_beside_in_every_way(taught: tw.Teacher, tmp_path: Path) -> None:
    """The student's 4 numbers are mapped to the teacher's 48."""
    soft = tw.SoftLoss(matches=(tw.Match(student="1", teacher="1", weight=2.0),))
    ways = [weights(tw.distill(distillation(taught, tmp_path, way, loss=soft))) for way in ("offline", "inline")]
    assert any("bridges" in name for name in ways[0])
    for name, value in ways[0].items():
        np.testing.assert_allclose(ways[1][name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"keep": "fp8"}, "keep"),
        ({"students": {"student": wide}}, "rename it"),
        ({"way": "online", "cpus": 0}, "cpus=0"),
        ({"temprature": 2}, "not a field of Distillation"),
    ],
)
def test_wrong_fields_are_told(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    student = job(tmp_path, "wrong", narrow)
    with pytest.raises(JobError, match=why):
        tw.Distillation(**{"student": student, "teachers": (), "mutual": True, **fields})


def test_what_does_not_go_together_is_told_before_anything_is_computed(taught: tw.Teacher, tmp_path: Path) -> None:
    lone = tw.Distillation(student=job(tmp_path, "lone", narrow))
    with pytest.raises(JobError, match="has no teacher"):
        tw.distill(lone)
    assert not any(tmp_path.iterdir())
