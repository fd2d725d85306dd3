"""Recipes of several stages, and teachers that are trained first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.support import processes, torch_jobs
from tests.support.distillation_jobs import adam, cross_entropy, job, narrow, wide
from tests.support.finished_runs import log_entries
from trainwright.core.errors import JobError, RunFinished, UserCodeError
from trainwright.distillation.distillation_job import compose_job
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import Owner, RunLog

UNLABELLED = tw.datasets.table({"x": np.random.default_rng(3).normal(size=(160, torch_jobs.WIDTH)).astype(np.float32)})


@dataclass(frozen=True)
class Meeting:
    """A loss that waits until another is computed too, and until both may go on."""

    folder: str
    name: str

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        marks = Path(self.folder)
        (marks / f"{self.name}.here").touch()
        processes.wait_for(lambda: met(marks) and (marks / "go").exists(), deadline_s=90)
        return cross_entropy(outputs, targets)


def met(folder: Path) -> bool:
    return len([*folder.glob("*.here")]) == 2


def teacher(folder: Path, name: str, model: Callable[[], nn.Module] = wide, **fields: Any) -> tw.Teacher:
    alone = {"workers": 1, "strategy": None, "evaluate": None, "metrics": {}, "epochs": 1}
    return tw.Teacher(name=name, train=True, job=job(folder, name, model, **{**alone, **fields}))


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def breaking(mark: str) -> Callable[[Any, Any], Any]:
    """A metric that fails while the mark is there."""

    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if Path(mark).exists():
            raise RuntimeError("broken")
        return outputs.argmax(1) == targets

    return metric


def drivers(folder: Path, run: str) -> int:
    return sum(entry.kind == "acquire" for entry in log_entries(open_store(str(folder)), run))


def state(run_job: tw.Job) -> dict[str, np.ndarray]:
    return {name: each.numpy() for name, each in tw.load_model(run_job).state_dict().items()}


def two_stages(folder: Path) -> tw.TwoStage:
    """Of two teachers that train at the same time, and one that waits; the second stage learns nothing."""
    pair = [teacher(folder, name, loss=Meeting(str(folder), name)) for name in ("a", "b")]
    third = teacher(folder, "third", workers=2)
    metric = breaking(str(folder / "broken"))
    student = job(folder, "student", narrow, optimizer=still, metrics={"accuracy": metric}, epochs=1)
    taught = tw.Distillation(student=student, teachers=(*pair, third), loss=tw.SoftLoss(alpha=0.3), way="inline")
    return tw.TwoStage(distillation=taught, unlabelled=UNLABELLED, fields={"optimizer": adam, "epochs": 2})


def finished_before(folder: Path, runs: tuple[str, ...]) -> None:
    """Runs of these names, of other jobs."""
    for run in runs:
        log = RunLog(open_store(str(folder)), run)
        log.release(log.acquire(Owner.here(), {"model": "another one"}).token, "done")


@pytest.mark.soak
def test_two_stages_go_on_where_they_were(tmp_path: Path, ray_cluster: None) -> None:
    """Of which there are older runs, which fresh=True deletes. The driver is killed while two teachers train, before
    either stage began, and the second stage fails once."""
    finished_before(tmp_path, two_stages(tmp_path).runs)
    program = (
        "import pathlib, tests.ray.test_recipes as t; "
        f"t.tw.distill(t.two_stages(pathlib.Path({str(tmp_path)!r})), fresh=True)"
    )
    with processes.python("-c", program, cluster=processes.address()) as driver:
        processes.wait_until(lambda: met(tmp_path), driver)
        processes.kill(driver)
    (tmp_path / "go").touch()
    (tmp_path / "broken").touch()
    recipe = two_stages(tmp_path)
    assert recipe.runs == ("student-unlabelled", "student")
    with pytest.raises(UserCodeError, match="broken"):
        tw.distill(recipe)
    (tmp_path / "broken").unlink()
    run = tw.distill(recipe)
    assert run.state == "done" and run.job.name == "student"
    counted = {name: drivers(tmp_path, name) for name in ("a", "b", "third", *recipe.runs)}
    assert counted == {"a": 2, "b": 2, "third": 1, "student-unlabelled": 1, "student": 2}
    student = recipe.distillation.student
    killed, _, unbroken = (state(each.job) for each in recipe.distillation.teachers)
    for name, value in unbroken.items():
        np.testing.assert_allclose(killed[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    first, last = state(student.replace(name="student-unlabelled")), state(student)
    for name, value in first.items():
        np.testing.assert_array_equal(value, last[name], err_msg=name)
    with pytest.raises(RunFinished, match="'student' is finished"):
        tw.distill(recipe)


def test_each_generation_is_taught_by_the_one_before(tmp_path: Path, ray_cluster: None) -> None:
    """With a layer matched, so that the runs hold more than the model."""
    own = {"workers": 1, "strategy": None, "evaluate": None, "metrics": {}, "epochs": 1}
    student = job(tmp_path, "born-again", narrow, **own)
    soft = tw.SoftLoss(alpha=0.3, matches=(tw.Match(student="1", teacher="1"),))
    taught = tw.Distillation(student=student, loss=soft, way="offline", keep="fp32")
    recipe = tw.SelfDistillation(distillation=taught, generations=2)
    tw.distill(recipe)
    first, second, third = recipe.stages()
    assert isinstance(first, tw.Job) and isinstance(second, tw.Distillation) and isinstance(third, tw.Distillation)
    assert [each.training.seed for each in (first, second.student, third.student)] == [5, 6, 7]
    last = tw.load_model(compose_job(third).job).students["student"].state_dict()
    for name, value in tw.students(recipe)["student"].load_model().state_dict().items():
        torch.testing.assert_close(value, last[name], rtol=0, atol=0)
    models = {
        "generation-0": tw.load_model(first),
        "generation-1": tw.load_model(compose_job(second).job).students["student"],
    }
    assert len([*(tmp_path / "targets").glob("generation-*")]) == len(models)
    for name, model in models.items():
        (folder,) = (tmp_path / "targets").glob(f"{name}-*")
        said = np.stack(pq.read_table(folder)["output"].to_pylist())
        expected = model(torch.from_numpy(torch_jobs.data()["x"])).detach().numpy()
        np.testing.assert_allclose(said, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"unlabelled": "data"}, "unlabelled= is not a data set"),
        ({"first": tw.SoftLoss(alpha=0.5)}, "use alpha=0"),
        ({"fields": {"name": "other", "epochs": 2}}, "fields= sets name"),
        ({"fields": {"epoch": 2}}, "did you mean 'epochs'"),
        ({"stages": 3}, "not a field of TwoStage"),
    ],
)
def test_wrong_recipes_are_told(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    taught = tw.Distillation(student=job(tmp_path, "wrong", narrow), teachers=(teacher(tmp_path, "a"),))
    with pytest.raises(JobError, match=why):
        tw.TwoStage(**{"distillation": taught, "unlabelled": UNLABELLED, **fields})


def test_what_has_no_place_in_a_recipe_is_told(tmp_path: Path) -> None:
    student = job(tmp_path, "wrong", narrow)
    with pytest.raises(JobError, match="has no teachers="):
        tw.TwoStage(distillation=tw.Distillation(student=student), unlabelled=UNLABELLED)
    taught = tw.Distillation(student=student, teachers=(teacher(tmp_path, "a"),), students={"other": wide})
    with pytest.raises(JobError, match="has students=: the only teacher is the model itself"):
        tw.SelfDistillation(distillation=taught)
    with pytest.raises(JobError, match="train=True is for job="):
        tw.Teacher(name="big", model=wide, inputs="x", train=True)
